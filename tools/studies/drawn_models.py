"""Draws models and compares their per-sample gradients with autograd, one by one.

A model is what reads the inputs and up to three layers: of every kind that has a rule,
of computed weights, tied ones, a block scaled by 1e-5 that grows, and layers whose rule
was registered wrong by a tenth. Between capture and norms weights change under no_grad,
offsets of bags end before their input does. Norms, gradients and inner products of each
batch are compared with a loop over the samples in float64, and are

    right    as they should be,
    refused  an error, as a wrong rule must be,
    wrong    anything else: without a word, so that the status is 1.

Takes about two minutes; ten seconds with --quick. Another version is compared by
PYTHONPATH, as here:

    python tools/studies/drawn_models.py --quick
    PYTHONPATH=/a/checkout python tools/studies/drawn_models.py --seed 1
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after PYTHONPATH

import per_sample_grad as psg
from tools.record import parser_with_output, save

WIDTH, ENTRIES = 4, 5  # every layer takes and returns (B, T, WIDTH)
TOLERANCE = 0.02  # of a sample's gradient; far more than rounding
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-9}  # of all gradients together


class Around(nn.Module):
    """Calls a layer by a function ``(layer, x) -> x``."""

    def __init__(self, inner: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


class Computed(nn.Module):
    """Uses parameters that no module with a rule owns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.factor = kind, nn.Parameter(torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.register_buffer("mask", torch.rand(WIDTH, WIDTH) < 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "masked":
                return F.linear(x, self.weight * self.mask, self.factor)
            case "weight norm":
                length = self.weight.norm(dim=1, keepdim=True)
                return F.linear(x, self.weight / length) * self.factor
            case "low rank":
                return x @ (self.weight[:, :2] @ self.weight[:2]) + self.factor
        return x * self.factor + torch.tanh(x @ self.weight)


class Scaled(nn.Module):
    """A block as in CaiT: its weight begins so small that its own gradients are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gamma = inner, nn.Parameter(torch.full((WIDTH,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gamma * self.inner(x)


class Own(nn.Linear):
    """A user's layer, with a rule that is right."""


class Wrong(nn.Linear):
    """Another, with a rule that is a tenth off."""


def own(call: psg.Call, grad: torch.Tensor, times: float = 1.0) -> dict:
    outer = psg.Outer(times * grad.unsqueeze(1), call.input.unsqueeze(1))
    return {"weight": outer, "bias": psg.Dense(grad.sum(1))}


psg.register_rule(Own)(own)
psg.register_rule(Wrong)(lambda call, grad: own(call, grad, 1.1))


def across(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m(x.transpose(1, 2)).transpose(1, 2)


def in_space(rank: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Returns a call of a layer of ``(B, C, *S)``; the first dimension of S is T."""

    def call(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        given = x.transpose(1, 2).reshape(*x.shape[:1], WIDTH, -1, *(1,) * (rank - 1))
        return m(given).flatten(2).transpose(1, 2)

    return call


def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m(x, x, x, need_weights=False)[0]


def layers(draw: random.Random) -> dict[str, Callable[[], nn.Module]]:
    """Returns what makes a layer of each kind."""
    rank, bias, groups = draw.randint(1, 3), draw.random() < 0.7, draw.choice((1, 2))
    kernel, sides = (3, *(1,) * (rank - 1)), (1, *(0,) * (rank - 1))
    options = {"padding": sides, "groups": groups, "bias": bias}
    mode = draw.choice(("zeros", "circular", "replicate"))
    computed = ("masked", "weight norm", "low rank", "plain")

    def spatial(name: str, *args: object, **options: object) -> Callable[[], nn.Module]:
        layer = getattr(nn, name if name in dir(nn) else f"{name}{rank}d")
        return lambda: Around(layer(*args, **options), in_space(rank))

    shrinks = {"affine": True, "track_running_stats": True}
    kinds: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: nn.Linear(WIDTH, WIDTH, bias=bias),
        "Conv": spatial("Conv", WIDTH, WIDTH, kernel, padding_mode=mode, **options),
        "ConvTranspose": spatial("ConvTranspose", WIDTH, WIDTH, kernel, **options),
        "BatchNorm": spatial("BatchNorm", WIDTH),
        "SyncBatchNorm": spatial("SyncBatchNorm", WIDTH),
        "InstanceNorm": spatial("InstanceNorm", WIDTH, **shrinks),
        "GroupNorm": lambda: Around(nn.GroupNorm(groups, WIDTH), across),
        "LayerNorm": lambda: nn.LayerNorm(WIDTH, bias=bias),
        "RMSNorm": lambda: nn.RMSNorm(WIDTH),
        "PReLU": lambda: Around(nn.PReLU(draw.choice((1, WIDTH))), across),
        "Bilinear": lambda: Around(
            nn.Bilinear(WIDTH, WIDTH, WIDTH, bias=bias), lambda m, x: m(x, x)
        ),
        "MultiheadAttention": lambda: Around(
            nn.MultiheadAttention(WIDTH, groups, bias=bias, batch_first=True), attend
        ),
        "tied": lambda: Around(
            nn.Linear(WIDTH, WIDTH), lambda m, x: m(torch.tanh(m(x)))
        ),
        "tied to another's": lambda: Around(
            nn.Linear(WIDTH, WIDTH), lambda m, x: m(x) + F.linear(x, m.weight.T)
        ),
        "rule of one's own": lambda: Own(WIDTH, WIDTH),
        "wrong rule": lambda: Wrong(WIDTH, WIDTH),
        "scaled, wrong rule": lambda: Scaled(Wrong(WIDTH, WIDTH)),
    }
    kinds |= {f"computed, {k}": lambda k=k: Computed(k) for k in computed}
    inner = draw.choice([name for name in kinds if "wrong" not in name])
    kinds["scaled"] = lambda: Scaled(kinds[inner]())
    return kinds


def reading(draw: random.Random) -> tuple[str, nn.Module]:
    """Returns what the first layer reads, and the layer."""
    padding = draw.choice((None, 0))
    mode = draw.choice(("sum", "mean"))
    match draw.choice(("floats", "ids", "bags", "bags with a last offset")):
        case "ids":
            return "ids", nn.Embedding(ENTRIES, WIDTH, padding_idx=padding)
        case "bags":
            return "bags", Around(
                nn.EmbeddingBag(ENTRIES, WIDTH, mode=mode, padding_idx=padding),
                lambda m, x: m(x).unsqueeze(1),
            )
        case "bags with a last offset":
            bags = nn.EmbeddingBag(ENTRIES, WIDTH, mode=mode, include_last_offset=True)
            return "bags with a last offset", Around(
                bags, lambda m, given: m(*given).unsqueeze(1)
            )
    return "floats", nn.Identity()


def inputs(reads: str, draw: random.Random, count: int, length: int) -> tuple:
    """Returns a batch, and what is special about it."""
    if reads == "floats":
        return torch.randn(count, length, WIDTH), "plain"
    if reads != "bags with a last offset":
        return torch.randint(ENTRIES, (count, length)), "plain"
    offsets = [0, *sorted(draw.choices(range(1, 3 * count), k=count - 1)), 3 * count]
    short = draw.random() < 0.5
    if short:
        offsets[-1] = draw.randint(offsets[-2], 3 * count - 1)
    index = torch.randint(ENTRIES, (3 * count,))
    kind = "last offset before the end" if short else "plain"
    return (index, torch.tensor(offsets)), kind


def losses_of(model: nn.Module, x: object) -> torch.Tensor:
    out = model(x).flatten(1)
    return (torch.sin(0.7 * out) * torch.arange(1, out.shape[1] + 1).cos()).sum(1)


def wide_copy(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a copy of a model on the CPU in a dtype, which is the same function.

    An RMSNorm's default epsilon is of the dtype that it computes in: with that of
    float64 gradients of a zero before it are 23,170 times as large as in float32.
    """
    wide = copy.deepcopy(model).cpu()
    computed_in = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    for module in wide.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(computed_in).eps
    return wide.to(dtype)


def truth_of(model: nn.Module, x: object) -> dict[str, torch.Tensor]:
    """Returns every sample's gradients in float64, by the loop that nobody doubts."""
    wide = wide_copy(model)
    given = x.double() if torch.is_tensor(x) and x.is_floating_point() else x
    params = dict(wide.named_parameters())
    losses, asked = losses_of(wide, given), {"retain_graph": True, "allow_unused": True}
    rows = [torch.autograd.grad(one, [*params.values()], **asked,
            materialize_grads=True) for one in losses]  # fmt: skip
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def differs(found: torch.Tensor, truth: torch.Tensor, rounding: float) -> bool:
    error = (found.double() - truth).norm()
    return bool(error > TOLERANCE * truth.norm() + rounding)


def compare(
    model: nn.Module, x: object, draw: random.Random, change: nn.Parameter | None
) -> str:
    """Returns the outcome of one batch; ``change`` grows after its forward pass."""
    truth = truth_of(model, x)
    flat = torch.cat([each.flatten(1) for each in truth.values()], 1)
    vectors = {name: torch.randn(each.shape[1:]) for name, each in truth.items()}
    vector = torch.cat([each.flatten() for each in vectors.values()]).double()
    dtype = next(model.parameters()).dtype
    rounding = ROUNDING[dtype] * float(flat.norm())
    options = {"method": draw.choice(("auto", "factored", "materialized"))}
    streams = draw.random() < 0.5
    try:
        with psg.capture(model, **options) as recorded:
            losses = losses_of(model, x)
        if change is not None:
            with torch.no_grad():
                change.mul_(1.5)
        if streams:
            return "wrong" if differs(
                recorded.norms(losses), flat.norm(dim=1), rounding
            ) else "right"  # fmt: skip
        factors = recorded.backward(losses)
        there = {name: each.to(dtype) for name, each in vectors.items()}
        gradients = factors.materialize()
        pairs = [(gradients[name], each) for name, each in truth.items()]
        pairs.append((factors.norms(), flat.norm(dim=1)))
        wrong = any(differs(*pair, rounding) for pair in pairs)
        # A product may cancel: what is a tenth of its factors' is wrong.
        room = rounding + TOLERANCE * float(flat.norm() * vector.norm())
        wrong |= differs(factors.dot(there), flat @ vector, room)
    except (psg.PerSampleError, RuntimeError) as error:
        return f"refused: {type(error).__name__}"
    return "wrong" if wrong else "right"


def study(num_models: int, seed: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """Returns how often what was drawn, the outcomes, and which models were wrong."""
    drawn, outcomes, failed = Counter[str](), Counter[str](), []
    for number in tqdm(range(num_models), unit="model"):
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(draw.randrange(2**31))
        reads, first = reading(draw)
        kinds = layers(draw)
        chosen = draw.sample([*kinds], draw.randint(1, 3))
        if reads == "floats" and draw.random() < 0.5:  # where no pass needs its weights
            chosen = ["MultiheadAttention", *chosen[1:]]
        model = nn.Sequential(first, *[kinds[name]() for name in chosen]).eval()
        model.to(dtype := draw.choice((torch.float32, torch.float32, torch.float64)))
        drawn.update((f"layer: {n}" for n in chosen), **{f"reads: {reads}": 1})
        drawn[f"dtype: {dtype}"] += 1
        drawn.update({f"module: {type(m).__name__}" for m in model.modules()
                      if [*m.parameters(recurse=False)]})  # fmt: skip
        attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        for batch in range(3):
            x, special = inputs(reads, draw, draw.randint(2, 5), draw.randint(2, 4))
            x = x.to(dtype) if reads == "floats" else x
            if batch:  # training: what was small grows
                with torch.no_grad():
                    for name, param in model.named_parameters():
                        times = 300.0 if name.endswith("gamma") else 1.0
                        param.mul_(times).add_(0.05 * param * torch.randn_like(param))
            change = None
            if attention and draw.random() < 0.5:
                change = attention[0].in_proj_weight
                special = "weights of attention changed"
            outcome = compare(model, x, draw, change)
            is_plain = special == "plain" and not any("wrong" in n for n in chosen)
            if outcome.startswith("refused") and is_plain:
                failed.append(f"model {number}, batch {batch}, {chosen}: {outcome}")
                outcome = "refused where nothing was wrong"
            drawn[f"batch: {special}"] += 1
            outcomes[outcome] += 1
            if outcome == "wrong":
                failed.append(f"model {number}, batch {batch}, {special}: {chosen}")
    return drawn, outcomes, failed


def main(argv: list[str] | None = None) -> None:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--models", type=int, default=300, help="of 3 batches each (default: 300)")
    add("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    add("--quick", action="store_true", help="30 models")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    drawn, outcomes, failed = study(30 if args.quick else args.models, args.seed)
    print(f"compared {psg.__file__}")
    for name, count in [*sorted(drawn.items()), *sorted(outcomes.items())]:
        print(f"{count:6} {name}")
    print(*failed, sep="\n")
    save(args.output, {"seed": args.seed, "drawn": drawn, "outcomes": outcomes})
    sys.exit(1 if outcomes["wrong"] else 0)


if __name__ == "__main__":
    main()
