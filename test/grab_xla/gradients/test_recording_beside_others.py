"""Recording beside clipping, hooks, masks, autocast, DDP, and what it refuses."""

import contextlib
import itertools

import pytest
import torch
from support.grab_xla import training
from support.grab_xla.training import balance, cross_entropies, sampler_of
from support.rigl_xla import sparse
from support.xla_replica.replicas import Backend, row
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import per_sample_grad as psg
import xla_replica
from grab_xla import GraBSampler
from grab_xla.gradients.row_copies import flattened, interleaved

N, BATCH, EPOCHS = 24, 8, 4
FROM_SAMPLES = {"how": "from samples"}
GROUPS = {"fidelity": "group", "group_size": BATCH // 2}
X, Y = torch.randn(4, 1, 7, 7, dtype=torch.float64), torch.arange(4) % 3


def beside(what: str, how: str) -> tuple[list, list, list[float]]:
    """Trains beside something that looks at ``.grad``; returns what both have seen."""
    dtype = torch.float32 if what == "autocast" else torch.float64
    model, seen, pruner = training.mlp(dtype), [], None
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if what == "masks":
        options = {"dense_allocation": 0.3, "T_end": 12, "dense_first": False}
        pruner = sparse.pruned(model, optimizer, **options)

    def halve(parameter: torch.Tensor) -> None:
        seen.append(float(parameter.grad.sum()))
        parameter.grad *= 0.5

    for parameter in model.parameters() if what == "hooks" else ():
        parameter.register_post_accumulate_grad_hook(halve)

    def losses_of(*given) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            return cross_entropies(*given)

    def update() -> None:
        if what == "clipping":
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        if pruner is None or pruner():
            optimizer.step()

    data = training.samples(N, dtype)
    options = {"losses_of": losses_of, "update": update, "epochs": EPOCHS}
    orders = training.ordered(model, data, how, size=BATCH, **options)
    if what == "masks":
        assert 0.2 < float((model[0].weight == 0).double().mean()) < 0.9
    return orders, [p.detach() for p in model.parameters()], seen


@pytest.mark.parametrize("from_samples", [False, True])
@pytest.mark.parametrize("what", ["clipping", "hooks", "masks", "autocast"])
def test_others_see_the_gradients_of_an_ordinary_pass(what, from_samples):
    orders, *found = beside(what, "from samples" if from_samples else "recorded")
    expected, *others = beside(what, "formed")
    assert orders == expected
    assert len(set(map(tuple, orders))) == EPOCHS
    few = {"rtol": 0.0, "atol": 0.0}
    if from_samples:  # with autocast an ordinary pass rounds to bfloat16
        few = {"rtol": 0.02, "atol": 1e-3} if what == "autocast" else {}
        for each in (found, others):  # the sequence of parameters is another
            each[1] = sorted(each[1])
    torch.testing.assert_close(found, others, **few)


def trained(model, called, passes: int, how="recorded", **options) -> tuple[list, list]:
    """Returns orders and weights of training by calls of a model or its wrapper."""
    size = BATCH // (passes * xla_replica.current().num_replicas)
    options |= {"epochs": EPOCHS, "size": size, "passes": passes}
    options["losses_of"] = lambda _, x, y: cross_entropies(called, x, y)
    orders = training.ordered(model, training.samples(), how, **options)
    return orders, [p.detach() for p in model.parameters()]


def under_ddp(rank: int) -> list[tuple[list, list]]:
    found = []
    for options in ({}, FROM_SAMPLES, GROUPS):
        for is_wrapped in (False, True):
            model = training.mlp()
            wrapper = nn.parallel.DistributedDataParallel(model)
            named, other = (wrapper, model) if is_wrapped else (model, wrapper)
            with pytest.raises(ValueError, match="names and the model from one of"):
                sampler_of(named).record(other)
            found.append(trained(named, wrapper, 1, **options))
    return found


def test_ddp_orders_and_trains_as_one_process_does():
    """The names are those of the model, or of the wrapper, but not of both."""
    alone = []
    for passes, options in ((1, {}), (1, FROM_SAMPLES), (2, GROUPS)):
        model = training.mlp()
        alone += [trained(model, model, passes, **options)] * 2
        assert len(set(map(tuple, alone[-1][0]))) > 2  # there are only six groups
    for outcomes in Backend("cpu", 2).run(under_ddp):
        for (orders, values), expected in zip(outcomes, alone, strict=True):
            assert orders == expected[0]
            torch.testing.assert_close(values, expected[1], rtol=1e-9, atol=1e-12)


def refused(rank: int) -> None:
    model, norms = training.mlp(), psg.per_sample_grad_norms
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())
    list(GraBSampler(range(N), parameters, "rr"))
    names = "^GraBSampler: '0.weight', '0.bias', '2.weight' and 1 .*"
    left_out = r"leave these out \(params=\)"
    for call, begins, ends in [
        (lambda: GraBSampler(range(N), parameters), names, "order such as 'rr'"),
        (lambda: psg.capture(model), "", left_out),
        (lambda: norms(model, cross_entropies, training.samples(4)), "", left_out),
    ]:
        says = "are DTensors, sharded as by FSDP2's fully_shard.*"
        with pytest.raises(TypeError, match=f"(?s){begins}{says}{ends}"):
            call()


def test_sharded_models_are_refused_at_construction():
    Backend("cpu", 2).run(refused)


class WeightGradients(TorchDispatchMode):
    """Counts the convolutions of a backward pass that form a weight's gradient."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.count += args[-1][1]
        return func(*args, **(kwargs or {}))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten())
    model[-1].unused = nn.Linear(2, 2)
    return model.double()


def sampler(model: nn.Module, **options) -> GraBSampler:
    list(grab := sampler_of(model, 2 * len(X), **options))
    return grab


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def recorded_step(network: nn.Module, grab: GraBSampler, **options) -> int:
    """Returns how many gradients of weights the second of two passes has formed."""
    for mode in (contextlib.nullcontext(), WeightGradients()):
        network.zero_grad()
        with mode:
            balance(grab, network, cross_entropies, network, X, Y, **options)
    return mode.count


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_gradient_is_formed_twice(reduction):
    """What the losses do not depend on keeps no gradient, so it takes no step."""
    network, other = convolutions(), convolutions()
    options = {"from_samples": True, "reduction": reduction}
    assert recorded_step(network, sampler(network), **options) == 0
    getattr(cross_entropies(other, X, Y), reduction)().backward()
    torch.testing.assert_close(grads(network), expected := grads(other))
    assert recorded_step(other, sampler(other), reduction=reduction) == 2
    torch.testing.assert_close(grads(other), expected, rtol=0, atol=0)
    # A pass of another fidelity stays as it is.
    grab = sampler(network, fidelity="projected", projection_size=20)
    assert recorded_step(network, grab, from_samples=True) == 2


def test_gradients_add_up_and_the_scale_is_that_of_the_pass():
    network, other = convolutions(), convolutions()
    for _ in range(2):
        with psg.capture(network, scale=8.0) as recorded:
            losses = cross_entropies(network, X, Y)
        found = recorded.backward(losses).materialize()
        recorded.add_gradients({name: rows.mean(0) for name, rows in found.items()})
        (8 * cross_entropies(other, X, Y).mean()).backward()
    assert [grad is None for grad in grads(other)] == [False] * 4 + [True] * 2
    torch.testing.assert_close(grads(network)[:4], grads(other)[:4])


def test_who_would_get_no_gradient_is_named():
    network = convolutions()
    some = {n: p for n, p in network.named_parameters() if n.startswith("2")}
    list(grab := GraBSampler(range(2 * len(X)), some))
    with pytest.raises(psg.PerSampleError, match=r"0\.bias, 0\.weight would get"):
        recorded_step(network, grab, from_samples=True)
    grab, heat = sampler(network), torch.ones((), dtype=X.dtype, requires_grad=True)
    for image in (X * heat, X.clone().requires_grad_()):
        given = cross_entropies, network, image, Y
        with pytest.raises(psg.PerSampleError, match="a tensor outside of the model"):
            balance(grab, network, *given, from_samples=True)
        assert not any(grad is not None for grad in grads(network))


def test_sums_without_a_pass_of_their_own_are_refused():
    network = nn.Linear(2, 1)
    with psg.capture(network) as recorded:
        losses = network(torch.ones(3, 2)).sum(1)
    sums = {name: parameter.detach() for name, parameter in network.named_parameters()}
    with pytest.raises(RuntimeError, match=r"call backward\(\) or stream\(\) before"):
        recorded.add_gradients(sums)
    recorded.backward(losses, retain_graph=True)
    with pytest.raises(ValueError, match="missing or unknown: bias"):
        recorded.add_gradients({"weight": sums["weight"]})
    recorded.add_gradients(sums)
    with pytest.raises(RuntimeError, match="without accumulate="):
        recorded.add_gradients(sums)


# 36 rows are joined four at a time, 35 one at a time.
SHAPES = [(3,), (3, 5), (3, 7, 5), (3, 36, 5), (2, 35, 3), (2, 48, 1), (2, 32, 3, 3)]
DTYPES = itertools.cycle((torch.float32, torch.float64, torch.bfloat16))
VALUES = [torch.randn(shape).to(dtype) for shape, dtype in zip(SHAPES, DTYPES)]
CUBES = [each for each in VALUES if each.dim() == 3]


def copies(rank: int, values, cubes) -> list[torch.Tensor]:
    replica = xla_replica.current()
    found = [flattened(each) for each in replica.send(values)]
    return replica.fetch([*found, *map(interleaved, replica.send(cubes))])


@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 1)])
def test_copies_are_those_of_a_reshape(backend):
    expected = [each.reshape(len(each), -1) for each in VALUES]
    expected += [each.transpose(0, 1).flatten(0, 1) for each in CUBES]
    [found] = backend.run(copies, VALUES, CUBES)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
