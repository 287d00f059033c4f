"""Draws RigL runs and compares what grows with a plain oracle in float64.

A run keeps one Linear sparse and draws its mask, its schedule, and for every step some
backward passes: of inputs whose columns are dead, or gradients with a column of zeros;
kept or thrown away by zero_grad(), and with a .grad that is replaced by another tensor,
as by p.grad = p.grad.clamp(-1, 1), or written into. The oracle adds the dense gradients
of the passes that were kept, drops the weakest weights and grows where that sum is
largest. Each update of the topology is

    right    the strongest are kept, and what grows has the largest gradients,
    refused  an error,
    wrong    anything else: without a word, so that the status is 1.

Takes half a minute; some seconds with --quick. Another version is compared by
PYTHONPATH, as here:

    python tools/studies/drawn_rigl.py --quick
    PYTHONPATH=/a/checkout python tools/studies/drawn_rigl.py --seed 1
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after PYTHONPATH

import rigl_xla
from tools.record import parser_with_output, save

REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "left alone": lambda grad: grad,
    "clamped": lambda grad: grad.clamp(-1, 1),
    "halved": lambda grad: grad / 2,
    "copied": torch.clone,
    "clamped in place": lambda grad: grad.clamp_(-1, 1),
}
OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


class Run:
    """A sparse Linear, its pruner, and what a plain RigL makes of the same passes.

    Attributes:
        drawn: How often each kind was drawn.
        outcomes: Of each update of the topology.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw, self.drawn, self.outcomes = draw, Counter[str](), Counter[str]()
        torch.manual_seed(draw.randrange(2**31))
        rows, columns = draw.randint(1, 4), draw.randint(4, 8)
        self._model = nn.Linear(columns, rows, bias=False)
        self._dead = draw.sample(range(columns), draw.choice((0, 1, columns // 2)))
        density, scores = draw.choice((0.25, 0.5, 0.75)), torch.rand(rows, columns)
        mask = "random"
        if self._dead and draw.random() < 0.5:  # only weights that get no gradient
            mask, density = "of dead columns", len(self._dead) / columns
            scores[:, self._dead] += 1
        self.drawn.update([f"mask: {mask}", f"dead columns: {len(self._dead)}"])
        name = draw.choice([*OPTIMIZERS])
        self._optimizer = OPTIMIZERS[name](self._model.parameters(), 0.1)
        self._delta = draw.randint(1, 3)
        self._num_collected = draw.randint(1, self._delta)
        self._pruner = rigl_xla.RigLScheduler(
            self._model, self._optimizer, density, T_end=10_000, delta=self._delta,
            alpha=0.5, ignore_linear_layers=False, dense_first=False,
            grad_accumulation_n=self._num_collected, annealing="constant",
            initial_masks={"weight": scores},
        )  # fmt: skip
        self.drawn.update([f"optimizer: {name}", f"steps collected: "
                           f"{self._num_collected} of {self._delta}"])  # fmt: skip

    def _pass(self, discarded: bool) -> torch.Tensor:
        """Runs a backward pass; returns its dense gradient in float64."""
        kind = self._draw.choice(("inputs", "gradients"))
        self.drawn[f"batch: {'discarded' if discarded else 'kept'}, of {kind}"] += 1
        weight = self._model.weight
        wide = weight.detach().double().requires_grad_()
        if kind == "gradients":
            given = torch.randn(weight.shape)
            if discarded and self._draw.random() < 0.5:
                given[self._draw.randrange(len(given)), -1] = 1e6
            given[:, self._dead] = 0
            losses = [(each * given).sum() for each in (weight, wide)]
        else:
            x, y = torch.randn(6, weight.shape[1]), torch.randn(6, len(weight))
            x[:, self._dead] = 0
            outputs = self._model(x), x.double() @ wide.T
            losses = [(out - y).square().sum() for out in outputs]
        losses[0].backward()
        return torch.autograd.grad(losses[1], wide)[0]

    def _step(self) -> torch.Tensor:
        """Runs the passes of a step; returns what those add up to that were kept."""
        draw, weight = self._draw, self._model.weight
        kinds = [draw.random() < 0.3 for _ in range(draw.randint(0, 2))] + [False]
        self.drawn[f"passes in a step: {len(kinds)}"] += 1
        total = torch.zeros(weight.shape, dtype=torch.float64)
        self._optimizer.zero_grad(set_to_none=draw.random() < 0.5)
        for number, discarded in enumerate(kinds, 1):
            total += self._pass(discarded)
            # Before another pass it could be zero_grad(set_to_none=False) as well.
            ways = [*REPLACED][: None if number == len(kinds) else -1]
            if discarded:  # with all passes before it
                total.zero_()
                self._optimizer.zero_grad(set_to_none=draw.random() < 0.5)
            elif (how := draw.choice(ways)) != "left alone":
                weight.grad = REPLACED[how](weight.grad)
                self.drawn[f"gradient: {how}"] += 1
        return total

    def go(self, num_steps: int) -> list[str]:
        """Runs so many steps; returns what was wrong."""
        weight, failed, collected = self._model.weight, [], 0.0
        for step in range(1, num_steps + 1):
            dense = self._step()
            if -step % self._delta < self._num_collected:
                collected = collected + dense / self._num_collected
            before, values = self._pruner.masks["weight"].clone(), weight.double().abs()
            try:
                steps = self._pruner()
            except RuntimeError as error:
                self.outcomes[f"refused: {error}"[:70]] += 1
                return failed
            if steps:
                self._optimizer.step()
                continue
            found, scores = self._pruner.masks["weight"], collected.abs()
            collected = 0.0
            is_right = follows(values.detach(), scores, before, found)
            is_right &= not weight[~found].any()
            self.outcomes["right" if is_right else "wrong"] += 1
            if not is_right:
                masks = f"{before.int().tolist()} became {found.int().tolist()}"
                failed.append(f"step {step}: {masks} by {scores.tolist()}")
        return failed


def follows(
    values: torch.Tensor, scores: torch.Tensor, before: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Returns whether a mask is RigL's; which of equals it takes does not matter."""
    if scores.max() == scores.min():  # nothing to choose by
        return torch.equal(before, mask)
    num_dropped = int(int(before.sum()) * 0.5)
    active = values.masked_fill(~before, -1)
    least = values[before].sort().values[num_dropped]  # of what is kept
    certain, equal = active > least, (active == least).nonzero()
    num_equal = int(before.sum()) - num_dropped - int(certain.sum())
    # What is dropped may grow again, so the mask need not show what was kept.
    for chosen in itertools.combinations(equal.tolist(), num_equal):
        keep = certain.clone()
        for row, column in chosen:
            keep[row, column] = True
        grown, left = scores[mask & ~keep].sort().values, scores[~keep].sort().values
        expected = left[len(left) - num_dropped :]
        has_kept = bool((mask | ~keep).all()) and grown.shape == expected.shape
        if has_kept and torch.allclose(grown, expected, rtol=1e-4, atol=1e-6):
            return True
    return False


def study(num_runs: int, seed: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """Returns how often what was drawn, the outcomes, and which updates were wrong."""
    drawn, outcomes, failed = Counter[str](), Counter[str](), []
    for number in tqdm(range(num_runs), unit="run"):
        run = Run(random.Random(f"{seed} {number}"))
        failed += [f"run {number}, {each}" for each in run.go(12)]
        drawn, outcomes = drawn + run.drawn, outcomes + run.outcomes
    return drawn, outcomes, failed


def main(argv: list[str] | None = None) -> None:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=100, help="of 12 steps each (default: 100)")
    add("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    add("--quick", action="store_true", help="10 runs")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    drawn, outcomes, failed = study(10 if args.quick else args.runs, args.seed)
    print(f"compared {rigl_xla.__file__}")
    for name, count in [*sorted(drawn.items()), *sorted(outcomes.items())]:
        print(f"{count:6} {name}")
    print(*failed, sep="\n")
    save(args.output, {"seed": args.seed, "drawn": drawn, "outcomes": outcomes})
    sys.exit(1 if outcomes["wrong"] else 0)


if __name__ == "__main__":
    main()
