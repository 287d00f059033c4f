"""What a replica is: a rank, a number of replicas, a device and a few verbs.

Everything above this package is written against `Replica`. A backend is one subclass
in one file (`xla`, `distributed`); a job of one replica has a `LocalReplica` and is not
a special case. No verb takes a ``scale``: torch_xla ignores it at one replica and
compiles a new graph for every value otherwise, so callers divide by a tensor instead.
"""

from __future__ import annotations

import abc
import functools
import math
import numbers
import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from xla_replica.backends.gradient_sum import Begin, GradientSum
from xla_replica.backends.overlapped_sum import OverlappedSum
from xla_replica.backends.sharded_sum import Hook, ShardedSum, num_copies
from xla_replica.common.arguments import check_integer
from xla_replica.common.trees import NamedTensors, Tensors, map_tensors, tensors_in
from xla_replica.device.device_traits import traits
from xla_replica.device.gradients import accumulation_hook
from xla_replica.device.loader import load_ahead
from xla_replica.device.placing import move_with_ties
from xla_replica.device.seeding import check_seed, generator_of, seeded
from xla_replica.device.sharded import is_sharded, local
from xla_replica.device.sharded_files import read_parts, write_parts
from xla_replica.errors import ReplicaError

# What `Replica.all_gather_object` sends at first; longer values take a second round.
_FIRST_BYTES = 1024


class Replica(abc.ABC):
    """One data-parallel copy of a training job.

    A backend must define `all_gather`, whose result is checked. The other collectives
    have definitions in terms of it, which are correct but send more than they must.

    Attributes:
        rank: This replica's number, ``0 <= rank < num_replicas``.
        num_replicas: How many replicas sum their gradients together.
        device: Where this replica computes.
        reason: Why `current` chose this backend, for people.
        is_live: Whether replicas come and go; see `MemberReplica`.
        generation: The number of the generation of members of a live run; 0 elsewhere.
        overlaps: Whether sums may run beside a backward pass, see `begin_sum`.
        shards: The parameters that are sharded, see `ShardedParameters`; None where
            none can be.
    """

    is_live = overlaps = False
    generation = 0
    shards: Any = None

    def __init__(
        self, rank: int, num_replicas: int, device: torch.device, reason: str
    ) -> None:
        self.rank = rank
        self.num_replicas = num_replicas
        self.device = device
        self.reason = reason

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "all_gather" in vars(cls):
            cls.all_gather = _shape_checked(cls.all_gather)  # type: ignore[method-assign]

    def __str__(self) -> str:
        place = f"{self.rank} of {self.num_replicas} on {self.device}"
        return f"replica {place} ({self.reason})"

    @property
    def is_primary(self) -> bool:
        """Whether this is the one replica that logs and writes files."""
        return self.rank == 0

    @property
    def wants_change(self) -> bool:
        """Whether somebody waits to join the replicas of a live run."""
        return False

    @property
    def is_lazy(self) -> bool:
        """Whether programs are compiled here with the Python numbers in them.

        A number that changes from step to step must then enter as a tensor, see
        `scalar`; elsewhere a Python number is as good and often faster.
        """
        return traits(self.device).is_lazy

    @property
    def is_host(self) -> bool:
        """Whether the replica computes on this CPU, so that reading is free."""
        return traits(self.device).is_host

    @property
    def device_model(self) -> str:
        """The device's kind, and for a GPU its model, on which the bits depend too."""
        kind = self.device.type
        if not self.has_streams:
            return kind
        return f"{kind}, {torch.get_device_module(kind).get_device_name(self.device)}"

    @property
    def has_streams(self) -> bool:
        """Whether copies run beside the computation: on a GPU."""
        return traits(self.device).has_streams

    def check_device(
        self, parameters: Iterable[torch.Tensor], remedy: str = ""
    ) -> None:
        """Raises ValueError if a parameter is on another kind of device.

        ``remedy`` ends the message, which says to move the model.
        """
        for parameter in parameters:
            if parameter.device.type != self.device.type:
                raise ValueError(
                    f"a parameter is on {parameter.device}, but this is {self}: move "
                    f"the model with model.to(xla_replica.current().device){remedy}: "
                    "docs/recipes.md#devices-seeds-and-tied-weights"
                )

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``(num_replicas, *tensor.shape)``: every replica's tensor."""

    def all_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the largest number of all replicas, for every element, none a NaN."""
        return self.all_gather(tensor).amax(0)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins to sum a tensor over replicas, in place; returns what waits for it.

        Where a sum cannot run beside other work, it runs when it is waited for.
        """
        return lambda: self.all_reduce_([tensor])

    def together(self, waits: Iterable[Callable[[], None]]) -> None:
        """Calls what `begin_sum` has returned.

        In a live run all replicas of a member raise MemberLost if one of them does.
        """
        for wait in waits:
            wait()

    def all_reduce_(self, tensors: Tensors) -> None:
        """Replaces each tensor by its sum over all replicas, in place.

        Every replica must bring tensors of the same shapes and dtypes in the same
        order. Any float or integer dtype is allowed. On a lazy backend the sum runs at
        the next `sync`.
        """
        tensors = listed("all_reduce_", tensors)
        if tensors and self.num_replicas > 1:
            with torch.no_grad():
                self._all_reduce_(tensors)

    def _all_reduce_(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self.all_gather(tensor).sum(0))

    def gradient_sum(
        self,
        may_begin: Callable[[], bool],
        overlap: bool = True,
        parameters: Tensors = (),
        shards: bool = True,
    ) -> GradientSum:
        """Returns what holds gradients and sums them over replicas.

        Args:
            may_begin: See `GradientSum`.
            overlap: Whether sums may run in the backward pass, where that `overlaps`.
            parameters: Those whose gradients it will hold at first.
            shards: Whether a replica holds no more than its part of the gradients of
                sharded parameters between backward passes.
        """
        if self.is_sharded(parameters):
            return ShardedSum(self, may_begin, whole=not shards)
        if overlap and self.overlaps:
            return OverlappedSum(self, may_begin)
        return GradientSum(self, may_begin)

    def sums_parts(self) -> Begin | None:
        """Returns what begins to sum a tensor of shards with other members' in place.

        Returns None if there is no other member.
        """
        return None

    # --- sharded parameters, of which every replica holds a part --------------------

    def is_sharded(self, parameters: Tensors) -> bool:
        """Returns whether a replica holds only parts of any of these parameters.

        Every replica must then run every forward and backward pass.
        """
        return self.shards is not None and any(map(is_sharded, parameters))

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what this replica holds of a tensor: a part if it is sharded."""
        return local(tensor)

    def sum_over_shards(self, numbers: Tensors, tensors: Tensors) -> list[torch.Tensor]:
        """Completes sums over the numbers of tensors, of which this replica has parts.

        Args:
            numbers: 0-d: for each tensor, the sum over what `local` returns.
            tensors: As many, such as parameters; the others' sums are whole already.
        """
        sums = list(numbers)
        parts = [n for n, tensor in enumerate(tensors) if is_sharded(tensor)]
        if parts:
            flat = torch.stack([sums[n] / num_copies(tensors[n]) for n in parts])
            self.all_reduce_([flat])
            for n, total in zip(parts, flat.unbind()):
                sums[n] = total
        return sums

    def write_shards(self, folder: Path, tensors: NamedTensors) -> dict[str, str]:
        """Writes tensors in torch.distributed.checkpoint's format. Collective.

        Args:
            folder: Where to. All hosts share it.
            tensors: By name.

        Returns:
            The SHA-256 of every file by name.

        Raises:
            OSError: On every replica if one of them could not write.
        """
        return write_parts(self, folder, tensors)

    def read_shards(
        self, folder: Path, wanted: NamedTensors, like: Tensors
    ) -> dict[str, torch.Tensor]:
        """Returns what any number of replicas wrote by `write_shards`. Collective.

        Args:
            folder: The folder that it was written to.
            wanted: By name, tensors of the shapes and dtypes that were written.
            like: Parameters. A tensor is sharded as the parameter of its shape is, if
                there is one, and else whole on every replica.

        Raises:
            OSError: A file is missing, or cannot be read.
        """
        return read_parts(folder, wanted, like)

    def on_gradient(self, parameter: torch.Tensor, hook: Hook) -> Any:
        """Calls ``hook`` with every gradient that a backward pass will accumulate.

        It is the gradient of the whole parameter, of one pass alone, after the hooks of
        the tensor; ``torch.autograd.grad`` makes none. Returns what the caller must
        keep for as long as ``hook`` is to be called.
        """
        place = None if self.shards is None else self.shards.places.get(parameter)
        if place is None:
            return accumulation_hook(parameter, hook)
        place.hooks.append(hook)
        return hook

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends a part of the tensor to every replica and returns those received.

        Args:
            tensor: ``(num_replicas, ...)``; ``tensor[r]`` is for replica r.

        Returns:
            The same shape; ``[r]`` is what replica r sent to this one.
        """
        n = self.num_replicas
        if tensor.dim() == 0 or len(tensor) != n:
            raise ValueError(
                f"all_to_all: a tensor of shape {tuple(tensor.shape)} has no part for "
                f"each of {n} replicas; its first dimension must be {n}"
            )
        value = tensor.detach()
        return value.clone() if n == 1 else self._all_to_all(value)

    def _all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        return self.all_gather(value)[:, self.rank]

    def broadcast_(self, tensors: Tensors, source: int = 0) -> None:
        """Replaces each tensor by that of replica ``source``, in place."""
        check_integer("broadcast_: source", source, 0, self.num_replicas - 1)
        tensors = listed("broadcast_", tensors)
        if tensors and self.num_replicas > 1:
            with torch.no_grad():
                self._broadcast_(tensors, source)

    def _broadcast_(self, tensors: list[torch.Tensor], source: int) -> None:
        for tensor in tensors:
            tensor.copy_(self.all_gather(tensor)[source])

    def barrier(self) -> None:
        """Returns once every replica has called it and its device is idle."""
        # Some groups' own barrier does nothing.
        self.all_reduce_([self.scalar(1.0)])
        self.wait()

    def writing(self, what: str) -> AbstractContextManager[None]:
        """Surrounds what all replicas do together to write ``what``, for people.

        In a live run another member writes it if one dies or fails.
        """
        return nullcontext()

    def sync(self) -> None:  # noqa: B027 (nothing to do is right where nothing is lazy)
        """Cuts the pending lazy graph here and starts it; elsewhere does nothing."""

    def wait(self) -> None:
        """Cuts the pending graph and blocks until this replica's device is idle."""
        if not self.is_host:
            torch.accelerator.synchronize(self.device)

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a changing number as device data: ``(1,)`` on this replica's device.

        One dimension, not zero: a lazy backend bakes a Python number or a 0-d tensor
        into the graph when it is 0, 1 or -1 or happens to equal another one.

        Raises:
            TypeError: ``value`` is not a number of the host; a tensor would be read.
            ValueError: ``dtype`` holds integers or truth values, and not this number.
        """
        if not isinstance(value, numbers.Real):
            raise TypeError(f"scalar: value must be a number, got {value!r}")
        if not dtype.is_floating_point and value not in (
            (0, 1) if dtype == torch.bool else (math.isfinite(value) and int(value),)
        ):
            raise ValueError(
                f"scalar: {dtype} cannot hold {value!r}, which would be another number "
                "without a word; pass a floating-point dtype, or round it yourself"
            )
        if not self.is_lazy:
            # A copy from memory that is not pinned would wait for all that is queued.
            return torch.full((1,), value, dtype=dtype, device=self.device)
        return torch.tensor([value], dtype=dtype).to(self.device)

    def fetch(self, tensors: Tensors) -> list[torch.Tensor]:
        """Returns copies of tensors on the host, in one transfer where possible.

        Blocks until they are computed. No other verb reads a device back, except
        those that call this one: `to_host`, `all_gather_object`, `check_agreement`.
        """
        return [t.detach().to("cpu", copy=True) for t in listed("fetch", tensors)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every replica's ``value``, by rank. Collective; blocks.

        It begins with a `sync`, so that replicas may call it after different work; a
        single replica has nothing to transfer. For settings, names and small states
        that can be pickled, with tensors on the CPU, not for the tensors of a step.
        """
        own = pickle.dumps(value)
        if self.num_replicas == 1:
            return [pickle.loads(own)]
        self.sync()
        width = _FIRST_BYTES
        while True:
            words = np.empty(1 + width // 4, np.int32)  # the length, and so many bytes
            words[0] = len(own)
            words[1:] = np.frombuffer(own[:width].ljust(width, b"\0"), np.int32)
            [rows] = self.fetch([self.all_gather(self.send(torch.from_numpy(words)))])
            longest = int(rows[:, 0].max())
            if longest <= width:
                # What follows the end of a pickle is not read.
                return [pickle.loads(row[1:].tobytes()) for row in rows.numpy()]
            # A power of two, so that few programs are compiled.
            width = 1 << (longest - 1).bit_length()

    def gather_at_rest(self, value: Any) -> list[Any]:
        """Returns what `all_gather_object` does, for replicas that save or stop.

        A member of a live run does so without the others: its list has its own value.
        """
        return self.all_gather_object(value)

    def choose(self, find: Callable[[], Any]) -> Any:
        """Returns what ``find`` returns on replica 0; a live member's is its own."""
        return self.all_gather_object(find() if self.is_primary else None)[0]

    def check_agreement(self, what: str, value: Any, remedy: str) -> None:
        """Raises unless every replica brings an equal ``value``. Collective; blocks.

        Args:
            what: Names the value in the message, such as "the order of epoch 3".
            value: Anything that can be pickled and compared. Of dicts the message has
                the items that differ.
            remedy: Ends the message: the usual cause and what to do.

        Raises:
            ReplicaError: Replicas differ; on every replica, with the ranks.
        """
        if self.num_replicas == 1:
            return
        values = self.all_gather_object(value)
        others = [rank for rank, other in enumerate(values) if other != values[0]]
        if others:
            mine, theirs = values[0], values[others[0]]
            if isinstance(mine, dict) and isinstance(theirs, dict):
                names = [n for n in mine | theirs if mine.get(n) != theirs.get(n)]
                mine, theirs = ({n: v.get(n) for n in names} for v in (mine, theirs))
            ranks = ", ".join(map(str, others[:8])) + ", ..." * (len(others) > 8)
            raise ReplicaError(
                f"replicas disagree about {what}: replica 0 has {mine!r}, replica "
                f"{others[0]} has {theirs!r}, and {len(others)} of "
                f"{self.num_replicas} differ from replica 0 (rank {ranks}). {remedy}",
                others[0],
            )

    def check_parameters(self, parameters: Tensors) -> None:  # noqa: B027
        """Raises TypeError if something else sums these parameters' gradients already.

        Call it once, before training: it may look at every object of the process.
        """

    def to_host(self, state: Any) -> Any:
        """Returns ``state`` with every tensor in it on the CPU, by one `fetch`.

        Tensors may be in tuples, lists and dicts, which keep their types.
        """
        on_cpu = iter(self.fetch([t for t in tensors_in(state) if not t.is_meta]))
        return map_tensors(state, lambda t: t if t.is_meta else next(on_cpu))

    def setup(self, model: nn.Module) -> nn.Module:
        """Moves a model to `device`, with the weights and buffers of replica 0.

        Collective; returns the model. Tied parameters stay tied, which ``model.to``
        makes independent ones of on XLA.
        """
        move_with_ties(model, self.device)
        self.sync()  # what is pending differs, where replicas drew other weights
        tensors = [*model.parameters(), *model.buffers()]
        self.broadcast_([tensor.detach() for tensor in tensors])
        return model

    def send(self, batch: Any) -> Any:
        """Returns ``batch`` with every tensor in it, as in `to_host`, on `device`."""
        return map_tensors(batch, lambda t: t.to(self.device, non_blocking=True))

    def loader(self, batches: Iterable[Any], prefetch: int = 2) -> Iterable[Any]:
        """Returns ``batches`` as `send` moves them, ``prefetch`` ahead of the loop.

        An exception in the dataset is raised in the training loop, at its place. If a
        step is run again, what was fetched ahead is dropped, see `FreshBatches`. On a
        CPU, where nothing has to be moved, other ``batches`` are returned themselves.
        On a lazy device a sampler whose ``ends_graphs`` is true ends one with each.
        """
        return load_ahead(self, batches, check_integer("prefetch", prefetch, least=1))

    def seed(self, seed: int) -> None:
        """Seeds what the device draws, such as dropout, by ``seed`` and the rank."""
        torch.manual_seed(check_seed(seed) + self.rank)

    def rng_state(self) -> torch.Tensor:
        """Returns the state of the random numbers that this replica's device draws.

        1-D uint8 on the CPU, of a length that depends on the kind of device. Call it on
        every replica, because it cuts the lazy graph, and every cut moves the state.
        """
        return generator_of(self.device).get_state().cpu()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores what `rng_state` returned on a device of this kind."""
        generator_of(self.device).set_state(state.cpu())

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Returns a context in which draws on the CPU are the same on every replica.

        Build the model inside it, see `xla_replica.seeded`.
        """
        return seeded(seed)


def _shape_checked(all_gather: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Returns a backend's `all_gather`, which raises if its result has a wrong shape.

    Without the replica dimension sums and broadcasts would be wrong without an error.
    """

    @functools.wraps(all_gather)
    def checked(self: Replica, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = all_gather(self, tensor)
        shape = (self.num_replicas, *tensor.shape)
        if gathered.shape != shape:
            raise ValueError(
                f"{type(self).__name__}.all_gather must return a tensor of shape "
                f"(num_replicas, *tensor.shape), here {shape}, got one of shape "
                f"{tuple(gathered.shape)}: stack what the replicas brought in a new "
                "first dimension, by rank"
            )
        return gathered

    return checked


def listed(verb: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that a verb was given as a list; raises TypeError otherwise.

    A single tensor is refused: to Python it is a sequence of its rows.
    """
    given: Any = tensors
    is_one = isinstance(given, torch.Tensor)
    found = [given] if is_one or not isinstance(given, Iterable) else list(given)
    if is_one or not all(isinstance(each, torch.Tensor) for each in found):
        got = next((each for each in found if not isinstance(each, torch.Tensor)), None)
        got = f"a tensor of shape {tuple(given.shape)}" if is_one else repr(got)
        raise TypeError(f"{verb} takes a list of tensors, such as [tensor], got {got}")
    return found
