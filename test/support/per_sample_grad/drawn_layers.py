"""Layers of drawn shapes and options: `KINDS` has a strategy for each kind."""

from __future__ import annotations

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from support.per_sample_grad.gradient_oracle import Case
from support.per_sample_grad.layer_cases import Apply

MODES = ["zeros", "reflect", "replicate", "circular"]


def sizes(draw, rank: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(rank))


def layer(kind: str, shape: tuple[int, ...], *args, **options) -> Case:
    """Returns a layer of these arguments, which its name tells."""
    name = f"{kind}{args} {options} of {shape}"
    return Case(name, lambda: getattr(nn, kind)(*args, **options), shape)


@st.composite
def convolutions(draw) -> Case:
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    size, kernel = sizes(draw, rank, 3, 6 - rank), sizes(draw, rank, 1, 3)
    mode = draw(st.sampled_from(MODES))
    dilation = sizes(draw, rank, 1, 2)
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = (1,) * rank if padding == "same" else sizes(draw, rank, 1, 3)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    if padding == "numbers":
        padding = sizes(draw, rank, 0, 2)
        assume(all(s + 2 * p >= r for s, p, r in zip(size, padding, reach)))
    elif padding == "valid":
        assume(all(s >= r for s, r in zip(size, reach)))
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
        "padding_mode": mode, "bias": draw(st.booleans()),
    }  # fmt: skip
    shape = (channels[0], *size)
    return layer(f"Conv{rank}d", shape, *channels, kernel, **options)


@st.composite
def transposed(draw) -> Case:
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    size, kernel = sizes(draw, rank, 1, 4 - rank), sizes(draw, rank, 1, 3)
    stride, dilation = sizes(draw, rank, 1, 3), sizes(draw, rank, 1, 2)
    padding = sizes(draw, rank, 0, 2)
    more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation))
    out = [
        (n - 1) * s - 2 * p + d * (k - 1) + m + 1
        for n, s, p, d, k, m in zip(size, stride, padding, dilation, kernel, more)
    ]
    assume(min(out) >= 1)
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options = {
        "stride": stride, "padding": padding, "output_padding": more,
        "dilation": dilation, "groups": groups, "bias": draw(st.booleans()),
    }  # fmt: skip
    shape = (channels[0], *size)
    return layer(f"ConvTranspose{rank}d", shape, *channels, kernel, **options)


@st.composite
def linears(draw) -> Case:
    shape = sizes(draw, draw(st.integers(1, 4)), 1, 4)
    width, bias = draw(st.integers(1, 4)), draw(st.booleans())
    return layer("Linear", shape, shape[-1], width, bias=bias)


@st.composite
def embeddings(draw) -> Case:
    entries, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.none() | st.integers(0, entries - 1))
    shape = sizes(draw, draw(st.integers(0, 2)), 1, 4)
    return Case(
        f"embedding {entries} x {width}, padding_idx={padding}, of {shape}",
        lambda: nn.Embedding(entries, width, padding_idx=padding),
        lambda batch: (torch.randint(0, entries, (batch, *shape)),),
    )


@st.composite
def norms(draw, kind: str) -> Case:
    outer = sizes(draw, draw(st.integers(0, 2)), 1, 3)
    shape = (*sizes(draw, draw(st.integers(0, 1)), 1, 3), draw(st.integers(2, 5)))
    options = {"eps": draw(st.sampled_from([1e-5, 1e-2]))}
    if kind == "LayerNorm":
        options["bias"] = draw(st.booleans())
    elif draw(st.booleans()):
        options["eps"] = None
    return layer(kind, (*outer, *shape), shape, **options)


@st.composite
def group_norms(draw) -> Case:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    space = sizes(draw, draw(st.integers(0, 3)), 1, 3)
    # A single number minus its mean is zero; torch refuses groups of one number.
    assume(each * torch.Size(space).numel() > 1)
    channels = groups * each
    return layer("GroupNorm", (channels, *space), groups, channels)


@st.composite
def instance_norms(draw) -> Case:
    rank, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    running, space = draw(st.booleans()), sizes(draw, rank, 1, 4)
    assume(running or torch.Size(space).numel() > 1)
    options = {"affine": True, "track_running_stats": running}
    return layer(f"InstanceNorm{rank}d", (channels, *space), channels, **options)


@st.composite
def batch_norms(draw) -> Case:
    """Draws BatchNorms with frozen statistics; others are refused."""
    rank, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    least = 0 if rank == 1 else rank
    space = sizes(draw, draw(st.integers(least, rank)), 1, 4)
    kind = draw(st.sampled_from([f"BatchNorm{rank}d", "SyncBatchNorm"]))
    return layer(kind, (channels, *space), channels)


@st.composite
def prelus(draw) -> Case:
    channels, each = draw(st.integers(1, 4)), draw(st.booleans())
    space = sizes(draw, draw(st.integers(0, 3)), 1, 3)
    return layer("PReLU", (channels, *space), channels if each else 1)


@st.composite
def bilinears(draw) -> Case:
    first, second, width = sizes(draw, 3, 1, 4)
    inner, bias = sizes(draw, draw(st.integers(0, 2)), 1, 3), draw(st.booleans())
    return Case(
        f"bilinear {first} x {second} to {width} in {inner}, bias={bias}",
        lambda: nn.Bilinear(first, second, width, bias=bias),
        lambda batch: tuple(torch.randn(batch, *inner, n) for n in (first, second)),
    )


@st.composite
def attentions(draw) -> Case:
    heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    length, keys = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kdim, vdim = draw(st.sampled_from([(None, None), (3, 3), (3, 2)]))
    bias, first = draw(st.booleans()), draw(st.booleans())
    weights, causal = draw(st.booleans()), draw(st.booleans())
    size = heads * width

    def attend(m: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (x if first else x.transpose(0, 1) for x in inputs)
        mask = None
        if causal:
            after = torch.ones(length, keys, device=query.device).triu(1).bool()
            mask = torch.where(after, -torch.inf, 0.0).to(query.dtype)
        out = m.inner(query, key, value, attn_mask=mask, need_weights=weights)[0]
        return out if first else out.transpose(0, 1)

    options = {"bias": bias, "kdim": kdim, "vdim": vdim, "batch_first": first}
    shapes = (length, size), (keys, kdim or size), (keys, vdim or size)
    return Case(
        f"attention, {heads} of {width}, {shapes=} {options} {weights=} {causal=}",
        lambda: Apply(attend, inner=nn.MultiheadAttention(size, heads, **options)),
        lambda batch: tuple(torch.randn(batch, *shape) for shape in shapes),
        {"batch_dim": 0 if first else 1},
    )


KINDS = {
    "attention": attentions(), "batch-norm": batch_norms(), "bilinear": bilinears(),
    "convolution": convolutions(), "embedding": embeddings(),
    "group-norm": group_norms(), "instance-norm": instance_norms(),
    "layer-norm": norms("LayerNorm"), "linear": linears(), "prelu": prelus(),
    "rms-norm": norms("RMSNorm"), "transposed": transposed(),
}  # fmt: skip
