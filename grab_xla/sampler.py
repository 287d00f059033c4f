"""`GraBSampler`: the order of every epoch from the gradients of the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from grab_xla.balancers import Balancer, ordering_named
from grab_xla.balancers.gradient_free import Unbalanced
from grab_xla.balancers.mean import AdaMeanBalance
from grab_xla.balancers.ntk import NTKEigen
from grab_xla.epoch.columns import Columns
from grab_xla.epoch.epoch_metrics import Instruments
from grab_xla.epoch.gradient_matrix import Rows, normalized
from grab_xla.epoch.online_balancer import Engine
from grab_xla.epoch.options import check_same_order, generator_for, replica_for
from grab_xla.epoch.orders import Orders
from grab_xla.epoch.pending_minibatches import HeldMinibatches
from grab_xla.epoch.round_robin_sharding import Dealing
from grab_xla.epoch.saved import VERSION, check_same
from grab_xla.projections.random_projection import projection


class GraBSampler(Sampler[int]):
    """Orders each epoch's samples so that their gradients balance (GraB).

    Give it to a DataLoader as ``sampler`` and call `step` with the per-sample gradients
    of every batch. Each ``iter()`` begins the next epoch, whose order follows from the
    gradients seen since the last one; where none were seen, it is the same order again.

    Args:
        data_source: Anything with a length.
        trainable_params: Name to parameter; gradients come under the same names.
        balance_type: A name in `BALANCE_TYPES`.
        device: Where balancing runs. Default: that of the replica.
        timer: Anything that makes a context from a name, such as grab-sampler's timer.
        record_orders: Keep every epoch's order in `orders_history`.
        num_replicas, rank: Default: of the replica that the caller runs in. 1 and 0
            make a sampler of its own on every replica.
        scheme: How replicas balance together, 'sharded' or 'gather'; see `Columns`.
        drop_last: With several replicas, leave out the last samples of an order that
            cannot be dealt evenly, rather than repeat its first ones.
        generator: CPU generator, the only source of randomness. Default: a new one
            with ``seed``. Replicas need equal ones.
        seed: Of that generator, and of random projections.
        random_first_epoch: Begin with a shuffle, not with 0, 1, 2 ...
        random_projection: Balance fewer numbers: 'jl', 'jl_sparse' or 'kron'; see
            `projection`.
        pi_eps: By which factor a projection may change distances.
        kron_order: Factors of the 'kron' projection.
        normalize_grads: Divide every (projected) gradient by its norm.
        prob_balance: Draw signs by the self-balancing walk instead of the better one.
        prob_balance_c: The walk's constant c.
        tie: Sign at an inner product of exactly zero, such as that of each epoch's
            first sample: 'negative' (grab-sampler) or 'positive' (the papers' code).
        tile_size: Rows whose inner products are formed at once. Any number gives the
            same signs; the default depends on the backend.
        dtype: Of the balance state; gradients are converted.
        record_norm: Keep the norms that `grad_norms` reads.
        record_herding: Keep what `herding` and `avg_grad_error` read; see
            `Instruments` for this and the next option.
        stale_mean_herding: Centre by the mean of the epoch before, in O(d) memory,
            instead of keeping all gradients of an epoch.
        cuda_herding: Accepted for code that passes it; gradients are kept where they
            are balanced.
        **balance_options: Of the balance type: the fields of its class.

    Raises:
        TypeError: An option is unknown, missing, or of the wrong type.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        data_source: Sized,
        trainable_params: Mapping[str, torch.Tensor],
        balance_type: str = "mean",
        device: torch.device | str | None = None,
        timer: Callable[[str], Any] | None = None,
        record_orders: bool = False,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        scheme: str = "sharded",
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        seed: int = 42,
        random_first_epoch: bool = True,
        random_projection: str = "none",
        pi_eps: float = 0.1,
        kron_order: int = 2,
        normalize_grads: bool = False,
        prob_balance: bool = False,
        prob_balance_c: float = 30,
        tie: str = "negative",
        tile_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        record_norm: bool = False,
        record_herding: bool = False,
        stale_mean_herding: bool = False,
        cuda_herding: bool = False,
        **balance_options: Any,
    ) -> None:
        del cuda_herding
        self.num_samples = len(data_source)
        if self.num_samples == 0:
            raise ValueError("data_source is empty: there is nothing to order")
        self.balance_type = str(getattr(balance_type, "value", balance_type))
        ordering = ordering_named(self.balance_type, **balance_options)
        self._replica = replica_for(num_replicas, rank, device)
        self.device = torch.device(self._replica.device if device is None else device)
        self._timer = timer or contextlib.nullcontext
        self._normalize = normalize_grads
        self._rows = Rows(trainable_params, dtype, self.device)
        kind = str(getattr(random_projection, "value", random_projection))
        self._project = projection(
            kind,
            self._rows.num_columns,
            self.num_samples,
            pi_eps,
            kron_order,
            seed,
            dtype,
            self.device,
        )
        self._settings = {
            "random_projection": (kind, pi_eps, kron_order, seed)
            if kind != "none"
            else kind,
            "normalize_grads": normalize_grads,
            "tie": tie,
            "prob_balance": prob_balance_c if prob_balance else None,
        }
        columns = Columns(self._replica, self._project.num_outputs, scheme)
        herding = "running" if stale_mean_herding else "exact"
        self._engine = Engine(
            ordering
            if isinstance(ordering, Balancer)
            else Unbalanced(ordering=ordering),
            columns,
            self._replica,
            self.device,
            dtype=dtype,
            tie=tie,
            tile_size=tile_size,
            walk_constant=prob_balance_c if prob_balance else None,
            instruments=Instruments(
                columns,
                self._replica,
                self.device,
                dtype,
                norms=record_norm,
                herding=herding if record_herding else None,
            ),
        )
        self._held = HeldMinibatches(self._replica, columns.num_columns, dtype)
        self._dealing = Dealing(
            self.num_samples, self._replica.num_replicas, self._replica.rank, drop_last
        )
        self._orders = Orders(
            ordering,
            self.num_samples,
            random_first_epoch,
            generator_for(generator, seed),
            record_orders,
        )
        check_same_order(self._orders.order, self._replica)
        self._resumed = False
        self._start = 0  # position at which the pass over the order began
        self._own = self._dealing.own(self.order, 0)  # this replica's part of it
        self._given_for: int | None = None  # epoch that an elastic sampler asked for
        self._num_updated = 0  # of num_seen, those that updates have been made of

    def __len__(self) -> int:
        """Samples that this replica runs in a pass over the order."""
        return self._dealing.length(self._start)

    def __iter__(self) -> Iterator[int]:
        """Begins the next epoch, or goes on with a restored one."""
        self._given_for = None
        self._advance()
        self._own = self._dealing.own(self.order, self._start)
        return iter(self._own.tolist())

    def __call__(self, epoch: int) -> np.ndarray:
        """The whole order of an epoch of an elastic sampler.

        For ``variable_batch_size.CustomSampler(..., order=sampler)``, which cuts it
        into the minibatches of its trace. With several replicas, gradients are
        balanced at the update: ``optimizer.attach(sampler.after_update)``.

        Raises:
            ValueError: ``epoch`` lies behind the one under way.
        """
        if self._given_for is not None and epoch < self._given_for:
            raise ValueError(
                f"the order of epoch {epoch} is gone: epoch {self._given_for} is under "
                "way, and orders follow from gradients"
            )
        if self._given_for is None or epoch > self._given_for:
            # The elastic sampler knows where it stands: nothing is left to go on with.
            self._resumed = False
            self._advance()
        self._resumed, self._start = False, 0
        self._given_for = epoch
        return self.order.copy()

    @property
    def epoch(self) -> int:
        """Number of the epoch under way, from 0."""
        return self._orders.epoch

    @property
    def order(self) -> np.ndarray:
        """``(num_samples,)`` int64: its order, of all replicas."""
        return self._orders.order

    @property
    def orders_history(self) -> list[list[int]]:
        """With ``record_orders``, the orders of all epochs so far."""
        return self._orders.history

    @property
    def num_seen(self) -> int:
        """Samples of the order under way whose gradients `step` has taken."""
        return self._engine.num_seen

    def step(
        self,
        per_sample_grads: Mapping[str, torch.Tensor],
        batch: bool = True,
        *,
        indices: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        """Takes the gradients of the next samples of the order.

        With several replicas a collective: every replica calls it once per batch, with
        as many samples. Under an elastic sampler on several replicas gradients are
        kept until the update, see `after_update`.

        Args:
            per_sample_grads: ``(B, *shape)`` for every parameter. A constant factor
                changes no order, one that differs between batches does.
            batch: False for one sample without a batch axis.
            indices: ``(B,)`` the samples that these are gradients of, to be checked
                against the order. Keep them on the CPU: looking is a transfer.

        Raises:
            ValueError, TypeError: Names, shapes or number of gradients are not those
                expected, or ``indices`` are not the next samples of the order.
        """
        num_rows = self._rows.count(per_sample_grads, batch)
        self._check_samples(num_rows, indices)
        if num_rows == 0:
            return
        if not self._looks:
            self.count(num_rows)
            return
        with self._timer("sorter_step"), torch.no_grad():
            rows = self._project(self._rows(per_sample_grads, batch))
            if self._normalize:
                rows = normalized(rows)
            if self._given_for is not None and self._replica.num_replicas > 1:
                self._held.append(rows)
                return
            everyone = self._engine.columns.of_all_replicas(rows)
            left = self._dealing.end(self._start) - self.num_seen
            # In the order's order, and without repeated samples.
            self._engine.balance(everyone.transpose(0, 1).flatten(0, 1)[:left])

    def count(self, num_samples: int) -> None:
        """In place of `step` for an order that needs no gradients.

        Only a run that saves the middle of an epoch has to call either.

        Args:
            num_samples: That this replica has used since the last call.

        Raises:
            TypeError: The balance type needs gradients.
            ValueError: The epoch has not so many left.
        """
        if self._looks:
            raise TypeError(
                f"count: balance_type={self.balance_type!r} or an instrument needs "
                "gradients: call step()"
            )
        self._check_samples(num_samples, None)
        if self._given_for is None or self._replica.num_replicas == 1:
            left = self._dealing.end(self._start) - self.num_seen
            self._engine.skip(min(num_samples * self._replica.num_replicas, left))

    def after_update(self, update: Any) -> None:
        """Balances the minibatches of all replicas that an update was made of.

        Attach it to the elastic optimizer, which calls it once per update on every
        replica, idle or not: ``optimizer.attach(sampler.after_update)``.
        One replica has balanced them already, and only looks whether it has.

        Args:
            update: With its ``epoch``, and ``batch_size`` and ``minibatch_size`` in
                samples.

        Raises:
            ValueError: `step` was not called once for each of this replica's
                minibatches, before ``optimizer.step()``.
        """
        if self._replica.num_replicas == 1:
            self._check_balanced(update)
            return
        # An idle replica may get here before it asks for the epoch's order.
        self(update.epoch)
        if not self._looks:
            self._engine.skip(update.batch_size)
            return
        with torch.no_grad():
            self._held.balance(self._engine, update.batch_size, update.minibatch_size)

    def update_v(self, second_moment: torch.Tensor) -> None:
        """Gives 'adamean' the ``(d,)`` second moment that gradients are divided by.

        Raises:
            TypeError: The balance type has no use for one.
            ValueError: It is not a number for every (projected) parameter.
        """
        if not isinstance(self._orders.ordering, AdaMeanBalance):
            raise TypeError(
                f"update_v: balance_type={self.balance_type!r} does not scale gradients"
            )
        self._engine.update_second_moment(second_moment)

    def compute_order(
        self,
        model: torch.nn.Module,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> None:
        """Computes the next epoch's order of 'ntk-eigen' at these parameters.

        Args:
            model: This and what follows: see
                `grab_xla.contrib.ntk.per_sample_gradients`.

        Raises:
            TypeError: The balance type computes no order.
        """
        ordering = self._orders.ordering
        if not isinstance(ordering, NTKEigen):
            raise TypeError(
                f"compute_order: balance_type={self.balance_type!r} computes no order"
            )
        self._orders.give(ordering.order_of(model, params, buffers, loss_fn))

    @property
    def grad_norms(self) -> list[float]:
        """With ``record_norm``: the gradients' norms in the order visited."""
        return self._engine.instruments.norms()

    @property
    def herding(self) -> float:
        """With ``record_herding``: largest infinity norm of a prefix sum so far."""
        return self._engine.instruments.herding()[0]

    @property
    def avg_grad_error(self) -> float:
        """With ``record_herding``: largest 2-norm of a prefix sum so far."""
        return self._engine.instruments.herding()[1]

    def scalars(self) -> dict[str, float]:
        """What TensorBoard should draw of the epoch under way; reads the device.

        Collective where replicas share the columns.
        """
        return self._engine.instruments.scalars()

    @property
    def sorter(self) -> GraBSampler:
        """This sampler: grab-sampler keeps some of the above in an object behind it."""
        return self

    @property
    def _looks(self) -> bool:
        """Whether gradients are of any use."""
        return self._orders.ordering.needs_gradients or self._engine.instruments.on

    def _advance(self) -> None:
        """Begins an epoch unless the one under way has not been used."""
        # Looking at what is left of a restored epoch changes nothing either.
        unused = self._resumed and self.num_seen == self._start
        if unused and not self._orders.has_given:
            return
        self._held.abandon()
        self._resumed, self._start = False, 0
        needs_gradients = self._orders.ordering.needs_gradients
        if self._orders.begun and needs_gradients and self.num_seen == 0:
            return
        codes = self._engine.codes()
        with self._timer("reset_epoch"):
            self._orders.advance(codes)
            self._engine.begin_epoch(self.num_samples, self._orders.generator)
        self._num_updated = 0

    def _check_balanced(self, update: Any) -> None:
        """Raises ValueError unless the update's gradients have all been balanced.

        If they came only after it, a state that is saved in it would lack them: the
        samples of a resumed run would get the signs of others.
        """
        if not self._looks or self._given_for != update.epoch:
            return
        num_taken = self.num_seen - self._num_updated
        self._num_updated = self.num_seen
        if num_taken != update.batch_size:
            raise ValueError(
                f"this update is of {update.batch_size} samples, but sampler.step() "
                f"took the gradients of {num_taken} since the one before: call it once "
                "per minibatch, before optimizer.step()"
            )

    def _check_samples(
        self, num_rows: int, indices: Sequence[int] | torch.Tensor | None
    ) -> None:
        """Raises ValueError unless these can be the next samples."""
        if not self._orders.begun:
            raise ValueError(
                "step() before the first epoch: iterate over the sampler (or its "
                "DataLoader) first"
            )
        expected = self._next_samples(num_rows)
        if len(expected) < num_rows:
            raise ValueError(
                f"step() with {num_rows} samples, but only {len(expected)} are left of "
                f"epoch {self.epoch} on this replica: iter(sampler) begins the next one"
            )
        if indices is None:
            return
        received = torch.as_tensor(indices).cpu().numpy().reshape(-1)
        if not np.array_equal(received, expected):
            raise ValueError(
                f"step(): indices are {received[:8].tolist()}..., but the next "
                f"{num_rows} samples of the order are {expected[:8].tolist()}...: call "
                "step() once per batch, in the order in which the loader gives them"
            )

    def _next_samples(self, num_rows: int) -> np.ndarray:
        """The samples that this replica runs next, at most ``num_rows``."""
        if self._given_for is None:
            done = -(-(self.num_seen - self._start) // self._replica.num_replicas)
            return self._own[done : done + num_rows]
        turn = len(self._held) * self._replica.num_replicas + self._replica.rank
        first = self.num_seen + turn * num_rows
        return self.order[first : first + num_rows]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the orders to come depend on; no number of replicas.

        Collective where replicas share the columns. Minibatches kept for an update
        that has not come are not in it: a restored run repeats that step.
        """
        return {**self._description(), "engine": self._engine.state_dict()}

    def _description(self) -> dict[str, Any]:
        """The part of a state that is on the host: nothing is read or summed."""
        return {
            "version": VERSION,
            "balance_type": self.balance_type,
            "options": repr(self._orders.ordering),
            "settings": self._settings,
            "num_samples": self.num_samples,
            "num_columns": self._project.num_outputs,
            "given_for": self._given_for,
            **self._orders.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on any number of replicas.

        The next ``iter()`` gives what is left of that epoch.

        Raises:
            ValueError: It is the state of another data set, model or balance type.
        """
        check_same(state, {**self._description(), "engine": None})
        self._given_for = state["given_for"]
        # The epoch's random numbers are drawn again rather than saved.
        self._orders.generator.set_state(state["drawn_from"].cpu())
        self._engine.draw(self.num_samples, self._orders.generator)
        self._engine.load_state_dict(state["engine"])
        self._orders.load_state_dict(state)
        self._held.clear()
        self._num_updated = self.num_seen
        # A finished epoch is not gone on with: the next iter() begins another.
        self._resumed = 0 < self.num_seen < self._dealing.end(0)
        self._start = self.num_seen if self._resumed else 0
        self._own = self._dealing.own(self.order, self._start)
