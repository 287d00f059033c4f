"""Squared norms straight from what a call was given and the gradient of its output.

A layer's rule makes factors, of which a plan says how their norms are computed. Of the
layers that most models consist of, the norms of weight and bias are made here together,
in as few operations as there can be. The numbers are those of `Factors.norms`, up to
rounding.

Axes: B samples, T positions, p rows and q columns of a weight, K offsets in a kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from per_sample_grad.errors import Refusal
from per_sample_grad.factors import algebra, forms, hadamard, loops, plan
from per_sample_grad.factors.factors import JOINED, Factors
from per_sample_grad.factors.forms import (
    Contribution,
    Dense,
    Extent,
    Hadamard,
    Outer,
    Windows,
)
from per_sample_grad.factors.plan import Method
from per_sample_grad.layers import summing
from per_sample_grad.layers.batch_norm import batch_norm
from per_sample_grad.layers.convolution import convolution, unfolding_of
from per_sample_grad.layers.embedding import embedding
from per_sample_grad.layers.group_norm import group_norm
from per_sample_grad.layers.instance_norm import instance_norm
from per_sample_grad.layers.layer_norm import layer_norm
from per_sample_grad.layers.linear import linear
from per_sample_grad.layers.patches import Unfolding, windows
from per_sample_grad.layers.registry import Rule
from per_sample_grad.layers.rms_norm import rms_norm
from per_sample_grad.layers.taken import (
    Normalisations,
    TakenCall,
    is_ordinary,
    names_of,
    patches_and_ones,
)
from xla_replica import traits


class Norming:
    """The squared norms of every sample's gradient, as a backward pass comes by calls.

    Args:
        losses: ``(B,)``.
        may_read_saved: Whether nodes may be asked for what operations have saved.
        budget: Bytes of temporary tensors; None: as `Capture` has it.
        replaces: Whether factors may come again for a parameter, and count then.
    """

    waiting = 2**20  # a tenth of what small models need for training

    def __init__(
        self,
        losses: torch.Tensor,
        may_read_saved: bool,
        budget: int | None,
        replaces: bool,
    ) -> None:
        self._device, self._num_samples = losses.device, losses.shape[0]
        self.normalisations = Normalisations(may_read_saved)
        self._budget, self._replaces = budget, replaces
        # Elsewhere what cancels must not be read, or a program is compiled.
        self._is_direct = traits(losses).is_host
        self._recorded = 0  # how many numbers calls have returned
        self._uses: Counter[str] = Counter()
        # Norms ``(B,)`` of both factors of a weight with a bias and one position.
        self._lefts: list[torch.Tensor] = []
        self._rights: list[torch.Tensor] = []
        # Gradients ``(B, n)`` of few numbers, and how many there are.
        self._rows: list[torch.Tensor] = []
        self._num_numbers = 0
        self._terms: list[torch.Tensor] = []  # squared norms ``(B,)``
        self._of_factors: dict[str, torch.Tensor] = {}

    def receive(self, factors: Factors) -> None:
        """Takes the factors of some parameters."""
        if self._replaces:
            self._of_factors |= factors.norms_by_parameter(squared=True)
        else:
            name = next(iter(factors.shapes), "")
            self._of_factors[name] = factors.norms(squared=True)

    def prepare(self, call: TakenCall) -> bool:
        """Counts uses of parameters, and keeps what a normalisation has saved.

        Returns whether the call needs nothing else that its operation has saved.
        """
        self._uses.update(call.owner.params.values())
        self._recorded += call.shape.numel()
        if not self._is_direct or call.owner.rule not in _WAYS:
            return False
        self.normalisations.keep(call)
        return True

    def take(self, call: TakenCall, gradient: torch.Tensor) -> bool:
        """Takes a call with the gradient of its output, if it can; returns whether."""
        way = _WAYS.get(call.owner.rule) if self._is_direct else None
        if way is None or not is_ordinary(call.call, gradient, self._num_samples):
            return False
        uses = self._uses
        for name in call.owner.params.values():
            if uses[name] > 1:  # norms of a sum are not those of its terms
                return False
        return way(self, call, call.call.args[0], gradient)

    @property
    def budget(self) -> int:
        """The bytes of temporary tensors; asked for once all calls are prepared."""
        if self._budget is None:
            size = 4 * self._recorded
            self._budget = plan.default_budget(size, self._device)
        return self._budget

    def take_gradients(self, uses: Sequence[Contribution]) -> bool:
        """Takes gradients that are formed, and products of one position."""
        if not self._is_direct:
            return False
        match uses:
            case [Dense(values)]:
                self.add_rows(values.flatten(1))
                return True
            case [Outer(left, right) as use] if _is_one_product(use):
                _add_products(self, left[:, 0, 0], right[:, 0, 0], "weight", None)
                return True
            case [Hadamard() as use] if _is_one_product(use):
                self.add(hadamard.kernel(use, use).flatten())
                return True
            case [_, *_] if all(map(_is_one_product, uses)):
                found, terms = algebra.squared_norms_and_terms(uses, self._num_samples)
                if not bool(plan.cancels(found, terms)):
                    self.add(found)
                    return True
        return False

    def choice(
        self, use: Extent, shape: tuple[int, int], method: Method = "auto"
    ) -> plan.Choice:
        """Returns how the norms of one use of a parameter are computed."""
        num_samples = self._num_samples
        return plan.choose(
            "norms", (use,), (use,), shape, same=True, num_samples=num_samples,
            num_other=num_samples, budget=self.budget, method=method,
        )  # fmt: skip

    def add(self, squares: torch.Tensor) -> None:
        """Adds squared norms ``(B,)``."""
        self._terms.append(squares)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds those of a weight and a bias from ``(B, p)`` and ``(B, q)``."""
        self._lefts.append(torch.linalg.vector_norm(left, dim=1))
        self._rights.append(torch.linalg.vector_norm(right, dim=1))

    def add_rows(self, rows: torch.Tensor) -> None:
        """Adds those of gradients, ``(B, n)``."""
        if rows.numel() > JOINED:
            self._terms.append(algebra.squares(rows))
            return
        self._rows.append(rows)
        self._num_numbers += rows.numel()
        if self._num_numbers > 8 * JOINED:
            self._join_rows()

    def _join_rows(self) -> None:
        rows, self._rows, self._num_numbers = self._rows, [], 0
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        self._terms.append(algebra.squares(joined))

    def finish(self) -> None:
        """Does nothing: every call is taken at once."""

    def result(self, multiplier: float) -> torch.Tensor:
        """Returns squared norms ``(B,)`` of gradients that are so many times as large.

        Those of factors are not multiplied, as these know it.
        """
        if self._rows:
            self._join_rows()
        if self._lefts:
            left, right = torch.stack(self._lefts), torch.stack(self._rights)
            self._terms.append((left.square_() * right.square_().add_(1)).sum(0))
        total = forms.summed(self._terms) if self._terms else None
        if total is not None and multiplier != 1:
            total = total * multiplier**2
        rest = list(self._of_factors.values())
        terms = rest if total is None else [total, *rest]
        return forms.summed(terms)


def _is_one_product(use: Contribution) -> bool:
    """Returns whether a use has one group and one position of each sample."""
    outer = use.products if isinstance(use, Hadamard) else use
    return isinstance(outer, Outer) and outer.groups == outer.positions == 1


def _linear(
    into: Norming, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    weight, bias = names_of(call)
    if inputs.dim() < 2:
        return False
    if gradient.dim() > 2:
        num_samples = len(gradient)
        left = gradient.reshape(num_samples, -1, gradient.shape[-1])
        right = inputs.reshape(num_samples, -1, inputs.shape[-1])
        if left.shape[1] != 1:
            if weight is None:
                into.add_rows(left.sum(1))
                return True
            if _are_alike(left):
                # As below a mean over positions: one product with the sum of inputs.
                _add_alike(into, left, right, bias is not None)
                return True
            p, q = left.shape[2], right.shape[2]
            use = Extent(Outer, 1, left.shape[1], p, q, left.itemsize)
            _add_sums(
                into,
                use,
                lambda samples: zip(left.split(samples), right.split(samples)),
                with_bias=bias is not None,
            )
            return True
        gradient, inputs = left[:, 0], right[:, 0]
    _add_products(into, gradient, inputs, weight, bias)
    return True


def _are_alike(left: torch.Tensor) -> bool:
    """Returns whether all positions have the same gradient, ``(B, T, p)``."""
    first = left[:, :1]
    return torch.equal(first, left[:, -1:]) and torch.equal(first.expand_as(left), left)


def _add_alike(
    into: Norming, left: torch.Tensor, right: torch.Tensor, with_bias: bool
) -> None:
    """Adds ``‖u‖² ‖Σ_t z_t‖²`` and, with a bias, ``T² ‖u‖²``."""
    squares = algebra.squares(right.sum(1))
    if with_bias:
        squares = squares + left.shape[1] ** 2
    into.add(algebra.squares(left[:, 0]) * squares)


def _add_products(
    into: Norming,
    left: torch.Tensor,
    right: torch.Tensor,
    weight: str | None,
    bias: str | None,
) -> None:
    """Adds ``‖u‖² (‖z‖² + 1)``, without 1 if nobody wants the bias."""
    if weight is None:
        into.add_rows(left)
    elif bias is None:
        into.add(algebra.squares(left) * algebra.squares(right))
    else:
        into.add_product(left, right)


# From a number of samples to ``(n, T, p)`` and ``(n, T, q)`` of so many at a time.
_Pairs = Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]


def _add_sums(into: Norming, use: Extent, pairs: _Pairs, with_bias: bool) -> None:
    """Adds the norms of ``Σ_t u_t z_tᵀ`` and, with a bias, of ``Σ_t u_t``, as planned.

    Where columns of z are ones the former has the latter.
    """
    shape = (use.height, use.width)
    choice = into.choice(use, shape)
    if choice.form == "factored":
        found = _by_positions(pairs(choice.samples), with_bias)
        if found is not None:
            into.add(found)
            return
        choice = into.choice(use, shape, "materialized")
    squares, sums = [], []
    for us, zs in pairs(choice.samples):
        left = us.transpose(1, 2)
        parts = zs.split(choice.columns, 2) if choice.columns < use.width else [zs]
        squares.append(
            forms.summed(algebra.squares(torch.bmm(left, part)) for part in parts)
        )
        if with_bias:
            sums.append(us.sum(1))
    into.add(_joined(squares))
    if with_bias:
        into.add_rows(_joined(sums))


def _by_positions(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], with_bias: bool
) -> torch.Tensor | None:
    """Returns squared norms from ``⟨u_t, u_s⟩ (⟨z_t, z_s⟩ + 1)``.

    The 1 is for a bias. None: positions cancel, so that they would have too few digits.
    """
    found, terms = [], []
    for us, zs in pairs:
        if us.is_contiguous() and zs.is_contiguous() and loops.available(us):
            squares, alone = summing.squares_by_positions(us, zs, with_bias)
        else:
            of_left = torch.bmm(us, us.transpose(1, 2))
            of_right = torch.bmm(zs, zs.transpose(1, 2))
            if with_bias:
                of_right += 1
            squares = torch.linalg.vecdot(of_left.flatten(1), of_right.flatten(1))
            left, right = (x.diagonal(dim1=1, dim2=2) for x in (of_left, of_right))
            alone = torch.linalg.vecdot(left, right)
        found.append(squares)
        terms.append(alone)
    squares = _joined(found)
    return None if bool(plan.cancels(squares, _joined(terms))) else squares


def _convolution(
    into: Norming, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Lets torch form the gradients of many channels, and multiplies patches of few."""
    weight, bias = names_of(call)
    module = call.call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if inputs.dim() != 2 + len(module.kernel_size):
        return False
    if weight is None:
        into.add_rows(gradient.flatten(2).sum(2))
        return True
    unfolding = unfolding_of(module, gradient.shape[2:])
    use = windows(gradient, inputs, unfolding)
    extent = forms.extent(use)
    shape = extent.groups * extent.height, extent.width
    if summing.has_loop(unfolding) and loops.available(gradient):
        size = summing.elements_of_convolution(unfolding, inputs.shape[1])
        is_formed = into.choice(extent, shape).form == "materialized"
        if is_formed and size * gradient.itemsize <= into.budget:
            with_bias = bias is not None
            into.add(
                summing.squares_of_convolution(inputs, gradient, unfolding, with_bias)
            )
            return True
    if use.direct is not None:
        choice = into.choice(extent, shape)
        if choice.form == "materialized" and choice.columns == extent.width:
            _add_formed(into, use, unfolding, choice.samples, bias is not None)
            return True
    if module.groups > 1:
        return False
    left, with_ones = gradient.flatten(2), bias is not None
    if unfolding.is_pointwise:
        right, with_ones = inputs.flatten(2), False
        if left.shape[2] == 1:
            _add_products(into, left[:, :, 0], right[:, :, 0], weight, bias)
            return True

    def pairs(samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start, stop in forms.chunks(len(left), samples):
            if unfolding.is_pointwise:
                zs = right[start:stop]
            else:
                zs = patches_and_ones(unfolding, inputs[start:stop], with_ones)
            yield left[start:stop].transpose(1, 2), zs.transpose(1, 2)

    _add_sums(into, extent, pairs, with_bias=bias is not None and not with_ones)
    return True


def _add_formed(
    into: Norming, use: Windows, unfolding: Unfolding, samples: int, with_bias: bool
) -> None:
    """Adds norms of gradients that a convolution forms, of some samples at a time."""
    squares, sums = [], []
    for start, stop in forms.chunks(len(use.left), samples):
        left, source = use.left[start:stop], use.source[start:stop]
        formed, of_bias = unfolding.gradients_and_sums(left, source, with_bias)
        squares.append(algebra.squares(formed))
        if of_bias is not None:
            sums.append(of_bias)
    into.add(_joined(squares))
    if sums:
        into.add_rows(_joined(sums))


def _embedding(
    into: Norming, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    module = call.call.module
    assert isinstance(module, nn.Embedding)
    if module.scale_grad_by_freq:
        return False
    use = embedding(call.call, gradient)["weight"]
    if loops.available(use.values):
        into.add(summing.squares_of_table(use, module.num_embeddings))
        return True
    extent, shape = forms.extent(use), tuple(module.weight.shape)
    choice = into.choice(extent, shape)
    if choice.form == "factored":
        found, terms = algebra.squared_norms_and_terms([use], choice.samples)
        if not bool(plan.cancels(found, terms)):
            into.add(found)
            return True
        choice = into.choice(extent, shape, "materialized")
    into.add(
        algebra.materialized_squared_norms([use], shape, choice.samples, choice.columns)
    )
    return True


def _normalisation(
    into: Norming, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    found = into.normalisations.gradients(call, gradient)
    if found is None:
        return _by_rule(into, call, inputs, gradient)
    for name, rows in zip(names_of(call), found):
        if name is not None:
            into.add_rows(rows)
    return True


def _by_rule(
    into: Norming, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Adds what a rule returns if all of that is gradients themselves."""
    rule = call.owner.rule
    assert rule is not None
    try:
        found = rule(call.call, gradient)
    except Refusal:  # it is refused again, and said, where the rule is applied
        return False
    uses = [found.get(inner) for inner in call.owner.params]
    if not all(isinstance(use, Dense) for use in uses):
        return False
    for use in uses:
        into.add_rows(use.values.reshape(len(gradient), -1))
    return True


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# Whether it took the call, of which the last two arguments are input and gradient.
_Way = Callable[[Norming, TakenCall, torch.Tensor, torch.Tensor], bool]
_WAYS: dict[Rule | None, _Way] = {
    linear: _linear,
    convolution: _convolution,
    embedding: _embedding,
    layer_norm: _normalisation,
    group_norm: _normalisation,
    batch_norm: _by_rule,
    instance_norm: _by_rule,
    rms_norm: _by_rule,
}
