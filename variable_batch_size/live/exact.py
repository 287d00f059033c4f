"""What makes the bits of a run those of any number of replicas.

A minibatch's gradient has the same bits wherever it is computed, if it is computed from
the same weights, buffers and random numbers, by the same programs. So every minibatch
begins with the buffers of its step and with a seed of its own, and what it brings is
added as integers; see `xla_replica.backends.grid`.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from variable_batch_size.data.account import Account
from variable_batch_size.data.ledger import Ledger
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Place, Schedule, Step
from variable_batch_size.device_scalars import DeviceScalars
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.parts import Part
from variable_batch_size.step.run import Run
from variable_batch_size.step.sums import Sums
from variable_batch_size.step.update import RunAgain
from xla_replica import Replica, ReplicaError
from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.grid import ExactSum, Grid, Rider, Total
from xla_replica.common.arguments import check_type
from xla_replica.device.gradients import weak_hook
from xla_replica.device.seeding import own_draws


class ExactModel(Sums, Part):
    """The grid of a model's gradients and of its normalisation layers' statistics.

    Args:
        model: The model that is trained.
        replica: The replica that the caller runs in.

    Attributes:
        grid: Its units, by name of parameter or buffer.
        names: Each parameter's name in the grid.
        riders: What a step sums beside the gradients, and what else belongs to it.
        sums: Those of gradients.

    Raises:
        TypeError, ValueError: The model, or this process, cannot have such bits.
    """

    is_exact = keeps_buffers = True

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        check_type("exact=", model, nn.Module, "the model, whose buffers count too")
        self._replica, self._scalars = replica, DeviceScalars(replica)
        self._is_repeat = False  # whether the step under way was run before
        self.sums: Any = None
        self.names = {p: name for name, p in model.named_parameters()}
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        }
        self._check(layers)
        self.grid = Grid([*self.names.values()], replica)
        self.riders: list[Rider] = [RunningStatistics(model, layers, self.grid)]
        # Whose buffers no forward pass may change.
        self._others = [each for each in model.named_modules() if each[0] not in layers]
        self._versions: dict[str, Any] = {}
        model.register_forward_pre_hook(weak_hook(self._before_pass))
        model.register_forward_hook(weak_hook(self._after_pass))

    def _check(self, layers: Mapping[str, nn.Module]) -> None:
        """Raises ValueError or TypeError where a run cannot have the same bits."""
        for parameter, name in self.names.items():
            if not (parameter.is_floating_point() and parameter.element_size() <= 4):
                raise TypeError(
                    f"exact=: the parameter {name!r} is {parameter.dtype}, and exact "
                    "sums are of float32 and narrower floats"
                )
        if self._replica.is_sharded(list(self.names)):
            raise TypeError(
                "exact=: parameters are sharded (FSDP2), which sums gradients itself"
            )
        for name, layer in layers.items():
            if isinstance(layer, nn.SyncBatchNorm):
                raise TypeError(
                    f"exact=: {name!r} is a SyncBatchNorm, whose statistics depend on "
                    "the minibatches that replicas run together: use BatchNorm, whose "
                    "running statistics move by the mean over the step's minibatches"
                )
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        if self._replica.has_streams and not is_deterministic:
            raise ValueError(
                "exact= on a GPU needs torch.use_deterministic_algorithms(True) first"
            )

    def check(self, parameters: list[nn.Parameter], schedule: Schedule) -> None:
        """Raises ValueError unless sums can hold the steps, and name the parameters."""
        for parameter in parameters:
            if parameter not in self.names:
                raise ValueError(
                    f"exact=: a parameter of shape {tuple(parameter.shape)} is not one "
                    "of the model's: give exact= the module that has them all"
                )
        largest = int(schedule.trace.batch_sizes.max())
        num_minibatches = -(-largest // schedule.minibatch_size)
        if num_minibatches > self.grid.max_terms:
            raise ValueError(
                f"exact=: a batch of {largest} samples has {num_minibatches} "
                f"minibatches, more than {self.grid.max_terms}: take larger minibatches"
            )

    # --- as a part of the optimizer's updates ---------------------------------------

    @torch.no_grad()
    def end_minibatch(self, weight: torch.Tensor | None) -> None:
        for rider in self.riders:
            rider.end_minibatch()

    def prepare(self, step: Step) -> None:
        for rider in self.riders:
            rider.exchange(step)

    def tensors(self) -> list[torch.Tensor]:
        return [p for rider in self.riders for each in rider.totals for p in each.parts]

    def look(self, step: Step) -> None:
        """Raises RunAgain if sums do not fit their grid. Collective; reads one number.

        Or ReplicaError if they did not fit the last time either.
        """
        [must_repeat] = self._replica.fetch([self.grid.measure()])
        self._divisor: Any = step.num_minibatches
        if self._replica.is_lazy:
            self._divisor = self._scalars.get("statistics", self._divisor)
        if must_repeat.item() and self._is_repeat:
            raise ReplicaError(
                f"step {step.number} of epoch {step.epoch} gave different "
                "gradients when rerun: the model or its data is nondeterministic",
                self._replica.rank,
            )
        self._is_repeat = must_repeat.item()
        if self._is_repeat:
            self.grid.follow()
            raise RunAgain

    def state_dict(self) -> dict[str, int]:
        return self.grid.state_dict()

    def meet(self, state: dict[str, int] | None) -> None:
        """Takes the grid of a state, or of other replicas; the step begins anew."""
        self.grid.load_state_dict(state or {})
        self._is_repeat = False

    def commit(self, step: Step) -> None:
        """Makes gradients means, uses what riders have summed, follows the maxima."""
        self.sums.commit()
        for rider in self.riders:
            rider.commit(self._divisor)
        self.grid.follow()

    def clear(self) -> None:
        for rider in self.riders:
            for total in rider.totals:
                total.zero_()
            rider.clear()
        self.grid.drop_step()

    def parts(self) -> Mapping[str, Part]:
        return {"exact": self}

    def gradients(self, run: Run) -> StepGradients:
        return ExactGradients(run)

    def account(self, sampler: CustomSampler, key: int) -> Account:
        seed = functools.partial(self.seed_minibatch, sampler.seed)
        return SeededAccount(sampler.ledger, key, seed)

    def seed_minibatch(self, *place: int) -> None:
        """Seeds what a minibatch draws, on the host and the device, by its place."""
        digest = hashlib.blake2b(repr(place).encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        with own_draws():  # torch.manual_seed notes calls where CUDA is not in use
            torch.default_generator.manual_seed(seed)
        if not self._replica.is_host:
            self._replica.seed(seed - self._replica.rank)  # which it adds

    def _before_pass(self, model: nn.Module, *_: Any) -> None:
        if _trains(model):
            self._versions = self._found_versions()

    def _after_pass(self, model: nn.Module, *_: Any) -> None:
        """Raises ValueError if a forward pass has changed a buffer."""
        found = self._found_versions() if _trains(model) else {}
        for name, _ in found.items() - self._versions.items():
            raise ValueError(
                f"exact=: the forward pass has changed the buffer {name!r}, and only "
                "the running statistics of normalisation layers can move: compute it "
                "in a function that you attach, or leave exact= out"
            )

    def _found_versions(self) -> dict[str, tuple[int, int]]:
        return {
            f"{name}.{key}".removeprefix("."): (id(buffer), buffer._version)
            for name, module in self._others
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    def environment(self) -> dict[str, Any]:
        return {
            "device": self._replica.device_model,
            "torch": str(torch.__version__),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "num_threads": torch.get_num_threads(),
        }


class ExactGradients(StepGradients):
    """Adds every minibatch's gradients as integers; ``.grad`` is that of one alone."""

    is_aged = True

    def make_sum(self) -> GradientSum:
        exact = self._run.sums
        self._adds_up_widely = False
        exact.sums = ExactSum(self._run.replica, self._is_unchanged, exact)
        return exact.sums

    @torch.no_grad()
    def accept(self, num_accumulated: int) -> None:
        self.sums.end_minibatch()
        self._run.sums.grid.end_minibatch()


class SeededAccount(Account):
    """Seeds what a minibatch draws, the same whatever replica runs it.

    Before it is loaded and before it is run, since loaders draw, too.

    Args:
        seed: Seeds by the numbers that it is given.
    """

    strict = True

    def __init__(self, ledger: Ledger, key: int, seed: Callable[..., None]) -> None:
        self._seed, self._thread = seed, threading.get_ident()
        super().__init__(ledger, key)

    def take(self, deal: int, place: Place, is_run: bool) -> None:
        super().take(deal, place, is_run)
        if threading.get_ident() == self._thread:  # the loop's, not a loader's
            ledger, plan = self.ledger, self.ledger.plan(place.epoch)
            number = place.substep * ledger.num_replicas + ledger.rank
            self._seed(plan.first_step + place.step, number)

    def begin(self, epoch: int) -> bool | None:
        self._thread = threading.get_ident()
        return super().begin(epoch)


def _trains(module: nn.Module) -> bool:
    """Returns whether a pass is one of training."""
    return module.training and torch.is_grad_enabled()


class RunningStatistics(Rider):
    """Moves the running statistics of normalisation layers once a step.

    By the mean of what its minibatches would have moved them by from where the step
    began.

    Args:
        model: Whose layers these are.
        layers: BatchNorms and their kin, with statistics, by name.
        grid: What moves are rounded to.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, nn.Module], grid: Grid
    ) -> None:
        self._layers, self._grid = layers, grid
        self._starts: list[torch.Tensor] = []  # none before a minibatch's first pass
        names = [x for n, layer in layers.items() for x, _ in layer.named_buffers(n)]
        grid.extend(names)
        self.totals = [Total(grid, *each) for each in zip(names, self._buffers())]
        # A checkpoint that is reentrant runs layers without gradients first, and models
        # may have parts that are called by themselves.
        for module in (model, *layers.values()):
            module.register_forward_pre_hook(weak_hook(self._begin))

    def _buffers(self) -> list[torch.Tensor]:
        found = [layer._buffers.values() for layer in self._layers.values()]
        return [each for buffers in found for each in buffers if each is not None]

    def _begin(self, module: nn.Module, *_: Any) -> None:
        """Notes the statistics before the first pass of a minibatch, of a module."""
        if _trains(module) and not self._starts:
            self._starts = [buffer.clone() for buffer in self._buffers()]

    def end_minibatch(self) -> None:
        """Adds what a minibatch has moved, and puts back what was before it."""
        starts: list[Any] = self._starts or [None] * len(self.totals)
        for buffer, start, total in zip(self._buffers(), starts, self.totals):
            total.add_(None if start is None else buffer - start)
        self.clear()

    def commit(self, num_minibatches: Any) -> None:
        """Moves the statistics by the mean of the moves, and counts one batch."""
        divisors = self._grid.divisors(num_minibatches)
        for buffer, total in zip(self._buffers(), self.totals):
            move = torch.empty_like(buffer, dtype=torch.float32)
            total.mean_into_(move, divisors)
            buffer.add_(move if buffer.is_floating_point() else move.sign().long())

    def clear(self) -> None:
        """Takes back what a minibatch has moved."""
        for buffer, start in zip(self._buffers(), self._starts):
            buffer.copy_(start)
        self._starts = []
