"""From recorded calls to contributions, one call at a time as the backward pass goes.

The gradient of a call's output is there when the pass reaches it, and what the call was
given still is: the rule is applied then and there, and a parameter whose calls have all
been reached is handed on. If nobody keeps it, the memory is free again before the pass
goes on, as in ordinary training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

import xla_replica
from per_sample_grad.engine import graph
from per_sample_grad.engine.recording import Use
from per_sample_grad.errors import PerSampleError, Refusal
from per_sample_grad.factors.forms import (
    Contribution,
    accumulation_dtype,
    full_precision,
    merge,
    regroup,
    widened,
)

# Why parameters have no contributions, by name.
Problems = dict[str, list[str]]
# Takes the contributions of all uses of some parameters, merged, by name; and how many
# numbers were in the outputs of the calls that the pass has left behind.
Receiver = Callable[[dict[str, list[Contribution]], int], None]
# Sees the gradient of a call's output.
Witness = Callable[[Use, Sequence[str], torch.Tensor], None]


class Assembly:
    """Applies every use's rule when the gradient of its output is there.

    Attributes:
        problems: Uses without an answer, and why, by parameter.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        names: Mapping[int, str],
        num_samples: int,
        *,
        may_fold: bool,
        scale: float,
        left_out: Problems,
        receive: Receiver,
        witness: Witness | None,
    ) -> None:
        """Args:
        uses: Recorded calls that the losses depend on.
        names: The parameter's name for ``id(parameter)``, of selected ones.
        num_samples: B.
        may_fold: Whether k B rows count as k rows of each sample.
        scale: What the losses are multiplied by in the backward pass.
        left_out: Parameters whose uses need no answer, and why.
        receive: Takes what is complete.
        witness: Sees every gradient before its rule does.
        """
        self.problems = {name: list(why) for name, why in left_out.items()}
        self._passed = 0
        self._uses: list[Use | None] = list(uses)
        self._names = names
        self._num_samples = num_samples
        self._may_fold = may_fold
        self._scale = scale
        self._receive = receive
        self._witness = witness
        self._parts: dict[str, list[Contribution]] = {}
        # Uses of each parameter that are yet to be reached.
        self._missing: dict[str, int] = {}
        # Of each use: names in the model by those in the module.
        self._of_inner = [self._selected_of(use) for use in uses]
        for of_inner in self._of_inner:
            for name in set(of_inner.values()):
                self._missing[name] = self._missing.get(name, 0) + 1

    def run(self, losses: torch.Tensor, retain_graph: bool) -> None:
        """One backward pass that forms no gradient of a parameter.

        Calls that have others below are seen when the pass comes by; only the lowest
        are asked for, and their gradients kept until it ends.
        """
        if not self._uses:
            return
        nodes = [use.region.output.node for use in self._uses if use is not None]
        lowest, passed = graph.lowest(losses.grad_fn, nodes)
        ends = [number for number, node in enumerate(nodes) if node in lowest]
        handles = []

        def seen_at(number: int) -> Callable[..., None]:
            def look(gradients: tuple[torch.Tensor | None, ...]) -> None:
                use = self._uses[number]
                assert use is not None
                self._reach(number, gradients[use.region.output.output_nr])

            return look

        edges = [self._edge(number) for number in ends]
        try:
            for number, node in enumerate(nodes):
                if node in passed:
                    handles.append(node.register_prehook(seen_at(number)))
                elif node not in lowest:
                    self._reach(number, None)
            del node, nodes, lowest, passed
            gradients = xla_replica.grad(
                losses.sum() * self._scale if self._scale != 1 else losses.sum(),
                edges,
                retain_graph=retain_graph,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        for number, gradient in zip(ends, gradients):
            self._reach(number, gradient)
        unseen = [str(use) for use in self._uses if use is not None]
        if unseen:
            raise PerSampleError(
                f"the backward pass never came to {', '.join(unseen)}, on which the "
                "losses depend: this is a defect of per_sample_grad; please report it"
            )

    def _edge(self, number: int) -> torch.autograd.graph.GradientEdge:
        use = self._uses[number]
        assert use is not None
        return use.region.output

    def _selected_of(self, use: Use) -> dict[str, str]:
        """Selected parameters: the names in the model by those in the module."""
        owned = use.call.module.named_parameters(remove_duplicate=False)
        return {
            inner: self._names[id(param)]
            for inner, param in owned
            if id(param) in self._names
        }

    def _reach(self, number: int, gradient: torch.Tensor | None) -> None:
        use = self._uses[number]
        assert use is not None
        of_inner = self._of_inner[number]
        if gradient is not None:
            with full_precision(gradient.device):
                self._apply(use, of_inner, gradient.detach().reshape(use.shape))
        size = use.shape.numel()
        self._uses[number] = use = None  # what it was given is free
        complete: dict[str, list[Contribution]] = {}
        with torch.no_grad():
            for name in dict.fromkeys(of_inner.values()):
                self._missing[name] -= 1
                if not self._missing[name] and name not in self.problems:
                    complete[name] = merge(self._parts.pop(name, []))
        if complete:
            self._receive(complete, self._passed)
        self._passed += size

    def _apply(
        self, use: Use, of_inner: Mapping[str, str], gradient: torch.Tensor
    ) -> None:
        if self._witness is not None:
            self._witness(use, list(of_inner.values()), gradient)
        if self._scale != 1:
            gradient = gradient.to(accumulation_dtype(gradient.dtype)) / self._scale
        wanted = {i: name for i, name in of_inner.items() if name not in self.problems}
        if not wanted:
            return
        try:
            found = _contributions(use, gradient, self._num_samples, self._may_fold)
            missing = sorted(set(wanted) - set(found))
            if missing:
                raise Refusal(f"its rule says nothing of {', '.join(missing)}")
            parts = {
                inner: regroup(widened(found[inner]), self._num_samples)
                for inner in wanted
            }
        except Refusal as refusal:
            for name in dict.fromkeys(of_inner.values()):
                self.problems.setdefault(name, []).append(f"{use}: {refusal}")
                self._parts.pop(name, None)
            return
        for inner, name in wanted.items():
            self._parts.setdefault(name, []).append(parts[inner])


def _contributions(
    use: Use, gradient: torch.Tensor, num_samples: int, may_fold: bool
) -> Mapping[str, Contribution]:
    """The rule's."""
    gradient = use.call.batch_first(gradient)
    rows = gradient.shape[0]
    if rows == 0 or rows % num_samples:
        raise Refusal(
            f"dimension {use.call.batch_dim} of its output {tuple(use.shape)} counts "
            f"{rows}, no multiple of the {num_samples} samples; set "
            "batch_dim, or give the module a batch dimension (position ids: expand "
            "them to one row per sample)"
        )
    if rows != num_samples and not may_fold:
        raise Refusal(
            f"it was called with {rows} rows for {num_samples} samples; that "
            "each owns consecutive ones is only believed when checked: do not pass "
            'check="never"'
        )
    return use.rule.contributions(use.call, gradient)
