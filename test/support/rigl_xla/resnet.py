"""Shapes of ResNet-50's weights, so that torchvision need not be installed."""

from __future__ import annotations

from typing import NamedTuple


class Weight(NamedTuple):
    """A weight's shape ``(out, in, *kernel)``, stride, and side of its input image."""

    shape: tuple[int, ...]
    stride: int
    side: int


def resnet50() -> dict[str, Weight]:
    """Returns weights by torchvision's names; strides are in the 3x3 convolutions."""
    found = {"conv1.weight": Weight((64, 3, 7, 7), 2, 224)}
    into, side = 64, 56
    stages = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]
    for stage, (width, blocks, first_stride) in enumerate(stages, start=1):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            name = f"layer{stage}.{block}"
            found |= {
                f"{name}.conv1.weight": Weight((width, into, 1, 1), 1, side),
                f"{name}.conv2.weight": Weight((width, width, 3, 3), stride, side),
                f"{name}.conv3.weight": Weight(
                    (4 * width, width, 1, 1), 1, side // stride
                ),
            }
            if block == 0:
                found[f"{name}.downsample.0.weight"] = Weight(
                    (4 * width, into, 1, 1), stride, side
                )
            into, side = 4 * width, side // stride
    return found | {"fc.weight": Weight((1000, 2048), 1, 1)}


RESNET50_WEIGHTS = {name: weight.shape for name, weight in resnet50().items()}
