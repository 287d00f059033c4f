"""Parameters used outside known modules: rules of operations, against a loop."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad import Case, fold, rules_kept
from support.per_sample_grad.agreement import agree_with_loop
from support.per_sample_grad.models import BY_OPERATIONS, Apply, WithParameter, tokens
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import per_sample_grad as psg


class Norm(nn.Module):
    """An RMSNorm under a name of its own; ``offset`` 1 is Gemma's."""

    def __init__(self, width: int = 3, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(width)), offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * (self.offset + self.weight) if self.offset else self.weight * x


class Scaled(nn.Embedding):
    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(index + 1)


def activated(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the kind of layer followed by an activation."""
    return type("Own", (kind,), {"forward": lambda m, x: F.silu(kind.forward(m, x))})


class Raw(WithParameter):
    """Whatever a function does with a parameter and samples; it has buffers, too."""

    def __init__(self, function, *shape: int, **modules: nn.Module) -> None:
        super().__init__(function, *shape, **modules)
        self.register_buffer("places", torch.linspace(-1, 1, 14).view(7, 2))
        relative = torch.arange(4)[:, None] - torch.arange(4) + 3
        self.register_buffer("relative", relative.flatten())
        self.register_buffer("column", torch.linspace(1, 2, 5)[:, None])
        self.register_buffer("mask", torch.eye(5, 4))


def windowed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Attention within windows, with a table of biases: rows are windows of samples."""
    x = m.a(x).unflatten(1, (2, -1)).flatten(0, 1)  # (2 B, 4, 3)
    biases = m.p[m.relative].view(4, 4, 1).permute(2, 0, 1)
    scores = x @ x.transpose(1, 2) + biases
    return (scores.softmax(-1) @ x).unflatten(0, (-1, 2))


def after_linear(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), module)


def case_of(name, function, *shape: int, of=(5, 3), batch_dim=None, **layers) -> Case:
    """A parameter of this shape beside layers; two numbers are those of a Linear."""

    def build() -> nn.Module:
        made = {
            key: nn.Linear(*each) if isinstance(each, tuple) else each()
            for key, each in layers.items()
        }
        return Raw(function, *shape, **made)

    return Case(name, build, of, {} if batch_dim is None else {"batch_dim": batch_dim})


def pointwise(name: str, function, *shape: int, of=(3,)) -> Case:
    return case_of(
        name, lambda m, x: m.b(function(torch.sigmoid(m.a(x)), m.p.abs())),
        *shape, of=of, a=(3, 4), b=(4, 2),
    )  # fmt: skip


def of_weight(name: str, function, *shape: int, of=(5, 3)) -> Case:
    return case_of(
        name, lambda m, x: F.linear(m.a(x), function(m, m.p)), *(shape or (5, 4)),
        of=of, a=(3, 4), b=(2, 4), c=(5, 2),
    )  # fmt: skip


TIME_FIRST = {"": 1, "a": 0}
CASES = [
    *BY_OPERATIONS,
    Case("rms-norm", lambda: after_linear(Norm()), (5, 3)),
    Case("rms-norm-first", lambda: nn.Sequential(Norm(), nn.Linear(3, 2)), (5, 3)),
    Case("rms-norm-plus-one", lambda: after_linear(Norm(offset=1.0)), (5, 3)),
    Case("scaled-embedding", lambda: Scaled(6, 3), tokens(5, 4)),
    Case("scaled-padding", lambda: Scaled(6, 3, padding_idx=2), tokens(5, 4)),
    case_of("transposed", lambda m, x: torch.addmm(  # as GPT-2's layers
        m.a.bias, x.view(-1, 3), m.p).view(-1, 5, 4).tanh(), 3, 4, a=(3, 4)),
    Case("bag", lambda: nn.EmbeddingBag(6, 3, mode="sum"), tokens(5, 4)),
    Case("bag-mean", lambda: nn.EmbeddingBag(6, 3, padding_idx=2), tokens(5, 4)),
    Case("bag-weighted", lambda: Apply(
        lambda m, i: m.a(i, per_sample_weights=((1.0 + i) / 3).to(m.a.weight)),
        a=nn.EmbeddingBag(6, 3, mode="sum")), tokens(5, 4)),
    Case("bags-joined", lambda: Apply(
        lambda m, index: m.a(index.flatten(), torch.arange(len(index)) * 5),
        a=nn.EmbeddingBag(6, 3, padding_idx=2)), tokens(5, 4)),
    *(Case(f"own-{kind}", lambda kind=kind, args=args: nn.Sequential(
        nn.Conv2d(2, 4, 3), activated(getattr(nn, kind))(*args)), (2, 5, 5))
      for kind, *args in (("BatchNorm2d", 4), ("GroupNorm", 2, 4), ("LayerNorm", 3))),
    case_of("standardised-by-batch-norm", lambda m, x: F.conv2d(x, F.batch_norm(
        m.a.weight.view(1, 4, -1), None, None, m.p * 0.3, None, True
    ).view_as(m.a.weight), m.a.bias), 4, of=(2, 5, 5), a=lambda: nn.Conv2d(2, 4, 3)),
    case_of("layer-scale", lambda m, x: x + m.p * torch.tanh(m.a(x)), 3, a=(3, 3)),
    case_of("layer-scale-of-channels", lambda m, x: m.a(x) * m.p, 3, 1, 1,
            of=(2, 4, 4), a=lambda: nn.Conv2d(2, 3, 1)),
    case_of("class-token", lambda m, x: m.a(
        torch.cat([m.p.expand(len(x), -1, -1), x], 1)), 1, 1, 3, a=(3, 2)),
    case_of("repeated", lambda m, x: m.a(
        torch.cat([m.p.repeat(len(x), 3, 1), x], 1)), 2, 3, a=(3, 2)),
    case_of("token-and-places", lambda m, x: m.a(torch.cat([
        (m.p[:, :1] + m.p[:, 1:2]).expand(len(x), -1, -1), x + m.p[:, 1:]], 1)),
        1, 6, 3, a=(3, 2)),
    case_of("difference", lambda m, x: torch.sub(m.a(x), m.p, alpha=3), 5, 2, a=(3, 2)),
    case_of("quotients", lambda m, x: m.a(x) / (2 + m.p.square())
            + m.p / (2 + x.square()), 3, a=(3, 3)),
    case_of("mask-token", lambda m, x: m.a(torch.where(x[..., :1] > 0, m.p, x)), 3,
            a=(3, 2)),
    case_of("windows", windowed, 7, 1, of=(8, 3), a=(3, 3)),
    case_of("one-row-of-places", lambda m, x: m.a(x) + m.b(torch.arange(5)[None]), 3,
            a=Norm, b=lambda: nn.Embedding(7, 3)),
    case_of("places-by-a-network", lambda m, x: m.a(x) + m.b(m.places) * m.p, 3,
            of=(7, 3), a=(3, 3), b=lambda: nn.Sequential(
                nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))),
    case_of("low-rank", lambda m, x: F.linear(
        x, m.a.weight + m.b.weight @ m.p, m.a.bias), 2, 3, a=(3, 4), b=(2, 4, False)),
    case_of("one-plus", lambda m, x: (x @ m.a.weight.T + m.p.exp()) @ m.a.weight, 4,
            of=(3,), a=(3, 4, False)),
    case_of("einsum", lambda m, x: torch.einsum("bti,ino->btno", m.a(x), m.p), 4, 2, 3,
            a=(3, 4)),
    case_of("einsum-of-inputs", lambda m, x: torch.einsum("bti,oni->bton", x, m.p),
            4, 2, 3),
    case_of("einsum-over-two", lambda m, x: torch.einsum(
        "btno,hno->bth", m.a(x).unflatten(2, (2, 2)), m.p), 3, 2, 2, a=(3, 4)),
    case_of("einsum-time-first", lambda m, x: torch.einsum(
        "tbi,ino->tbno", m.a(x).transpose(0, 1), m.p).transpose(0, 1), 4, 2, 3,
        batch_dim=TIME_FIRST, a=(3, 4)),
    case_of("einsum-by-head", lambda m, x: torch.einsum(
        "btno,sno->btns", m.a(x).unflatten(2, (2, 2)), m.p), 3, 2, 2, a=(3, 4)),
    case_of("vector", lambda m, x: (m.a(x) @ m.p)[:, None], 4, of=(3,), a=(3, 4)),
    case_of("vector-of-the-input", lambda m, x: m.a(torch.tanh(x @ m.p)), 3, a=(5, 2)),
    case_of("weight-and-bias", lambda m, x: F.linear(m.a(x), m.p, m.p[:, 0]), 5, 4,
            a=(3, 4)),
    case_of("linear", lambda m, x: F.linear(m.a(x), m.p), 5, 4, a=(3, 4)),
    case_of("batched-product", lambda m, x: torch.bmm(
        m.a(x).transpose(0, 1), m.p).transpose(0, 1), 5, 4, 3,
        batch_dim=TIME_FIRST, a=(3, 4)),
    # Where samples are is seen from the losses, and need not be said.
    case_of("time-first-inside", lambda m, x: (F.linear(
        m.a(x).transpose(0, 1), m.p) * m.p[:, 0]).transpose(0, 1), 5, 4, a=(3, 4)),
    case_of("input-that-takes-a-gradient", lambda m, x: m.a(
        x.clone().requires_grad_() * m.p), 3, a=(3, 4)),
    case_of("in-the-middle", lambda m, x: F.linear(
        m.a(x), m.p.transpose(0, 1).flatten(1)), 2, 5, 2, a=(3, 4)),
    case_of("copies-for-samples", lambda m, x: torch.bmm(
        m.a(x).unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1),
        m.b(m.p).repeat(len(x), 1, 1).transpose(1, 2)).unflatten(0, (-1, 2)),
        2, 7, 3, batch_dim={"": 0, "b": None}, a=(3, 4), b=(3, 2)),
    case_of("copies-of-a-table", lambda m, x: m.a(x) + m.p.repeat(2, 1), 3, 4,
            of=(6, 3), a=(3, 4)),
    case_of("same-for-all", lambda m, x: m.a(x) * m.b(torch.arange(6)), 1, of=(6, 3),
            batch_dim={"b": None}, a=(3, 3), b=lambda: nn.Embedding(6, 3)),
    # Autograd's own formulas have a row for each sample.
    pointwise("power-of-places", lambda x, p: x**p, 5, 1, of=(5, 3)),
    pointwise("power-of-samples", lambda x, p: p**x, 4),
    case_of("power-of-constants", lambda m, x: m.a(x.square() ** m.p), 3, a=(3, 2)),
    pointwise("angle", lambda x, p: torch.atan2(p, x)),
    pointwise("of-what-is-computed", lambda x, p: x ** (3 * p[:4] - p[4:]).exp() + x,
              8),
    pointwise("maximum", torch.maximum, 4),
    pointwise("clamped", lambda x, p: x.clamp(min=p - 0.5, max=p), 4),
    pointwise("between", lambda x, p: torch.lerp(x, p[0], p[1]), 2, 4, of=(5, 3)),
    pointwise("slopes", lambda x, p: F.prelu(x.flatten(0, 1) - 0.5, p).view(x.shape),
              4, of=(5, 3)),
    pointwise("powers", lambda x, p: x**p + (2 * x) ** p.square(), 4),
    pointwise("power-and-product", lambda x, p: x**p + x * p, 4),
    case_of("power-time-first", lambda m, x: (
        m.a(x).square().transpose(0, 1) ** m.p).transpose(0, 1), 4,
        batch_dim=TIME_FIRST, a=(3, 4)),
    pointwise("power-folded", lambda x, p: (x.flatten(0, 1) ** p).unflatten(
        0, (len(x), -1)), 4, of=(5, 3)),
    of_weight("times-a-number", lambda m, p: 3 * p / 2),
    of_weight("product-turned", lambda m, p: (m.c.weight.T @ p) * 2, 2, 4),
    of_weight("low-rank-and-frozen", lambda m, p: m.mask + 0.5 * (p @ m.b.weight.T),
              5, 2),
    of_weight("sum-of-two", lambda m, p: p - 2 * (m.c.weight.T @ m.b.weight.T)),
    of_weight("masked-by-columns", lambda m, p: p * m.mask / m.column),
    of_weight("used-twice", lambda m, p: p + p * m.column - p.sin()),
    of_weight("again-and-again", lambda m, p: functools.reduce(
        lambda w, _: w + w, range(8), p)),
    of_weight("sums", lambda m, p: p * p.sum(1, keepdim=True) + p.sum()),
    of_weight("of-one-vector", lambda m, p: torch.outer(p, p)[:, :4] * 2, 5, of=(3,)),
    case_of("table", lambda m, index: F.embedding(index, torch.sigmoid(m.p)), 4, 3,
            of=tokens(5, 4)),
    case_of("unit-filters", lambda m, x: F.conv1d(
        x, m.p / m.p.norm(dim=(1, 2), keepdim=True)), 6, 5, 2),
    case_of("masked-groups", lambda m, x: F.conv1d(x, m.p * m.places[0], groups=2),
            6, 2, 2, of=(4, 3)),
    Case("weight-norm-on-positions", lambda: nn.Sequential(
        nn.Linear(3, 4), parametrizations.weight_norm(nn.Linear(4, 5))), (6, 3)),
    Case("spectral-norm", lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(3, 5)).eval()), (3,)),
]  # fmt: skip
# Tables of as many rows as samples, in some batches; it is seen where they meet them.
TABLE = {"of": (3, 3), "a": (3, 2), "b": lambda: nn.Embedding(5, 3)}
TABLES = [
    case_of("of-positions", lambda m, x: m.a(torch.tanh(
        x + m.b(torch.arange(3)))), **TABLE),
    case_of("of-positions-with-a-row", lambda m, x: m.a(
        x * m.b(torch.arange(3)[None])), **TABLE),
    case_of("of-positions-cut", lambda m, x: m.a(torch.tanh(
        x + m.b(torch.arange(4))[None][:, 1:])), **TABLE),
    # A class of each sample, which has a row for it, is used in the same way.
    case_of("of-classes", lambda m, x, kind: m.a(x + m.b(kind)[:, None]), **TABLE | {
        "of": lambda batch: (torch.randn(batch, 3, 3), torch.arange(batch) % 2)}),
]  # fmt: skip
ROWS = [(case, batch) for case in CASES for batch in (1, 3, 4)]
ROWS += [(case, batch) for case in TABLES for batch in (1, 2, 3, 6)]


@pytest.mark.parametrize(("case", "batch"), ROWS, ids=str)
def test_operations_account_for_parameters(case, batch):
    model, inputs = case.make(torch.float64, batch)
    for _ in range(2):  # before a proof, and after it
        agree_with_loop(case, model, inputs)


PRODUCTS = [c for c in CASES if c.name.split("-")[0] in ("einsum", "linear", "matmul")]


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_no_gradient_of_a_matrix_is_formed(case):
    """But for some of three dimensions, of which one or two do not count rows."""
    model, inputs = case.make(torch.float64)
    factors = psg.per_sample_factors(model, fold, inputs, **case.options)
    forms = [type(use) for use in factors.contributions("p")]
    without = ("einsum-by-head", "einsum-of-inputs")
    assert (psg.Outer in forms) == (case.name not in without)


def test_a_vector_of_other_values_than_a_buffer_may_be_samples():
    case = of_weight("", lambda m, p: p / (p @ m.copy).sum(), of=(3,))
    model, inputs = case.make(torch.float32)
    model.register_buffer("vector", torch.ones(4))
    model.copy = model.vector.clone()
    psg.per_sample_factors(model, fold, inputs)
    model.copy = 2 * model.vector
    with pytest.raises(psg.CoverageError, match="may be samples"):
        psg.per_sample_factors(model, fold, inputs)


@pytest.mark.parametrize("function", [
    lambda f, w: f * torch.view_as_complex(w)[0],
    lambda f, w: f @ torch.view_as_complex(w),
    lambda f, w: F.linear(f, torch.view_as_complex(w)),
    lambda f, w: torch.view_as_complex(w).T.expand(len(f), 2, 2) @ f.mT,
    lambda f, w: f * w[0, 0], lambda f, w: f + w[0, 0],
    lambda f, w: f @ w[0].to(f.dtype),
])  # fmt: skip
def test_parameters_meet_complex_numbers(function):
    """What is proven of a spectrum without an imaginary part holds for others."""

    def filtered(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(function(torch.fft.rfft(x, dim=1), m.p), n=8, dim=1)

    model = WithParameter(filtered, 2, 2, 2).double()
    x = torch.randn(3, 8, 2, dtype=torch.float64)
    for given in (x + x.flip(1).roll(1, 1), x):
        agree_with_loop(Case("", nn.Module, ()), model, (given,))


def checkpointed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(m, x, use_reentrant=False).flatten(1).sum(1)


def with_a_weight(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    product = functools.partial(torch.matmul, other=m[1].weight)
    inside = checkpoint(lambda x: torch.tanh(product(x)), m[0](x), use_reentrant=False)
    return inside.flatten(1).sum(1)


def test_what_a_checkpoint_keeps_is_not_read_twice():
    model, x = after_linear(Norm()).double(), torch.randn(4, 5, 3).double()
    with pytest.raises(psg.CoverageError, match="saved is kept by hooks"):
        psg.per_sample_grad_norms(model, checkpointed, (x,))
    case = Case("", nn.Module, (), loss=checkpointed)
    agree_with_loop(case, model, (x,), fallback="loop")


@pytest.mark.parametrize("fallback", ["error", "loop"])
def test_a_weight_that_a_checkpoint_is_given_is_exact_or_an_error(fallback):
    """Until 2.9 torch does not tell that hooks keep what was saved."""
    model = after_linear(nn.Linear(3, 3, bias=False)).double()
    case, x = Case("", nn.Module, (), loss=with_a_weight), torch.randn(4, 5, 3).double()
    with contextlib.suppress(psg.PerSampleError):
        agree_with_loop(case, model, (x,), fallback=fallback)


def test_operations_are_not_believed_before_a_comparison():
    case = Case("", lambda: after_linear(Norm()), (5, 3))
    model, inputs = case.make(torch.float64)
    with pytest.raises(psg.CoverageError, match='only believed without check="never"'):
        psg.per_sample_grads(model, fold, inputs, check="never")
    for check in ("first", "never"):
        agree_with_loop(case, model, inputs, check=check)


@rules_kept()
def test_one_line_says_that_a_class_computes_what_its_base_does():
    norm = type("Own", (nn.InstanceNorm1d,), {})
    psg.register_rule(norm, like=nn.InstanceNorm1d)
    case = Case("", lambda: norm(2, affine=True), (2, 5))
    agree_with_loop(case, *case.make(torch.float64))
    Thin = type("Thin", (nn.Linear,), {})
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Thin(4, 2)).double()
    x = torch.randn(4, 5, 3).double()
    with pytest.raises(psg.CoverageError, match=r"register_rule\(Thin, like=Linear\)"):
        psg.per_sample_grad_norms(model, checkpointed, (x,))
    psg.register_rule(Thin, like=nn.Linear)
    agree_with_loop(Case("", nn.Module, (), loss=checkpointed), model, (x,))
    with pytest.raises(KeyError):
        psg.register_rule(Thin, like=nn.Module)


COUPLED = [
    case_of("a-module-of-the-mean", lambda m, x: m.a(x) + m.b(
        m.a(x).mean(0, keepdim=True)), of=(3,), a=(3, 4), b=(4, 4)),
    case_of("a-parameter-times-the-mean", lambda m, x: m.a(x) + m.p * m.a(x).mean(
        0, keepdim=True), 4, of=(3,), a=(3, 4)),
    case_of("a-parameter-times-the-first", lambda m, x: x @ m.p + (x @ m.p)[:1], 3, 4,
            of=(3,)),
    case_of("a-product-with-the-inputs'-mean", lambda m, x: m.a(x) + x.mean(
        0, keepdim=True) @ m.p, 3, 3, of=(3,), a=(3, 3)),
    case_of("a-vector-times-the-mean", lambda m, x: m.a(x) + (
        (m.a(x) + m.a(x).mean(0)) @ m.p)[:, None], 3, of=(3,), a=(3, 3)),
    case_of("a-product-with-the-sum", lambda m, x: m.a(x) + torch.einsum(
        "bi,ij->j", m.a(x), m.p), 3, 3, of=(3,), a=(3, 3)),
    case_of("rows-by-samples'-indices", lambda m, x: m.a(x) + m.p[x.argmax(1)].mean(
        0, True), 3, 4, of=(3,), a=(3, 4)),
    case_of("a-norm-of-the-first", lambda m, x: x + m.a((x * m.p)[:1]), 3, of=(3,),
            a=Norm),
    # The mean is beside the parameter, with a row for each sample.
    pointwise("a-power-of-a-sum-with-the-mean", lambda x, p: (x + x.mean(0)) ** p, 4),
]  # fmt: skip


@pytest.mark.parametrize("batch", [2, 4, 6])
@pytest.mark.parametrize("case", COUPLED, ids=lambda case: case.name)
def test_samples_that_meet_below_are_an_error(case, batch):
    """What goes down from there adds up to autograd's gradient, coupled or not."""
    model, inputs = case.make(torch.float64, batch)
    with pytest.raises(psg.PerSampleError):
        psg.per_sample_grad_norms(model, fold, inputs)
