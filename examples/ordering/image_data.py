"""MNIST and CIFAR-10 where they are available, and digits that always are."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from examples.ordering.ordered_training import Splits

logger = logging.getLogger(__name__)

# The channels and the side of an image.
SHAPES = {"mnist": (1, 28), "cifar10": (3, 32), "digits": (1, 8)}


def choose(name: str, folder: str) -> str:
    """Returns ``name`` if that data set is available, else 'digits', with a warning."""
    if name == "digits":
        return name
    try:
        load(name, folder)  # Downloads once, before all replicas load it.
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        logger.warning(
            "%s is not available (%s); using the 1797 digits of scikit-learn",
            name,
            reason,
        )
        return "digits"
    return name


def load(name: str, folder: str) -> Splits:
    """Returns images ``(N, channels, side, side)`` uint8 and labels ``(N,)`` int64.

    Raises:
        ImportError: torchvision or scikit-learn is not installed.
        OSError, RuntimeError: The data cannot be found or downloaded.
    """
    return _digits() if name == "digits" else _torchvision(name, folder)


def _torchvision(name: str, folder: str) -> Splits:
    from torchvision import datasets

    Path(folder).mkdir(parents=True, exist_ok=True)
    dataset = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10.0)  # Do not hang without a network.
    try:
        halves = [dataset(folder, train=half, download=True) for half in (True, False)]
    finally:
        socket.setdefaulttimeout(before)
    return Splits(*(_tensors(half.data, half.targets) for half in halves))


def _tensors(images: object, labels: object) -> TensorDataset:
    """Returns images with channels second: MNIST has none, CIFAR-10 has them last."""
    pixels = torch.as_tensor(images)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    return TensorDataset(pixels.contiguous(), torch.as_tensor(labels))


def _digits() -> Splits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(digits.images * (255 / 16)).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(digits.target).to(torch.int64)
    halves = train_test_split(
        range(len(labels)), test_size=357, random_state=0, stratify=labels
    )
    return Splits(*(TensorDataset(images[half], labels[half]) for half in halves))
