"""What an optimizer wrapper refuses, and how it notices replicas drifting apart."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Cursor, EpochPlan, Schedule
from variable_batch_size.rules.rule import Rule
from xla_replica import Replica, ReplicaError

# Their steps are normalised, so they do not grow with the learning rate's batch factor
# the way SGD's do.
_ADAPTIVE = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop",
)  # fmt: skip


def check_optimizer(optimizer: Optimizer, rule: Rule) -> None:
    """Raises TypeError unless ``optimizer`` can be wrapped and ``rule`` suits it.

    Warns where the rule was derived for another kind of optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss inside step(): not supported")
    if rule.momentum_correction and not isinstance(optimizer, SGD):
        raise TypeError(
            f"rule {rule.name!r} with momentum correction scales the gradient, which "
            f"only SGD turns into a scaled step; {name} needs another rule"
        )
    if rule.beta and not isinstance(optimizer, (Adam, AdamW)):
        raise TypeError(
            f"rule {rule.name!r} scales Adam's betas and epsilon: it needs torch's "
            f"Adam or AdamW, got {name}"
        )
    decoupled = all(g.get("decoupled_weight_decay") for g in optimizer.param_groups)
    if rule.decay_per_sample and not (isinstance(optimizer, SGD) or decoupled):
        raise TypeError(
            "decay_per_sample needs weight decay that multiplies the weights: SGD's "
            f"or AdamW's; {name} normalises it together with the gradient"
        )
    if name in _ADAPTIVE and rule.name.startswith(("linear", "adascale")):
        warnings.warn(
            f"rule {rule.name!r} is derived for SGD, whose step is proportional to the "
            f"gradient; for {name}, whose step is normalised, noise calls for the "
            "square root: rule 'root', or 'adam-root' for Adam and AdamW",
            stacklevel=4,
        )


def check_rule(
    groups: list[dict[str, Any]],
    rule: Rule,
    schedule: Schedule,
    ref_batchsize: float | None,
) -> None:
    """Tries the rule on the smallest and the largest batch size of the trace.

    Raises:
        ValueError: It has no meaning there.
        TypeError: It does not work with an option of the optimizer.
    """
    sizes = schedule.trace.batch_sizes
    for batch_size in (sizes.min(), sizes.max()):
        ratio = float(batch_size) / (ref_batchsize or 1)
        factor = rule.lr_factor(ratio)
        if not (isinstance(factor, numbers.Real) and 0 <= factor < math.inf):
            raise ValueError(
                f"rule {rule.name!r} makes the factor {factor!r} of batch ratio "
                f"{ratio:g}; it must be a finite number >= 0"
            )
        if rule.measured:
            _check_takes_tensors(rule, ratio)
        if rule.decay_per_sample and not factor > 0:
            raise ValueError(
                f"rule {rule.name!r} makes the factor 0 of batch ratio {ratio:g}, by "
                "which decay_per_sample divides"
            )
        for group in groups if rule.beta else ():
            _check_group(group, rule)
            rule.update(ratio, group, rule.init())


def _check_takes_tensors(rule: Rule, ratio: float) -> None:
    try:
        rule.lr_factor(torch.full((1,), ratio, device="meta"))
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"rule {rule.name!r} is measured, so its lr_factor gets the gain as a "
            "tensor and may not read it: write tensor arithmetic, such as gain ** 0.5, "
            "in place of math.sqrt(gain)"
        ) from error


def _check_group(group: dict[str, Any], rule: Rule) -> None:
    if group.get("capturable"):
        raise TypeError(
            f"rule {rule.name!r} does not work with capturable=True, which computes "
            "the bias correction on the device: leave it out; the wrapper brings the "
            "learning rate to the device itself"
        )


def check_sampler(sampler: CustomSampler, replica: Replica) -> None:
    """Raises TypeError or ValueError unless ``sampler`` feeds ``replica``."""
    if not isinstance(sampler, CustomSampler):
        raise TypeError(f"sampler must be a CustomSampler, got {sampler!r}")
    place = (sampler.rank, sampler.num_replicas)
    if place != (replica.rank, replica.num_replicas):
        raise ValueError(
            f"the sampler deals to replica {place[0]} of {place[1]}, but this is "
            f"{replica}"
        )


def check_numbers(rule: Rule, ref_batchsize: float | None, **given: Any) -> None:
    """Raises unless the rule has its reference and all numbers are positive or None."""
    if ref_batchsize is None and rule.name != "constant":
        raise TypeError(
            f"rule {rule.name!r} needs ref_batchsize=, the batch size at which the "
            "learning rate was tuned"
        )
    for name, value in {"ref_batchsize": ref_batchsize, **given}.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be > 0, got {value!r}")


def check_groups(groups: list[dict[str, Any]], replica: Replica) -> None:
    """Raises unless learning rates are numbers and parameters on the device."""
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        raise TypeError(
            "the reference learning rate must be a number, not a tensor, which every "
            "step would read back; the wrapper brings it to the device itself"
        )
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if parameter.device.type != replica.device.type:
            raise ValueError(
                f"a parameter is on {parameter.device}, but this is {replica}: move "
                "the model with model.to(replica.device) before you build the "
                "optimizer, or pass replica=xla_replica.LocalReplica('cpu')"
            )


def check_step(closure: Any, found_inf: Any) -> None:
    """Raises TypeError unless ``step()`` was called plainly.

    Args:
        closure: What it was given.
        found_inf: What torch's GradScaler leaves on an optimizer that it steps.
    """
    if closure is not None:
        raise TypeError(
            "step(closure) is not supported: call loss.backward() before step()"
        )
    if found_inf is not None:
        raise TypeError(
            "GradScaler is not supported: it would unscale gradients that are "
            "accumulated, on each replica by itself. Train in bfloat16, which "
            "needs no scaling"
        )


class HyperparameterWatch:
    """Notices at once that a learning rate changed where other replicas do not see it.

    Replicas run the user's loop body different numbers of times: once per minibatch,
    and not at all in steps in which they are idle. What looks right from here and is
    not, `Agreement` finds.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, ...] | None = None

    def allow_change(self) -> None:
        """The next `check` passes."""
        self._last = None

    def remember(self, groups: list[dict[str, Any]]) -> None:
        """From here on, a change is looked at."""
        self._last = hyperparameters(groups)

    def check(
        self,
        groups: list[dict[str, Any]],
        plan: EpochPlan,
        cursor: Cursor,
        replica: Replica,
    ) -> None:
        """Raises ReplicaError if replicas would use different hyperparameters."""
        if replica.num_replicas == 1 or self._last in (None, hyperparameters(groups)):
            return
        if cursor.substep:
            where = f"within step {cursor.step}"
            why = "replicas may accumulate different numbers of minibatches"
        elif plan.has_idle_replicas:
            where = "between two updates"
            why = "idle replicas join updates without running your code"
        else:
            return
        raise ReplicaError(
            "the learning rate or another hyperparameter changed "
            f"{where} of epoch {plan.epoch}. There {why}, so replicas would "
            "use different values: call optimizer.attach(scheduler) once in place of "
            "scheduler.step() in the loop, or change it between epochs, before "
            "optimizer.set_epoch",
            replica.rank,
        )


def hyperparameters(groups: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Every number in the parameter groups, by name."""
    return tuple(
        (name, value)
        for group in groups
        for name, value in group.items()
        if isinstance(value, (int, float, tuple))
    )
