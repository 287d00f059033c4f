"""Counts what the common operations pass through: our functions, torch's operations.

    python tools/size/count_calls.py
    python tools/size/count_calls.py --trace update      # and names them

Every Python function of the five packages that runs is counted once, lambdas and
generators too, as `sys.setprofile` reports it; so this counts what a reader has to
follow; calls are all of theirs. Operations, and the most bytes of memory, are those
that torch's profiler sees. None of them is a time, so that a test can hold them to
`LIMITS`. One replica on a CPU, with warm caches:

- ``minibatch``: backward pass and `step()` of a minibatch that only accumulates.
- ``update``: `step()` that updates the weights.
- ``adascale``: the same under AdaScale.
- ``norms``: `capture` and `norms()` of an MLP.
- ``grab``: `GraBSampler.record` and `backward`, at exact fidelity.
- ``order``: the first index of an epoch's order.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from tools.peak_memory import profiled
from tools.record import parser_with_output, row, save
from tools.size.count_lines import PACKAGES, ROOT

MINIBATCH, WIDTH = 4, 6
COUNTED = ("files", "functions", "calls", "operations", "bytes")
# The most of each, by the way.
LIMITS = {
    "minibatch": (7, 25, 43, 29, 48),
    "update": (8, 35, 43, 18, 12),
    "adascale": (14, 59, 72, 124, 70),
    "norms": (14, 57, 148, 134, 440),
    "grab": (22, 79, 205, 280, 1650),  # varies a little from run to run
    "order": (8, 24, 31, 53, 5480),
}


Run = Callable[[], Any]


class Passed(NamedTuple):
    """What ran of our packages.

    Attributes:
        files: Paths relative to the repository.
        functions: ``path:line name`` of every function.
        calls: How many calls there were.
    """

    files: tuple[str, ...]
    functions: tuple[str, ...]
    calls: int


def passed_by(run: Run) -> Passed:
    """Returns what of our packages runs in a call of ``run``, in this thread."""
    seen: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_code] = seen.get(frame.f_code, 0) + 1

    # A suspended generator runs when it is collected, whoever has left it.
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    ours = {}
    for code, number in seen.items():
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            relative = path.relative_to(ROOT)
            # The bodies of classes and comprehensions are not functions.
            if relative.parts[0] in PACKAGES and not _is_part(code):
                ours[f"{relative}:{code.co_firstlineno} {code.co_name}"] = number
    files = {name.partition(":")[0] for name in ours}
    return Passed(tuple(sorted(files)), tuple(sorted(ours)), sum(ours.values()))


def _is_part(code: CodeType) -> bool:
    """Returns whether code is a comprehension or generator within a function."""
    return code.co_name in {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def _elastic(rule: str = "linear") -> Iterable[tuple[Run, Run]]:
    """Yields, for every minibatch, its backward pass and its step."""
    model = nn.Linear(WIDTH, 1)
    replica = xla_replica.LocalReplica("cpu")
    sampler = vbs.CustomSampler(
        range(8 * MINIBATCH), [2 * MINIBATCH] * 4, minibatch_size=MINIBATCH,
        num_replicas=1, rank=0,
    )  # fmt: skip
    optimizer = vbs.ElasticOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), sampler, rule, MINIBATCH,
        replica=replica,
    )  # fmt: skip
    for indices in sampler:
        loss = model(torch.ones(len(indices), WIDTH)).mean()
        yield loss.backward, optimizer.step


def minibatch() -> Run:
    """Returns a minibatch that accumulates, the third step's first one."""
    for number, (backward, step) in enumerate(_elastic()):
        if number == 4:
            return lambda: (backward(), step())
        backward()
        step()
    raise AssertionError("the sampler deals eight minibatches")


def update(rule: str = "linear") -> Run:
    """Returns an update, that of the third step."""
    for number, (backward, step) in enumerate(_elastic(rule)):
        backward()
        if number == 5:
            return step
        step()
    raise AssertionError("the sampler deals eight minibatches")


def _mlp() -> nn.Module:
    """Returns a small model with two layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def norms() -> Run:
    """Returns a capture and its norms, the third one of the same structure."""
    model = _mlp()

    def run() -> None:
        with psg.capture(model) as recorded:
            losses = model(torch.randn(MINIBATCH, WIDTH)).square().sum(1)
        recorded.norms(losses)

    run()
    run()
    return run


def _balanced() -> tuple[grab_xla.GraBSampler, Callable[[list[int]], None]]:
    """Returns a sampler, and what a minibatch of an epoch does."""
    model = _mlp()
    data = torch.randn(8 * MINIBATCH, WIDTH)
    params = dict(model.named_parameters())
    sampler = grab_xla.GraBSampler(range(len(data)), params, "mean", fidelity="exact")

    def run(indices: list[int]) -> None:
        with sampler.record(model):
            losses = model(data[indices]).square().sum(1)
        sampler.backward(losses)

    return sampler, run


def _minibatches(sampler: grab_xla.GraBSampler) -> list[list[int]]:
    """Returns an epoch's indices, a list for every minibatch."""
    order = list(sampler)
    return [
        order[first : first + MINIBATCH] for first in range(0, len(order), MINIBATCH)
    ]


def grab() -> Run:
    """Returns a minibatch of the second epoch."""
    sampler, run = _balanced()
    for indices in _minibatches(sampler):
        run(indices)
    batches = _minibatches(sampler)
    run(batches[0])
    return lambda: run(batches[1])


def order() -> Run:
    """Returns what makes the second epoch's order."""
    sampler, run = _balanced()
    for indices in _minibatches(sampler):
        run(indices)
    return lambda: next(iter(sampler))


# Each prepares what can run once.
WAYS: dict[str, Callable[[], Run]] = {
    "minibatch": minibatch, "update": update,
    "adascale": functools.partial(update, "adascale"), "norms": norms, "grab": grab,
    "order": order,
}  # fmt: skip


def counts(name: str) -> tuple[Passed, tuple[int, ...]]:
    """Returns what a way passes through, and its numbers in the order of `COUNTED`."""
    passed, asked = passed_by(WAYS[name]()), profiled(WAYS[name]())
    return passed, (len(passed.files), len(passed.functions), passed.calls, *asked)


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--trace", choices=WAYS, help="also name every function of this one"
    )
    arguments = parser.parse_args()
    rows = []
    print(("{:12}" + "{:>12}" * len(COUNTED)).format("", *COUNTED))
    for name in WAYS:
        passed, numbers = counts(name)
        print(("{:12}" + "{:12}" * len(COUNTED)).format(name, *numbers))
        for what, number, most in zip(COUNTED, numbers, LIMITS[name]):
            rows.append(row(f"{name}: {what}", number, at_most=most))
        if name == arguments.trace:
            print("\n".join(f"    {function}" for function in passed.functions))
    save(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
