"""Asking replicas to stop: by a signal, or by the program itself.

Python installs and runs signal handlers only in a process's main thread, while emulated
replicas and those on a TPU are other threads of a child process. So the main thread of
such a process installs the handlers (`listening`), which act as if they were
not installed until a replica arms them (`catch_signals`). The launching process passes
armed signals on to its replicas (`forwarding`); it learns which are armed, and in which
process, from files in the folder that it shares with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xla_replica.common.arguments import check_integer, check_type
from xla_replica.loader_workers import spare_workers

logger = logging.getLogger(__name__)

# Some schedulers send others before a job's time is up.
_PASSED_ON = "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"
SIGNALS = tuple(n for n in signal.Signals if n.name in _PASSED_ON)  # Windows lacks some
# Ctrl-C reaches parent and child, and the parent passes it on: signals within this time
# are copies of one.
DUPLICATE_SECONDS = 1.0

_Installed = dict[int, tuple[Any, Any]]  # each handler, and the one it replaced


class StopRequest(NamedTuple):
    """Why this process was asked to stop.

    Attributes:
        reason: Why, for people.
        exit_status: The status to exit with: 128 + n for signal n.
    """

    reason: str
    exit_status: int


class _FirstSignal:
    """Distinguishes the first signal and its copies from a later one that insists."""

    at: float | None = None

    def insists(self) -> bool:
        """Notes a signal; returns whether it came later than copies of the first do."""
        now = time.monotonic()
        self.at = now if self.at is None else self.at
        if insists := now - self.at >= DUPLICATE_SECONDS:  # nobody asks where
            sys.excepthook = _without_traceback
        return insists


def _without_traceback(kind: type[BaseException], *rest: Any) -> None:
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *rest)


class _Process:
    """What this process listens for, and the request it has received."""

    def __init__(self) -> None:
        self.has_run = False  # which is in progress
        self.request: StopRequest | None = None
        self.first = _FirstSignal()
        self.installed: _Installed = {}
        self.armed: frozenset[int] = frozenset()
        self.folder: str | None = None  # that of `forwarding`, in a child


_process = _Process()


def stop_requested() -> StopRequest | None:
    """Returns the first request to this process since its replicas started, or None.

    Replicas in other processes may not know of it yet, so agree with them, by a sum,
    before you stop. It costs no more than reading a variable.
    """
    return _process.request


def request_stop(reason: str, exit_status: int = 143) -> None:
    """Asks the replicas in this process to stop; only the first request counts.

    For events other than signals, such as maintenance that a thread polls for.

    Args:
        reason: Why, for people: the log and `Stopped` have it.
        exit_status: The script's, from 0 to 255; 143 is that of SIGTERM.

    Raises:
        TypeError, ValueError: ``reason`` is not a string, or ``exit_status`` is not an
            integer from 0 to 255.
    """
    check_stop(reason, exit_status)
    if _process.request is None:
        _process.request = StopRequest(reason, exit_status)


def catch_signals(signals: Sequence[int | str] = ("SIGTERM", "SIGINT")) -> None:
    """Makes these signals ask this process to stop, instead of ending it.

    Call it on every replica, in the function that `launch` runs; it then holds until
    launch returns, elsewhere until the process ends. A second signal, a second or more
    after the first, acts as if it were not caught.

    Args:
        signals: Numbers or names. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are
            passed on by the launching process. Others must be sent to the replicas'
            processes, and cannot be caught where replicas are threads of a process,
            as emulated ones are.

    Raises:
        ValueError: A signal does not exist or cannot be caught; or nothing listens for
            it, and this is not the main thread, which alone could begin to.
    """
    numbers = frozenset(map(_number, signals))
    unheard = numbers - _process.installed.keys()
    if not _is_main_thread():  # nohup's promise: a signal that it ignores stays so
        unheard -= {n for n in unheard if signal.getsignal(n) == signal.SIG_IGN}
    _process.installed |= _install(unheard, _on_signal)
    _process.armed |= numbers  # replicas that are threads arm the same ones
    spare_workers(_process.armed)
    if _process.folder is not None:
        for number in numbers:
            Path(_process.folder, f"{os.getpid()}.{number}.armed").touch()


@contextlib.contextmanager
def listening(folder: str | None = None) -> Iterator[None]:
    """Surrounds a run of replicas in this process.

    Nothing is installed before `catch_signals`: Python runs a handler only when native
    code returns, and a process that waits there for its peers to join must end at once
    as long as there is nothing to save. Requests and armed signals end with the
    outermost run.

    Args:
        folder: That of the parent's `forwarding`, in a process that exists only for its
            replicas. They may be other threads, so handlers are installed now; and they
            stay, since a late copy of a signal must not end a process that is about to
            exit, because that would be a failure.
    """
    if _process.has_run:
        yield
        return
    armed, installed = _process.armed, dict(_process.installed)
    _process.has_run, _process.folder = True, folder
    if folder is not None:
        _process.installed |= _install(_to_be_heard(), _on_signal)
    try:
        yield
    finally:
        _process.has_run, _process.folder = False, None
        if folder is None:
            _return_to(armed, installed)
        else:
            for number in _process.armed:
                # Python restores handlers while it ends, but not this one.
                signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def forwarding(folder: str) -> Iterator[None]:
    """Passes signals of this process on to the replicas that have armed them.

    A signal that no replica has armed acts as it did before, and so does one that
    insists. A signal to a process group reaches the replicas too, and may arrive here
    when they have obeyed it and ended: what they have armed is caught until then.
    """
    first = _FirstSignal()

    def forward(number: int) -> bool:
        armed = list(Path(folder).glob(f"*.{number}.armed"))
        if not armed:
            said = f"received {signal.Signals(number).name}"
            logger.warning(f"{said}: there is nothing to save, all replicas end")
            return False
        if first.insists():
            return False
        for path in armed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.split(".")[0]), number)
        return True

    installed = _install(_to_be_heard(), forward) if _is_main_thread() else {}
    try:
        yield
    finally:
        _restore(installed)


def end_run() -> None:
    """Forgets the request to a run that has ended, and no longer catches its signals.

    Only where no `launch` surrounds it, as in a notebook, where another run may follow.
    """
    if not _process.has_run:
        _return_to(frozenset(), {} if _is_main_thread() else _process.installed)


def check_stop(reason: Any, exit_status: Any) -> None:
    """Raises TypeError or ValueError unless these can end a run."""
    check_type("reason", reason, str, "a string")
    check_integer("exit_status", exit_status, 0, 255)


def _on_signal(number: int) -> bool:
    """Notes a request if the signal is armed; returns whether it was caught."""
    if number not in _process.armed or _process.first.insists():
        return False
    request_stop(f"received {signal.Signals(number).name}", 128 + number)
    return True


def _to_be_heard() -> list[int]:
    """Returns what to listen for before anybody has asked for it.

    Not what nohup ignores, which an exec inherits, nor what has a handler written in C,
    such as faulthandler's, of which Python does not know.
    """
    caught = 0
    with contextlib.suppress(OSError):  # only Linux says what has a handler
        status = Path("/proc/self/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
    heard = []
    for number in SIGNALS:
        handler = signal.getsignal(number)
        in_c = caught >> (number - 1) & 1 and not callable(handler)
        usual = number in (signal.SIGTERM, signal.SIGINT)
        if usual or not (in_c or handler == signal.SIG_IGN):
            heard.append(int(number))
    return heard


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _install(numbers: Iterable[int], caught: Callable[[int], bool]) -> _Installed:
    """Installs handlers, as the main thread alone can; returns them and those before.

    A handler written in C (Python sees None) could not be restored, and is left.
    """
    installed: _Installed = {}
    for number in numbers:
        before = signal.getsignal(number)
        if before is not None:
            handler = _handler(before, caught)
            installed[number] = handler, before
            signal.signal(number, handler)
    return installed


def _restore(installed: _Installed) -> None:
    """Puts back the handlers that `_install` has replaced."""
    for number, (handler, before) in installed.items():
        if signal.getsignal(number) is handler:  # else the user has installed another
            signal.signal(number, before)


def _return_to(armed: frozenset[int], installed: _Installed) -> None:
    """Ends what has been asked and caught since this was caught."""
    _restore(dict(_process.installed.items() - installed.items()))
    _process.installed, _process.armed = installed, armed
    spare_workers(armed)
    _process.request, _process.first = None, _FirstSignal()


def _handler(before: Any, caught: Callable[[int], bool]) -> Callable[[int, Any], None]:
    """Returns a handler that acts as ``before`` did where ``caught`` returns False."""

    def handler(number: int, frame: Any) -> None:
        if caught(number):
            return
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, handler)  # the default did not end the process

    return handler


def _number(name: int | str) -> int:
    """Returns the number of a signal that can be caught; raises ValueError if none."""
    for known, number in signal.Signals.__members__.items():
        if name in (known, number) and known not in ("SIGKILL", "SIGSTOP"):
            return int(number)
    raise ValueError(
        f"catch_signals: {name!r} is not a signal that can be caught here; allowed is "
        "a sequence of names such as 'SIGTERM' and of their numbers"
    )
