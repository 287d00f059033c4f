"""A script for the earlier implementation runs: the calls of its MNIST example.

Its names and positional arguments are used as they were. Only two functions have other
names, which torch_xla has removed: `xrt_world_size` and `get_ordinal`.
"""

from __future__ import annotations

import sys

import handwritten_digits
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

pytestmark = [needs_xla, pytest.mark.xla]

FLAGS = {
    "batch_size": 32,
    "momentum": 0.5,
    "lr": 0.05,
    "num_workers": 0,
    "num_epochs": 4,
    "log_steps": 2,
    "ref_batchsize": 128,
    "target_accuracy": 80.0,
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, kernel_size=3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.output = nn.Linear(8 * 3 * 3, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.relu(self.convolution(images)))
        return F.log_softmax(self.output(hidden.flatten(1)), dim=1)


def train(flags: dict) -> tuple[float, list[bool], list[float]]:
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
        flags["trace"],
        num_replicas=xr.world_size(),
        rank=xr.global_ordinal(),
        minibatch_size=flags["batch_size"],
    )
    train_loader = DataLoader(
        train_dataset, batch_sampler=train_sampler, num_workers=flags["num_workers"]
    )
    test_loader = DataLoader(test_dataset, batch_size=64, shuffle=False)
    device = xm.xla_device()
    model = Network().to(device)
    internal_optimizer = optim.SGD(
        model.parameters(), lr=flags["lr"], momentum=flags["momentum"]
    )
    optimizer = vbs.LinearRuleOptimizer(
        internal_optimizer,
        train_sampler,
        ref_batchsize=flags["ref_batchsize"],
        log_steps=flags["log_steps"],
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
            tracker.add(flags["batch_size"])
            if step % flags["log_steps"] == 0:
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
    for epoch in range(1, flags["num_epochs"] + 1):
        train_sampler.set_epoch(epoch - 1)
        optimizer.set_epoch(epoch - 1)
        train_loop_fn(train_device_loader)
        accuracy = test_loop_fn(test_device_loader)
        xm.master_print(f"epoch {epoch}: accuracy {accuracy:.2f}")
    return accuracy, returned, losses


def _mp_fn(index: int, flags: dict) -> tuple[float, list[bool], list[float]]:
    found = train(flags)
    if found[0] < flags["target_accuracy"]:
        sys.exit(21)
    return found


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_earlier_script_trains(num_replicas, tmp_path):
    """Its batches are 1 to 6 minibatches, so that three replicas idle at times."""
    trace = tmp_path / "trace.csv"
    sizes = [32, 64, 192, 96] * 30
    rows = "".join(f"{step},{size}\n" for step, size in enumerate(sizes))
    trace.write_text(f"step,batchsize\n{rows}")
    flags = FLAGS | {"trace": str(trace)}
    outcomes = Backend("xla", num_replicas).run(_mp_fn, flags)
    assert len({accuracy for accuracy, _, _ in outcomes}) == 1
    for _, returned, losses in outcomes:
        assert losses
        assert np.isfinite(losses).all()
        assert any(returned)
    assert not all(outcomes[0][1])  # replica 0 accumulates in the largest batches
