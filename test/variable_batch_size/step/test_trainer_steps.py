"""A trainer whose batches are whole steps trains as a loop by hand, on any replicas."""

from typing import Any

import pytest
import torch
from support.variable_batch_size import elastic
from support.xla_replica.replicas import row
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from variable_batch_size.integrations import steps

# Steps of 1 to 9 minibatches, in some of which one of three replicas, or two, are idle.
CASE = elastic.Case((4, 36, 8, 4, 12, 32, 20, 4), epochs=2, wide=True)
NUM_UPDATES = len([*elastic.batches(CASE)])


class Trainer(steps.Steps):
    """Counts one update for every batch of its loader, whatever that holds.

    Args:
        closes: Whether its optimizer gets a closure, which leaves the last minibatch
            open; else minibatches make the update before the trainer calls ``step()``.
    """

    def __init__(self, closes: bool, saved: Any = None, on_end: str = "cycle") -> None:
        self.closes, self.num_updates = closes, 0
        self.model, *data = elastic.make(CASE)
        dataset = vbs.SeededDataset(TensorDataset(*data), seed=0)
        self.batches = elastic.sampler_of(CASE, dataset, on_end=on_end)
        self.loader = DataLoader(dataset, batch_sampler=self.batches)
        inner = elastic.OPTIMIZERS[CASE.optimizer](self.model.parameters(), CASE.lr)
        self.optimizer = steps.StepOptimizer(
            inner, self.batches, CASE.rule, CASE.ref_batchsize, lockstep=True
        )
        if saved is not None:
            *states, self.num_updates = saved
            for part, state in zip((self.model, self.optimizer), states, strict=True):
                part.load_state_dict(state)

    def state(self) -> tuple[Any, ...]:
        return self.model.state_dict(), self.optimizer.state_dict(), self.num_updates

    def begin_epoch(self, epoch: int) -> None:
        self.begin(epoch, self.optimizer, self.num_updates)
        assert self.loader.dataset.epoch == epoch

    def step(self, minibatches: steps.Minibatches) -> None:
        def closure() -> str:
            for number, (x, y) in enumerate(minibatches):
                if number and self.closes:
                    self.optimizer.end_minibatch()
                elastic.loss_of(CASE, self.model, x, y).backward()
                if not self.closes:
                    self.optimizer.end_minibatch()
            return "what it returns"

        if self.closes:
            assert self.optimizer.step(closure) == "what it returns"
        else:
            closure()
            if not minibatches:
                self.optimizer.join_step()
            assert self.optimizer.step() is None
        self.num_updates += 1

    def train(self, end: int = NUM_UPDATES) -> None:
        for epoch in range(self.batches.epoch, CASE.epochs):
            self.begin_epoch(epoch)
            for minibatches in self:
                if self.num_updates == end:
                    return
                self.step(minibatches)
                assert self.batches.ledger.global_step == self.num_updates


def trained(rank: int, closes: bool) -> list[torch.Tensor]:
    """Returns the weights of a run that is left in its first epoch, and resumed."""
    first = Trainer(closes)
    first.train(end=5)
    second = Trainer(closes, first.state())
    second.train()
    assert second.num_updates == NUM_UPDATES
    return [parameter.detach() for parameter in second.model.parameters()]


@pytest.mark.parametrize("closes", [False, True], ids=["by hand", "by a closure"])
@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 3)])
def test_a_trainer_counts_the_updates_of_the_trace(backend, closes):
    for weights in backend.run(trained, closes):
        elastic.assert_as_one_large_batch(CASE, weights)


def test_a_trainer_that_counts_other_updates_is_refused():
    trainer = Trainer(closes=True)
    trainer.num_updates = 3
    with pytest.raises(ValueError, match=r"epoch 0 after 3 updates, the sampler has 0"):
        trainer.begin_epoch(0)


def test_a_batch_size_that_changes_within_an_epoch_is_refused():
    trainer = Trainer(closes=True, on_end="hold")
    trainer.begin_epoch(0)
    batches = iter(trainer)
    trainer.step(next(batches))
    trainer.optimizer.change_batch_size(8)
    with pytest.raises(ValueError, match="trace: change_batch_size within an epoch"):
        next(batches)
