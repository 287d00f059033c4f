"""Projections straight from what a call was given and the gradient of its output.

A layer's rule makes factors, from which a projection sums over positions: that reads
the gradient once for the weight and once for the bias. Of the layers that most models
consist of, both are made here in one product, and vectors are folded together when the
pass has ended. The numbers are those of `Factors.project`, up to rounding.

Axes: B samples, T positions, p rows and q columns of a weight, K offsets in a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from per_sample_grad.factors import forms, loops
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.projection import Fold, Projection
from per_sample_grad.layers import placing
from per_sample_grad.layers.convolution import convolution, unfolding_of
from per_sample_grad.layers.embedding import embedding
from per_sample_grad.layers.group_norm import group_norm
from per_sample_grad.layers.layer_norm import layer_norm
from per_sample_grad.layers.linear import linear
from per_sample_grad.layers.patches import Unfolding, padded
from per_sample_grad.layers.registry import Rule
from per_sample_grad.layers.taken import (
    CACHED,
    Normalisations,
    TakenCall,
    is_ordinary,
    names_of,
)
from xla_replica import traits


class Projecting:
    """The projections of every sample's gradient, as a backward pass comes by calls.

    Args:
        projection: Of all these parameters.
        losses: ``(B,)``.
        names: The parameters, in the sequence of the projection.
        may_read_saved: Whether nodes may be asked for what operations have saved.
        out: Where projections are written, ``(B, k)``; None: a tensor of their own.
    """

    waiting = 2**24  # half of a CPU's cache

    def __init__(
        self,
        projection: Projection,
        losses: torch.Tensor,
        names: Sequence[str],
        may_read_saved: bool,
        out: torch.Tensor | None = None,
    ) -> None:
        self.projection, self._losses = projection, losses
        self._names, self._is_given = names, out is not None
        self.normalisations = Normalisations(may_read_saved)
        self._is_direct = not traits(losses).is_lazy
        self._columns = projection.columns_of(names)
        if out is None and self._is_direct:
            size = len(losses), self._columns.size
            out = losses.new_empty(size, requires_grad=False)
        self._out = out
        # Parameters whose numbers are in their places already.
        self._placed: set[str] = set()
        self._loops: placing.Loops | None = None
        if out is not None and loops.available(out) and placing.is_in_rows(out):
            self._loops = placing.Loops(projection, self._columns, out)
        self._found: dict[str, torch.Tensor] = {}
        # Gradients of parameters that are vectors.
        self._vectors: dict[str, torch.Tensor] = {}
        self._of_factors: dict[str, torch.Tensor] = {}

    def receive(self, factors: Factors) -> None:
        """Takes the factors of some parameters."""
        self._of_factors |= factors.project(self.projection)

    def prepare(self, call: TakenCall) -> bool:
        """Keeps what a normalisation has saved, if that is safe.

        Returns whether the call needs nothing else that its operation has saved.
        """
        if not self._is_direct or call.owner.rule not in _WAYS:
            return False
        self.normalisations.keep(call)
        return True

    def take(self, call: TakenCall, gradient: torch.Tensor) -> bool:
        """Takes a call with the gradient of its output, if it can; returns whether."""
        way = _WAYS.get(call.owner.rule) if self._is_direct else None
        if way is None or not is_ordinary(call.call, gradient, len(self._losses)):
            return False
        loops = self._loops
        if loops is not None:
            weight, bias = names_of(call)
            names = [name for name in (weight, bias) if name is not None]
            # A loop writes and does not add.
            is_first = weight != bias and self._placed.isdisjoint(names)
            is_first = is_first and self._found.keys().isdisjoint(names)
            if is_first and loops.take(call, gradient, self.normalisations):
                self._placed.update(names)
                return True
            loops.run()  # what is written may be added to
        return way(self, call, call.call.args[0], gradient)

    def take_gradients(self, uses: Sequence[Contribution]) -> bool:
        """Leaves them to `Factors`."""
        return False

    def finish(self) -> None:
        """Lets loops write the numbers of the calls that they were given."""
        if self._loops is not None:
            self._loops.run()

    def _place(self, name: str) -> torch.Tensor:
        """Returns the columns of a parameter's numbers."""
        assert self._out is not None
        return self._out.narrow(1, *self._columns.places[name])

    def add(self, name: str, numbers: torch.Tensor) -> None:
        """Adds projections ``(B, k1 k2)`` of one use of a parameter."""
        is_placed = name in self._placed
        before = self._place(name) if is_placed else self._found.get(name)
        if before is not None:
            numbers = torch.add(before, numbers, out=before if is_placed else None)
        if not is_placed:
            self._found[name] = numbers

    def add_outer(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds products of ``(B, k1)`` and ``(B, k2)``, in place if they are first."""
        out, place = self._out, None
        is_first = name not in self._found and name not in self._placed
        if is_first and out is not None and out.dtype == left.dtype:
            place = self._place(name).unflatten(1, (left.shape[1], right.shape[1]))
        numbers = torch.mul(left.unsqueeze(2), right.unsqueeze(1), out=place)
        if place is None:
            self.add(name, numbers.flatten(1))
        else:
            self._placed.add(name)

    def add_vector(self, name: str | None, values: torch.Tensor) -> None:
        """Adds gradients ``(B, n)`` of one use of a vector; None: nobody wants them."""
        if name is not None:
            before = self._vectors.get(name)
            self._vectors[name] = values if before is None else before + values

    def result(self, multiplier: float) -> torch.Tensor:
        """Returns all projections, ``(B, k)``, parameter after parameter.

        What was taken from calls is multiplied by ``multiplier``.
        """
        self.finish()
        if self._vectors:
            for name, numbers in self.projection.of_vectors(self._vectors).items():
                self.add(name, numbers)
        found, rows = self._found, self._out
        others = self._of_factors  # which are multiplied already
        if rows is not None and len(self._placed) == len(self._names) and not others:
            return rows if multiplier == 1 else rows.mul_(multiplier)
        placed = {name: self._place(name) for name in self._placed}
        if others and multiplier != 1:
            for numbers in placed.values():
                numbers.mul_(multiplier)
            for name, numbers in found.items():
                found[name] = numbers * multiplier
        for name, numbers in others.items():
            if name in placed:
                placed[name].add_(numbers)
            else:
                found[name] = numbers + found[name] if name in found else numbers
        dtypes = {each.dtype for each in (*found.values(), *placed.values())}
        if not self._is_given and dtypes != {self._losses.dtype}:
            rows = None  # another dtype would lose digits
        if rows is None:
            found |= placed
            rows = torch.cat([found[name] for name in self._names], 1)
        else:
            for name in self._names:
                if name not in placed:
                    self._place(name).copy_(found[name])
        return rows if others or multiplier == 1 else rows.mul_(multiplier)


def _linear(
    into: Projecting, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Sums over positions what one side has left of its numbers, and ones."""
    weight, bias = names_of(call)
    if inputs.dim() < 2:
        return False
    if weight is None:
        left = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        into.add_vector(bias, left.sum(1))
        return True
    folds = into.projection.folds_like(weight, gradient)
    num_samples, p, q = len(gradient), gradient.shape[-1], inputs.shape[-1]
    if gradient.numel() == num_samples * p:
        rows, columns = gradient, inputs
        if gradient.dim() > 2:
            rows, columns = gradient.reshape(-1, p), inputs.reshape(-1, q)
        into.add_vector(bias, rows)
        if folds.rows is not None:
            rows = folds.rows.along(rows, 1)
        if folds.columns is not None:
            columns = folds.columns.along(columns, 1)
        if folds.columns_come_first:
            rows, columns = columns, rows
        into.add_outer(weight, rows, columns)
        return True
    left = gradient.reshape(num_samples, -1, p)
    right = inputs.reshape(num_samples, -1, q)
    if folds.columns_come_first:
        few, side, other, rest = folds.columns, right, left, folds.rows
    else:
        few, side, other, rest = folds.rows, left, right, folds.columns
    if few is None or few.matrix is None:
        return False
    # With a row of ones the sum is that of the bias, too, where it is of the gradient.
    with_ones = bias is not None and other is left
    k = few.kept
    factor = side.new_ones(num_samples, k + with_ones, side.shape[1])
    factor[:, :k] = F.linear(side, few.matrix).transpose(1, 2)
    sums = factor @ other
    into.add_vector(bias, sums[:, k] if with_ones else left.sum(1))
    sums = sums[:, :k] if rest is None else rest.along(sums[:, :k].contiguous(), 2)
    into.add(weight, sums.flatten(1))
    return True


def _convolution(
    into: Projecting, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Sums products with the patches of one channel, and with ones."""
    weight, bias = names_of(call)
    module = call.call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if weight is None or module.groups > 1:
        return False
    folds = into.projection.folds_like(weight, gradient)
    if folds.channels is None or folds.channels.kept > 1:
        return False
    if folds.channels.matrix is None or inputs.dim() != 2 + len(module.kernel_size):
        return False
    num_offsets, with_ones = folds.kernel, bias is not None
    unfolding = unfolding_of(module, gradient.shape[2:])
    total = _products(inputs, folds.channels, unfolding, gradient, with_ones)
    if with_ones:
        into.add_vector(bias, total[:, num_offsets])
        total = total[:, :num_offsets]
    if folds.columns is not None:
        total = folds.columns.along(total.contiguous(), 1)
    if folds.rows is not None:
        total = folds.rows.along(total, 2)
    if not folds.columns_come_first:
        total = total.transpose(1, 2)
    into.add(weight, total.flatten(1))
    return True


def _products(
    inputs: torch.Tensor,
    channels: Fold,
    unfolding: Unfolding,
    gradient: torch.Tensor,
    with_ones: bool,
) -> torch.Tensor:
    """Returns sums over positions of a gradient times what a kernel sees.

    It sees one channel, that of ``channels``. The sums are ``(B, K, p)``, or ``(B, K +
    1, p)`` with those of the gradient itself.
    """
    sums, num_offsets = [], math.prod(unfolding.kernel)
    num_positions = math.prod(unfolding.positions)
    for some in _chunks(len(inputs), (num_offsets + 1) * num_positions):
        source = inputs[some].flatten(2)
        one = (channels.matrix @ source).unflatten(2, inputs.shape[2:])
        seen = unfolding.windows(padded(one, unfolding.widths, unfolding.mode))
        patches = seen.new_empty(len(one), num_offsets + with_ones, num_positions)
        patches[:, :num_offsets].view(seen.shape[:1] + seen.shape[2:]).copy_(seen[:, 0])
        patches[:, num_offsets:] = 1
        sums.append(patches @ gradient[some].flatten(2).transpose(1, 2))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _embedding(
    into: Projecting, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Projects the rows that the rule adds."""
    weight, _ = names_of(call)
    assert weight is not None
    use = embedding(call.call, gradient)["weight"]
    into.add(weight, into.projection.of(weight, [use], CACHED * use.values.itemsize))
    return True


def _normalisation(
    into: Projecting, call: TakenCall, inputs: torch.Tensor, gradient: torch.Tensor
) -> bool:
    found = into.normalisations.gradients(call, gradient)
    if found is None:
        return False
    for name, values in zip(names_of(call), found):
        into.add_vector(name, values)
    return True


def _chunks(num_samples: int, each: int) -> Iterator[slice]:
    """Yields samples that make a temporary tensor of so many numbers each."""
    # Products of few samples cost more than a second trip to a larger cache.
    size = max(1, 2 * CACHED // each)
    return (slice(*interval) for interval in forms.chunks(num_samples, size))


# Whether it took the call, of which the last two arguments are input and gradient.
_Way = Callable[[Projecting, TakenCall, torch.Tensor, torch.Tensor], bool]
_WAYS: dict[Rule | None, _Way] = {
    linear: _linear,
    convolution: _convolution,
    embedding: _embedding,
    layer_norm: _normalisation,
    group_norm: _normalisation,
}
