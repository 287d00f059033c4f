"""GraB's orders and RigL's masks have the same bits on any number of replicas, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.variable_batch_size import exact
from support.xla_replica.replicas import Backend, of_torch_alone, on_xla
from torch import nn

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler

ORDERS: dict[str, dict[str, Any]] = {
    "group": {"fidelity": "group", "group_size": 4, "balance_type": "pair"},
    "exact": {"fidelity": "exact", "weights": "update"},
    "projected": {"fidelity": "projected", "projection_size": 24},
    "drawn": {"prob_balance": True, "balance_type": "recursive", "depth": 1},
}
MASKS: dict[str, dict[str, Any]] = {
    "rigl": {"T_end": 10},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "snfs": {"method": "snfs"},
    "assigned": {},  # gradients, in place of a backward pass
}
SLOW = sorted((ORDERS | MASKS).keys() - {"group", "rigl"})
RUN = functools.partial(
    exact.Run,
    lambda: exact.perceptron(nn.Tanh()),
    options={"max_grad_norm": 1.0},
    zero_step=None,
)


class Ordered(exact.Training):
    """A run in the orders of GraB."""

    def __init__(self, kind: str, is_exact: bool = True) -> None:
        self.options = {"scheme": "gather", "exact": is_exact, **ORDERS[kind]}
        super().__init__(RUN(trace=(2, 1, 4), num_epochs=4, scales={1: 1e4}))
        self.optimizer.attach(self.grab.after_update)

    def order(self) -> GraBSampler:
        parameters = dict(self.model.named_parameters())
        del parameters["extra"]
        self.grab = GraBSampler(
            self.inputs, parameters, record_orders=True, **self.options
        )
        return self.grab

    def losses(self, rows: list[int]) -> tuple[torch.Tensor, Any]:
        self.rows = rows
        with self.grab.record(self.model):
            return super().losses(rows)

    def backward(self, losses: torch.Tensor) -> None:
        self.grab.backward(losses, indices=self.rows)

    def results(self) -> list[torch.Tensor]:
        """Returns orders, weights, and the state of the balance."""
        orders, state = self.grab.orders_history, self.grab.state_dict()["engine"]
        assert len({tuple(order) for order in orders}) == self.run.num_epochs
        balance = [*state["state"].values(), state["codes"]]
        return [torch.tensor(orders), *self.model.parameters(), *balance]


class Pruned(exact.Training):
    """A run of a sparse model, whose pruner is built after a state is loaded.

    Attributes:
        seen: After each update: masks, weights, and gradients that wait for more.
    """

    def __init__(
        self, kind: str, is_exact: bool = True, saved: dict[str, Any] | None = None
    ) -> None:
        run = RUN(trace=(2, 1, 5, 4, 1, 3), scales={5: 1e4})
        super().__init__(run, is_exact, saved=saved)
        self.is_assigned, self.seen = kind == "assigned", []
        options = {"dense_allocation": 0.3, "delta": 3, "T_end": 20, **MASKS[kind]}
        self.pruner = RigLScheduler(
            self.model, self.optimizer, skip_step=False, ignore_linear_layers=False,
            dense_first=False, state_dict=saved and saved["pruner"], **options,
        )  # fmt: skip
        self.optimizer.attach(self.look)

    def look(self, update: vbs.Update) -> None:
        gradients = [layer.gradient for layer in self.pruner._layers]
        found = [*self.pruner.masks.values(), *self.model.parameters(), *gradients]
        self.seen += [x.detach().clone() for x in found if x is not None]
        self.replica.sync()

    def backward(self, losses: torch.Tensor) -> None:
        if not self.is_assigned:
            xla_replica.backward(losses.mean())
            return
        parameters = [*self.model.parameters()]
        grads = xla_replica.grad(losses.mean(), parameters)
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pruner": self.pruner.state_dict()}

    def results(self) -> list[torch.Tensor]:
        """Returns what updates left."""
        assert self.pruner.rigl_steps >= 2
        return self.seen


def train(rank: int, kind: str, **options: Any) -> exact.Outcome:
    del rank
    run = (Ordered if kind in ORDERS else Pruned)(kind, **options).finish()
    return run.outcome(run.results())


@of_torch_alone
@pytest.mark.parametrize("kind", [*ORDERS, *MASKS])
def test_orders_masks_and_weights_have_the_same_bits(kind):
    exact.assert_same_bits(*(Backend("cpu", n).run(train, kind) for n in (1, 2, 3)))


def train_all(rank: int, kinds: list[str]) -> list[exact.Outcome]:
    return [train(rank, kind) for kind in kinds]


@on_xla
@pytest.mark.parametrize(
    "kinds", [["group", "rigl"], pytest.param(SLOW, marks=pytest.mark.slow)]
)
def test_orders_masks_and_weights_have_the_same_bits_on_xla(kinds):
    runs = [zip(*Backend("xla", n).run(train_all, kinds)) for n in (1, 2)]
    for alone, together in zip(*runs, strict=True):
        exact.assert_same_bits(alone, together)


def test_steps_that_are_run_again_need_rows_that_wait():
    with pytest.raises(ValueError, match=r"exact=True, scheme='gather'"):
        Ordered("exact", is_exact=False).finish()
    with pytest.raises(ValueError, match="needs scheme='gather', got 'sharded'"):
        GraBSampler(range(8), dict(nn.Linear(1, 1).named_parameters()), exact=True)


@pytest.mark.parametrize("kind", ["rigl", "window", "snfs"])
def test_gradients_mean_what_they_do_without_exact_sums(kind):
    mine, plain = (Pruned(kind, each).finish().seen for each in (True, False))
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_a_resumed_pruner_has_the_same_bits():
    run, saved = Pruned("rigl"), []
    for _ in run.train():
        saved.append((run.state(), len(run.seen), run.sampler.num_yielded))
    state, num_seen, num_yielded = saved[7]
    results = Backend("cpu", 2).run(functools.partial(train, saved=state), "rigl")
    # No other step is run again: the units of dense gradients are resumed too.
    expected = run.outcome(run.seen[num_seen:])
    assert {each.digest for each in results} == {expected.digest}
    num_after = sum(each.num_yielded for each in results)
    assert num_after == expected.num_yielded - num_yielded
