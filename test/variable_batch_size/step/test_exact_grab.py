"""GraB's orders, and the weights, have the same bits on any number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.variable_batch_size import exact
from support.xla_replica.replicas import Backend
from torch import nn

from grab_xla import GraBSampler

OPTIONS: dict[str, dict[str, Any]] = {
    "group": {"fidelity": "group", "group_size": 4, "balance_type": "pair"},
    "exact": {"fidelity": "exact", "weights": "update"},
    "projected": {"fidelity": "projected", "projection_size": 24},
    "drawn": {"prob_balance": True, "balance_type": "recursive", "depth": 1},
}
RUN = exact.Run(
    lambda: exact.perceptron(nn.Tanh()), options={"max_grad_norm": 1.0},
    trace=(2, 1, 4), num_epochs=4, scales={1: 1e4}, zero_step=None,
)  # fmt: skip


class Ordered(exact.Training):
    """A run in the orders of GraB."""

    def __init__(self, kind: str, is_exact: bool) -> None:
        self.options = {"scheme": "gather", "exact": is_exact, **OPTIONS[kind]}
        super().__init__(RUN)
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


def train(rank: int, kind: str, is_exact: bool = True) -> exact.Outcome:
    """Returns the outcome of orders, weights, and the state of the balance."""
    del rank
    run = Ordered(kind, is_exact).finish()
    orders, state = run.grab.orders_history, run.grab.state_dict()["engine"]
    assert len({tuple(order) for order in orders}) == RUN.num_epochs
    balance = [*state["state"].values(), state["codes"]]
    return run.outcome([torch.tensor(orders), *run.model.parameters(), *balance])


@exact.on_all_replicas(OPTIONS)
def test_orders_and_weights_have_the_same_bits(kind, device, numbers):
    exact.assert_same_bits(*(Backend(device, n).run(train, kind) for n in numbers))


def test_steps_that_are_run_again_need_rows_that_wait():
    with pytest.raises(ValueError, match=r"exact=True, scheme='gather'"):
        train(0, "exact", False)
    with pytest.raises(ValueError, match="needs scheme='gather', got 'sharded'"):
        GraBSampler(range(8), dict(nn.Linear(1, 1).named_parameters()), exact=True)
