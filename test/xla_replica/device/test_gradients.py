"""xla_replica.grad returns what torch.autograd.grad does, and nothing else keeps it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from support.xla_replica.replicas import needs_xla, row

import xla_replica


def same_gradients(rank: int) -> bool:
    device = xla_replica.current().device
    x = torch.arange(1.0, 4.0, device=device).requires_grad_()
    unused = torch.zeros(2, device=device, requires_grad=True)

    def found(grad) -> list[torch.Tensor | None]:
        y = (x**3).sum()
        (first,) = grad(y, [x], create_graph=True)
        (second,) = grad(first, x, torch.ones_like(x), retain_graph=True)
        y = x.exp() + x.detach().requires_grad_()
        options = {"allow_unused": True, "is_grads_batched": True}
        rows = torch.eye(3, device=device)
        return [first.detach(), second, *grad(y, [x, unused], rows, **options)]

    ours, theirs = found(xla_replica.grad), found(torch.autograd.grad)
    assert [gradient is None for gradient in ours] == [False, False, False, True]
    assert theirs[3] is None
    return all(torch.equal(a, b) for a, b in zip(ours[:3], theirs))


@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 2)])
def test_it_returns_what_autograd_does(backend):
    assert all(backend.run(same_gradients))


def test_an_accumulation_hook_changes_what_is_added_and_nothing_else():
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(xla_replica.AccumulationHook(lambda gradient: 2 * gradient))
    assert xla_replica.AccumulationHook.all_on(weight)
    (found,) = xla_replica.grad((3 * weight).sum(), weight)
    assert found.tolist() == [3, 3]
    (3 * weight).sum().backward()
    assert weight.grad.tolist() == [6, 6]
    weight.register_hook(lambda gradient: gradient)
    assert not xla_replica.AccumulationHook.all_on(weight)


def live_tensors() -> int:
    import torch_xla.debug.metrics as metrics

    made, gone = (
        metrics.counter_value(f"{what}XlaTensor") or 0 for what in ("Create", "Destroy")
    )
    return made - gone


def slow_down_the_engine() -> int:
    """Gives the engine's threads the lowest priority and returns their number."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("pt_autograd"):
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
            found += 1
    return found


def kept_tensors(rank: int) -> set[int]:
    """Returns how many more lazy tensors live after passes with dropped gradients."""
    x = torch.arange(4.0, device=xla_replica.current().device).requires_grad_()
    xla_replica.grad(x.square().sum(), [x])
    assert slow_down_the_engine() == 1
    found = set()
    for _ in range(200):
        before = live_tensors()
        y = x.square().sum()
        xla_replica.grad(y, [x])
        del y
        found.add(live_tensors() - before)
        time.sleep(1e-3)
    return found


@needs_xla
@pytest.mark.parametrize("backend", [row("xla", 1)])
def test_the_engine_keeps_nothing_when_it_returns(backend):
    """It does after three of four calls of torch.autograd.grad."""
    assert backend.run(kept_tensors) == [{0}]
