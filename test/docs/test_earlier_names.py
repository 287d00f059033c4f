"""Every name of the earlier variable_batch_size that is gone has a successor."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from support.documents import read

import variable_batch_size as vbs
import xla_replica

PAGE = "docs/migration/earlier_variable_batch_size.md"
TRACE = [64, 96, 96, 32, 128, 64, 32]
EPOCH = 1  # of 256 samples: its steps are 32, 128, 64 and 32


def successors() -> dict[str, list[str]]:
    """Returns the code of what the table says in place of each name."""
    table = read(PAGE).split("These names are gone.")[1]
    rows = re.findall(r"^\| `(.+?)`.*? \| (.+) \|$", table, re.MULTILINE)
    return {was: re.findall(r"`(.+?)`", now) for was, now in rows}


ROWS = successors()
# What the names meant: attributes and results at the beginning of the epoch, replica 1
# of 2. Those of None make something, which the table's code makes too.
MEANT = {
    "sampler.trace": TRACE,
    "sampler.dataset": 256,
    "sampler.minibatches_per_epoch": 8,
    "sampler.max_epoch": 2,
    "sampler.get_epoch_range(epoch)": (3, 7),
    "sampler.get_epochtrace(epoch)": [32, 128, 64, 32],
    "sampler.get_batch_assignments(epochtrace)": [[], [2, 4], [6], []],
    "optimizer.optimizer": None,
    "optimizer.epochtrace": [32, 128, 64, 32],
    "optimizer.divisors": [1, 4, 2, 1],
    "optimizer.schedule": [[], [2, 4], [6], []],
    "optimizer.step_index": 0,
    "optimizer.substep_index": None,
    "optimizer.adapt_lr()": None,
    "CustomOptimizer(inner, sampler, log_steps)": None,
    "CustomOptimizer(inner, sampler, log_steps, 'sum')": None,
    "LinearRuleOptimizer.F(lr, batchsize, ref_batchsize)": 0.1 * 96 / 128,
    "init_group(local_ordinal, cores_per_host)": (0, 1),
    "all_reduce_tensors(tensors, scale)": None,
    "all_reduce_tensors_mesh(tag, data, scale)": 6.0,
}


def names(trace=TRACE, num_replicas: int = 2) -> dict[str, object]:
    """Returns the variables of a script, some of them, on the last replica."""
    sampler = vbs.CustomSampler(
        range(256), trace, num_replicas=num_replicas, rank=num_replicas - 1,
        verbose=False,
    )  # fmt: skip
    sampler.set_epoch(EPOCH if num_replicas > 1 else 0)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1, momentum=0.5)
    return {
        "vbs": vbs, "xla_replica": xla_replica, "np": np, "sampler": sampler,
        "inner": inner, "epoch": EPOCH, "log_steps": 10, "lr": 0.1, "batchsize": 96,
        "ref_batchsize": 128, "tensors": [torch.ones(2)], "tensor": torch.ones(2),
        "scale": 2.0, "data": 3.0,
    }  # fmt: skip


def as_lists(value: object) -> object:
    """Returns a value with arrays as lists."""
    if isinstance(value, list):
        return [as_lists(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_every_name_is_listed():
    assert list(ROWS) == list(MEANT)


@pytest.mark.parametrize("was", MEANT)
def test_the_successor_means_the_same(was):
    [*_, code] = ROWS[was][:1] if was.startswith("all_reduce") else ROWS[was]
    # An optimizer is made on one replica, with which the sampler has to agree.
    found = names(num_replicas=1 if "ElasticOptimizer" in code else 2)
    if was in ("optimizer.optimizer", "optimizer.substep_index"):
        assert hasattr(vbs.ElasticOptimizer, "step")
        return
    value = eval(code, found)
    if MEANT[was] is not None:
        assert as_lists(value) == MEANT[was]


def test_the_sum_of_minibatches_is_the_linear_rule_inside_the_buffer():
    """Gradients of ones in steps of 2 and 3 minibatches: the buffer gets 2 and 3."""
    found = names([64, 96], num_replicas=1)
    code = ROWS["CustomOptimizer(inner, sampler, log_steps, 'sum')"][-1]
    optimizer = eval(code, found)
    [weight] = found["inner"].param_groups[0]["params"]
    for _ in found["sampler"]:
        weight.sum().backward()
        optimizer.step()
    assert weight.tolist() == pytest.approx([-0.1 * (2 + (0.5 * 2 + 3))] * 2)
