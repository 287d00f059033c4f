"""ImageNet as 8-bit images, and made-up images that take its place.

The image of a sample, augmentation included, depends on (seed, epoch, index) and
nothing else: not on workers, replicas, or how often a run was interrupted.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

Sample = tuple[torch.Tensor, int]  # (3, side, side) uint8, and the label

# Share of the shorter side that an evaluation crops out of the middle.
CROPPED = 224 / 256


def draw_for(*numbers: int) -> torch.Generator:
    """Returns a generator that depends on a few non-negative integers alone."""
    words = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


class FakeImages(Dataset[Sample]):
    """Made-up images: every class is a coarse pattern, every image that with noise.

    Args:
        num_samples: The number of images.
        num_classes: The number of classes, which take turns.
        side: Height and width of an image in pixels.
        seed: The seed of the noise; patterns are always the same.
    """

    def __init__(
        self, num_samples: int, num_classes: int, side: int, seed: int
    ) -> None:
        self.num_samples, self.num_classes = num_samples, num_classes
        self.side, self.seed = side, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        label = index % self.num_classes
        coarse = torch.rand(1, 3, 4, 4, generator=draw_for(label))
        noise = torch.rand(
            3, self.side, self.side, generator=draw_for(self.seed, index)
        )
        image = 0.5 * F.interpolate(coarse, size=self.side)[0] + 0.5 * noise
        return (255 * image).to(torch.uint8), label


class FolderImages(Dataset[Sample]):
    """Images of torchvision's `ImageFolder`: a folder of images for each class.

    Args:
        root: The folder that holds the folders.
        side: Height and width of an image in pixels.
        seed: The seed of augmentation: a random part of 8 to 100 % of the image,
            flipped or not (Szegedy et al. 2015). None takes the middle.
    """

    def __init__(self, root: Path, side: int, seed: int | None) -> None:
        from torchvision.datasets import ImageFolder

        self.folder = ImageFolder(str(root))
        self.side, self.seed = side, seed
        self.epoch = 0

    @property
    def num_classes(self) -> int:
        """The number of folders."""
        return len(self.folder.classes)

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        path, label = self.folder.samples[index]
        image, flip = self.folder.loader(path), False
        if self.seed is None:
            box = middle(*image.size)
        else:
            draw = draw_for(self.seed, self.epoch, index)
            box = random_part(*image.size, draw)
            flip = bool(torch.rand(1, generator=draw) < 0.5)
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image)[:, ::-1] if flip else np.asarray(image)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous(), label


Box = tuple[float, float, float, float]  # left, upper, right, lower


def middle(width: int, height: int) -> Box:
    """Returns the largest square in the middle, without its border."""
    side = CROPPED * min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_part(width: int, height: int, draw: torch.Generator) -> Box:
    """Returns 8 to 100 % of the area, of sides 3:4 to 4:3; if none fits, the middle."""
    for _ in range(10):
        area, shape, x, y = torch.rand(4, generator=draw, dtype=torch.float64).tolist()
        area = (0.08 + 0.92 * area) * width * height
        ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, upper = x * (width - across), y * (height - down)
            return left, upper, left + across, upper + down
    return middle(width, height)
