"""How gradient noise is measured, and what a measurement says."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from xla_replica.common.arguments import check_choice, check_number


@dataclasses.dataclass(frozen=True)
class NoiseOptions:
    """How gradient noise is measured and used.

    Attributes:
        time_constant: Time constant of the moving averages, in minibatches; > 0.
        single_minibatch: What a step of one minibatch, which has no variance to
            measure, does to the averages: ``'skip'`` leaves them as they are;
            ``'difference'`` compares it with the step before, until a step of several
            minibatches has been seen. Biased, and costs a copy of the gradients; the
            first such step after loading a state has nothing to compare with.
        per_group: Each parameter group has its own gain; otherwise all have the
            overall one.
        causal: The gain comes from the steps before this one, so that a step's noise
            does not choose its own learning rate.
        compat: ``'reference'``: the gain against one minibatch instead of against
            ``ref_batchsize``, and the learning rate times minibatch_size /
            ref_batchsize, as the earlier implementation defined it. It is then not the
            reference learning rate at the reference batch size.

    Raises:
        TypeError: ``time_constant`` is not a number.
        ValueError: An option is not allowed.
    """

    time_constant: float = 1000.0
    single_minibatch: str = "skip"
    per_group: bool = True
    causal: bool = False
    compat: str | None = None

    def __post_init__(self) -> None:
        check_number("time_constant", self.time_constant, above=0)
        check_choice("single_minibatch", self.single_minibatch, ("skip", "difference"))
        check_choice("compat", self.compat, (None, "reference"))


class Measurements(NamedTuple):
    """What is known of the gradients of all parameter groups together.

    Attributes:
        gain: Steps at the reference batch size that one of the last batch size is
            worth, by what is known now.
        noise_scale: tr Sigma / |G|^2, in samples.
        efficiency: Progress per sample, against the reference batch size.
        progress: Steps at the reference batch size that training is worth so far.
        variance: tr Sigma of one sample.
        square: |G|^2.
    """

    gain: float
    noise_scale: float
    efficiency: float
    progress: float
    variance: float
    square: float
