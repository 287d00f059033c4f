"""The steps of a pruner: what each of them collects, and which change the topology."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, zero_inactive_
from rigl_xla.topology.update_schedule import UpdateSchedule
from rigl_xla.update.collect import begin_, collect_, collects, is_collecting
from rigl_xla.update.topology_update import change_
from xla_replica import Replica, traits

logger = logging.getLogger(__name__)

# So many steps beside delta may go without one of the optimizer, as those in which a
# GradScaler looks for its scale.
_PATIENCE = 100


class TopologySteps:
    """Counts steps, collects what their gradients say, and changes the topology.

    Args:
        layers: The sparse weights.
        options: The user's.
        schedule: The user's.
        number: The number of the last step.
        num_updates: Updates of the topology up to then.

    Attributes:
        collects: Whether the dense gradients of the next step are needed.
    """

    def __init__(
        self,
        layers: Sequence[SparseLayer],
        options: Options,
        schedule: UpdateSchedule,
        number: int,
        num_updates: int,
    ) -> None:
        self.number, self.num_updates = number, num_updates
        self.collects = False  # until `begin`
        self._layers, self._options, self._schedule = layers, options, schedule
        self._method = options.method_in_use
        self._has_gradients = False
        self._replaced = False  # the optimizer's step, by an update of the topology
        self._num_uncalled = 0  # steps of the optimizer since the last `end`,
        self._num_unstepped = 0  # and the other way round

    def begin(self, replica: Replica) -> None:
        """Prepares for the step after the last one, which may be of a saved run."""
        collecting = is_collecting(self._method, self._schedule, self.number)
        self._expect_next(replica, begin=not collecting)

    # --- during a step --------------------------------------------------------------

    def note_gradient(self, layer: SparseLayer, gradient: torch.Tensor) -> None:
        """Takes the dense gradient of a backward pass, before it is masked."""
        self._has_gradients = True
        if self.collects:
            layer.add(gradient.detach())

    def note_accumulation(self, layer: SparseLayer, parameter: torch.Tensor) -> None:
        """Notes that ``.grad`` has grown by a masked gradient."""
        if self.collects:
            layer.accumulated = TensorWeakRef(parameter.grad)

    def end_backward(self) -> None:
        """Makes up for what only seemed to be discarded; see `SparseLayer`."""
        if self.collects:
            for layer in self._layers:
                layer.end_backward()

    @torch.no_grad()
    def take_assigned(self, replica: Replica) -> None:
        """Masks gradients that no hook has seen, and collects them where needed."""
        alone = replica.num_replicas == 1
        for layer in self._layers:
            grad = layer.weight.parameter.grad
            if grad is None or layer.hooked:
                continue
            layer.follow(grad.device)
            if self.collects:
                is_dense = layer.add_assigned()
                can_read = alone and traits(grad).is_host
                if not can_read or bool(is_dense):
                    self._has_gradients = True
            zero_inactive_(grad.detach(), layer.mask)

    def note_optimizer_step(self) -> None:
        """Counts a step of the optimizer that `end` has to allow, and to count itself.

        Raises:
            RuntimeError: It was not allowed, or `end` is never called.
        """
        self._num_uncalled, self._num_unstepped = self._num_uncalled + 1, 0
        if self._replaced:
            raise RuntimeError(
                f"optimizer.step() ran after pruner() had returned False in step "
                f"{self.number}, in which the topology changed instead: `if pruner(): "
                "optimizer.step()`; or build the pruner with skip_step=False"
            )
        expects = self._method.updates and self.number < self._schedule.last_update
        if expects and self._num_uncalled > self._schedule.delta:
            raise RuntimeError(
                f"the optimizer took {self._num_uncalled} steps without a call of the "
                "pruner, so that the topology never changes: `if pruner(): "
                "optimizer.step()`; or build the pruner with skip_step=False, or "
                "static_topo=True for a topology that stays"
            )

    # --- its end --------------------------------------------------------------------

    @torch.no_grad()
    def end(self, optimizer: Optimizer, replica: Replica) -> bool:
        """Counts a step and returns whether it was one that changes the topology.

        Raises:
            RuntimeError: It is, but there was no gradient to make the update from; or
                the optimizer has not stepped for long.
        """
        self._check_has_stepped()
        due = self._method.updates and self._schedule.is_update(self.number + 1)
        if due:
            self._check_has_gradients()
            self._has_gradients = False
        self._replaced = due and self._options.skip_step
        self._num_uncalled = 0
        self._num_unstepped += self._options.skip_step
        self.number += 1
        if self.collects and self._layers:
            running = self._method.collects == "always"
            momentum = self._options.momentum if running else None
            num_steps = self._schedule.grad_accumulation_n
            collect_(self._layers, replica, num_steps, momentum)
        for layer in self._layers:
            layer.hooked = False
            layer.discarded = layer.accumulated = None
        if due:
            self.num_updates += 1
        # What is frozen by now stays as it is.
        trained = [x for x in self._layers if x.weight.parameter.requires_grad]
        if due and trained:
            how = (self._method, self._schedule)
            now = (self.number, self.num_updates, self._options.seed)
            change_(trained, optimizer, *how, *now)
            logger.debug("step %d: topology update %d", self.number, self.num_updates)
        used_up = due and self._method.collects == "updates"
        over = self.number == self._schedule.last_update + 1
        self._expect_next(replica, begin=used_up or over)
        return due

    def _check_has_stepped(self) -> None:
        """Raises RuntimeError if another optimizer seems to train the weights."""
        if self._layers and self._num_unstepped > self._schedule.delta + _PATIENCE:
            raise RuntimeError(
                "the optimizer that this pruner was built with has not stepped in "
                f"{self._num_unstepped} steps. If another one trains the model, what "
                "it changes is not masked: close() this pruner and build one with that "
                "optimizer, and state_dict=pruner.state_dict()"
            )

    def _check_has_gradients(self) -> None:
        """Raises RuntimeError if nothing has come since the last update."""
        needs = self._layers and self._method.collects != "never"
        if self._has_gradients or not needs:
            return
        call = "pruner()" if self._options.skip_step else "optimizer.step()"
        raise RuntimeError(
            f"the topology update of step {self.number + 1} is due, but since the last "
            "one no backward pass has reached a sparse weight, and .grad of none is "
            "dense. Gradients that are computed in another way (torch.func, per-sample "
            f"means) must be in .grad, not masked, when {call} is called, or pruner."
            "apply_mask_to_gradients() before; method='set' needs none"
        )

    def _expect_next(self, replica: Replica, begin: bool) -> None:
        """Prepares for the next step, with ``begin`` without what was collected."""
        if begin:
            how = (self._method, self._schedule, self.number)
            begin_(self._layers, *how, replica.is_lazy)
        self.collects = collects(self._method, self._schedule, self.number + 1)
