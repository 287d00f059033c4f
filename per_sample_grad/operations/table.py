"""The operations of torch: where samples are, and what a parameter gets, one row each.

A row says where the samples of an operation's inputs are, from where those of its
output are (`layouts`), and what samples contribute to an input that is the same for all
of them (`contributions`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch.autograd.graph import Node

from per_sample_grad.operations import contributions as gets
from per_sample_grad.operations import layouts, nodes
from per_sample_grad.operations.contributions import ContributionRule
from per_sample_grad.operations.layouts import LayoutQuery, LayoutRule, Rows, Unknown

# In the names of functions that XLA's backend has in place of torch's.
_OF_XLA = "::aten_autograd_ops::"
# Operations on the last one, two or three dimensions, which their names count.
_ON_LAST = re.compile(
    r"(\w*Pool|MaxUnpool|ReflectionPad|ReplicationPad|Upsample[A-Za-z]+)([123])D"
    "(WithIndices|Aa)?Backward0"
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is known of an operation.

    Attributes:
        layout: Where its inputs have the samples.
        contribution: What samples contribute to an input; None: unknown.
        reads: Whether ``contribution`` reads what the operation has saved.
    """

    layout: LayoutRule
    contribution: ContributionRule | None = None
    reads: bool = True


def operation_of(node: Node) -> Operation | None:
    """Returns what is known of a node's operation; None: nothing."""
    name = node.name()
    if _OF_XLA in name:
        name = name.partition(_OF_XLA)[2]
        name = name.replace("dAutogradFunction>", "DWithIndicesBackward0")
    if name in OPERATIONS:
        return OPERATIONS[name]
    if on_last := _ON_LAST.fullmatch(name):
        return Operation(layouts.within(layouts.last(int(on_last[2]))))
    return _POINTWISE if nodes.is_pointwise(name) else None


def layout_of(
    node: Node, number: int, rows: Rows, num_samples: int, may_read: bool
) -> list[Rows | None] | None:
    """Returns where the inputs have their samples; None: samples may meet.

    Args:
        node: The operation.
        number: Which of its outputs is asked about.
        rows: Where that has its samples.
        num_samples: B.
        may_read: Whether the tensors that it has saved may be looked at.
    """
    operation = operation_of(node)
    if operation is None:
        return None
    shape, inputs = nodes.output_shape(node, number), nodes.input_shapes(node)
    query = LayoutQuery(node, shape, *rows, inputs, num_samples, may_read)
    try:
        found = operation.layout(query)
    except Unknown:
        return None
    return [Rows(n, rows.before) if isinstance(n, int) else n for n in found]


def _rows(names: str, *known: Any, **options: Any) -> dict[str, Operation]:
    """Returns equal rows; a name without its ending is of the first form."""
    every = [n if "Backward" in n else f"{n}Backward0" for n in names.split()]
    return dict.fromkeys(every, Operation(*known, **options))


_PLACE_BY_PLACE = """
    Lift LiftFresh Conj NegView Complex Polar Tril Triu Hardswish LogSigmoid
    NativeDropout FusedDropout RreluWithNoise RreluWithNoiseFunctional MseLoss
    SmoothL1Loss HuberLoss SoftMarginLoss BinaryCrossEntropy
    BinaryCrossEntropyWithLogits CopyBackwards
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
_ATTENTIONS = """
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFusedAttentionOverrideable
"""
_BATCH_NORMS = "CudnnBatchNorm MiopenBatchNorm NativeBatchNormLegitNoTraining"
# Of other operations that compute each number from those in its place, which torch's
# tags tell, autograd's own formula has a row for each sample.
_POINTWISE = Operation(layouts.broadcast, gets.by_its_node)
_FIRST = layouts.within(layouts.all_but_first)
_NORMALIZED = layouts.within(layouts.normalized)
_MATRICES = (0, None), (None, 1)
_BATCHES = (0, 0), (1, None), (None, 2)

# By the name of the node.
OPERATIONS: dict[str, Operation] = {
    **_rows(_PLACE_BY_PLACE, layouts.broadcast),
    **_rows(" ".join((*nodes.UNCHANGED, "SqueezeBackward2")), layouts.viewed),
    **_rows("Permute Transpose T", layouts.permuted),
    **_rows(_ALONG_A_DIMENSION, layouts.along("dim")),
    **_rows("Stack", layouts.along("dim", leading=1)),
    **_rows("Unfold", layouts.along("dimension")),
    **_rows("Flip Roll", layouts.along("dims")),
    **_rows("Slice", layouts.sliced),
    **_rows("ViewAsReal ViewAsComplex", layouts.within(lambda of: ())),
    **_rows("AsStridedBackward1", layouts.restrided),
    **_rows("Index", layouts.indexed),
    **_rows("ConvolutionOverrideable CudnnConvolution Im2Col Col2Im", _FIRST),
    **_rows("MultiMarginLoss MultilabelMarginLoss", _FIRST),
    **_rows("FusedRmsNorm", _NORMALIZED),
    **_rows(_BATCH_NORMS, layouts.batch_normalized),
    **_rows("ConstantPadNd", layouts.within(layouts.padded)),
    **_rows("PixelShuffle PixelUnshuffle", layouts.within(layouts.last(3))),
    **_rows("GridSampler2D GridSampler3D", layouts.within(layouts.all_but_first, 2)),
    **_rows("NllLoss NllLoss2D", layouts.class_losses),
    **_rows("CtcLoss", lambda of: [1]),
    **_rows(_ATTENTIONS, layouts.attended),
    **_rows("Add Sub Expand", layouts.broadcast, gets.added, reads=False),
    **_rows("Repeat", layouts.repeated, gets.repeated, reads=False),
    **_rows("Mul", layouts.broadcast, gets.multiplied),
    **_rows("Embedding", layouts.looked_up, gets.looked_up),
    **_rows("Mm", layouts.product(*_MATRICES), gets.product),
    **_rows("Addmm", layouts.product(*_MATRICES, with_bias=True), gets.product),
    **_rows("Bmm", layouts.product(*_BATCHES), gets.product),
    **_rows("Baddbmm", layouts.product(*_BATCHES, with_bias=True)),
    **_rows("Mv", layouts.product((0, None)), gets.product),
    **_rows("Addmv", layouts.product((0, None), with_bias=True)),
    **_rows("Addr", layouts.product((0, None), (None, 0), with_bias=True)),
    # TorchTPU's; of any dimensions but the last.
    **_rows("Linear", layouts.within(layouts.last(1)), gets.product),
    **_rows("Convolution", _FIRST, gets.convolved),
    **_rows("NativeLayerNorm", _NORMALIZED, gets.normalizing(gets.of_layer)),
    **_rows("NativeGroupNorm", _FIRST, gets.normalizing(gets.of_groups)),
    **_rows(
        "NativeBatchNorm",
        layouts.batch_normalized,
        gets.normalizing(gets.of_running_statistics),
    ),
}
