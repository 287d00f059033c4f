"""Batch sizes that are not multiples of the minibatch: means over real samples."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case, batches, large_batch_run
from support.variable_batch_size.resuming import resume_from_each
from support.variable_batch_size.resuming import run as run_and_save
from support.variable_batch_size.sharded import whole
from support.xla_replica.replicas import HAS_XLA, backends, row
from torch import nn
from torch.distributed.fsdp import fully_shard

import variable_batch_size as vbs
import xla_replica

# Less than a minibatch of 4, one sample more than some, and multiples.
TRACE = (3, 17, 4, 30, 1, 13, 8, 22)
NUM_SAMPLES, EPOCHS = 67, 3


LINEAR = Case(TRACE, num_samples=NUM_SAMPLES, epochs=EPOCHS, wide=True)
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


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(40, 90),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_sample_of_a_step_counts_once(sizes, num_samples, unit, replicas, padded):
    """Minibatch k goes to replica k mod R; in a padded plan no replica is idle."""
    schedule = vbs.Schedule(vbs.Trace(sizes), num_samples, unit, "cycle", True)
    case = Case(tuple(sizes), 3, num_samples=num_samples, minibatch_size=1)
    first = 0
    for epoch, found in itertools.groupby(batches(case), lambda each: each[0]):
        steps = [len(rows) for _, rows in found]
        plan = replace(schedule.plan(epoch, replicas), padded=padded)
        assert [plan.batch_size(step) for step in range(plan.num_steps)] == steps
        assert plan.num_dropped_samples == num_samples - sum(steps)
        substeps = [plan.num_substeps(rank).tolist() for rank in range(replicas)]
        assert plan.has_idle_replicas == any(0 in own for own in substeps)
        assert not padded or substeps == substeps[:1] * replicas
        counted = []
        for rank, own in enumerate(substeps):
            for step, substep in ((s, k) for s, n in enumerate(own) for k in range(n)):
                rows = plan.samples_of(step, substep * replicas + rank)
                rows = np.arange(num_samples)[rows]
                num_real = plan.num_real_samples(rank, step, substep)
                assert num_real == len(rows) > 0 or (padded and num_real == 0)
                counted += [(step, sample) for sample in rows[:num_real]]
        expected = zip(np.repeat(range(len(steps)), steps), range(num_samples))
        assert sorted(counted) == [*expected]
        assert plan.first_step == first
        first += len(steps)
        before = itertools.islice(itertools.cycle(sizes), first)
        assert schedule.samples_before(first) == sum(before)


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


def test_a_forgotten_mask_is_an_error():
    training = Training(LINEAR)
    rows = next(iter(training.sampler))
    assert rows[3] in rows[:3]  # three real samples
    x, y = training.inputs[rows], training.targets[rows]
    losses_of(training.model, x, y).sum().backward()
    with pytest.raises(ValueError, match="1 of 4 samples of this minibatch are"):
        training.optimizer.step()


def test_a_run_that_pads_is_not_one_that_does_not():
    case = replace(LINEAR, trace=(4, 8))
    plain, padded, other = (Training(case, pad).sampler for pad in (False, True, True))
    other.load_state_dict(padded.state_dict())
    with pytest.raises(ValueError, match="pad_minibatches"):
        other.load_state_dict(plain.state_dict())
