"""Who wrote the kept gradients: autograd, or somebody between its passes.

Between the minibatches of a step ``.grad`` holds a partial sum. Clipping it there, or
zeroing it, makes a wrong mean without a word. torch counts the writes to every tensor
(``tensor._version``), on every kind of device and without work there: a hook notes the
count after each accumulation, and a later count tells of another writer.
"""

from __future__ import annotations

import torch
from torch import nn


class GradientWitness:
    """Notices gradients that were changed by others than autograd, or not at all.

    Gradients that no backward pass has added to since the last `step` may be written by
    hand in any way; they are somebody's own gradients.
    """

    def __init__(self) -> None:
        self._records: dict[nn.Parameter, _Record] = {}
        self._handles: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._sees_all = True

    def watch(self, parameter: nn.Parameter, after_backward: bool) -> None:
        """Begins to watch what accumulates in ``parameter.grad``, a kept tensor.

        Args:
            parameter: A trainable parameter.
            after_backward: Whether the gradient holds that of a minibatch already.
        """
        if type(parameter.grad) is not torch.Tensor:
            self._sees_all = False  # a sharded one, which is written part by part
            return
        record = _Record(parameter.grad)
        record.accumulated = after_backward
        self._records[parameter] = record
        hook = record.note
        self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def forget(self, parameter: nn.Parameter) -> None:
        """Ends watching a parameter, which is frozen now."""
        if parameter in self._records:
            self._handles.pop(parameter).remove()
            del self._records[parameter]

    def begin(self) -> None:
        """Takes gradients as they are now for what the next minibatch begins with."""
        for record in self._records.values():
            record.begin()

    def check(self, num_accumulated: int, needs_backward: bool) -> None:
        """Raises ValueError if this minibatch's gradients are not its own.

        Args:
            num_accumulated: Minibatches that the step has accumulated before.
            needs_backward: Whether a minibatch without any gradient is an error.
        """
        is_new = not (self._records and self._sees_all)
        for parameter, record in self._records.items():
            gradient = parameter.grad
            written = record.written(gradient)
            is_new |= record.accumulated or written
            if record.accumulated and written and gradient is not None:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} "
                    "was changed between backward() and step(), where it is a sum of "
                    "some of the step's minibatches on one of the replicas: clip the "
                    "whole step's mean with max_grad_norm=, or change it in a hook of "
                    "optimizer.register_step_pre_hook, which runs once an update"
                )
            if record.overwritten and num_accumulated:
                raise ValueError(lost(num_accumulated))
        if needs_backward and not is_new:
            raise ValueError(
                "step() without backward(): no gradient has changed since the last "
                "step(). Call loss.backward() before every step(). A minibatch that "
                "shall add nothing needs gradients of zero: "
                "(0 * sum(p.sum() for p in model.parameters())).backward()"
            )


def lost(num_accumulated: int) -> str:
    """Returns the message of an error: what was accumulated would not count."""
    return (
        "gradients were replaced or overwritten while this step accumulates them, so "
        f"its first {num_accumulated} minibatches would be lost: remove "
        "model.zero_grad() from the training loop; the optimizer zeroes gradients "
        "itself"
    )


class _Record:
    """What is known of one gradient.

    It holds no parameter, so that a hook keeps nothing alive.

    Attributes:
        accumulated: Whether autograd has added to it since `begin`.
        overwritten: Whether somebody else had written to it before that.
    """

    __slots__ = ("_gradient", "_kept", "_version", "accumulated", "overwritten")

    def __init__(self, kept: torch.Tensor) -> None:
        self._kept = kept
        self.begin()

    def begin(self) -> None:
        self._gradient, self._version = self._kept, self._kept._version
        self.accumulated = self.overwritten = False

    def note(self, parameter: nn.Parameter) -> None:
        """Runs after every accumulation."""
        gradient = parameter.grad
        version = gradient._version
        # An accumulation is one write. (Another tensor is noticed where gradients are
        # taken back.)
        if version != self._version + 1 and gradient is self._gradient:
            self.overwritten = True
        self._gradient, self._version = gradient, version
        self.accumulated = True

    def written(self, gradient: torch.Tensor | None) -> bool:
        """Returns whether ``gradient`` differs from what was noted last."""
        return gradient is not self._gradient or gradient._version != self._version
