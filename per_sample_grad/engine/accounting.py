"""What accounts for every parameter of a capture.

Calls of modules with rules come first; what they leave is found in the graph's
operations, in functions that can run once more, and in modules that can.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from per_sample_grad.engine import comparison, graph, recording
from per_sample_grad.engine.fallback import modules_again, repeated_call
from per_sample_grad.engine.function_calls import (
    FunctionRecorder,
    function_call,
    functions_again,
)
from per_sample_grad.engine.operation_calls import (
    Substitute,
    operation_call,
    operations,
    owners_of,
)
from per_sample_grad.engine.recording import EnclosingCall, RecordedCall, Recorder
from per_sample_grad.layers.registry import Owned
from per_sample_grad.operations.uses import is_broadcast
from xla_replica.common.trees import tensors_in

_CALL_OF = {
    "nodes": operation_call, "functions": function_call, "modules": repeated_call,
}  # fmt: skip


class Accounted(NamedTuple):
    """What a backward pass is given.

    Attributes:
        calls: Those that the losses depend on, and substitutes.
        key: Under what a proof of the structure is kept.
        uncovered: Parameters that have uses without a call: how many, and why.
        enclosing: Calls that a fallback may run again.
        has_other_leaves: Whether the losses depend on anything that takes a gradient
            but is not a selected parameter, outside of calls.
        may_read: Whether operations may be asked for tensors that they have saved.
    """

    calls: list[RecordedCall]
    key: Hashable
    uncovered: Mapping[str, tuple[int, str]]
    enclosing: Sequence[EnclosingCall]
    has_other_leaves: bool
    may_read: bool


# Whether functions may be of use to parameters that something had to run once more
# for, by the names of all parameters of a capture.
_OF_USE: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, ...], dict[str, bool]]]
_OF_USE = weakref.WeakKeyDictionary()


def may_run_functions(model: nn.Module, params: Mapping[str, nn.Parameter]) -> bool:
    """Returns whether functions may have to run once more to account for parameters.

    False: they were of no use to any structure that these captures have seen. Noting
    them takes a large part of a small model's forward pass. A structure that may need
    them for other parameters makes do with modules once.
    """
    of_use = _OF_USE.get(model, {}).get(tuple(params))
    return of_use is None or any(of_use.values())


def account(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    losses: torch.Tensor,
    recorder: Recorder,
    functions: FunctionRecorder,
) -> Accounted:
    """Finds the calls that losses depend on, and what else parameters are used by.

    The recorders keep nothing of what they have recorded.

    Raises:
        PerSampleError: An input was changed in place, or parameters are hidden.
    """
    found = _Accountant(model, params, losses, recorder, functions).account()
    functions.stop()
    recorder.forget()
    return found


class _Accountant:
    """Finds what accounts for every parameter, for one capture."""

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        losses: torch.Tensor,
        recorder: Recorder,
        functions: FunctionRecorder,
    ) -> None:
        self._model, self._losses, self._params = model, losses, params
        self._names = {id(value): name for name, value in params.items()}
        self._recorder, self._noted = recorder, functions.calls
        self._enclosing = list(recorder.enclosing)
        self._num_samples = losses.shape[0]
        # Calls without a row for each sample, as that of a table of positions, are a
        # part of what is computed from parameters alone.
        self._recorded, self._dropped = recorder.split(self._num_samples)
        self._noted_any = functions.follows_any

    def account(self) -> Accounted:
        """Walks through the graph, and finds calls for what it sees outside of them."""
        reached = self._walked()
        modules = [self._recorded[number] for number in sorted(reached.regions)]
        recording.check_versions(modules)
        recording.refuse_hidden(self._recorder.unrecorded, modules, reached)
        order, reasons = self._order(reached)
        self._note_use(order, reasons)
        uncovered = {n: (reached.outside[n], reason) for n, reason in reasons.items()}
        calls = self._calls(order)
        structure = (tuple(uncovered), reached.structure)
        return Accounted(
            calls,
            comparison.signature(self._losses, calls, self._params, structure),
            uncovered,
            self._enclosing,
            reached.has_other_leaves,
            not self._recorder.saved_by_hooks,
        )

    def _note_use(
        self, order: Iterable[int | Substitute], reasons: Iterable[str]
    ) -> None:
        """Notes for which parameters functions may be of use to later captures."""
        names = tuple(self._params)
        of_use = _OF_USE.setdefault(self._model, {}).setdefault(names, {})
        of_use |= dict.fromkeys(reasons, True)
        for each in order:
            if isinstance(each, int) or each.among == "nodes":
                continue
            for name in each.owner.names:
                if each.among == "functions":
                    of_use[name] = True
                else:  # Functions were not, if any were noted.
                    of_use.setdefault(name, not self._noted_any)

    def _walked(self) -> graph.Reached:
        """Walks, a second time without calls that return the same for all samples."""
        reached = self._walk()
        tables = {
            number
            for number in reached.regions
            if self._is_table(self._recorded[number], reached)
        }
        if not tables:
            return reached
        same = [self._recorded[n]._replace(has_batch=False) for n in sorted(tables)]
        self._dropped = [*self._dropped, *same]
        self._recorded = [r for n, r in enumerate(self._recorded) if n not in tables]
        return self._walk()

    def _walk(self) -> graph.Reached:
        regions = [each.region for each in self._recorded]
        return graph.walk(self._losses, regions, self._names)

    def _is_table(self, recorded: RecordedCall, reached: graph.Reached) -> bool:
        """Returns whether a call looked up what is the same for all samples.

        A table of positions may have as many rows as there are samples, or a multiple.
        """
        if self._num_samples < 2 or not _takes_indices(recorded):
            return False
        node, dim = recorded.region.output.node, self._recorder.batch_dim
        return is_broadcast(node, reached.consumers, self._num_samples, dim)

    def _order(
        self, reached: graph.Reached
    ) -> tuple[list[int | Substitute], dict[str, str]]:
        """Returns calls, by position, and substitutes; why parameters have neither."""
        losses, recorder = self._losses, self._recorder
        order: list[int | Substitute] = sorted(reached.regions)
        outside = {name: self._params[name] for name in reached.outside}
        reasons = dict.fromkeys(outside, "it was called outside of the capture")
        if outside and recorder.called:
            known = None if recorder.saved_by_hooks else Owned(self._recorder.modules)
            found, reasons = operations(
                self._model,
                losses,
                reached,
                outside,
                [each.region for each in self._dropped if not each.has_batch],
                recorder.batch_dim,
                known,
            )
            # In the order of the forward pass as far as it matters: what comes after
            # all modules is last.
            nodes = [each.source for each in found]
            top = graph.reachable(losses.grad_fn, nodes, reached.outputs)
            last = [each for each in found if each.source in top]
            first = [each for each in found if each.source not in top]
            order = [*first, *order, *last]
        reasons |= recording.why_dropped(self._dropped, self._num_samples, reasons)
        # What is run once more is as small as it can be: functions, and then modules.
        if reasons and self._noted:
            params = self._of(reasons)
            owners, dim = owners_of(self._model, params), recorder.batch_dim
            again = functions_again(losses, params, self._noted, owners, dim)
            order += _found(again, reasons)
        if reasons and self._enclosing:
            params = self._of(reasons)
            again = modules_again(losses, params, self._enclosing)
            order += _found(again, reasons)
        return order, reasons

    def _of(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        return {name: self._params[name] for name in names}

    def _calls(self, order: Sequence[int | Substitute]) -> list[RecordedCall]:
        of, dim = self._recorder.module, self._recorder.batch_dim
        rest = self._params, dim, self._num_samples
        return [
            self._recorded[each]
            if isinstance(each, int)
            else _CALL_OF[each.among](each, of(each.owner.name), *rest)
            for each in order
        ]


def _found(again: list[Substitute], reasons: dict[str, str]) -> list[Substitute]:
    """Returns these, and takes what they account for out of the reasons."""
    for each in again:
        for name in each.owner.names:
            reasons.pop(name, None)
    return again


def _takes_indices(recorded: RecordedCall) -> bool:
    tensors = tensors_in((recorded.call.args, recorded.call.kwargs))
    return not any(each.is_floating_point() for each in tensors)
