"""Calls for parameters that are used outside of modules with rules."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from per_sample_grad.engine import graph
from per_sample_grad.engine.recording import RecordedCall, RecordedModule
from per_sample_grad.operations import rules, uses
from per_sample_grad.operations.products import Rows
from per_sample_grad.operations.uses import OperationCall, OperationUse


class Substitute(NamedTuple):
    """What accounts for parameters in place of a call of a module with a rule.

    Attributes:
        owner: As that of a recorded call.
        among: What ``source`` is: a node with a rule, or a function or a module that
            runs once more.
        source: The node, `FunctionCall` or `EnclosingCall`.
        inputs: The names of parameters, by the input that is computed from them.
        rows: Which rows of a node that is a product belong to which sample.
    """

    owner: RecordedModule
    among: Literal["nodes", "functions", "modules"]
    source: Any
    inputs: Mapping[int, tuple[str, ...]]
    rows: Rows | None = None


def operations(
    model: nn.Module,
    losses: torch.Tensor,
    reached: graph.Reached,
    params: Mapping[str, nn.Parameter],
    without_batch: Sequence[graph.Region],
    batch_dim: int,
    known: Container[torch.Tensor] | None,
) -> tuple[list[Substitute], dict[str, str]]:
    """Returns operations that account for parameters, and what is in the way.

    Args:
        model: Names modules.
        losses: ``(B,)``.
        reached: What the losses depend on.
        params: Parameters that are used outside of them, by name.
        without_batch: Calls that return the same for all samples, whatever the shapes.
        batch_dim: The dimension that counts samples.
        known: What the model owns; None: operations must not be asked
            for what they have saved.

    Returns:
        The operations, and why other parameters have none.
    """
    constant = {node for region in without_batch for node in graph.inside(region)}
    search = uses.Search(
        losses,
        reached.consumers,
        reached.outputs,
        constant,
        batch_dim,
        known or (),
        known is not None,
    )
    found, reasons = search.of(params)
    owners = owners_of(model, params)
    substitutes = []
    for use in found:
        inputs = {
            slot: tuple(n for n in names if n not in reasons)
            for slot, names in use.params.items()
        }
        inputs = {slot: names for slot, names in inputs.items() if names}
        if not inputs:
            continue
        names = OperationUse(use.node, inputs).names
        name, module = owners[names[0]]
        operation = use.node.name().removesuffix("Backward0")
        owner = RecordedModule(
            name,
            f"{operation} in {type(module).__name__}",
            uses.by_operation,
            {each: each for each in names},
            is_operation=True,
        )
        substitutes.append(Substitute(owner, "nodes", use.node, inputs, use.rows))
    return substitutes, reasons


def operation_call(
    each: Substitute,
    module: nn.Module,
    params: Mapping[str, nn.Parameter],
    batch_dim: int,
    num_samples: int,
) -> RecordedCall:
    """Returns an operation as a call of the module that owns a parameter."""
    use = OperationUse(each.source, each.inputs, each.rows)
    if each.rows is not None:
        batch_dim = each.rows.axis
    wanted = {name: params[name] for name in each.owner.names}
    call = OperationCall(module, (), {}, batch_dim, use, wanted, num_samples)
    region = graph.Region(GradientEdge(use.node, 0), ())
    shape = torch.Size(rules.output_shape(use.node))
    return RecordedCall(each.owner, call, region, shape, ())


def owners_of(
    model: nn.Module, wanted: Collection[str]
) -> dict[str, tuple[str, nn.Module]]:
    """Returns the module that owns each parameter, and its name."""
    names = {name: name.rpartition(".")[0] for name in wanted}
    return {name: (owner, model.get_submodule(owner)) for name, owner in names.items()}
