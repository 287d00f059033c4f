"""What makes the bits of a run those of any number of replicas.

A minibatch's gradient has the same bits wherever it is computed, if it is computed from
the same weights, buffers and random numbers, by the same programs. So every minibatch
begins with the buffers of its step and with a seed of its own, and what it brings is
added as integers; see `xla_replica.backends.grid`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from variable_batch_size.data.schedule import Position, Schedule
from variable_batch_size.device_scalars import DeviceScalars
from xla_replica import Replica, ReplicaError
from xla_replica.backends.grid import Grid, zero_
from xla_replica.device.gradients import weak_hook
from xla_replica.device.seeding import seed_host


class ExactModel:
    """The grid of a model's gradients and of its normalisation layers' statistics.

    Args:
        model: The model that is trained.
        replica: The replica that the caller runs in.
        seed: Of the random numbers that minibatches draw.
        scalars: Uploads numbers.

    Attributes:
        grid: Its units, by name of parameter or buffer.
        rows: Each parameter's row in the grid.
        riders: What else a step sums.

    Raises:
        TypeError, ValueError: The model, or this process, cannot have such bits.
    """

    def __init__(
        self, model: nn.Module, replica: Replica, seed: int, scalars: DeviceScalars
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"exact= is the model, whose buffers count too, got {model!r}"
            )
        self._replica, self._seed, self._scalars = replica, seed, scalars
        self._num_repeats = 0  # of the step under way
        parameters = dict(model.named_parameters())
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        }
        _check(parameters, layers, replica)
        self.grid = Grid(list(parameters), replica)
        self.rows = {p: row for row, p in enumerate(parameters.values())}
        self.riders: list[Rider] = []
        for name, layer in layers.items():
            row = self.grid.extend([f"{name}.running_mean", f"{name}.running_var"])
            self.add_rider(RunningStatistics(layer, self.grid, row))
        self._statistics: list[Any] = [*self.riders]
        self._known = {id(b) for each in layers.values() for b in each.buffers()}
        self._versions: dict[str, Any] = {}
        model.register_forward_pre_hook(weak_hook(self._before_pass))
        model.register_forward_hook(weak_hook(self._after_pass))

    def check(self, parameters: list[nn.Parameter], schedule: Schedule) -> None:
        """Raises ValueError unless sums can hold the steps, and name the parameters."""
        for parameter in parameters:
            if parameter not in self.rows:
                raise ValueError(
                    f"exact=: the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the model's, so that "
                    "its sum has no name: give exact= the module that has them all"
                )
        largest = int(schedule.trace.batch_sizes.max())
        num_minibatches = -(-largest // schedule.minibatch_size)
        if num_minibatches > self.grid.max_terms:
            raise ValueError(
                f"exact=: a batch of {largest} samples has {num_minibatches} "
                f"minibatches, and sums on this device can hold {self.grid.max_terms}: "
                "take larger minibatches"
            )

    def add_rider(self, rider: Rider) -> None:
        """Sums from the next step on what a rider has, whose names are in the grid."""
        self.riders.append(rider)
        self._replica.sync()  # zeros on the device, not in the first graph

    @torch.no_grad()
    def end_minibatch(self) -> None:
        """Takes in what a minibatch has left, whose gradients are taken in already."""
        for rider in self.riders:
            rider.end_minibatch()
        self.grid.end_minibatch()

    def to_sum(self) -> list[torch.Tensor]:
        """Returns the integers that replicas sum, in place, beside the gradients'."""
        totals = [total for rider in self.riders for total in rider.totals()]
        return [tensor for total in totals for tensor in total]

    def accept_step(self, position: Position) -> bool:
        """Returns whether the sums of a step are good; if not, it is to be run again.

        Collective; reads one number of the device.

        Raises:
            ReplicaError: They were bad the last time too.
        """
        [must_repeat] = self._replica.fetch([self.grid.measure()])
        self._divisor = position.num_minibatches
        if self._replica.is_lazy:
            self._divisor = self._scalars.get("statistics", self._divisor)
        if not must_repeat.item():
            self._num_repeats = 0
            return True
        self._num_repeats += 1
        if self._num_repeats > 1:
            raise ReplicaError(
                f"step {position.step} of epoch {position.plan.epoch} has been run "
                "twice, and the largest numbers of its gradients differ by powers of "
                "two: something in it is not the same twice, such as a random number "
                "that neither torch nor a SeededDataset draws",
                self._replica.rank,
            )
        self.grid.follow()
        return False

    def meet(self, grid: dict[str, int]) -> None:
        """Takes the grid that other replicas have; the step begins anew."""
        self.grid.load_state_dict(grid)
        self._num_repeats = 0

    def commit(self) -> None:
        """Uses what riders have summed, and takes the grid of the step's maxima."""
        for rider in self.riders:
            rider.commit(self._divisor)
        self.grid.follow()

    def clear(self) -> None:
        """Forgets the minibatches of the step."""
        for rider in self.riders:
            zero_(rider.totals())
            rider.clear()
        self.grid.drop_step()

    def seed_minibatch(self, step: int, number: int) -> None:
        """Seeds what the minibatch of this number draws, on the host and the device.

        Args:
            step: Since training began.
            number: Of the minibatch in its step, over all replicas.
        """
        text = f"{self._seed} {step} {number}".encode()
        digest = hashlib.blake2b(text, digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        seed_host(seed)
        if not self._replica.is_host:
            self._replica.seed(seed - self._replica.rank)  # which it adds

    def _before_pass(self, model: nn.Module, args: Any) -> None:
        del args
        if model.training and torch.is_grad_enabled():
            self._versions = self._found_versions(model)
            # A checkpoint that is reentrant runs layers without gradients first.
            for statistics in self._statistics:
                statistics.begin()

    def _after_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        """Raises ValueError if a forward pass has changed a buffer."""
        del args, output
        if not (model.training and torch.is_grad_enabled()):
            return
        for name, version in self._found_versions(model).items():
            if version != self._versions.get(name):
                raise ValueError(
                    f"exact=: the forward pass has changed the buffer {name!r}, so "
                    "the next minibatch would depend on those that this replica has "
                    "run: only the running statistics of normalisation layers can "
                    "move. Compute it in a function that you attach, or leave exact= "
                    "out"
                )

    def _found_versions(self, model: nn.Module) -> dict[str, tuple[int, int]]:
        return {
            name: (id(buffer), buffer._version)
            for name, buffer in model.named_buffers()
            if id(buffer) not in self._known
        }

    def environment(self) -> dict[str, Any]:
        """Returns what the bits of a gradient depend on beside the model."""
        return {
            "device": self._replica.device.type,
            "torch": str(torch.__version__),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "num_threads": torch.get_num_threads(),
        }


def _check(
    parameters: dict[str, nn.Parameter], layers: dict[str, nn.Module], replica: Replica
) -> None:
    """Raises ValueError or TypeError where a run cannot have the same bits."""
    for name, parameter in parameters.items():
        if not (parameter.is_floating_point() and parameter.element_size() <= 4):
            raise TypeError(
                f"exact=: the parameter {name!r} is {parameter.dtype}, and exact sums "
                "are of float32 and narrower floats"
            )
    if replica.is_sharded(list(parameters.values())):
        raise TypeError(
            "exact=: parameters are sharded (FSDP2), which sums their gradients itself"
        )
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"exact=: {name!r} is a SyncBatchNorm, whose statistics depend on the "
                "minibatches that replicas run together: use BatchNorm, whose running "
                "statistics move by the mean over the step's minibatches"
            )
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if replica.has_streams and not is_deterministic:
        raise ValueError(
            "exact= on a GPU needs torch.use_deterministic_algorithms(True), before "
            "the model runs"
        )


class Rider(Protocol):
    """What is summed over a step's minibatches beside their gradients."""

    def totals(self) -> list[list[torch.Tensor]]:
        """Returns what `Grid.empty_total` has made, and `Grid.add_` added to."""

    def end_minibatch(self) -> None:
        """Adds to the totals what a minibatch has brought."""

    def commit(self, num_minibatches: Any) -> None:
        """Uses the totals, sums over so many minibatches of all replicas."""

    def clear(self) -> None:
        """Forgets the step, a minibatch that did not end too."""


class RunningStatistics:
    """Moves the running statistics of a normalisation layer once a step.

    By the mean over the step's minibatches of what each would have moved them by, each
    from where they were when the step began.

    Args:
        layer: A BatchNorm or its kin, with statistics.
        grid: What moves are rounded to.
        row: That of the mean in the grid; the next one is that of the variance.
    """

    def __init__(self, layer: Any, grid: Grid, row: int) -> None:
        self._layer, self._grid, self._row = layer, grid, row
        self._starts = [buffer.clone() for buffer in self._buffers()]
        self._totals = [grid.empty_total(buffer) for buffer in self._buffers()[:2]]
        self._has_begun = False
        # Whether a minibatch has moved them, by replica.
        moved = torch.zeros_like(layer.num_batches_tracked, dtype=torch.int32)
        self._totals.append([moved])
        layer.register_forward_pre_hook(weak_hook(self._begin))

    def _buffers(self) -> list[torch.Tensor]:
        layer = self._layer
        return [layer.running_mean, layer.running_var, layer.num_batches_tracked]

    def _begin(self, layer: nn.Module, args: Any) -> None:
        """Runs before every pass, for models whose parts are called by themselves."""
        del args
        if layer.training and torch.is_grad_enabled():
            self.begin()

    def begin(self) -> None:
        """Notes the statistics before the first pass of a minibatch."""
        if not self._has_begun:
            self._has_begun = True
            for start, buffer in zip(self._starts, self._buffers()):
                start.copy_(buffer)

    def totals(self) -> list[list[torch.Tensor]]:
        """Returns the sums of the moves of mean and variance, and of their number."""
        return self._totals

    def end_minibatch(self) -> None:
        """Adds what a minibatch has moved, and puts back what was before it."""
        *statistics, count = zip(self._buffers(), self._starts, self._totals)
        for index, (buffer, start, total) in enumerate(statistics):
            move = buffer - start if self._has_begun else None
            self._grid.add_(total, move, self._row + index)
        buffer, start, [moved] = count
        moved.add_((buffer - start if self._has_begun else buffer * 0).to(moved.dtype))
        self.clear()

    def commit(self, num_minibatches: Any) -> None:
        """Moves the statistics by the mean of the moves, and counts one batch."""
        *statistics, [count, [moved]] = zip(self._buffers(), self._totals)
        for index, (buffer, total) in enumerate(statistics):
            move, row = torch.empty_like(buffer), self._row + index
            self._grid.mean_into_(move, total, row, num_minibatches)
            buffer.add_(move)
        count.add_(moved.clamp(max=1))

    def clear(self) -> None:
        """Takes back what a minibatch has moved."""
        if self._has_begun:
            self._has_begun = False
            for start, buffer in zip(self._starts, self._buffers()):
                buffer.copy_(start)
