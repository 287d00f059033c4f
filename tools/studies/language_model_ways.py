"""The language model, the text and the ways of `language_model_study.py`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from examples.ordering import text_data
from examples.ordering.language_model import ByteGPT
from tools.record import ROOT
from variable_batch_size.trace_tools import decay, make

# The text is the repository's at this commit, and has this SHA-256.
COMMIT = "eb16da9c83288f9df519033fb49ddd3bf0626b3e"
DIGEST = "ada423047b9cf2550e7aaf4310d88ddba44a7645339517ab33d3b37b14dcb7f6"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a run is made of; whatever is counted in samples is in windows."""

    context: int = 128
    width: int = 320
    num_layers: int = 4
    num_heads: int = 5
    samples: int = 4096
    minibatch: int = 4
    reference: int = 8
    larger: int = 32
    most: int = 64  # Seesaw's
    warm_up: int = 256
    machines: int = 8
    lr: float = 0.0005
    sgd_lr: float = 0.1
    tested: int = 384  # held-out windows at the end, and after every eighth
    tested_often: int = 64
    quick: bool = False  # the text is the working tree's


QUICK = Sizes(16, 16, 1, 2, 128, warm_up=16, tested=32, tested_often=8, quick=True)


def fixed(sizes: Sizes, seed: int) -> Any:
    return [sizes.reference]


def larger(sizes: Sizes, seed: int) -> Any:
    return [sizes.larger]


def ramp(sizes: Sizes, seed: int) -> Any:
    first, last = sizes.reference, sizes.larger
    steps = round(2 * sizes.samples / (first + last))
    made = make("ramp", steps=steps, first=first, last=last, multiple_of=first)
    return made["batchsize"]


def seesaw(sizes: Sizes, seed: int) -> Any:
    limits = {"total_samples": sizes.samples, "warm_up_samples": sizes.warm_up}
    return make("seesaw", first=sizes.reference, most=sizes.most, **limits)["batchsize"]


def market(sizes: Sizes, seed: int) -> Any:
    """Returns the steps of a spot market, with batch sizes and devices."""
    most = {"devices": sizes.machines, "samples_per_device": sizes.minibatch}
    steps = sizes.samples // sizes.minibatch
    return make("spot-market", steps=steps, **most, lost=0.02, returned=0.05, seed=seed)


def spot(sizes: Sizes, seed: int) -> Any:
    return market(sizes, seed)["batchsize"]


class Way(NamedTuple):
    """How batch size and learning rate follow the samples.

    Attributes:
        batch_sizes: Returns those of the steps, of which the last one is held.
        rule: How the learning rate follows the batch; see `vbs.RULES`.
        base, control: The small and the large constant batch of the same optimizer.
        halved: Whether the learning rate halves where the cosine has halved.
        is_spot: Whether replicas are those of the market, and sums exact.
    """

    batch_sizes: Callable[[Sizes, int], Any]
    rule: str = "constant"
    base: str = "constant"
    control: str = "larger"
    halved: bool = False
    is_spot: bool = False


WAYS = {
    "constant": Way(fixed),
    "larger": Way(larger, "root"),
    "ramp": Way(ramp, "root"),
    "seesaw": Way(seesaw, "root", halved=True),
    "spot": Way(spot, "root", is_spot=True),
    "sgd": Way(fixed, "constant", "sgd", "sgd larger"),
    "sgd larger": Way(larger, "linear", "sgd", "sgd larger"),
    "adascale": Way(larger, "adascale", "sgd", "sgd larger"),
}


def cut(batch_sizes: Any, total: int) -> list[int]:
    """Returns the steps up to so many samples; the last one takes what is left."""
    steps = np.pad(np.asarray(batch_sizes), (0, total), mode="edge")
    steps = np.diff(np.minimum(np.cumsum(steps), total), prepend=0)
    return steps[steps > 0].tolist()


@functools.cache
def windows(sizes: Sizes) -> list[torch.Tensor]:
    """Returns the windows to train on and those that are held out, by files.

    Each has one byte more than the context.

    Raises:
        ValueError: The text is not the one of the study.
    """
    if sizes.quick:
        paths = map(Path, text_data.choose(None, None, "", 0))
        files = {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}
    else:
        command = ["git", "archive", COMMIT]
        packed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            named = [each for each in archive if each.name.endswith((".py", ".md"))]
            files = {each.name: archive.extractfile(each).read() for each in named}
    halves = [bytearray(), bytearray()]
    for path in sorted(files):
        number = int(hashlib.sha256(path.encode()).hexdigest(), 16)
        halves[number % 10 == 0] += files[path]
    found = hashlib.sha256(b"".join(halves)).hexdigest()
    if not sizes.quick and found != DIGEST:
        raise ValueError(f"the text of {COMMIT} has the SHA-256 {found}, not {DIGEST}")
    texts = [torch.frombuffer(half, dtype=torch.uint8) for half in halves]
    return [text.unfold(0, sizes.context + 1, sizes.context) for text in texts]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    scores = model(rows[:, :-1]).flatten(0, 1)
    return F.cross_entropy(scores.float(), rows[:, 1:].flatten().long())


@torch.no_grad()
def held_out_loss(model: nn.Module, sizes: Sizes, number: int) -> float:
    """Returns the mean loss of so many held-out windows, spread evenly."""
    _, rows = windows(sizes)
    rows = rows[np.linspace(0, len(rows) - 1, number).astype(int)]
    return float(np.mean([loss_of(model, part).item() for part in rows.split(8)]))


def digest(model: nn.Module) -> str:
    """Returns a hash of all bits of the weights."""
    content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(content).hexdigest()


def train(
    name: str,
    seed: int,
    sizes: Sizes,
    trace: Any,
    prepare: Any,
    is_exact: bool | None = None,
    bfloat16: bool = True,
    **options: Any,
) -> nn.Module:
    """Trains on every window once; returns the model.

    ``prepare`` is given model and optimizer, to attach what looks at the run; options
    are those of `vbs.epochs`. ``is_exact`` says whether sums are, by default those of a
    market alone, and ``bfloat16`` whether products are in it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shape = sizes.context, sizes.width, sizes.num_layers, sizes.num_heads
    way, model = WAYS[name], ByteGPT(*shape, tied=True)
    rows, _ = windows(sizes)
    random = torch.Generator().manual_seed(seed)
    rows = rows[torch.randperm(len(rows), generator=random)[: sizes.samples]]
    sampler = vbs.CustomSampler(
        rows, trace, seed, minibatch_size=sizes.minibatch, verbose=False
    )
    inner: Any = torch.optim.AdamW(model.parameters(), sizes.lr)
    if way.base == "sgd":
        inner = torch.optim.SGD(model.parameters(), sizes.sgd_lr, momentum=0.9)
    optimizer = vbs.ElasticOptimizer(
        inner, sampler, way.rule, sizes.reference, max_grad_norm=1.0,
        noise=way.rule in ("constant", "adascale"),
        exact=model if (way.is_spot if is_exact is None else is_exact) else None,
    )  # fmt: skip
    rates = decay("cosine", sizes.samples, sizes.warm_up)
    rates = rates.halved() if way.halved else rates
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: float(rates.factor(np.array(n * sizes.minibatch)))
    )
    optimizer.attach(scheduler, unit="samples", every=sizes.minibatch)
    prepare(model, optimizer)
    loader = DataLoader(rows, batch_sampler=sampler)
    options |= {"model": model, "progress": False}
    for epoch in vbs.epochs(optimizer, loader, 1, **options):
        for batch in epoch:
            with torch.autocast("cpu", torch.bfloat16, bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
    return model


def result_of(name: str, seed: int, sizes: Sizes, trace: Any = None) -> dict[str, Any]:
    """Trains once; returns losses, steps and the weights' hash."""
    if trace is None:
        trace = cut(WAYS[name].batch_sizes(sizes, seed), sizes.samples)
    used, eighth = np.cumsum([0, *trace]), sum(trace) / 8
    curve: list[dict[str, float]] = []
    noise: dict[str, float] = {}

    def prepare(model: nn.Module, optimizer: vbs.ElasticOptimizer) -> None:
        def look(update: vbs.Update) -> None:
            before, after = used[update.step : update.step + 2].tolist()
            if before // eighth < after // eighth:
                loss = held_out_loss(model, sizes, sizes.tested_often)
                point = {"updates": update.step + 1, "samples": after, "loss": loss}
                curve.append(point)
                if optimizer.noise:
                    noise.update(optimizer.noise.measure()._asdict())

        optimizer.attach(look)

    model = train(name, seed, sizes, trace, prepare)
    final = held_out_loss(model, sizes, sizes.tested)
    return {"way": name, "final_loss": final, "curve": curve, "noise": noise,
            "batch_sizes": trace, "digest": digest(model)}  # fmt: skip
