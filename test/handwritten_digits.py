"""The data of `variable_train_mnist.py`: handwritten digits as 8-bit images."""

import logging
import socket
from pathlib import Path
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

DATASETS = ("mnist", "digits", "fake")


class Digits(NamedTuple):
    """Images ``(N, 1, side, side)`` uint8 and labels ``(N,)`` int64, split in two."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def choose(name: str | None, folder: str) -> str:
    """Returns the dataset to use, which can be loaded.

    Args:
        name: The user's choice, or None: MNIST if it can be loaded, else
            scikit-learn's digits.
        folder: The folder of MNIST.
    """
    if name is not None:
        load(name, folder)  # downloads once, before all replicas load it
        return name
    try:
        load("mnist", folder)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        told = "the 1797 real handwritten digits that ship inside scikit-learn"
        logger.warning("MNIST is not available (%s); using %s", reason, told)
        return "digits"
    return "mnist"


def load(name: str, folder: str) -> Digits:
    """Returns a dataset; MNIST from ``folder``, to which it is downloaded if missing.

    Raises:
        ImportError: torchvision or scikit-learn is not installed.
        OSError, RuntimeError: MNIST can be neither found nor downloaded.
    """
    return {"mnist": _mnist, "digits": _digits, "fake": _fake}[name](folder)


def _mnist(folder: str) -> Digits:
    from filelock import FileLock  # torch itself needs it
    from torchvision.datasets import MNIST

    Path(folder).mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10.0)  # without a network this must not hang
    try:
        with FileLock(Path(folder, "mnist.lock")):  # torchrun starts many processes
            train = MNIST(folder, train=True, download=True)
            test = MNIST(folder, train=False, download=True)
    finally:
        socket.setdefaulttimeout(before)
    return Digits(
        train.data.unsqueeze(1), train.targets, test.data.unsqueeze(1), test.targets
    )


def _digits(_folder: str) -> Digits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(digits.images * (255 / 16)).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(digits.target).to(torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=360, random_state=0, stratify=labels
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def _fake(_folder: str) -> Digits:
    """Returns ten random prototypes with noise, which one epoch suffices to learn."""
    generator = torch.Generator().manual_seed(0)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    labels = integers(10, 1280)
    images = integers(128, 10, 1, 8, 8)[labels] + integers(128, 1280, 1, 8, 8)
    images = images.to(torch.uint8)
    return Digits(images[:1024], labels[:1024], images[1024:], labels[1024:])
