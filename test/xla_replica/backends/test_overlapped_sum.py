"""Gradients are summed during the backward pass, which only the time can tell.

All gradients are integers, so that no sum is rounded, and runs are equal bit for bit.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.kernels import Kernels
from support.xla_replica.replicas import Backend, backends, of_torch_alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
import xla_replica
from xla_replica.backends import overlapped_sum

SHAPES = [(4, 3), (5,), (), (2, 3, 2, 2), (7,), (3, 3)]
ELASTIC = (6, 2, 18, 12, 4, 10, 2, 6)
ALL_BUSY = (10, 20, 16, 10, 20, 10)


@dataclasses.dataclass
class Loop:
    """What a scenario may look at and change."""

    parameters: list[nn.Parameter]
    optimizer: vbs.ElasticOptimizer
    num_updates: int = 0
    begins_step: bool = True
    seen: list[Any] = dataclasses.field(default_factory=list)

    def loss(self, x: torch.Tensor, used: list[int] | None = None) -> torch.Tensor:
        """Returns one whose gradients are small integers, and depend on everything."""
        total = torch.zeros(())
        for index in range(len(self.parameters)) if used is None else used:
            parameter = self.parameters[index]
            factors = (parameter.detach() * 16).round() % 5 + (index + 1) * x
            total = total + (factors * parameter).sum().float()
        return total


def zero(loop: Loop) -> None:
    for parameter in loop.parameters:
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
        parameter.grad = None if loop.num_updates % 2 else zeros


def freeze_two(loop: Loop) -> None:
    loop.parameters[1].requires_grad_(loop.num_updates not in (2, 3))
    loop.parameters[5].requires_grad_(loop.num_updates % 2 == 0)


def by_hand(loop: Loop, x: torch.Tensor) -> None:
    """Every other step has gradients that no backward pass has made."""
    if loop.num_updates % 2:
        loop.loss(x).backward()
        return
    for parameter in loop.parameters:
        more = torch.full_like(parameter, float(x))
        parameter.grad = more if loop.begins_step else parameter.grad.add_(more)


def sparse(loop: Loop, x: torch.Tensor) -> None:
    rows = F.embedding(torch.tensor([1, 3, 1]), loop.parameters[0], sparse=True)
    (loop.loss(x, [1, 2, 3, 4, 5]) + (x + 1) * rows.sum()).backward()


def freeze_some(loop: Loop, update: vbs.Update) -> None:
    for index, parameter in enumerate(loop.parameters):
        parameter.requires_grad_((update.step + index) % 4 != 0)


def add_a_group(loop: Loop, update: vbs.Update) -> None:
    if update.step == 2:
        loop.parameters.append(nn.Parameter(torch.zeros(3)))
        loop.optimizer.add_param_group({"params": loop.parameters[-1:]})


def look_at_gradients(loop: Loop) -> None:
    """A gradient hook changes them; hooks after the accumulation look at them."""
    loop.parameters[3].register_hook(lambda gradient: 2 * gradient)
    for index in (1, 3, 5):
        loop.parameters[index].register_post_accumulate_grad_hook(
            lambda parameter: loop.seen.append(parameter.grad.clone())
        )


def fail_in_the_third(loop: Loop, update: vbs.Update) -> None:
    """The update fails before the sum, and on every replica."""
    if update.step == 1:
        factors = itertools.chain([OverflowError], itertools.repeat(1.0))
        loop.optimizer.rule.lr_factor.side_effect = factors


ORDER = [3, 0, 5, 2, 4, 1]
DIFFERS = {"passes": lambda which: [[i for i in range(6) if (i + which) % 3]]}
# The arguments of `train`.
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no idle replicas": {"trace": ALL_BUSY},
    "clipped": {"max_grad_norm": 0.5},
    "adascale": {"rule": "adascale", "ref_batchsize": 4},
    "token weights": {"weighted": True, "reduction": "sum"},
    "several dtypes": {"dtypes": "float64 bfloat16 float16 float32"},
    "bfloat16": {"dtypes": "bfloat16"},
    "differs": DIFFERS,
    "differs, no idle replicas": {**DIFFERS, "trace": ALL_BUSY},
    "one by one": {"passes": lambda _: [[3], [1], [3], [0], [5], [1]]},
    # Each parameter is still in one of them only.
    "in two parts": {"passes": lambda _: [[0, 2, 4], [5, 3, 1]]},
    "other order": {"passes": lambda which: [sorted(ORDER) if which % 2 else ORDER]},
    "zeroed before": {"before_step": zero},
    "freezes in the loop": {"before_step": freeze_two, "trace": ALL_BUSY},
    "by hand": {"backward": by_hand},
    "sparse": {"backward": sparse},
    "an update fails": {
        "rule": vbs.Rule("fails", mock.Mock(return_value=1.0), needs_reference=False),
        "after_update": fail_in_the_third,
        "trace": ALL_BUSY,
    },
    "freezes after updates": {"after_update": freeze_some},
    "hooks": {"prepare": look_at_gradients},
    "hooks, no idle replicas": {"prepare": look_at_gradients, "trace": ALL_BUSY},
    "a group more": {"after_update": add_a_group},
}


def train(
    overlap: bool,
    passes: Callable[[int], list[list[int] | None]] = lambda which: [None],
    backward: Callable[[Loop, torch.Tensor], None] | None = None,
    prepare: Callable[[Loop], None] = lambda loop: None,
    before_step: Callable[[Loop], None] = lambda loop: None,
    after_update: Callable[[Loop, vbs.Update], None] = lambda loop, update: None,
    trace: tuple[int, ...] = ELASTIC,
    dtypes: str = "float32",
    weighted: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns weights after every update and what hooks have seen."""
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
        for shape, dtype in zip(SHAPES, dtypes.split() * len(SHAPES))
    ]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    cycles = {"on_end": "cycle", "verbose": False}
    sampler = vbs.CustomSampler(range(80), trace, minibatch_size=2, **cycles)
    inner = torch.optim.SGD(parameters, 2**-4, momentum=0.5)
    options = {"rule": "constant", **options, "overlap": overlap}
    optimizer = vbs.ElasticOptimizer(inner, sampler, **options)
    loop, weights = Loop(parameters, optimizer), []

    def after(update: vbs.Update) -> None:
        loop.num_updates += 1
        weights.extend(p.detach().clone() for p in loop.parameters)
        after_update(loop, update)

    optimizer.attach(after)
    prepare(loop)
    optimizer.set_epoch(0)
    for samples in sampler:
        if loop.begins_step:
            before_step(loop)
        x = torch.tensor(float(sum(samples) % 3))
        if backward is not None:
            backward(loop, x)
        else:
            for used in passes(loop.num_updates + xla_replica.current().rank):
                loop.loss(x, used).backward()
        weight = {"weight": 1 + samples[0] % 3} if weighted else {}
        with contextlib.suppress(OverflowError):
            loop.begins_step = optimizer.step(**weight) > 0
    return weights, loop.seen


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def both_ways(rank: int) -> dict[str, tuple[bool, bool, bool]]:
    """Returns by scenario whether weights and what hooks see are equal, and move."""
    overlapped_sum.FIRST_BUCKET_BYTES = 8
    overlapped_sum.BUCKET_BYTES = 60
    found = {}
    for name, scenario in SCENARIOS.items():
        (now, saw), (before, had_seen) = (train(o, **scenario) for o in (True, False))
        last = before[-6 if len(before) % 6 == 0 else -7]
        moved = not torch.equal(before[0], last)
        found[name] = equal(now, before), equal(saw, had_seen), moved
    return found


@pytest.fixture(scope="module", params=backends("cpu", 2, slow=(3, 5)))
def outcomes(request):
    return request.param.run(both_ways)


@of_torch_alone
@pytest.mark.parametrize("name", SCENARIOS)
def test_weights_are_those_without_overlap(outcomes, name):
    assert {outcome[name] for outcome in outcomes} == {(True, True, True)}


def small_model(width: int = 32) -> tuple[nn.Module, torch.optim.Optimizer]:
    with xla_replica.current().seeded(0):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)


def comes_too_late(rank: int, wrong: str, message: str) -> None:
    """Asserts what the wrapper says, in most cases after two steps."""
    overlapped_sum.FIRST_BUCKET_BYTES = overlapped_sum.BUCKET_BYTES = 8
    model, inner = small_model(3)
    sampler = vbs.CustomSampler(range(32), 8, minibatch_size=4, verbose=False)
    optimizer = vbs.ConstantOptimizer(inner, sampler)
    optimizer.set_epoch(0)
    minibatches = iter(sampler)

    def step(also: Callable[[], None] = lambda: None) -> None:
        next(minibatches)
        backward()
        also()
        optimizer.step()

    def backward() -> None:
        model(torch.ones(1, 3)).sum().backward()

    if wrong == "moved":
        model.to("cpu:0")  # to torch not "cpu", so gradients are copied
    else:
        step()
        step()
    with pytest.raises(ValueError, match=message):
        step(backward if wrong == "again" else model.zero_grad)


@pytest.mark.parametrize(("wrong", "message"), [
    ("again", "accumulated twice in the last minibatch.* overlap=False"),
    ("thrown away", "while it is summed over replicas.* overlap=False"),
    ("moved", "was given other memory.* optimizer is built"),
])  # fmt: skip
def test_what_comes_too_late_for_a_sum_is_an_error(wrong, message):
    Backend("cpu", 2).run(comes_too_late, wrong, message)


def counts(rank: int, substeps: int) -> tuple[dict, dict, list[tuple[str, int]]]:
    """Returns what a step writes here and under DDP, without the optimizer's work."""
    overlapped_sum.FIRST_BUCKET_BYTES = overlapped_sum.BUCKET_BYTES = 5000
    x, (model, inner), (of_ddp, plain) = torch.ones(4, 32), small_model(), small_model()
    kernels, of_plain, data = Kernels(inner), Kernels(plain), range(64 * substeps)
    sampler = vbs.CustomSampler(data, 2 * substeps, minibatch_size=1, verbose=False)
    optimizer = vbs.ConstantOptimizer(inner, sampler)
    all_reduce, sums, where = torch.distributed.all_reduce, [], "backward"

    def noted(tensor: torch.Tensor, *args, **kwargs):
        sums.append((where, tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(torch.distributed, "all_reduce", noted):
        for index, _ in zip(range(4 * substeps), sampler):
            if index == 3 * substeps:
                sums.clear()
                kernels.clear()
            with kernels:
                model(x).sum().backward()
                where = "step"
                optimizer.step()
                where = "backward"
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 5000 / 2**20}
    ddp = DistributedDataParallel(of_ddp, **options)
    for _ in range(4):
        of_plain.clear()
        with of_plain:
            with ddp.no_sync():
                for _ in range(substeps - 1):
                    ddp(x).sum().backward()
            ddp(x).sum().backward()
            plain.step()
            plain.zero_grad()
    return dict(kernels.written), dict(of_plain.written), sums


@of_torch_alone
@pytest.mark.parametrize("substeps", [1, 3])
def test_no_gradient_is_copied_more_often_than_ddp_does(substeps):
    """A divisor of two costs nothing; six is not a power of two: the sum is divided."""
    several = 4 * (32 * 32 + 32) if substeps == 3 else 0  # gradients
    more = {"copy_": several, "mul": -several, "_foreach_div_": several}
    for written, expected, sums in Backend("cpu", 2).run(counts, substeps):
        for name in ("mm", "mul", "copy_", "add_", "div_", "_foreach_div_"):
            few = written.get(name, 0) - expected.get(name, 0) - more.get(name, 0)
            assert 0 <= few < 10, name
        assert sums == [("backward", 2112), ("step", 2112 + overlapped_sum.TAIL)]
