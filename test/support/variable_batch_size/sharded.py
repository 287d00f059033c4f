"""A run of a model that processes share, as a user writes it."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case

# Steps of 1 to 9 minibatches.
TRACE = (4, 36, 8, 4, 12, 32, 20, 4)
HEAD_LR = 0.03


class Run(NamedTuple):
    case: Case
    options: tuple[tuple[str, Any], ...] = ()
    has_whole_part: bool = False
    has_batch_norm: bool = False
    on_device: bool = False  # pretends that numbers must not be read
    exact: bool = False
    computes_in: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.exact else torch.float64


class Model(nn.Module):
    """A model whose dimensions two, three and four processes share unevenly.

    Args:
        run: The run that it is for.
        shape: Of the mesh of processes that shard it; None for a whole model.
    """

    def __init__(self, run: Run, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))
        if run.has_batch_norm:
            self.body.append(nn.BatchNorm1d(7))
        self.head = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.to(run.dtype)
        if shape is None:
            return
        names = ("copies", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        keeps_sums = run.exact and (len(shape) > 1 or run.options)
        reduce_dtype = torch.float64 if keeps_sums else None
        policy = MixedPrecisionPolicy(run.computes_in, reduce_dtype)
        for module in (self.body[2], self.body if run.has_whole_part else self):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def groups(self) -> list[dict[str, Any]]:
        head = [*self.head.parameters(), self.unused]
        return [{"params": [*self.body.parameters()]}, {"params": head, "lr": HEAD_LR}]


def data(
    case: Case, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(case.num_samples, 6, generator=generator).to(dtype)
    return inputs, torch.randint(0, 3, (case.num_samples,), generator=generator)


def whole(tensors: Any) -> list[torch.Tensor]:
    return [getattr(t.detach(), "full_tensor", t.detach)().clone() for t in tensors]


class Training(elastic.Training):
    """A run as a user writes it, on the replica that it runs in.

    Attributes:
        counted: ``(step, *samples)`` of every minibatch that is not padding.
    """

    def __init__(self, run: Run, shape: tuple[int, ...] | None = None) -> None:
        options = dict(run.options)
        self.is_sum = options.get("reduction") == "sum"
        if self.is_sum:
            options["ref_batchsize"] = None
        made = (Model(run, shape), *data(run.case, run.dtype))
        if run.exact:
            options["exact"] = made[0]
        super().__init__(run.case, made=made, **options)
        self.counted: list[tuple[int, ...]] = []

    def minibatch(self, x: torch.Tensor, y: torch.Tensor) -> int:
        if self.samples and not self.optimizer.is_padding:
            self.counted.append((self.step, *self.samples[-1][-1]))
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        if self.is_sum:
            counts = y > 0
            (losses * counts).sum().backward()
            return self.optimizer.step(weight=counts.sum())
        losses.mean().backward()
        return self.optimizer.step()
