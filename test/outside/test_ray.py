"""Ray Train runs its example, and a node is lost with its worker."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.documents import ROOT
from support.outside import package
from support.scripts import environment
from support.xla_replica.stopping import processes
from support.xla_replica.torchrun import free_port, wait_for_server

import variable_batch_size as vbs
import xla_replica
from examples.launch import ray_train

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]

PATIENCE = 240.0
TPU = "--device tpu --topology 2x4 --accelerator-type TPU-V5LITEPOD"
# A missing node is noticed within seconds, and nobody is ended to free memory.
SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "8",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
}
START = ("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")


class Processes:
    """A command and all that it starts, which end together: they share a session."""

    def __init__(self, output: Path, *words: object, **variables: str) -> None:
        self.output = output
        # Linux asks it to end when pytest does, however it ends.
        ends = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        with output.open("wb") as file:
            self.first = subprocess.Popen(
                [sys.executable, *map(str, words)], stdout=file,
                env=environment() | SETTINGS | variables, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=ends,
            )  # fmt: skip

    def running(self) -> list[int]:
        """Returns their numbers, and those of Ray's workers, outside its group."""
        session = str(self.first.pid)
        return [pid for pid, stat in processes().items() if stat[3] == session]

    def said(self) -> str:
        """Returns the last lines, without those on what Ray asks of a dashboard."""
        lines = self.output.read_text().splitlines()
        return "\n".join([each for each in lines if "Cleaner" not in each][-60:])

    def kill(self) -> None:
        while found := self.running():
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.first.wait()


@pytest.fixture
def started(tmp_path) -> Iterator[Callable[..., Processes]]:
    """Starts commands in sessions of their own, of which nothing is left at the end."""
    all_of_them: list[Processes] = []

    def start(*words: object, **variables: str) -> Processes:
        output = tmp_path / f"output-{len(all_of_them)}"
        all_of_them.append(Processes(output, *words, **variables))
        return all_of_them[-1]

    yield start
    for each in reversed(all_of_them):
        each.kill()


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder for sockets, whose names have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        yield name


def starts(folder: Path) -> list[tuple[int, int]]:
    """Returns the next update and the number of replicas of every start of a run."""
    if not (folder / "run.jsonl").exists():
        return []
    events = vbs.read_run(folder / "run.jsonl").events
    begun = [event for event in events if "num_replicas" in event]
    return [(event["step"], event["num_replicas"]) for event in begun]


@pytest.mark.usefixtures("one_thread")
def test_without_a_node_the_run_ends_as_undisturbed(short_folder, started, tmp_path):
    package("ray.train")
    port, folder = free_port(), tmp_path / "run"
    head = ["--head", "--port", port, "--num-cpus", 1, "--temp-dir", short_folder]
    started(*START, *head, "--include-dashboard", "false")
    wait_for_server(port)
    address = f"127.0.0.1:{port}"
    node = started(*START, "--address", address, "--num-cpus", 1)  # one worker's
    words = ["--checkpoint", folder, "--device", "cpu", "--epochs", 20]
    words += ["--num-workers", 1, 2, "--look-every", 1]
    script = started(ROOT / "examples/launch/ray_train.py", *words, RAY_ADDRESS=address)

    def two_have_saved() -> bool:
        begun = starts(folder)[-1:]
        saved = [int(path.name.split("-")[1]) for path in folder.glob("update-*.pt")]
        return any(most == 2 and max(saved, default=0) > step for step, most in begun)

    deadline = time.monotonic() + PATIENCE
    while not two_have_saved():
        is_late = time.monotonic() > deadline or script.first.poll() is not None
        assert not is_late, script.said()
        time.sleep(0.05)
    before, _ = starts(folder)[-1]
    assert len(node.running()) > 1
    node.kill()
    assert script.first.wait(PATIENCE) == 0, script.said()
    resumed, num_workers = starts(folder)[-1]
    assert num_workers == 1
    assert before < resumed
    undisturbed = tmp_path / "undisturbed"
    args = ray_train.parse(["--checkpoint", str(undisturbed), "--epochs", "20"])
    xla_replica.launch(ray_train.train, (args,), num_replicas=1, device="cpu")
    newest = [next(each.glob("update-00000600-*.pt")) for each in (folder, undisturbed)]
    found, expected = (torch.load(file)["parts"]["model"] for file in newest)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("words", "expected"), [
    ("--num-workers 1 8", {"use_gpu": True, "elasticity_enabled": True}),
    ("--num-workers 2 2 --device cpu", {"num_workers": 2, "use_tpu": False}),
    (f"--num-workers 8 16 {TPU}", {"num_tpus_per_worker": 1, "max_workers": 16}),
    # It checks the shape of the slice, which workers have to fill.
    (f"--num-workers 8 12 {TPU}", "must be a multiple of 8"),
])  # fmt: skip
def test_ray_knows_what_the_options_say(words, expected):
    options = ray_train.scaling(ray_train.parse(words.split()))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            package("ray.train").ScalingConfig(**options)
        return
    config = package("ray.train").ScalingConfig(**options)
    assert {name: getattr(config, name) for name in expected} == expected
