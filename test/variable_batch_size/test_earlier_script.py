"""A script for the earlier implementation runs: the calls of its MNIST example.

Its names and positional arguments are used as they were. Only two functions have other
names, which torch_xla has removed: `xrt_world_size` and `get_ordinal`.
"""

from __future__ import annotations

import handwritten_digits
import numpy as np
import pytest
import torch
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

pytestmark = [needs_xla, pytest.mark.xla]

BATCH_SIZE, LOG_STEPS, EPOCHS = 32, 2, 4


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, stride=2), nn.ReLU(), nn.BatchNorm2d(8),
        nn.Flatten(), nn.Linear(8 * 3 * 3, 10), nn.LogSoftmax(dim=1),
    )  # fmt: skip


def train(index: int, trace: str) -> tuple[float, list[bool], list[float]]:
    """Returns accuracy in per cent, what `step` returned, and losses."""
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.runtime as xr

    torch.manual_seed(1)
    digits = handwritten_digits.load("fake", "unused")
    train_dataset = TensorDataset(
        digits.train_images.float() / 255, digits.train_labels
    )
    test_dataset = TensorDataset(digits.test_images.float() / 255, digits.test_labels)
    train_sampler = vbs.CustomSampler(
        train_dataset,
        trace,
        num_replicas=xr.world_size(),
        rank=xr.global_ordinal(),
        minibatch_size=BATCH_SIZE,
    )
    train_loader = DataLoader(train_dataset, batch_sampler=train_sampler, num_workers=0)
    test_loader = DataLoader(test_dataset, batch_size=64, shuffle=False)
    device = xm.xla_device()
    model = network().to(device)
    internal_optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(
        internal_optimizer, train_sampler, ref_batchsize=128, log_steps=LOG_STEPS
    )
    loss_fn = nn.NLLLoss()
    losses: list[float] = []
    returned: list[bool] = []

    def note(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    def train_loop_fn(loader) -> None:
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_fn(model(data), target)
            loss.backward()
            returned.append(bool(optimizer.step()))
            tracker.add(BATCH_SIZE)
            if step % LOG_STEPS == 0:
                xm.add_step_closure(note, args=(loss,))

    def test_loop_fn(loader) -> float:
        total_samples, correct = 0, 0
        model.eval()
        for data, target in loader:
            pred = model(data).max(1, keepdim=True)[1]
            correct += pred.eq(target.view_as(pred)).sum()
            total_samples += data.size()[0]
        accuracy = 100.0 * correct.item() / total_samples
        return xm.mesh_reduce("test_accuracy", accuracy, np.mean)

    train_device_loader = pl.MpDeviceLoader(train_loader, device)
    test_device_loader = pl.MpDeviceLoader(test_loader, device)
    accuracy = 0.0
    for epoch in range(1, EPOCHS + 1):
        train_sampler.set_epoch(epoch - 1)
        optimizer.set_epoch(epoch - 1)
        train_loop_fn(train_device_loader)
        accuracy = test_loop_fn(test_device_loader)
        xm.master_print(f"epoch {epoch}: accuracy {accuracy:.2f}")
    return accuracy, returned, losses


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_earlier_script_trains(num_replicas, tmp_path):
    """Its batches are 1 to 6 minibatches, so that three replicas idle at times."""
    trace = tmp_path / "trace.csv"
    sizes = [32, 64, 192, 96] * 30
    rows = "".join(f"{step},{size}\n" for step, size in enumerate(sizes))
    trace.write_text(f"step,batchsize\n{rows}")
    outcomes = Backend("xla", num_replicas).run(train, str(trace))
    [accuracy] = {accuracy for accuracy, _, _ in outcomes}
    assert accuracy >= 80.0
    for _, returned, losses in outcomes:
        assert losses
        assert np.isfinite(losses).all()
        assert any(returned)
    assert not all(outcomes[0][1])  # replica 0 accumulates in the largest batches
