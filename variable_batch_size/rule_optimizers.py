"""One optimizer wrapper per rule, with the constructors that users already write."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.sampler import CustomSampler


class ConstantOptimizer(ElasticOptimizer):
    """The learning rate stays; ``ref_batchsize`` is accepted and unused.

    Further options are those of `ElasticOptimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int | None = None,
        log_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            optimizer, sampler, "constant", ref_batchsize, log_steps, **options
        )


class LinearRuleOptimizer(ElasticOptimizer):
    """lr * B / ref_batchsize. Further options are those of `ElasticOptimizer`."""

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int,
        log_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            optimizer, sampler, "linear", ref_batchsize, log_steps, **options
        )


class RootRuleOptimizer(ElasticOptimizer):
    """lr * sqrt(B / ref_batchsize). Further options: see `ElasticOptimizer`."""

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int,
        log_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            optimizer, sampler, "root", ref_batchsize, log_steps, **options
        )


class LinearRuleMomentumOptimizer(ElasticOptimizer):
    """The linear rule with the factor inside SGD's momentum buffer.

    ``v = m v + (B / ref_batchsize) (mean gradient + wd w);  w -= lr v``

    Args:
        optimizer: A ``torch.optim.SGD``.
        sampler: See `ElasticOptimizer`.
        ref_batchsize: See `ElasticOptimizer`.
        weight_decay: Replaces the weight decay of every parameter group, once, here.
            Default: each group keeps its own. (The earlier implementation replaced
            them all by 1e-4 unless told otherwise.)
        log_steps: See `ElasticOptimizer`.
        options: See `ElasticOptimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int,
        weight_decay: float | None = None,
        log_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            optimizer, sampler, "linear-momentum", ref_batchsize, log_steps, **options
        )
        if weight_decay is not None:
            if weight_decay < 0:
                raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
            for group in self.param_groups:
                group["weight_decay"] = weight_decay
