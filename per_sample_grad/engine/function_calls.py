"""Single functions, run once more where they take parameters that no rule knows.

A parameter that is used directly, in the forward method of a large module or of the
whole model, need not cost another run of that module. While the model runs, functions
of torch that take such a parameter, or what is computed from parameters alone, are
noted with their arguments. Each is run again, vectorised over the samples, when the
gradient of what it returned is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from per_sample_grad.engine import graph
from per_sample_grad.engine.operation_calls import Substitute
from per_sample_grad.engine.recording import (
    RecordedCall,
    RecordedModule,
    autocast_state,
)
from per_sample_grad.engine.rerunning import by_sample
from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Dense, summed
from per_sample_grad.layers.registry import Call, memories, memory
from per_sample_grad.operations.uses import take_down
from xla_replica.common.trees import map_tensors, tensors_in


@dataclasses.dataclass(frozen=True)
class FunctionCall:
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


class FunctionRecorder(TorchFunctionMode):
    """Notes, while it is entered, the calls of functions that take some parameters.

    Args:
        model: What it owns beside parameters does not depend on samples.
        params: The parameters.

    Attributes:
        calls: The calls in which they meet samples.
    """

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        # What is computed from parameters alone, by id, and how often it had been
        # changed in place; held, so that ids stay its own.
        self._own = {id(param): (param, param._version) for param in params}
        self._known = memories(model) if self._own else set()

    @property
    def follows_any(self) -> bool:
        """Whether there is anything to follow."""
        return bool(self._own)

    def stop(self) -> None:
        """Lets go of what was noted, and notes nothing more."""
        self.calls = []
        self._own = {}

    def _takes_own(self, values: Iterable[Any]) -> bool:
        """Returns whether a function takes what is computed from parameters alone."""
        own = self._own
        for value in values:
            if id(value) in own:
                return True
            if type(value) in (list, tuple) and any(id(each) in own for each in value):
                return True
        return False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self._takes_own(args) and not (
            kwargs and self._takes_own(kwargs.values())
        ):
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        own = {
            i: each
            for i, each in enumerate(inputs)
            if self._own.get(id(each), (None, -1))[1] == each._version
        }
        versions = tuple(each._version for each in inputs)
        found = func(*args, **kwargs)
        outputs = tensors_in(found)
        changed = versions != tuple(each._version for each in inputs)
        if not own or not outputs or changed or not torch.is_grad_enabled():
            return found
        others = [each for i, each in enumerate(inputs) if i not in own]
        if all(memory(each) in self._known for each in others):
            self._own |= {id(each): (each, each._version) for each in outputs}
        elif len(outputs) == 1 and outputs[0].requires_grad:
            [output] = outputs
            detached: Any = map_tensors((args, kwargs), torch.Tensor.detach)
            edges = {
                i: get_gradient_edge(each)
                for i, each in own.items()
                if each.requires_grad
            }
            self.calls.append(
                FunctionCall(
                    func,
                    *detached,
                    edges,
                    graph.region_of(others, output),
                    output.shape,
                    versions,
                    autocast_state(output),
                )
            )
        return found


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


def by_function(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
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
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for place, values in found.items():
        below = take_down(called.own[place], Dense(values), call.params[place])
        for name, part in below.items():
            assert isinstance(part, Dense)
            parts[name].append(part.values)
    return {name: Dense(summed(each)) for name, each in parts.items()}


def _gradients(
    call: RepeatedFunction, inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Returns ``(B, *shape)`` for each tensor that is computed from parameters."""
    called, count, dim = call.called, call.num_samples, call.batch_dim
    rows, rank = len(grad), len(called.shape)
    sized = [
        -rank <= dim < each.dim() and each.dim() == rank and each.shape[dim] == rows
        for each in inputs
    ]
    if rows > 1 and any(sized[place] for place in called.own):
        raise Refusal("what it took of parameters alone may have rows for samples")
    if not any(sized[i] for i in range(len(inputs)) if i not in called.own):
        raise Refusal("nothing that it took has rows for samples")
    # Plain autograd through one vectorised run: functional transforms take longer.
    own = {
        i: inputs[i].expand(count, *inputs[i].shape).detach().requires_grad_()
        for i in call.params
    }
    # Nothing is lazy here, and no hook is on what was just made.
    with torch.enable_grad(), _as_autocast_was(called.autocast):
        output = _vectorised(call, inputs, own, rows)
    grad = grad.reshape(output.shape)
    return dict(zip(own, torch.autograd.grad(output, list(own.values()), grad)))


def _as_autocast_was(
    state: Mapping[str, Any],
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with autocast in this state; it takes time to enter one."""
    is_off = not state["enabled"]
    if is_off and not torch.is_autocast_enabled(state["device_type"]):
        return contextlib.nullcontext()
    return torch.autocast(**state)


def _vectorised(
    call: RepeatedFunction,
    inputs: Sequence[torch.Tensor],
    own: Mapping[int, torch.Tensor],
    rows: int,
) -> torch.Tensor:
    """Returns the output ``(B, rows / B, *)``, if torch can vectorise the function."""
    called, count, dim = call.called, call.num_samples, call.batch_dim
    others = [i for i in range(len(inputs)) if i not in called.own]
    each = [inputs[i] for i in others]
    samples, with_samples = by_sample(each, dim, rows, count)

    def run(own: dict[int, torch.Tensor], samples: list[torch.Tensor]) -> torch.Tensor:
        given = {**own, **dict(zip(others, with_samples(samples)))}
        replaced = (given.get(i, tensor) for i, tensor in enumerate(inputs))
        [output] = tensors_in(called.run(replaced))
        return output.movedim(dim, 0)

    return vmap(run)(dict(own), samples)


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
    reached = graph.walk(losses, [call.region for call in calls], names, {batch_dim})
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
