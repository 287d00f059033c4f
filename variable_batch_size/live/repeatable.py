"""What makes a step one that other members may run again.

Minibatches have seeds of their own, begin with the buffers of their step, and what they
change beside gradients is summed with these and changes where the step is made.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from variable_batch_size.data.account import Account
from variable_batch_size.data.ledger import Ledger
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Place, Step
from variable_batch_size.device_scalars import DeviceScalars, dtype_for
from variable_batch_size.part import Part
from variable_batch_size.step.gradients import Modules, Sums
from xla_replica import Replica
from xla_replica.device.gradients import weak_hook
from xla_replica.device.row_units import FloatUnits, Rider, SmallSum
from xla_replica.device.seeding import own_draws


class RepeatableSums(Sums, Part):
    """Sums in floating point, of steps that members may run again.

    Args:
        replica: The replica that the caller runs in.

    Attributes:
        units: What sums are rounded to.
        names: Each parameter's name there.
        riders: What a step sums beside the gradients, and what else belongs to it.
    """

    keeps_buffers = True
    units: Any

    def __init__(self, replica: Replica) -> None:
        self._replica, self._scalars = replica, DeviceScalars(replica)
        self.units = FloatUnits(replica)
        self.names: Mapping[nn.Parameter, str] = defaultdict(str)
        self.riders: list[Rider] = []
        self._watched: set[nn.Module] = set()
        # Of these: whose buffers no forward pass may change.
        self._others: list[tuple[str, nn.Module]] = []
        self._versions: dict[str, Any] = {}

    def watch(self, modules: Modules) -> None:
        """Moves running statistics once a step, where the step is made."""
        for prefix, model in modules.items():
            layers = dict[str, nn.Module]()
            # Without those that are parts of another one, too.
            for name, module in model.named_modules(self._watched, prefix):
                if not isinstance(module, _NormBase) or module.running_mean is None:
                    self._others.append((name, module))
                elif isinstance(module, nn.SyncBatchNorm):
                    raise TypeError(
                        f"exact= and live members: {name!r} is a SyncBatchNorm: use "
                        "BatchNorm, whose statistics move once a step"
                    )
                else:
                    layers[name] = module
            rider = RunningStatistics(model, layers, self._replica, self.is_exact)
            self.riders.append(rider)
            model.register_forward_pre_hook(weak_hook(self._before_pass))
            model.register_forward_hook(weak_hook(self._after_pass))

    def account(self, sampler: CustomSampler, key: int) -> Account:
        self._account = SeededAccount(sampler.ledger, key, sampler.seed, self._replica)
        return self._account

    def _before_pass(self, model: nn.Module, *_: Any) -> None:
        if _trains(model):
            self._versions = self._found_versions()

    def _after_pass(self, model: nn.Module, *_: Any) -> None:
        """Raises ValueError if a forward pass has changed a buffer."""
        found = self._found_versions() if _trains(model) else {}
        for name, _ in found.items() - self._versions.items():
            raise ValueError(
                f"exact= and live members: the forward pass has changed the buffer "
                f"{name!r}, and only running statistics can move: attach a function"
            )

    def _found_versions(self) -> dict[str, tuple[int, int]]:
        return {
            f"{name}.{key}".removeprefix("."): (id(buffer), buffer._version)
            for name, module in self._others
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    # --- as a part of the optimizer's updates ---------------------------------------

    @torch.no_grad()
    def end_minibatch(self, weight: torch.Tensor | None) -> None:
        for rider in self.riders:
            rider.end_minibatch(not self._account.is_padding)

    def tensors(self) -> list[torch.Tensor]:
        return [each for rider in self.riders for each in rider.tensors()]

    def look(self, step: Step) -> None:
        # Not before the sums, which some members have begun by then, and not others.
        for rider in self.riders:
            rider.exchange(step)
        self._divisor: Any = step.num_minibatches
        if self._replica.is_lazy:
            self._divisor = self._scalars.get("statistics", self._divisor)

    def commit(self, step: Step) -> None:
        for rider in self.riders:
            rider.commit(self._divisor)

    def clear(self) -> None:
        for rider in self.riders:
            rider.clear()


class SeededAccount(Account):
    """Seeds what a minibatch draws, the same whatever replica runs it.

    Before it is loaded and before it is run, since loaders draw, too.

    Args:
        ledger, key: See `Account`.
        seed: That of the run.
        replica: The replica that the caller runs in.
    """

    strict = True

    def __init__(self, ledger: Ledger, key: int, seed: int, replica: Replica) -> None:
        self._seed, self._replica = seed, replica
        self._thread = threading.get_ident()
        super().__init__(ledger, key)

    def take(self, deal: int, place: Place, is_run: bool) -> None:
        super().take(deal, place, is_run)
        if threading.get_ident() != self._thread:  # a loader's, not the loop's
            return
        ledger, plan = self.ledger, self.ledger.plan(place.epoch)
        number = place.substep * ledger.num_replicas + ledger.rank
        of = self._seed, plan.first_step + place.step, number
        digest = hashlib.blake2b(repr(of).encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        with own_draws():  # torch.manual_seed notes calls where CUDA is not in use
            torch.default_generator.manual_seed(seed)
        if not self._replica.is_host:
            self._replica.seed(seed - self._replica.rank)  # which it adds

    def begin(self, epoch: int) -> bool | None:
        self._thread = threading.get_ident()
        return super().begin(epoch)


def environment(replica: Replica) -> dict[str, Any]:
    """Returns what the bits of a gradient, and of an update, depend on."""
    return {
        "device": replica.device_model,
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


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
        replica: The replica that the caller runs in.
        is_exact: Whether the mean does not depend on the order of minibatches.
    """

    def __init__(
        self, model: nn.Module, layers: Modules, replica: Replica, is_exact: bool
    ) -> None:
        self._layers, self._starts = layers, list[torch.Tensor]()
        size = sum(buffer.numel() for buffer in self._buffers())
        dtype = dtype_for(each for each in self._buffers() if each.is_floating_point())
        self._moves = SmallSum(size, dtype, replica, is_exact)
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

    def tensors(self) -> list[torch.Tensor]:
        return [self._moves.total] if self._layers else []

    def end_minibatch(self, counts: bool = True) -> None:
        """Adds what a minibatch has moved, and puts back what was before it."""
        buffers = self._buffers()
        starts = self._starts or buffers  # of a minibatch without a pass
        if buffers and counts:
            moves = [buffer - start for buffer, start in zip(buffers, starts)]
            self._moves.add(torch.cat([each.flatten().float() for each in moves]))
        self._put_back()

    def commit(self, num_minibatches: Any) -> None:
        """Moves the statistics by the mean of the moves, and counts one batch."""
        buffers = self._buffers()
        moves = self._moves.value() / num_minibatches
        for buffer, move in zip(buffers, moves.split([b.numel() for b in buffers])):
            move = move if buffer.is_floating_point() else move.sign().long()
            buffer.add_(move.view(buffer.shape))

    def _put_back(self) -> None:
        for buffer, start in zip(self._buffers(), self._starts):
            buffer.copy_(start)
        self._starts = []

    def clear(self) -> None:
        """Takes back what a minibatch has moved."""
        self._moves.total.zero_()
        self._put_back()
