"""Matrix products of torch_xla whose precision is written in the program.

torch_xla reads one precision, the process's, when it lowers a program, so a block of
code cannot ask for another one by setting it. A product is therefore lowered by itself,
in full precision, and what is recorded is a call of that computation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_replica.common.trees import Tensors

_NAMES = ("matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "linear")
_PRODUCTS = {
    getattr(owner, name): getattr(owner, name)
    for owner in (torch, torch.Tensor, torch.nn.functional)
    for name in _NAMES
    if hasattr(owner, name)
} | {torch.Tensor.addmm_: torch.Tensor.addmm}


class HighestProducts(TorchFunctionMode):
    """Surrounds a block in which products of float32 keep all their digits."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if kwargs or func not in _PRODUCTS or not all(map(_is_float32, args)):
            return func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(each.requires_grad for each in args):
            raise RuntimeError(
                "a product in full precision has no gradient on torch_xla: compute it "
                "under torch.no_grad(), or outside of full_matmul_precision"
            )
        found = _recorded(_PRODUCTS[func], args)
        return args[0].copy_(found) if func is torch.Tensor.addmm_ else found


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


_lock = threading.Lock()
# By product and shapes: a computation, and the sequence of its arguments.
_computations: dict[Any, tuple[Any, list[int]]] = {}


def _recorded(product: Callable[..., torch.Tensor], tensors: Tensors) -> torch.Tensor:
    """Records a call of the product's own computation."""
    import torch_xla

    key = product, *(tuple(each.shape) for each in tensors)
    with _lock:
        if key not in _computations:
            _computations[key] = _lowered(product, tensors)
    computation, sequence = _computations[key]
    [found] = torch_xla._XLAC._xla_user_computation(
        "xla::highest_product", [tensors[index] for index in sequence], computation
    )
    return found


def _lowered(
    product: Callable[..., torch.Tensor], tensors: Tensors
) -> tuple[Any, list[int]]:
    """Returns the computation, and which tensor each of its arguments is."""
    import torch_xla
    from torch_xla.core import xla_builder

    native, name = torch_xla._XLAC, "highest_product"
    make = xla_builder.create_placeholder_tensor
    stand_ins = [make(each.shape, each.dtype) for each in tensors]
    lowering = native.lowering.LoweringContext(name)
    before = native._xla_get_mat_mul_precision()
    native._xla_set_mat_mul_precision("highest")
    try:
        with torch._C.DisableTorchFunction():  # such a block may be within another one
            lowering.build([product(*stand_ins)])
    finally:
        native._xla_set_mat_mul_precision(before)
    places = [lowering.tensor_parameter_id(each) for each in stand_ins]
    computation = xla_builder.computation_from_module_proto(name, lowering.hlo())
    return computation, sorted(range(len(places)), key=places.__getitem__)
