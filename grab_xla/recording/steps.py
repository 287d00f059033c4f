"""The steps of an epoch: recorded passes, or gradients that were given."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grab_xla.epoch.orders import GraBWarning
from grab_xla.epoch.progress import Progress
from grab_xla.recording.capturing import Recording
from grab_xla.recording.group_gradients import GroupGradients, add_gradient
from grab_xla.recording.vectors import Vectors
from per_sample_grad import Capture


class Steps:
    """Has the gradients of every step balanced; see the methods of `GraBSampler`.

    Args:
        recording: What records a forward pass and returns what is balanced of it.
        vectors: What makes the vectors of the balance of it.
        progress: Whose gradients they are.
        timer: Makes a context from a name.
    """

    def __init__(
        self,
        recording: Recording | GroupGradients,
        vectors: Vectors,
        progress: Progress,
        timer: Callable[[str], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._recording, self._vectors = recording, vectors
        self._progress, self._timer = progress, timer
        self._group_size = progress.group_size
        # A group's one row is formed.
        takes_factors = isinstance(recording, Recording) and vectors.takes_factors
        self._takes_factors = takes_factors
        self._reduction: str | None = None  # that of the last `backward`
        self._is_recorded = False  # without a `backward` or a `step` since

    def begin_epoch(self) -> None:
        """Warns if nothing was balanced of what was recorded."""
        if self._is_recorded and self._progress.balancer.num_seen == 0:
            warnings.warn(
                "forward passes were recorded, but backward() was never called, so the "
                "order stays the same: call sampler.backward(losses) in place of "
                "losses.mean().backward()",
                GraBWarning,
                stacklevel=3,
            )
        self._is_recorded = False

    def record(
        self, model: nn.Module, options: Mapping[str, Any]
    ) -> Capture | contextlib.AbstractContextManager[None]:
        """Returns a context in which a forward pass is recorded."""
        if not self._progress.uses_gradients:
            return contextlib.nullcontext()
        started = self._recording.start(model, options)
        self._is_recorded = True
        return started

    def backward(
        self,
        losses: Tensor,
        reduction: str,
        indices: Sequence[int] | Tensor | None,
        from_samples: bool,
    ) -> None:
        """Runs the backward pass, and balances."""
        progress = self._progress
        expected = self._group_of(losses)
        if not progress.uses_gradients:
            add_gradient(losses, reduction)
            self._reduction = reduction
            num_groups = len(losses) if self._group_size == 1 else 1
            progress.take(num_groups, indices, expected)
            return
        taker = None
        if self._takes_factors and progress.balancer.takes_factored(losses.numel()):
            taker = progress.ordering
        rows = self._recording.backward(losses, reduction, taker, from_samples)
        self._reduction = reduction
        if isinstance(rows, Mapping):
            self.step(rows, True, indices)
            return
        self._is_recorded = False
        if progress.take(len(rows), indices, expected):
            with self._timer("sorter_step"), torch.no_grad():
                self._vectors.balance_rows(rows, progress)

    def _group_of(self, losses: Tensor) -> np.ndarray | None:
        """Returns the samples of the next group, if these are losses of its samples.

        Raises:
            ValueError: They cannot be.
        """
        if self._group_size == 1:
            if not self._progress.uses_gradients and losses.dim() != 1:
                raise ValueError(
                    f"backward() with losses of shape {tuple(losses.shape)}: give one "
                    'number per sample, shape (B,), as with reduction="none"'
                )
            return None
        if not losses.dim():
            return None
        group = self._progress.next_samples(1)
        if len(group) and losses.shape != group.shape:
            raise ValueError(
                f"backward() with losses of shape {tuple(losses.shape)}, but the "
                f"next group has {len(group)} samples: with "
                f"group_size={self._group_size} every backward pass is of one "
                "group, so pass the same number as batch_size= to the DataLoader, "
                "or as minibatch_size= to CustomSampler"
            )
        return group

    def step(
        self,
        grads: Mapping[str, Tensor],
        batch: bool,
        indices: Sequence[int] | Tensor | None,
    ) -> None:
        """Balances gradients that were given."""
        num_rows = self._vectors.count(grads, batch)
        self._is_recorded = False
        if self._progress.take(num_rows, indices):
            with self._timer("sorter_step"), torch.no_grad():
                self._vectors.balance(grads, batch, num_rows, self._progress)

    def check_reduction(self, update: Any) -> None:
        """Raises ValueError unless ``.grad`` has what an update's optimizer expects."""
        expected = "mean" if getattr(update, "weight", None) is None else "sum"
        if self._reduction not in (None, expected):
            raise ValueError(
                f"the optimizer's reduction is {expected!r}, but backward() left the "
                f"gradient of the {self._reduction} of the losses in .grad: call "
                f"sampler.backward(losses, reduction={expected!r})"
            )
