"""`GraBSampler`: every epoch's order from the gradients of the previous epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

import xla_replica
from grab_xla.balancers import ordering_named
from grab_xla.balancing.reordering import RoundRobinSharding
from grab_xla.epoch.columns import Columns, replica_for
from grab_xla.epoch.epoch_metrics import EpochMetrics
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.epoch.orders import Orders
from grab_xla.epoch.progress import Progress
from grab_xla.gradients import fidelities
from grab_xla.gradients.fidelities import Fidelity
from grab_xla.gradients.rows import GradientMatrix, Gradients, Reduction, add_gradient
from grab_xla.options import Measurements, RandomProjection, Signs, family
from per_sample_grad import Capture, Projection
from xla_replica import Replica
from xla_replica.common.arguments import check_choice, check_type
from xla_replica.common.differences import check_same
from xla_replica.common.names import unwrapped

# The version of `GraBSampler.state_dict`.
VERSION = 4
# Sums over an epoch need this precision.
DTYPES = (torch.float32, torch.float64)
_PARAMETERS = "the checksum of the parameters' names, shapes and sequence"


class GraBSampler(Sampler[int]):
    """Orders each epoch's samples so that their gradients balance (GraB).

    Pass it to a DataLoader as ``sampler``, compute every batch's losses in `record` and
    call `backward` in place of theirs; or call `step` with per-sample gradients that
    you have. Each ``iter()`` begins the next epoch, whose order follows from the
    gradients seen since the last one; if there were none, the order stays the same.

    Args:
        data_source: Anything with a length.
        trainable_params: Maps names to parameters; gradients have the same names.
        balance_type: A name in `BALANCE_TYPES`.
        device: Where balancing runs. Default: the replica's device.
        timer: Makes a context from a name, such as grab-sampler's timer.
        record_orders: Whether to keep every epoch's order in `orders_history`.
        replica: Those that balance together. Default: the caller's; an
            `xla_replica.LocalReplica` makes a sampler of its own on every replica.
        scheme: How replicas balance together, 'sharded' or 'gather'; see `Columns`.
        exact: Whether orders have the same bits on any number of replicas under an
            elastic optimizer with ``exact=``. One replica then keeps gradients until
            the update, too. Needs ``scheme='gather'``.
        seed: That of all random numbers, equal on all replicas.
        random_first_epoch: Whether to begin with a shuffle rather than 0, 1, 2 ...
        fidelity: What is balanced: ``"exact"``, gradients themselves;
            ``"projected"``, `per_sample_grad.Projection` of them, which costs a small
            part of a training step and needs no memory for gradients; or ``"group"``,
            the mean gradients of fixed groups of samples, which training computes
            anyway. Default: ``"exact"`` up to 2^20 parameters and for orders that need
            no gradients, and otherwise ``"projected"``.
        projection_size: The most numbers of such a projection.
        group_size: How many samples such a group has: those of every backward pass.
            Consecutive samples of the first order stay together. If it does not divide
            their number, the smaller group at the end stays there and is not balanced.
        normalize_grads: Whether to divide every (projected) gradient by its norm.
        dtype: The dtype of the balance state; gradients are converted.
        signs: How signs are decided. Its fields may be arguments, as grab-sampler has
            them: ``tie``, ``prob_balance``, ``prob_balance_c``.
        measurements: What is measured, likewise: ``record_norm``, ``record_herding``,
            ``stale_mean_herding``, ``cuda_herding``.
        projecting: grab-sampler's way to ask for projections of a size, likewise:
            ``random_projection``, ``pi_eps``, ``kron_order``.
        **options: Fields of these three, and the options of the balance type: the
            fields of its class.

    Raises:
        TypeError: An option is unknown, missing, or of the wrong type; or parameters
            are sharded, as by FSDP2.
        ValueError: An argument is out of range.
        ReplicaError: Replicas have different first orders.

    Attributes:
        projection: The map of gradients where projections are balanced, for
            `Factors.project`; else None.
    """

    _rides = False  # whether exact sums balance, and not `after_update`
    _reduction: str | None = None  # that of the last `backward`
    # What was recorded of the last forward pass, until its backward pass or a step: of
    # a group only the parameters.
    _recorded: Capture | dict[str, nn.Parameter] | None = None

    def __init__(
        self,
        data_source: Sized,
        trainable_params: Mapping[str, Tensor],
        balance_type: str = "mean",
        device: torch.device | str | None = None,
        timer: Callable[[str], Any] | None = None,
        record_orders: bool = False,
        *,
        replica: Replica | None = None,
        scheme: str = "sharded",
        exact: bool = False,
        seed: int = 42,
        random_first_epoch: bool = True,
        fidelity: Fidelity | None = None,
        projection_size: int = 4096,
        group_size: int | None = None,
        normalize_grads: bool = False,
        dtype: torch.dtype = torch.float32,
        signs: Signs | None = None,
        measurements: Measurements | None = None,
        projecting: RandomProjection | None = None,
        **options: Any,
    ) -> None:
        self.num_samples = len(data_source)
        if self.num_samples == 0:
            raise ValueError("data_source is empty: there is nothing to order")
        signs = family(Signs, signs, options)
        measurements = family(Measurements, measurements, options)
        projecting = family(RandomProjection, projecting, options)
        # grab-sampler has enums.
        self.balance_type = str(getattr(balance_type, "value", balance_type))
        ordering = ordering_named(self.balance_type, **options)
        check_choice("dtype", dtype, DTYPES)
        self._timer = timer or contextlib.nullcontext
        replica = replica_for(replica, device)
        self.device = torch.device(replica.device if device is None else device)
        kind = str(projecting.random_projection)
        self.fidelity = fidelities.chosen(fidelity, trainable_params, ordering, kind)
        self._group_size = fidelities.samples_together(
            self.fidelity, group_size, self.num_samples, ordering
        )
        sharding = RoundRobinSharding(
            self.num_samples, replica.num_replicas, replica.rank, self._group_size
        )
        shapes = {name: tuple(p.shape) for name, p in trainable_params.items()}
        size = projecting.size(shapes, sharding.num_groups)
        if size is None and self.fidelity == "projected":
            size = projection_size
        self.projection = None if size is None else Projection(shapes, size, seed=seed)
        self._matrix = GradientMatrix(
            shapes, self.projection, normalize_grads, dtype, self.device
        )
        given = repr([(unwrapped(name), shape) for name, shape in shapes.items()])
        # What a saved state must agree with.
        self._identity: dict[str, Any] = {
            "version": VERSION,
            "balance_type": self.balance_type,
            "options": repr(ordering),
            "num_samples": self.num_samples,
            "normalize_grads": normalize_grads,
            **dataclasses.asdict(signs),
            "projection": self.projection and repr(self.projection),
            "group_size": group_size,
            _PARAMETERS: zlib.crc32(given.encode()),
        }
        self._columns = Columns(
            replica, self._matrix.num_columns, scheme, self.device, dtype, exact
        )
        self._metrics = EpochMetrics(self._columns, measurements)
        self._balancer = OnlineBalancer(ordering, self._columns, self._metrics, signs)
        if self._balancer.uses_gradients:
            xla_replica.refuse_sharded(
                trainable_params, "GraBSampler", ", or take an order such as 'rr'"
            )
        self._orders = Orders(
            ordering, sharding, random_first_epoch, seed, record_orders
        )
        replica.check_agreement(
            "the checksum of the first order",
            zlib.crc32(self.order.tobytes()),
            "Give all replicas the same seed.",
        )
        self._progress = Progress(self._orders, sharding, self._balancer)

    def __len__(self) -> int:
        """Returns how many samples this replica runs in a pass over the order."""
        return len(self._progress)

    def __iter__(self) -> Iterator[int]:
        """Begins the next epoch, or continues a restored one."""
        if self._recorded is not None and self.num_seen == 0:
            self._orders.warn_once(
                "recorded",
                "forward passes were recorded, and the order stays the same: call "
                "sampler.backward(losses) in place of losses.mean().backward()",
            )
        with self._timer("reset_epoch"):
            return self._progress.deal()

    def __call__(self, epoch: int) -> np.ndarray:
        """Returns the whole order of an epoch of an elastic sampler.

        For ``variable_batch_size.CustomSampler(..., order=sampler)``, which cuts it
        into the minibatches of its trace. Several replicas balance gradients at the
        update: ``optimizer.attach(sampler.after_update)``.

        Raises:
            ValueError: ``epoch`` is earlier than the current one.
        """
        self._progress.give(epoch)
        return self.order.copy()

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._orders.epoch

    @property
    def order(self) -> np.ndarray:
        """The order of the current epoch for all replicas, ``(num_samples,)`` int64."""
        return self._orders.order

    @property
    def orders_history(self) -> list[list[int]]:
        """The orders of all epochs so far if ``record_orders``."""
        return self._orders.history

    @property
    def num_seen(self) -> int:
        """The number of samples of the current order whose gradients `step` took."""
        return min(self._balancer.num_seen * self._group_size, self.num_samples)

    def record(
        self, model: nn.Module, **options: Any
    ) -> Capture | contextlib.AbstractContextManager[None]:
        """Returns a context in which a forward pass is recorded for `backward`.

        Args:
            model: The module with the parameters that the sampler was built with.
            **options: Those of `per_sample_grad.Capture`, such as ``fallback``; a
                ``"group"`` needs none and ignores them, as does an order that needs no
                gradients.
        """
        if not self._balancer.uses_gradients:
            return contextlib.nullcontext()
        parameters = self._matrix.parameters_of(model)
        if self.fidelity == "group":
            self._recorded = parameters
            return contextlib.nullcontext()
        self._recorded = capture = Capture(model, [*parameters], **options)
        return capture

    def backward(
        self,
        losses: Tensor,
        *,
        reduction: Reduction = "mean",
        indices: Sequence[int] | Tensor | None = None,
        from_samples: bool = False,
    ) -> None:
        """Does what ``losses.mean().backward()`` does, and balances, in one pass.

        Collective, as `step` is. What ``.grad`` gets is the same to the bit, or with
        ``from_samples`` up to rounding.

        Args:
            losses: ``(B,)``, computed from the model inside `record`. Of a group it may
                also be the mean itself, ``()``.
            reduction: ``"sum"`` for ``losses.sum().backward()``, as for an elastic
                optimizer that counts tokens; then losses are sums over tokens.
            indices: As for `step`.
            from_samples: With ``fidelity="exact"``, ``.grad`` gets the mean of the
                gradients that are formed to be balanced, and the pass does not form it
                once more. All parameters that are trained must be the sampler's. With
                other fidelities nothing is formed, and this changes nothing.

        Raises:
            RuntimeError: Nothing was recorded.
            PerSampleError: Some use of a parameter is not accounted for; the message
                says what to do. With ``from_samples``, the losses depend on something
                else that takes a gradient.
            ValueError: As for `step`; or these are not the losses of one group, or
                ``reduction`` is not allowed.
        """
        check_choice("reduction", reduction, ("mean", "sum"))
        is_group = self.fidelity == "group"
        if losses.dim() != 1 and not is_group:
            raise ValueError(
                f"backward() with losses of shape {tuple(losses.shape)}: give one "
                'number per sample, shape (B,), as with reduction="none"'
            )
        recorded, self._recorded = self._recorded, None
        rows: Gradients = {}
        if not self._balancer.uses_gradients:
            add_gradient(losses, reduction)
        elif recorded is None:
            raise RuntimeError(
                "backward() without record(): compute the losses inside `with "
                "sampler.record(model):`, once for every backward()"
            )
        elif isinstance(recorded, Capture):
            rows = self._matrix.of_samples(recorded, losses, reduction, from_samples)
        else:
            rows = self._matrix.of_group(recorded, losses, reduction)
        self._reduction = reduction
        num_rows, num_losses = (1, losses.numel()) if is_group else (len(losses), None)
        num_losses = num_losses if losses.dim() else None
        self._place(rows, self._progress.claim(num_rows, indices, num_losses))

    def _place(self, rows: Gradients, is_claimed: bool) -> None:
        """Balances what a step has of every sample, or keeps it until the update."""
        if is_claimed:
            with self._timer("sorter_step"), torch.no_grad():
                pieces = self._matrix.pieces(rows, self._balancer.piece_size)
                self._progress.place(pieces)

    def step(
        self,
        per_sample_grads: Mapping[str, Tensor],
        batch: bool = True,
        *,
        indices: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Takes the gradients of the next samples of the order.

        Collective: every replica calls it once per batch, with the same number of
        samples. Under an elastic sampler several replicas keep gradients until the
        update; see `after_update`.

        Args:
            per_sample_grads: ``(B, *shape)`` for every parameter; with
                ``fidelity="group"`` the mean gradients of B groups. A constant factor
                does not change the order; a factor that differs between batches does.
            batch: False for one sample, or group, without a batch axis.
            indices: ``(B,)``, the samples of these gradients, to be compared with the
                order. Keep them on the CPU, because reading them is a transfer.

        Raises:
            ValueError, TypeError: Names, shapes or the number of gradients are wrong,
                ``indices`` are not the next samples of the order, or, without them,
                these are more samples than were drawn of it.
        """
        self._recorded = None
        grads, num_rows = self._matrix.checked(per_sample_grads, batch)
        self._place(grads, self._progress.claim(num_rows, indices))

    def after_update(self, update: Any) -> None:
        """Balances the minibatches of all replicas that an update was made of.

        Attach it to the elastic optimizer, which calls it once per update on every
        replica, idle or not: ``optimizer.attach(sampler.after_update)``. A single
        replica has balanced them already, unless ``exact``; it only checks that it has.

        Args:
            update: Has ``epoch``, and ``batch_size`` and ``minibatch_size`` in samples;
                and a ``weight`` if the optimizer divides sums by tokens.

        Raises:
            ValueError: `step` was not called once for each of this replica's
                minibatches, before ``optimizer.step()``; or some of their samples are
                padding; or `backward` was called with another ``reduction``.
        """
        expected = "mean" if getattr(update, "weight", None) is None else "sum"
        if self._reduction not in (None, expected):
            raise ValueError(
                f"the optimizer's reduction is {expected!r}, but that of the last "
                f"backward() {self._reduction!r}: call sampler.backward(losses, "
                f"reduction={expected!r})"
            )
        if not self._rides:
            self._progress.finish_update(update)

    def ride(self, exact: Any) -> None:
        """Balances in the steps of an optimizer with exact sums, which calls it.

        Raises ValueError if this sampler balances minibatches before their update.
        """
        if self._balancer.uses_gradients and not self._columns.exact:
            raise ValueError(
                "an optimizer with exact= may run a step again: pass GraBSampler(..., "
                "exact=True, scheme='gather')"
            )
        self._rides = self._columns.joins_updates
        if self._rides:
            exact.riders.append(self._progress)

    def scalars(self) -> dict[str, float]:
        """Returns the metrics of the current epoch for TensorBoard; reads the device.

        Collective where replicas share the columns.
        """
        return self._metrics.scalars()

    @property
    def sorter(self) -> Sorter:
        """Measurements of the current epoch, and the balance type's own methods."""
        return Sorter(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that the next orders depend on, without a number of replicas.

        Collective where replicas share the columns. Minibatches that wait for their
        update are not included: a restored run repeats that step.
        """
        return self._identity | self._progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was called, on any number of replicas.

        The next ``iter()`` gives the rest of that epoch.

        Raises:
            TypeError, ValueError, KeyError: It is not such a state, or it belongs to
                another data set, model or balance type.
        """
        check_type("load_state_dict: the state", state, Mapping, "a dict")
        own = self._identity
        theirs = {name: state.get(name) for name in own}
        check_same(theirs, own, "load_state_dict: the state of another sampler")
        self._progress.load_state_dict(state)


@dataclasses.dataclass(frozen=True)
class Sorter:
    """What grab-sampler's users find in another object, `GraBSampler.sorter`.

    Measurements of the current epoch, and methods that the balance type hands on.

    Those are ``update_v(second_moment)`` of 'adamean' and ``compute_order(model,
    params, buffers, loss_fn)`` of 'ntk-eigen'; of your own type, what its
    `Ordering.order_methods` and `state_methods` name.
    """

    _sampler: GraBSampler

    @property
    def grad_norms(self) -> list[float]:
        """The gradients' norms in the order visited, if ``record_norm``."""
        return self._sampler._metrics.norms()

    @property
    def herding(self) -> float:
        """The largest infinity norm of a prefix sum so far, if ``record_herding``."""
        return self._sampler._metrics.herding()[0]

    @property
    def avg_grad_error(self) -> float:
        """The largest 2-norm of a prefix sum so far, if ``record_herding``."""
        return self._sampler._metrics.herding()[1]

    def __getattr__(self, name: str) -> Any:
        orders, ordering = self._sampler._orders, self._sampler._orders.ordering
        if name in ordering.order_methods:
            order_of = getattr(ordering, name)
            return lambda *of, **options: orders.give(order_of(*of, **options))
        if name in ordering.state_methods:
            return functools.partial(self._sampler._balancer.change_state, name)
        raise AttributeError(f"the sorter of {type(ordering).__name__} has no {name!r}")
