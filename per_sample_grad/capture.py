"""Recording one forward pass, and the backward pass that makes the factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from per_sample_grad import graph, verify
from per_sample_grad.calls import Call, detached, tensors_in
from per_sample_grad.contributions import Contribution, merge, regroup, widened
from per_sample_grad.errors import CouplingError, CoverageError, PerSampleError, Refusal
from per_sample_grad.factors import Factors
from per_sample_grad.fallback import FALLBACKS, Fallback
from per_sample_grad.layers import Rule, rule_of
from per_sample_grad.layers.batch_norm import uses_batch_statistics
from per_sample_grad.plan import DEFAULT_BUDGET, METHODS, Method

Selection = Collection[str] | Callable[[str, nn.Parameter], bool] | None


@dataclasses.dataclass(frozen=True)
class Use:
    """One recorded call of a module that has a rule.

    Attributes:
        name: Of the module in the model.
        call: The module and its arguments.
        rule: What is known of it.
        region: Where it stands in the graph.
        shape: Of its output.
        versions: How often each tensor argument had been changed in place.
    """

    name: str
    call: Call
    rule: Rule
    region: graph.Region
    shape: torch.Size
    versions: tuple[int, ...]


class Capture:
    """Records the forward pass of a model; see `capture`."""

    def __init__(
        self,
        model: nn.Module,
        params: Selection = None,
        *,
        batch_dim: int | Mapping[str, int] = 0,
        fallback: Fallback = "error",
        check: verify.Check = "first",
        method: Method = "auto",
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        _require("fallback", fallback, FALLBACKS)
        _require("check", check, verify.CHECKS)
        _require("method", method, METHODS)
        if budget < 1:
            raise ValueError(f"budget={budget} bytes; give at least 1")
        self.model = model
        self.params = selected(model, params)
        self.uses: list[Use] = []
        self._batch_dim = batch_dim
        self._fallback = fallback
        self._check = check
        self._method = method
        self._budget = budget
        self._handles: list[RemovableHandle] = []
        self._names = {id(value): name for name, value in self.params.items()}
        self._params = params

    def __enter__(self) -> Capture:
        _refuse_batch_statistics(self.model)
        if self.uses:
            raise RuntimeError("this capture was used already; make another")
        dims = self._dims()
        try:
            for name, module in self.model.named_modules():
                rule = rule_of(module)
                if rule is not None and self._owns_selected(module):
                    hook = self._hook(name, rule, dims.get(name, dims[""]))
                    self._handles.append(
                        # First, so that other hooks' changes come after it.
                        module.register_forward_hook(
                            hook, prepend=True, with_kwargs=True
                        )
                    )
        except BaseException:
            self._remove_hooks()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del error, trace
        self._remove_hooks()
        if kind is not None:
            self.uses.clear()

    def backward(self, losses: torch.Tensor, *, retain_graph: bool = False) -> Factors:
        """One backward pass, for activations only: what every answer is made of.

        Args:
            losses: ``(B,)``, any float dtype: the loss of each sample.
            retain_graph: Keep the graph for another backward pass of your own.

        Returns:
            The factors of every sample's gradient. No ``.grad`` changes.

        Raises:
            ValueError: ``losses`` is no vector with a graph.
            CoverageError: Some use of a parameter is not accounted for.
            CouplingError: The answer differs from autograd's.
        """
        self._remove_hooks()
        _check_losses(losses)
        reached = graph.walk(losses, [use.region for use in self.uses], self._names)
        uses = [self.uses[number] for number in sorted(reached.regions)]
        self._check_versions(uses)
        signature = verify.signature(losses, uses, self._names.values())
        check = verify.is_due(self._check, self.model, signature)
        keep = retain_graph or check or bool(reached.outside)
        edges = [use.region.output for use in uses]
        grads = _gradients(losses, edges, retain_graph=True if keep else None)
        parts, problems = self._contributions(uses, grads, len(losses))
        for name, number in reached.outside.items():
            problems.setdefault(name, []).append(
                f"{number} use(s) outside any module with a rule"
            )
        if problems:
            parts = self._fall_back(losses, parts, problems)
        merged = {name: merge(parts.get(name, [])) for name in self.params}
        factors = Factors(
            {name: tuple(param.shape) for name, param in self.params.items()},
            merged,
            losses.detach(),
            method=self._method,
            budget=self._budget,
            seen_dtypes=frozenset(grad.dtype for grad in grads if grad is not None),
        )
        if check:
            verify.verify(losses, self.params, factors, self.model, signature)
        self.report = (uses, problems)
        self.uses = []
        return factors

    def _hook(self, name: str, rule: Rule, batch_dim: int) -> Callable[..., None]:
        def record(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
        ) -> None:
            output = out[0] if isinstance(out, tuple | list) else out
            if not isinstance(output, torch.Tensor) or not output.requires_grad:
                return
            tensors = list(tensors_in((args, kwargs)))
            for tensor in (*tensors, output):
                _refuse_tracing(name, tensor)
            call = Call(module, detached(args), detached(kwargs), batch_dim)
            region = graph.Region(
                graph.edge_of(output), graph.input_nodes((args, kwargs))
            )
            versions = tuple(tensor._version for tensor in tensors)
            self.uses.append(Use(name, call, rule, region, output.shape, versions))

        return record

    def _owns_selected(self, module: nn.Module) -> bool:
        return any(id(param) in self._names for param in module.parameters())

    def _dims(self) -> dict[str, int]:
        if isinstance(self._batch_dim, int):
            return {"": self._batch_dim}
        modules = dict(self.model.named_modules())
        unknown = sorted(set(self._batch_dim) - set(modules))
        if unknown:
            raise ValueError(
                f"batch_dim names {', '.join(unknown)}, which are no modules of the "
                'model; give names as model.named_modules() does, "" for all others'
            )
        return {"": 0, **self._batch_dim}

    def _contributions(
        self,
        uses: list[Use],
        grads: list[torch.Tensor | None],
        num_samples: int,
    ) -> tuple[dict[str, list[Contribution]], dict[str, list[str]]]:
        """What every rule says, and why some said nothing, by parameter."""
        parts: dict[str, list[Contribution]] = {}
        problems: dict[str, list[str]] = {}
        for use, grad in zip(uses, grads):
            if grad is None:
                continue
            owned = dict(use.call.module.named_parameters(remove_duplicate=False))
            names = {
                inner: self._names[id(param)]
                for inner, param in owned.items()
                if id(param) in self._names
            }
            try:
                found = self._apply(use, grad.reshape(use.shape), num_samples)
                missing = sorted(set(names) - set(found))
                if missing:
                    raise Refusal(f"its rule says nothing of {', '.join(missing)}")
            except Refusal as refusal:
                kind = type(use.call.module).__name__
                for name in names.values():
                    problems.setdefault(name, []).append(
                        f"{kind} {use.name!r}: {refusal}"
                    )
                continue
            for inner, name in names.items():
                parts.setdefault(name, []).append(found[inner])
        return parts, problems

    def _apply(
        self, use: Use, grad: torch.Tensor, num_samples: int
    ) -> Mapping[str, Contribution]:
        """The rule's contributions, with B rows each, in float32 or wider."""
        grad = use.call.batch_first(grad)
        if len(grad) == 0 or len(grad) % num_samples:
            raise Refusal(
                f"dimension {use.call.batch_dim} of its output {tuple(use.shape)} "
                f"counts {len(grad)}, no multiple of the {num_samples} samples; set "
                "batch_dim, or give the module a batch dimension (position ids: expand "
                "them to one row per sample)"
            )
        if len(grad) != num_samples and self._check == "never":
            raise Refusal(
                f"it was called with {len(grad)} rows for {num_samples} samples; that "
                "a sample owns consecutive ones is only believed when checked: do not "
                'pass check="never"'
            )
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            found = use.rule.contributions(use.call, grad.detach())
            return {
                name: regroup(widened(part), num_samples)
                for name, part in found.items()
            }

    def _fall_back(
        self,
        losses: torch.Tensor,
        parts: dict[str, list[Contribution]],
        problems: Mapping[str, list[str]],
    ) -> dict[str, list[Contribution]]:
        if self._fallback == "error":
            lines = "".join(
                f"\n  {name}: {'; '.join(reasons)}"
                for name, reasons in problems.items()
            )
            raise CoverageError(
                "these parameters have uses that no layer rule accounts for:"
                f"{lines}\nRegister a rule for the module (register_rule), leave the "
                'parameters out (params=), or pass fallback="loop" (B backward passes '
                'for them, exact) or fallback="batched" (one vectorised one)'
            )
        values = {name: self.params[name] for name in problems}
        dense = FALLBACKS[self._fallback](losses, values)
        return {**parts, **{name: [value] for name, value in dense.items()}}

    def _check_versions(self, uses: list[Use]) -> None:
        for use in uses:
            tensors = tensors_in((use.call.args, use.call.kwargs))
            if use.versions != tuple(tensor._version for tensor in tensors):
                raise PerSampleError(
                    f"the input of {type(use.call.module).__name__} {use.name!r} was "
                    "changed in place after the module had used it, so its gradient "
                    "cannot be had (an ordinary backward pass fails likewise); use an "
                    "operation that is not in place"
                )

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def capture(
    model: nn.Module,
    params: Selection = None,
    *,
    batch_dim: int | Mapping[str, int] = 0,
    fallback: Fallback = "error",
    check: verify.Check = "first",
    method: Method = "auto",
    budget: int = DEFAULT_BUDGET,
) -> Capture:
    """Records a forward pass, for every sample's gradient, norm and inner products.

    The model is an ordinary one and stays as it is: hooks are there inside the block
    only. Nothing is recorded of parameters that do not require grad.

    Args:
        model: Any module. BatchNorm must not use the batch's statistics.
        params: Names of parameters, or a predicate of name and parameter; None: all
            that require grad.
        batch_dim: The dimension that counts samples in what modules take and return,
            or that by module name, ``""`` for the others. A dimension of k times B
            numbers counts as k consecutive rows of each sample.
        fallback: For parameters that no rule accounts for: ``"error"``, ``"loop"`` (B
            backward passes, exact) or ``"batched"`` (one, vectorised by torch).
        check: When to compare with autograd, for one more backward pass and, on a
            lazy device, one read-back: ``"first"`` time for each structure (modules
            called, shapes), ``"always"`` or ``"never"``.
        method: Form of products: ``"auto"`` as planned, ``"factored"`` or
            ``"materialized"`` (slower, and exact where positions cancel).
        budget: Bytes of temporary tensors per parameter.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with capture(model) as recorded:
        ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
        >>> recorded.backward(losses).norms()
        tensor([5., 2.])
    """
    return Capture(
        model,
        params,
        batch_dim=batch_dim,
        fallback=fallback,
        check=check,
        method=method,
        budget=budget,
    )


def selected(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """The parameters that were asked for, by their first name in the model."""
    named = dict(model.named_parameters())
    trained = {name: param for name, param in named.items() if param.requires_grad}
    if params is None:
        chosen = trained
    elif callable(params):
        chosen = {name: param for name, param in trained.items() if params(name, param)}
    else:
        every = dict(model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in named.items()}
        wrong = sorted(name for name in params if name not in every)
        frozen = sorted(n for n in params if n in every and not every[n].requires_grad)
        if wrong or frozen:
            raise ValueError(
                f"params: {', '.join(wrong + frozen)} are no parameters of the model "
                f"that require grad; allowed are {', '.join(trained) or 'none'}"
            )
        asked = {first[id(every[name])] for name in params}
        chosen = {name: param for name, param in trained.items() if name in asked}
    if not chosen:
        raise ValueError(
            "no parameter is selected: the model has none that requires grad, or "
            "params= leaves none"
        )
    return chosen


def _gradients(
    losses: torch.Tensor, edges: list[Any], retain_graph: bool | None
) -> list[torch.Tensor | None]:
    if not edges:
        return []
    return list(
        torch.autograd.grad(
            losses.sum(), edges, retain_graph=retain_graph, allow_unused=True
        )
    )


def _check_losses(losses: torch.Tensor) -> None:
    if losses.dim() != 1 or not losses.dtype.is_floating_point or not len(losses):
        raise ValueError(
            f"losses of shape {tuple(losses.shape)} and dtype {losses.dtype}: give one "
            'number per sample, shape (B,), for instance with reduction="none"; for '
            "losses per token see per_sample_grad.token_cross_entropy"
        )
    if not losses.requires_grad:
        raise ValueError(
            "losses have no graph: compute them inside the capture from the model's "
            "output, with gradients enabled"
        )


def _refuse_batch_statistics(model: nn.Module) -> None:
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and uses_batch_statistics(module)
    ]
    if names:
        raise CouplingError(
            f"BatchNorm normalises by statistics of the batch in {', '.join(names)}: "
            "a sample's loss then depends on the other samples, and has no gradient of "
            "its own. Freeze the statistics (module.eval() on these modules, with "
            "track_running_stats=True), or use GroupNorm or LayerNorm"
        )


def _refuse_tracing(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise CoverageError(
            f"module {name!r} was called with or returned a {type(tensor).__name__}: "
            "hooks cannot record what is being traced (scan_layers, torch.compile, "
            "torch.func). Capture the model without it"
        )


def _require(what: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{what}={value!r}; allowed are {', '.join(allowed)}")
