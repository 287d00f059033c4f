"""Small models that RigL keeps sparse, and the training loop that users write."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla import RigLScheduler
from xla_replica import LocalReplica

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=1e-3),
    "sgd-nesterov": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "sgd-plain": lambda ps: torch.optim.SGD(ps, 0.1),
    "sgd-foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "adam-fused": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.05),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
}


def convnet(seed: int = 0) -> nn.Module:
    """Returns a model of images ``(B, 1, 8, 8)``; weights 0, 2, 5, 7 can be sparse."""
    with LocalReplica("cpu").seeded(seed):  # emulated replicas share a generator
        convolutions = nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 16, 3), nn.Tanh()
        linears = nn.Linear(256, 16), nn.Tanh(), nn.Linear(16, 10)
    return nn.Sequential(*convolutions, nn.Flatten(), *linears)


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images and labels of a step, always the same."""
    draw = torch.Generator().manual_seed(1000 + step)
    images = torch.randn(size, 1, 8, 8, generator=draw)
    return images, torch.randint(0, 10, (size,), generator=draw)


def backward(model: nn.Module, step: int, factor: float = 1.0) -> torch.Tensor:
    """Runs the backward pass of a step, and returns its loss times ``factor``."""
    images, labels = batch(step)
    loss = F.cross_entropy(model(images), labels) * factor
    loss.backward()
    return loss


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pruner: RigLScheduler,
    steps: range,
    backward: Callable[[nn.Module, int], Any] = backward,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        if pruner():
            optimizer.step()


def for_each(rank: int, run: Callable[..., Any], given: list[tuple]) -> list[Any]:
    """Returns what a run on this replica returns for each of these arguments."""
    return [run(rank, *each) for each in given]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](model.parameters())


def pruned(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options):
    """Returns a pruner of 80 %, with updates at 3, 6, 9 and 12; default: under SGD."""
    optimizer = sgd(model) if optimizer is None else optimizer
    defaults = {"dense_allocation": 0.2, "T_end": 14, "delta": 3}
    options = {**defaults, "ignore_linear_layers": False, **options}
    return RigLScheduler(model, optimizer, **options)


def sparse_convnet(kind="sgd", **options) -> tuple[nn.Module, Any, RigLScheduler]:
    """Returns a `convnet`, its optimizer of `OPTIMIZERS`, and their pruner."""
    model = convnet()
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, pruned(model, optimizer, **options)


def through_a_file(parts: Any, weights_only: bool = True) -> Any:
    torch.save(parts, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def inactive_are_zero(pruner: RigLScheduler) -> bool:
    """Returns whether inactive weights, and their optimizer state, are all zero."""
    for name, mask in pruner.masks.items():
        weight = pruner.model.get_parameter(name)
        kept = kept_of(pruner.optimizer.state.get(weight, {}), mask)
        if any(tensor[~mask].any() for tensor in [weight, *kept]):
            return False
    return True


def kept_of(state: dict[str, Any], mask: torch.Tensor) -> list[torch.Tensor]:
    """Returns what an optimizer's state of a weight has for each number of it."""
    return [v for v in state.values() if torch.is_tensor(v) and v.shape == mask.shape]


def counts(pruner: RigLScheduler) -> list[int]:
    """Returns active connections of every sparse layer, by the masks."""
    return [int(mask.sum()) for mask in pruner.masks.values()]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and same([*one.values()], [other[n] for n in one])


def same(some: Any, others: Any) -> bool:
    """Returns whether nested sequences of tensors are equal bit for bit."""
    if torch.is_tensor(some):
        return torch.equal(some, others)
    return len(some) == len(others) and all(map(same, some, others))
