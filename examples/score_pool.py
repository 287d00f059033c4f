"""How large is the gradient of every example of a pool? Four ways, side by side.

    python examples/score_pool.py
    python examples/score_pool.py --pool 2000 --batch-size 50 --layer conv2

The question is an old one from a forum: a trained model, a large pool of unseen
examples, and the size of one layer's gradient wanted for each. Its two answers are
here, and this package's; all four compute the same numbers.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import per_sample_grad as psg

Norms = Callable[[nn.Module, str, torch.Tensor, torch.Tensor], torch.Tensor]


class Network(nn.Module):
    """Two convolutions and a Linear, on images of 10 by 10."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(10, 20, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(20 * 5 * 5, num_classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv2(self.conv1(x)).flatten(1))


def loop(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """One backward pass per example."""
    weight = model.get_submodule(layer).weight
    norms = []
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        norms.append(torch.autograd.grad(loss, [weight])[0].norm())
    return torch.stack(norms)


class Replicated(nn.Module):
    """A copy of a layer for each example."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.split(1)
        return torch.cat([own(row) for own, row in zip(self.copies, rows)])


def replicated_layers(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """One backward pass through as many copies of the layer as there are examples."""
    model = copy.deepcopy(model)
    replicas = Replicated(model.get_submodule(layer), len(x))
    setattr(model, layer, replicas)
    losses = F.cross_entropy(model(x), y, reduction="none")
    grads = torch.autograd.grad(losses.sum(), [own.weight for own in replicas.copies])
    return torch.stack([one.norm() for one in grads])


def vectorised(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """``vmap(grad(...))``."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    own = {f"{layer}.weight": params.pop(f"{layer}.weight")}

    def loss(
        own: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        out = functional_call(model, {**params, **own}, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    (grads,) = vmap(grad(loss), (None, 0, 0))(own, x, y).values()
    return grads.flatten(1).norm(dim=1)


def ours(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """One forward and one backward pass; no gradient of a weight."""
    with psg.capture(model, [f"{layer}.weight"]) as recorded:
        losses = F.cross_entropy(model(x), y, reduction="none")
    return recorded.backward(losses).norms()


WAYS: dict[str, Norms] = {
    "loop": loop,
    "replicated layers": replicated_layers,
    "vmap(grad)": vectorised,
    "per_sample_grad": ours,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", type=int, default=1000, help="examples")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--layer", choices=["conv1", "conv2", "fc"], default="conv2")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Network()
    x = torch.rand(options.pool, 3, 10, 10)
    y = torch.randint(0, 10, (options.pool,))
    found = {}
    for name, norms in WAYS.items():
        norms(model, options.layer, x[:2], y[:2])  # warm up
        begin = time.perf_counter()
        batches = zip(x.split(options.batch_size), y.split(options.batch_size))
        found[name] = torch.cat(
            [norms(model, options.layer, *batch).detach() for batch in batches]
        )
        seconds = time.perf_counter() - begin
        difference = (found[name] - found["loop"]).abs().max()
        print(f"{name:<18} {seconds:8.3f} s   largest difference {difference:.1e}")
    scores = psg.score_pool(
        model, TensorDataset(x, y), batch_size=options.batch_size, score="grad_norm"
    )
    print("largest gradients of the whole model:", scores.top(5).tolist())


if __name__ == "__main__":
    main()
