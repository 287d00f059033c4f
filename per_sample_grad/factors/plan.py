"""The form in which each parameter's products are computed, chosen from its shapes.

The factored form costs ``2 N G T² (p + q + 1)`` flops for norms and N times that for a
Gram matrix; forming the gradients costs ``2 N G T p q`` and then little (Li et al.,
arXiv:2110.05679; Bu et al., arXiv:2205.10683, who switch on memory). Either runs for as
many samples and columns at a time as fit a byte budget, so memory does not decide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense, Lookup, Windows

Quantity = Literal["norms", "gram"]
Method = Literal["auto", "factored", "materialized"]

QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
METHODS: tuple[Method, ...] = get_args(Method)
# The default for the bytes of temporary tensors is what the forward pass recorded,
# divided by this number and kept between two bounds. On a CPU chunks that fit its
# caches are the fastest; elsewhere every chunk is a launch, or a part of a program to
# compile.
SHARE_OF_RECORDED = 2
LARGEST_BUDGET = 256 * 2**20
SMALLEST_BUDGET_ON_HOST = 2**20
SMALLEST_BUDGET = 64 * 2**20
# The error of a norm from factors that is allowed, relative to the norm; and how many
# units in the last place of the sum of all terms' squares the norm's square is off by:
# at most 7.6 in measurements of up to 256 positions and 1024 columns that cancel.
NORM_TOLERANCE = 1e-4
ROUNDINGS = 8
# Reading or writing a number takes as long as this many flops.
FLOPS_PER_ELEMENT = 8
# How often the numbers of formed gradients are read or written. That of tables, which
# are filled with zeros first, is measured.
PASSES, PASSES_OF_TABLES = 2, 5


@dataclasses.dataclass(frozen=True)
class Choice:
    """How one parameter's share of ``"norms"`` or ``"gram"`` is computed.

    Attributes:
        form: ``"dense"``, ``"factored"`` or ``"materialized"``.
        samples: How many samples are computed at a time.
        columns: How many columns of the gradient, seen as a matrix, are computed at a
            time; all of them if factored.
        cost: What decides between forms: floating-point operations (2 for a
            multiplication and an addition), and `FLOPS_PER_ELEMENT` for every number of
            a temporary that is read or written.
    """

    form: Literal["dense", "factored", "materialized"]
    samples: int
    columns: int
    cost: int


def cancels(squares: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Returns whether norms from factors have too few digits, a tensor of one bool.

    ``squares`` are those of the norms, and ``terms`` the sums of the squares of what
    is added, both ``(B,)``.
    """
    # A norm's relative error is half of its square's.
    rounding = ROUNDINGS * torch.finfo(terms.dtype).eps
    return (squares * (2 * NORM_TOLERANCE / rounding) < terms).any()


class Share(NamedTuple):
    """One parameter's share of a quantity, to be computed in its cheaper form.

    Attributes:
        uses: The parameter's, of N samples.
        others: The same, or for a Gram matrix with another batch those of that.
        shape: The parameter's.
        num_samples: N.
        partners: With how many samples each is multiplied; 1 for norms.
        budget: The bytes of temporaries, which a single sample or column may exceed.
    """

    uses: Sequence[Contribution]
    others: Sequence[Contribution]
    shape: tuple[int, ...]
    num_samples: int
    partners: int
    budget: int

    def choose(self, method: Method) -> Choice:
        """Returns the cheaper form, in chunks within the budget."""
        if all(isinstance(use, Dense) for use in (*self.uses, *self.others)):
            columns = forms.matrix_shape(self.shape)[1]
            return Choice("dense", self.num_samples, columns, 0)
        formed = self._materialized()
        if not all(has_product(a, b) for a in self.uses for b in self.others):
            return formed
        factored = self._factored()
        if method == "auto":
            return min((factored, formed), key=lambda choice: choice.cost)
        return factored if method == "factored" else formed

    def _materialized(self) -> Choice:
        """Returns the choice that forms gradients."""
        uses, num_samples, partners = self.uses, self.num_samples, self.partners
        rows, columns = forms.matrix_shape(self.shape)
        size, itemsize = rows * columns, forms.float_factor(uses[0]).itemsize
        flops = 2 * num_samples * partners * size
        for use in uses:
            if isinstance(use, Lookup):
                flops += num_samples * use.positions * columns
            elif not isinstance(use, Dense):
                flops += 2 * num_samples * use.positions * size
        unfolded = max(map(forms.unfolded, uses))
        passes = PASSES
        if partners == 1 and any(isinstance(use, Lookup) for use in uses):
            passes = PASSES_OF_TABLES
        elements = passes * size + unfolded * columns
        cost = flops + FLOPS_PER_ELEMENT * num_samples * elements
        # Numbers of a column: on the way, where several uses have the sum so far, the
        # next term and the next sum; for a Gram matrix the gradients of all samples.
        each = (2 * unfolded + rows * (1 if len(uses) == 1 else 3)) * itemsize
        of_all, samples, width = 0, num_samples, columns
        if unfolded or partners == 1:
            samples = _fitting(self.budget, each * columns, num_samples)
        if partners > 1:
            blocks = 1 if uses is self.others else 2
            of_all = blocks * num_samples * rows * itemsize
            unit = math.lcm(*[use.kernel for use in uses if isinstance(use, Windows)])
            width = _fitting(self.budget, samples * each + of_all, columns, unit)
        return Choice("materialized", samples, width, cost)

    def _factored(self) -> Choice:
        """Returns the choice that forms no gradient."""
        columns = forms.matrix_shape(self.shape)[1]
        uses, others, _, num_samples, partners, budget = self
        flops, largest, elements = 0, 1, 0
        for a in uses:
            for b in others:
                pairs = a.groups * a.positions * b.positions
                if isinstance(a, Dense) or isinstance(b, Dense):
                    inner = 0
                elif isinstance(a, Lookup) or isinstance(b, Lookup):
                    inner = a.width + 2
                else:
                    inner = a.left.shape[3] + a.width + 1
                flops += 2 * num_samples * partners * pairs * inner
                largest = max(largest, 3 * pairs)
                elements += 3 * pairs * partners * num_samples
        sides = uses if partners == 1 else (*uses, *others)
        unfolded = columns * sum(map(forms.unfolded, sides))
        itemsize = forms.float_factor(uses[0]).itemsize

        def size_of(samples: int) -> int:
            return samples * (largest * min(samples, partners) + unfolded) * itemsize

        samples = max(num_samples, partners)
        while samples > 1 and size_of(samples) > budget:
            samples = -(-samples // 2)
        cost = flops + FLOPS_PER_ELEMENT * (elements + num_samples * unfolded)
        return Choice("factored", samples, columns, cost)


def has_product(a: Contribution, b: Contribution) -> bool:
    """Returns whether `algebra` has a product of factors of this pair of uses."""
    if isinstance(a, Dense) or isinstance(b, Dense):
        return type(a) is type(b)
    return a.groups == b.groups


def samples_of_gradients(
    uses: Sequence[Contribution], shape: Sequence[int], num_samples: int, budget: int
) -> int:
    """Returns how many samples to compute at a time when all gradients are kept."""
    # What is unfolded is padded, and may be copied, before it is multiplied.
    unfolded = 2 * forms.matrix_shape(shape)[1] * max(map(forms.unfolded, uses))
    each = unfolded * forms.float_factor(uses[0]).itemsize
    return _fitting(budget, each, num_samples)


def _fitting(budget: int, each: int, most: int, unit: int = 1) -> int:
    """Returns how many of ``each`` bytes fit the budget, a multiple of ``unit``."""
    if most * each <= budget:
        return most
    return max(unit, min(most, budget // each // unit * unit))
