"""Gradients that stay allocated: accumulated, summed over replicas, zeroed in place.

Kept tensors make one graph of every minibatch and one of every update: a gradient that
is None at first and a tensor later would trace two of each, and a replica without
gradients would bring an empty list to the collective.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from variable_batch_size.gradient_noise.meter import NoiseMeter
from xla_replica import AccumulationNote, Replica

Gradients = Mapping[nn.Parameter, torch.Tensor]


class StepGradients:
    """The ``.grad`` of every trainable parameter, and the meter of their noise.

    What becomes of the gradients (other parameters, a minibatch more, an end) becomes
    of the meter's squares too; here, so that neither can be forgotten.
    """

    def __init__(
        self,
        inner: Optimizer,
        replica: Replica,
        noise: NoiseMeter | None,
        overlap: bool = True,
    ) -> None:
        self._inner = inner
        self._replica = replica
        self._noise = noise
        self._known: set[nn.Parameter] = set()
        # All parameters when gradients were last allocated, and which required them.
        self._seen: tuple[list[nn.Parameter], list[bool]] = ([], [])
        self._witness = GradientWitness()
        self._sum = replica.gradient_sum(
            self._is_unchanged, overlap, self._parameters()
        )
        self.add(self._parameters())

    @property
    def _gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        return self._sum.gradients

    def _is_unchanged(self) -> bool:
        """Returns whether parameters, and which of them are trained, are those seen.

        Asked several times a step; so it hashes no parameter, which Python would do.
        """
        parameters, (seen, trained) = self._parameters(), self._seen
        return (
            len(parameters) == len(seen)
            and all(map(operator.is_, parameters, seen))
            and [parameter.requires_grad for parameter in parameters] == trained
        )

    # --- which parameters are trained -----------------------------------------------

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Makes new parameters those of replica 0, and allocates their gradients."""
        for parameter in parameters:
            parameter.grad = None  # of a backward pass before this optimizer's time
        self._replica.sync()  # keeps what replicas have pending out of the collective
        self._replica.broadcast_([parameter.detach() for parameter in parameters])
        self._known.update(parameters)
        self._allocate(after_backward=False)

    def refresh(self, after_backward: bool = False) -> None:
        """Follows ``requires_grad``: allocates the unfrozen, drops the frozen.

        Must find the same on every replica; cheap when nothing has changed.

        Args:
            after_backward: Whether ``.grad`` holds the gradients of a minibatch. Those
                of new parameters then count, else they are dropped.
        """
        if self._is_unchanged():
            return
        if not self._known.issuperset(self._parameters()):
            raise ValueError(
                "a parameter group was added to the inner optimizer: add it through "
                "the wrapper's add_param_group, which makes it equal on all replicas"
            )
        self._allocate(after_backward)

    def _allocate(self, after_backward: bool) -> None:
        parameters = self._parameters()
        self._seen = (parameters, [p.requires_grad for p in parameters])
        trained = [p for p in parameters if p.requires_grad]
        new = {p for p in trained if after_backward and p not in self._gradients}
        for parameter in parameters:
            is_held = parameter in self._gradients
            if parameter.requires_grad != is_held and parameter not in new:
                parameter.grad = None
        self._sum.hold(trained)
        self._witness.watch(self._gradients, new)
        self._replica.sync()  # zeros on the device, not in the first graph
        if self._noise:
            self._noise.watch(self._inner.param_groups, after_backward)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._inner.param_groups for p in group["params"]]

    # --- a minibatch ----------------------------------------------------------------

    def accept(
        self,
        num_accumulated: int,
        weight: torch.Tensor | None = None,
        needs_backward: bool = True,
    ) -> None:
        """Takes in and measures what a backward pass has left in ``.grad``.

        Args:
            num_accumulated: Minibatches that the step has accumulated before.
            weight: The minibatch's weight, ``(1,)``, if minibatches have weights.
            needs_backward: Whether a minibatch without any gradient is an error.
        """
        if num_accumulated == 0:
            self.refresh(after_backward=True)
        elif not self._is_unchanged():
            raise ValueError(
                "requires_grad of a parameter changed between the minibatches of one "
                "step: freeze and unfreeze between steps, in a function that you "
                "attach, or between epochs"
            )
        try:
            self._witness.check(num_accumulated, needs_backward, self._sum.has_new)
        except ValueError:
            self._replica.check_parameters(self._parameters())  # wrapped since
            raise
        if self._noise:
            self._noise.drop_discarded()
        self._take_back_detached(num_accumulated)
        self._witness.begin(self._gradients)
        if self._noise:
            self._noise.end_minibatch(weight)

    def _take_back_detached(self, num_accumulated: int) -> None:
        """Puts the kept gradients back where ``model.zero_grad()`` took them away."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is gradient:
                continue
            if self._sum.has_begun(parameter):
                raise ValueError(
                    "a gradient was replaced after backward(), while it is summed over "
                    "replicas: change the summed gradient in a step hook of the inner "
                    "optimizer, or pass overlap=False (not for sharded models)"
                )
            if num_accumulated and not self._sum.keeps_apart(parameter):
                raise ValueError(lost(num_accumulated))
            with torch.no_grad():
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                else:  # thrown away, and no part of this minibatch
                    gradient.zero_()
            parameter.grad = gradient

    # --- an update ------------------------------------------------------------------

    def stand_in(self) -> None:
        """Prepares for an update to which this replica brings no minibatch."""
        self.refresh()
        self._sum.expect_none()

    def expect(
        self,
        is_first: bool,
        is_last: bool,
        num_minibatches: int,
        divisor: int | None,
        counts: bool,
    ) -> None:
        """See `GradientSum.expect`, and `NoiseMeter.expect`."""
        if self._noise:
            self._noise.expect(num_minibatches)
        self._sum.expect(is_first, is_last, divisor, counts)

    def sum_(
        self, *others: torch.Tensor, divisor: int | torch.Tensor | None = None
    ) -> None:
        """See `GradientSum.sum_`."""
        self._sum.sum_(*others, divisor=divisor)

    def divide_(self, divisor: torch.Tensor) -> None:
        """See `GradientSum.divide_`."""
        self._sum.divide_(divisor)

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients to a global norm of at most ``max_norm``.

        Returns the norm that they had.
        """
        # In an order that no replica and no resumed run has for itself.
        trained = [p for p in self._parameters() if p in self._gradients]
        return self._sum.clip_(trained, max_norm)

    def discard(self) -> None:
        """Zeroes the gradients, and forgets what was measured of the step."""
        self._sum.forget()
        self._witness.begin(self._gradients)
        if self._noise:
            self._noise.end_step()


class GradientWitness:
    """Notices gradients that were changed by others than autograd, or not at all.

    Between the minibatches of a step ``.grad`` holds a partial sum. Clipping it there,
    or zeroing it, makes a wrong mean without a word. torch counts the writes to every
    tensor (``tensor._version``), on every kind of device and without work there: a hook
    notes the count after each accumulation, and a later count tells of another writer.

    Gradients that no backward pass has added to since the last `step` may be written by
    hand in any way; they are somebody's own gradients.
    """

    def __init__(self) -> None:
        self._records: dict[nn.Parameter, _Record] = {}
        self._handles: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._sees_all = True

    def watch(self, gradients: Gradients, new: Collection[nn.Parameter]) -> None:
        """Watches what accumulates in these gradients, and in no others.

        Args:
            gradients: By parameter: what ``.grad`` is to be.
            new: Parameters whose ``.grad`` holds that of a minibatch already.
        """
        for parameter in [p for p in self._records if p not in gradients]:
            self._handles.pop(parameter).remove()
            del self._records[parameter]
        # A sharded one is written part by part.
        self._sees_all = all(type(g) is torch.Tensor for g in gradients.values())
        for parameter, gradient in gradients.items():
            if type(gradient) is not torch.Tensor:
                continue
            if parameter in self._records:
                self._records[parameter].follow(gradient)
                continue
            record = _Record()
            record.begin(gradient, is_none=False)
            record.accumulated = parameter in new
            self._records[parameter] = record
            note = AccumulationNote(record.note)
            handle = parameter.register_post_accumulate_grad_hook(note)
            self._handles[parameter] = handle

    def begin(self, gradients: Gradients) -> None:
        """Takes gradients as they are now for what the next minibatch begins with."""
        for parameter, record in self._records.items():
            record.begin(gradients[parameter], parameter.grad is None)

    def check(
        self, num_accumulated: int, needs_backward: bool, has_new: bool | None
    ) -> None:
        """Raises ValueError if this minibatch's gradients are not its own.

        Args:
            num_accumulated: Minibatches that the step has accumulated before.
            needs_backward: Whether a minibatch without any gradient is an error.
            has_new: See `GradientSum.has_new`.
        """
        is_new = not (self._records and self._sees_all) if has_new is None else has_new
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

    __slots__ = ("_gradient", "_version", "_was_none", "accumulated", "overwritten")

    def begin(self, gradient: torch.Tensor, is_none: bool) -> None:
        """Begins a minibatch with a kept gradient, which ``.grad`` may not hold yet."""
        self._was_none = is_none
        self.accumulated = self.overwritten = False
        self.follow(gradient)

    def follow(self, gradient: torch.Tensor) -> None:
        """Takes another tensor, or this one as it is now, for what was noted."""
        self._gradient, self._version = gradient, gradient._version

    def note(self, parameter: nn.Parameter) -> None:
        """Runs after every accumulation."""
        gradient = parameter.grad
        # An accumulation is one write. (Another tensor is noticed where gradients are
        # taken back.)
        if gradient is self._gradient and gradient._version != self._version + 1:
            self.overwritten = True
        self.follow(gradient)
        self.accumulated = True

    def written(self, gradient: torch.Tensor | None) -> bool:
        """Returns whether ``gradient`` differs from what was noted last."""
        if gradient is None and self._was_none and not self.accumulated:
            return False
        return gradient is not self._gradient or gradient._version != self._version
