"""One optimizer wrapper per rule, with the constructors that users already write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.optimizer import ElasticOptimizer
from xla_replica.common.arguments import check_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from variable_batch_size.step.run import ElasticOptions


class _NamedRuleOptimizer(ElasticOptimizer):
    """A wrapper whose rule, a key of `RULES`, needs nothing but its reference."""

    _rule: str

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int | None = None,
        log_steps: int | None = None,
        **options: Unpack[ElasticOptions],
    ) -> None:
        """Builds the wrapper; on several replicas all of them do.

        Args:
            optimizer: The torch optimizer to wrap, built after the model was moved.
            sampler: The sampler that feeds this replica.
            ref_batchsize: The samples for which the learning rate was tuned. None only
                where ``ref_weight=`` has tokens instead, or the rule is constant.
            log_steps: Log every so many updates; None logs none.
            **options: Further arguments of `ElasticOptimizer`, by name.
        """
        super().__init__(
            optimizer, sampler, self._rule, ref_batchsize, log_steps, **options
        )


class LinearRuleOptimizer(_NamedRuleOptimizer):
    """Multiplies the learning rate by B / ref_batchsize.

    The linear rule of Goyal et al. 2017, arXiv:1706.02677. Further options are those of
    `ElasticOptimizer`.
    """

    _rule = "linear"


class RootRuleOptimizer(_NamedRuleOptimizer):
    """Multiplies the learning rate by sqrt(B / ref_batchsize).

    Krizhevsky 2014, arXiv:1404.5997. Further options are those of `ElasticOptimizer`.
    """

    _rule = "root"


class AdamRootRuleOptimizer(_NamedRuleOptimizer):
    """Scales what Adam and AdamW use, for kappa = B / ref_batchsize.

    Learning rate times sqrt(kappa), 1 - beta times kappa, epsilon over sqrt(kappa)
    (Malladi et al. 2022, arXiv:2205.10287), and bias corrections for betas that change:
    see `variable_batch_size.rules.adam`. Needs kappa (1 - beta1) < 1. Further options
    are those of `ElasticOptimizer`.
    """

    _rule = "adam-root"


class AdamHalfLifeRuleOptimizer(_NamedRuleOptimizer):
    """Scales as `AdamRootRuleOptimizer`, but with beta ** kappa: for every kappa."""

    _rule = "adam-half-life"


class ConstantOptimizer(_NamedRuleOptimizer):
    """Leaves the learning rate as it is. Options are those of `ElasticOptimizer`."""

    _rule = "constant"


class AdaScaleOptimizer(_NamedRuleOptimizer):
    """Multiplies the learning rate by the gain that it measures: AdaScale SGD.

    Johnson et al. 2020, arXiv:2007.05105, Algorithm 1. The gain says how many steps at
    ``ref_batchsize`` a step is worth, between 1 and B / ref_batchsize. It is measured
    from the gradients that the step sees anyway, and stays on the device;
    ``noise.measure(batch_size)`` reads it. Measure training length and schedules in
    `progress`, the sum of the gains, instead of steps.

    Args:
        optimizer: A ``torch.optim.SGD``; Adam and its kin get a warning.
        log_steps: Third here, not fourth, as in the earlier implementation.
        ref_batchsize: Default: 32, unless ``ref_weight`` takes its place.
        sampler, options: See `ElasticOptimizer`, of which ``noise=`` says how the gain
            is measured.
    """

    _rule = "adascale"
    noise: NoiseMeter

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        log_steps: int | None = None,
        ref_batchsize: int | None = None,
        **options: Unpack[ElasticOptions],
    ) -> None:
        if ref_batchsize is None and options.get("ref_weight") is None:
            ref_batchsize = 32
        super().__init__(optimizer, sampler, ref_batchsize, log_steps, **options)

    def current_lr(self) -> tuple[float, ...]:  # type: ignore[override]
        """Returns each group's learning rate in this step, or an epoch's last one."""
        return self._current_lrs()

    @property
    def progress(self) -> float:
        """Scale-invariant iterations so far: the sum of the gains over all groups."""
        return self.noise.progress


class LinearRuleMomentumOptimizer(_NamedRuleOptimizer):
    """The linear rule with the factor inside SGD's momentum buffer.

    ``v = m v + (B / ref_batchsize) (mean gradient + wd w);  w -= lr v``

    Args:
        optimizer: A ``torch.optim.SGD``.
        weight_decay: Replaces the weight decay of every parameter group, once, here.
            Default: each group keeps its own. (The earlier implementation replaced
            them all by 1e-4 unless told otherwise.)
        sampler, ref_batchsize, log_steps, options: See `ElasticOptimizer`.
    """

    _rule = "linear-momentum"

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int,
        weight_decay: float | None = None,
        log_steps: int | None = None,
        **options: Unpack[ElasticOptions],
    ) -> None:
        if weight_decay is not None:
            check_number("weight_decay", weight_decay, least=0)
            for group in optimizer.param_groups:
                group["weight_decay"] = weight_decay
        super().__init__(optimizer, sampler, ref_batchsize, log_steps, **options)
