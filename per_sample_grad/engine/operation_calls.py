"""Calls for parameters that are used outside of modules with rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from per_sample_grad.engine import graph
from per_sample_grad.engine.recording import RecordedCall, RecordedModule
from per_sample_grad.layers.registry import memories
from per_sample_grad.operations import rules, uses
from per_sample_grad.operations.uses import OperationCall


def operation_calls(
    model: nn.Module,
    losses: torch.Tensor,
    reached: graph.Reached,
    params: Mapping[str, nn.Parameter],
    without_batch: Sequence[graph.Region],
    batch_dim: int,
    may_read: bool,
) -> tuple[list[RecordedCall], dict[str, str]]:
    """Returns operations as calls that account for parameters, and what is in the way.

    Args:
        model: Names modules.
        losses: ``(B,)``.
        reached: What the losses depend on.
        params: Parameters that are used outside of them, by name.
        without_batch: Calls that return the same for all samples, whatever the shapes.
        batch_dim: The dimension that counts samples.
        may_read: Whether operations may be asked for what they have saved.
    """
    constant = {node for region in without_batch for node in graph.inside(region)}
    search = uses.Search(
        losses,
        reached.consumers,
        reached.outputs,
        constant,
        batch_dim,
        memories(model),
        may_read,
    )
    found, reasons = search.of(params)
    owners = owners_of(model, params)
    calls = []
    for use in found:
        wanted = {n: params[n] for n in use.names if n not in reasons}
        if not wanted:
            continue
        kept = {
            slot: tuple(n for n in each if n in wanted)
            for slot, each in use.params.items()
        }
        use = uses.OperationUse(use.node, {s: each for s, each in kept.items() if each})
        name, module = owners[next(iter(wanted))]
        operation = use.node.name().removesuffix("Backward0")
        owner = RecordedModule(
            name,
            f"{operation} in {type(module).__name__}",
            uses.by_operation,
            {each: each for each in wanted},
            is_operation=True,
        )
        call = OperationCall(module, (), {}, batch_dim, use, wanted, len(losses))
        region = graph.Region(GradientEdge(use.node, 0), ())
        shape = torch.Size(rules.output_shape(use.node))
        calls.append(RecordedCall(owner, call, region, shape, ()))
    return calls, reasons


def owners_of(
    model: nn.Module, wanted: Collection[str]
) -> dict[str, tuple[str, nn.Module]]:
    """Returns the module that owns each parameter, and its name."""
    names = {name: name.rpartition(".")[0] for name in wanted}
    return {name: (owner, model.get_submodule(owner)) for name, owner in names.items()}
