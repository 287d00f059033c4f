"""Backends of torch.compile that count the graphs that they compile."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

HAS_CXX = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
needs_cxx = pytest.mark.skipif(not HAS_CXX, reason="inductor needs a C++ compiler")


class GraphCounter:
    """A backend of torch.compile: one of `BACKENDS`, of which it counts the graphs.

    A function that is differentiated has two.
    """

    def __init__(self, name: str) -> None:
        self.num_graphs = 0
        self._compile = BACKENDS[name]

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # The graphs of an earlier process would come from a cache, and uncounted.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return self._compile(self._counted, module, inputs)

    def _counted(self, compile_one: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            self.num_graphs += 1
            return compile_one(*args, **kwargs)

        return count


def _aot_eager(counted: Any, module: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(fw_compiler=counted(boxed_nop))(module, inputs)


def _inductor(counted: Any, module: Any, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx(module, inputs, inner_compile=counted(compile_fx_inner))


def _openxla(counted: Any, module: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.torchxla import openxla_eval_boxed

    return aot_autograd(fw_compiler=counted(openxla_eval_boxed))(module, inputs)


BACKENDS = {"aot_eager": _aot_eager, "inductor": _inductor, "openxla": _openxla}
