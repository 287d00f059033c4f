"""Recording one forward pass, and the backward pass that makes the factors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import nn

import xla_replica
from per_sample_grad.engine import settings
from per_sample_grad.engine.backward_pass import BackwardPass
from per_sample_grad.engine.comparison import Comparison
from per_sample_grad.engine.recording import Recorder
from per_sample_grad.engine.walk import NOTHING, walk
from per_sample_grad.errors import PerSampleError
from per_sample_grad.factors.factors import Factors, check_projected
from per_sample_grad.factors.plan import Method
from per_sample_grad.factors.projection import Projection
from xla_replica.common.trees import tree_add

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")


class PassOptions(TypedDict, total=False):
    """What every backward pass of a `Capture` may be told, for type checkers."""

    retain_graph: bool
    accumulate: settings.Accumulate | None


class Capture:
    """Records a forward pass, for every sample's gradient, norm and inner products.

    The model is an ordinary one and stays as it is: hooks are there inside the block
    only. Nothing is recorded of parameters that do not require grad. `capture` is
    another name of this class.

    Args:
        model: Any module. BatchNorm must not use the batch's statistics.
        params: Names of parameters, or a predicate of name and parameter; None: all
            that require grad.
        batch_dim: The dimension that counts samples in what modules take and return;
            or a dict of it by module name, with ``""`` for all others. A dimension of
            k times B numbers counts as k consecutive rows of each sample. None says
            that what a module returns is the same for all samples, as a table of
            positions; that is believed where the number of rows is not a multiple of B.
        fallback: What to do about parameters that no rule accounts for: ``"error"`` or
            ``"loop"`` (B backward passes of the batch, for whatever autograd can do).
            The loop also replaces rules that turn out wrong when checked. A batch of
            one sample always has it for what no rule accounts for.
        check: When to compare with autograd, for one more backward pass and, on a
            lazy device, one read-back: the ``"first"`` time for each structure
            (modules called, shapes), ``"always"`` or ``"never"``. Where an operation is
            not known to keep samples apart whatever the data (``losses[order]``, an
            operator of your own), ``"first"`` compares every time.
        method: The form of products: ``"auto"`` as planned, ``"factored"`` (which
            loses digits where positions cancel) or ``"materialized"`` (slower).
        budget: Bytes of temporary tensors; None: half of what the modules with
            rules returned, at least 1 MiB on a CPU and 64 MiB elsewhere, at most 256
            MiB.
        scale: What losses are multiplied by in the backward pass, and answers divided
            by: against underflow in float16, as a gradient scaler does. Best a power
            of two.

    Attributes:
        params: The selected parameters, by their first name in the model.
        unused: The selected parameters that the losses of the backward pass do not
            depend on; their gradients are zero.

    Raises:
        PerSampleError: A selected parameter has a gradient hook.
        TypeError, ValueError: An option is not allowed, or a parameter is sharded.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with capture(model) as recorded:
        ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
        >>> recorded.backward(losses).norms()
        tensor([5., 2.])
    """

    def __init__(
        self,
        model: nn.Module,
        params: settings.Selection = None,
        *,
        batch_dim: int | Mapping[str, int | None] = 0,
        fallback: settings.Fallback = "error",
        check: settings.Check = "first",
        method: Method = "auto",
        budget: int | None = None,
        scale: float = 1.0,
    ) -> None:
        self.model = model
        self.params = settings.selected(model, params)
        self._settings = settings.Settings(
            model, self.params, batch_dim, fallback, check, method, budget, scale
        )
        self._comparison: Comparison | None = None
        self.unused: frozenset[str] = frozenset()
        self._recorder, self._hooks = Recorder(self._settings), contextlib.ExitStack()
        self._answered = False
        # What else takes a gradient; None: nothing can be added.
        self._others: list[torch.Tensor] | None = None

    def __enter__(self) -> Capture:
        self._hooks.close()
        self._hooks = self._recorder.place_hooks()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._hooks.close()
        if kind is not None:
            self._recorder.calls.clear()

    @property
    def compared(self) -> bool:
        """Whether the backward pass was compared with autograd.

        False where gradients were not finite, which no comparison can judge.
        """
        return self._comparison is not None and not self._comparison.unknown

    def backward(self, losses: torch.Tensor, **how: Unpack[PassOptions]) -> Factors:
        """Runs one backward pass, for activations only, and keeps all factors.

        Args:
            losses: ``(B,)``, any float dtype: the loss of each sample. Without samples
                all answers are of no samples, and nothing is compared.
            retain_graph: Keep the graph for another backward pass of your own.
            accumulate: ``"mean"`` lets the pass be ``losses.mean().backward()``, which
                adds to ``.grad`` and runs the hooks of parameters, and ``"sum"`` that
                of the sum; both times ``scale``. With None no ``.grad`` changes.

        Returns:
            The factors of every sample's gradient.

        Raises:
            ValueError: ``losses`` is not a vector with a graph.
            RuntimeError: There was a backward pass already.
            CoverageError: Some use of a parameter is not accounted for, or nothing was
                recorded.
            CouplingError: The answer differs from autograd's.
        """
        found: list[Factors] = []
        self._run(losses, found.append, together=True, **how)
        return found[0]

    def stream(
        self,
        losses: torch.Tensor,
        answer: Callable[[Factors], _T],
        **how: Unpack[PassOptions],
    ) -> _T:
        """Returns an answer that is a sum over parameters, in the memory of training.

        `backward` keeps all factors, so that every answer can be asked for. Here
        ``answer`` is asked about a few parameters at a time, as soon as the backward
        pass has come to them, and their factors are freed before it continues. (With
        a fallback the factors are kept, and it is asked about all at once.)

        Args:
            losses: ``(B,)``, as for `backward`.
            answer: From `Factors` of some parameters to a tensor, or tuples, lists and
                dicts of tensors. Tensors are added, those of dicts by name:
                `Factors.norms` must be ``squared=True``, and a vector for
                `Factors.dot` must have the names in ``factors.shapes``. It may run in
                another thread.
            retain_graph, accumulate: As for `backward`.

        Returns:
            The sum of the answers.

        Raises:
            PerSampleError: As for `backward`.
            TypeError: Answers cannot be added.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> with capture(model) as recorded:
            ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
            >>> recorded.stream(losses, lambda factors: factors.norms(squared=True))
            tensor([25.,  4.])
        """
        answers: list[_T] = []

        def ask(factors: Factors) -> None:
            value = answer(factors)
            answers[:] = [tree_add(answers[0], value) if answers else value]

        self._run(losses, ask, **how)
        return answers[0]

    def materialize(
        self, losses: torch.Tensor, **how: Unpack[PassOptions]
    ) -> dict[str, torch.Tensor]:
        """Returns every sample's gradient, ``(B, *shape)`` by name.

        They are what `Factors.materialize` returns. Those of layers whose factors are
        smaller are formed when the pass is over, and not in memory together with the
        activations of other layers.

        Args:
            losses: ``(B,)``, as for `backward`.
            retain_graph, accumulate: As for `backward`.

        Raises:
            PerSampleError: As for `backward`.
        """
        found: dict[str, torch.Tensor] = {}
        later: list[Factors] = []

        def form(factors: Factors) -> None:
            if factors.are_smaller:
                later.append(factors)
            else:
                found.update(factors.materialize())

        self._run(losses, form, **how)
        while later:
            found.update(later.pop().materialize())
        return {name: found[name] for name in self.params}

    def add_gradients(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Adds sums over the samples to ``.grad``, as the end of a backward pass does.

        An answer without ``accumulate`` that has formed every gradient has formed their
        sum as well, up to rounding: a pass that accumulates would form it once more,
        from activations. Hooks of parameters run, and so do sums over replicas in the
        backward pass. A parameter that the losses do not depend on gets nothing.

        Args:
            sums: Of every selected parameter, by name; multiplied by ``scale`` here.

        Raises:
            RuntimeError: There was no backward pass, or it had ``accumulate``.
            ValueError: ``sums`` are not those of the selected parameters.
            PerSampleError: The losses depend on something else that takes a gradient,
                which would get none.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> with capture(model) as recorded:
            ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
            >>> gradients = recorded.backward(losses).materialize()
            >>> recorded.add_gradients({n: g.mean(0) for n, g in gradients.items()})
            >>> model.weight.grad
            tensor([[1.5000, 3.0000]])
        """
        if self._others is None:
            raise RuntimeError(
                "add_gradients() takes the place of the part of a backward pass that "
                "adds to .grad: call backward() or stream() before, without accumulate="
            )
        if sums.keys() != self.params.keys():
            raise ValueError(
                "add_gradients: give a sum for every selected parameter; missing or "
                f"unknown: {', '.join(sorted(sums.keys() ^ self.params.keys()))}"
            )
        if self._others:
            known = {id(param): name for name, param in self.model.named_parameters()}
            other = "a tensor outside of the model"
            found = sorted([known.get(id(each), other) for each in self._others])
            raise PerSampleError(
                f"add_gradients: {', '.join(found[:5])} would get no gradient: select "
                "all parameters (params=), or pass accumulate="
            )
        self._others = None
        used = [name for name in self.params if name not in self.unused]
        params, scale = [self.params[name] for name in used], self._settings.scale
        gradients = [
            (sums[name] * scale if scale != 1 else sums[name]).to(param.dtype)
            for name, param in zip(used, params)
        ]
        if params:
            xla_replica.add_gradients(params, gradients)

    def norms(
        self, losses: torch.Tensor, *, squared: bool = False, **how: Unpack[PassOptions]
    ) -> torch.Tensor:
        """Returns norms of every sample's gradient, in the memory of training.

        They are what `Factors.norms` returns, up to rounding.

        Args:
            losses: ``(B,)``, as for `backward`.
            squared: Return ``‖g_i‖²``.
            retain_graph, accumulate: As for `backward`.

        Returns:
            ``‖g_i‖`` over all selected parameters, ``(B,)``, never negative.

        Raises:
            PerSampleError: As for `backward`.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> with capture(model) as recorded:
            ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
            >>> recorded.norms(losses)
            tensor([5., 2.])
        """
        squares = operator.methodcaller("norms", squared=True)
        total: torch.Tensor = self.stream(losses, squares, **how)
        return total if squared else total.sqrt()

    def project(
        self, losses: torch.Tensor, projection: Projection, **how: Unpack[PassOptions]
    ) -> torch.Tensor:
        """Returns projections of every sample's gradient, in the memory of training.

        They are what `Factors.project` returns, side by side.

        Args:
            losses: ``(B,)``, as for `backward`.
            projection: Of these parameters, and perhaps of others.
            retain_graph, accumulate: As for `backward`.

        Returns:
            ``(B, k)``: the numbers of one parameter after the other, in the sequence of
            ``projection.shapes``.

        Raises:
            PerSampleError: As for `backward`.
            ValueError: The projection is of other parameters.
        """
        shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        check_projected(shapes, projection)
        found = self.stream(losses, operator.methodcaller("project", projection), **how)
        return torch.cat([found[n] for n in projection.shapes if n in found], 1)

    def _run(
        self, losses: torch.Tensor, receive: Callable[[Factors], None], **options: Any
    ) -> BackwardPass:
        """Runs the backward pass; the arguments are those of `BackwardPass`."""
        self._hooks.close()
        if losses.dim() != 1 or not losses.dtype.is_floating_point:
            raise ValueError(
                f"losses of shape {tuple(losses.shape)} and dtype {losses.dtype}: give "
                "one number per sample, shape (B,), for instance with "
                'reduction="none"; for losses per token see '
                "per_sample_grad.token_cross_entropy"
            )
        if not losses.requires_grad:
            raise ValueError(
                "losses have no graph: compute them inside the capture, with gradients"
            )
        if self._answered:
            raise RuntimeError(
                "this capture had its backward pass, which used up what was recorded; "
                "ask the factors it returned, or record the forward pass again with "
                "another capture"
            )
        settings.refuse_hooked(self.params)
        backward_pass = BackwardPass(self._settings, losses, receive, **options)
        found = walk(self._settings, losses, self._recorder) if len(losses) else NOTHING
        self._recorder.calls.clear()
        self._answered = True
        backward_pass.run(found)
        self._comparison = backward_pass.compared
        self.unused = frozenset(backward_pass.unused if len(losses) else ())
        if backward_pass.accumulate is None:
            self._others = found.others
        return backward_pass


capture = Capture
