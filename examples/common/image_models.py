"""Models for small images without BatchNorm and Dropout.

Every sample is computed independently of the others, so that it has a gradient of its
own. Images are uint8, of any size and number of channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

MODELS = ("logistic", "lenet", "resnet18")


class EightBitImages(nn.Module):
    """Maps gray values from 0 to 255 to numbers from -0.5 to 0.5."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 255 - 0.5


def image_model(
    name: str, channels: int, side: int, num_classes: int = 10, width: int = 64
) -> nn.Sequential:
    """Returns the model of that name.

    Args:
        name: One of `MODELS`.
        channels: The number of channels of an image.
        side: The width and height of an image in pixels.
        num_classes: The number of logits.
        width: The number of channels of the ResNet's first stage, a multiple of 8.
    """
    if name == "logistic":
        layers = [nn.Flatten(), nn.Linear(channels * side**2, num_classes)]
    elif name == "lenet":
        layers = _lenet(channels, side, num_classes)
    elif name == "resnet18":
        layers = _resnet18(channels, num_classes, width)
    else:
        raise ValueError(f"name must be one of {', '.join(MODELS)}, got {name!r}")
    return nn.Sequential(EightBitImages(), *layers)


def _lenet(channels: int, side: int, num_classes: int) -> list[nn.Module]:
    """Returns the layers of LeCun et al. 1998, with ReLU.

    Hidden layers have the same size for every image size. Pooling averages, as in the
    paper: torch.func cannot take derivatives of max_pool2d on XLA.
    """
    return [
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (side // 4) ** 2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    ]


def _resnet18(channels: int, num_classes: int, width: int) -> list[nn.Module]:
    """Returns the layers of He et al. 2016 for small images, with GroupNorm.

    GroupNorm (Wu and He 2018) takes the place of BatchNorm.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        _norm(width),
        nn.ReLU(),
    ]
    before = width
    for stage in range(4):
        after, stride = width * 2**stage, 1 if stage == 0 else 2
        layers += [ResidualBlock(before, after, stride), ResidualBlock(after, after, 1)]
        before = after
    return [
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, num_classes),
    ]


def _norm(channels: int) -> nn.GroupNorm:
    # A group has at least eight channels: the last stage of a small image is one pixel,
    # and float32 hardly determines the gradients of a norm over few numbers.
    return nn.GroupNorm(math.gcd(32, channels // 8), channels)


class ResidualBlock(nn.Module):
    """Two convolutions, and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            _norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            _norm(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), _norm(after)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.convolutions(images) + self.shortcut(images))
