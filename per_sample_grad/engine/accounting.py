"""What accounts for every parameter of a capture, found once for each structure.

Calls of modules with rules come first; what they leave is found in the graph's
operations, in functions that can run once more, and in modules that can. All that
follows from the recorded calls and the graph. A model's last structures are kept with
it, and a later capture is only compared with the one of the same calls. The comparison
is with all that was looked at: what differs in anything is looked at as if there had
been no capture before.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from per_sample_grad.engine import comparison, graph, recording
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
from per_sample_grad.engine.rerunning import modules_again, repeated_call
from per_sample_grad.layers.registry import Owned
from per_sample_grad.operations.uses import Belief, is_broadcast
from xla_replica.common.trees import tensors_in

# How many structures of a model are kept: those that were used last.
MOST = 16

_CALL_OF = {
    "nodes": operation_call, "functions": function_call, "modules": repeated_call,
}  # fmt: skip
_Numbers = Mapping[Node, int]
_MODULES_ALONE = "modules alone"  # may run once more: functions are of no use


class Accounted(NamedTuple):
    """What a backward pass is given.

    Attributes:
        calls: Those that the losses depend on, and substitutes.
        structure: What a walk found, and under what a proof of it is kept.
        reasons: Why some parameters, which have other uses, have no calls; by name.
        enclosing: Calls that a fallback may run again.
    """

    calls: list[RecordedCall]
    structure: graph.Structure
    reasons: Mapping[str, str]
    enclosing: Sequence[EnclosingCall]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What accounts for every parameter, and all that this was concluded from.

    No graph is kept: nodes, functions and calls are numbers.

    Attributes:
        structure: What a walk has found.
        tables: The positions of calls that look up what is the same for all samples.
        order: The positions of calls of modules with rules, and substitutes, as they
            are given to the backward pass.
        details: What else was looked at; None where that walk has seen everything.
    """

    structure: graph.Structure
    tables: frozenset[int]
    order: tuple[int | Substitute, ...]
    details: _Details | None


@dataclasses.dataclass(frozen=True)
class _Details:
    """What was looked at beside calls and the operations that are walked over.

    Attributes:
        shapes: The shapes of all nodes.
        believed: The nodes about whose saved tensors something was believed, and what.
        training: Whether modules that own parameters were in training.
        dropped: The calls without rows for samples.
        functions: The noted functions; None: they were not looked at.
        modules: The calls that may run again; None likewise.
    """

    shapes: tuple[tuple[torch.Size, ...], ...]
    believed: tuple[tuple[int, Belief], ...]
    training: tuple[bool, ...]
    dropped: Hashable
    functions: Hashable | None
    modules: Hashable | None

    @property
    def is_complete(self) -> bool:
        """Whether all nodes that were looked at have numbers, so as to be compared."""
        looked_at = (self.dropped, self.functions or (), self.modules or ())
        return all(map(_has_numbers, looked_at))


_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Kept]]
_KNOWN = weakref.WeakKeyDictionary()
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
        # Whether functions and modules may run again decides what is tried.
        self._reruns = functions.follows_any, bool(self._enclosing)
        # What the structure is concluded from, beside calls and what a walk sees.
        self._believed: Sequence[tuple[Node, Belief]] = ()
        self._asked_functions = self._asked_modules = False

    def account(self) -> Accounted:
        """Returns what was kept of this structure, or looks, and keeps it."""
        begun = None if self._recorder.unrecorded else self._begun()
        every = _KNOWN.get(self._model, {})
        for reruns in (None, _MODULES_ALONE, self._reruns):
            known = None if begun is None else every.get((begun, reruns))
            order = None if known is None else self._repeated(known)
            if known is not None and order is not None:
                modules = [self._recorded[n] for n in order if isinstance(n, int)]
                recording.check_versions(modules)
                calls = self._calls(order)
                return Accounted(calls, known.structure, {}, self._enclosing)
        tables, reached = self._walked()
        modules = [self._recorded[number] for number in sorted(reached.regions)]
        recording.check_versions(modules)
        recording.refuse_hidden(self._recorder.unrecorded, modules, reached)
        order, reasons = self._order(reached)
        bare = reached.without_graph({name: reached.outside[name] for name in reasons})
        reruns = self._needed(order, reasons)
        calls = self._calls(order)
        key = comparison.signature(self._losses, calls, self._params, bare)
        structure = graph.Structure(bare, key)
        if begun is not None and not reasons and not reached.reordered:
            numbers = reached.numbers
            details = self._details(order, numbers, bool(reached.outside), reruns)
            if details is None or details.is_complete:
                kept = self._kept(order, numbers)
                regions = [each.region for each in calls]
                lowest = graph.lowest_calls(self._losses.grad_fn, regions)
                structure = dataclasses.replace(structure, lowest=lowest)
                found = _Kept(structure, tables, kept, details)
                _remember(self._model, (begun, reruns), found)
        return Accounted(calls, structure, reasons, self._enclosing)

    def _needed(
        self, order: Iterable[int | Substitute], reasons: Iterable[str]
    ) -> Hashable:
        """Returns what captures may run once more that find the same: None for all."""
        names = tuple(self._params)
        of_use = _OF_USE.setdefault(self._model, {}).setdefault(names, {})
        of_use |= dict.fromkeys(reasons, True)
        again = [e for e in order if isinstance(e, Substitute) and e.among != "nodes"]
        follows, _ = self._reruns
        for each in again:
            for name in each.owner.names:
                if each.among == "functions":
                    of_use[name] = True
                else:  # Functions were not, if any were noted.
                    of_use.setdefault(name, not follows)
        if not again:
            return None
        # Without use to any of these they need not be noted.
        some = any(of_use[name] for each in again for name in each.owner.names)
        return self._reruns if some else _MODULES_ALONE

    def _begun(self) -> Hashable:
        """Returns what is known before a walk, and decides what it is compared with."""
        recorder = self._recorder
        dropped = tuple(
            [
                (*each.owner.identity, each.call.batch_dim, each.shape, each.has_batch)
                for each in self._dropped
            ]
        )
        settings = (recorder.batch_dim, recorder.called, recorder.saved_by_hooks)
        calls = comparison.of_calls(self._losses, self._recorded, self._params)
        return comparison.Signature(calls, dropped, settings)

    def _walk_arguments(self) -> tuple[Any, ...]:
        regions = [each.region for each in self._recorded]
        batch_dims = {0, *(each.call.batch_dim for each in self._recorded)}
        return self._losses, regions, self._names, batch_dims

    def _drop(self, tables: frozenset[int]) -> None:
        """Takes calls for such that return the same for all samples."""
        if tables:
            every = self._recorded
            same = [every[n]._replace(has_batch=False) for n in sorted(tables)]
            self._dropped = [*self._dropped, *same]
            self._recorded = [r for n, r in enumerate(every) if n not in tables]

    def _walked(self) -> tuple[frozenset[int], graph.Reached]:
        reached = graph.walk(*self._walk_arguments())
        tables = frozenset(
            number
            for number in reached.regions
            if self._is_table(self._recorded[number], reached)
        )
        if tables:
            self._drop(tables)
            reached = graph.walk(*self._walk_arguments())
        return tables, reached

    def _is_table(self, recorded: RecordedCall, reached: graph.Reached) -> bool:
        """Returns whether a call looked up what is the same for all samples.

        A table of positions may have as many rows as there are samples, or a multiple.
        """
        if self._num_samples < 2 or not _takes_indices(recorded):
            return False
        node, dim = recorded.region.output.node, self._recorder.batch_dim
        return is_broadcast(node, reached.consumers, self._num_samples, dim)

    # --- a structure that was seen before -------------------------------------------

    def _repeated(self, kept: _Kept) -> Sequence[int | Substitute] | None:
        """Returns the order if this capture has the structure that was kept."""
        every = self._recorded, self._dropped
        if not all(_takes_indices(self._recorded[n]) for n in kept.tables):
            return None
        self._drop(kept.tables)
        stages = kept.structure.reached.stages
        numbers = graph.repeats(stages, *self._walk_arguments())
        if numbers is None or not self._has(kept, numbers):
            self._recorded, self._dropped = every
            return None
        if kept.details is None:
            return kept.order
        sources: dict[str, Sequence[Any]] = {
            "nodes": list(numbers),
            "functions": self._noted,
            "modules": self._enclosing,
        }
        return [
            each
            if isinstance(each, int)
            else each._replace(source=sources[each.among][each.source])
            for each in kept.order
        ]

    def _has(self, kept: _Kept, numbers: _Numbers) -> bool:
        """Returns whether all is as it was that the structure was concluded from."""
        details = kept.details
        if details is None:
            return True
        nodes = list(numbers)
        owners = [each for each in kept.order if isinstance(each, Substitute)]
        if (
            details.shapes != graph.shapes_of(nodes)
            or details.dropped != self._dropped_calls(numbers)
            or details.training != self._training(owners)
        ):
            return False
        if details.functions not in (None, self._functions(numbers)):
            return False
        if details.modules is not None:
            if details.modules != self._modules(numbers):
                return False
            for each in owners:
                if each.among == "modules":
                    call = self._enclosing[each.source].call
                    held = {id(param) for param in call.module.parameters()}
                    names = each.owner.names
                    if not all(id(self._params[name]) in held for name in names):
                        return False
        if details.believed:
            known = Owned(self._recorder.modules)
            return all(belief(nodes[n], known) for n, belief in details.believed)
        return True

    def _details(
        self,
        order: Sequence[int | Substitute],
        numbers: _Numbers,
        has_outside: bool,
        reruns: Hashable,
    ) -> _Details | None:
        if not has_outside and not self._dropped:
            return None
        return _Details(
            graph.shapes_of(numbers),
            tuple((numbers[node], belief) for node, belief in self._believed),
            self._training([each for each in order if isinstance(each, Substitute)]),
            self._dropped_calls(numbers),
            self._functions(numbers) if reruns == self._reruns else None,
            self._modules(numbers) if self._asked_modules else None,
        )

    def _training(self, owners: Sequence[Substitute]) -> tuple[bool, ...]:
        of = self._recorder.module
        return tuple([of(each.owner.name).training for each in owners])

    def _dropped_calls(self, numbers: _Numbers) -> Hashable:
        return tuple([_region(each.region, numbers) for each in self._dropped])

    def _functions(self, numbers: _Numbers) -> Hashable:
        return tuple(
            [
                (
                    each.function,
                    _region(each.region, numbers),
                    tuple(
                        [
                            (place, numbers.get(edge.node), edge.output_nr)
                            for place, edge in each.own.items()
                        ]
                    ),
                    each.shape,
                )
                for each in self._noted
            ]
        )

    def _modules(self, numbers: _Numbers) -> Hashable:
        return tuple(
            [
                (
                    each.name,
                    tuple([_region(region, numbers) for region in each.regions]),
                    each.positions,
                    each.shapes,
                    each.call.batch_dim,
                )
                for each in self._enclosing
            ]
        )

    # --- a structure that is new ----------------------------------------------------

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
            found, reasons, self._believed = operations(
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
            self._asked_functions, params = True, self._of(reasons)
            owners, dim = owners_of(self._model, params), recorder.batch_dim
            again = functions_again(losses, params, self._noted, owners, dim)
            order += _found(again, reasons)
        if reasons and self._enclosing:
            self._asked_modules, params = True, self._of(reasons)
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

    def _kept(
        self, order: Sequence[int | Substitute], numbers: _Numbers
    ) -> tuple[int | Substitute, ...]:
        """Returns calls and substitutes with numbers for what they are made from."""
        modules = self._enclosing
        place = dict(numbers) | {
            id(each): number
            for every in (self._noted, modules)
            for number, each in enumerate(every)
        }
        return tuple(
            each
            if isinstance(each, int)
            else each._replace(
                source=place[each.source if each.among == "nodes" else id(each.source)]
            )
            for each in order
        )


def _found(again: list[Substitute], reasons: dict[str, str]) -> list[Substitute]:
    """Returns these, and takes what they account for out of the reasons."""
    for each in again:
        for name in each.owner.names:
            reasons.pop(name, None)
    return again


def _takes_indices(recorded: RecordedCall) -> bool:
    tensors = tensors_in((recorded.call.args, recorded.call.kwargs))
    return not any(each.is_floating_point() for each in tensors)


def _region(region: graph.Region, numbers: _Numbers) -> Hashable:
    inputs = tuple([numbers.get(node) for node in region.inputs])
    return (numbers.get(region.output.node), region.output.output_nr, inputs)


def _has_numbers(described: Hashable) -> bool:
    if isinstance(described, tuple):
        return all(map(_has_numbers, described))
    return described is not None


def _remember(model: nn.Module, begun: Hashable, kept: _Kept) -> None:
    known = _KNOWN.setdefault(model, {})
    known.pop(begun, None)
    known[begun] = kept
    while len(known) > MOST:
        known.pop(next(iter(known)), None)
