"""What tables say of operations is true of torch's own samples for them.

Where a table says which inputs are of another sample, they move nothing, whatever
dimension of an output has the samples. What is wrong on XLA is corrected or refused.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.documents import read
from support.per_sample_grad import Case, error, fold
from support.per_sample_grad.models import Apply
from support.xla_replica.replicas import Backend, of_torch_alone, on_xla
from torch import nn
from torch.nn.modules import activation

import per_sample_grad as psg
import xla_replica
from per_sample_grad.operations import table
from per_sample_grad.operations.layouts import Rows
from per_sample_grad.operations.wrong_operations import WRONG
from xla_replica.common.trees import map_tensors, tensors_in

# Whose samples are large, or of which nothing is known.
SLOW = ("grid_sampler_3d", "max_unpool", "scaled_dot_product_attention")
NUM_PARTS = 8


def all_of_torch() -> list[Any]:
    """Returns torch's descriptions of its operations, which import for seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def samples_of(
    output: torch.Tensor, inputs: list, dim: int, num_samples: int
) -> list[Rows | None]:
    """Returns where leaves have their samples, through all nodes; None: unknown."""
    stack, found = [(output.grad_fn, output.output_nr, Rows(dim))], {}
    while stack:
        node, number, at = stack.pop()
        if hasattr(node, "variable"):
            found.setdefault(id(node.variable), set()).add(at)
            continue
        below = at and table.layout_of(node, number, at, num_samples, True)
        for i, (each, source) in enumerate(node.next_functions):
            if each is not None:
                stack.append((each, source, below and below[i]))
    places = [found.get(id(each), {None}) for each in inputs]
    return [each.pop() if len(each) == 1 else None for each in places]


def moves_others(function: Callable, given: Any) -> tuple[list[str], int]:
    """Returns where another sample moves one that it should not; how much is known."""
    wrong, number = [], 0
    leaves = [x for x in tensors_in(given) if x.requires_grad]

    def outputs(given: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return tensors_in(function(*given))

    for place, output in enumerate(outputs(given)[:3]):
        if output.grad_fn is None:
            continue
        for dim, rows in enumerate(output.shape):
            for count in [n for n in range(2, rows + 1) if rows % n == 0][-2:]:
                for leaf, at in zip(leaves, samples_of(output, leaves, dim, count)):
                    if at is None:
                        continue
                    number += 1
                    moved = leaf.detach().clone()
                    axis, before = at
                    rows = moved.unflatten(axis, (before, count, -1))
                    rows.select(axis + 1, count - 1).mul_(0.9)
                    changed = map_tensors(
                        given, lambda x, of=leaf, to=moved: to if x is of else x
                    )
                    others = [
                        each.unflatten(dim, (count, -1)).narrow(dim, 0, count - 1)
                        for each in (outputs(changed)[place], output)
                    ]
                    if not torch.allclose(*others, 1e-9, 1e-9, equal_nan=True):
                        wrong.append(f"{dim} of {tuple(output.shape)}, {count=} {at=}")
    return wrong, number


@of_torch_alone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("most", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_another_sample_moves_nothing(part, most):
    total = 0
    every = [
        op for op in all_of_torch()
        if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")
        and not any(name in op.name for name in SLOW)
    ]  # fmt: skip
    for op in every[part::NUM_PARTS]:
        torch.manual_seed(0)
        # ``op.sample_inputs`` would search all modules for its test.
        samples = list(op.sample_inputs_func(op, "cpu", torch.float64, True))
        for sample in samples[:: -(-len(samples) // most) or 1]:
            wrong, number = moves_others(
                lambda x, args, options, op=op: op.op(x, *args, **options),
                (sample.input, sample.args, sample.kwargs),
            )
            assert not wrong, (op.name, sample.args, sample.kwargs)
            total += number
    assert total > 100


def test_rows_are_names_of_nodes():
    nodes = set(dir(torch._C._functions))
    newer = {"AminmaxBackward0", "NarrowCopyBackward0"}  # than torch 2.9
    assert not table.OPERATIONS.keys() - nodes - newer


# --- operations that are wrong on XLA -----------------------------------------------

BACKEND = Backend("xla", 1)


def operations() -> Iterator[tuple[str, Callable[..., torch.Tensor], Any]]:
    """Yields some of torch's own samples for every activation and loss."""
    kinds = {name.lower() for name in activation.__all__}
    for op in all_of_torch():
        name = op.name.removeprefix("nn.functional.")
        is_loss = any(word in name for word in ("loss", "cross_entropy", "kl_div"))
        if "." in name or not (is_loss or name.replace("_", "") in kinds):
            continue
        every = op.sample_inputs_func(op, "cpu", torch.float32, True)
        for sample in itertools.islice(every, 8):
            rank = sample.input.dim()
            crashes = rank == 0 or (name, rank) == ("nll_loss", 1)  # torch_xla 2.9
            if not (crashes or sample.kwargs.get("training")):
                yield name, op.op, sample
                if op.inplace_variant is not None:
                    yield f"{name} in place", op.inplace_variant, sample


def answers(
    function: Callable[..., torch.Tensor], sample: Any, device: torch.device
) -> list[torch.Tensor]:
    """Returns a value, and the gradients of a function of all its numbers."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device).requires_grad_(x.requires_grad)

    given = map_tensors((sample.input, sample.args, sample.kwargs), moved)
    leaves = [x for x in tensors_in(given) if x.requires_grad]
    x, args, kwargs = given
    value = function(x * 1, *args, **kwargs)  # no leaf, so that it may be changed
    coefficients = torch.cos(torch.arange(float(value.numel()))).view(value.shape)
    total, options = (value * coefficients.to(device)).sum(), {"allow_unused": True}
    gradients = xla_replica.grad(total, leaves, **options, materialize_grads=True)
    return [value.detach(), *gradients]


def differing(rank: int) -> tuple[set[str], int]:
    """Returns which operations' values or gradients differ from a CPU's."""
    replica = xla_replica.current()
    every = [*operations()]
    answered = [answers(*each, replica.device) for _, *each in every]
    fetched = iter(replica.fetch([tensor for each in answered for tensor in each]))
    wrong = set()
    for name, *each in every:
        truth = answers(*each, torch.device("cpu"))
        found = [next(fetched) for _ in truth]
        # A gradient that cancels to nothing is rounding.
        size = torch.cat([gradient.flatten() for gradient in truth[1:]]).norm()
        off = [error(found[0], truth[0].double())]
        off += [error(a, b.double(), 1e6 * size) for a, b in zip(found[1:], truth[1:])]
        if not max(off) < 1e-4:
            wrong.add(name)
    return wrong, len({name for name, *_ in every})


@on_xla
@pytest.mark.slow
def test_every_other_activation_and_loss_of_torch_is_right():
    """All are compared, so that one that is wrong and not in the table is found."""
    ((wrong, number),) = BACKEND.run(differing, timeout=600.0)
    assert number > 55
    assert wrong == {each.name for each in WRONG}


@pytest.mark.parametrize(
    "module", [nn.ELU(), nn.ELU(0.7), nn.CELU(), nn.CELU(0.7), nn.SELU()], ids=str
)
def test_the_formulas_in_their_place_are_the_same_functions(module):
    x = torch.tensor([-torch.inf, -1e3, -2, -0.1, -0.0, 0.0, 0.1, 3, 1e3, 1e30])
    x = x.double().requires_grad_()
    (row,) = (each for each in WRONG if each.name == type(module).__name__.lower())
    found = eval(row.replacement, {"torch": torch, "x": x, **vars(module)})
    truth = module(x)
    torch.testing.assert_close(found, truth)
    (grad,) = torch.autograd.grad(found.sum(), x)
    (expected,) = torch.autograd.grad(truth.sum(), x)
    torch.testing.assert_close(grad, expected)


def test_the_page_lists_them():
    page = read("docs/per_sample_grad.md")
    for row in WRONG:
        assert f"| `{row.name}` | {row.fault} | `{row.replacement}` |" in page


def capture_all(rank: int) -> None:
    replica = xla_replica.current()
    for module in (nn.ELU(0.7, True), nn.CELU(0.7, True), nn.SELU(True)):
        case = Case("", lambda module=module: nn.Sequential(
            nn.Linear(6, 6), module, nn.Linear(6, 3)), (5, 6))  # fmt: skip
        model, inputs = case.make(torch.float32)
        truth = case.norms(model, inputs)
        model.to(replica.device)
        norms = psg.per_sample_grad_norms(model, fold, replica.send(inputs))
        assert error(replica.fetch([norms])[0], truth) <= 2e-5, module
    for wrong in WRONG:
        function = getattr(nn.functional, wrong.name)
        model = Apply(lambda m, x, f=function: m.b(f(m.a(x))), a=nn.Linear(6, 6),
                      b=nn.Linear(6, 3)).to(replica.device)  # fmt: skip
        inputs = replica.send((torch.randn(3, 6),))
        for check in ("first", "never"):
            with pytest.raises(psg.PerSampleError, match=re.escape(wrong.replacement)):
                psg.per_sample_grad_norms(model, fold, inputs, check=check)


@on_xla
def test_those_in_place_are_right_and_others_refused():
    BACKEND.run(capture_all, timeout=300.0)
