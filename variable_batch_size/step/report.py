"""What a wrapper tells a person: learning rates to come, a line of the log."""

from __future__ import annotations

from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.rules.rule import Rule
from variable_batch_size.step.device_scalars import as_floats
from variable_batch_size.step.update import Update
from xla_replica import Replica


def lrs_to_come(
    lrs: tuple[float, ...],
    rule: Rule,
    noise: NoiseMeter | None,
    batch_size: int,
    ref_batchsize: int | None,
) -> tuple[float, ...]:
    """The effective learning rate of each parameter group, by what is known now.

    Args:
        lrs: The reference ones.
        rule: The rule; if it is measured, the device is read.
        noise: Has measured what such a rule needs.
        batch_size: Of the step.
        ref_batchsize: None if the rule needs none.
    """
    if rule.measured:
        gains = noise.lr_factors(batch_size)
        factors = tuple(rule.lr_factor(gain) for gain in gains)
    else:
        factor = rule.lr_factor(batch_size / (ref_batchsize or 1))
        factors = (factor,) * len(lrs)
    return tuple(lr * f for lr, f in zip(lrs, factors))


def describe(update: Update, noise: NoiseMeter | None, replica: Replica) -> str:
    """Its line of the log; reads the device."""
    lrs = ", ".join(f"{lr:.6g}" for lr in as_floats(update.lr, replica))
    line = f"step {update.step}: batch size {update.batch_size}, learning rate {lrs}"
    measured = noise.measure()._asdict() if noise else {}
    return line + "".join(
        f", {name.replace('_', ' ')} {value:.6g}" for name, value in measured.items()
    )
