"""Counting what a device would run: operations that compute, not views."""

from collections import Counter

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kernels(TorchDispatchMode):
    """Counts operations by name, and the numbers that they write.

    A ``_foreach`` operation counts once: on a GPU it is a few kernels for hundreds of
    tensors. What the optimizer itself runs does not count, if there is one.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._pauses: list[None] = []
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._pauses.append(None))
            optimizer.register_step_post_hook(lambda *_: self._pauses.clear())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        namespace, name = func.overloadpacket._qualified_op_name.split("::")
        if not (func.is_view or self._pauses or namespace == "profiler"):
            self.calls[name] += 1
            outputs = tree_leaves(args[0] if result is None else result)
            sizes = [t.numel() for t in outputs if isinstance(t, torch.Tensor)]
            self.written[name] += sum(sizes)
        return result

    def clear(self) -> None:
        self.calls.clear()
        self.written.clear()
