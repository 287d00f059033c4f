"""The lines for the first day on a TPU, on emulated replicas in place of its chips."""

import os
import re
import sys
from pathlib import Path

import pytest
from support.documents import ROOT, block, read
from support.scripts import python
from support.xla_replica.replicas import needs_xla

LINES = block("docs/tpu.md", "sh", "PJRT_DEVICE=TPU").splitlines()
# Of each other line: what is added to it, that it takes seconds.
SMALLER = {
    "python -c": "",
    "cases.py": "--num-replicas 2 'plain step' 'GraB, mean, exact'",
    "variable_train_mnist.py": "--num-replicas 2 --dataset fake",
    "bench_step.py": "--rounds 1 --steps 1",
    "bench_grab.py": "--types mean --sizes 1000 --batches 4 --epochs 1",
    "compilations.txt": "--num-replicas 2 --dataset fake --epochs 1",
}
RUN = dict(zip(SMALLER, LINES[4:], strict=True))


def test_lines_for_all_chips_count_none_but_where_the_page_says_so():
    """On several hosts 8 is the number of one host's."""
    counted = [line.split()[1] for line in LINES if "--num-replicas" in line]
    assert counted == ["tools/benchmarks/bench_step.py"]
    assert "`bench_step.py --num-replicas` is\nthen the number" in read("docs/tpu.md")


def test_every_line_is_run_or_only_a_tpu_vm_can_run_it():
    excepted = ("gcloud", "python3 -m venv", "pip install", "export")
    assert all(line.startswith(excepted) for line in LINES[:4])
    assert all(name in line for name, line in RUN.items())


@needs_xla
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_a_line_prints_what_the_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = rf"^\| `{re.escape(name)}` \|.*\| (.*) \|$"
    [prints] = re.findall(row, read("docs/tpu.md"), re.MULTILINE)
    command, *redirected = RUN[name].replace("replicas 8", "replicas 2").split(" 2> ")
    command = " 2> ".join([f"{command} {SMALLER[name]}", *redirected])
    for folder in ("tools", "test"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    done = python(
        command, command=["sh", "-c"], timeout=500, PJRT_DEVICE="CPU",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", CPU_NUM_DEVICES="2",
    )  # fmt: skip
    files = [file.read_text() for file in tmp_path.glob("*.txt")]
    text = "".join([done.stdout, done.stderr, *files])
    if name == "python -c":
        assert done.stdout == "2\n"
    for said in re.findall("`([^`]+)`", prints):
        assert said.replace("8", "2") in text, text


FAKES = {
    "curl": "case $* in *endpoints) echo a:1:10.0.0.1,b:2:10.0.0.2;; "
    "*) echo \"WORKER_ID: '1'\";; esac",
    "python": "[ -z $FAILS ] && echo NNODES=2 && echo WORLD_SIZE=16 && "
    "echo MASTER_PORT=29500 MASTER_ADDR=${TPU_WORKER_HOSTNAMES%%,*}",
    "torchrun": 'echo "$*" on $TPU_WORKER_HOSTNAMES of $TORCH_TPU_TOPOLOGY',
}


@pytest.mark.parametrize("fails", ["", "1"])
def test_the_lines_for_torchtpu_on_several_hosts(fails, tmp_path, monkeypatch):
    """torchrun does not start where the environment could not be set."""
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    lines = block("docs/launching.md", "sh", "TORCH_TPU_TOPOLOGY")
    path = f"{tmp_path}:{os.environ['PATH']}"
    options = {"command": ["sh"], "status": int(fails or 0), "PATH": path}
    done = python("-c", lines, FAILS=fails, **options)
    assert done.stdout == ("" if fails else STARTED)


STARTED = (
    "--nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 "
    "--nproc_per_node 8 train.py on 10.0.0.1,10.0.0.2 of 4x8\n"
)


def test_what_hosts_are_told_to_do_is_shell_and_ends_the_job_alone():
    """No shell of ssh is ended with it, and none is left in another folder."""
    lines = block("docs/tpu.md", "sh", "tpu-vm create")
    python("-n", "-c", lines, command=["sh"])
    commands = re.findall("--command '(.*?)'", lines, re.DOTALL)
    [pattern] = re.findall('-f "(.*)"', commands[-1])
    assert not any(re.search(pattern, command) for command in commands[-1:])
    assert re.search(pattern, commands[1])
    for command in commands:
        python("-n", "-c", command, command=["sh"])
        assert "work" in command or "pkill" in command
