"""What an optimizer wrapper refuses at construction."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.rules.rule import Rule
from xla_replica import Replica
from xla_replica.common.arguments import check_choice, check_number, is_number

# Their steps are normalised, so they do not grow with the learning rate's batch factor
# the way SGD's do.
_ADAPTIVE = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop",
    "Adafactor", "Muon", "Rprop",
)  # fmt: skip


def check_optimizer(optimizer: Optimizer, rule: Rule) -> None:
    """Raises TypeError, or warns, unless ``rule`` suits an ``optimizer`` to wrap."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    name = type(optimizer).__name__
    if isinstance(optimizer, OptimizerProxy):
        raise TypeError(
            f"the optimizer is a {name}, which is a wrapper already: wrap the torch "
            "optimizer inside it, its attribute inner, once"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss inside step(): not supported")
    if hasattr(optimizer.step, "get_compiler_config"):  # torch.compile leaves it
        raise TypeError(
            f"the step() of {name} was compiled with torch.compile, which compiles it "
            "again for every learning rate, and the rule changes it at every step: "
            "leave step() as it is (foreach=True or fused=True make few kernels of "
            "it), and compile the model"
        )
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
    if name in _ADAPTIVE and rule.for_sgd:
        warnings.warn(
            f"rule {rule.name!r} is derived for SGD, whose step is proportional to the "
            f"gradient; for {name}, whose step is normalised, noise calls for the "
            "square root: rule 'root', or 'adam-root' for Adam and AdamW",
            stacklevel=5,
        )


def check_rule(
    groups: list[dict[str, Any]],
    rule: Rule,
    schedule: Schedule,
    ref_batchsize: float | None,
    late_ratio: bool,
) -> None:
    """Raises unless the rule works with the groups and the trace's extreme sizes.

    If the ratio is late, it is known to be positive, and to the device alone.
    """
    if rule.beta and any(group.get("capturable") for group in groups):
        raise TypeError(
            f"rule {rule.name!r} does not work with capturable=True, which computes "
            "the bias correction on the device: leave it out; the wrapper brings the "
            "learning rate to the device itself"
        )
    sizes = schedule.trace.batch_sizes
    ratios = {float(size) / (ref_batchsize or 1) for size in (sizes.min(), sizes.max())}
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
                    f"rule {rule.name!r} follows what is measured, so its lr_factor "
                    f"gets the {what} as a tensor and may not read it: write tensor "
                    f"arithmetic, such as {name} ** 0.5, in place of math.sqrt({name})"
                ) from error
        if rule.decay_per_sample and not factor > 0:
            raise ValueError(
                f"rule {rule.name!r} makes the factor 0 of batch ratio {ratio:g}, by "
                "which decay_per_sample divides"
            )
        for group in groups if rule.beta else ():
            rule.update(ratio, group, rule.init())


def check_sampler(sampler: CustomSampler, replica: Replica) -> None:
    """Raises TypeError or ValueError unless ``sampler`` feeds ``replica``."""
    if not isinstance(sampler, CustomSampler):
        raise TypeError(f"sampler must be a CustomSampler, got {sampler!r}")
    if (sampler.rank, sampler.num_replicas) != (replica.rank, replica.num_replicas):
        raise ValueError(
            f"the sampler deals to replica {sampler.rank} of {sampler.num_replicas}, "
            f"but this is {replica}"
        )


def check_reduction(
    reduction: str,
    ref_weight: float | None,
    ref_batchsize: float | None,
    rule: Rule,
    schedule: Schedule,
) -> None:
    """Raises unless reduction and references of an optimizer wrapper fit together."""
    check_choice("reduction", reduction, ("mean", "sum"))
    if schedule.pad_minibatches and reduction == "mean":
        raise TypeError(
            "a sampler with pad_minibatches=True has minibatches in which some samples "
            "do not count, which a mean over the minibatch would: build the optimizer "
            "with reduction='sum', and let the loss of a minibatch be "
            "(losses * optimizer.sample_weights).sum()"
        )
    if ref_weight is None:
        return
    check_number("ref_weight", ref_weight, above=0)
    if reduction == "mean":
        raise TypeError(
            "ref_weight= needs reduction='sum', where step(weight=...) tells weights"
        )
    if ref_batchsize is not None:
        raise TypeError(
            "ref_batchsize= and ref_weight= say the same thing in samples and in "
            f"tokens: give one of them, got {ref_batchsize!r} and {ref_weight!r}"
        )
    if rule.beta:
        raise TypeError(
            f"rule {rule.name!r} makes betas of the batch ratio, which must be known "
            "before the replicas' weights are summed: give ref_batchsize= in place of "
            "ref_weight="
        )


def check_numbers(rule: Rule, ref_batchsize: float | None, **given: Any) -> None:
    """Raises unless the rule has its reference and all numbers are positive or None."""
    if ref_batchsize is None and rule.needs_reference:
        raise TypeError(
            f"rule {rule.name!r} needs ref_batchsize=, the batch size at which the "
            "learning rate was tuned"
        )
    for name, value in {"ref_batchsize": ref_batchsize, **given}.items():
        if value is not None:
            check_number(name, value, above=0)


def check_groups(groups: list[dict[str, Any]], replica: Replica) -> None:
    """Raises unless hyperparameters are numbers and parameters the replica's to sum."""
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        raise TypeError(
            "the reference learning rate must be a number, not a tensor, which every "
            "step would read back; the wrapper brings it to the device itself"
        )
    for group in groups:
        check_number("the reference learning rate", group["lr"])
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if any(isinstance(each, float) and math.isnan(each) for each in values):
                raise ValueError(
                    f"the optimizer's {name} must be a number, got {value!r}, which "
                    "would make every weight NaN"
                )
    parameters = [parameter for group in groups for parameter in group["params"]]
    replica.check_parameters(parameters)
    for parameter in parameters:
        if parameter.device.type != replica.device.type:
            raise ValueError(
                f"a parameter is on {parameter.device}, but this is {replica}: move "
                "the model with model.to(replica.device) before you build the "
                "optimizer, or pass replica=xla_replica.LocalReplica('cpu')"
            )


def check_not_compiled() -> None:
    """Raises TypeError within a function that torch.compile has compiled.

    Such a function also compiles what it calls: the hooks that the backward pass runs,
    which look at gradients as they are in memory, and all that `step` does, once for
    every step, substep and learning rate.
    """
    tracing = torch.compiler.is_dynamo_compiling()
    if tracing or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
        raise TypeError(
            "step() was called in a function that torch.compile compiles, which would "
            "compile the hooks of the backward pass and step() too: compile the "
            "forward pass alone (the model, or a function that returns the loss), and "
            "call backward() and step() outside of what is compiled"
        )


def check_yielded(sampler: CustomSampler, num_minibatches: int) -> None:
    """Raises ValueError unless the sampler has yielded so many minibatches or more.

    It has yielded more where a loader reads ahead.
    """
    if sampler.num_yielded < num_minibatches:
        raise ValueError(
            f"step() was called for minibatch number {num_minibatches}, and the "
            f"sampler has yielded {sampler.num_yielded}: the data come from somewhere "
            "else, so batches would not be those of the trace. Build the loader with "
            "DataLoader(dataset, batch_sampler=sampler), or iterate the sampler"
        )
