"""A resumed run equals the whole run; a state that does not fit is refused."""

import copy

import numpy as np
import pytest
import torch
from support.rigl_xla import sparse
from support.rigl_xla.sparse import through_a_file
from torch import nn

from rigl_xla import Layer, RigLScheduler

SPARSITIES = "sparsity_distribution"


@pytest.mark.parametrize(("kind", "options"), [
    ("sgd", {}),
    ("adamw", {}),
    ("adamw", {"delta": 5, "grad_accumulation_n": 4}),
    ("adamw", {"skip_step": False}),
    *(("adamw", {"method": method}) for method in ("set", "snfs", "gmp")),
    ("adamw", {"structure": "2:4", "dense_allocation": 1}),
])  # fmt: skip
def test_resuming_at_every_step_changes_nothing(kind, options):
    """Whatever the order in which states are loaded; a pruner's is a copy."""
    *others, pruner = sparse.sparse_convnet(kind, seed=1, **options)
    saved = []
    for step in range(10):
        states = through_a_file([part.state_dict() for part in others])
        saved.append((*states, pruner.state_dict()))
        sparse.train(*others, pruner, range(step, step + 1))
    assert pruner.rigl_steps >= 2
    for step, states in enumerate(map(through_a_file, saved)):
        model = sparse.convnet(seed=9)
        again = model, sparse.OPTIMIZERS[kind](model.parameters())
        if pruner_first := step % 2 == 0:
            resumed = sparse.pruned(*again, **options)
            resumed.load_state_dict(states[-1])
        for part, state in zip(again, states):
            part.load_state_dict(state)
        if not pruner_first:
            resumed = sparse.pruned(*again, **options, state_dict=states[-1])
        assert resumed.step == step
        sparse.train(*again, resumed, range(step, 10))
        assert sparse.equal(resumed.masks, pruner.masks), step
        found, expected = ([p.state_dict() for p in both] for both in (again, others))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert resumed.rigl_steps == pruner.rigl_steps
        # What was explored is of the whole run.
        assert resumed.report().exploration_rate == pruner.report().exploration_rate


def test_another_schedule_than_the_saved_one_is_told():
    """It goes on as it was, also in a run that is resumed for more epochs."""
    model, optimizer, pruner = sparse.sparse_convnet()
    state = through_a_file(pruner.state_dict())
    told = r"T_end was 14 and is 28; delta was 3 and is 4 .*state, T_end=28, delta=4\)"
    with pruner, pytest.warns(UserWarning, match=told) as caught:
        resumed = sparse.pruned(sparse.convnet(), T_end=28, delta=4, state_dict=state)
    assert (resumed.T_end, resumed.delta_T) == (14, 3)
    other = sparse.pruned(model, optimizer, T_end=28)
    with pytest.warns(UserWarning, match=r"is 28.*Checkpointer") as later:
        other.load_state_dict(state)
    assert [each.filename for each in (*caught, *later)] == [sparse.__file__, __file__]
    other.load_state_dict(state, T_end=28, delta=7)  # in so many words
    assert (other.T_end, other.delta_T, other.alpha) == (28, 7, 0.3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'Tend'"):
        other.load_state_dict(state, Tend=99)


def test_random_masks_for_a_model_that_was_sparse_are_told():
    """A script that resumes weights but not the pruner trains another network."""
    model, optimizer, pruner = sparse.sparse_convnet()
    sparse.train(model, optimizer, pruner, range(4))
    weights, state = copy.deepcopy(model.state_dict()), pruner.state_dict()

    def resumed(**options):
        other = sparse.convnet(seed=9)
        other.load_state_dict(weights)
        sparse.pruned(other, **options)
        return other.state_dict()

    dropped = r"3 of 3 weights are sparse already.* drop .*state_dict="
    with pytest.warns(UserWarning, match=dropped):
        assert not sparse.equal(resumed(), weights)
    for options in {"state_dict": state}, {"initial_masks": "magnitude"}:
        assert sparse.equal(resumed(**options), weights)


@pytest.mark.parametrize("method", ["rigl", "set", "snfs"])
def test_a_schedule_without_an_update_is_warned_of(method):
    model, optimizer, pruner = sparse.sparse_convnet(method=method, T_end=4)
    state = pruner.state_dict()
    with pytest.raises(ValueError, match="needs T_end"):
        pruner.load_state_dict(state, T_end=None)
    assert pruner.T_end == 4
    with pytest.warns(UserWarning, match="T_end=14 is not past .* delta=14") as caught:
        pruner.load_state_dict(state, T_end=14, delta=14)
    pruner.close()
    with pytest.warns(UserWarning, match="T_end=3 is not past .* delta=3") as later:
        sparse.pruned(model, optimizer, method=method, T_end=3).close()
    assert [each.filename for each in (*caught, *later)] == [__file__, sparse.__file__]
    sparse.pruned(model, optimizer, method="static", T_end=3)


def first(layer: Layer) -> torch.Tensor:
    """Scores the lowest index highest."""
    return -torch.arange(layer.weight.numel()).reshape(layer.weight.shape).float()


@pytest.mark.parametrize("options", [
    {"method": "set", "skip_step": False, SPARSITIES: "erk"},
    {"method": "snfs", "drop": "sensitivity", "momentum": 0.5, "seed": 3},
    {"grow": "random"},
    {"static_topo": True, "method": "set"},
    {"sparsities": {"5": 0.5}, "dense_first": False},
])  # fmt: skip
def test_what_was_asked_for_need_not_be_repeated(options):
    masks = []
    for repeated in (options, {}):
        model, optimizer, pruner = sparse.sparse_convnet(**options)
        sparse.train(model, optimizer, pruner, range(2))
        state = through_a_file(pruner.state_dict())
        pruner.close()
        resumed = sparse.pruned(model, optimizer, **repeated, state_dict=state)
        for name, value in options.items():
            assert getattr(resumed.options, name) == value
        sparse.train(model, optimizer, resumed, range(2, 8))
        masks.append(resumed.masks)
    assert sparse.equal(*masks)


@pytest.mark.parametrize(("saved", "asked", "says"), [
    ({}, {"dense_allocation": 0.5}, "dense_allocation was 0.2 and is 0.5"),
    ({}, {"seed": 7}, "seed was 0 and is 7"),
    ({}, {"sparsities": {"5": 0.5}}, "sparsities was None and is {'5': 0.5}"),
    ({"method": "snfs"}, {"method": "snfs", "momentum": 0.5}, "momentum was 0.9"),
    ({}, {"method": "set"}, "method was 'rigl' and is 'set'"),
    ({}, {"skip_step": False}, "skip_step was True and is False"),
    ({}, {"grow": "random"}, "grow was None and is 'random'"),
    ({"drop": "random"}, {"drop": first}, "'random' and is 'function first'"),
    ({"grow": first}, {}, "grow= a function first; give the same"),
    ({SPARSITIES: "er"}, {SPARSITIES: "erk"}, "_distribution was 'er' and"),
])  # fmt: skip
def test_other_options_than_the_saved_ones_are_refused(saved, asked, says):
    model, optimizer, pruner = sparse.sparse_convnet(**saved)
    state = through_a_file(pruner.state_dict())
    pruner.close()
    with pytest.raises(ValueError, match=says):
        sparse.pruned(model, optimizer, **asked, state_dict=state)
    sparse.pruned(model, optimizer, **saved, state_dict=state)


@pytest.mark.parametrize("kind", ["random", "magnitude"])
def test_masks_have_the_memory_format_of_weights(kind):
    model = sparse.convnet().to(memory_format=torch.channels_last)
    pruner = sparse.pruned(model, initial_masks=kind)
    sparse.train(model, pruner.optimizer, pruner, range(4))
    assert pruner.rigl_steps == 1
    pruner.close()
    state = through_a_file(pruner.state_dict())
    resumed = sparse.pruned(model, state_dict=state)
    assert sparse.equal(pruner.masks, resumed.masks)
    model.zero_grad()
    sparse.backward(model, 0)
    grad = model[2].weight.grad
    assert not grad[~resumed.masks["2.weight"]].any()
    for tensor in (grad, pruner.masks["2.weight"], resumed.masks["2.weight"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_a_run_of_rigl_torch_with_sparse_norms_resumes_from_its_own_state():
    def by_words(model, step):
        draw = torch.Generator().manual_seed(step)
        words = torch.randint(0, 10, (16,), generator=draw)
        nn.functional.cross_entropy(model(words), words).backward()

    layers = nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10)
    again = copy.deepcopy(model := nn.Sequential(*layers))
    optimizer, other = sparse.sgd(model), sparse.sgd(again)
    masks = [torch.rand(layer.weight.shape) < 0.5 for layer in model[:3]]
    theirs = {  # as rigl-torch 0.5.2 saves it
        "backward_masks": [*masks, None], "dense_allocation": 0.5, "step": 4,
        "N": [80, 64, 8, 80], "S": [0.5, 0.5, 0.5, 0.0], "rigl_steps": 1,
        "hyperparams": {
            "ignore_linear_layers": False, "static_topo": False, "T_end": 14,
            "delta_T": 3, "alpha": 0.3, "grad_accumulation_n": 1,
        },
    }  # fmt: skip
    pruner = RigLScheduler(model, optimizer, state_dict=theirs)
    sparse.train(model, optimizer, pruner, range(3), by_words)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = through_a_file(pruner.state_dict())
    resumed = RigLScheduler(again, other, state_dict=state)
    assert list(resumed.masks) == ["0.weight", "1.weight", "2.weight"]
    assert (resumed.N, resumed.S) == (pruner.N, pruner.S) == (theirs["N"], theirs["S"])
    for run in (model, optimizer, pruner), (again, other, resumed):
        sparse.train(*run, range(8), by_words)
    assert resumed.rigl_steps == 4
    assert sparse.equal(resumed.masks, pruner.masks)
    assert sparse.equal(again.state_dict(), model.state_dict())


# Of a state and its part of this layer.
DAMAGES = [
    (lambda s, x: s["layers"].update(there=s["layers"].pop("5.weight")),
     "state_dict has 'there', which is not among weights that can"),
    (lambda s, x: s["dense"].append("8.weight"), "has '8.weight', which is not"),
    (lambda s, x: s["dense"].remove("0.weight"), "has '0.weight', which is not"),
    (lambda s, x: x.update(shape=[16, 255]), r"\(16, 255\) for '5.weight', which has"),
    (lambda s, x: s.update(step=-3), "the step in state_dict must be an integer >= 0"),
    (lambda s, x: s["options"].update(speed=3), r"'options'\] has 'speed', which"),
    (lambda s, x: x.pop("mask"), r"with 'mask', which is not .* for '5.weight'"),
    (lambda s, x: x.update(sparsity=7), "sparsity of '5.weight' in state"),
    (lambda s, x: x.update(mask=x["mask"][:-1]), r"be 512 uint8, got .* \(511,\)"),
    (lambda s, x: x.update(gradient=torch.ones(3)), r"a gradient of shape \(3,\) for"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage, says):
    model, optimizer, pruner = sparse.sparse_convnet()
    sparse.train(model, optimizer, pruner, range(4))
    state, masks = copy.deepcopy([pruner.state_dict(), pruner.masks])
    damage(state, state["layers"]["5.weight"])
    with pytest.raises(ValueError, match=says):
        pruner.load_state_dict(state)
    assert sparse.equal(pruner.masks, masks)
    assert (pruner.step, pruner.rigl_steps) == (4, 1)


@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_numbers_of_numpy_are_plain_ones(distribution):
    states = []
    for real, whole in ((float, int), (np.float32, np.uint8)):
        options = {"T_end": whole(100), "delta": whole(10), "seed": whole(1)}
        options |= {"dense_allocation": real(0.1), "alpha": real(0.3)}
        options |= {"sparsities": {"5": real(0.5)}, "momentum": real(0.9)}
        *_, pruner = sparse.sparse_convnet(
            **options, sparsity_distribution=distribution
        )
        state = through_a_file(pruner.state_dict())
        sizes = [[x["sparsity"], x["num_active"]] for x in state["layers"].values()]
        states.append([state["options"], sizes])
    assert states[0] == states[1]
