"""Balance types whose orders come from the neural tangent kernel; experimental."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers import BALANCE_TYPES, Ordering
from grab_xla.contrib.ntk import LossFn, eigen_order, empirical_ntk, ntk_fixed_order
from xla_replica.common.arguments import check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KernelOrder(Ordering):
    """An order that needs the kernel of a data set.

    Attributes:
        dataset, batch_size: See `per_sample_gradients`.
        kernel_dtype: The dtype of gradients and kernel.
        centered_feature_map: Whether to subtract the mean gradient first.
    """

    dataset: Any = dataclasses.field(repr=False)
    batch_size: int = 128
    kernel_dtype: torch.dtype = torch.float32
    centered_feature_map: bool = True

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)

    def kernel(self, *model_and_loss: Any) -> Tensor:
        """Returns ``(n, n)`` for a model, its params and buffers, and a loss."""
        options = (self.batch_size, self.kernel_dtype, self.centered_feature_map)
        return empirical_ntk(*model_and_loss, self.dataset, *options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKEigen(_KernelOrder):
    """Sorted by the kernel's extremal eigenvector, again at every `compute_order`.

    Attributes:
        largest_eig: Whether the eigenvalue is the largest or the smallest.
        descending_eig: Whether the largest entry comes first.
        abs_eig: Whether to sort by magnitude.
    """

    largest_eig: bool = False
    descending_eig: bool = True
    abs_eig: bool = False

    def order_at(
        self,
        model: torch.nn.Module,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        loss_fn: LossFn,
    ) -> np.ndarray:
        kernel = self.kernel(model, params, buffers, loss_fn)
        return eigen_order(kernel, self.largest_eig, self.descending_eig, self.abs_eig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AtConstruction:
    """The model that a fixed order is computed from, once."""

    model: torch.nn.Module = dataclasses.field(repr=False)
    params: Mapping[str, Tensor] = dataclasses.field(repr=False)
    buffers: Mapping[str, Tensor] = dataclasses.field(repr=False)
    loss_fn: LossFn = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKFixedEigen(_AtConstruction, NTKEigen):
    """The order of `NTKEigen` at the first parameters, in every epoch."""

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        return self.order_at(self.model, self.params, self.buffers, self.loss_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKFixedBalance(_AtConstruction, _KernelOrder):
    """The balanced order of the kernel's rows at the first parameters, in every epoch.

    Attributes:
        num_rounds: How often the rows are balanced.
    """

    num_rounds: int = 16

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        start = super().first_order(num_samples, shuffled, generator)
        kernel = self.kernel(self.model, self.params, self.buffers, self.loss_fn)
        return ntk_fixed_order(kernel, self.num_rounds, start)


BALANCE_TYPES["ntk-fixed"] = NTKFixedBalance
BALANCE_TYPES["ntk-eigen"] = NTKEigen
BALANCE_TYPES["ntk-fixed-eigen"] = NTKFixedEigen
