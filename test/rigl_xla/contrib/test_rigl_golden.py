"""Training equals rigl-torch 0.5.2's bit for bit, from the same initial masks."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from support.reference import not_compared
from support.rigl_xla.sparse import convnet, equal, sgd, train

from rigl_xla import RigLScheduler
from tools.references import rigl_torch_reference

OPTIONS = {"dense_allocation": 0.2, "T_end": 75, "delta": 7, "alpha": 0.3}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """rigl-torch's scheduler, installed beside the environment."""
    folder = tmp_path_factory.mktemp("rigl-torch")
    error = rigl_torch_reference.install(folder)
    if error is not None:
        not_compared(f"rigl-torch {rigl_torch_reference.VERSION}", error)
    with rigl_torch_reference.imported(folder) as scheduler:
        yield scheduler


def steps_alike(theirs, ours, steps: range):
    """Runs steps of both, model, optimizer and pruner; yields after each equal one."""
    for number in steps:
        for parts in theirs, ours:
            train(*parts, range(number, number + 1))
        assert equal(theirs[0].state_dict(), ours[0].state_dict()), number
        pairs = zip(theirs[2].backward_masks, ours[2].backward_masks, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs), number
        yield


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dense_linear", [False, True])
def test_80_steps_are_the_same_bit_for_bit(reference, n, dense_linear):
    options = {"grad_accumulation_n": n, "ignore_linear_layers": dense_linear}
    options |= OPTIONS
    theirs, ours = convnet(), convnet()
    their_sgd, our_sgd = sgd(theirs), sgd(ours)
    torch.manual_seed(5)  # it draws masks from the global generator
    their_pruner = reference(theirs, their_sgd, **options)
    state = copy.deepcopy(their_pruner.state_dict())
    our_pruner = RigLScheduler(ours, our_sgd, state_dict=state)
    both = (theirs, their_sgd, their_pruner), (ours, our_sgd, our_pruner)
    before, changes = copy.deepcopy(our_pruner.masks), 0
    for _ in steps_alike(*both, range(80)):
        changes += not equal(before, our_pruner.masks)
        before = copy.deepcopy(our_pruner.masks)
    assert our_pruner.rigl_steps == their_pruner.rigl_steps == 10
    assert changes >= 9  # the very last one drops less than one connection
    assert str(our_pruner) == str(their_pruner)


@pytest.mark.parametrize("taken", [10, 13])
def test_a_run_of_theirs_goes_on_here(reference, taken):
    theirs = convnet()
    their_sgd = sgd(theirs)
    their_pruner = reference(theirs, their_sgd, **OPTIONS, ignore_linear_layers=False)
    train(theirs, their_sgd, their_pruner, range(taken))
    ours = convnet(1)
    ours.load_state_dict(theirs.state_dict())
    our_sgd = sgd(ours)
    our_sgd.load_state_dict(copy.deepcopy(their_sgd.state_dict()))
    state = copy.deepcopy(their_pruner.state_dict())
    our_pruner = RigLScheduler(ours, our_sgd, state_dict=state)
    both = (theirs, their_sgd, their_pruner), (ours, our_sgd, our_pruner)
    assert len([*steps_alike(*both, range(taken, 40))]) == 40 - taken


def test_their_attributes_are_here(reference):
    options = {"ignore_linear_layers": False, **OPTIONS}
    model, other = convnet(), convnet()
    theirs = reference(model, sgd(model), **options)
    ours = RigLScheduler(other, sgd(other), **options)
    public = ["N", "step", "rigl_steps", "delta_T", "alpha", "T_end", "static_topo"]
    public += ["dense_allocation", "ignore_linear_layers", "sparsity_distribution"]
    public += ["grad_accumulation_n", "S"]
    for name in public:
        assert getattr(ours, name) == getattr(theirs, name), name
    for step in (0, 7, 74):
        ours.step = theirs.step = step
        assert ours.cosine_annealing() == theirs.cosine_annealing()
    assert len(ours.W) == len(theirs.W) == len(ours.backward_masks)


def test_what_is_not_here_is_listed(reference):
    """Every attribute of theirs is ours too, or in the table of the documentation."""
    model, other = convnet(), convnet()
    theirs = reference(model, sgd(model), **OPTIONS)
    ours = RigLScheduler(other, sgd(other), **OPTIONS)
    own = {name for name in dir(theirs) if not name.startswith("__")}
    missing = sorted(name for name in own if not hasattr(ours, name))
    page = Path(__file__).parents[3] / "docs" / "migration" / "rigl_torch.md"
    text = page.read_text(encoding="utf-8")
    listed = text.partition("These do not exist")[2].split("\n\n")[0]
    assert missing == sorted(set(re.findall(r"`(\w+)`", listed)) & own)


def test_a_state_of_another_model_is_refused(reference):
    model, other = convnet(), torch.nn.Linear(4, 4)
    theirs = reference(model, sgd(model), dense_allocation=0.3, T_end=75)
    with pytest.raises(ValueError, match=r"this model has \[16\]"):
        RigLScheduler(other, sgd(other), state_dict=theirs.state_dict())


@pytest.mark.parametrize(("ci", "outcome"), [("", "skip"), ("1", "fail")])
def test_what_cannot_be_compared_fails_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    expected = getattr(pytest, outcome).Exception
    with pytest.raises(expected, match=r"NOT COMPARED with it 1.0 .* pip: no index"):
        not_compared("it 1.0", "no index")
