"""xla_replica.grad returns what torch.autograd.grad does, and nothing else keeps it."""

import os
import time
from pathlib import Path

import pytest
import torch
from support.xla_replica.replicas import row

import xla_replica


def same_gradients(rank: int) -> None:
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
    assert ours.pop() is theirs.pop() is None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 2)])
def test_it_returns_what_autograd_does(backend):
    backend.run(same_gradients)


def live_tensors() -> int:
    import torch_xla.debug.metrics as metrics

    made, gone = map(metrics.counter_value, ("CreateXlaTensor", "DestroyXlaTensor"))
    return made - (gone or 0)


def kept_tensors(rank: int) -> set[int]:
    """Returns how many more lazy tensors live after passes with dropped gradients."""
    x = torch.arange(4.0, device=xla_replica.current().device).requires_grad_()
    xla_replica.grad(x.square().sum(), [x])
    tasks = Path("/proc/self/task").iterdir()
    [engine] = (t for t in tasks if "pt_autograd" in (t / "comm").read_text())
    os.setpriority(os.PRIO_PROCESS, int(engine.name), 19)
    found = set()
    for _ in range(200):
        before = live_tensors()
        y = x.square().sum()
        xla_replica.grad(y, [x])
        del y
        found.add(live_tensors() - before)
        time.sleep(1e-3)
    return found


@pytest.mark.parametrize("backend", [row("xla", 1)])
def test_the_engine_keeps_nothing_when_it_returns(backend):
    """It does after three of four calls of torch.autograd.grad."""
    assert backend.run(kept_tensors) == [{0}]
