"""What the passes of a training loop give to the balance."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grab_xla.gradients.groups import add_gradient, group_gradients, parameters_of
from grab_xla.gradients.samples import sample_gradients
from per_sample_grad import Capture, CoverageError
from xla_replica.common.arguments import check_choice


class TrainingPasses:
    """Captures passes, and places what is balanced of them: a part of `GraBSampler`.

    Its constructor sets what these methods use and has no value here.
    """

    _reduction: str | None = None  # that of the last `backward`
    # The last forward pass, until its `backward`.
    _recorded: Capture | dict[str, torch.nn.Parameter] | None = None
    _is_recorded = False  # without a `backward` or a `step` since

    def record(
        self, model: torch.nn.Module, **options: Any
    ) -> Capture | contextlib.AbstractContextManager[None]:
        """Returns a context in which a forward pass is recorded for `backward`.

        Args:
            model: The module with the parameters that the sampler was built with.
            **options: Those of `per_sample_grad.Capture`, such as ``fallback``; a
                ``"group"`` needs none and ignores them, as does an order that needs no
                gradients.
        """
        if not self._uses_gradients:
            return contextlib.nullcontext()
        parameters = parameters_of(model, self._matrix.shapes)
        if self.fidelity == "group":
            self._recorded, self._is_recorded = parameters, True
            return contextlib.nullcontext()
        self._recorded = capture = Capture(model, [*parameters], **options)
        self._is_recorded = True
        return capture

    def backward(
        self,
        losses: Tensor,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        indices: Sequence[int] | Tensor | None = None,
        from_samples: bool = False,
    ) -> None:
        """Does what ``losses.mean().backward()`` does, and balances, in one pass.

        Collective, as `step` is. What ``.grad`` gets is the same to the bit, or with
        ``from_samples`` up to rounding.

        Args:
            losses: ``(B,)``, computed from the model inside `record`. Of a group it may
                also be the mean itself, ``()``.
            reduction: ``"sum"`` for ``losses.sum().backward()``, as for an elastic
                optimizer that counts tokens; then losses are sums over tokens.
            indices: As for `step`.
            from_samples: With ``fidelity="exact"``, ``.grad`` gets the mean of the
                gradients that are formed to be balanced, and the pass does not form it
                once more. All parameters that are trained must be the sampler's. With
                other fidelities nothing is formed, and this changes nothing.

        Raises:
            RuntimeError: Nothing was recorded.
            PerSampleError: Some use of a parameter is not accounted for; the message
                says what to do. With ``from_samples``, the losses depend on something
                else that takes a gradient.
            ValueError: As for `step`; or these are not the losses of one group, or
                ``reduction`` is not allowed.
        """
        check_choice("reduction", reduction, ("mean", "sum"))
        is_group = self._group_size > 1
        if is_group:
            self._check_group(losses)
        elif losses.dim() != 1:
            raise ValueError(
                f"backward() with losses of shape {tuple(losses.shape)}: give one "
                'number per sample, shape (B,), as with reduction="none"'
            )
        num_rows = 1 if is_group else len(losses)
        if not self._uses_gradients:
            add_gradient(losses, reduction)
            self._reduction = reduction
            self._progress.claim(num_rows, indices)
            return
        recorded = self._recorded
        if recorded is None:
            raise RuntimeError(
                "backward() without record(): compute the losses inside `with "
                "sampler.record(model):`, once for every backward()"
            )
        self._recorded = None
        rows: Mapping[str, Tensor] | Tensor
        if isinstance(recorded, Capture):
            try:
                rows = sample_gradients(
                    recorded, losses, reduction, self.projection, from_samples
                )
            except CoverageError as error:
                raise CoverageError(
                    f"{error}. Give such options to sampler.record(), or balance "
                    "groups of samples, for any model: GraBSampler(..., "
                    'fidelity="group")'
                ) from error
        else:
            dtype, projects = self._columns.dtype, self.projection is not None
            rows = group_gradients(recorded, losses, reduction, dtype, projects)
        self._reduction = reduction
        self._place(rows, num_rows, indices)

    def _check_group(self, losses: Tensor) -> None:
        """Raises ValueError if these cannot be the losses of the next group."""
        group = self._progress.next_samples(1)
        if losses.dim() and len(group) and losses.shape != group.shape:
            raise ValueError(
                f"backward() with losses of {tuple(losses.shape)} for a group of "
                f"{len(group)}: pass group_size={self._group_size} as batch_size= to "
                "the DataLoader, too"
            )

    def _place(
        self,
        rows: Mapping[str, Tensor] | Tensor,
        num_rows: int,
        indices: Sequence[int] | Tensor | None,
    ) -> None:
        """Balances what a step has of every sample, or keeps it until the update."""
        self._is_recorded = False
        progress, balancer = self._progress, self._balancer
        if not progress.claim(num_rows, indices):
            return
        with self._timer("sorter_step"), torch.no_grad():
            pieces = self._matrix.pieces(rows, balancer.piece_size)
            if progress.waits or self._replica.num_replicas > 1:
                [piece] = pieces
                balancer.place_together(piece, progress.end, progress.waits)
            else:
                balancer.place(pieces)

    def step(
        self,
        per_sample_grads: Mapping[str, Tensor],
        batch: bool = True,
        *,
        indices: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Takes the gradients of the next samples of the order.

        Collective: every replica calls it once per batch, with the same number of
        samples. Under an elastic sampler several replicas keep gradients until the
        update; see `after_update`.

        Args:
            per_sample_grads: ``(B, *shape)`` for every parameter, or, where projections
                are balanced, what `projection` makes of them; with
                ``fidelity="group"`` the mean gradients of B groups. A constant factor
                does not change the order; a factor that differs between batches does.
            batch: False for one sample, or group, without a batch axis.
            indices: ``(B,)``, the samples of these gradients, to be compared with the
                order. Keep them on the CPU, because reading them is a transfer.

        Raises:
            ValueError, TypeError: Names, shapes or the number of gradients are wrong,
                ``indices`` are not the next samples of the order, or, without them,
                these are more samples than were drawn of it.
        """
        num_rows = self._matrix.count(per_sample_grads, batch)
        if not batch:
            per_sample_grads = {n: g.unsqueeze(0) for n, g in per_sample_grads.items()}
        self._place(per_sample_grads, num_rows, indices)
