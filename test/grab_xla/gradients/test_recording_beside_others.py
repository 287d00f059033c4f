"""Recording beside clipping, hooks, masks, autocast, DDP, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from support.grab_xla import training
from support.xla_replica.replicas import Backend
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import per_sample_grad as psg
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler

N, BATCH, EPOCHS = 24, 8, 4


def beside(what: str, how: str) -> tuple[list, list, list[float]]:
    """Trains with something that looks at ``.grad`` or changes it.

    Returns orders, weights, and what has been seen.
    """
    dtype = torch.float32 if what == "autocast" else torch.float64
    model, seen, pruner = training.mlp(dtype), [], None
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if what == "masks":
        pruner = RigLScheduler(
            model, optimizer, dense_allocation=0.3, T_end=12, delta=3,
            ignore_linear_layers=False, dense_first=False,
        )  # fmt: skip

    def halve(parameter: torch.Tensor) -> None:
        seen.append(float(parameter.grad.sum()))
        parameter.grad *= 0.5

    for parameter in model.parameters() if what == "hooks" else ():
        parameter.register_post_accumulate_grad_hook(halve)

    def losses_of(*given) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            return training.cross_entropies(*given)

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
    """Orders are those of gradients that were formed; weights are equal to the bit.

    They are equal up to rounding where ``.grad`` is made from gradients of samples.
    """
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


def trained(
    called, recorded, named, passes: int, from_samples: bool = False, **options
) -> tuple[list, list]:
    """Returns orders and weights of training with some backward passes per update."""
    dataset = TensorDataset(*training.samples())
    grab, parameters = training.sampler_of(named, **options), list(called.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    num_samples = BATCH // (passes * xla_replica.current().num_replicas)
    orders = []
    for _ in range(EPOCHS):
        for number, batch in enumerate(DataLoader(dataset, num_samples, sampler=grab)):
            training.balance(grab, recorded, training.cross_entropies, called, *batch,
                    from_samples=from_samples)  # fmt: skip
            if (number + 1) % passes == 0:
                for parameter in parameters:
                    parameter.grad /= passes
                optimizer.step()
                optimizer.zero_grad()
        orders.append(grab.order.tolist())
    return orders, [p.detach().clone() for p in parameters]


GROUPS = {"fidelity": "group", "group_size": BATCH // 2}


def under_ddp(rank: int) -> list[tuple[list, list]]:
    model = training.mlp()
    wrapper = DistributedDataParallel(model)
    for recorded, named in ((model, wrapper), (wrapper, model)):
        with pytest.raises(ValueError, match="names and the model from one of the two"):
            trained(wrapper, recorded, named, 1)
    found = []
    for options in ({}, {"from_samples": True}, GROUPS):
        for is_wrapped in (False, True):
            model = training.mlp()
            wrapper = DistributedDataParallel(model)
            named = wrapper if is_wrapped else model
            found.append(trained(wrapper, named, named, 1, **options))
    return found


def test_ddp_orders_and_trains_as_one_process_does():
    """The names are those of the model, or of the wrapper, but not of both."""
    alone = []
    for passes, options in ((1, {}), (1, {}), (2, GROUPS)):
        model = training.mlp()
        alone += [trained(model, model, model, passes, **options)] * 2
        assert len(set(map(tuple, alone[-1][0]))) > 2  # there are only six groups
    for outcomes in Backend("cpu", 2).run(under_ddp):
        for (orders, values), expected in zip(outcomes, alone, strict=True):
            assert orders == expected[0]
            torch.testing.assert_close(values, expected[1], rtol=1e-9, atol=1e-12)


def refused(rank: int) -> None:
    model = training.mlp()
    torch.distributed.fsdp.fully_shard(
        model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    )
    parameters = dict(model.named_parameters())
    names = "^GraBSampler: '0.weight', '0.bias', '2.weight' and 1 .*"
    says = "are DTensors, sharded as by FSDP2's fully_shard.*"
    with pytest.raises(TypeError, match=f"(?s){names}{says}order such as 'rr'"):
        GraBSampler(range(N), parameters)
    list(GraBSampler(range(N), parameters, "rr"))
    says = rf"(?s){says}leave these out \(params=\)"
    with pytest.raises(TypeError, match=says):
        psg.capture(model)
    with pytest.raises(TypeError, match=says):
        psg.per_sample_grad_norms(model, training.cross_entropies, training.samples(4))


def test_sharded_models_are_refused_at_construction():
    Backend("cpu", 2).run(refused)
