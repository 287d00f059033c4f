"""How hyperparameters follow the batch size: a registry of pure rules.

The batch ratio kappa is B / ref_batchsize: the step's global batch size over the one
for which the hyperparameters were tuned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from variable_batch_size.rules import adam
from variable_batch_size.rules.adam import AdamState
from xla_replica.common.arguments import check_choice, check_flag, check_type, is_number

# What a rule may look at and change, of a parameter group.
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")


class ScaledHyperparameters(NamedTuple):
    """What one update uses in place of a group's hyperparameters.

    Attributes:
        effective_lr: The scaled learning rate, to be reported.
        lr: The learning rate that the optimizer gets. It differs from the effective
            one where the factor is applied to the gradient, and where it carries what
            torch's bias correction gets wrong.
        weight_decay: The weight decay that the optimizer gets.
        gradient_factor: Multiplies gradient + weight_decay * weight, or None.
        betas: The betas that the optimizer gets; None leaves them as they are.
        eps: The epsilon that the optimizer gets; None leaves it as it is.
    """

    effective_lr: Any
    lr: Any
    weight_decay: Any
    gradient_factor: Any = None
    betas: tuple[float, float] | None = None
    eps: float | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a batch ratio does to the hyperparameters of one update.

    Everything that is known of a rule is here. To add one, put it into `RULES`, or
    give it to a wrapper as it is.

    Attributes:
        name: Names the rule in messages and states and, if registered, in `RULES`.
        lr_factor: From the batch ratio to what multiplies every learning rate.
        measured: ``lr_factor`` takes the gain, which is measured from the gradients, in
            place of the batch ratio: a tensor, where it must not be read.
        needs_reference: The rule has no meaning without ``ref_batchsize``.
        for_sgd: The rule is derived for steps that are proportional to the gradient,
            as those of SGD are; a wrapper warns where they are not, as Adam's are not.
        beta: From (beta, batch ratio) to the beta of this update: for Adam alone, whose
            epsilon is then divided by sqrt(batch ratio) too.
        momentum_correction: The factor multiplies the gradient, weight decay included,
            instead of the learning rate. For SGD this puts it inside the momentum
            buffer, so that a step's contribution keeps the factor of its own batch
            (Goyal et al. 2017, arXiv:1706.02677, 3, eq. 10).
        decay_per_sample: Weight decay becomes ``weight_decay * ratio / factor``, so
            that weights decay by the same amount per sample whatever the rule: for SGD
            and decoupled weight decay.
    """

    name: str
    lr_factor: Callable[[float], float]
    measured: bool = False
    needs_reference: bool = True
    for_sgd: bool = False
    beta: adam.Beta | None = None
    momentum_correction: bool = False
    decay_per_sample: bool = False

    def init(self, num_updates: int = 0) -> AdamState | None:
        """Returns the state of one parameter group before its first update.

        Args:
            num_updates: Updates that the inner optimizer has made already, all at
                batch ratio one.
        """
        return None if self.beta is None else AdamState(num_updates)

    def update(
        self,
        batch_ratio: Any,
        hyperparameters: Mapping[str, Any],
        state: AdamState | None = None,
        gain: Any = None,
    ) -> tuple[ScaledHyperparameters, AdamState | None]:
        """Returns what one update uses, and the next state.

        Args:
            batch_ratio: kappa.
            hyperparameters: ``lr`` and those of `HYPERPARAMETERS` the group has.
            state: What `init` or the last call returned.
            gain: For a measured rule, between min(1, kappa) and max(1, kappa). Batch
                ratio, learning rate, weight decay and gain may then be tensors.

        Raises:
            ValueError: The rule has no meaning at this batch ratio.
        """
        factor = self.lr_factor(gain if self.measured else batch_ratio)
        lr, decay = hyperparameters["lr"], hyperparameters.get("weight_decay", 0.0)
        # A tensor, which may not be read, is not zero.
        if self.decay_per_sample and not (is_number(decay) and decay == 0):
            decay = decay * (batch_ratio / factor)
        scaled = ScaledHyperparameters(lr * factor, lr * factor, decay)
        if self.momentum_correction:
            scaled = scaled._replace(lr=lr, gradient_factor=factor)
        if self.beta is None:
            return scaled, state
        adjustment, betas, eps, state = adam.update(
            self.beta, batch_ratio, hyperparameters, state or AdamState(0)
        )
        if hyperparameters.get("decoupled_weight_decay"):  # times the lr handed over
            decay *= 1 / adjustment
        lr = scaled.lr * adjustment
        return scaled._replace(lr=lr, weight_decay=decay, betas=betas, eps=eps), state


def power(alpha: float) -> Rule:
    """Returns the rule (B / ref) ** alpha: between constant (0) and linear (1).

    >>> power(0.5).lr_factor(4.0)
    2.0

    Args:
        alpha: The exponent, a finite number; 0.5 is the rule ``'root'``.
    """
    return Rule(f"power:{alpha:g}", lambda batch_ratio: batch_ratio**alpha)


def _linear(batch_ratio: float) -> float:
    return batch_ratio


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("constant", lambda batch_ratio: 1.0, needs_reference=False),
        # Goyal et al. 2017, arXiv:1706.02677, 2.1 and, with the factor inside the
        # momentum buffer, 3, eq. 10.
        Rule("linear", _linear, for_sgd=True),
        Rule("linear-momentum", _linear, for_sgd=True, momentum_correction=True),
        # Krizhevsky 2014, arXiv:1404.5997, 5.
        # Not math.sqrt, which reads a ratio of measured weights, a tensor.
        Rule("root", lambda batch_ratio: batch_ratio**0.5),
        # Johnson et al. 2020, arXiv:2007.05105, Algorithm 1: of the measured gain.
        Rule("adascale", _linear, for_sgd=True, measured=True),
        Rule("adam-root", math.sqrt, beta=adam.sde_beta),
        Rule("adam-half-life", math.sqrt, beta=adam.half_life_beta),
    )
}


def rule_named(rule: str | Rule) -> Rule:
    """Returns the rule of that name.

    Args:
        rule: A key of `RULES`, or ``'power:ALPHA'``; a `Rule` is returned as it is.

    Raises:
        ValueError: There is no rule of that name.
        TypeError: ``rule`` is neither a name nor a `Rule`.
    """
    if isinstance(rule, Rule):
        return rule
    check_type("rule", rule, str, "a name or a Rule")
    name, _, alpha = rule.partition(":")
    if name == "power" and alpha:
        return power(float(alpha))
    return RULES[check_choice("rule", rule, sorted(RULES), "'power:ALPHA'")]


def with_options(rule: str | Rule, **asked: Any) -> Rule:
    """Returns the rule with these options added to those that it has."""
    added: Any = {name: True for name in asked if check_flag(name, asked[name])}
    return dataclasses.replace(rule_named(rule), **added)
