"""What the table says of an operation is what changing one sample shows.

For every dimension of an output in turn: if the table says where the inputs have their
samples then, another sample's numbers must not move this one's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from per_sample_grad.operations import layouts

N = 4
COLUMNS = torch.tensor([1, 0, 3, 3])
ROWS = COLUMNS[:, None].expand(N, N)


def attend(q: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q * 2, q + 1, bias)


# By a name; the function, and the shapes of what it takes.
OPERATIONS: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    **{
        f"{name}-{dim}": (function, [(N, N, N)])
        for dim in (-3, 0, 1, 2)
        for name, function in {
            "amax": lambda x, d=dim: x.amax(d),
            "argmax-values": lambda x, d=dim: x.max(d).values,
            "aminmax": lambda x, d=dim: x.aminmax(dim=d).max,
            "mode": lambda x, d=dim: x.mode(d).values,
            "kthvalue": lambda x, d=dim: x.kthvalue(2, d).values,
            "median": lambda x, d=dim: x.median(d).values,
            "nanmedian": lambda x, d=dim: x.nanmedian(d).values,
            "logsumexp": lambda x, d=dim: x.logsumexp(d, keepdim=True),
            "vector_norm": lambda x, d=dim: torch.linalg.vector_norm(x, dim=d),
            "norm": lambda x, d=dim: x.norm(3, d),
            "std": lambda x, d=dim: x.std(d),
            "var_mean": lambda x, d=dim: torch.var_mean(x, d)[0],
            "nansum": lambda x, d=dim: x.nansum(d),
            "sum": lambda x, d=dim: x.sum(d),
            "mean": lambda x, d=dim: x.mean(d, keepdim=True),
            "prod": lambda x, d=dim: x.prod(d),
            "cumsum": lambda x, d=dim: x.cumsum(d),
            "cumprod": lambda x, d=dim: x.cumprod(d),
            "logcumsumexp": lambda x, d=dim: x.logcumsumexp(d),
            "cummax": lambda x, d=dim: x.cummax(d).values,
            "softmax": lambda x, d=dim: x.softmax(d),
            "log_softmax": lambda x, d=dim: x.log_softmax(d),
            "sort": lambda x, d=dim: x.sort(d).values,
            "stable-sort": lambda x, d=dim: x.sort(stable=True, dim=d).values,
            "topk": lambda x, d=dim: x.topk(2, d).values,
            "gather": lambda x, d=dim: x.gather(d, ROWS.expand(N, N, N)),
            "index_select": lambda x, d=dim: x.index_select(d, COLUMNS),
            "index_fill": lambda x, d=dim: x.index_fill(d, COLUMNS, 0.5),
            "scatter": lambda x, d=dim: x.scatter(d, ROWS.expand(N, N, N), 2.0),
            "split": lambda x, d=dim: x.split([1, N - 1], d)[1],
            "chunk": lambda x, d=dim: x.chunk(2, d)[0],
            "glu": lambda x, d=dim: F.glu(x, d),
            "select": lambda x, d=dim: x.select(d, 1),
            "unbind": lambda x, d=dim: x.unbind(d)[2],
            "fft": lambda x, d=dim: torch.fft.fft(x, dim=d).abs(),
            "rfft": lambda x, d=dim: torch.fft.rfft(x, dim=d).abs(),
            "irfft": lambda x, d=dim: torch.fft.irfft(x + 0j, dim=d),
            "unfold": lambda x, d=dim: x.unfold(d, 2, 1),
            "flip": lambda x, d=dim: x.flip(d),
            "roll": lambda x, d=dim: x.roll(1, d),
            "narrow": lambda x, d=dim: x.narrow(d, 0, 2),
            "whole": lambda x, d=dim: x.narrow(d, 0, N),
            "transpose": lambda x, d=dim: x.transpose(d, 1),
            "unsqueeze": lambda x, d=dim: x.unsqueeze(d),
            "squeeze": lambda x, d=dim: x[:, :1].squeeze(1),
            "diff": lambda x, d=dim: x.diff(dim=d),
        }.items()
    },
    **{
        f"{name}-{dim}": (function, [(N, N, N), (N, N, N)])
        for dim in (0, 1, 2)
        for name, function in {
            "cat": lambda x, y, d=dim: torch.cat([x, y], d),
            "stack": lambda x, y, d=dim: torch.stack([x, y], d),
            "index_add": lambda x, y, d=dim: x.index_add(d, COLUMNS, y),
            "index_copy": lambda x, y, d=dim: x.index_copy(d, torch.arange(N), y),
            "scatter_add": lambda x, y, d=dim: x.scatter_add(
                d, ROWS.expand(N, N, N), y
            ),
        }.items()
    },
    "index_fill-number": (lambda x, y: x.index_fill(1, COLUMNS, y), [(N, N), ()]),
    "pointwise": (lambda x, y: torch.where(x > 0, x * y.exp(), y), [(N, N), (N, N)]),
    "broadcast": (lambda x, y: x * y, [(N, N, N), (N, 1)]),
    "expand": (lambda x: x.expand(N, N, N), [(N, 1)]),
    "addcmul": (lambda x, y, z: x.addcmul(y, z), [(N,), (N, N), (N, 1)]),
    "view": (lambda x: x.view(N * N, N), [(N, N, N)]),
    "view-shuffled": (lambda x: x.view(2, N, 2, N), [(N, N, N)]),
    "permute": (lambda x: x.permute(2, 0, 1), [(N, N, N)]),
    "repeat": (lambda x: x.repeat(2, 1), [(N, N)]),
    "repeat-along": (lambda x: x.repeat(1, N, 1), [(1, N)]),
    "tril": (lambda x: x.tril(), [(N, N, N)]),
    "index": (lambda x: x[:, COLUMNS], [(N, N, N)]),
    "index-apart": (lambda x: x[COLUMNS, :, COLUMNS], [(N, N, N)]),
    "index-first": (lambda x: x[COLUMNS, COLUMNS], [(N, N, N)]),
    "masked_fill": (lambda x: x.masked_fill(ROWS == 3, 0.0), [(N, N)]),
    "complex": (lambda x, y: torch.complex(x, y).abs(), [(N, N), (N, N)]),
    "as-real": (
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), [(N, N, 2)],
    ),
    "mm": (torch.mm, [(N, N), (N, N)]),
    "addmm": (torch.addmm, [(N,), (N, N), (N, N)]),
    "bmm": (torch.bmm, [(N, N, N), (N, N, N)]),
    "baddbmm": (torch.baddbmm, [(N, N, N), (N, N, N), (N, N, N)]),
    "mv": (torch.mv, [(N, N), (N,)]),
    "addmv": (torch.addmv, [(N,), (N, N), (N,)]),
    "addr": (torch.addr, [(N, N), (N,), (N,)]),
    "linear": (F.linear, [(N, N, N), (N, N)]),
    "conv1d": (F.conv1d, [(N, N, N), (N, N, 1)]),
    "conv-transposed": (F.conv_transpose2d, [(N, N, N, N), (N, N, 1, 1)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(N, N, N)]),
    "layer_norm": (lambda x: F.layer_norm(x, (N,)), [(N, N, N)]),
    "rms_norm": (lambda x: F.rms_norm(x, (N, N)), [(N, N, N)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(N, N, N)]),
    "batch_norm-frozen": (
        lambda x: F.batch_norm(x, torch.zeros(N).double(), torch.ones(N).double()),
        [(N, N, N)],
    ),
    "instance_norm": (F.instance_norm, [(N, N, N)]),
    "pad": (lambda x: F.pad(x, (1, -1)), [(N, N, N)]),
    "pad-rows": (lambda x: F.pad(x, (0, 0, 1, -1)), [(N, N, N)]),
    "reflect": (lambda x: F.pad(x, (1, 1), mode="reflect"), [(N, N, N)]),
    "replicate": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), [(N, N, N, N)]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), [(N, N, N, N)]),
    "max_pool": (lambda x: F.max_pool2d(x, 2), [(N, N, N, N)]),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), [(N, N, N, N, N)]),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 1), [(N, N, N, N)]),
    "adaptive-3": (lambda x: F.adaptive_avg_pool2d(x, 3), [(N, N, N, N)]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [(N, N, N)]),
    "bicubic": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), [(N, N, N, N)],
    ),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [(N, N, N, N)]),
    "unfold2d": (lambda x: F.unfold(x, 2), [(N, N, N, N)]),
    "fold": (lambda x: F.fold(x, (2, 2), 1), [(N, N, N)]),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        [(N, N, N, N), (N, N, N, 2)],
    ),
    "prelu": (F.prelu, [(N, N, N), (N,)]),
    "mse": (lambda x, y: F.mse_loss(x, y, reduction="none"), [(N, N), (N, N)]),
    "nll": (lambda x: F.nll_loss(x, COLUMNS, reduction="none"), [(N, N)]),
    "nll-2d": (
        lambda x: F.nll_loss(x, ROWS.expand(N, N, N), reduction="none"),
        [(N, N, N, N)],
    ),
    "multi_margin": (
        lambda x: F.multi_margin_loss(x, COLUMNS, reduction="none"), [(N, N)],
    ),
    "ctc": (
        lambda x: F.ctc_loss(
            x.log_softmax(2), torch.ones(N, 2).long(), torch.full((N,), N),
            torch.full((N,), 2), reduction="none",
        ),
        [(N, N, N)],
    ),
    "attention": (attend, [(N, N, N, N)]),
    "attention-masked": (attend, [(N, N, N, N), (N, 1, N, N)]),
}  # fmt: skip


def said(output: torch.Tensor, dim: int, num_samples: int) -> layouts.Layout | None:
    node = output.grad_fn
    shapes = tuple(
        None if below is None else tuple(below._input_metadata[number].shape)
        for below, number in node.next_functions
    )
    found = layouts.LayoutQuery(
        node, tuple(output.shape), dim, shapes, num_samples, may_read=True
    )
    return found.layout()


def samples_of(output: torch.Tensor, inputs: list, dim: int) -> list[int | None] | None:
    """Returns where leaves have their samples, through all nodes; None: unknown."""
    stack, found = [(output.grad_fn, output, dim)], {}
    while stack:
        node, shape, at = stack.pop()
        if hasattr(node, "variable"):
            found.setdefault(id(node.variable), set()).add(at)
            continue
        below = None if at is None else said(shape, at, N)
        for i, (each, number) in enumerate(node.next_functions):
            if each is None:
                continue
            inner = Output(each, each._input_metadata[number].shape)
            stack.append((each, inner, None if below is None else below[i]))
    places = [found.get(id(each), {None}) for each in inputs]
    return [each.pop() if len(each) == 1 else None for each in places]


class Output:
    """What `said` asks of a tensor, of one that only the graph knows."""

    def __init__(self, node: torch.autograd.graph.Node, shape: torch.Size) -> None:
        self.grad_fn, self.shape = node, shape


@pytest.mark.parametrize("name", OPERATIONS)
def test_another_sample_moves_nothing(name):
    function, shapes = OPERATIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    output = function(*inputs)
    for dim, rows in enumerate(output.shape):
        if rows % N:
            continue
        places = samples_of(output, inputs, dim)
        if places.count(None) == len(places):
            continue  # samples may meet, as far as the table knows
        for each, at in zip(inputs, places):
            if at is None:
                continue
            moved = each.detach().clone()
            moved.unflatten(at, (N, -1)).select(at, 2).add_(0.25)
            given = [moved if other is each else other for other in inputs]
            change = (function(*given) - output).detach().unflatten(dim, (N, -1))
            others = change.index_select(dim, torch.tensor([0, 1, 3]))
            assert others.abs().max() < 1e-12, (dim, at)


def test_rows_are_names_of_nodes():
    nodes = set(dir(torch._C._functions))
    newer = {"AminmaxBackward0", "NarrowCopyBackward0"}  # than torch 2.9
    assert not layouts.LAYOUTS.keys() - nodes - newer


@pytest.mark.parametrize(
    ("name", "dims"),
    [("softmax-2", (0, 1)), ("sum-0", (0, 1)), ("mm", (0, 1)), ("conv1d", (0,)),
     ("attention", (0, 1)), ("index_fill-number", (0,)), ("view", (0, 1))],
)  # fmt: skip
def test_what_is_known(name, dims):
    """So that the test above looks at something."""
    function, shapes = OPERATIONS[name]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    output = function(*inputs)
    known = [d for d in range(output.dim()) if said(output, d, N) is not None]
    assert tuple(known) == dims
