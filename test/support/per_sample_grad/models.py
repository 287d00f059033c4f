"""Models under test, one row each: layers, traps, and those that rules do not cover."""

import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from support.per_sample_grad import Case


class Apply(nn.Module):
    """A module that applies a function to its submodules and inputs."""

    def __init__(self, function: Callable[..., torch.Tensor], **modules: nn.Module):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


class WithParameter(Apply):
    """The same with a parameter ``p`` of its own, of a shape."""

    def __init__(
        self, function: Callable[..., torch.Tensor], *shape: int, **modules: nn.Module
    ) -> None:
        super().__init__(function, **modules)
        self.p = nn.Parameter(torch.randn(shape))


def tokens(length: int, vocabulary: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def conv(
    name: str, size: tuple[int, ...], *args: object, prefix: str = "conv", **kwargs
) -> Case:
    kind = getattr(nn, {"conv": "Conv"}.get(prefix, "ConvTranspose") + f"{len(size)}d")
    name, shape = f"{prefix}{len(size)}d-{name}", (args[0], *size)
    return Case(name, lambda: kind(*args, **kwargs), shape)


transposed = functools.partial(conv, prefix="transposed")


def put(model: nn.Module, place: str, value: object) -> nn.Module:
    """Returns the model with a value in place of an attribute, whose path is given."""
    owner, _, attribute = place.rpartition(".")
    setattr(model.get_submodule(owner), attribute, value)
    return model


def share(model: nn.Module, place: str, origin: str) -> nn.Module:
    """Returns the model with its parameter ``origin`` also in another place."""
    return put(model, place, model.get_parameter(origin))


def twice(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Apply(lambda m, x: m.inner(torch.tanh(m.inner(x))), inner=module())


def transformer_block(m: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    x = m.embed(ids)
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    x = x + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return m.head(m.norm2(x))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    return model


LAYERS = [
    Case("linear-2d", lambda: nn.Linear(3, 2), (3,)),
    Case("linear-3d", lambda: nn.Linear(3, 2), (2, 3)),
    conv("plain", (6,), 2, 3, 3),
    conv("stride-padding-dilation", (9,), 2, 4, 3, stride=2, padding=2, dilation=2),
    conv("same", (6,), 2, 3, 4, padding="same"),
    conv("groups", (5, 6), 4, 6, (3, 2), groups=2, padding=(1, 0), stride=(2, 1)),
    conv("reflect", (5, 4), 2, 2, 3, padding=2, padding_mode="reflect"),
    conv("same-circular", (4, 5), 2, 2, (2, 3), padding="same",
         padding_mode="circular"),
    conv("plain", (3, 4, 3), 2, 2, 2, dilation=(1, 2, 1)),
    transposed("strides", (4,), 2, 4, 3, stride=3, padding=1, output_padding=2,
               dilation=2, groups=2),
    transposed("groups", (3, 4), 4, 6, (3, 2), groups=2, stride=2, padding=1),
    transposed("plain", (2, 3, 2), 2, 2, 2, stride=(1, 2, 1), bias=False),
    Case("embedding", lambda: nn.Embedding(5, 3), tokens(6, 5)),
    Case("embedding-of-many", lambda: nn.Embedding(40, 3), tokens(6, 4)),
    Case("embedding-padding", lambda: nn.Embedding(4, 3, padding_idx=1), tokens(6, 4)),
    Case("layer-norm", lambda: nn.LayerNorm(5), (4, 5)),
    Case("rms-norm", lambda: nn.RMSNorm(5), (4, 5)),
    Case("group-norm", lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    Case("instance-norm", lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    Case("instance-norm-running", lambda: nn.InstanceNorm2d(
        3, affine=True, track_running_stats=True), (3, 4, 3)),
    Case("batch-norm-2d", lambda: nn.BatchNorm2d(3), (3, 4, 4)),
    Case("batch-norm-keyword", lambda: Apply(
        lambda m, x: m.norm(input=x), norm=nn.BatchNorm1d(4)), (4, 5)),
    Case("prelu", lambda: nn.PReLU(), (4, 3)),
    Case("bilinear", lambda: nn.Bilinear(3, 4, 2),
         lambda batch: (torch.randn(batch, 5, 3), torch.randn(batch, 5, 4))),
]  # fmt: skip


def attention() -> nn.Module:
    """Returns self-attention with a causal mask and padded keys."""

    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, device=x.device).triu(1).bool()
        padded = (torch.arange(length, device=x.device) > length - 2).expand(len(x), -1)
        padding = torch.where(padded, -torch.inf, 0.0).to(x.dtype)
        causal = torch.where(causal, -torch.inf, 0.0).to(x.dtype)
        masks = {"attn_mask": causal, "key_padding_mask": padding}
        return m.inner(x, x, x, need_weights=False, **masks)[0]

    return Apply(attend, inner=nn.MultiheadAttention(4, 2, batch_first=True))


def cross(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    return m.inner(x, key=y, value=torch.tanh(y))[0].transpose(0, 1)


TRAPS = [
    Case("attention", attention, (5, 4)),
    Case("attention-cross", lambda: Apply(cross, inner=nn.MultiheadAttention(4, 2)),
         lambda batch: (torch.randn(batch, 5, 4), torch.randn(batch, 3, 4)),
         {"batch_dim": 1}),
    Case("encoder-layer", lambda: nn.TransformerEncoderLayer(
        4, 2, 8, batch_first=True), (5, 4)),
    Case("linear-twice-tokens", twice(lambda: nn.Linear(3, 3)), (4, 3)),
    Case("conv-twice", twice(lambda: nn.Conv2d(2, 2, 3, padding=1)), (2, 4, 4)),
    Case("tied-embedding-head", lambda: share(Apply(
        lambda m, ids: m.head(torch.tanh(m.embed(ids))),
        embed=nn.Embedding(7, 4, padding_idx=2), head=nn.Linear(4, 7, bias=False)),
        "head.weight", "embed.weight"), tokens(5, 7)),
    Case("one-weight-two-groupings", lambda: share(Apply(
        lambda m, x: m.a(x[:, :2]) * m.b(x), a=nn.Conv1d(2, 4, 3, bias=False),
        b=nn.Conv1d(4, 4, 3, groups=2, bias=False)), "b.weight", "a.weight"), (4, 6)),
    Case("inplace-relu-conv", lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2)),
        (2, 4, 4)),
    Case("inplace-relu-tokens", lambda: nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (5, 3)),
    Case("time-first", lambda: Apply(
        lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1)))).transpose(0, 1),
        a=nn.Linear(3, 4), b=nn.LayerNorm(4)), (5, 3), {"batch_dim": 1}),
    Case("time-first-square", lambda: Apply(
        lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1),
        a=nn.Linear(3, 4)), (3, 3), {"batch_dim": 1}),
    Case("time-first-in-part", lambda: Apply(
        lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1))).transpose(0, 1)),
        a=nn.Linear(3, 4), b=nn.Linear(4, 2)), (5, 3), {"batch_dim": {"a": 1}}),
    Case("folded-batch", lambda: Apply(
        lambda m, x: m.norm(m.conv(x.flatten(0, 1))).unflatten(0, (len(x), -1)),
        conv=nn.Conv1d(2, 4, 3, groups=2), norm=nn.GroupNorm(2, 4)), (4, 2, 5)),
    Case("folded-embedding", lambda: Apply(
        lambda m, x: m.embed(x.flatten()).unflatten(0, (len(x), -1)),
        embed=nn.Embedding(5, 3)), tokens(4, 5)),
    Case("branches-that-do-not-meet", lambda: Apply(
        lambda m, x: m.c(torch.tanh(m.a(x))) * m.b(x.detach()) + m.d(x[:, :2]),
        a=nn.Linear(3, 4), b=nn.Linear(3, 2), c=nn.Linear(4, 2), d=nn.Linear(2, 2)),
        (3,)),
    Case("weight-that-is-the-bias", lambda: share(
        nn.LayerNorm(5), "bias", "weight"), (4, 5)),
    Case("frozen-part", lambda: nn.Sequential(
        nn.Linear(3, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    Case("hooked", hooked, (3,)),
    Case("checkpointed", lambda: Apply(
        lambda m, x: checkpoint(m.b, torch.tanh(m.a(x)), use_reentrant=False),
        a=nn.Linear(3, 4), b=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))), (3,)),
    Case("unused-part", lambda: Apply(
        lambda m, x: m.used(x), used=nn.Linear(3, 2), unused=nn.Linear(3, 2)), (3,)),
    Case("transformer", lambda: Apply(
        transformer_block, embed=nn.Embedding(11, 4, padding_idx=0),
        norm=nn.LayerNorm(4), qkv=nn.Linear(4, 12), out=nn.Linear(4, 4),
        norm2=nn.RMSNorm(4), head=nn.Linear(4, 11)), tokens(5, 11)),
    Case("cnn", lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(16, 3)), (2, 8, 8)),
]  # fmt: skip

CASES = LAYERS + TRAPS


def with_parameter(
    function: Callable[..., torch.Tensor], *shape: int
) -> Callable[[], nn.Module]:
    """A module applies a function to what is between 0 and 1, and to a parameter."""
    return lambda: WithParameter(
        lambda m, x: function(torch.sigmoid(m.inner(x)), m.p), *(shape or (4,)),
        inner=nn.Linear(3, 4),
    )  # fmt: skip


def positions(deep: nn.Module | None = None, entries: int = 5) -> nn.Module:
    """Returns a model with position ids that have no batch dimension."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        places = m.deep(m.embed(torch.arange(x.shape[1], device=x.device)))
        return m.inner(torch.tanh(x + places))

    parts = {"embed": nn.Embedding(entries, 3), "inner": nn.Linear(3, 2)}
    return Apply(forward, **parts, deep=deep or nn.Identity())


def masked(m: WithParameter, x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(12, device=x.device).view(4, 3) % 3 > 0
    return nn.functional.linear(x, m.p * mask)


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    double = types.MethodType(lambda m, x: 2 * nn.Linear.forward(m, x), model[0])
    return put(model, "0.forward", double)


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Returns ``x * cos(angle)`` by an operation that has no rule."""
    return torch.polar(x, angle).real


of_angle = with_parameter(turned)

# What rules of operations account for, and no module's rule.
BY_OPERATIONS = [
    Case("power", with_parameter(lambda x, p: x ** (3 * p.abs())), (3,)),
    Case("raw-parameter", with_parameter(torch.mul), (3,)),
    Case("functional-use", lambda: Apply(
        lambda m, x: nn.functional.linear(torch.tanh(m.inner(x)), m.inner.weight),
        inner=nn.Linear(3, 3)), (3,)),
    Case("positions", positions, (5, 3)),
    Case("weight-norm", lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 2))), (3,)),
    Case("masked", lambda: nn.Sequential(
        WithParameter(masked, 4, 3), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    Case("weight-as-input", lambda: Apply(
        lambda m, x: m.inner(x) @ m.inner(m.outer.weight).T,
        inner=nn.Linear(3, 4), outer=nn.Linear(3, 2, bias=False)), (3,)),
    Case("patched-forward", patched, (3,)),
]  # fmt: skip

UNSEEN = [
    Case("turned", of_angle, (3,)),
    Case("turned-on-positions", of_angle, (5, 3)),
    Case("turned-below", lambda: nn.Sequential(of_angle(), nn.Linear(4, 4)), (3,)),
    Case("turned-time-first", with_parameter(
        lambda x, p: turned(x.transpose(0, 1), p).transpose(0, 1)), (5, 3),
        {"batch_dim": {"": 1, "inner": 0}}),
    Case("turned-folded", with_parameter(
        lambda x, p: turned(x.flatten(0, 1), p).unflatten(0, (len(x), -1))), (5, 3)),
    # Formulas that sum over samples themselves, before the engine would.
    Case("copysign", with_parameter(torch.copysign), (3,)),
    Case("masked-fill", with_parameter(
        lambda x, p: x.masked_fill(x > 0.5, p[0])), (3,)),
    Case("distances-of-places", with_parameter(
        lambda x, p: torch.cdist(x, p.softmax(0)[None]), 4, 4), (5, 3)),
    Case("unbatched-conv", lambda: Apply(
        lambda m, x: torch.stack([m.inner(item) for item in x]),
        inner=nn.Conv1d(3, 3, 1)), (3, 4)),
]  # fmt: skip


class Doubling(nn.Linear):
    """A Linear that the rule of Linear is wrong for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


COUPLED = [
    Case("coupled-square", lambda: Apply(
        lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1),
        inner=nn.Linear(3, 4)), (3, 3)),
    Case("batch-mean", lambda: Apply(
        lambda m, x: m.b(m.a(x) - m.a(x).mean(0, keepdim=True)),
        a=nn.Linear(3, 4), b=nn.Linear(4, 2)), (3,)),
    Case("wrong-rule", lambda: nn.Sequential(Doubling(3, 2)), (3,)),
    Case("swapped-fold", lambda: Apply(
        lambda m, x: m.inner(x.transpose(0, 1).flatten(0, 1))
        .unflatten(0, (-1, len(x))).transpose(0, 1), inner=nn.Linear(3, 2)), (4, 3)),
]  # fmt: skip

BY_NAME = {case.name: case for case in (*CASES, *BY_OPERATIONS, *UNSEEN, *COUPLED)}
