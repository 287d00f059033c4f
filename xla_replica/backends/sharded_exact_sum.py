"""Gradients that FSDP2 scatters as integers: sharding has no part in the bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xla_replica.backends.sharded_sum import ShardedSum, local
from xla_replica.device.gradients import weak_hook
from xla_replica.device.row_units import RowUnits, num_rows
from xla_replica.device.sharded import is_sharded, whole


class ShardedExactSum(ShardedSum):
    """Adds the gradients of every minibatch as integers, with the same bits everywhere.

    A whole gradient is rounded to multiples of its rows' units before FSDP2 scatters
    it, which adds them in float64, and so without rounding. A replica adds its part of
    that to int32, or int64 where a step has many minibatches; members sum these.
    ``.grad`` is None but in a backward pass and, as the mean, in the update.

    Args:
        floats: Sums the same gradients as floats.
        units: Those of all parameters.
        names: The parameters' there.
    """

    def __init__(
        self, floats: ShardedSum, units: RowUnits, names: Mapping[nn.Parameter, str]
    ) -> None:
        super().__init__(
            floats._replica, floats._may_begin, floats._shards, floats._begin,
            floats._is_whole,
        )  # fmt: skip
        self._row_units, self._names = units, names
        self._totals: dict[nn.Parameter, torch.Tensor] = {}
        self._rounded: set[str] = set()  # in this minibatch
        self._versions: dict[nn.Parameter, int] = {}  # of ``.grad``, when it was added
        # What FSDP2 has summed for a module, and how much of that is added.
        self._flat: Any = torch.empty(0)
        self._num_added = 0
        self._divisor: int | torch.Tensor = 1

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        super().hold(parameters)
        for unit in self._units:
            unit.set_all_reduce_hook(weak_hook(self._receive))
        for parameter, place in zip(parameters, self._places):
            place.rounding = weak_hook(self._round, self._names[parameter])

    # --- the passes -----------------------------------------------------------------

    def prepare_backward(
        self, is_first: bool, is_last: bool, divisor: int | None, counts: bool
    ) -> None:
        super().prepare_backward(is_first, is_last, divisor, counts)
        self._rounded.clear()
        self._summed.clear()  # it is in totals, and no longer in ``.grad``

    def _round(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype == torch.float16:
            raise TypeError(
                f"exact=: the gradient of {name!r} is float16, which cannot hold the "
                "integers that FSDP2 sums: compute in bfloat16 or float32"
            )
        if name in self._rounded:
            raise ValueError(
                f"exact=: the gradient of {name!r} was accumulated twice in a "
                "minibatch: with FSDP2 call backward() once per step(), and checkpoint "
                "with use_reentrant=False"
            )
        self._rounded.add(name)
        return self._row_units.rounded(name, gradient)

    def _receive(self, flat: torch.Tensor) -> None:
        """Takes what FSDP2 has summed for a module, before it becomes ``.grad``."""
        if flat.dtype != torch.float64:
            raise TypeError(
                f"exact=: FSDP2 sums gradients in {flat.dtype}, which rounds: pass "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64) to "
                "fully_shard"
            )
        self._check_added()
        self._flat, self._num_added = flat, 0

    def note(self, parameter: nn.Parameter) -> None:
        """Adds this replica's part of a parameter, in the order in which FSDP2 goes on.

        Parts are padded to the largest one.
        """
        num_own, first = local(parameter).numel(), self._num_added
        dim, length = _split(parameter)
        self._num_added += length * (parameter.numel() // max(1, parameter.shape[dim]))
        self._check_added(is_all=False)
        self._add(parameter, self._flat[first:][:num_own])
        self._versions[parameter] = local(parameter.grad)._version
        super().note(parameter)

    def _add(self, parameter: nn.Parameter, multiples: torch.Tensor) -> None:
        if parameter in self.gradients:
            total = self._part(parameter)
            total.add_(multiples.to(total.dtype))

    def _part(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in self._totals:
            own = local(parameter)
            dtype = torch.int64 if self._row_units.is_wide else torch.int32
            self._totals[parameter] = own.new_zeros(own.numel(), dtype=dtype)
        return self._totals[parameter]

    def _check_added(self, is_all: bool = True) -> None:
        """Raises ValueError if FSDP2 has summed others than these parameters."""
        num_left = self._flat.numel() - self._num_added
        if num_left < 0 or (is_all and num_left):
            raise ValueError(
                "exact=: a module that fully_shard was called on has gradients of "
                "parameters that this optimizer does not train: give all of them to "
                "one optimizer, and change requires_grad in an attached function, or "
                "between epochs"
            )

    def end_minibatch(self) -> None:
        """Adds the gradients that FSDP2 does not sum."""
        self._check_added()
        self._flat, self._num_added = torch.empty(0), 0
        for parameter, gradient in self.gradients.items():
            version = self._versions.pop(parameter, None)
            is_same = parameter.grad is gradient and local(gradient)._version == version
            if version is not None and not is_same:
                raise ValueError(
                    "a gradient was changed after backward(), when it was added: "
                    "clip by max_grad_norm=, or change it in a step hook"
                )
            if not is_sharded(parameter) and parameter.grad is not None:
                self._add(parameter, parameter.grad.reshape(-1))
            if parameter in self._reduced or not is_sharded(parameter):
                parameter.grad = None  # it is in its total

    # --- the sum --------------------------------------------------------------------

    def sum_(self, others: Sequence[torch.Tensor], divisor: Any) -> None:
        self._divisor = 1 if divisor is None else divisor
        super().sum_(others, None)

    def commit(self) -> None:
        """Makes ``.grad`` the means that the sums amount to; weighted ones are sums."""
        divisors = self._row_units.divisors(self._divisor)
        for parameter, gradient in self.gradients.items():
            mean = local(gradient)
            if mean.numel():
                by_row = divisors[self._rows(parameter)]
                multiples = self._part(parameter).view(len(by_row), -1)
                mean.copy_((multiples / by_row).view(mean.shape))
            parameter.grad = gradient

    def _rows(self, parameter: Any) -> slice:
        """Returns which of all rows this replica's part of a parameter has."""
        rows = self._row_units.rows[self._names[parameter]]
        if num_rows(parameter) == 1 or not is_sharded(parameter):
            return rows
        dim, length = _split(parameter)
        if dim > 0:  # it has a part of all of them
            return rows
        first = rows.start + parameter.device_mesh.get_coordinate()[-1] * length
        return slice(first, first + len(local(parameter)))

    def _norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Returns the norm of whole gradients, as torch does, one after another."""
        gradients: Any = (whole(parameter.grad) for parameter in parameters)
        norms = [torch._foreach_norm([each])[0] for each in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))

    def clear(self) -> None:
        super().clear()
        self._totals.clear()
        self._versions.clear()
        self._flat, self._num_added = torch.empty(0), 0
        for parameter in self.gradients:
            parameter.grad = None


def _split(parameter: Any) -> tuple[int, int]:
    """Returns which dimension of a parameter is split, and how long most parts are."""
    dim, mesh = parameter.placements[-1].dim, parameter.device_mesh
    return dim, -(-parameter.shape[dim] // mesh.size(mesh.ndim - 1))
