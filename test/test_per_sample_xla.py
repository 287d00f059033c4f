"""Per-sample gradients on lazy tensors: right, compiled once, fetched once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.per_sample import oracle
from support.per_sample_cases import CASES, transformer_block
from support.replicas import Backend, needs_xla
from test_per_sample_family import agree
from torch import nn

import per_sample_grad as psg
import xla_replica

pytestmark = [
    needs_xla,
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore:Using padding='same' with even"),
]

SOME = [
    "linear-3d", "conv2d-groups", "conv2d-reflect", "transposed2d-groups",
    "embedding-padding", "batch-norm-2d", "time-first-in-part",
    "linear-twice", "inplace-relu-tokens", "encoder-layer", "cnn",
]  # fmt: skip
ALL = [case.name for case in CASES]
LONG = 900.0
BACKEND = Backend("xla", 1)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """On the device, with the ties that ``.to`` breaks."""
    first: dict[int, str] = {}
    ties = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in first:
            ties.append((name, first[id(param)]))
        first.setdefault(id(param), name)
    model = model.to(device)
    for name, origin in ties:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(origin))
    return model


class Fetched:
    """A `Factors` whose answers are fetched one by one, for `agree`."""

    def __init__(self, factors: psg.Factors, device: torch.device) -> None:
        self.factors, self.device = factors, device

    def __getattr__(self, name: str):
        def answer(*args, **kwargs):
            args = [self._send(arg) for arg in args]
            return self._fetch(getattr(self.factors, name)(*args, **kwargs))

        return answer

    def _send(self, value):
        if isinstance(value, Fetched):
            return value.factors
        if isinstance(value, dict):
            return {key: item.to(self.device) for key, item in value.items()}
        return value.to(self.device)

    def _fetch(self, value):
        replica = xla_replica.current()
        if isinstance(value, dict):
            return dict(zip(value, replica.fetch(list(value.values()))))
        return replica.fetch([value])[0]


def compared(rank: int, names: list[str]) -> list[str]:
    """What went wrong, in every row."""
    replica = xla_replica.current()
    wrong = []
    for case in CASES:
        if case.name not in names:
            continue
        model, inputs = case.make(torch.float32)
        truth = oracle(case, model, inputs)  # `.to` unties what is tied
        moved(model, replica.device)
        with xla_replica.count() as counts:
            with psg.capture(model, **case.options) as recorded:
                losses = case.loss(model, *replica.send(inputs))
            factors = recorded.backward(losses)
            replica.wait()
            try:
                agree(case, Fetched(factors, replica.device), truth, 2e-5)
            except AssertionError as error:
                wrong.append(f"{case.name}: {error}")
        if counts.fallbacks:
            wrong.append(f"{case.name}: {counts.fallbacks}")
    return wrong


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_answer_equals_the_loop(names):
    assert BACKEND.run(compared, names, timeout=LONG) == [[]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, 8, 8), torch.randint(0, 3, (batch,))


def vectors(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 6), torch.randint(0, 3, (batch,))


def text(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 11, (batch, 5)), torch.randint(0, 11, (batch, 5))


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(out.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view(len(target), -1).mean(1)


MODELS = {
    "mlp": (mlp, vectors),
    "cnn": (cnn, images),
    "text": (transformer_block, text),
}


def counted(rank: int, name: str) -> tuple[int, int, dict[str, int]]:
    """Compilations, transfers and fallbacks of 20 steps after the first."""
    replica = xla_replica.current()
    build, draw = MODELS[name]
    with replica.seeded(0):
        model = build().to(replica.device)

    def step() -> list[torch.Tensor]:
        x, y = replica.send(draw(4))
        with psg.capture(model) as recorded:
            losses = loss_of(model(x), y)
        factors = recorded.backward(losses)
        direction = factors.weighted_sum(torch.ones(4, device=replica.device))
        answers = [
            factors.norms(),
            factors.gram(),
            factors.dot(direction),
            factors.sketch(8),
        ]
        del recorded, losses, factors, direction
        return replica.fetch(answers)

    step()  # compared with autograd
    with xla_replica.count() as counts:
        for _ in range(20):
            norms, gram, _, _ = step()
            torch.testing.assert_close(gram.diagonal(), norms**2, rtol=1e-4, atol=1e-5)
    return counts.compilations, counts.transfers, counts.fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_new_data_compile_one_program_and_answers_take_one_transfer(name):
    ((compilations, transfers, fallbacks),) = BACKEND.run(counted, name, timeout=LONG)
    assert compilations <= 1  # none if the first step ran the same program
    assert transfers == 20
    assert not fallbacks
