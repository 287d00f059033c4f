"""torch.compile on emulated replicas, which are threads.

torch compiles one function at a time, but notes what it does in variables of the whole
process: while one replica traces, another one that calls a compiled function is told
that it traces it, a backward graph that is compiled in autograd's thread finds the
notes of another, and what the CPU generator has drawn meanwhile is taken back. So one
replica traces at a time, and the others wait at the next compiled function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from xla_replica.device.seeding import in_turn


def functions(names: str, *owners: Any) -> set[Callable[..., Any]]:
    """Returns those of the names, with spaces between them, that the owners have."""
    found = [(owner, name) for owner in owners for name in names.split()]
    return {getattr(*each) for each in found if hasattr(*each)}


def replace(
    owner: Any, names: str, function: Callable[..., Any], is_traced: bool = True
) -> None:
    """Has ``function`` called in place of others; its first argument is the other one.

    What is not traced is called by compiled functions, and ends the graph before it, as
    a print does.
    """
    reason = "emulated replicas meet in Python before they run a collective"
    for name in names.split():
        replaced = getattr(owner, name)

        @functools.wraps(replaced)
        def call(*args: Any, replaced: Any = replaced, **kwargs: Any) -> Any:
            return function(replaced, *args, **kwargs)

        if not is_traced:
            call = torch.compiler.disable(call, reason=reason)
        setattr(owner, name, call)


def install(
    num_replicas: int, sync: Callable[[], Any], alone: AbstractContextManager[Any]
) -> None:
    """Makes torch.compile work in threads.

    Args:
        sync: Cuts the calling replica's graph.
        alone: Surrounds what no peer may fetch meanwhile.
    """
    import torch._functorch.aot_autograd as aot
    import torch_xla.core.dynamo_bridge as bridge
    from torch._dynamo import config, convert_frame

    # All replicas share a function's compiled variants, of which each has its own.
    config.recompile_limit *= num_replicas
    config.accumulated_recompile_limit *= num_replicas

    lock = convert_frame.compile_lock
    # Compiling restores the state of the CPU generator afterwards.
    wrapper = convert_frame.CatchErrorsWrapper
    wrapper.__call__ = in_turn(wrapper.__call__)
    # The backward graph too is then made under the lock, and not in autograd's thread.
    aot.prepare_aot_module_simplified = functools.partial(
        aot.prepare_aot_module_simplified, force_non_lazy_backward_lowering=True
    )

    def is_tracing_once_others_are_done(is_tracing: Callable[[], bool]) -> bool:
        with lock:
            return is_tracing()

    # Every compiled function asks this before it runs.
    symbolic = torch.fx._symbolic_trace
    replace(symbolic, "is_fx_symbolic_tracing", is_tracing_once_others_are_done)

    def extract_alone(extract: Callable[..., Any], *args: Any) -> Any:
        sync()  # what is pending may be a collective, and must not wait for peers below
        # It tells what torch.compile cannot compile by counting fallbacks of the whole
        # process, and a fetch is one.
        with lock, alone:
            return extract(*args)

    # The graph that torch has made becomes XLA's when it first runs.
    replace(bridge, "extract_compiled_graph", extract_alone)
