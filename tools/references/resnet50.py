"""ResNet-50 (He et al. 2016) as torchvision builds it, for machines without it.

Names and shapes of parameters are the same; strides are in the 3 by 3 convolutions.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

# Channels between the convolutions of a block, blocks, and the first block's stride.
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


class Bottleneck(nn.Module):
    """Three convolutions, and a shortcut around them."""

    def __init__(self, before: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        after = 4 * width
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if first:
            conv = nn.Conv2d(before, after, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        return F.relu(self.bn3(self.conv3(inner)) + self.downsample(x))


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """Returns a network from images ``(B, 3, side, side)`` to ``(B, num_classes)``."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, padding=1),
    )
    before = 64
    for number, (width, blocks, stride) in enumerate(STAGES, start=1):
        stage = nn.Sequential()
        for block in range(blocks):
            first = block == 0
            stage.append(Bottleneck(before, width, stride if first else 1, first))
            before = 4 * width
        parts[f"layer{number}"] = stage
    parts["avgpool"] = nn.AdaptiveAvgPool2d(1)
    parts["flatten"] = nn.Flatten()
    parts["fc"] = nn.Linear(before, num_classes)
    return nn.Sequential(parts)
