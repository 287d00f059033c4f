"""What is attached forgets the minibatches of a step that is run again."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import row
from torch import nn

import variable_batch_size as vbs
import xla_replica

TRACE, MINIBATCH = [8, 4, 16, 4], 4


class Counter:
    """Counts updates, and steps that are dropped."""

    num_updates = num_dropped = 0

    def note(self, update: vbs.Update) -> None:
        self.num_updates += 1

    def drop_step(self) -> None:
        self.num_dropped += 1


def train(rank: int):
    """Returns the counts, minibatches yielded, and the losses that were logged."""
    del rank
    replica, lines = xla_replica.current(), []
    model = nn.Linear(1, 1, bias=False).to(replica.device)
    nn.init.ones_(model.weight)
    sampler = vbs.CustomSampler(
        range(sum(TRACE)), TRACE, minibatch_size=MINIBATCH, verbose=False
    )
    inner = torch.optim.SGD(model.parameters(), 0.0)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 8, exact=model)
    log = vbs.RunLog(
        None, optimizer, log_steps=3, sinks=[lambda line, step: lines.append(line)]
    )
    counter = Counter()
    optimizer.attach(log)
    optimizer.attach(counter.note)
    sampler.set_epoch(0)
    optimizer.set_epoch(0)
    for rows in sampler:
        # The loss of a step: 1, 1, 100 and 1.
        scale = 100.0 if counter.num_updates == 2 else 1.0
        loss = model(replica.send(torch.full((len(rows), 1), scale))).mean()
        xla_replica.backward(loss)
        log.add(loss)
        optimizer.step()
    replica.barrier()
    return counter.num_updates, counter.num_dropped, [line["loss"] for line in lines]


@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 3), row("xla", 2)])
def test_what_is_attached_forgets_steps_that_are_run_again(backend):
    # Run again: the first step, which has no units yet, and the third.
    losses = [1.0, (1 * 1 + 4 * 100 + 1 * 1) / 6]
    primary, *others = backend.run(train)
    assert primary == (4, 2, pytest.approx(losses))
    assert others == [(4, 2, [])] * len(others)
