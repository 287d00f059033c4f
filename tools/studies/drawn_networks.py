"""Draws pairs of networks that train each other, on 1, 2 and 4 replicas.

Two optimizers share a sampler, as of a generator and its discriminator. Drawn are batch
sizes, optimizers, rules, which loss comes first, what keeps the other network's
gradient out, and clipping. Weights on several replicas are compared with those on one,
in float64, and a run is

    right    if they are equal up to rounding,
    refused  if it ends in an error,
    wrong    otherwise: without a word, so that the status is 1.

Takes a minute or more, ten seconds with --quick. Another version is compared by
PYTHONPATH, as here:

    python tools/studies/drawn_networks.py --quick
    PYTHONPATH=/a/checkout python tools/studies/drawn_networks.py --seed 1
"""

from __future__ import annotations

import dataclasses
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after PYTHONPATH

import variable_batch_size as vbs
import xla_replica
from tools.record import parser_with_output, save

NUM_REPLICAS = (2, 4)
TOLERANCE = 1e-10  # of the largest weight; rounding is 1e-15
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-2, eps=1e-4),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn; see the module."""

    trace: tuple[int, ...]
    optimizers: tuple[str, str]
    rules: tuple[str, str]
    judge_first: bool
    kept_out: str
    max_grad_norm: float | None
    seed: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        return cls(
            tuple(draw.choice((16, 20, 24, 32, 48)) for _ in range(5)),
            (draw.choice([*OPTIMIZERS]), draw.choice([*OPTIMIZERS])),
            (draw.choice(("linear", "root")), draw.choice(("linear", "constant"))),
            draw.random() < 0.5,
            draw.choice(("requires_grad_(False)", "backward(inputs=)")),
            draw.choice((None, 0.5)),
            draw.randrange(1000),
        )

    def kinds(self) -> list[str]:
        """Returns what is counted of it."""
        first = "judge" if self.judge_first else "maker"
        clips = "clips" if self.max_grad_norm else "does not clip"
        return [*self.optimizers, *self.rules, f"{first} first", self.kept_out, clips]


def train(rank: int, case: Case) -> list[torch.Tensor]:
    """Trains two epochs; returns the weights of both networks."""
    warnings.simplefilter("ignore")  # of rules that are not for the optimizer
    generator = torch.Generator().manual_seed(case.seed)
    samples = torch.randn(128, 3, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(samples.tanh(), samples.roll(1, 0))
    torch.manual_seed(case.seed)
    maker = nn.Linear(3, 3).double()
    judge = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    sampler = vbs.CustomSampler(
        dataset, case.trace, minibatch_size=4, on_end="cycle", verbose=False
    )
    networks = [judge, maker] if case.judge_first else [maker, judge]
    optimizers = [
        vbs.ElasticOptimizer(
            OPTIMIZERS[name]([*network.parameters()]),
            sampler,
            rule,
            ref_batchsize=16,
            max_grad_norm=case.max_grad_norm,
        )
        for network, name, rule in zip(networks, case.optimizers, case.rules)
    ]

    def go_back(network: nn.Module, real: torch.Tensor, noise: torch.Tensor) -> None:
        other = maker if network is judge else judge
        freezes = case.kept_out == "requires_grad_(False)"
        other.requires_grad_(not freezes)
        fake = maker(noise)
        loss = softplus(-judge(fake)).mean()
        if network is judge:
            loss = (softplus(-judge(real)) + softplus(judge(fake.detach()))).mean()
        loss.backward(inputs=None if freezes else [*network.parameters()])
        other.requires_grad_(True)

    for epoch in range(2):
        for part in (sampler, *optimizers):
            part.set_epoch(epoch)
        for real, noise in DataLoader(dataset, batch_sampler=sampler):
            for network, optimizer in zip(networks, optimizers):
                go_back(network, real, noise)
                optimizer.step()
    return [p.detach() for network in (maker, judge) for p in network.parameters()]


def outcome_of(case: Case) -> tuple[str, float]:
    """Returns right, refused or wrong, and the largest difference of weights."""
    expected = train(0, case)
    largest = max(float(weight.abs().max()) for weight in expected)
    error = 0.0
    for num_replicas in NUM_REPLICAS:
        try:
            found = xla_replica.launch(train, (case,), num_replicas, "cpu")
        except (ValueError, TypeError, RuntimeError) as refusal:
            tqdm.write(f"{case} on {num_replicas}: {str(refusal).splitlines()[-1]}")
            return "refused", 0.0
        for weights in found:
            each = (float((a - b).abs().max()) for a, b in zip(weights, expected))
            error = max(error, *each)
    return ("right" if error <= TOLERANCE * largest else "wrong"), error


def main() -> int:
    parser = parser_with_output(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--quick", action="store_true", help="2 runs")
    arguments = parser.parse_args()
    num_runs = 2 if arguments.quick else arguments.runs
    draw = random.Random(arguments.seed)
    kinds: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for _ in tqdm(range(num_runs), "runs", disable=None):
        case = Case.drawn(draw)
        kinds.update(case.kinds())
        outcome, error = outcome_of(case)
        outcomes[outcome] += 1
        if outcome == "wrong":
            tqdm.write(f"wrong by {error:.1e}: {case}")
    several = " and ".join(map(str, NUM_REPLICAS))
    print(f"compared {vbs.__file__}: weights on {several} replicas and on one:")
    for name, number in [*sorted(kinds.items()), *outcomes.items()]:
        print(f"{number:6} {name}")
    save(arguments.output, {"drawn": dict(kinds), "outcomes": dict(outcomes)})
    return int(outcomes["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
