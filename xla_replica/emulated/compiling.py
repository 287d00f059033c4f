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


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` such that compiled functions call it, and do not trace it.

    It ends the graph before it, as a print does.
    """
    reason = "emulated replicas meet in Python before they run a collective"
    return torch.compiler.disable(function, reason=reason)


def install(num_replicas: int, sync: Callable[[], Any]) -> AbstractContextManager[Any]:
    """Makes torch.compile work in threads; returns the lock that whoever compiles has.

    ``sync`` cuts the calling replica's graph.
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

    # Every compiled function asks this before it runs.
    is_tracing = torch.fx._symbolic_trace.is_fx_symbolic_tracing

    @functools.wraps(is_tracing)
    def is_tracing_once_others_are_done() -> bool:
        with lock:
            return is_tracing()

    torch.fx._symbolic_trace.is_fx_symbolic_tracing = is_tracing_once_others_are_done

    # The graph that torch has made becomes XLA's when it first runs.
    extract = bridge.extract_compiled_graph

    @functools.wraps(extract)
    def extract_alone(*args: Any) -> Any:
        sync()  # what is pending may be a collective, and must not wait for peers below
        with lock:
            return extract(*args)

    bridge.extract_compiled_graph = extract_alone

    # What falls back to the host is run by itself. It is found by counting fallbacks of
    # the whole process, of which a peer may have caused one.
    collector = bridge.UnsupportedNodesCollector
    run = collector.run

    @functools.wraps(run)
    def run_until_confirmed(self: Any, *args: Any) -> Any:
        result, found = run(self, *args), self._unsupported_nodes
        while found:
            self._unsupported_nodes = []
            result = run(self, *args)
            again = [node for node in found if node in self._unsupported_nodes]
            if len(again) == len(found):
                break
            found = again
        self._unsupported_nodes = found
        return result

    collector.run = run_until_confirmed
    return lock
