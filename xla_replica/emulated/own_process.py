"""What each emulated replica would have of its own if it were a process.

Scripts written for torch_xla run in one process per device. So each replica here has a
CPU generator that draws what that process would draw, a default group of
torch.distributed, its own copy of a model that `MpModelWrapper` moves, and the threads
that it starts compute on its device. Python's and NumPy's generators, the environment,
the globals of modules and the precision of matrix products are shared all the same.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.data

from xla_replica.device.seeding import draw_from, in_turn, own_draws
from xla_replica.emulated.compiling import functions, replace

# What draws from the CPU generator, if its tensors are there.
_DRAWING = """
    rand randn randint randperm normal bernoulli multinomial poisson binomial rand_like
    randn_like randint_like dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_dropout feature_alpha_dropout rrelu gumbel_softmax lstm gru rnn_tanh
    rnn_relu scaled_dot_product_attention multi_head_attention_forward
    fractional_max_pool2d fractional_max_pool3d bernoulli_ cauchy_ exponential_
    geometric_ log_normal_ normal_ random_ uniform_ kaiming_uniform_
"""
DRAWS = functions(_DRAWING, torch, torch.Tensor, torch.nn.functional, torch.nn.init)
_OF_THE_GENERATOR = "manual_seed seed initial_seed get_rng_state set_rng_state"


class _Here(threading.local):
    """How a thread joins the replica that the calling thread belongs to, if any.

    What ``join`` returns surrounds the thread.
    """

    join: Callable[[], AbstractContextManager[Any]] | None = None


_here = _Here()


def install() -> None:
    """Replaces what belongs to a process by what belongs to a replica."""
    from torch_xla.distributed import xla_multiprocessing

    for name in _OF_THE_GENERATOR.split():
        function = in_turn(getattr(torch.random, name))
        setattr(torch.random, name, function)
        setattr(torch, name, function)
    # An epoch of any DataLoader begins with a draw.
    loading: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    loading.__init__ = in_turn(loading.__init__)
    replace(threading.Thread, "start", _start_as_member)
    replace(xla_multiprocessing.MpModelWrapper, "to", _move_copy)
    _install_groups()


def begin_replica(
    device: str, surround: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Makes the calling thread a replica's first; ``surround`` is for others of it."""
    import torch_xla

    with own_draws():  # nobody else's state is in place now
        draws = torch.default_generator.clone_state()
    world: Any = torch.distributed.distributed_c10d._world
    groups = world._get_world()

    def join() -> AbstractContextManager[Any]:
        torch_xla._XLAC._xla_set_default_device(device)
        world._world.world = groups
        draw_from(draws)
        _here.join = join
        return surround()

    join()


def _start_as_member(start: Callable[..., None], thread: threading.Thread) -> None:
    """Starts a thread, which belongs to the replica that starts it.

    torch_xla's loader and its asynchronous closures run in threads.
    """
    run, join = thread.run, _here.join
    if join is not None:

        def run_as_member() -> None:
            with join():
                run()

        thread.run = run_as_member  # type: ignore[method-assign]
    start(thread)


# --- torch.distributed --------------------------------------------------------------


def _install_groups() -> None:
    """Gives every replica its own groups of torch.distributed."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld
    from torch_xla._internal import rendezvous
    from torch_xla.distributed import xla_backend

    torch.distributed.distributed_c10d._world = ThreadLocalWorld()
    # Groups are also found by their names, which are the same on every replica.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    # torch_xla's has a fixed port, which a second run on this machine cannot have.
    rendezvous._store = torch.distributed.HashStore()
    # DistributedDataParallel reads shapes and the order of its buckets in native code,
    # where no read is seen.
    replace(xla_backend.ProcessGroupXla, "allgather broadcast", _call_and_sync)


def _call_and_sync(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns a collective's result once it has been computed."""
    import torch_xla

    result = collective(*args, **kwargs)
    torch_xla.sync()
    return result


def _move_copy(to: Callable[..., Any], wrapper: Any, device: Any) -> Any:
    """Moves a copy of a wrapper's model, one for each replica."""
    with wrapper._lock:
        return copy.deepcopy(wrapper._model).to(device)
