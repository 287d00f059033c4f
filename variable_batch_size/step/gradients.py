"""Gradients that stay allocated: accumulated, summed over replicas, zeroed in place.

Kept tensors make one graph of every minibatch and one of every update: a gradient that
is None at first and a tensor later would trace two of each, and a replica without
gradients would bring an empty list to the collective.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from variable_batch_size.device_scalars import operand_for
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.step.witness import GradientWitness, lost
from xla_replica import Replica


class StepGradients:
    """The ``.grad`` of every trainable parameter, and the meter of their noise.

    What becomes of the gradients (other parameters, a minibatch more, an end) becomes
    of the meter's squares too; here, so that neither can be forgotten.
    """

    def __init__(
        self, inner: Optimizer, replica: Replica, noise: NoiseMeter | None
    ) -> None:
        self._inner = inner
        self._replica = replica
        self._noise = noise
        self._known: set[nn.Parameter] = set()
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._witness = GradientWitness()
        self.add(self._parameters())

    # --- which parameters are trained -----------------------------------------------

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Makes new parameters those of replica 0, and allocates their gradients."""
        for parameter in parameters:
            parameter.grad = None  # of a backward pass before this optimizer's time
        self._replica.sync()  # keeps what replicas have pending out of the collective
        self._replica.broadcast_([parameter.detach() for parameter in parameters])
        self._known.update(parameters)
        self._allocate(parameters, after_backward=False)
        if self._noise:
            self._noise.watch(self._inner.param_groups)

    def refresh(self, after_backward: bool = False) -> None:
        """Follows ``requires_grad``: allocates the unfrozen, drops the frozen.

        Must find the same on every replica; cheap when nothing has changed.

        Args:
            after_backward: Whether ``.grad`` holds the gradients of a minibatch. Those
                of new parameters then count, else they are dropped.
        """
        parameters = self._parameters()
        if not self._known.issuperset(parameters):
            raise ValueError(
                "a parameter group was added to the inner optimizer: add it through "
                "the wrapper's add_param_group, which makes it equal on all replicas"
            )
        if self._allocate(parameters, after_backward) and self._noise:
            self._noise.watch(self._inner.param_groups, after_backward)

    def _allocate(self, parameters: list[nn.Parameter], after_backward: bool) -> bool:
        """Returns whether any of the parameters was frozen, unfrozen or new."""
        changed = False
        for parameter in parameters:
            if parameter.requires_grad == (parameter in self._gradients):
                continue
            changed = True
            if parameter.requires_grad:
                if parameter.grad is None or not after_backward:
                    parameter.grad = torch.zeros_like(parameter)
                self._gradients[parameter] = parameter.grad
                self._witness.watch(parameter, after_backward)
            else:
                parameter.grad = None
                del self._gradients[parameter]
                self._witness.forget(parameter)
        if changed:
            self._replica.sync()  # zeros on the device, not in the first graph
        return changed

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
        elif any(p.requires_grad != (p in self._gradients) for p in self._parameters()):
            raise ValueError(
                "requires_grad of a parameter changed between the minibatches of one "
                "step: freeze and unfreeze between steps, in a function that you "
                "attach, or between epochs"
            )
        self._witness.check(num_accumulated, needs_backward)
        if self._noise:
            self._noise.drop_discarded()
        self._take_back_detached(num_accumulated)
        self._witness.begin()
        if self._noise:
            self._noise.end_minibatch(weight)

    def _take_back_detached(self, num_accumulated: int) -> None:
        """Puts the kept gradients back where ``model.zero_grad()`` took them away."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is gradient:
                continue
            if num_accumulated:
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
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient  # the user may have put something else there

    def sum_(self, *others: torch.Tensor) -> None:
        """Replaces gradients, and the others, by their sums over replicas.

        One collective sums them all.
        """
        self._replica.all_reduce_([*self._gradients.values(), *others])

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divides gradients by ``divisor``, ``(1,)``.

        A multiplication by the reciprocal would round twice.
        """
        for gradient in self._gradients.values():
            gradient.div_(operand_for(gradient, divisor))

    def clip_(self, max_norm: float) -> None:
        """Scales all gradients so that their global norm is at most ``max_norm``."""
        nn.utils.clip_grad_norm_(list(self._gradients), max_norm)

    def discard(self) -> None:
        """Zeroes the gradients, and forgets what was measured of the step."""
        with torch.no_grad():
            for gradient in self._gradients.values():
                gradient.zero_()
        self._witness.begin()
        if self._noise:
            self._noise.end_step()
