"""A training script that knows torch_xla alone: the measure of `python -m xla_replica`.

It is written as one for a TPU, and nothing in it is for the emulation.
"""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def fake_digits(num_samples):
    """Returns ten patterns in noise."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randn(10, 1, 12, 12, generator=generator)
    labels = torch.arange(num_samples) % 10
    noise = torch.randn(num_samples, 1, 12, 12, generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * noise, labels)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=5)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images):
        features = F.relu(F.max_pool2d(self.conv(images), 2))
        return F.log_softmax(self.head(self.norm(features).flatten(1)), dim=1)


def train(index, flags):
    torch.manual_seed(1)  # every process draws the same weights
    device = torch_xla.device()
    model = Digits().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    dataset = fake_digits(320)
    sampler = DistributedSampler(
        dataset, num_replicas=xr.world_size(), rank=xr.global_ordinal(), shuffle=True
    )
    loader = DataLoader(dataset, flags.batch_size, sampler=sampler, drop_last=True)
    device_loader = pl.MpDeviceLoader(loader, device)
    losses = []
    for epoch in range(flags.epochs):
        sampler.set_epoch(epoch)
        tracker = xm.RateTracker()
        for images, labels in device_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(flags.batch_size)
            xm.add_step_closure(lambda x: losses.append(x.item()), args=(loss,))
        correct = (model(images).argmax(1) == labels).sum().item() / flags.batch_size
        accuracy = xm.mesh_reduce("accuracy", correct, lambda v: sum(v) / len(v))
        per_epoch = losses[-len(loader) :]
        mean = xm.mesh_reduce(
            "loss", sum(per_epoch) / len(per_epoch), lambda v: sum(v) / len(v)
        )
        xm.master_print(f"epoch {epoch} loss {mean:.4f} accuracy {accuracy:.2f}")
    path = os.path.join(flags.out, f"weights-{index}.pt")
    xm.save(model.state_dict(), path, master_only=False)
    xm.rendezvous("saved")
    xm.master_print(f"trained on {xr.world_size()} devices")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", default=".")
    torch_xla.launch(train, args=(parser.parse_args(),))
