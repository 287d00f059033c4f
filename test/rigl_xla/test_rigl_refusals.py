"""What cannot be done is refused before anything is touched."""

import copy
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from support.rigl_xla import sparse
from support.rigl_xla.sparse import convnet, equal, pruned, sgd
from support.xla_replica.replicas import Backend
from torch import nn

import rigl_xla
import variable_batch_size as vbs
from rigl_xla import Method, allocate, cost_of, operations_of


def scores(bad):
    """Returns scores of a `convnet`'s weights, of which one is ``bad``."""
    good = {name: weight.abs() for name, weight in convnet().state_dict().items()}
    return {"initial_masks": {**good, "5.weight": bad}}


BAD = [
    ({"T_end": None}, ValueError, "about 0.75 times"),
    ({"grad_accumulation_n": 4}, ValueError, ">= 1 and <= 3, got 4"),
    *(({name: "rigel"}, ValueError, "must be one of")
      for name in ("sparsity_distribution", "method", "grow", "initial_weights")),
    ({"method": "gmp", "grow": "random"}, ValueError, "grow= has nothing to do"),
    ({"method": "gmp", "T_end": 3}, ValueError, "would leave all dense"),
    ({"method": "static", "drop": "random"}, ValueError, "nothing to do"),
    ({"static_topo": True, "drop": "random"}, ValueError, "nothing to do"),
    ({"static_topo": True, "method": "gmp"}, ValueError, "nothing to do; leave them"),
    ({"grow": 3}, ValueError, "or a function of"),
    ({"initial_masks": "snip"}, ValueError, r"SNIP's, after .* {n: \(p \* p.grad\).ab"),
    ({"initial_masks": 3}, ValueError, "scores by parameter name"),
    ({"initial_masks": {}}, ValueError, "scores are needed for '2.weight'"),
    (scores(torch.ones(3)), ValueError, r"numbers of shape \(16, 256\), got .* \(3,\)"),
    (scores(torch.full((16, 256), np.nan)), ValueError, "must be finite real numbers"),
    (scores(torch.ones(16, 256).cfloat()), ValueError, "got torch.complex64 of shape"),
    (scores(torch.ones(16, 256, device="meta")), ValueError, "256.* on meta"),
    (scores(3), TypeError, "the scores of '5.weight' must be a tensor, got 3"),
    ({"initial_masks": "magnitude", "method": "gmp"}, ValueError, "begins dense"),
    ({"sparsities": {"nothing": 0.5}}, ValueError, "selects none of the"),
    ({"exclude": [nn.Conv2d, nn.Linear]}, ValueError, "no weight is left"),
    ({"structure": "4:2"}, ValueError, "0 < N < M"),
    ({"structure": "2:4"}, ValueError, "every layer 0.5 sparse: leave out dense_all"),
    ({"structure": "2:4", "dense_allocation": 0.5, "method": "gmp"}, ValueError, "gmp"),
    ({"structure": "1:3", "dense_allocation": 1}, ValueError, "not a multiple of 3"),
    ({"sparsities": [0.5]}, TypeError, "a dict from patterns"),
    ({"include": 3}, TypeError, "3 selects no layers"),
    ({"replica": "xla"}, TypeError, "replica must be an xla_replica"),
    ({"state_dict": 3}, TypeError, "must be what"),
    ({"state_dict": {}}, ValueError, "its own format"),
    ({"state_dict": {"format": 1}}, ValueError, "has format 1 and .* its own format 3"),
    ({"state_dict": {"format": 3}}, ValueError, "gave, whole, with 'step'"),
    ({"annealing": np.array(["a", "b"])}, ValueError, "annealing must be one of"),
    ({"optimizer": sgd(convnet())}, ValueError, r"does not train \['2.weight'"),
    ({"optimizer": nn.Linear(2, 2)}, TypeError, "must be a torch optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "says"), BAD)
def test_mistakes_are_found_before_anything_is_touched(options, error, says):
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    with pytest.raises(error, match=says):
        pruned(model, **{"optimizer": optimizer, **options})
    assert equal(before, model.state_dict())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    pruned(model, optimizer)  # a refusal leaves nothing behind


def test_an_optimizer_that_steps_by_itself_needs_to_be_told():
    sampler = vbs.CustomSampler(range(16), [8], minibatch_size=4, on_end="cycle")
    optimizer = vbs.ConstantOptimizer(sgd(model := convnet()), sampler)
    with pytest.raises(ValueError, match="build the pruner with skip_step=False"):
        pruned(model, optimizer)
    pruned(model, optimizer, skip_step=False)


def sharded(rank: int) -> None:
    model = convnet()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(TypeError, match=r"^'2.weight' is a DTensor, sharded as by FSD"):
        pruned(model, sgd(model))


def test_sharded_weights_are_refused():
    Backend("cpu", 2).run(sharded)


def test_loops_without_the_second_line_or_its_answer_are_refused():
    """But not where the pruner is not needed, or counts by itself."""
    for options, calls, says in [
        ({}, False, "took 4 steps without a call of the pruner"),
        ({}, True, r"ran in step 3 although pruner\(\) had"),
        ({"static_topo": True}, False, None),
        ({"skip_step": False}, False, None),
        ({"skip_step": False}, True, None),
    ]:
        model, optimizer, pruner = sparse.sparse_convnet(**options)
        with pytest.raises(RuntimeError, match=says) if says else nullcontext():
            for step in range(8):
                sparse.backward(model, step)
                if calls:
                    pruner()
                optimizer.step()


def test_another_optimizer_than_the_pruners_is_noticed():
    for skip_step in (True, False):
        model = nn.Linear(8, 8)
        other, pruner = sgd(model), pruned(model, skip_step=skip_step)
        model(torch.ones(1, 8)).square().sum().backward()
        pruner()
        with pytest.raises(RuntimeError, match="SGD that this pruner was not built wi"):
            other.step()
        sgd(nn.Linear(8, 8)).step()  # of another model
        pruner.close()
        other.step()


def test_weights_that_are_trained_without_the_optimizer_are_noticed():
    pruner = pruned(model := nn.Linear(8, 8))
    for _ in range(104):
        model(torch.ones(1, 8)).square().sum().backward()
        pruner()
    with pytest.raises(RuntimeError, match="has not stepped in 104 steps"):
        pruner()
    assert pruner.step == 104


LAYERS = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.LayerNorm(4))
SELECTORS = [
    ({"exclude": ["heads"]}, ValueError, "'heads' selects none of the"),
    ({"include": ["1"]}, ValueError, "two or more dimensions"),
    ({"include": ["0"]}, ValueError, "requires_grad=False"),
    ({"include": "1.bias"}, ValueError, "include selects '1.bias'"),
    ({"include": lambda name, p: "bias" in name}, ValueError, "selects '0.bias'"),
    ({"exclude": [3]}, TypeError, "a pattern of names"),
    ({"exclude": nn.Sequential()}, TypeError, "a pattern of names"),
    ({"exclude": [nn.Conv3d]}, ValueError, "Conv3d'> selects none of the"),
]
SHAPES = {"stem": (8, 3, 3, 3), "body": (64, 256), "head": (10, 64)}
FC = {"fc": (1000, 10)}
NO_SAMPLES = "the first tensor of it counts samples"
DISTRIBUTIONS = [
    ((SHAPES, 0.5, "erq"), ValueError, "one of .* or a function of .*, got 'erq'"),
    ((SHAPES, 0.5, "erk", {"hed": 0.1}), ValueError, "'hed', which is not among"),
    ((SHAPES, 0.5, "erk", {"head": 1}), ValueError, "sparsity of 'head'"),
    ((SHAPES, 0.5, lambda f, s, d: dict.fromkeys(f, 2)), ValueError, "gives"),
    ((SHAPES, 0.5, lambda f, s, d: {"stem": s}), ValueError, "for each of"),
    ((SHAPES, 0.5, lambda f, s, d: None), ValueError, "gave None; it must return"),
    ((SHAPES, 0.5, "erk", [0.1]), TypeError, "fixed must be a dict by name"),
    (([(4, 4)], 0.5), TypeError, r"shapes must be a dict by name, got \[.*\(list"),
    (({"a": (4, 0)}, 0.5), ValueError, "the shape of 'a' must be an integer >= 1"),
    (({"a": ()}, 0.5), TypeError, r"a tuple of integers, got \(\)"),
    (({"a": (9,) * 2, "b": (99,) * 2}, 0.9, "adjusted-uniform", {"b": 0.0}, False),
     ValueError, "that 'adjusted-uniform' gives 'a' must be .* < 1, got 109.8"),
]  # fmt: skip
EMBEDDING = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8))
# What is normalised by weight_norm of a layer, by today's and by yesterday's way.
NORM, OLD_NORM = "parametrizations.weight.original1", "weight_v"
NORMALISED = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
CALLS = [
    (lambda: pruned(nn.Linear(4, 4), ignore_linear_layers=True), ValueError,
     "needs ignore_linear_layers=False"),
    (lambda: pruned(convnet().to("meta")), ValueError,
     r"have their values on one device.*meta"),
    (lambda: [*map(pruned, [convnet()] * 2)], ValueError, "another RigLScheduler: cl"),
    # Sparse gradients are refused unless the layer stays dense.
    (lambda: (pruned(EMBEDDING, dense_first=False).close(),
              pruned(EMBEDDING, include="0", dense_first=False)),
     TypeError, r"'0.weight' has sparse gradients, because"),
    (lambda: pruned(nn.ConvTranspose1d(6, 8, 3), structure="2:4", dense_allocation=1),
     ValueError, "its 6 inputs are not a multiple of 4"),
    (lambda: pruned(nn.Linear(8, 8, dtype=torch.complex64)), TypeError,
     r"'weight' is torch.complex64; only real"),
    (lambda: pruned(NORMALISED, include=NORM), ValueError,
     f"'{NORM}' is normalised by weight_norm: leave"),
    (lambda: pruned(nn.utils.weight_norm(nn.Linear(8, 8)), include=OLD_NORM),
     ValueError, f"'{OLD_NORM}' is normalised by weight_norm"),
    *((partial(allocate, *given), *refusal) for given, *refusal in DISTRIBUTIONS),
    *((partial(rigl_xla.weights_of, LAYERS, **given), *refusal)
      for given, *refusal in SELECTORS),
    (lambda: pruned({}, sgd(convnet())), TypeError,
     r"model must be a torch module, got {} \(dict"),
    (lambda: Method(drop="magnitude"), TypeError, "a function, got 'magnitude'"),
    (lambda: Method(gradual=True), ValueError, "needs grow=None, got <function"),
    (lambda: Method(collects="often"), ValueError, "must be one of 'never'"),
    (lambda: cost_of(3, {}), TypeError, "operations must be the result of"),
    (lambda: cost_of(FC, {"f": 0.5}), ValueError, r"the operations, \['fc'\]"),
    (lambda: cost_of(FC, [0.5]), TypeError, "sparsities must be a dict"),
    (lambda: cost_of(FC, {}, "rigel"), ValueError, "method must be one of"),
    (lambda: cost_of({}, {}), ValueError, "compute nothing, so that nothing can"),
    (lambda: pruned(convnet()).report().cost, ValueError,
     r"rigl_xla\.operations_of\(model, inputs\)"),
    (lambda: pruned(convnet()).report({"0": (1, 1)}), ValueError,
     r"by '0.weight', which is not .* of another"),
    (lambda: operations_of(nn.Linear(2, 2)), ValueError, NO_SAMPLES),
    (lambda: operations_of(nn.Linear(2, 2), torch.ones(0, 2)), ValueError, NO_SAMPLES),
    (lambda: operations_of(3, torch.ones(1)), TypeError, r"a torch module, got 3"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("call", "error", "says"), CALLS)
def test_what_means_nothing_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
