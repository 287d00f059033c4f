"""Training equals rigl-torch 0.5.2's bit for bit, from the same initial masks."""

import copy
import itertools
import re

import pytest
import torch
from support.documents import read
from support.reference import not_compared
from support.rigl_xla.sparse import convnet, equal, sgd, train

from rigl_xla import RigLScheduler
from tools.references import rigl_torch_reference

OPTIONS = {"dense_allocation": 0.2, "T_end": 75, "delta": 7, "alpha": 0.3}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rigl-torch")
    error = rigl_torch_reference.install(folder)
    if error is not None:
        not_compared(f"rigl-torch {rigl_torch_reference.VERSION}", error)
    with rigl_torch_reference.imported(folder) as scheduler:
        yield scheduler


def built(pruner_of, **options):
    model = convnet()
    optimizer = sgd(model)
    return model, optimizer, pruner_of(model, optimizer, **options)


@pytest.mark.parametrize(("taken", "n", "dense_linear"), [
    *((0, n, dense_linear) for n in (1, 4) for dense_linear in (False, True)),
    (10, 1, False), (13, 1, False),  # a run of theirs goes on here
])  # fmt: skip
def test_80_steps_are_the_same_bit_for_bit(reference, taken, n, dense_linear):
    options = {"grad_accumulation_n": n, "ignore_linear_layers": dense_linear}
    torch.manual_seed(5)  # it draws masks from the global generator
    theirs = built(reference, **options, **OPTIONS)
    train(*theirs, range(taken))
    states = copy.deepcopy([part.state_dict() for part in theirs])
    (model := convnet(1)).load_state_dict(states[0])
    (optimizer := sgd(model)).load_state_dict(states[1])
    pruner = RigLScheduler(model, optimizer, state_dict=states[2])
    masks = [copy.deepcopy(pruner.masks)]
    for number in range(taken, 80):
        for parts in theirs, (model, optimizer, pruner):
            train(*parts, range(number, number + 1))
        assert equal(theirs[0].state_dict(), model.state_dict()), number
        pairs = zip(theirs[2].backward_masks, pruner.backward_masks, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs), number
        masks.append(copy.deepcopy(pruner.masks))
    assert pruner.rigl_steps == theirs[2].rigl_steps == 10
    # The very last update drops less than one connection.
    changes = sum(not equal(*both) for both in itertools.pairwise(masks))
    assert changes >= 9 - taken // 7
    assert str(pruner) == str(theirs[2])


def test_their_attributes_are_here_or_listed_as_missing(reference):
    options = {"ignore_linear_layers": False, **OPTIONS}
    theirs, ours = (built(each, **options)[2] for each in (reference, RigLScheduler))
    public = "N step rigl_steps delta_T alpha T_end static_topo dense_allocation S "
    public += "ignore_linear_layers sparsity_distribution grad_accumulation_n"
    for name in public.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    for step in (0, 7, 74):
        ours.step = theirs.step = step
        assert ours.cosine_annealing() == theirs.cosine_annealing()
    assert len(ours.W) == len(theirs.W) == len(ours.backward_masks)
    own = {name for name in dir(theirs) if not name.startswith("__")}
    text = read("docs/migration/rigl_torch.md")
    listed = text.partition("These do not exist")[2].split("\n\n")[0]
    missing = {name for name in own if not hasattr(ours, name)}
    assert missing == own & {*re.findall(r"`(\w+)`", listed)}


def test_a_state_of_another_model_is_refused(reference):
    state, other = built(reference, **OPTIONS)[2].state_dict(), torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"this model has \[16\]"):
        RigLScheduler(other, sgd(other), state_dict=state)


@pytest.mark.parametrize(("ci", "outcome"), [("", "skip"), ("1", "fail")])
def test_what_cannot_be_compared_fails_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    expected = getattr(pytest, outcome).Exception
    with pytest.raises(expected, match=r"NOT COMPARED with it 1.0 .* pip: no index"):
        not_compared("it 1.0", "no index")
