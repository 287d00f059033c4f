"""Trains an image classifier in several orders and compares them.

    python examples/ordering/image_classification.py --dataset digits  # one minute
    python examples/ordering/image_classification.py --dataset digits \\
        --order rr,mean,pair --epochs 40 --lr 0.5 --seeds 3 --herding exact
    python examples/ordering/image_classification.py --dataset cifar10 \\
        --model resnet18 --order rr,recursive-pair --random-projection kron
    python examples/ordering/image_classification.py --dataset digits --fidelity group
    python examples/ordering/image_classification.py --dataset digits --bf16 \\
        --trace test/variable_trace.csv --minibatch-size 16
    python examples/ordering/image_classification.py --num-replicas 2
    torchrun --rdzv_backend c10d --nproc_per_node 2 \\
        examples/ordering/image_classification.py
    python examples/ordering/image_classification.py --checkpoint saved --resume

'rr' is random reshuffling, 'so' one shuffle for all epochs. 'mean', 'pair', 'recursive'
and 'recursive-pair' order every epoch by the per-sample gradients of the previous one.
Balanced orders need several epochs. They help most where the loss stays above zero, as
with a convex model or weight decay, and not where a network fits every sample exactly.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

from torch import nn
from torch.utils.data import TensorDataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # An uninstalled checkout works, too.

from examples.common.image_models import MODELS, image_model  # noqa: E402
from examples.ordering import image_data  # noqa: E402
from examples.ordering.ordered_training import Splits, train_and_report  # noqa: E402
from examples.ordering.training_options import add_shared, finish  # noqa: E402


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """A classifier of small images.

    Attributes:
        dataset: A name in `image_data.SHAPES`.
        model: One of `MODELS`.
        width: The width of the ResNet.
        data_dir: The folder of data sets.
        num_samples: The size of the training set; None takes all samples.
    """

    dataset: str
    model: str
    width: int
    data_dir: str
    num_samples: int | None

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    def load(self) -> Splits:
        splits = image_data.load(self.dataset, self.data_dir)
        fewer = TensorDataset(*splits.train[: self.num_samples])
        return splits._replace(train=fewer)

    def build_model(self) -> nn.Module:
        channels, side = image_data.SHAPES[self.dataset]
        return image_model(self.model, channels, side, width=self.width)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--dataset",
        choices=sorted(image_data.SHAPES),
        default="mnist",
        help="scikit-learn's digits replace what is not available (default: mnist)",
    )
    add("--data-dir", default="data", help="folder of data sets (default: data)")
    add("--num-samples", type=int, help="samples to train on (default: all)")
    add(
        "--model",
        choices=MODELS,
        default="logistic",
        help="logistic is convex, and shows best what an order gains "
        "(default: logistic)",
    )
    add(
        "--width",
        type=int,
        default=64,
        help="channels of resnet18's first stage (default: 64)",
    )
    add_shared(
        parser, epochs=20, batch_size=16, optimizer="sgd", lr=0.1, momentum=0.0,
        weight_decay=1e-3,
    )  # fmt: skip
    args = parser.parse_args(argv)
    finish(parser, args, "images")
    if args.num_samples is not None and args.num_samples < args.batch_size:
        parser.error(f"--num-samples must be at least --batch-size, {args.batch_size}")
    if args.width < 8 or args.width % 8:
        parser.error(f"--width must be a multiple of 8, got {args.width}")
    return args


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse(argv)
    args.dataset = image_data.choose(args.dataset, args.data_dir)
    task = ImageTask(
        args.dataset, args.model, args.width, args.data_dir, args.num_samples
    )
    return train_and_report(task, args)


if __name__ == "__main__":
    sys.exit(main())
