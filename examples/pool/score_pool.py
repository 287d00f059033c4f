"""Which samples of a pool would change a model most? Their gradients' norms say.

    python examples/pool/score_pool.py
    python examples/pool/score_pool.py --pool 2000 --batch-size 50 --layer conv2
    python examples/pool/score_pool.py --score egl --folder scores --output scores.csv

A trained model, a large pool of unseen samples, and the size of each sample's gradient:
active learning and data pruning ask for it. Two ways are here. One call gives the norms
of a batch, in one layer, for an inner loop of your own. psg.score_pool scores the whole
pool: it streams the pool in blocks of one size, in memory that does not grow with it.
With --folder it continues where it was when it is called again after a kill.

tools/benchmarks/bench_per_sample.py measures what such norms cost beside other ways.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
import xla_replica


class Network(nn.Module):
    """Two convolutions and a Linear, on images of 10 by 10."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(10, 20, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(20 * 5 * 5, num_classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv2(self.conv1(x)).flatten(1))


def make_problem(count: int) -> tuple[nn.Module, TensorDataset]:
    """Returns a model, and a pool of so many random images and classes."""
    torch.manual_seed(0)
    model = Network().to(xla_replica.current().device)
    images, classes = torch.rand(count, 3, 10, 10), torch.randint(0, 10, (count,))
    return model, TensorDataset(images, classes)


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns one loss per sample: that is all that the package asks for."""
    return F.cross_entropy(model(x), y, reduction="none")


def layer_norms(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Returns the norm of each sample's gradient in one layer, ``(B,)``.

    One forward and one backward pass, which forms no gradient of a weight.
    """
    params = [f"{layer}.weight"]
    return psg.per_sample_grad_norms(model, losses_of, (x, y), params=params)


def score(model: nn.Module, pool: Dataset, options: argparse.Namespace) -> None:
    """Scores every sample of the pool by the whole model, and prints the highest."""
    scores = psg.score_pool(
        model,
        pool,
        score=options.score,
        batch_size=options.batch_size,
        folder=options.folder,
    )
    highest = scores.top(min(5, options.pool))
    print(f"highest {options.score} of the whole model:", highest.tolist())
    if options.output is not None:
        parquet = options.output.endswith(".parquet")
        table = scores.to_frame()
        write = table.to_parquet if parquet else table.to_csv
        write(options.output, index=False)
        print("index and score of every sample:", options.output)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pool", type=int, default=1000, help="number of samples (default 1000)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=50,
        help="samples of the batch whose norms are shown, and that score_pool loads "
        "together: its scores are the same bits for any (default 50)",
    )
    parser.add_argument(
        "--layer",
        choices=["conv1", "conv2", "fc"],
        default="conv2",
        help="the layer in which the first batch's norms are taken (default conv2)",
    )
    parser.add_argument(
        "--score",
        choices=["grad_norm", "egl", "el2n", "loss"],
        default="grad_norm",
        help="what score_pool gives every sample: the norm of its gradient, the same "
        "expected over the model's own labels (egl), the error of its probabilities "
        "(el2n), its loss (default grad_norm)",
    )
    parser.add_argument(
        "--folder",
        help="keep scored parts here, and continue from there when called again",
    )
    parser.add_argument("--output", help="write scores to this .csv or .parquet file")
    options = parser.parse_args(arguments)
    if options.pool < 1 or options.batch_size < 1:
        parser.error("--pool and --batch-size must be at least 1")
    return options


def main() -> None:
    options = parse()
    model, pool = make_problem(options.pool)
    first = xla_replica.current().send(pool[: options.batch_size])
    norms = layer_norms(model, options.layer, *first)
    print(
        f"gradient norms in {options.layer}, first {len(norms)} samples: "
        f"{norms.min():.3f} to {norms.max():.3f}"
    )
    score(model, pool, options)


if __name__ == "__main__":
    main()
