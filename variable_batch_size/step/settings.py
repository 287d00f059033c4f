"""What is chosen for a run where its optimizer is wrapped, checked and compared."""

from __future__ import annotations

import dataclasses
import hashlib

from torch.optim import Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.rules.rule import Rule
from variable_batch_size.step import checks
from variable_batch_size.step.agreement import Groups, hyperparameters
from xla_replica import Replica
from xla_replica.common.arguments import check_integer


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
                "momentum_correction": self.rule.momentum_correction,
                "decay_per_sample": self.rule.decay_per_sample,
                "ref_batchsize": self.ref_batchsize,
                "reduction": self.reduction,
                "ref_weight": self.ref_weight,
                "max_grad_norm": self.max_grad_norm,
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

    def batch_ratio(self, batch_size: int) -> float:
        """Returns how many times the reference batch size this is; 1 without one."""
        return batch_size / (self.ref_batchsize or 1)
