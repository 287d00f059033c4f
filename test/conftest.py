"""Fixtures that several test modules ask for."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

# Tests are of replicas on the CPU, wherever they run; `make gpu` runs those of GPUs.
if "GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
else:  # without it products of CUDA are not the same twice
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Hundreds of processes import torch: from its sources they take three times as long.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Beside as many processes, threads of torch's only wait for each other: a default run
# would take half as long again. It must be set before torch is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiling takes most of the time on XLA, and most of that is spent on making faster
# programs, of which tests run each a few times. Without any of LLVM's optimisations
# (level 0) products are rounded in another way in each program, so that a resumed run
# ends with other bits. The newer emitters of fusions take a fifth longer than the older
# ones, which TorchTPU does not have, and a program in several parts, each compiled by a
# thread, a third longer than in one. What a user has set counts more.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_backend_optimization_level=1",
    *(find_spec("torch_xla") is not None) * [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ],
    os.environ.get("XLA_FLAGS", ""),
])  # fmt: skip

import hypothesis
import pytest
from support.xla_replica import torchtpu

if torchtpu.is_installed():
    torchtpu.load()

import torch
from support.xla_replica.replicas import HAS_XLA

from xla_replica.starting import child_process

# Replicas are forked from a server, and import the modules of tests and with them these
# packages, torch_xla the last two: most of a second in each of hundreds of processes.
# The server may have no thread, so Arrow's allocator, which pandas loads, must not
# start one.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
child_process._IMPORTED += [
    "hypothesis", "pandas", "pytest", "grab_xla", "rigl_xla", "requests", "yaml",
]  # fmt: skip

# Files that take more than about 20 s begin first, the longest one before the others:
# one that begins last keeps one worker busy, and the others wait.
LONGEST = (
    "test_live_run", "test_stopping", "test_live_changes", "test_readme",
    "test_sharded_models", "test_grab_elastic", "test_interrupted_training",
    "test_variable_train_mnist", "test_child_process", "test_rigl_replicas",
    "test_per_sample_xla", "test_examples", "test_recording",
    "test_program_checks", "test_scripts", "test_exact_sums",
    "test_compilations", "test_elastic_family", "test_rigl_assigned_gradients",
    "test_rule_family", "test_overlapped_sum",
    "test_page_blocks", "test_accelerators", "test_rigl_example", "test_grab_memory",
    "test_token_weights", "test_replica_family", "test_per_sample_stream",
    "test_balance_family",
)  # fmt: skip


# Pages, examples, scripts and tools run alike whatever the runtime and the version of
# torch, so the default run of the torch environment has them alone; but for those of
# XLA, and for what scripts for other packages become.
RUN_ONCE = {Path(__file__).parent / name for name in (
    "docs", "examples", "tools", "test_architecture.py", "test_variable_train_mnist.py",
    "grab_xla/test_grab_sampler_parity.py",
)}  # fmt: skip
RUN_TWICE = ("test_migration",)

# A shell ignores Ctrl-C for what it runs in the background; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine now and then takes more than the default 200 ms for an example.
hypothesis.settings.register_profile("loaded", deadline=None)
hypothesis.settings.load_profile("loaded")


def pytest_xdist_auto_num_workers() -> int:
    """Returns two for each core: half of their time tests wait for other processes.

    Beside torch_xla it is one more than there are cores, which compiling keeps busy. A
    worker and what it starts take up to 2 GB.
    """
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores + 1 if HAS_XLA else 2 * cores, memory // 2**31))


class NamedAtOnce:
    """Names a test as it fails; the end of the run may be minutes away."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(f"FAILED {report.nodeid} ({report.when})")


@pytest.hookimpl(trylast=True)  # when there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    if torchtpu.is_installed():  # it asks every tensor that a module is given
        config.addinivalue_line(
            "filterwarnings", "ignore:The .grad attribute of a Tensor that is not:"
        )
    if (reporter := config.pluginmanager.get_plugin("terminalreporter")) is not None:
        config.pluginmanager.register(NamedAtOnce(reporter.write_line))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules of which the run has no test: some import for seconds."""
    path, is_default = collection_path, "not slow" in config.option.markexpr
    if not (HAS_XLA and is_default and RUN_ONCE & {path, path.parent}):
        return None
    is_own = path.suffix != ".py" or path.stem in RUN_TWICE
    return not (is_own or re.search(r"on_xla|mark\.xla", path.read_text())) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        is_own = item.get_closest_marker("xla") or item.path.stem in RUN_TWICE
        if HAS_XLA and RUN_ONCE & {item.path, item.path.parent} and not is_own:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Fails what would be skipped, of tests that no other environment runs."""
    report = yield
    if report.skipped and HAS_XLA and item.get_closest_marker("tpu_like"):
        report.outcome = "failed"
        report.longrepr = f"must run where torch_xla is: {report.longrepr}"
    return report


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations on a busy machine: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
