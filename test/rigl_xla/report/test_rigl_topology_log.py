"""A log has all topology updates, read at once, by the primary replica alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla.sparse import batch, convnet, pruned, sgd, train
from support.variable_batch_size.reports import CountingReplica, Writer, run
from support.xla_replica.replicas import SEVERAL_REPLICAS

import xla_replica
from rigl_xla import Report, TopologyLog, costs_of


@pytest.mark.parametrize("single_call", [False, True])
def test_a_log_reads_all_updates_at_once(single_call):
    replica, writer = CountingReplica(), Writer()
    model, optimizer, pruner = run(replica=replica, skip_step=not single_call)
    costs = costs_of(model, torch.zeros(2, 1, 8, 8))
    log = TopologyLog(pruner, writer, costs=costs, prefix="sparse")
    expected = [pruner.report()]
    log()
    for step in range(14):
        train(model, optimizer, pruner, range(step, step + 1))
        if (step + 1) % 3 == 0 and step < 13:
            expected.append(pruner.report())
        log("what an elastic optimizer passes")
    assert (replica.num_fetches, writer.scalars) == (0, {})
    log.flush()
    log.flush()
    assert replica.num_fetches == 1
    Report.read(expected)
    steps = [0, 3, 6, 9, 12]
    tags = {tag.removeprefix("sparse/") for tag in writer.scalars if "/" in tag}
    assert {"sparsity", "drop_fraction", "churn", "grown", "dropped"} <= tags
    for name in ("exploration_rate", "churn", "sparsity"):
        of_all = [(r.step, getattr(r, name)) for r in expected]
        assert writer.scalars[f"sparse/{name}"] == of_all
        assert [step for step, _ in of_all] == steps
        layers = [(r.step, getattr(r.layers["5.weight"], name)) for r in expected]
        assert writer.scalars[f"sparse_{name}/5.weight"] == layers
    ratio = pruner.report(costs).cost.training_ratio
    assert writer.scalars["sparse/training_flops_ratio"][-1] == (12, ratio)
    assert writer.scalars["sparse/size_in_bytes"][0][1] == expected[0].size_in_bytes


def test_a_log_without_a_writer_keeps_nothing():
    replica = CountingReplica()
    model, optimizer, pruner = run(replica=replica)
    log = TopologyLog(pruner, None)
    train(model, optimizer, pruner, range(8))
    log()
    log.flush()
    assert replica.num_fetches == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"writer": "runs"}, "must be a SummaryWriter or have its add_scalar, got 'r"),
        ({"pruner": 3}, "pruner must be a RigLScheduler, got 3"),
        ({"layers": "no"}, "layers must be True or False"),
        ({"prefix": 3}, "prefix must be a string"),
    ],
)
def test_what_cannot_be_logged_is_refused_at_once(options, says):
    _, _, pruner = run()
    with pytest.raises(TypeError, match=says):
        TopologyLog(**{"pruner": pruner, "writer": None, **options})


def logging_run(rank: int):
    """Returns what the primary replica logs, where all replicas read their loss."""
    replica = xla_replica.current()
    model = convnet().double().to(replica.device)
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, delta=4, T_end=14)
    log = TopologyLog(pruner, Writer() if replica.is_primary else None)
    for step in range(15):
        images, labels = batch(step, 12)
        share = slice(replica.rank, None, replica.num_replicas)
        x, y = replica.send((images[share].double(), labels[share]))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if pruner():
            replica.sync()
            gradients = [parameter.grad for parameter in model.parameters()]
            replica.all_reduce_(gradients)
            for gradient in gradients:
                gradient /= replica.num_replicas
            optimizer.step()
        log()
        replica.sync()
        if step % 5 == 4:
            replica.fetch([loss.detach().reshape(1)])
            log.flush()
    return log._writer and log._writer.scalars


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_the_primary_replica_alone_may_log(backend):
    first, *others = backend.run(logging_run)
    assert others == [None] * (backend.num_replicas - 1)
    assert first == logging_run(0)
    assert [step for step, _ in first["rigl/churn"]] == [1, 4, 8, 12]
