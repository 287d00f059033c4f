"""What an optimizer wrapper refuses where it is built, or where a group is added."""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.rules.rule import Rule
from variable_batch_size.step.scaling import hyperparameters
from variable_batch_size.step.settings import Settings, StepContext
from xla_replica import Replica
from xla_replica.common.arguments import (
    check_choice,
    check_integer,
    check_number,
    check_type,
    is_number,
)

# Their steps are normalised, so they do not grow with the learning rate's batch factor
# the way SGD's do.
_ADAPTIVE = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop",
    "Adafactor", "Muon", "Rprop",
)  # fmt: skip


def check_wrapper(
    settings: Settings, optimizer: Optimizer, sampler: CustomSampler, replica: Replica
) -> None:
    """Raises TypeError or ValueError unless the settings fit the parts of a wrapper."""
    _check_optimizer(optimizer, settings.rule)
    check_type("sampler", sampler, CustomSampler, "a CustomSampler")
    if (sampler.rank, sampler.num_replicas) != (replica.rank, replica.num_replicas):
        raise ValueError(
            f"the sampler deals to replica {sampler.rank} of {sampler.num_replicas}, "
            f"but this is {replica}"
        )
    _check_reduction(settings, sampler.schedule)
    if settings.lockstep and (replica.is_live or settings.exact):
        raise TypeError(
            "neither exact= nor live members work with lockstep=True, as trainers use "
            "it (Hugging Face's, Lightning's): leave out exact= and LIVE_LIGHTHOUSE"
        )
    if replica.is_live and not settings.exact:
        raise TypeError(
            "a live run needs sums that do not depend on members: pass exact=model"
        )
    rule = settings.rule
    has_reference = (settings.ref_batchsize, settings.ref_weight) != (None, None)
    if rule.needs_reference and not has_reference:
        raise TypeError(
            f"rule {rule.name!r} needs ref_batchsize=, the batch size at which the "
            "learning rate was tuned"
        )
    if settings.log_steps is not None:
        check_integer("log_steps", settings.log_steps, least=1)
    for name in ("ref_batchsize", "max_grad_norm"):
        value = getattr(settings, name)
        if value is not None:
            check_number(name, value, above=0)
    check_groups(settings, optimizer.param_groups, sampler.schedule, replica)


def check_groups(
    settings: Settings,
    groups: list[dict[str, Any]],
    schedule: Schedule,
    replica: Replica,
) -> None:
    """Raises TypeError or ValueError unless the settings fit groups and batch sizes."""
    _check_hyperparameters(groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    replica.check_parameters(parameters)
    replica.check_device(
        parameters,
        " before you build the optimizer, or pass replica=xla_replica.LocalReplica("
        "'cpu')",
    )
    if settings.exact:
        settings.exact.check(parameters, schedule)
    _check_rule(settings, groups, schedule)


def common_settings(context: StepContext) -> dict[str, Any]:
    """Returns what all replicas of a run have in common, by name."""
    settings, noise, parameters = context.settings, context.noise, context.parameters()
    kinds = repr([(*p.shape, p.dtype, p.requires_grad) for p in parameters])
    return {
        **context.sampler.fingerprint(),
        "rule": settings.rule.name,
        **settings.options(),
        "noise": noise.options if noise else None,
        "lockstep": settings.lockstep,
        "hyperparameters": hyperparameters(context.inner.param_groups),
        "parameters": f"{len(parameters)} tensors of "
        f"{sum(p.numel() for p in parameters)} numbers, sha256 "
        f"{hashlib.sha256(kinds.encode()).hexdigest()[:16]}",
    }


def check_agreement(context: StepContext) -> None:
    """Raises ReplicaError if replicas would not train one model. Collective."""
    context.replica.check_agreement(
        "the settings of the run",
        common_settings(context),
        "Each would train another model: build sampler, model and optimizer alike "
        "on every replica, without the rank in seeds, files or conditions.",
    )


def refuse_other_accumulation() -> None:
    """Raises ValueError if Accelerate divides losses to accumulate them, too."""
    state = sys.modules.get("accelerate.state")
    num_steps = 1 if state is None else state.GradientState().num_steps
    if num_steps > 1:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={num_steps}) divides losses: "
            "leave it out, with `with accelerator.accumulate(model):`"
        )


def _check_optimizer(optimizer: Optimizer, rule: Rule) -> None:
    """Raises TypeError, or warns, unless ``rule`` suits an ``optimizer`` to wrap."""
    check_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    name = type(optimizer).__name__
    if isinstance(optimizer, OptimizerProxy):
        raise TypeError(
            f"the optimizer is a {name}, which is a wrapper already: wrap its .inner"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "SparseAdam takes sparse gradients alone, and the wrapper accumulates and "
            "sums dense ones: use Adam, and Embedding(sparse=False)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss inside step(): not supported")
    if hasattr(optimizer.step, "get_compiler_config"):  # torch.compile leaves it
        raise TypeError(
            f"torch.compile compiles {name}.step() for every learning rate: leave "
            "step() as it is, perhaps with fused=True, and compile the model"
        )
    if rule.momentum_correction and not isinstance(optimizer, SGD):
        raise TypeError(
            f"rule {rule.name!r} with momentum correction scales the gradient, which "
            f"only SGD turns into a scaled step; {name} needs another rule"
        )
    if rule.beta and not isinstance(optimizer, (Adam, AdamW)):
        raise TypeError(f"rule {rule.name!r} needs torch's Adam or AdamW, got {name}")
    decoupled = all(g.get("decoupled_weight_decay") for g in optimizer.param_groups)
    if rule.decay_per_sample and not (isinstance(optimizer, SGD) or decoupled):
        raise TypeError(
            "decay_per_sample needs weight decay that multiplies the weights: SGD's "
            f"or AdamW's; {name} normalises it together with the gradient"
        )
    if name in _ADAPTIVE and rule.for_sgd:
        warnings.warn(
            f"rule {rule.name!r} is derived for SGD, whose step is proportional to the "
            f"gradient; for {name}, whose step is normalised, noise calls for the "
            "square root: rule 'root', or 'adam-root' for Adam and AdamW",
            stacklevel=5,
        )


def _check_rule(
    settings: Settings, groups: list[dict[str, Any]], schedule: Schedule
) -> None:
    """Raises unless the rule works with the groups and the trace's extreme sizes.

    A ratio of weights is known to be positive, and to the device alone.
    """
    rule, late_ratio = settings.rule, settings.ref_weight is not None
    if rule.beta and any(group.get("capturable") for group in groups):
        raise TypeError(
            f"rule {rule.name!r} does not work with capturable=True: leave it out; the "
            "wrapper brings the learning rate to the device itself"
        )
    sizes = schedule.trace.batch_sizes
    reference = settings.ref_batchsize or 1
    ratios = {float(size) / reference for size in (sizes.min(), sizes.max())}
    for ratio in {1.0} if late_ratio else ratios:
        factor = rule.lr_factor(ratio)
        if not (is_number(factor) and 0 <= factor < math.inf):
            raise ValueError(
                f"rule {rule.name!r} makes the factor {factor!r} of batch ratio "
                f"{ratio:g}; it must be a finite number >= 0"
            )
        if rule.measured or late_ratio:
            try:
                rule.lr_factor(torch.full((1,), ratio, device="meta"))
            except (RuntimeError, TypeError) as error:
                what = "gain" if rule.measured else "batch ratio"
                name = what.split()[-1]
                raise TypeError(
                    f"rule {rule.name!r} gets the {what} as a tensor: its lr_factor "
                    f"may compute {name} ** 0.5, in place of math.sqrt({name})"
                ) from error
        if rule.decay_per_sample and not factor > 0:
            raise ValueError(
                f"rule {rule.name!r} makes the factor 0 of batch ratio {ratio:g}, by "
                "which decay_per_sample divides"
            )
        for group in groups if rule.beta else ():
            rule.update(ratio, group, rule.init())


def _check_reduction(settings: Settings, schedule: Schedule) -> None:
    """Raises unless reduction and references of an optimizer wrapper fit together."""
    reduction, rule = settings.reduction, settings.rule
    ref_batchsize, ref_weight = settings.ref_batchsize, settings.ref_weight
    check_choice("reduction", reduction, ("mean", "sum"))
    if schedule.pad_minibatches and reduction == "mean":
        raise TypeError(
            "pad_minibatches=True needs reduction='sum' and, as the loss of a "
            "minibatch, (losses * optimizer.sample_weights).sum()"
        )
    if ref_weight is None:
        return
    check_number("ref_weight", ref_weight, above=0)
    if reduction == "mean":
        raise TypeError("ref_weight= needs reduction='sum' and step(weight=...)")
    if ref_batchsize is not None:
        raise TypeError(
            "ref_batchsize= and ref_weight= say the same thing in samples and in "
            f"tokens: give one of them, got {ref_batchsize!r} and {ref_weight!r}"
        )
    if rule.beta:
        raise TypeError(
            f"rule {rule.name!r} must know the batch ratio before weights are summed: "
            "give ref_batchsize= in place of ref_weight="
        )


def _check_hyperparameters(groups: list[dict[str, Any]]) -> None:
    """Raises unless the reference learning rate and all others are numbers."""
    if any("lr" not in group for group in groups):
        raise TypeError("a parameter group of the optimizer has no 'lr'")
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        raise TypeError("the reference learning rate must be a number, not a tensor")
    for group in groups:
        check_number("the reference learning rate", group["lr"])
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if any(isinstance(each, float) and math.isnan(each) for each in values):
                raise ValueError(
                    f"the optimizer's {name} must be a number, got {value!r}"
                )
