"""Runs that are saved after every update, and resumed on other replicas."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import variable_batch_size as vbs
import xla_replica
from support.variable_batch_size.elastic import Case, make, optimizer_of, sampler_of

# Two epochs of 32 minibatches, in steps of 1 to 9: some steps have idle replicas, the
# first and last of an epoch among them, and some have several substeps.
CASE = Case((4, 36, 8, 4, 12, 32, 20, 4), epochs=2, exact=True)


def run(
    rank: int,
    case: Case,
    state: dict[str, Any] | None = None,
    saves: bool = True,
    schedule: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """Trains from ``state`` to the end; returns weights, samples, updates and states.

    ``samples`` are (step, substep, rank, samples) of every minibatch that was run;
    ``schedule`` is the unit of an attached scheduler, and how many of them a step is.
    """
    replica = xla_replica.current()
    model, inputs, targets = make(case)
    model.to(replica.device)
    sampler = sampler_of(case, inputs)
    optimizer = optimizer_of(case, model.parameters(), sampler)
    if schedule is not None:
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, 0.9)
        optimizer.attach(decay, *schedule)
    updates: list[int] = []
    states: list[dict[str, Any]] = []

    def after_update(update: vbs.Update) -> None:
        updates.append(update.step)
        if saves:
            states.append(saved())

    def saved() -> dict[str, Any]:
        found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return copy.deepcopy(replica.to_host(found))

    if state is not None:
        state = copy.deepcopy(state)  # torch's optimizers use loaded tensors in place
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    elif saves:
        states.append(saved())
    optimizer.attach(after_update)
    samples: list[tuple[int, int, int, list[int]]] = []
    for epoch in range(sampler.epoch, case.epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        minibatches = list(sampler)
        where = [
            (sampler.plan.first_step + step, substep, replica.rank)
            for step in range(sampler.plan.start_step, sampler.plan.num_steps)
            for substep in range(sampler.plan.num_substeps(replica.rank)[step])
        ]
        assert len(where) == len(minibatches)
        for at, minibatch in zip(where, minibatches):
            x, y = replica.send((inputs[minibatch], targets[minibatch]))
            loss_of(model, x, y).backward()
            optimizer.step()
            samples.append((*at, minibatch))
    weights = replica.fetch([p.detach() for p in model.parameters()])
    return {
        "weights": weights,
        "samples": samples,
        "updates": updates,
        "states": states if replica.is_primary else [],
    }


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns a loss whose gradients are multiples of 1/64: sums are never rounded.

    Inputs are integers, and residuals are rounded to sixteenths. After any number of
    steps, other samples or weights would change the bits of the result.
    """
    outputs = model(x)[:, 0]
    residuals = torch.round((outputs.detach() - y) * 16) / 16
    return (residuals * outputs).sum() / len(x)


def resume_from_each(
    rank: int, case: Case, states: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns what a run from each state returns."""
    return [run(rank, case, state, saves=False) for state in states]


def global_samples(outcomes: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """Returns (step, samples) of every minibatch of all replicas, in their order."""
    everything = sorted(one for outcome in outcomes for one in outcome["samples"])
    return [(step, samples) for step, _, _, samples in everything]
