"""What the table says of an operation is what changing one sample shows.

For every dimension of an output in turn: if the table says where the inputs have their
samples then, another sample's numbers must not move this one's. The operations, and
what they are given, are those of torch's own tests.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.xla_replica.replicas import of_torch_alone
from torch.testing._internal.common_methods_invocations import op_db

from per_sample_grad.operations import layouts
from xla_replica.common.trees import map_tensors, tensors_in

N = 4
COLUMNS = torch.tensor([1, 0, 3, 3])
# Whose samples are large, or of which nothing is known.
SLOW = ("grid_sampler_3d", "max_unpool", "scaled_dot_product_attention")
OPS = [
    op for op in op_db
    if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")
    and not any(name in op.name for name in SLOW)
]  # fmt: skip
NUM_PARTS = 8


def said(output: torch.Tensor, dim: int, num_samples: int) -> layouts.Layout | None:
    node = output.grad_fn
    shapes = tuple(
        None if below is None else tuple(below._input_metadata[number].shape)
        for below, number in node.next_functions
    )
    found = layouts.LayoutQuery(
        node, tuple(output.shape), dim, shapes, num_samples, may_read=True
    )
    return found.layout()


def samples_of(
    output: torch.Tensor, inputs: list, dim: int, num_samples: int
) -> list[int | None]:
    """Returns where leaves have their samples, through all nodes; None: unknown."""
    stack, found = [(output.grad_fn, output, dim)], {}
    while stack:
        node, tensor, at = stack.pop()
        if hasattr(node, "variable"):
            found.setdefault(id(node.variable), set()).add(at)
            continue
        below = None if at is None else said(tensor, at, num_samples)
        for i, (each, number) in enumerate(node.next_functions):
            if each is None:
                continue
            shape = each._input_metadata[number].shape
            inner = types.SimpleNamespace(grad_fn=each, shape=shape)
            stack.append((each, inner, None if below is None else below[i]))
    places = [found.get(id(each), {None}) for each in inputs]
    return [each.pop() if len(each) == 1 else None for each in places]


def moves_others(function: Callable, given: Any) -> tuple[list[str], int]:
    """Returns where another sample moves one that it should not; and how much is known.

    Samples are single rows, or a few consecutive ones.
    """
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
                    moved.unflatten(at, (count, -1)).select(at, count - 1).mul_(0.9)
                    changed = map_tensors(
                        given, lambda x, of=leaf, to=moved: to if x is of else x
                    )
                    others = [
                        each.detach().unflatten(dim, (count, -1))
                        .narrow(dim, 0, count - 1)
                        for each in (outputs(changed)[place], output)
                    ]  # fmt: skip
                    if not torch.allclose(*others, 1e-9, 1e-9, equal_nan=True):
                        wrong.append(f"{dim} of {tuple(output.shape)}, {count=} {at=}")
    return wrong, number


@of_torch_alone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_another_sample_moves_nothing(part):
    total = 0
    for op in OPS[part::NUM_PARTS]:
        torch.manual_seed(0)
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
        for sample in samples[:: -(-len(samples) // 10) or 1]:
            wrong, number = moves_others(
                lambda x, args, options, op=op: op.op(x, *args, **options),
                (sample.input, sample.args, sample.kwargs),
            )
            assert not wrong, (op.name, sample.args, sample.kwargs)
            total += number
    assert total > 200


def test_rows_are_names_of_nodes():
    nodes = set(dir(torch._C._functions))
    newer = {"AminmaxBackward0", "NarrowCopyBackward0"}  # than torch 2.9
    assert not layouts.LAYOUTS.keys() - nodes - newer
