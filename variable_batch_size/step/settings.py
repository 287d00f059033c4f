"""What is chosen for a run where its optimizer is wrapped, checked and compared."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from torch.optim import Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.rules.rule import Rule
from variable_batch_size.step import checks
from variable_batch_size.step.agreement import Groups, hyperparameters
from xla_replica import Replica
from xla_replica.common.arguments import check_integer

# Hyperparameters that say how a device computes, not what.
_OF_DEVICES = ("foreach", "fused", "capturable", "differentiable")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a wrapper, which replicas have in common; see its arguments."""

    rule: Rule
    ref_batchsize: int | None
    ref_weight: float | None
    reduction: str
    log_steps: int | None
    max_grad_norm: float | None
    lockstep: bool

    def check(
        self, optimizer: Optimizer, sampler: CustomSampler, replica: Replica
    ) -> None:
        """Raises TypeError or ValueError unless they fit the parts of a wrapper."""
        checks.check_optimizer(optimizer, self.rule)
        checks.check_sampler(sampler, replica)
        checks.check_reduction(
            self.reduction,
            self.ref_weight,
            self.ref_batchsize,
            self.rule,
            sampler.schedule,
        )
        if self.log_steps is not None:
            check_integer("log_steps", self.log_steps, least=1)
        checks.check_numbers(
            self.rule,
            self.ref_batchsize if self.ref_weight is None else self.ref_weight,
            max_grad_norm=self.max_grad_norm,
        )
        self.check_groups(optimizer.param_groups, sampler.schedule, replica)

    def check_groups(
        self, groups: Groups, schedule: Schedule, replica: Replica
    ) -> None:
        """Raises TypeError or ValueError unless they fit groups and batch sizes."""
        checks.check_groups(groups, replica)
        checks.check_rule(
            groups,
            self.rule,
            schedule,
            self.ref_batchsize,
            late_ratio=self.ref_weight is not None,
        )

    def check_agreement(
        self,
        sampler: CustomSampler,
        groups: Groups,
        noise: NoiseMeter | None,
        replica: Replica,
    ) -> None:
        """Raises ReplicaError if replicas would not train one model. Collective."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        kinds = repr([(*p.shape, p.dtype, p.requires_grad) for p in parameters])
        replica.check_agreement(
            "the settings of the run",
            {
                **sampler.fingerprint(),
                "rule": self.rule.name,
                **self._options(),
                "noise": noise.options if noise else None,
                "lockstep": self.lockstep,
                "hyperparameters": hyperparameters(groups),
                "parameters": f"{len(parameters)} tensors of "
                f"{sum(p.numel() for p in parameters)} numbers, sha256 "
                f"{hashlib.sha256(kinds.encode()).hexdigest()[:16]}",
            },
            "Each would train another model: build sampler, model and optimizer alike "
            "on every replica, without the rank in seeds, files or conditions.",
        )

    def _options(self) -> dict[str, Any]:
        """Returns what replicas have in common, and a run with one that it resumes."""
        return {
            "momentum_correction": self.rule.momentum_correction,
            "decay_per_sample": self.rule.decay_per_sample,
            "ref_batchsize": self.ref_batchsize,
            "reduction": self.reduction,
            "ref_weight": self.ref_weight,
            "max_grad_norm": self.max_grad_norm,
        }

    def lasting(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns what a run must have in common with one that it resumes.

        Plain values by name. The sampler's part is `CustomSampler.fingerprint`.
        """
        found = {
            "optimizer": type(optimizer).__name__,
            **self._options(),
        }
        for index, group in enumerate(optimizer.param_groups):
            place = f" of parameter group {index}" if index else ""
            for name, value in hyperparameters([group]):
                if name not in _OF_DEVICES:
                    found[name + place] = _plain(value)
        return found

    def batch_ratio(self, batch_size: int) -> float:
        """Returns how many times the reference batch size this is; 1 without one."""
        return batch_size / (self.ref_batchsize or 1)


def _plain(value: Any) -> Any:
    """Returns a hyperparameter without NumPy's types, which a checkpoint refuses."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    exact = value is None or isinstance(value, (bool, int, str))
    return value if exact else float(value)
