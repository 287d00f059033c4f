"""The gradients of one step together with the meter of their noise."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.step.accumulate import GradientBuffers
from xla_replica import Replica


class StepGradients:
    """Gradients that stay allocated, and a meter that sees the same ones.

    What becomes of the gradients (other parameters, a minibatch more, an end) becomes
    of the meter's squares too; here, so that neither can be forgotten.

    Args:
        inner: The torch optimizer whose parameters they are of.
        replica: The replica whose gradients these are.
        noise: Measures their noise, if anything does.

    Attributes:
        buffers: The gradients.
        noise: See the argument.
    """

    def __init__(
        self, inner: Optimizer, replica: Replica, noise: NoiseMeter | None
    ) -> None:
        self.buffers = GradientBuffers(replica)
        self.noise = noise
        self._inner = inner
        self._replica = replica
        self._known: set[nn.Parameter] = set()

    def take_in(self, parameters: list[nn.Parameter]) -> None:
        """Makes new parameters those of replica 0, and allocates their gradients."""
        for parameter in parameters:
            parameter.grad = None  # of a backward pass before this optimizer's time
        self._replica.sync()  # what replicas have pending is no part of a collective
        self._replica.broadcast_([parameter.detach() for parameter in parameters])
        self._known.update(parameters)
        self.buffers.refresh(parameters)
        if self.noise:
            self.noise.watch(self._inner.param_groups)

    def refresh(self, behind_backward: bool = False) -> None:
        """Follows ``requires_grad``; see `GradientBuffers.refresh`.

        Raises:
            ValueError: A parameter was never taken in.
        """
        parameters = parameters_of(self._inner)
        if not self._known.issuperset(parameters):
            raise ValueError(
                "a parameter group was added to the inner optimizer: add it through "
                "the wrapper's add_param_group, which makes it equal on all replicas"
            )
        changed = self.buffers.refresh(parameters, behind_backward)
        if changed and self.noise:
            self.noise.watch(self._inner.param_groups, behind_backward)

    def accept(self, num_accumulated: int) -> None:
        """Takes what a backward pass has left in ``.grad``.

        Args:
            num_accumulated: Minibatches that the step has accumulated before.

        Raises:
            ValueError: Minibatches would be lost, or other replicas could not follow.
        """
        if num_accumulated == 0:
            self.refresh(behind_backward=True)
        else:
            self.buffers.check_unchanged(parameters_of(self._inner))
        if self.noise:
            self.noise.drop_discarded()
        self.buffers.adopt(num_accumulated)

    def end_minibatch(self) -> None:
        """Measures the minibatch that was accepted.

        Raises:
            ValueError: It had several backward passes.
        """
        if self.noise:
            self.noise.end_minibatch()

    def stand_ready(self) -> None:
        """Prepares for an update to which this replica brings no minibatch."""
        self.refresh()
        self.buffers.rebind()

    def discard(self) -> None:
        """Zeroes them, and forgets what was measured of the step."""
        self.buffers.zero_()
        if self.noise:
            self.noise.end_step()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
