"""Elastic training on any number of replicas is large-batch training in one process."""

import pytest
import torch
from support.variable_batch_size import elastic
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import BACKENDS, SEVERAL_REPLICAS, TPU_LIKE, Backend

import variable_batch_size as vbs
import xla_replica
from xla_replica import ReplicaError

# Batch sizes in samples; minibatches of 4, so that a batch of 4 is one minibatch.
RISING_AND_FALLING = (4, 8, 12, 32, 64, 40, 20, 4)


def exact(*trace: int, rule: str = "linear") -> elastic.Case:
    return elastic.Case(trace, 1, "sgd-heavy-ball", rule, lr=2**-3, exact=True)


CASES = {
    # Powers of two keep every sum exact for these few steps: equal bit for bit.
    "exact, idle first": exact(4, 16, 64, 4, 8),
    "exact, full first": exact(64, 4, 16, 8, 4),
    "exact, root": exact(16, 64, 4, 16, rule="root"),
    "exact, constant": exact(8, 16, 4, 32, 64, rule="constant"),
    "rising and falling": elastic.Case(RISING_AND_FALLING, epochs=3),
    "mostly idle": elastic.Case((4, 4, 8, 4, 16), epochs=2, rule="root"),
    "one step an epoch": elastic.Case((128,), epochs=3, rule="constant"),
    "clipped": elastic.Case(RISING_AND_FALLING, epochs=2, max_grad_norm=0.05),
}
for name in elastic.OPTIMIZERS:
    rule = "linear" if name.startswith("sgd") else "root"
    CASES[name] = elastic.Case(RISING_AND_FALLING, optimizer=name, rule=rule, lr=2**-8)


# XLA compiles a second for each. By default two replicas of it have no optimizer whose
# weights the other cases or those of `test_rule_family` compare there.
ELSEWHERE = {"sgd", "sgd-heavy-ball", "sgd-momentum", "adamw", "adam-amsgrad"}
ON_TWO = [name for name in CASES if name not in ELSEWHERE]


def run_all(rank: int, names: list[str]) -> dict[str, dict[str, object]]:
    return {name: elastic.elastic_run(rank, CASES[name]) for name in names}


@pytest.fixture(scope="module", params=[*BACKENDS, TPU_LIKE])
def runs(request):
    names = ON_TWO if request.param == Backend("xla", 2) else [*CASES]
    return request.param.run(run_all, names)


@pytest.fixture
def outcomes(runs, name):
    if name not in runs[0]:
        pytest.skip("slow runs have it")
    return [outcome[name] for outcome in runs]


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_a_large_batch_run(outcomes, name):
    for outcome in outcomes:
        elastic.assert_as_one_large_batch(CASES[name], outcome["weights"])


@pytest.mark.parametrize("name", CASES)
def test_every_replica_sees_every_update(outcomes, name):
    """That includes updates in which it is idle; order and numbers are the same."""
    _, expected = elastic.large_batch_run(CASES[name])
    for rank, outcome in enumerate(outcomes):
        for update, reference in zip(outcome["updates"], expected, strict=True):
            assert update[:3] == reference[:3]
            assert update[3] == pytest.approx(reference[3])
        assert outcome["returned"] == len(expected)
        sizes = [len(rows) for _, rows in elastic.batches(CASES[name])]
        num_idle = sum(size <= rank * CASES[name].minibatch_size for size in sizes)
        assert outcome["num_idle"] == num_idle


def branches(rank: int) -> list[float]:
    """Each replica's loss uses another parameter; the last one's depends on none."""
    replica = xla_replica.current()
    zeros = torch.zeros(3, 2, device=replica.device)
    parameters = [torch.nn.Parameter(each.clone()) for each in zeros]
    sampler = vbs.CustomSampler(range(24), [6, 6, 2, 6], minibatch_size=2)
    inner = torch.optim.SGD(parameters, 0.5, momentum=0.5)
    optimizer = vbs.ConstantOptimizer(inner, sampler)
    for _ in sampler:
        used = parameters[0] * 0 if rank == 2 else parameters[rank]
        (used * replica.scalar(1.0)).sum().backward()
        optimizer.step()
    return [p[0].item() for p in replica.fetch([p.detach() for p in parameters])]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_parameters_may_lack_a_gradient_on_some_replicas(backend):
    """Replica 0 weighs a third, a third, all and a third of the four steps."""
    expected = [0.0, 0.0, 0.0]
    for number, third in enumerate((1.0, 0.0)):
        buffer = 0.0
        for gradient in (1 / 3, 1 / 3, third, 1 / 3):
            buffer = 0.5 * buffer + gradient
            expected[number] -= 0.5 * buffer
    for weights in backend.run(branches):
        assert weights == pytest.approx(expected)
        assert weights[2] == 0


def steps_a_scheduler_by_hand(rank: int, trace: list[int], size: int, each: bool):
    """No replica can see that these changes are wrong: they are rare, as epochs end."""
    parameter, sampler, optimizer = one_weight(
        trace, size=192, minibatch_size=32, sampler={"on_end": "cycle"}
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, size)
    model = torch.nn.Module()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for _ in sampler:
            parameter.sum().backward()
            if optimizer.step() or each:
                scheduler.step()
        optimizer.average_buffers(model)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
@pytest.mark.parametrize(
    ("trace", "size", "each"), [([96 + 64], 5, True), ([32, 64, 96], 3, False)]
)
def test_learning_rates_that_differ_are_found(backend, trace, size, each):
    with pytest.raises(ReplicaError, match=r"optimizer.attach\(scheduler\)"):
        backend.run(steps_a_scheduler_by_hand, trace, size, each)
