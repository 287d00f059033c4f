"""The choices that are made where an optimizer is wrapped, and what its parts share."""

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
from xla_replica.common.arguments import check_fields, check_type, checked


class ElasticOptions(TypedDict, total=False):
    """The options of `ElasticOptimizer` that every wrapper has, for type checkers."""

    reduction: Literal["mean", "sum"]
    ref_weight: float | None
    max_grad_norm: float | None
    momentum_correction: bool
    decay_per_sample: bool
    noise: NoiseOptions | bool
    overlap: bool
    lockstep: bool
    float32_sums: bool
    shard_gradients: bool
    exact: torch.nn.Module | None
    compare_every: int
    replica: Replica | None


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One wrapper's arguments, and what follows from them.

    The arguments are those of `ElasticOptimizer`; ``sums`` is a `Sums` made of
    ``exact``, and ``noise_options`` is the argument ``noise``.
    """

    inner: Optimizer
    sampler: CustomSampler
    replica: Replica
    sums: Any
    rule: Rule
    log_steps: int | None = checked(None, least=1)
    ref_batchsize: float | None = checked(None, above=0)
    ref_weight: float | None = checked(None, above=0)
    reduction: str = checked("mean", among=("mean", "sum"))
    max_grad_norm: float | None = checked(None, above=0)
    noise_options: NoiseOptions | bool = False
    overlap: bool = True
    lockstep: bool = False
    float32_sums: bool = True
    shard_gradients: bool = True
    compare_every: int = checked(100, least=1)

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cached_property
    def scalars(self) -> DeviceScalars:
        """Holds numbers that change from step to step, on the device."""
        return DeviceScalars(self.replica)

    @functools.cached_property
    def sharded(self) -> bool:
        """Whether parameters are sharded: plans then pad steps, and none is idle."""
        return self.replica.is_sharded(self.parameters())

    @functools.cached_property
    def noise(self) -> NoiseMeter | None:
        """The meter that was asked for, or that the rule needs."""
        options = self.noise_options
        check_type("noise", options, (bool, NoiseOptions), "a bool or NoiseOptions")
        if options is False and not self.rule.measured:
            return None
        name = "ref_weight" if self.reduction == "sum" else "ref_batchsize"
        reference = getattr(self, name)
        if reference is None:
            raise TypeError(f"noise= needs {name}= with reduction={self.reduction!r}")
        options = options if isinstance(options, NoiseOptions) else NoiseOptions()
        return NoiseMeter(self, reference, options)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters of all groups, frozen ones too."""
        return [p for group in self.inner.param_groups for p in group["params"]]
