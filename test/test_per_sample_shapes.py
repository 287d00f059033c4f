"""Convolutions and Linears of drawn shapes, strides, paddings, groups and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.per_sample import Case, oracle
from test_per_sample_family import TOLERANCES, agree
from torch import nn

import per_sample_grad as psg
from per_sample_grad.layers.convolution import padding_widths
from per_sample_grad.layers.patches import _by_slices, padded, patches

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
MODES = ["zeros", "reflect", "replicate", "circular"]


def sizes(draw, rank: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(rank))


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
    return Case(
        f"conv{rank}d {channels} {kernel} of {size}, {options}",
        lambda: CONVOLUTIONS[rank - 1](*channels, kernel, **options),
        (channels[0], *size),
    )


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
    return Case(
        f"transposed{rank}d {channels} {kernel} of {size}, {options}",
        lambda: TRANSPOSED[rank - 1](*channels, kernel, **options),
        (channels[0], *size),
    )


@st.composite
def linears(draw) -> Case:
    shape = sizes(draw, draw(st.integers(1, 4)), 1, 4)
    width, bias = draw(st.integers(1, 4)), draw(st.booleans())
    return Case(
        f"linear {shape} to {width}, bias={bias}",
        lambda: nn.Linear(shape[-1], width, bias=bias),
        shape,
    )


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


@pytest.mark.parametrize(
    "cases", [convolutions(), transposed(), linears(), embeddings()],
    ids=["convolution", "transposed", "linear", "embedding"],
)  # fmt: skip
def test_drawn_layers_equal_the_loop(cases):
    @FEW
    @given(
        case=cases,
        batch=st.integers(1, 4),
        dtype=st.sampled_from(list(TOLERANCES)),
        method=st.sampled_from(["auto", "factored", "materialized"]),
        budget=st.sampled_from([1, 1000, 2**28]),
    )
    def check(case, batch, dtype, method, budget):
        model, inputs = case.make(dtype, batch)
        truth = oracle(case, model, inputs)
        with psg.capture(model, method=method, budget=budget) as recorded:
            losses = case.loss(model, *inputs)
        agree(case, recorded.backward(losses), truth, TOLERANCES[dtype])

    check()


@given(case=convolutions(), batch=st.integers(1, 3))
@FEW
def test_slices_see_what_views_see(case, batch):
    """What XLA runs, here."""
    model, (x,) = case.make(torch.float32, batch)
    with torch.no_grad():
        positions = model(x).shape[2:]
    around = padded(x, padding_widths(model), model.padding_mode)
    shape = (model.kernel_size, model.stride, model.dilation, positions)
    torch.testing.assert_close(
        patches(around, *shape), _by_slices(around, *shape), rtol=0, atol=0
    )
