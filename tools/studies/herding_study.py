"""Measures how herding grows with the number of vectors, for each way to order them.

Fixed vectors, uniform in [0, 1]^d, are given to a `GraBSampler` for some epochs as if
they were gradients that do not change. Herding is the largest norm, here the infinity
norm, of the prefix sums of the centred vectors in the resulting order. On a log-log
plot against their number n, random orders (rr) have a slope of about 0.5: herding grows
like the square root of n. For balanced orders (mean, pair, ...) it is below 0.15.

Takes a few minutes; seconds with --quick:

    python tools/studies/herding_study.py --quick
    python tools/studies/herding_study.py --image docs/images/herding.png \\
        --output docs/benchmarks/herding.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
from tools.record import parser_with_output, picture, save

TYPES = ("rr", "mean", "pair", "recursive", "recursive-pair")
# Herding of every seed and epoch, by type and number of vectors: (seeds, epochs + 1).
Measured = dict[str, dict[int, np.ndarray]]


def herdings(
    balance_type: str, vectors: torch.Tensor, epochs: int, batch_size: int, seed: int
) -> list[float]:
    """Returns the herding of the first order, and of the order after each epoch.

    Args:
        balance_type: As `grab_xla.GraBSampler` takes it.
        vectors: ``(n, d)``.
        epochs: How often all vectors are given.
        batch_size: Vectors per call of ``step``.
        seed: The seed of the first order.
    """
    sampler = grab_xla.GraBSampler(
        range(len(vectors)),
        {"w": torch.zeros(vectors.shape[1])},
        balance_type,
        device="cpu",
        seed=seed,
        **({"batch_size": batch_size} if balance_type == "recursive-pair" else {}),
    )
    found = []
    for _ in range(epochs):
        order = torch.tensor(list(sampler))
        found.append(grab_xla.herding(vectors, order).infinity.item())
        for batch in order.split(batch_size):
            sampler.step({"w": vectors[batch]})
    found.append(grab_xla.herding(vectors, list(sampler)).infinity.item())
    return found


def measure(args: argparse.Namespace) -> Measured:
    """Returns the herdings of all types on the same vectors."""
    measured: Measured = {balance_type: {} for balance_type in args.types}
    work = [(t, n, seed) for n in args.sizes for t in args.types for seed in args.seeds]
    bar = tqdm(total=sum(n for _, n, _ in work) * args.epochs, unit="vector")
    with bar:
        for balance_type, n, seed in work:
            bar.set_description(f"{balance_type}, n = {n}, seed {seed}")
            generator = torch.Generator().manual_seed(seed)
            vectors = torch.rand(n, args.columns, generator=generator)
            new = herdings(balance_type, vectors, args.epochs, args.batch_size, seed)
            rows = measured[balance_type].setdefault(n, np.empty((0, len(new))))
            measured[balance_type][n] = np.vstack([rows, new])
            bar.update(n * args.epochs)
    return measured


def at_the_end(by_size: dict[int, np.ndarray]) -> np.ndarray:
    """Returns the mean over seeds for each number of vectors, after the last epoch."""
    return np.array([rows[:, -1].mean() for rows in by_size.values()])


def slope(by_size: dict[int, np.ndarray]) -> float:
    """Returns the slope of log herding against log n, by least squares."""
    sizes = np.array(list(by_size))
    return float(np.polyfit(np.log(sizes), np.log(at_the_end(by_size)), 1)[0])


def plot(measured: Measured, path: Path) -> None:
    """Draws herding against n, and against epochs for the largest n."""
    with picture(path, 2, figsize=(10, 4.2)) as (left, right):
        for balance_type, by_size in measured.items():
            label = f"{balance_type} (slope {slope(by_size):.2f})"
            left.loglog(
                list(by_size), at_the_end(by_size), "o-", label=label, markersize=4
            )
            largest = by_size[max(by_size)].mean(0)
            right.semilogy(largest, "o-", label=balance_type, markersize=3)
        num_epochs = len(largest) - 1
        left.set_xlabel("number of vectors n")
        left.set_ylabel("herding (infinity norm)")
        left.set_title(f"after {num_epochs} epochs")
        # Below the axes: above them it would lie on a line.
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        right.set_xlabel("epochs seen")
        right.set_title(f"n = {max(by_size)}")
        for axis in (left, right):
            axis.grid(alpha=0.3, which="both")


def print_table(measured: Measured) -> None:
    sizes = list(next(iter(measured.values())))
    print(f"{'n':>16}" + "".join(f"{n:>9}" for n in sizes) + f"{'slope':>9}")
    for balance_type, by_size in measured.items():
        values = "".join(f"{value:9.2f}" for value in at_the_end(by_size))
        print(f"{balance_type:>16}{values}{slope(by_size):9.3f}")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--types", nargs="+", default=TYPES, help=f"default: {' '.join(TYPES)}"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2**k for k in range(8, 15)],
        help="numbers of vectors, multiples of the batch size for recursive-pair; "
        "default: 256 512 ... 16384",
    )  # fmt: skip
    parser.add_argument("--columns", type=int, default=16, help="d; default: 16")
    parser.add_argument("--epochs", type=int, default=12, help="default: 12")
    parser.add_argument(
        "--batch-size", type=int, default=16,
        help="vectors per step; orders depend on it for recursive-pair only, which "
        "needs a power of two; default: 16",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2"
    )
    parser.add_argument(
        "--quick", action="store_true",
        help="rr, mean and pair on up to 2048 vectors, whatever the other options say",
    )  # fmt: skip
    parser.add_argument("--image", type=Path, help="PNG to draw")
    args = parser.parse_args(argv)
    if args.quick:
        args.types, args.sizes = ["rr", "mean", "pair"], [128, 512, 2048]
    if len(set(args.sizes)) < 2:
        parser.error("--sizes: a slope needs two different numbers of vectors")
    args.sizes = sorted(set(args.sizes))
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # the matrices are small: several threads only wait
    measured = measure(args)
    print_table(measured)
    if args.image:
        plot(measured, args.image)
    if args.output:
        options = ("columns", "epochs", "batch_size", "seeds", "sizes")
        result = {
            "settings": {name: getattr(args, name) for name in options},
            "slope": {t: slope(by_size) for t, by_size in measured.items()},
            "herding": {
                t: dict(zip(args.sizes, at_the_end(by_size).tolist()))
                for t, by_size in measured.items()
            },
            "herding_by_epoch_of_largest": {
                t: by_size[args.sizes[-1]].mean(0).tolist()
                for t, by_size in measured.items()
            },
        }
        save(args.output, result)


if __name__ == "__main__":
    main()
