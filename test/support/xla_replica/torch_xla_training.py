"""A script for TPUs that knows torch_xla alone: what `python -m xla_replica` is for."""

import os
import sys

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def fake_digits(num_samples):
    """Returns ten patterns in noise, the same in every process."""
    patterns, labels = torch.randn(10, 1, 12, 12), torch.arange(num_samples) % 10
    noise = torch.randn(num_samples, 1, 12, 12)
    return TensorDataset(patterns[labels] + 0.5 * noise, labels)


def train(index, folder):
    torch.manual_seed(1)  # every process draws the same data and weights
    device, dataset = torch_xla.device(), fake_digits(320)
    layers = nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(8)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    sampler = DistributedSampler(dataset, xr.world_size(), xr.global_ordinal())
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    device_loader = pl.MpDeviceLoader(loader, device)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        tracker = xm.RateTracker()
        for images, labels in device_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(len(images))
            xm.add_step_closure(lambda x: losses.append(x.item()), args=(loss,))
        mine = sum(losses[-len(loader) :]) / len(loader)
        mean = xm.mesh_reduce("loss", mine, lambda each: sum(each) / len(each))
        correct = (model(images).argmax(1) == labels).sum().item()
        xm.master_print(f"epoch {epoch} loss {mean:.4f} correct {correct}")
    path = os.path.join(folder, f"weights-{index}.pt")
    xm.save(model.state_dict(), path, master_only=False)
    xm.rendezvous("saved")
    xm.master_print(f"trained on {xr.world_size()} devices")


if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1],))
