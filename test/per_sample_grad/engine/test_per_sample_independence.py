"""Samples that meet by data, or behind a coefficient of zero: right or refused.

Nothing meets in a regular batch, which is first: comparing it says nothing of others.
"""

import contextlib
import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad import captured, compared, fold, norms_of, rules_kept
from support.per_sample_grad.models import Apply, WithParameter
from support.xla_replica.replicas import of_torch_alone
from torch import nn

import per_sample_grad as psg

B, WIDTH = 6, 6
REGULAR = torch.arange(B)
PERMUTED = torch.tensor([2, 0, 5, 1, 3, 4])
UNEVEN = torch.tensor([0, 0, 0, 3, 4, 5])
Losses = Callable[..., torch.Tensor]


class Hidden(nn.Module):
    """Two Linears with a function between them, which a case chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, between: Callable) -> torch.Tensor:
        return self.last(between(torch.tanh(self.first(x))))


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return build().double(), torch.randn(B, 4, dtype=torch.float64)


def outcome(
    model: nn.Module, losses_of: Losses, batch: tuple, **options: object
) -> tuple[str, bool]:
    """Returns "right" or the error's name, and whether the pass was compared."""
    expected = norms_of(losses_of(model, *batch), model.parameters())
    try:
        recorded, losses = captured(model, losses_of, *batch, **options)
        found = [recorded.norms(losses)]
        recorded, losses = captured(model, losses_of, *batch, **options)
        found.append(recorded.backward(losses).norms())
    except psg.PerSampleError as error:
        return type(error).__name__, True
    for norms in found:
        torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)
    return "right", recorded.compared


POSITIONS = torch.arange(WIDTH)
BY_DATA: dict[str, Callable] = {
    "index": lambda h, i: h[i],
    "index-pairs": lambda h, i: h + h[i, POSITIONS][:, None],
    "index-transposed": lambda h, i: h.transpose(0, 1)[:, i].transpose(0, 1),
    "index-list": lambda h, i: torch.stack([h[int(row)] for row in i]),
    "index_select": lambda h, i: h.index_select(0, i),
    "gather": lambda h, i: h.gather(0, i[:, None].expand_as(h)),
    "scatter": lambda h, i: torch.zeros_like(h).scatter(0, i[:, None].expand_as(h), h),
    # As images among the tokens of texts, in models such as Llava.
    "masked_scatter": lambda h, i: h.masked_scatter(
        (i.bincount(minlength=B) > 0)[:, None], h.sin()
    ),
    "take": lambda h, i: h.take(i[:, None] * WIDTH + POSITIONS),
    "vector": lambda h, i: h + h.sum(1)[i][:, None],
    "repeat_interleave": lambda h, i: h.repeat_interleave(i.bincount(minlength=B), 0),
    "take_along_dim": lambda h, i: h + h.take_along_dim(i[:, None], 0),
    "embedding": lambda h, i: F.embedding(i, h),
    "embedding_bag": lambda h, i: F.embedding_bag(i, h, REGULAR),
    "sort": lambda h, i: (h + 10 * i[:, None]).sort(0).values,
    "product": lambda h, i: F.one_hot(i, B).to(h.dtype) @ h,
}


@pytest.mark.parametrize("name", BY_DATA)
def test_rows_that_data_choose(name):
    model, x = made(Hidden)
    seen = [
        outcome(model, fold, (x, lambda h, order=order: BY_DATA[name](h, order)))
        for order in (REGULAR, REGULAR, PERMUTED, UNEVEN, REGULAR)
    ]
    assert all(was_compared for _, was_compared in seen)
    assert "CouplingError" in {found for found, _ in seen}


@pytest.mark.parametrize("fallback", ["error", "loop"])
def test_experts_that_are_routed_evenly_and_then_unevenly(fallback):
    def routed(m: nn.Module, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        out = torch.zeros_like(h)
        for number, expert in enumerate((m.a, m.b)):
            (rows,) = torch.where(route == number)
            out = out.index_add(0, rows, expert(h[rows]))
        return out

    layers = {name: nn.Linear(4, 4) for name in ("first", "a", "b")}
    model, x = made(lambda: Apply(routed, **layers))
    last = torch.tensor([0, 0, 0, 0, 0, 1])
    for route in (0 * REGULAR, REGULAR % 2, PERMUTED % 2, UNEVEN % 2, last):
        outcome(model, fold, (x, route), fallback=fallback)


def gated(mix: Callable[[torch.Tensor], torch.Tensor]) -> Losses:
    def losses_of(m: nn.Module, x: torch.Tensor, gate: float) -> torch.Tensor:
        m.gate.data.fill_(gate)
        return m(x, lambda h: h + m.gate * mix(h)).square().sum(1)

    return losses_of


def under_head(m: nn.Module, x: torch.Tensor, size: float) -> torch.Tensor:
    """Of zeros, it has a gradient itself, and what is below has none."""
    m.last.weight.data.fill_(size)
    return (m(x, lambda h: h - h.mean(0)) - 1).square().sum(1)


def attended(h: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(h, h, h, mask)


BEHIND_ZERO: dict[str, Losses] = {
    "contrastive": lambda m, x, weight: (z := m(x, torch.relu)).square().sum(1)
    + weight * torch.logsumexp(z @ z.T, 1),
    "head": under_head,
    "mean": gated(lambda h: h - h.mean(0)),
    "softmax": gated(lambda h: torch.softmax(h, 0)),
    "attention": gated(lambda h: attended(h[None, None])[0, 0]),
    "batch-norm": gated(lambda h: F.batch_norm(h, None, None, training=True)),
    "roll": gated(lambda h: h.roll(1, 0)),
    "cumsum": gated(lambda h: h.cumsum(0)),
    "convolution": gated(lambda h: F.conv1d(
        h.t()[None], h.new_ones(WIDTH, 1, 3), padding=1, groups=WIDTH)[0].t()),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND_ZERO)
def test_what_a_coefficient_of_zero_hides(name):
    model, x = made(Hidden)
    sizes = (0.0, 0.0, 1e-4, 0.5)
    seen = [outcome(model, BEHIND_ZERO[name], (x, size))[0] for size in sizes]
    assert seen[:2] == ["right", "right"] or name not in ("mean", "head")
    assert seen[3] == "CouplingError"


class Edited(torch.autograd.Function):
    """Its backward function changes the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(0.7)


@pytest.mark.parametrize("forward", [
    lambda m, x: (y := m(x, torch.relu)) + Edited.apply(y),
    lambda m, x: Edited.apply(m(Edited.apply(m(x, torch.relu)), Edited.apply)),
])  # fmt: skip
def test_backward_functions_that_edit_their_gradient(forward):
    model, _ = made(Hidden)
    for x in torch.randn(4, B, 4, dtype=torch.float64):
        outcome(model, lambda m, x: forward(m, x).square().sum(1), (x,))


@pytest.mark.parametrize("answer", ["backward", "norms"])
def test_a_gradient_that_is_edited_while_it_waits_is_refused(answer):
    """A hook gets the very gradient that a layer has got before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def losses_of(m: nn.Module, edits: bool) -> torch.Tensor:
        h = m[0](torch.randn(B, 4))
        beside = h * 1
        if edits:
            beside.register_hook(lambda grad: grad.mul_(0.5))
        return (m[1](h) + beside).square().sum(1)

    told = pytest.raises(psg.PerSampleError, match="changed in place after it had")
    for edits in (False, False, True):
        recorded, losses = captured(model, losses_of, edits)
        with told if edits else contextlib.nullcontext():
            getattr(recorded, answer)(losses)


@pytest.mark.parametrize("function", [
    lambda w: torch.maximum(w, w.t()), lambda w: torch.maximum(w.t(), w),
    lambda w: torch.maximum(w, w), lambda w: torch.minimum(torch.sin(w), w),
    lambda w: torch.atan2(w, w.t() + 3),
])  # fmt: skip
def test_a_leaf_in_two_inputs_of_one_operation(function):
    def multiplied(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(m.first(x)) @ function(m.p)

    model, x = made(lambda: WithParameter(multiplied, 4, 4, first=nn.Linear(4, 4)))
    for given in (x, x.sin()):
        assert outcome(model, fold, (given,))[0] == "right"


# --- what is known, and what is not -----------------------------------------------


@torch.library.custom_op("test_independence::mixed", mutates_args=())
def mixed(x: torch.Tensor, size: float) -> torch.Tensor:
    return x + size * x.mean(0)


mixed.register_autograd(
    lambda ctx, grad: (grad + ctx.size * grad.mean(0), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "size", inputs[1]),
)


class Mixing(WithParameter):
    """A module with a rule of its own, which cannot see that samples meet."""


@rules_kept()
@pytest.mark.parametrize("is_module", [False, True])
def test_an_operation_from_outside_is_compared_every_time(is_module):
    @psg.register_rule(Mixing)
    def of_mixing(call: psg.Call, grad: torch.Tensor) -> dict[str, psg.Dense]:
        return {"p": psg.Dense(grad * call.input)}

    mixing = functools.partial(Mixing, lambda m, x, size: mixed(x * m.p, size), 4)
    model, x = made(mixing if is_module else Hidden)
    for size in (0.0, 0.0, 0.5, 0.0):
        given = size if is_module else lambda h, size=size: mixed(h, size)
        expected = "CouplingError" if size else "right"
        assert outcome(model, fold, (x, given)) == (expected, True)


TARGET = torch.tensor([1, 0, 3, 3, 2, 0])
USUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda h: torch.log1p(h.exp()) * torch.sigmoid(h) - h.clamp(min=0),
    "attention": lambda h: attended(h.view(B, 2, 3, 1)).flatten(1),
    "masked": lambda h: attended(
        h.view(B, 1, 3, 2), h.view(B, 2, 3)[:, None, :1].sin()).flatten(1),
    "filled": lambda h: h.index_fill(1, TARGET[:3], h.new_ones(())),
    "scattered": lambda h: h.scatter(1, TARGET[:, None], 2.0),
    "heads": lambda h: (h.view(B, 3, 2) @ h.view(B, 2, 3) @ h.view(B, 3, 2)).flatten(1),
    # Time is first, and both dimensions are folded into the rows of a product.
    "time-first": lambda h: F.linear(h.view(B, 2, 3).transpose(0, 1), torch.ones(
        2, 3, requires_grad=True).to(h)).transpose(0, 1).flatten(1),
    "convolution": lambda h: F.conv1d(h[:, None], h.new_ones(2, 1, 3)).flatten(1),
    "normalised": lambda h: F.group_norm(F.layer_norm(h, (WIDTH,)), 2),
    "instance-norm": lambda h: F.instance_norm(h.view(B, 2, 3)).flatten(1),
    "pooled": lambda h: F.avg_pool1d(F.max_pool1d(h[:, None], 2), 2)[:, 0],
    "resized": lambda h: F.interpolate(h[:, None], scale_factor=2)[:, 0],
    "padded": lambda h: F.pad(h, (1, -1)),
    "sorted": lambda h: h.sort(1).values + h.topk(WIDTH).values,
    "joined": lambda h: torch.cat([h, torch.stack([h, h], 2).sum(2)], 1),
    "cut": lambda h: h[:, 1:4] * h.unbind(1)[0][:, None] + h.split(3, 1)[1],
    "rolled": lambda h: h.roll(1, 1).flip(1),
    "means": lambda h: h - h.mean(1, keepdim=True) + h.std(1, keepdim=True),
    "spectrum": lambda h: torch.fft.rfft(h, dim=1).abs(),
    "einsum": lambda h: torch.einsum("bij,bkj->bik", *[h.view(B, 3, 2)] * 2).flatten(1),
    "gathered": lambda h: h.gather(1, TARGET[:, None]),
    "indexed": lambda h: h[:, TARGET],
    "table": lambda h: h * torch.ones(9, WIDTH, requires_grad=True)[TARGET],
    "cross-entropy": lambda h: F.cross_entropy(h, TARGET, reduction="none")[:, None],
    "dropout": lambda h: F.dropout(h, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_usual_operations_are_compared_once(name):
    model, _ = made(Hidden)

    def losses_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.first(x))
        return USUAL[name](h).square().sum(1) + m.last(h).square().sum(1)

    batches = torch.randn(3, B, 4, dtype=torch.float64)
    found = [compared(model, losses_of, batch) for batch in batches]
    assert found == [True, False, False]


# --- drawn models -----------------------------------------------------------------

PIECES: list[Callable] = [
    *(lambda h, i, f=f: f(h) for n, f in USUAL.items() if n != "dropout"),
    *BY_DATA.values(),
]


@of_torch_alone
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_drawn_models_agree_with_a_loop_whatever_the_indices(first):
    """Their structures stay, and the indices in them are drawn anew for each batch."""
    seen = []
    for number in range(first, first + 50):
        rng = random.Random(number)
        torch.manual_seed(number)
        model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]).double()
        pieces = [rng.choice(PIECES) for _ in range(rng.randint(1, 3))]

        def losses_of(
            m: nn.Module, x: torch.Tensor, indices: list, pieces: list = pieces
        ) -> torch.Tensor:
            h = torch.tanh(m[0](x))
            for piece, index, layer in zip(pieces, indices, [*m[1:], nn.Identity()]):
                h = piece(h, index)
                h = torch.tanh(layer(F.pad(h, (0, WIDTH - h.shape[1]))))
            return h.square().sum(1)

        for is_regular in (True, False, False):
            indices = [
                REGULAR if is_regular else rng.choice(
                    (torch.randperm(B), torch.randint(B, (B,)).sort().values))
                for _ in pieces
            ]  # fmt: skip
            x = torch.randn(B, WIDTH, dtype=torch.float64)
            seen.append(outcome(model, losses_of, (x, indices))[0])
    assert seen.count("right") > len(seen) / 3
    assert seen.count("CouplingError") > len(seen) / 10
