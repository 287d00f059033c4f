"""Batch sizes that are not multiples of the minibatch: means over real samples."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case, large_batch_run
from support.variable_batch_size.resuming import resume_from_each
from support.variable_batch_size.resuming import run as run_and_save
from support.variable_batch_size.sharded import whole
from support.xla_replica.replicas import HAS_XLA, backends, row
from torch import nn
from torch.distributed.fsdp import fully_shard

import xla_replica

# Less than a minibatch of 4, one sample more than some, and multiples.
TRACE, EPOCHS = (3, 17, 4, 30, 1, 13, 8, 22), 3
LINEAR = Case(TRACE, num_samples=67, epochs=EPOCHS, wide=True)
CASES = {
    "linear": LINEAR,
    "adamw": replace(LINEAR, optimizer="adamw", rule="root"),
    "clipped": replace(LINEAR, max_grad_norm=0.05),
}


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x) * model.scale, y.long(), reduction="none")


class Training(elastic.Training):
    def __init__(self, case: Case, pad_minibatches: bool = True, **options) -> None:
        sampler = {"pad_minibatches": pad_minibatches}
        super().__init__(case, losses_of, sampler, reduction="sum", **options)
        self.num_padding = 0

    def minibatch(self, x, y) -> int:
        assert len(x) == self.sampler.minibatch_size
        self.num_padding += self.optimizer.is_padding
        losses = losses_of(self.model, x, y)
        (losses * self.optimizer.sample_weights).sum().backward()
        is_padded = self.sampler.schedule.pad_minibatches
        return self.optimizer.step(weight=None if is_padded else 4)


def elastic_runs(rank: int) -> dict[str, tuple]:
    found = {}
    for name, case in CASES.items():
        training = Training(case)
        count = training.counted_run(EPOCHS)
        told = [(u.batch_size, float(u.weight)) for u in training.updates]
        found[name] = training.weights(), told, count
    return found


@pytest.mark.parametrize("backend", [
    *backends("cpu", 1, slow=(3,)),
    row("cpu", 2, slow=HAS_XLA),
    *backends("xla", 2, slow=(1, 3, 8)),
])  # fmt: skip
def test_a_padded_run_equals_one_process_with_the_same_batches(backend):
    for outcome in backend.run(elastic_runs, timeout=150):
        for name, (found, told, count) in outcome.items():
            # In units of one sample nothing of an epoch is left over or padded.
            case = replace(CASES[name], minibatch_size=1)
            weights, updates = large_batch_run(case)
            assert told == [(size, size) for _, _, size, _ in updates], name
            torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)
            # After the first epochs nothing is compiled or read back.
            assert count == (0, 0, 0)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "backend", [row("cpu", 2, slow=HAS_XLA), row("xla", 3, slow=True)]
)
def test_it_is_resumed_after_any_update_on_other_replicas(backend, every):
    alone = run_and_save(0, LINEAR, build=Training)
    states, weights = alone["states"], alone["weights"]
    assert len(states) > 15
    for ends in backend.run(resume_from_each, LINEAR, states[::every], Training):
        for end in ends:
            torch.testing.assert_close(end["weights"], weights, rtol=1e-12, atol=1e-12)


def sharded_run(rank: int, shards: bool) -> tuple[int, list[torch.Tensor]]:
    made = model, *_ = elastic.make(LINEAR)
    del model.scale
    model.scale = 1.0
    if shards:
        fully_shard(model)
    training = Training(LINEAR, made=made)
    training.train()
    return training.num_padding, whole(model.parameters())


@pytest.mark.slow
def test_sharded_models_are_padded_by_samples_and_by_minibatches():
    _, weights = sharded_run(0, False)
    sharded = xla_replica.launch(sharded_run, (True,), 3, "cpu")
    for rank, (num_padding, received) in enumerate(sharded):
        assert (num_padding > 0) == (rank > 0)
        torch.testing.assert_close(received, weights, rtol=1e-12, atol=1e-12)


def test_multiples_of_the_minibatch_train_alike_with_and_without():
    case = replace(LINEAR, trace=(4, 16, 12))
    ends = [Training(case, pad).train() for pad in (False, True)]
    torch.testing.assert_close(*ends, rtol=0, atol=0)
