"""Layers agree with a float64 loop over samples: every case, and drawn ones."""

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from support.per_sample_grad import HALF, Case, Gradients, captured, error, flat, loop
from support.per_sample_grad.agreement import METHODS, TOLERANCES, agree
from support.per_sample_grad.models import CASES, Apply
from support.xla_replica.replicas import HAS_XLA
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors import algebra, plan
from per_sample_grad.layers import registry
from tools.studies.drawn_models import losses_of, truth_of

# --- layers of drawn shapes and options: `KINDS` draws each kind ----------------------


def sizes(draw, rank: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(rank))


def layer(kind: str, shape: tuple[int, ...], *args, **options) -> Case:
    """Returns a layer of these arguments, which its name tells."""
    name = f"{kind}{args} {options} of {shape}"
    return Case(name, lambda: getattr(nn, kind)(*args, **options), shape)


def convolutions(draw, transposed: bool = False) -> Case:
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    size = sizes(draw, rank, *((1, 4 - rank) if transposed else (3, 6 - rank)))
    kernel, dilation = sizes(draw, rank, 1, 3), sizes(draw, rank, 1, 2)
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options = {"dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    if transposed:
        kind, stride = "ConvTranspose", sizes(draw, rank, 1, 3)
        padding, most = sizes(draw, rank, 0, 2), map(max, stride, dilation)
        more = tuple(draw(st.integers(0, each - 1)) for each in most)
        numbers = zip(size, stride, padding, reach, more)
        assume(all((n - 1) * s - 2 * p + r + m >= 1 for n, s, p, r, m in numbers))
        options |= {"output_padding": more}
    else:
        kind, modes = "Conv", ["zeros", "reflect", "replicate", "circular"]
        padding = draw(st.sampled_from(["same", "valid", "numbers"]))
        stride = (1,) * rank if padding == "same" else sizes(draw, rank, 1, 3)
        if padding == "numbers":
            padding = sizes(draw, rank, 0, 2)
        around = padding if isinstance(padding, tuple) else (0,) * rank
        fits = all(s + 2 * p >= r for s, p, r in zip(size, around, reach))
        assume(padding == "same" or fits)
        options |= {"padding_mode": draw(st.sampled_from(modes))}
    options |= {"stride": stride, "padding": padding}
    return layer(f"{kind}{rank}d", (channels[0], *size), *channels, kernel, **options)


def linears(draw) -> Case:
    shape = sizes(draw, draw(st.integers(1, 4)), 1, 4)
    width, bias = draw(st.integers(1, 4)), draw(st.booleans())
    return layer("Linear", shape, shape[-1], width, bias=bias)


def embeddings(draw) -> Case:
    entries, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.none() | st.integers(0, entries - 1))
    shape = sizes(draw, draw(st.integers(0, 2)), 1, 4)
    return Case(
        f"embedding {entries} x {width}, padding_idx={padding}, of {shape}",
        lambda: nn.Embedding(entries, width, padding_idx=padding),
        lambda batch: (torch.randint(0, entries, (batch, *shape)),),
    )


def norms(draw, kind: str) -> Case:
    outer = sizes(draw, draw(st.integers(0, 2)), 1, 3)
    shape = (*sizes(draw, draw(st.integers(0, 1)), 1, 3), draw(st.integers(2, 5)))
    options = {"eps": draw(st.sampled_from([1e-5, 1e-2]))}
    if kind == "LayerNorm":
        options["bias"] = draw(st.booleans())
    elif draw(st.booleans()):
        options["eps"] = None
    return layer(kind, (*outer, *shape), shape, **options)


def group_norms(draw) -> Case:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    space = sizes(draw, draw(st.integers(0, 3)), 1, 3)
    # A single number minus its mean is zero; torch refuses groups of one number.
    assume(each * torch.Size(space).numel() > 1)
    channels = groups * each
    return layer("GroupNorm", (channels, *space), groups, channels)


def instance_norms(draw) -> Case:
    rank, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    running, space = draw(st.booleans()), sizes(draw, rank, 1, 4)
    assume(running or torch.Size(space).numel() > 1)
    options = {"affine": True, "track_running_stats": running}
    return layer(f"InstanceNorm{rank}d", (channels, *space), channels, **options)


def batch_norms(draw) -> Case:
    """Draws BatchNorms with frozen statistics; others are refused."""
    rank, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    least = 0 if rank == 1 else rank
    space = sizes(draw, draw(st.integers(least, rank)), 1, 4)
    kind = draw(st.sampled_from([f"BatchNorm{rank}d", "SyncBatchNorm"]))
    return layer(kind, (channels, *space), channels)


def prelus(draw) -> Case:
    channels, each = draw(st.integers(1, 4)), draw(st.booleans())
    space = sizes(draw, draw(st.integers(0, 3)), 1, 3)
    return layer("PReLU", (channels, *space), channels if each else 1)


def bilinears(draw) -> Case:
    first, second, width = sizes(draw, 3, 1, 4)
    inner, bias = sizes(draw, draw(st.integers(0, 2)), 1, 3), draw(st.booleans())
    return Case(
        f"bilinear {first} x {second} to {width} in {inner}, bias={bias}",
        lambda: nn.Bilinear(first, second, width, bias=bias),
        lambda batch: tuple(torch.randn(batch, *inner, n) for n in (first, second)),
    )


def attentions(draw) -> Case:
    heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    length, keys = sizes(draw, 2, 1, 4)
    kdim, vdim = draw(st.sampled_from([(None, None), (3, 3), (3, 2)]))
    bias, first, weights, causal = (draw(st.booleans()) for _ in range(4))
    size = heads * width

    def attend(m: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (x if first else x.transpose(0, 1) for x in inputs)
        after = torch.ones(length, keys, device=query.device).triu(1).bool()
        mask = torch.where(after, -torch.inf, 0.0).to(query.dtype) if causal else None
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
    "attention": attentions, "batch-norm": batch_norms, "bilinear": bilinears,
    "convolution": convolutions, "embedding": embeddings, "group-norm": group_norms,
    "instance-norm": instance_norms, "layer-norm": partial(norms, kind="LayerNorm"),
    "linear": linears, "prelu": prelus, "rms-norm": partial(norms, kind="RMSNorm"),
    "transposed": partial(convolutions, transposed=True),
}  # fmt: skip
drawn = st.composite(lambda draw, kind: KINDS[kind](draw))


def reversed_order(x: torch.Tensor) -> torch.Tensor:
    return x.permute(*range(x.dim())[::-1])


LAYOUTS = {  # from a tensor to the same values
    "contiguous": lambda x: x,
    "last varies slowest": lambda x: reversed_order(reversed_order(x).contiguous()),
    "every other": lambda x: torch.stack([x, torch.full_like(x, 7)], -1)[..., 0],
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


def lost_by_products(factors: psg.Factors, truth: Gradients) -> float:
    """Returns what answers from products may be off by, where positions cancel."""
    merged = filter(None, factors.merged.values())
    terms = [algebra.squared_norms_and_terms(u, len(factors))[1] for u in merged]
    rounding = plan.ROUNDINGS * sum(torch.finfo(t.dtype).eps * t.sum() for t in terms)
    return float(rounding / flat(truth).square().sum().clamp(min=1e-30))


def wrong_by_itself(case: Case, model: nn.Module, *layouts: tuple) -> bool:
    """Returns whether autograd's gradient depends on the memory layout.

    BatchNorm's does for shape (1, 2, 1, 2) and strides (1, 1, 2, 2), torch 2.9 to 2.13.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    one, other = (loop([case.loss(model, *x).sum()], params) for x in layouts)
    # A gradient that cancels to nothing is rounding, whatever the layout.
    floor = 1e-3 * flat(one).norm()
    return any(
        not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(max(a.norm(), floor)))
        for a, b in zip(one, other)
    )


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float64, 1), (torch.float32, None)], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_equals_the_loop(case, dtype, budget):
    """Also in chunks of one sample, as a budget of one byte asks for."""
    model, inputs = case.make(dtype)
    truth = case.oracle(model, inputs)
    for method in METHODS:
        factors = case.factors(model, inputs, method=method, budget=budget)
        agree(factors, truth, TOLERANCES[dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_may_be_the_only_one(case):
    model, inputs = case.make(torch.float64)
    for name, truth in case.oracle(model, inputs).items():
        found = case.factors(model, inputs, params=[name])
        assert error(found.materialize()[name], truth) <= 1e-10, name


NUMBERS = [8 if HAS_XLA else 20, pytest.param(200, marks=pytest.mark.slow)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_layers_equal_the_loop(kind, number):
    @given(
        case=drawn(kind), batch=st.integers(1, 4), seed=st.integers(0, 3),
        dtype=st.sampled_from([*TOLERANCES]), method=st.sampled_from(METHODS),
        budget=st.sampled_from([1, 1000, 2**28]), layout=st.sampled_from([*LAYOUTS]),
    )  # fmt: skip
    @hypothesis.settings(max_examples=number, suppress_health_check=[*HealthCheck])
    def check(case, batch, dtype, method, budget, layout, seed):
        model, inputs = case.make(dtype, batch, seed)
        truth = case.oracle(model, inputs)
        # What is left where all cancels, as over a single key, is rounding alone.
        own, size = case.oracle(model, inputs, dtype), flat(truth).norm()
        lost = max(error(own[name], truth[name], size) for name in truth)
        tolerance = max(TOLERANCES[dtype], 8 * lost)
        laid_out = tuple(LAYOUTS[layout](x) for x in inputs)
        options = {"method": method, "budget": budget, **case.options}
        recorded, losses = captured(model, case.loss, *laid_out, **options)
        if wrong_by_itself(case, model, inputs, laid_out):
            with pytest.raises(psg.CouplingError):
                recorded.backward(losses)
            return
        factors = recorded.backward(losses)
        if method == "factored":  # "auto" and "materialized" lose nothing
            tolerance = max(tolerance, lost_by_products(factors, truth))
        agree(factors, truth, tolerance)

    check()


@pytest.mark.parametrize("size", [0.0, 1e-3])
@pytest.mark.parametrize(("dtype", "most"), {**TOLERANCES, **HALF}.items(), ids=str)
def test_oracles_in_float64_and_rules_have_the_epsilon_of_the_model(dtype, most, size):
    """Gradients before a normalisation of almost nothing are as large as it allows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)).to(dtype)
    nn.init.zeros_(model[0].bias)
    x = size * torch.randn(3, 4, dtype=dtype)
    found = psg.per_sample_grads(model, losses_of, (x,))
    truths = truth_of(model, x), Case("", None, (), loss=losses_of).oracle(model, (x,))
    for truth in truths:
        assert all(error(found[name], truth[name]) <= most for name in truth)


def test_every_rule_is_drawn():
    drawn = {kind for kind in registry.RULES if kind.__module__.startswith("torch.nn")}
    names = {
        "Linear", "Bilinear", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "PReLU",
        "SyncBatchNorm",
    }  # fmt: skip
    drawn.remove(nn.EmbeddingBag)  # XLA computes it on the host
    for family in ("Conv", "ConvTranspose", "InstanceNorm", "BatchNorm"):
        names |= {f"{family}{rank}d" for rank in (1, 2, 3)}
    assert {kind.__name__ for kind in drawn} == names
