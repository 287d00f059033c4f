"""The arguments that an optimizer wrapper refuses, and where a group is added."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, SparseAdam

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.gradient_noise.squares import Groups
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.step.run import Run
from xla_replica import Replica
from xla_replica.common.arguments import check_number, check_type

# Their steps are normalised, so they do not grow with the learning rate's batch factor
# the way SGD's do.
_ADAPTIVE = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop",
    "Adafactor", "Muon", "Rprop",
)  # fmt: skip


def check_run(run: Run) -> None:
    """Raises TypeError or ValueError unless the arguments of a wrapper fit together."""
    check_type("sampler", run.sampler, CustomSampler, "a CustomSampler")
    check_type("optimizer", run.inner, torch.optim.Optimizer, "a torch.optim.Optimizer")
    sampler, replica = run.sampler, run.replica
    if (sampler.rank, sampler.num_replicas) != (replica.rank, replica.num_replicas):
        raise ValueError(
            f"the sampler deals to replica {sampler.rank} of {sampler.num_replicas}, "
            f"but this is {replica}"
        )
    inner, rule, is_mean = run.inner, run.rule, run.reduction == "mean"
    name, of_tokens = type(inner).__name__, run.ref_weight is not None
    is_sgd = isinstance(inner, SGD)
    decoupled = all(g.get("decoupled_weight_decay") for g in inner.param_groups)
    for is_wrong, why in (
        (isinstance(inner, OptimizerProxy), f"{name} is a wrapper: wrap its .inner"),
        (isinstance(inner, SparseAdam),
         "SparseAdam takes sparse gradients alone: use Adam, Embedding(sparse=False)"),
        (isinstance(inner, LBFGS), "LBFGS evaluates the loss inside step()"),
        (hasattr(inner.step, "get_compiler_config"),  # torch.compile leaves it
         "step() would be compiled for every learning rate: compile the model alone"),
        (rule.momentum_correction and not is_sgd,
         f"momentum correction of rule {rule.name!r} needs a step that is proportional "
         f"to the gradient, as only SGD does, got {name}"),
        (rule.beta and not isinstance(inner, (Adam, AdamW)),
         f"{name} does not suit rule {rule.name!r}, which needs Adam or AdamW"),
        (rule.decay_per_sample and not (is_sgd or decoupled),
         "decay_per_sample needs SGD's weight decay or AdamW's, which multiplies the "
         f"weights, got {name}"),
        (run.lockstep and run.sums.keeps_buffers,
         "exact= and live members do not work with lockstep=True, as trainers use it"),
        (is_mean and run.sampler.schedule.pad_minibatches,
         "pad_minibatches=True needs reduction='sum' and, as the loss of a minibatch, "
         "(losses * optimizer.sample_weights).sum()"),
        (of_tokens and is_mean, "ref_weight= needs reduction='sum' and step(weight=)"),
        (of_tokens and run.ref_batchsize is not None,
         "ref_batchsize= and ref_weight= are one reference: give one of them"),
        (of_tokens and rule.beta,
         f"rule {rule.name!r} needs ref_batchsize= in place of ref_weight="),
        (rule.needs_reference and run.ref_batchsize is None and not of_tokens,
         f"rule {rule.name!r} needs ref_batchsize=, of which the learning rate is"),
    ):  # fmt: skip
        if is_wrong:
            raise TypeError(why)
    if name in _ADAPTIVE and rule.for_sgd:
        warnings.warn(
            f"rule {rule.name!r} is derived for SGD; for {name}, whose step is "
            "normalised, noise calls for the square root: rule 'root', or 'adam-root'",
            stacklevel=4,
        )
    check_groups(run, inner.param_groups)


def check_groups(run: Run, groups: Groups, schedule: Schedule | None = None) -> None:
    """Raises TypeError or ValueError unless the arguments fit groups and batch sizes.

    Args:
        run: The arguments.
        groups: Parameter groups, all or new ones.
        schedule: Default: the sampler's.
    """
    for group in groups:
        check_number("the reference learning rate", group.get("lr"))
    parameters = [parameter for group in groups for parameter in group["params"]]
    run.replica.check_parameters(parameters)
    remedy = " before you build the optimizer, or pass replica=LocalReplica('cpu')"
    run.replica.check_device(parameters, remedy)
    schedule = schedule or run.sampler.schedule
    run.sums.check(parameters, schedule)
    sizes = schedule.trace.batch_sizes
    reference, is_late = run.ref_batchsize or 1, run.ref_weight is not None
    ratios = {float(size) / reference for size in (sizes.min(), sizes.max())}
    for ratio in {1.0} if is_late else ratios:  # one of weights is not known yet
        _check_rule(run, groups, ratio, is_late)


def _check_rule(run: Run, groups: Groups, ratio: float, is_late: bool) -> None:
    """Raises unless the rule works with the groups at this batch ratio."""
    rule = run.rule
    name = f"what rule {rule.name!r} makes of batch ratio {ratio:g}"
    limit = "above" if rule.decay_per_sample else "least"  # which it divides by
    check_number(name, rule.lr_factor(ratio), **{limit: 0})
    if rule.measured or is_late:
        try:
            rule.lr_factor(torch.full((1,), ratio, device="meta"))
        except (RuntimeError, TypeError) as error:
            name = "gain" if rule.measured else "ratio"
            raise TypeError(
                f"rule {rule.name!r} gets the {name} as a tensor: its lr_factor may "
                f"compute {name} ** 0.5, in place of math.sqrt({name})"
            ) from error
    for group in groups if rule.beta else ():
        if group.get("capturable"):
            raise TypeError(
                f"rule {rule.name!r} does not work with capturable=True: leave it out; "
                "the wrapper brings the learning rate to the device itself"
            )
        rule.update(ratio, group, rule.init())


def warn_of_lost_ties(model: nn.Module, replica: Replica) -> None:
    """Warns of two equal parameters that a model of transformers says are one.

    On XLA ``model.to`` makes independent ones of them.
    """
    for module in model.modules() if replica.is_lazy else ():
        ties = getattr(module, "all_tied_weights_keys", None) or {}
        named = dict(module.named_parameters(remove_duplicate=False)) if ties else {}
        for names in ties.items():
            pair = {named[name] for name in names if name in named}
            if len(pair) == 2 and torch.equal(*pair):
                warnings.warn(
                    f"{' and '.join(names)} were tied, and are two parameters now: "
                    "call replica.setup(model) in place of model.to(replica.device)",
                    stacklevel=4,
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
