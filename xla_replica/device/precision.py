"""float32 products with all their digits, on devices that would round first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_matmul_precision(device: torch.device) -> Iterator[None]:
    """float32 matrix products made inside are not rounded to fewer bits first.

    On a GPU: no TF32, whatever was chosen; afterwards it is as before. On XLA a program
    is compiled when it runs, with the precision that the process has then, and a TPU's
    own is that of bfloat16. There the first use therefore sets the process to
    ``"highest"``, for good, unless the program chose one itself before: call
    ``torch_xla.backends.set_mat_mul_precision("high")`` first if this is too slow.
    Setting it compiles nothing; programs that were compiled keep theirs.

    Args:
        device: Where the products are made. Nothing happens on a CPU.
    """
    if device.type == "xla":
        import torch_xla.backends

        if torch_xla.backends.get_mat_mul_precision() == "default":
            torch_xla.backends.set_mat_mul_precision("highest")
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
