"""What is chosen for a run where its optimizer is wrapped, and what its parts share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, TypedDict

import torch
from torch.optim import Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.device_scalars import DeviceScalars
from variable_batch_size.gradient_noise.meter import NoiseMeter, NoiseOptions
from variable_batch_size.rules.rule import Rule
from xla_replica import Replica

Reduction = Literal["mean", "sum"]


class ElasticOptions(TypedDict, total=False):
    """The options of `ElasticOptimizer` that every wrapper has, for type checkers."""

    reduction: Reduction
    ref_weight: float | None
    max_grad_norm: float | None
    momentum_correction: bool
    decay_per_sample: bool
    noise: NoiseOptions | bool
    overlap: bool
    lockstep: bool
    float32_sums: bool
    exact: torch.nn.Module | None
    replica: Replica | None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a wrapper; see the arguments of `ElasticOptimizer`."""

    rule: Rule
    ref_batchsize: int | None
    ref_weight: float | None
    reduction: str
    log_steps: int | None
    max_grad_norm: float | None
    overlap: bool
    lockstep: bool
    float32_sums: bool
    exact: Any  # a `variable_batch_size.live.exact.ExactModel`, or None

    def options(self) -> dict[str, Any]:
        """Returns what replicas have in common, and a run with one that it resumes."""
        return {
            "momentum_correction": self.rule.momentum_correction,
            "decay_per_sample": self.rule.decay_per_sample,
            "ref_batchsize": self.ref_batchsize,
            "reduction": self.reduction,
            "ref_weight": self.ref_weight,
            "max_grad_norm": self.max_grad_norm,
            "float32_sums": self.float32_sums,
            "exact": self.exact is not None,
            **(self.exact.environment() if self.exact else {}),
        }


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What the parts of an update share.

    Attributes:
        inner: The optimizer that is wrapped.
        sampler: The sampler that feeds the replica.
        replica: The replica that the caller runs in.
        settings: Those of the wrapper.
        scalars: Where numbers that change are kept on the device.
        noise: Measures the gradients, or does not exist.
        sharded: Whether parameters are sharded, so that plans have padding in place of
            idle steps.
    """

    inner: Optimizer
    sampler: CustomSampler
    replica: Replica
    settings: Settings
    scalars: DeviceScalars
    noise: NoiseMeter | None
    sharded: bool

    @functools.cached_property
    def exact(self) -> Any:
        """That of the settings."""
        return self.settings.exact

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters of all groups, frozen ones too."""
        return [p for group in self.inner.param_groups for p in group["params"]]
