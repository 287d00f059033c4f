"""What the passes of a training loop give to the balance."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grab_xla.gradients.groups import add_gradient, group_gradients, parameters_of
from grab_xla.gradients.samples import sample_gradients
from per_sample_grad import Capture
from xla_replica.common.arguments import check_choice


class TrainingPasses:
    """Captures passes, and places what is balanced of them: a part of `GraBSampler`.

    Its constructor sets what these methods use and has no value here.
    """

    _reduction: str | None = None  # that of the last `backward`
    # What runs the backward pass of the last forward pass, until it has.
    _pass: Callable[..., Mapping[str, Tensor] | Tensor] | None = None
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
        if not self._balancer.uses_gradients:
            return contextlib.nullcontext()
        parameters = parameters_of(model, self._matrix.shapes)
        self._is_recorded = True
        if self.fidelity == "group":
            given = parameters, self._columns.dtype
            self._pass = functools.partial(group_gradients, *given)
            return contextlib.nullcontext()
        capture = Capture(model, [*parameters], **options)
        self._pass = functools.partial(sample_gradients, capture, self.projection)
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
        is_group = self.fidelity == "group"
        if losses.dim() != 1 and not is_group:
            raise ValueError(
                f"backward() with losses of shape {tuple(losses.shape)}: give one "
                'number per sample, shape (B,), as with reduction="none"'
            )
        run, self._pass = self._pass, None
        rows: Mapping[str, Tensor] | Tensor = {}
        if not self._balancer.uses_gradients:
            add_gradient(losses, reduction)
        elif run is None:
            raise RuntimeError(
                "backward() without record(): compute the losses inside `with "
                "sampler.record(model):`, once for every backward()"
            )
        else:
            rows = run(losses, reduction, from_samples)
        self._reduction = reduction
        num_rows, num_losses = (1, losses.numel()) if is_group else (len(losses), None)
        self._place(rows, num_rows, indices, num_losses if losses.dim() else None)

    def _place(
        self,
        rows: Mapping[str, Tensor] | Tensor,
        num_rows: int,
        indices: Sequence[int] | Tensor | None,
        num_losses: int | None = None,
    ) -> None:
        """Balances what a step has of every sample, or keeps it until the update."""
        self._is_recorded = False
        if self._progress.claim(num_rows, indices, num_losses):
            with self._timer("sorter_step"), torch.no_grad():
                pieces = self._matrix.pieces(rows, self._balancer.piece_size)
                self._progress.place(pieces)

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
            per_sample_grads: ``(B, *shape)`` for every parameter; with
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
        grads, num_rows = self._matrix.checked(per_sample_grads, batch)
        self._place(grads, num_rows, indices)
