"""Live jobs whose members must end with the bits of one that is left alone."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.xla_replica.live_job import LiveJob, live_job

LONGEST = 9  # epochs, of runs of the plain kind
_expected: dict[tuple[str, ...], dict[str, str]] = {}


def undisturbed(arguments: tuple[str, ...], folder: Path, **variables: str) -> dict:
    """Returns by update what one process without any others has made of the weights.

    One run serves all tests of the plain kind, which end after some update of it.
    """
    at = arguments.index("--epochs")  # of `words`
    kind = arguments[:at] + arguments[at + 4 :]
    if kind not in _expected or variables:
        epochs = arguments[at + 1] if kind else LONGEST
        alone = *kind, *words(int(epochs), 0), "--hashes"
        job = LiveJob(folder, alone, variables)
        job.start()
        [result] = job.wait(job.results)
        _expected[kind] = result["hashes"]
        job.stop()
    return _expected[kind]


def more_updates(job: LiveJob) -> Callable[[], bool]:
    """Returns a function that says whether four updates were made since now."""
    number = job.num_updates() + 4
    return lambda: job.num_updates() >= number


def are_together(job: LiveJob) -> bool:
    """Returns whether all that run have told last of one generation, of them all."""
    files = [job.folder / f"{each.pid}.txt" for each in job.running]
    texts = [file.read_text() for file in files if file.exists()]
    told = [re.findall(r" generation (\d+): (\d+) ", text)[-1:] for text in texts]
    is_same = told == told[:1] * len(job.running)
    # Of slices, it is the number of their replicas.
    return is_same and all(own and int(own[0][1]) >= len(told) for own in told)


def end_soon(job: LiveJob) -> None:
    """Has members end some updates from now: what would follow shows nothing new."""
    job.tell("end", job.num_updates() + 8)


def check(job: LiveJob, expected: dict[str, str]) -> None:
    results = job.results()
    assert results, job.log()
    number = results[0]["num_updates"]
    right = {"hash": expected[str(number)], "num_updates": number}
    assert results == [right] * len(results), job.log()
    assert job.check_samples() == number


def values(job: LiveJob) -> list[torch.Tensor]:
    """Returns what members end with, of the same bits on all of them."""
    first, *others = job.results()
    assert others == [first] * len(others), job.log()
    assert job.check_samples() == first["num_updates"]
    return torch.load(next(job.folder.glob("*.values")))


def check_floats(job: LiveJob, arguments: tuple[str, ...]) -> None:
    """Asserts that a job has ended as a member that is alone, up to rounding."""
    with live_job(job.folder.with_name("alone"), *arguments) as alone:
        alone.tell("end", job.results()[0]["num_updates"])
        alone.start()
        alone.wait(lambda: not alone.running)
        for own, other in zip(values(job), values(alone)):
            torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)


def words(epochs: int = LONGEST, seconds: float = 0.03) -> tuple[str, ...]:
    """Returns arguments, of more epochs than who ends soon needs: some start late."""
    return "--epochs", str(epochs), "--minibatch-seconds", str(seconds)


def ends(job: LiveJob, soon: bool = True) -> list[int]:
    """Returns the statuses of all, which end soon after they have met, or later."""
    if soon:
        job.wait(lambda: are_together(job))
        end_soon(job)
    job.wait(lambda: not job.running)
    return [each.exitcode for each in job.ended]


@contextlib.contextmanager
def live(folder: Path, *arguments: str, more: tuple[str, ...] = (), **options):
    """Gives a job, whose members must end with the bits of one that is left alone.

    ``more`` arguments and ``options`` are for the job, and change no bit.
    """
    expected = undisturbed(arguments, folder / "alone")
    with live_job(folder / "live", *arguments, *more, **options) as job:
        yield job
        job.wait(lambda: not job.running)
        check(job, expected)


def started(job: LiveJob, number: int, fate: Any = None) -> list[Any]:
    members = [job.start(fate) for _ in range(number)]
    job.wait(lambda: job.num_ready() == number)
    return members
