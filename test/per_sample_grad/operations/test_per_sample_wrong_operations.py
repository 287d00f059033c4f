"""Operations whose gradient is wrong on XLA are known, and corrected or refused."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from support.documents import read
from support.per_sample_grad.gradient_oracle import Case, error, flat, fold, oracle
from support.per_sample_grad.layer_cases import Apply
from support.per_sample_grad.torch_operations import (
    INPLACE,
    SHAPE,
    WIDTH,
    Operation,
    activations,
    losses,
)
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn
from torch.nn.modules import activation

import per_sample_grad as psg
import xla_replica
from per_sample_grad.operations.wrong_operations import WRONG

BACKEND = Backend("xla", 1)
FORMULAS = [
    *(nn.ELU(alpha) for alpha in (1.0, 0.7)),
    *(nn.CELU(alpha) for alpha in (1.0, 0.7)),
    nn.SELU(),
]


def answers(operation: Operation, device: torch.device) -> list[torch.Tensor]:
    """Returns a loss, and its gradients for input and parameters of a small model."""
    with xla_replica.seeded(0):
        first, module = nn.Linear(WIDTH, WIDTH), operation.build().eval()
        x = torch.randn(SHAPE).to(device).requires_grad_()
    with torch.no_grad():
        first.weight.mul_(3)
    first, module = first.to(device), module.to(device)
    value = operation.loss(module, first(x))
    inputs = [x, *first.parameters(), *module.parameters()]
    return [value.detach(), *xla_replica.grad(value, inputs)]


def differing(rank: int) -> tuple[list[str], int]:
    """Returns which operations' values or gradients differ from a CPU's."""
    replica = xla_replica.current()
    operations = [*activations(), *losses()]
    answered = [answers(each, replica.device) for each in operations]
    fetched = iter(replica.fetch([tensor for each in answered for tensor in each]))
    wrong = []
    for operation in operations:
        truth = answers(operation, torch.device("cpu"))
        found = [next(fetched) for _ in truth]
        # A gradient that cancels to nothing is rounding.
        size = torch.cat([gradient.flatten() for gradient in truth[1:]]).norm()
        off = [error(found[0], truth[0].double())]
        off += [error(a, b.double(), 1e6 * size) for a, b in zip(found[1:], truth[1:])]
        if not max(off) < 1e-4:
            wrong.append(operation.name)
    return wrong, len(operations)


@needs_xla
@pytest.mark.xla
@pytest.mark.slow
def test_every_other_activation_and_loss_of_torch_is_right():
    """All are compared, so that one that is wrong and not in the table is found."""
    ((wrong, number),) = BACKEND.run(differing, timeout=600.0)
    assert number > 100
    known = [
        each.name
        for each in activations()
        if getattr(nn, each.name.split("(")[0]) in WRONG and "inplace" not in each.name
    ]
    assert wrong == known


def test_every_activation_that_can_be_in_place_is_compared_in_place():
    kinds = (getattr(nn, name) for name in activation.__all__)
    found = {k.__name__ for k in kinds if "inplace" in inspect.signature(k).parameters}
    assert found == INPLACE


@pytest.mark.parametrize("module", FORMULAS, ids=str)
def test_the_formulas_in_their_place_are_the_same_functions(module):
    x = torch.tensor([-torch.inf, -1e3, -2, -0.1, -0.0, 0.0, 0.1, 3, 1e3, 1e30])
    x = x.double().requires_grad_()
    row = WRONG[type(module)]
    written = eval(row.replacement, {"torch": torch, "x": x, **vars(module)})
    for found in (row.formula(module, x), written):
        truth = module(x)
        torch.testing.assert_close(found, truth)
        (grad,) = torch.autograd.grad(found.sum(), x)
        (expected,) = torch.autograd.grad(truth.sum(), x)
        torch.testing.assert_close(grad, expected)


def test_the_page_lists_them():
    page = read("docs/per_sample_grad.md")
    for kind, row in WRONG.items():
        assert f"| `{kind.__name__}` | {row.fault} | `{row.replacement}` |" in page


def functional(name: str) -> nn.Module:
    return Apply(lambda m, x: m.b(getattr(F, name)(m.a(x))), a=nn.Linear(6, 6),
                 b=nn.Linear(6, 3))  # fmt: skip


def captured(rank: int) -> list[str]:
    """Captures models with these operations, in every form; returns what is wrong."""
    replica = xla_replica.current()
    found = []
    for module in [*FORMULAS, nn.ELU(0.7, True), nn.CELU(0.7, True), nn.SELU(True)]:
        case = Case(
            str(module),
            lambda module=module: nn.Sequential(
                nn.Linear(6, 6), module, nn.Linear(6, 3)
            ),
            (5, 6),
        )
        model, inputs = case.make(torch.float32)
        truth = flat(oracle(case, model, inputs)).norm(dim=1)
        model.to(replica.device)
        norms = psg.per_sample_grad_norms(model, fold, replica.send(inputs))
        if error(replica.fetch([norms])[0], truth) > 2e-5:
            found.append(str(module))
    for kind in WRONG:
        name = kind.__name__.lower()
        model = functional(name).to(replica.device)
        for check in ("first", "never"):
            try:
                psg.per_sample_grad_norms(
                    model, fold, replica.send((torch.randn(3, 6),)), check=check
                )
                found.append(f"{name} is not refused")
            except psg.PerSampleError as refusal:
                if WRONG[kind].replacement not in str(refusal):
                    found.append(str(refusal))
    return found


@needs_xla
@pytest.mark.xla
def test_modules_are_corrected_in_a_capture_and_functions_refused():
    assert BACKEND.run(captured, timeout=300.0) == [[]]


def test_nothing_is_replaced_on_a_cpu():
    model = functional("elu")
    copied, x = copy.deepcopy(model), torch.randn(4, 6)
    psg.per_sample_grad_norms(model, fold, (x,))
    assert torch.equal(model(x), copied(x))
