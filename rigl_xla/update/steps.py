"""The steps of a pruner: what each of them collects, and which change the topology."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch.optim import Optimizer

from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, added, zero_inactive_
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.methods import Method
from rigl_xla.topology.update_schedule import UpdateSchedule
from rigl_xla.update.topology_update import change_
from xla_replica import Replica, traits
from xla_replica.device.row_units import Rider, Total

# So many steps beside delta may go without one of the optimizer, as those in which a
# GradScaler looks for its scale.
_PATIENCE = 100

# A running mean leaves out the steps in which an optimizer makes its state, so that the
# program of a step that collects nothing is compiled here, and not after the last
# update, when such steps come back.
_FIRST_OF_MEAN = 3


@dataclasses.dataclass(eq=False)
class TopologySteps:
    """The state of a pruner: counts steps, collects gradients, changes the topology.

    Args:
        weights: All weights that can be sparse.
        layers: Those that are.
        options: The user's.
        number: The number of the last step.
        num_updates: Updates of the topology up to then.

    """

    weights: list[Weight]
    layers: list[SparseLayer]
    options: Options
    number: int = 0
    num_updates: int = 0

    def __post_init__(self) -> None:
        self._method = self.options.method_in_use
        self._replaced = False  # the optimizer's step, by an update of the topology
        self._num_uncalled = 0  # steps of the optimizer since the last `end`,
        self._num_unstepped = 0  # and the other way round

    @property
    def collects(self) -> bool:
        """Whether the dense gradients of the next step are needed."""
        return collects(self._method, self.options, self.number + 1)

    @property
    def is_collecting(self) -> bool:
        """Whether there are gradients that later steps add to."""
        method, number = self._method, self.number
        if method.collects == "updates" and self.options.is_update(number):
            return False
        return all(collects(method, self.options, n) for n in (number, number + 1))

    # --- during a step --------------------------------------------------------------

    def end_backward(self) -> None:
        """Makes up for what only seemed to be discarded; see `SparseLayer`."""
        if self.collects:
            for layer in self.layers:
                layer.end_backward()

    @torch.no_grad()
    def collect_assigned(self, replica: Replica) -> None:
        """Masks gradients that no hook has seen, and collects them where needed."""
        alone = replica.num_replicas == 1
        for layer in self.layers:
            grad = layer.weight.parameter.grad
            if grad is None or layer.hooked:
                continue
            layer.follow(grad.device)
            if self.collects:
                is_dense = layer.add_assigned()
                can_read = alone and traits(grad).is_host
                layer.has_gradients |= not can_read or bool(is_dense)
            zero_inactive_(grad.detach(), layer.mask)

    def note_optimizer_step(self) -> None:
        """Counts a step of the optimizer that `end` has to allow, and to count itself.

        Raises:
            RuntimeError: It was not allowed, or `end` is never called.
        """
        self._num_uncalled, self._num_unstepped = self._num_uncalled + 1, 0
        if self._replaced:
            raise RuntimeError(
                f"optimizer.step() ran in step {self.number} although pruner() had "
                "returned False: `if pruner(): optimizer.step()`, or skip_step=False"
            )
        is_expected = self._method.updates and self.number < self.options.last_update
        if is_expected and self._num_uncalled > self.options.delta:
            raise RuntimeError(
                f"the optimizer took {self._num_uncalled} steps without a call of the "
                "pruner: call it in each, or build it with skip_step=False"
            )

    # --- its end --------------------------------------------------------------------

    @torch.no_grad()
    def end(self, optimizer: Optimizer, replica: Replica) -> bool:
        """Counts a step and returns whether it was one that changes the topology.

        Raises:
            RuntimeError: It is, but there was no gradient to make the update from; or
                the optimizer has not stepped for long.
        """
        is_update = self._method.updates and self.options.is_update(self.number + 1)
        self._check_end(is_update)
        self._replaced = is_update and self.options.skip_step
        self._num_uncalled = 0
        self._num_unstepped += self.options.skip_step
        if self.collects and self.layers:
            is_summed = getattr(optimizer, "repeatable", None) is not None
            self._collect(None if is_summed else replica)
        self.number += 1
        for layer in self.layers:
            layer.take_pending()
            layer.has_gradients &= not is_update
        if is_update:
            self.num_updates += 1
            trained = [x for x in self.layers if x.weight.parameter.requires_grad]
            if trained:
                change_(trained, optimizer, self.options, self.number, self.num_updates)
        used = is_update and self._method.collects == "updates"
        if used or self.number == self.options.last_update + 1:
            self.discard_gradients(replica)
        return is_update

    def _check_end(self, is_update: bool) -> None:
        """Raises RuntimeError if nothing can have come of the steps so far."""
        if self.layers and self._num_unstepped > self.options.delta + _PATIENCE:
            raise RuntimeError(
                "the optimizer that this pruner was built with has not stepped in "
                f"{self._num_unstepped} steps: build it anew with the one that does"
            )
        needs_gradients = is_update and self._method.collects != "never" and self.layers
        if needs_gradients and not any(layer.has_gradients for layer in self.layers):
            call = "pruner()" if self.options.skip_step else "optimizer.step()"
            raise RuntimeError(
                f"no backward pass has reached a sparse weight before the update of "
                f"step {self.number + 1}: have dense gradients in .grad when {call} is "
                "called, or apply_mask_to_gradients() before"
            )

    def _collect(self, replica: Replica | None) -> None:
        """Adds the step's dense gradients, of all replicas, to those collected.

        Summed here, not when they are used, so that what is saved is the same on every
        replica and names no number of them. Without ``replica`` they are sums already.
        """
        several = replica is not None and replica.num_replicas > 1
        if several:
            # What is pending may include a collective, which must be in the same
            # program on a replica that had a minibatch and on one that had none.
            replica.sync()
        pending = [  # nothing: outside of the loss, or on a replica without a minibatch
            torch.zeros_like(layer.data) if layer.pending is None else layer.pending
            for layer in self.layers
        ]
        if several:
            replica.sync()  # zeros, like gradients, enter the sum as data
            replica.all_reduce_(pending)
        if self._method.collects == "updates":
            num_steps = self.options.grad_accumulation_n
            for layer, dense in zip(self.layers, pending):
                mean = dense / num_steps if num_steps > 1 else dense
                layer.gradient = added(layer.gradient, mean)
            return
        momentum = self.options.momentum
        # A running mean would keep a NaN for ever: such a step leaves all as they were.
        finite = torch.cat([masks.is_finite(dense) for dense in pending]).all()
        for layer, dense in zip(self.layers, pending):
            past = torch.zeros_like(dense) if layer.gradient is None else layer.gradient
            mean = past * momentum + dense * (1 - momentum)
            layer.gradient = torch.where(finite, mean, past)

    def discard_gradients(self, replica: Replica) -> None:
        """Prepares for the next step without what was collected.

        On a lazy device zeros take its place where updates are made from several steps:
        the first of these steps, and the last update, after which nothing is collected,
        are then the same programs as the others.
        """
        collects, num_steps = self._method.collects, self.options.grad_accumulation_n
        adds = collects == "always" or (collects == "updates" and num_steps > 1)
        zeros = replica.is_lazy and adds and self.number <= self.options.last_update
        for layer in self.layers:
            layer.gradient = torch.zeros_like(layer.data) if zeros else None

    def check_replicas(self, replica: Replica) -> None:
        """Compares hashes of masks and weights; see `RigLScheduler.check_replicas`."""
        if replica.num_replicas == 1:
            return
        layers = {layer.name: (layer.mask, layer.data) for layer in self.layers}
        hashes = {}
        for name, (mask, weight) in replica.to_host(layers).items():
            # There is one NaN, and zeros have one sign.
            numbers = torch.where(weight.isnan(), torch.nan, weight) + 0.0
            for what, part in {"mask": mask, "weights": numbers}.items():
                data = part.contiguous().view(torch.uint8).numpy()
                digest = hashlib.blake2b(data, digest_size=8).hexdigest()
                hashes[f"{what} of {name}"] = digest
        remedy = (
            "They must begin with equal weights (replica.seeded, broadcast_ or DDP), "
            "step by the same summed gradients, and all call the pruner in every step"
        )
        replica.check_agreement("sparse layers, by their hashes", hashes, remedy)


class DenseSums(Rider):
    """Adds up dense gradients as an optimizer whose steps may be run again adds others.

    Args:
        steps: Those of the pruner, which have begun.
        exact: The optimizer's ``repeatable``: it has ``units``, and ``names`` of
            parameters there.
        replica: Where it is lazy, steps that collect and others are one program.
    """

    def __init__(self, steps: TopologySteps, exact: Any, replica: Replica) -> None:
        self._steps, self._exact, self._is_lazy = steps, exact, replica.is_lazy
        parameters = [layer.weight.parameter for layer in steps.layers]
        self._names = [f"dense {exact.names[each]}" for each in parameters]
        exact.units.extend(dict(zip(self._names, parameters)))
        self.clear()
        exact.riders.append(self)
        replica.sync()  # zeros on the device, not in the first graph

    def remove(self) -> None:
        """Ends the sums, as the handle of a hook does."""
        self._exact.riders.remove(self)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the sums that replicas add up in this step."""
        totals = self._totals if self._steps.collects else []
        return [part for total in totals for part in total.parts]

    def end_minibatch(self, counts: bool = True) -> None:
        """Adds what a minibatch has left pending."""
        for layer, total in zip(self._steps.layers, self._totals):
            total.add_(layer.take_pending())

    def commit(self, num_minibatches: Any) -> None:
        """Makes the sums pending: not means, as without exact sums."""
        del num_minibatches
        if not self._steps.collects:
            return
        divisors = self._exact.units.divisors()
        for layer, total in zip(self._steps.layers, self._totals):
            layer.pending = total.mean_into_(torch.empty_like(layer.data), divisors)

    def clear(self) -> None:
        """Forgets a minibatch; makes totals for the next step, if it has any."""
        layers = self._steps.layers
        for layer in layers:
            layer.take_pending()
        needs_totals, units = self._steps.collects or self._is_lazy, self._exact.units
        named = zip(self._names, layers if needs_totals else [])
        self._totals: list[Total] = [units.total(n, x.data) for n, x in named]


def collects(method: Method, schedule: UpdateSchedule, step: int) -> bool:
    """Returns whether the dense gradients of step number ``step`` are needed."""
    if method.collects == "always":
        first = _FIRST_OF_MEAN if schedule.delta >= _FIRST_OF_MEAN else 1
        return first <= step <= schedule.last_update
    return method.collects == "updates" and schedule.collects(step)
