"""A use of parameters outside known modules, as an operation in which samples meet it.

What is computed from parameters alone, such as a table of positions, a normalised
weight or ``1 + weight``, does not depend on samples. It meets samples in an operation
that broadcasts it over them, looks rows up in it or multiplies with it. There the
gradient still has rows for each sample, and the operation's row in the `table` says
what each contributes. From there the contribution goes down to the parameters (see
`computed`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers.registry import Call, Owned
from per_sample_grad.operations.computed import take_down
from per_sample_grad.operations.layouts import Rows
from per_sample_grad.operations.nodes import saved_names
from per_sample_grad.operations.table import operation_of
from xla_replica.common.trees import tensors_in


@dataclasses.dataclass(frozen=True)
class OperationCall(Call):
    """An operation as a `Call`, which `by_operation` is the rule of.

    Attributes:
        node: The operation.
        rows: Where its output has the samples.
        params: By input, the parameters that it may be computed from, by name.
        num_samples: B.
    """

    node: Node
    rows: Rows
    params: Mapping[int, Mapping[str, nn.Parameter]]
    num_samples: int

    @property
    def runs_nodes(self) -> bool:  # type: ignore[override]
        """Whether the rule runs the node itself."""
        operation = operation_of(self.node)
        return operation is not None and operation.runs


def by_operation(call: Call, grad: torch.Tensor) -> dict[str, list[Contribution]]:
    """Returns what an operation contributes to parameters, as a layer rule does."""
    assert isinstance(call, OperationCall)
    parts: dict[str, list[Contribution]] = defaultdict(list)
    operation = operation_of(call.node)
    assert operation is not None
    assert operation.contribution is not None
    for slot, params in call.params.items():
        found = operation.contribution(call.node, slot, grad, call.batch_dim)
        found = _by_sample(forms.widened(found), call.rows.before, call.num_samples)
        below, number = call.node.next_functions[slot]
        assert below is not None
        for name, each in take_down(GradientEdge(below, number), found, params).items():
            parts[name].append(each)
    return dict(parts)


def _by_sample(found: Contribution, before: int, num_samples: int) -> Contribution:
    """Returns it by sample, whose rows follow one another ``before`` times."""
    if before != 1:
        fields = vars(found).items()
        rows = {n: each for n, each in fields if isinstance(each, torch.Tensor)}
        turned = {
            name: each.unflatten(0, (before, -1)).transpose(0, 1).flatten(0, 1)
            for name, each in rows.items()
        }
        found = dataclasses.replace(found, **turned)
    return forms.regroup(found, num_samples)


def is_own(node: Node, known: Owned) -> bool:
    """Returns whether all that an operation has saved is what the model owns."""
    saved = [getattr(node, name) for name in saved_names(type(node))]
    return all(each in known for each in tensors_in(saved))


def is_known(node: Node, known: Owned) -> bool:
    """Returns whether what an operation has saved can be told from samples.

    That are single numbers, integers, and what the model owns. What has a graph is
    looked at elsewhere, and what the operation has computed depends on nothing else
    than what it took.
    """
    names = saved_names(type(node))
    saved = (getattr(node, n) for n in names if not n.startswith("_saved_result"))
    return all(
        each.numel() == 1
        or each.requires_grad
        or not each.is_floating_point()
        or each in known
        for each in saved
        if isinstance(each, torch.Tensor)
    )
