"""Which recorded calls and operations account for the selected parameters' gradients.

Calls of modules with rules come first. What they leave is found among the operations of
autograd's graph; what these leave needs a fallback.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from per_sample_grad.engine import graph
from per_sample_grad.engine.recording import RecordedCall, RecordedModule, Recorder
from per_sample_grad.engine.settings import Settings
from per_sample_grad.errors import CoverageError
from per_sample_grad.layers.registry import Owned, memories, memory, why_no_rule
from per_sample_grad.operations import rules, uses
from per_sample_grad.operations.uses import OperationCall
from xla_replica.common.trees import tensors_in


class Attribution(NamedTuple):
    """What a backward pass is given.

    Attributes:
        calls: The calls of modules and the operations that the losses depend on.
        key: Of the structure: what must be equal for one proof to hold for two
            captures.
        uncovered: Why parameters have uses without a call, by name.
        has_other_leaves: Whether the losses depend on anything that takes a gradient
            but is not a selected parameter, outside of calls.
        may_read: Whether operations may be asked for tensors that they have saved.
        called: Whether any module with a selected parameter was called.
    """

    calls: list[RecordedCall]
    key: Hashable
    uncovered: Mapping[str, str]
    has_other_leaves: bool
    may_read: bool
    called: bool


def attribute(
    settings: Settings, losses: torch.Tensor, recorder: Recorder
) -> Attribution:
    """Finds what accounts for every parameter in what was recorded.

    Raises:
        PerSampleError: An input was changed in place, or parameters are hidden.
    """
    num_samples = losses.shape[0]
    names = {id(value): name for name, value in settings.params.items()}
    recorded, constant = _without_constant_calls(settings, recorder, num_samples)
    walk = graph.walk(losses, [each.region for each in recorded], names)
    tables = {n for n in walk.calls if _is_table(settings, recorded[n], walk, losses)}
    if tables:
        constant += [recorded[n]._replace(has_batch=False) for n in sorted(tables)]
        recorded = [each for n, each in enumerate(recorded) if n not in tables]
        walk = graph.walk(losses, [each.region for each in recorded], names)
    calls = [recorded[number] for number in sorted(walk.calls)]
    for call in calls:
        call.refuse_changes()
    if walk.custom is not None:
        _refuse_hidden(recorder.unrecorded, calls, walk)
    reasons = dict.fromkeys(walk.outside, "it was called outside of the capture")
    if reasons and recorder.called:
        # A checkpoint that calls no module with parameters was not noticed.
        nodes = graph.backward_nodes(losses.grad_fn)
        recorder.saved_by_hooks |= graph.is_saved_by_hooks(nodes)
        found, reasons = _operations(
            settings, losses, walk, constant, not recorder.saved_by_hooks
        )
        calls = [*calls, *found]
    if reasons:
        reasons |= _why_constant(constant, num_samples, reasons)
    uncovered = {
        name: f"{walk.outside[name]} use(s) outside any module with a rule "
        f"({_why_outside(settings.model, settings.params[name])}; {reason})"
        for name, reason in reasons.items()
    }
    identities = [
        (owner.name, owner.rule, tuple(owner.params.items()), call.batch_dim, shape)
        for owner, call, _, shape, *_ in calls
    ]
    training = [each.call.module.training for each in calls]
    key = (
        (*identities, *training),
        (losses.shape, losses.dtype, losses.device),
        tuple([(name, param.shape) for name, param in settings.params.items()]),
        tuple(reasons),
        walk.structure,
    )
    return Attribution(
        calls,
        key,
        uncovered,
        walk.has_other_leaves,
        not recorder.saved_by_hooks,
        recorder.called,
    )


def _without_constant_calls(
    settings: Settings, recorder: Recorder, num_samples: int
) -> tuple[list[RecordedCall], list[RecordedCall]]:
    """Returns the calls that have rules to be applied, and others.

    The latter return the same for all samples: what rows of a table or buffers of
    the model are computed from, and not what may be computed from the samples. They are
    a part of what is computed from parameters alone.
    """
    kept: list[RecordedCall] = []
    constant: list[RecordedCall] = []
    owned: set[int] | None = None
    for each in recorder.calls:
        is_constant = not each.has_batch
        if each.has_batch and not each.has_rows(num_samples):
            owned = memories(settings.model) if owned is None else owned
            is_constant = _took_known_tensors(each, owned)
        (constant if is_constant else kept).append(each)
    return kept, constant


def _took_known_tensors(recorded: RecordedCall, owned: Collection[int]) -> bool:
    """Returns whether a call took no numbers of unknown origin.

    Known are integers, such as the ids of positions, what has a graph, which is looked
    at later, and memory that the model owns.
    """
    tensors = tensors_in((recorded.call.args, recorded.call.kwargs))
    unknown = [
        each
        for each in tensors
        if each.is_floating_point() and memory(each) not in owned
    ]
    return len(unknown) <= len(recorded.region.inputs)


def _is_table(
    settings: Settings, recorded: RecordedCall, walk: graph.Walk, losses: torch.Tensor
) -> bool:
    """Returns whether a call looked up what is the same for all samples.

    A table of positions may have as many rows as there are samples, or a multiple.
    """
    tensors = tensors_in((recorded.call.args, recorded.call.kwargs))
    if len(losses) < 2 or any(each.is_floating_point() for each in tensors):
        return False
    node = recorded.region.output.node
    dim = settings.default_batch_dim
    return uses.is_broadcast(node, walk.consumers, len(losses), dim)


def _operations(
    settings: Settings,
    losses: torch.Tensor,
    walk: graph.Walk,
    constant: Sequence[RecordedCall],
    may_read: bool,
) -> tuple[list[RecordedCall], dict[str, str]]:
    """Returns operations that account for parameters, and why others have none.

    Each is a call of the module that owns its first parameter.
    """
    model, batch_dim = settings.model, settings.default_batch_dim
    certain = [each.region for each in constant if not each.has_batch]
    inside = [graph.backward_nodes(r.output.node, r.inputs) for r in certain]
    same, known = set().union(*inside), Owned(model) if may_read else ()
    search = uses.Search(
        losses, walk.consumers, walk.outputs, same, batch_dim, known, may_read
    )
    found, reasons = search.of({name: settings.params[name] for name in walk.outside})
    calls = []
    for use in found:
        owner = use.names[0].rpartition(".")[0]
        module = model.get_submodule(owner)
        kind = use.node.name().removesuffix("Backward0")
        kind = f"{kind} in {type(module).__name__}"
        own = {name: name for name in use.names}
        recorded = RecordedModule(
            owner, kind, uses.by_operation, own, tuple(use.names), is_operation=True
        )
        dim = batch_dim if use.rows is None else use.rows.axis
        params = {name: settings.params[name] for name in use.names}
        call = OperationCall(module, (), {}, dim, use, params, len(losses))
        region = graph.Region(GradientEdge(use.node, 0), ())
        shape = torch.Size(rules.output_shape(use.node))
        calls.append(RecordedCall(recorded, call, region, shape, ()))
    return calls, reasons


def _refuse_hidden(
    unrecorded: Collection[str], calls: Sequence[RecordedCall], walk: graph.Walk
) -> None:
    """Raises CoverageError for parameters used only within an autograd.Function."""
    seen = {name for call in calls for name in call.owner.names}
    hidden = sorted(set(unrecorded) - seen - set(walk.outside))
    if hidden:
        raise CoverageError(
            f"modules with {', '.join(hidden)} were called without gradients, perhaps "
            f"in the torch.autograd.Function {walk.custom}, which hides them: call "
            "these modules outside of it (for checkpoints: use_reentrant=False), or, "
            "if the losses do not depend on them, leave them out (params=)"
        )


def _why_constant(
    calls: Sequence[RecordedCall], num_samples: int, names: Collection[str]
) -> dict[str, str]:
    """Returns why calls of modules with rules do not account for their parameters.

    Of calls that certainly return the same for all samples nothing more can be said
    than where that meets samples.
    """
    return {
        name: f"{each.owner}: {each.why_no_rows(num_samples)}"
        for each in calls
        if each.has_batch and each.shape[:1] != (1,)
        for name in each.owner.names
        if name in names
    }


def _why_outside(model: nn.Module, param: nn.Parameter) -> str:
    """Returns why no recorded call accounts for a use of this parameter."""
    for name, module in model.named_modules():
        if any(own is param for own in module.parameters(recurse=False)):
            reason = why_no_rule(module)
            of = f"{type(module).__name__} {name!r}"
            return reason or f"{of} has a rule, but this use is not its own call"
    return "no module owns it"
