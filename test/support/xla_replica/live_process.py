"""What a process of a live job does. It is imported before torch."""

import importlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from support.xla_replica import torchtpu


def be_member(environment: dict[str, str], arguments: list[str], fate: Any) -> None:
    """Trains as `member.main`, in a folder, with the fate that is a `Fate`, or None."""
    os.environ.update(environment)
    if torchtpu.is_installed():
        torchtpu.load()
    number = int(environment.get("MEMBER_REPLICAS", "1"))
    if number == 1 and "PJRT_DEVICE" in environment:
        importlib.import_module("torch_xla")
    import xla_replica
    from xla_replica.starting import child_process

    log = open(Path(arguments[0]) / f"{os.getpid()}.txt", "w")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # as its parent has it
    # Else a loader's worker would be forked from another server, which imports torch.
    multiprocessing.set_start_method("fork", force=True)
    os.environ["MEMBER_NAME"] = str(os.getpid())
    if number == 1:
        _train(0, arguments, fate)
    else:
        device = environment["MEMBER_DEVICE"]
        # Forked from here: a server of its own would import torch again.
        child_process._context = lambda _: multiprocessing.get_context("fork")
        xla_replica.launch(_train, (arguments, fate), number, device)


def _train(rank: int, arguments: list[str], fate: Any) -> None:
    from support.variable_batch_size import member

    if fate is not None and rank == 0:
        fate.arm(Path(arguments[0]))
    member.main(arguments)
