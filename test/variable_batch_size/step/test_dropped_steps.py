"""What is attached forgets the minibatches of a step that is run again."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import row
from torch import nn

import variable_batch_size as vbs
import xla_replica

TRACE = [8, 4, 16, 4]


def train(rank: int):
    """Returns the losses that were logged."""
    del rank
    replica, lines, updates = xla_replica.current(), [], []
    model = nn.Linear(1, 1, bias=False).to(replica.device)
    nn.init.ones_(model.weight)
    sampler = vbs.CustomSampler(range(32), TRACE, minibatch_size=4, verbose=False)
    inner = torch.optim.SGD(model.parameters(), 0.0)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 8, exact=model)
    sinks = [lambda line, step: lines.append(line["loss"])]
    log = vbs.RunLog(None, optimizer, log_steps=3, sinks=sinks)
    for target in (log, updates.append):
        optimizer.attach(target)
    sampler.set_epoch(0)
    optimizer.set_epoch(0)
    for rows in sampler:
        # The loss of a step: 1, 1, 100 and 1.
        scale = 100.0 if len(updates) == 2 else 1.0
        loss = model(replica.send(torch.full((len(rows), 1), scale))).mean()
        xla_replica.backward(loss)
        log.add(loss)
        optimizer.step()
    replica.barrier()
    return lines


@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 3), row("xla", 2)])
def test_losses_of_steps_that_are_run_again_count_once(backend):
    # Run again: the first step, which has no units yet, and the third.
    primary, *others = backend.run(train)
    assert primary == pytest.approx([1.0, (1 * 1 + 4 * 100 + 1 * 1) / 6])
    assert others == [[]] * len(others)
