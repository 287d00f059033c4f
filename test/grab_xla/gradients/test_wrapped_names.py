"""A model's names have prefixes where it is wrapped; its projected order has none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import grab_xla

NUM_SAMPLES = 24


def orders(prefixes, change=lambda state, sampler: None):
    """Returns two epochs' orders; each epoch's sampler is restored from the last."""
    torch.manual_seed(0)
    data, model = torch.randn(NUM_SAMPLES, 6), nn.Linear(6, 5)
    found, state = [], None
    for prefix in prefixes:
        whole = model if not prefix else nn.ModuleDict({prefix: model})
        sampler = grab_xla.GraBSampler(
            range(NUM_SAMPLES), dict(whole.named_parameters()), "mean",
            fidelity="projected", projection_size=12,
        )  # fmt: skip
        if state is not None:
            change(state, sampler)
            sampler.load_state_dict(state)
        found.append(order := list(sampler))
        for first in range(0, NUM_SAMPLES, 6):
            with sampler.record(whole):
                losses = model(data[order[first : first + 6]]).square().sum(1)
            sampler.backward(losses)
        state = copy.deepcopy(sampler.state_dict())
    return found


def test_a_run_that_is_wrapped_when_it_resumes_has_the_same_order():
    plain = orders(["", "", ""])
    assert plain[1] != plain[2]
    assert orders(["", "_orig_mod", "module"]) == plain


def test_a_state_from_before_keeps_the_map_that_it_was_saved_with():
    def age(state, sampler):
        settings = state["settings"]
        settings["projection"] = settings["projection"].partition(", names")[0]

    assert orders(["", "", ""], age) == orders(["", "", ""])
    newer = orders(["module", "module", "module"])

    def load_older(state, sampler):
        older = copy.deepcopy(state)
        age(older, sampler)
        sampler.load_state_dict(older)

    assert orders(["module", "module", "module"], load_older) == newer
    aged = orders(["module", "module", "module"], age)
    assert aged != newer


def test_another_map_is_refused():
    def change(state, sampler):
        state["settings"]["projection"] = state["settings"]["projection"][:-1] + "?"

    with pytest.raises(ValueError, match="projection"):
        orders(["", ""], change)
