"""Single functions, run once more where they take parameters that no rule knows.

A parameter that is used directly, in the forward method of a large module or of the
whole model, need not cost another run of that module. While the model runs, functions
of torch that take such a parameter, or what is computed from parameters alone, are
noted with their arguments. Each is run again, vectorised over the samples, when the
gradient of what it returned is there.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from per_sample_grad.engine import graph
from per_sample_grad.engine.fallback import by_sample, cut_at_samples
from per_sample_grad.engine.operation_calls import Substitute
from per_sample_grad.engine.recording import (
    RecordedCall,
    RecordedModule,
    autocast_state,
)
from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers.registry import Call, memories, memory
from per_sample_grad.operations.computed import take_down
from per_sample_grad.operations.following import Following
from per_sample_grad.operations.vectorising import gradients_by_sample
from xla_replica.common.trees import map_tensors, tensors_in


class FunctionCall(NamedTuple):
    """One call of a function of torch in which parameters meet other tensors.

    Attributes:
        function: The function, or a method of `torch.Tensor`.
        args, kwargs: Its arguments, detached.
        own: Which of the tensors among them are computed from parameters alone, as
            `tensors_in` counts, and where the gradient of each goes.
        region: What the call made in the graph.
        shape: That of the tensor that it returned.
        versions: How often each tensor had been changed in place.
        autocast: The state of autocast then, arguments of it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    own: Mapping[int, GradientEdge]
    region: graph.Region
    shape: torch.Size
    versions: tuple[int, ...]
    autocast: Mapping[str, Any]

    def run(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Calls the function with these tensors in place of those that it took."""
        each = iter(tensors)
        args, kwargs = map_tensors((self.args, self.kwargs), lambda _: next(each))
        return self.function(*args, **kwargs)


class FunctionRecorder:
    """Notes the calls of functions that take some parameters, until it leaves these.

    Args:
        model: What it owns beside parameters does not depend on samples.
        params: The parameters.

    Attributes:
        calls: The calls in which they meet samples.
    """

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        self.calls: list[FunctionCall] = []
        # What is computed from parameters alone, by id, and how often it had been
        # changed in place; held, so that ids stay its own.
        self._own = {id(param): (param, param._version) for param in params}
        self._model = model
        self._known: set[int] | None = None
        self._following, self._has_started = Following(self), False

    @property
    def follows_any(self) -> bool:
        """Whether there is anything to follow."""
        return bool(self._own)

    def start(self) -> None:
        """Begins to follow parameters, if there are any."""
        if self._own:
            self._following.start()
            self._following.add([param for param, _ in self._own.values()])
            self._has_started = True

    def leave(self) -> None:
        """Ends that; notes are kept."""
        if self._has_started:
            self._following.stop()
            self._has_started = False

    def stop(self) -> None:
        """Lets go of what was noted, and notes nothing more."""
        self.calls = []
        self._own = {}

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function that takes what is followed, and notes it."""
        inputs = tensors_in((args, kwargs))
        versions = tuple([each._version for each in inputs])
        own = {
            i: each
            for i, each in enumerate(inputs)
            if self._own.get(id(each), (None, -1))[1] == versions[i]
        }
        found = self._following.run(function, args, kwargs)
        outputs = tensors_in(found)
        if not own or not outputs or not torch.is_grad_enabled():
            return found
        if versions != tuple([each._version for each in inputs]):
            return found
        others = [each for i, each in enumerate(inputs) if i not in own]
        if all(map(self._is_known, others)):
            self._own |= {id(each): (each, each._version) for each in outputs}
            self._following.add(outputs)
        elif len(outputs) == 1 and outputs[0].requires_grad:
            [output] = outputs
            detached: Any = map_tensors((args, kwargs), torch.Tensor.detach)
            edges = {
                i: graph.edge_of(each, output)
                for i, each in own.items()
                if each.requires_grad
            }
            self.calls.append(
                FunctionCall(
                    function,
                    *detached,
                    edges,
                    graph.region_of(others, output),
                    output.shape,
                    versions,
                    autocast_state(output),
                )
            )
        return found

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is one of the model's own."""
        if tensor.grad_fn is not None and not tensor._is_view():
            return False  # something has computed it
        if self._known is None:
            self._known = memories(self._model)
        return memory(tensor) in self._known


@dataclasses.dataclass(frozen=True)
class RepeatedFunction(Call):
    """A function that runs once more, as a `Call`, which `by_function` is the rule of.

    Attributes:
        called: The call of the function.
        params: The parameters that what it takes depends on, by name, for each of
            ``called.own``.
        num_samples: B.
    """

    called: FunctionCall
    params: Mapping[int, Mapping[str, nn.Parameter]]
    num_samples: int


def by_function(call: Call, grad: torch.Tensor) -> dict[str, list[Contribution]]:
    """Returns the contributions of a `RepeatedFunction`, by the parameter's name."""
    assert isinstance(call, RepeatedFunction)
    called = call.called
    inputs = tensors_in((called.args, called.kwargs))
    if called.versions != tuple(each._version for each in inputs):
        raise Refusal("what its function took was changed in place afterwards")
    try:
        found = _gradients(call, inputs, grad)
    except Exception as error:  # whatever the function raises
        raise Refusal(f"its function cannot be vectorised, {error!r}") from error
    parts: dict[str, list[Contribution]] = defaultdict(list)
    for place, values in found.items():
        below = take_down(called.own[place], Dense(values), call.params[place])
        for name, each in below.items():
            parts[name] += each
    return dict(parts)


def _gradients(
    call: RepeatedFunction, inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Returns ``(B, *shape)`` for each tensor that is computed from parameters."""
    called, count, dim = call.called, call.num_samples, call.batch_dim
    rows, rank = grad.shape[0], len(called.shape)
    sized = [
        -rank <= dim < each.dim() and each.dim() == rank and each.shape[dim] == rows
        for each in inputs
    ]
    if rows > 1 and any(sized[place] for place in called.own):
        raise Refusal("what it took of parameters alone may have rows for samples")
    if not any(sized[i] for i in range(len(inputs)) if i not in called.own):
        raise Refusal("nothing that it took has rows for samples")
    own = list(call.params)
    others = [i for i in range(len(inputs)) if i not in called.own]
    samples, with_samples = by_sample([inputs[i] for i in others], dim, rows, count)

    def run(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        placed = dict(zip(own, given)) | dict(
            zip(others, with_samples(given[len(own) :]))
        )
        [output] = tensors_in(
            called.run(placed.get(i, each) for i, each in enumerate(inputs))
        )
        return [output.movedim(dim, 0) if dim else output]

    found = gradients_by_sample(
        run,
        [inputs[i] for i in own],
        samples,
        [cut_at_samples(grad, count)],
        called.autocast,
    )
    return dict(zip(own, found))


def functions_again(
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    calls: Sequence[FunctionCall],
    owners: Mapping[str, tuple[str, nn.Module]],
    batch_dim: int,
) -> list[Substitute]:
    """Returns functions that account for parameters when they run once more.

    They are those whose calls hold all uses of a parameter.

    Args:
        losses: ``(B,)``.
        params: The parameters, by name.
        calls: What was noted of functions.
        owners: The module that owns each parameter, and its name.
        batch_dim: The dimension that counts samples.
    """
    names = {id(param): name for name, param in params.items()}
    reached = graph.walk(losses, [call.region for call in calls], names)
    # From a parameter's node; that of a parameter that is used elsewhere is not asked.
    nodes = {
        get_gradient_edge(param).node: name
        for name, param in params.items()
        if name not in reached.outside
    }
    found = []
    for number in sorted(reached.regions):
        called = calls[number]
        inputs: dict[int, tuple[str, ...]] = {}
        for place, edge in called.own.items():
            below = graph.reachable(edge.node, nodes)
            if below:
                inputs[place] = tuple(n for node, n in nodes.items() if node in below)
        if inputs:
            name, module = owners[next(iter(inputs.values()))[0]]
            kind = getattr(called.function, "__name__", "function").strip("_")
            wanted = dict.fromkeys(n for names in inputs.values() for n in names)
            owner = RecordedModule(
                name,
                f"{kind} in {type(module).__name__}",
                by_function,
                {each: each for each in wanted},
                is_operation=True,
            )
            found.append(Substitute(owner, "functions", called, inputs))
    return found


def function_call(
    each: Substitute,
    module: nn.Module,
    params: Mapping[str, nn.Parameter],
    batch_dim: int,
    num_samples: int,
) -> RecordedCall:
    """Returns a function as a call of the module that owns a parameter."""
    called: FunctionCall = each.source
    own = {
        place: {name: params[name] for name in names}
        for place, names in each.inputs.items()
    }
    call = RepeatedFunction(module, (), {}, batch_dim, called, own, num_samples)
    return RecordedCall(each.owner, call, called.region, called.shape, ())
