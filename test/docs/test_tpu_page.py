"""The lines for the first day on a TPU, on emulated replicas in place of its chips."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.documents import ROOT, block, blocks, read
from support.scripts import python
from support.xla_replica import tpu_like
from support.xla_replica.replicas import on_chips, on_xla

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


def test_every_line_is_run_or_only_a_tpu_vm_can_run_it():
    excepted = ("gcloud", "python3 -m venv", "pip install", "export")
    assert all(line.startswith(excepted) for line in LINES[:4])
    assert all(name in line for name, line in RUN.items())
    counted = [name for name, line in RUN.items() if "--num-replicas" in line]
    assert counted == ["bench_step.py"]  # on several hosts 8 is the number of one


@on_xla
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
STARTED = (
    "--nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 "
    "--nproc_per_node 8 train.py on 10.0.0.1,10.0.0.2 of 4x8\n"
)


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


SSH = "gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker=all --command"
# On the way from the first ssh to the first update: set up, start, look, end.
COMMANDS = block("docs/tpu.md", "sh", "tmux new-session")
COMMANDS = re.split("^(?=gcloud)", COMMANDS, flags=re.MULTILINE)[1:]
# Runs a command on every host at once, as ssh does: by a plain shell, at home.
GCLOUD = """#!{python}
import json, pathlib, subprocess, sys
*words, command = sys.argv[1:]
assert ["gcloud", *words] == {ssh!r}.split(), words
hosts = json.loads(pathlib.Path({hosts!r}).read_text())
shells = [subprocess.Popen(["bash", "-c", command], cwd=host["HOME"], env=host)
          for host in hosts]
sys.exit(max(shell.wait() for shell in shells))
"""
# What installs does nothing, and pkill finds the processes of its own host.
PROGRAMS = {
    "sudo": "",
    "python3": '{python} "$@" --without-pip && ln -s {bin}/sudo .venv/bin/pip',
    "pkill": 'for pid in $(pgrep -f "$3"); do grep -qz "^HOME=$HOME$" '
    "/proc/$pid/environ && kill $1 $pid; done; true",
}


class Slice:
    """Simulated hosts, which have homes of their own and run what the page says."""

    def __init__(self, folder: Path, num_hosts: int, num_chips: int) -> None:
        self.folder, programs = folder, folder / "bin"
        words = {"python": sys.executable, "bin": programs, "hosts": f"{folder}/hosts"}
        words["ssh"] = SSH
        programs.mkdir(parents=True)
        texts = {name: f"#!/bin/bash\n{text}\n" for name, text in PROGRAMS.items()}
        for name, text in {**texts, "gcloud": GCLOUD}.items():
            (programs / name).write_text(text.format_map(words))
            (programs / name).chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"
        self.homes = [folder / f"host-{number}" for number in range(num_hosts)]
        variables = []
        for number, home in enumerate(self.homes):
            home.mkdir()
            own = tpu_like.environment(num_chips, folder, number, num_hosts)
            at = {"HOME": str(home), "TMUX_TMPDIR": str(home), "PATH": self.path}
            variables.append(own | at)
        (folder / "hosts").write_text(json.dumps(variables))

    def run(self, command: str) -> str:
        return python("-c", command, command=["sh"], timeout=300, PATH=self.path).stdout

    def wait_for(self, is_there) -> None:
        deadline = time.monotonic() + 240
        while not is_there():
            logs = [each.read_text() for each in self.folder.glob("*/work/train.log")]
            has_ended = all(self.sessions())
            assert time.monotonic() < deadline, logs
            assert not has_ended or is_there(), logs
            time.sleep(0.2)

    def sessions(self) -> list[int]:
        """Returns for each host 0 where its tmux still runs something, else 1."""
        return [self._tmux(home, "has-session") for home in self.homes]

    def close(self) -> None:
        for home in self.homes:
            self._tmux(home, "kill-server")

    @staticmethod
    def _tmux(home: Path, command: str) -> int:
        options = {"env": {**os.environ, "TMUX_TMPDIR": str(home)}}
        done = subprocess.run(["tmux", command], **options, capture_output=True)
        return done.returncode


@on_chips
def test_hosts_train_save_when_they_are_ended_and_others_go_on(tmp_path, request):
    """By the page's own commands, and the README's script in the user's repository."""
    set_up, start, look, end = COMMANDS
    saved, repository, counts = tmp_path / "saved", tmp_path / "repository", [0]
    [script] = blocks("README.md", "python")
    for before, after in {
        '"trace.csv"': '[64, 96], on_end="cycle"',
        '10, model=model, checkpoint="run"': "10**6, model=model, every_updates=20, "
        f"checkpoint={str(saved)!r}",
    }.items():
        assert script.count(before) == 1
        script = script.replace(before, after)
    repository.mkdir()
    (repository / "train.py").write_text(script)
    made = "git init -q && git add . && git -c user.name=a -c user.email=a commit -qm a"
    python("-c", f"cd {repository} && {made}", command=["sh"])
    for num_hosts, num_chips in ((4, 1), (1, 2)):
        hosts = Slice(tmp_path / f"of-{num_hosts}", num_hosts, num_chips)
        request.addfinalizer(hosts.close)
        hosts.run(set_up.replace("REPOSITORY", str(repository)))
        hosts.run(start)
        assert not any(hosts.sessions())
        last = saved / f"update-{counts[-1] + 20:08d}"
        hosts.wait_for(lambda last=last: max(saved.glob("*.pt"), default=saved) > last)
        hosts.run(end)
        hosts.wait_for(lambda hosts=hosts: all(hosts.sessions()))
        told = r"stopped after (\d+) updates: received SIGTERM.* from (\S+\.pt)$"
        [(updates, file)] = re.findall(told, hosts.run(look), re.MULTILINE)
        assert Path(file).parent == saved
        counts.append(int(updates))
    assert 20 < counts[1] < counts[2] - 20


@on_chips
@pytest.mark.parametrize(("name", "smaller", "told"), [
    ("cases.py", "'plain step'", "plain step: "),
    ("bench_step.py", f"{SMALLER['bench_step.py']} --batch-sizes 1", "replicas: 2"),
])  # fmt: skip
def test_a_line_for_all_chips_runs_on_all_hosts_at_once(name, smaller, told, tmp_path):
    hosts = Slice(tmp_path, 2, 1)
    for home in hosts.homes:
        (home / "tools").symlink_to(ROOT / "tools")
    line = RUN[name].replace("replicas 8", "replicas 2") + f" {smaller}"
    line = shlex.quote(line.replace("python", sys.executable))
    assert told in hosts.run(f"{SSH} {line}")


def test_what_hosts_are_told_to_do_is_shell_and_ends_the_job_alone():
    """No shell of ssh is ended with it, no tmux, and none is left in another folder."""
    commands = [re.search("--command '(.*?)'", text, re.DOTALL)[1] for text in COMMANDS]
    [pattern] = re.findall('-f "(.*)"', commands[-1])
    [started] = re.findall('new-session -d -s train "(.*)"', commands[1])
    assert re.search(pattern, started)
    assert not any(re.search(pattern, f"bash -c {each}") for each in commands)
    assert not re.search(pattern, f"tmux new-session -d -s train {started}")
    for command in commands:
        python("-n", "-c", command, command=["sh"])
        assert "work" in command or "pkill" in command
