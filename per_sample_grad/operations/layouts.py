"""Operations that keep samples apart whatever the data, and where each has its samples.

A row of `LAYOUTS` says of one operation: if this dimension of the output counts
samples, that dimension of each input does, and no number of the output depends on
another sample's. What has no row may let any two samples meet, by its data or
otherwise, so all of its inputs have to be the same for all samples. A dimension that
counts samples has B rows, or k times B of which k consecutive ones belong to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.autograd.graph import Node

from per_sample_grad.operations import rules

Shape = tuple[int, ...]
# For each input, the dimension that counts samples; None: it must be the same for all.
Layout = Sequence[int | None]
# In the names of functions that XLA's backend has in place of torch's.
_OF_XLA = "::aten_autograd_ops::"


class Unknown(Exception):
    """Samples may meet here, as far as the operation's settings tell."""


class LayoutQuery(NamedTuple):
    """Asks where an operation's inputs have the samples that its output has.

    Attributes:
        node: Its node in autograd's graph.
        shape: That of the output.
        dim: The dimension of the output that counts samples, not negative.
        inputs: The shapes of the inputs; None for those without a graph.
        num_samples: B.
        may_read: Whether the tensors that it has saved may be looked at.
    """

    node: Node
    shape: Shape
    dim: int
    inputs: tuple[Shape | None, ...]
    num_samples: int
    may_read: bool

    def layout(self) -> Layout | None:
        """Returns where the inputs have their samples; None: samples may meet."""
        name = self.node.name()
        if _OF_XLA in name:
            name = name.partition(_OF_XLA)[2]
            name = name.replace("dAutogradFunction>", "DWithIndicesBackward0")
        rule = LAYOUTS.get(name)
        if rule is None and rules.is_pointwise(name):
            rule = _broadcast
        if rule is None:
            return None
        try:
            return rule(self)
        except Unknown:
            return None


def _at(shape: Shape | None, dim: int, of: LayoutQuery) -> int | None:
    """Returns this dimension of an input if it has as many rows as the output has."""
    if shape is None:
        return None
    if not 0 <= dim < len(shape) or shape[dim] != of.shape[of.dim]:
        raise Unknown
    return dim


def through_view(shape: Shape, dim: int, before: Shape, num_samples: int) -> int:
    """Returns the dimension that counts samples ``before`` a view to this shape.

    Raises:
        Unknown: None does.
    """
    outer = math.prod(shape[:dim])
    for at, size in enumerate(before):
        if size and size % num_samples == 0 and math.prod(before[:at]) == outer:
            return at
    raise Unknown


def _viewed(of: LayoutQuery) -> Layout:
    [before] = of.inputs
    assert before is not None
    return [through_view(of.shape, of.dim, before, of.num_samples)]


def _one_broadcast(shape: Shape | None, output: Shape, dim: int) -> int | None:
    """Returns where an input that is broadcast has its samples; None: nowhere."""
    if shape is None:
        return None
    own = rules.aligned(shape, output)
    if len(own) != len(output) or any(n not in (1, m) for n, m in zip(own, output)):
        raise Unknown
    at = dim - len(output) + len(shape)
    return at if own[dim] == output[dim] and at >= 0 else None


def _broadcast(of: LayoutQuery) -> Layout:
    return [_one_broadcast(shape, of.shape, of.dim) for shape in of.inputs]


def _permuted(of: LayoutQuery) -> Layout:
    order = rules.order_of(of.node)
    if order is None:
        raise Unknown
    return [order[of.dim]]


def _along(*names: str, leading: int = 0) -> Callable[[LayoutQuery], Layout]:
    """Returns the rule of operations along dimensions which they have saved.

    Slices along another dimension are computed by themselves. ``leading`` is how many
    dimensions the output has more than an input, of those it is along.
    """

    def rule(of: LayoutQuery) -> Layout:
        found: list[int | None] = []
        for shape in of.inputs:
            if not shape:  # no graph, or a number that fills
                found.append(None)
                continue
            rank = len(shape) + leading
            given = [getattr(of.node, f"_saved_{name}") for name in names]
            dims = {
                rules.signed(dim) % rank
                for each in given
                if each is not None
                for dim in (each if isinstance(each, Iterable) else [each])
            }
            if not dims or any(each is None for each in given):
                raise Unknown
            if leading:  # the output has them, and the input does not
                if of.dim in dims:
                    raise Unknown
                at = of.dim - sum(dim < of.dim for dim in dims)
            elif len(of.shape) == rank - len(dims):
                at = [dim for dim in range(rank) if dim not in dims][of.dim]
            else:
                at = of.dim
                if at in dims or len(of.shape) < rank:
                    raise Unknown
            found.append(_at(shape, at, of))
        return found

    return rule


def _sliced(of: LayoutQuery) -> Layout:
    """Also along the samples, where nothing is left out."""
    [shape] = of.inputs
    if shape == of.shape:
        return [of.dim]
    return _along("dim")(of)


def _within(
    mixed: Callable[[LayoutQuery], Iterable[int]], count: int = 1
) -> Callable[[LayoutQuery], Layout]:
    """Returns the rule of operations that mix numbers along these dimensions alone.

    ``count`` inputs have the output's samples, in the same dimension.
    """

    def rule(of: LayoutQuery) -> Layout:
        if of.dim in mixed(of):
            raise Unknown
        found = [_at(shape, of.dim, of) for shape in of.inputs[:count]]
        return [*found, *[None] * (len(of.inputs) - count)]

    return rule


def _all_but_first(of: LayoutQuery) -> Iterable[int]:
    return range(1, len(of.shape))


def _last(count: int) -> Callable[[LayoutQuery], Iterable[int]]:
    return lambda of: range(len(of.shape) - count, len(of.shape))


def _normalized(of: LayoutQuery) -> Iterable[int]:
    return _last(len(of.node._saved_normalized_shape))(of)  # type: ignore[attr-defined]


def _padded(of: LayoutQuery) -> Iterable[int]:
    pad, last = of.node._saved_pad, len(of.shape) - 1  # type: ignore[attr-defined]
    return [last - n // 2 for n, width in enumerate(pad) if width]


def _restrided(of: LayoutQuery) -> Layout:
    """What torch's pooling to one place does to a mean, which moves no number."""
    mean, _ = of.node.next_functions[0]
    _, channels, *rest = of.shape
    strides = tuple(of.node._saved_stride)  # type: ignore[attr-defined]
    if (
        of.inputs[0] != of.shape
        or (mean is not None and mean.name() != "MeanBackward1")
        or rest != [1, 1]
        or strides != (channels, 1, channels, channels)
    ):
        raise Unknown
    return [of.dim]


def _repeated(of: LayoutQuery) -> Layout:
    [shape] = of.inputs
    assert shape is not None
    at, rows = of.dim - len(of.shape) + len(shape), of.shape[of.dim]
    own = shape[at] if at >= 0 else 1
    if own * of.num_samples == rows:
        return [None]  # each sample has one copy
    if own != rows:
        raise Unknown
    return [at]


def _batch_normalized(of: LayoutQuery) -> Layout:
    """Each channel, which instance norm makes of samples, has its own statistics."""
    if of.dim == 1:
        return [1, *[None if shape is None else 0 for shape in of.inputs[1:]]]
    if getattr(of.node, "_saved_training", False):
        raise Unknown
    return _within(_all_but_first)(of)


def _product(
    *axes: tuple[int | None, int | None], with_bias: bool = False
) -> Callable[[LayoutQuery], Layout]:
    """Returns the rule of a product; ``axes`` are its factors' by the output's."""

    def rule(of: LayoutQuery) -> Layout:
        first, *_ = of.inputs
        bias = [_one_broadcast(first, of.shape, of.dim)] if with_bias else []
        return [*bias, *axes[of.dim]]

    return rule


def _attended(of: LayoutQuery) -> Layout:
    """Samples, and heads, attend to themselves; a mask is added to the scores."""
    query, key, *_ = of.inputs
    if of.dim > 1 or query is None or key is None:
        raise Unknown
    scores = (*query[:3], key[2])
    masks = [_one_broadcast(shape, scores, of.dim) for shape in of.inputs[3:]]
    return [*[_at(shape, of.dim, of) for shape in of.inputs[:3]], *masks]


def _indexed(of: LayoutQuery) -> Layout:
    """Rows along dimensions that no tensor of indices is for."""
    if not of.may_read:
        raise Unknown
    indices = of.node._saved_indices  # type: ignore[attr-defined]
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    if any(not indices[dim].dtype.is_signed for dim in taken):  # a mask
        raise Unknown
    [shape] = of.inputs
    assert shape is not None
    rank = len(of.shape) - len(shape) + len(taken)  # that of the indices
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    place = taken[0] if adjacent else 0
    if place <= of.dim < place + rank:
        raise Unknown
    rest = [dim for dim in range(len(shape)) if dim not in taken]
    return [_at(shape, rest[of.dim if of.dim < place else of.dim - rank], of)]


def _class_losses(of: LayoutQuery) -> Layout:
    """Of ``(N, C, *)``: the second dimension is that of the classes."""
    return [of.dim + (of.dim > 0), *[None] * (len(of.inputs) - 1)]


def _named(names: str, rule: Callable[[LayoutQuery], Layout]) -> dict:
    """Returns rows of one rule; a name without its ending is that of the first form."""
    every = [n if "Backward" in n else f"{n}Backward0" for n in names.split()]
    return dict.fromkeys(every, rule)


_PLACE_BY_PLACE = """
    Lift LiftFresh Conj NegView Copysign Complex Polar MaskedFill
    Expand Tril Triu Hardswish LogSigmoid NativeDropout FusedDropout PreluKernel
    RreluWithNoise RreluWithNoiseFunctional MseLoss SmoothL1Loss HuberLoss
    SoftMarginLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits
    MaskedFillBackward1 CopyBackwards
"""
_ALONG_A_DIMENSION = """
    Amax Amin Aminmax Max Min Mode Kthvalue Logsumexp LinalgVectorNorm Std StdMean Var
    VarMean Nansum Cumsum Cumprod Logcumsumexp Cummax Cummin Softmax LogSoftmax
    SafeSoftmax Sort Topk Gather IndexSelect IndexAdd IndexCopy IndexFill Scatter
    ScatterAdd Cat Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Glu Select
    Unbind FftC2C FftC2R FftR2C NarrowCopy
    SumBackward1 MeanBackward1 ProdBackward1 MedianBackward1 NanmedianBackward1
    NormBackward1 NormBackward3 SortBackward1 IndexFillBackward1 ScatterBackward1
"""
_ON_LAST_DIMENSIONS = {
    1: """
        ReflectionPad1D ReplicationPad1D UpsampleNearest1D UpsampleNearestExact1D
        UpsampleLinear1D
    """,
    2: """
        AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D MaxPool2D MaxPool2DWithIndices
        MkldnnMaxPool2D FractionalMaxPool2D MaxUnpool2D ReflectionPad2D
        ReplicationPad2D UpsampleNearest2D UpsampleNearestExact2D UpsampleBilinear2D
        UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa
    """,
    3: """
        AvgPool3D AdaptiveAvgPool3D AdaptiveMaxPool3D MaxPool3DWithIndices
        MkldnnMaxPool3D FractionalMaxPool3D MaxUnpool3D ReflectionPad3D
        ReplicationPad3D UpsampleNearest3D UpsampleNearestExact3D UpsampleTrilinear3D
        PixelShuffle PixelUnshuffle
    """,
}
_SAMPLES_FIRST = """
    Convolution ConvolutionOverrideable CudnnConvolution NativeGroupNorm Im2Col Col2Im
    MultiMarginLoss MultilabelMarginLoss
"""
_ATTENTIONS = """
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFusedAttentionOverrideable
"""
# By the name of the node. Other operations that compute each number from those in its
# place are known by torch's tags.
LAYOUTS: dict[str, Callable[[LayoutQuery], Layout]] = {
    **_named(_PLACE_BY_PLACE, _broadcast),
    **dict.fromkeys((*rules.UNCHANGED, "SqueezeBackward2"), _viewed),
    **_named("Permute Transpose T", _permuted),
    **_named(_ALONG_A_DIMENSION, _along("dim")),
    **_named("Stack", _along("dim", leading=1)),
    **_named("Unfold", _along("dimension")),
    **_named("Flip Roll", _along("dims")),
    **_named("Slice", _sliced),
    **_named("Repeat", _repeated),
    **_named("ViewAsReal ViewAsComplex", _within(lambda of: ())),
    "AsStridedBackward1": _restrided,
    **_named("Index", _indexed),
    **_named("Mm", _product((0, None), (None, 1))),
    **_named("Addmm", _product((0, None), (None, 1), with_bias=True)),
    **_named("Bmm", _product((0, 0), (1, None), (None, 2))),
    **_named("Baddbmm", _product((0, 0), (1, None), (None, 2), with_bias=True)),
    **_named("Mv", _product((0, None))),
    **_named("Addmv", _product((0, None), with_bias=True)),
    **_named("Addr", _product((0, None), (None, 0), with_bias=True)),
    **_named("Linear", _within(_last(1))),
    **_named(_SAMPLES_FIRST, _within(_all_but_first)),
    **_named("NativeLayerNorm FusedRmsNorm", _within(_normalized)),
    **_named(
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm NativeBatchNormLegitNoTraining",
        _batch_normalized,
    ),
    **_named("ConstantPadNd", _within(_padded)),
    **{
        name: rule
        for count, names in _ON_LAST_DIMENSIONS.items()
        for name, rule in _named(names, _within(_last(count))).items()
    },
    **_named("GridSampler2D GridSampler3D", _within(_all_but_first, 2)),
    **_named("NllLoss NllLoss2D", _class_losses),
    **_named("CtcLoss", lambda of: [1]),
    **_named(_ATTENTIONS, _attended),
}
