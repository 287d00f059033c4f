"""Other people's torch_xla scripts on N replicas of a CPU, and what they count on."""

import re
import time
from typing import Any

import pytest
import torch
from support.documents import ROOT
from support.scripts import python, written
from support.xla_replica.replicas import on_xla, row, slow

from xla_replica.__main__ import main


def run(number: int, *words: object, status: int = 0) -> str:
    command = "-W", "ignore", "-m", "xla_replica", "--num-replicas", number
    done = python(*command, *words, timeout=300, status=status)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("arguments", "status", "said"), [
    ("--help", 0, "python -m xla_replica --num-replicas 8 train.py --lr 0.1"),
    ("--help", 0, "torch_xla.launch(train, args=(0.1,))"),
    ("train.py", 2, "the following arguments are required: --num-replicas"),
    ("--num-replicas 0 train.py", 2, "--num-replicas must be an integer >= 1, got 0"),
    ("--num-replicas two train.py", 2, "invalid int value: 'two'"),
    ("--num-replicas 2", 2, "the following arguments are required: script"),
    ("--num-replicas 2 --timeout 0 x.py", 2, "--timeout must be"),
])  # fmt: skip
def test_help_and_what_a_wrong_command_line_says(arguments, status, said, capsys):
    with pytest.raises(SystemExit) as exited:
        main(arguments.split())
    assert exited.value.code == status
    assert said in capsys.readouterr()[status == 2]


@on_xla
@pytest.mark.parametrize("number", [3, slow(8)])
def test_a_script_for_torch_xla_alone_trains_on_replicas(number, tmp_path):
    script = ROOT / "test" / "support" / "xla_replica" / "torch_xla_training.py"
    printed = run(number, script, tmp_path)
    assert f"trained on {number} devices" in printed
    first, _, last = map(float, re.findall(r"loss ([\d.]+)", printed))
    assert last < 0.5 * first
    weights = [torch.load(tmp_path / f"weights-{n}.pt") for n in range(number)]
    for name, expected in weights[0].items():
        for each in weights[1:]:
            assert "running" in name or torch.equal(each[name], expected), name


SCRIPT = """
import sys, torch, torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp
from torch_xla.core.xla_model import all_reduce, rendezvous, xla_device, xla_device_hw

AT_IMPORT = torch.rand(1).item()
SET_LATER = "not set"
MODEL = xmp.MpModelWrapper(torch.nn.Linear(1, 1))

def train(index, how):
    rank = torch.tensor([float(index)], device=xla_device())
    total = all_reduce("sum", rank).item()
    if how == "exits":
        sys.exit(21)
    if how == "exits well":
        rendezvous("end")
        sys.exit(0)
    if how == "fails" and index == 1:
        raise KeyError("a wrong name")
    model = MODEL.to(xla_device())
    assert MODEL.to(xla_device()) is not model
    rendezvous("all are here")
    on = xla_device_hw(xla_device())
    said = f"{total} of {index} on {on}: {how} {SET_LATER} {sys.argv[1:]} {__name__}"
    print(f"{said}\\n", end="")

if __name__ == "__main__" or sys.argv[1] == "no guard":
    SET_LATER = "set"
    how, nprocs = sys.argv[1], None
    if how == "uses a device":
        torch.zeros(1, device="xla")
    if how == "no launch":
        xmp.spawn = lambda fn, **options: None
    if how == "nprocs":
        nprocs = 8
    try:
        start = "fork" if how == "forks" else "spawn"
        xmp.spawn(train, args=(how,), nprocs=nprocs, start_method=start)
    except KeyError as error:
        print("caught", error)
        raise
    print("afterwards")
"""


@on_xla
@pytest.mark.parametrize(("how", "status", "expected"), [
    slow("works", 0, ["1.0 of 1 on CPU: works not set", "afterwards", "1.0 of 0 on "
                      "CPU: works not set ['works', '--lr', '1'] __mp_main__"]),
    slow("forks", 0, ["1.0 of 0 on CPU: forks not set ['forks', '--lr', '1']",
                      "1.0 of 1 on CPU: forks not set", "afterwards"]),
    slow("fails", 1, ["replica 1 raised KeyError: 'a wrong name'",
                      'raise KeyError("a wrong name")', "caught 'a wrong name'"]),
    slow("exits", 21, []),
    slow("exits well", 0, []),
    slow("nprocs", 1, ["Unsupported nprocs (8)"]),
    slow("no launch", 0, ["has not called torch_xla.launch or xmp.spawn"]),
    slow("uses a device", 1, ["an XLA device was used before launch"]),
    slow("no guard", 1, ["is not going to be frozen to produce an executable"]),
])  # fmt: skip
def test_a_script_ends_as_it_would_on_a_tpu(how, status, expected, tmp_path):
    printed = run(2, written(tmp_path, SCRIPT), how, "--lr", "1", status=status)
    for line in expected:
        assert line in printed
    if status or how == "exits well":
        assert "afterwards" not in printed


@on_xla
@pytest.mark.slow
def test_a_module_runs_as_with_python_and_can_think_it_has_a_tpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_package").mkdir()
    written(tmp_path / "a_package", SCRIPT)
    printed = run(2, "--as-tpu", "-m", "a_package.script", "works")
    assert "1.0 of 1 on TPU: works not set ['works'] __mp_main__" in printed


def does_it_all(rank: int, folder: str) -> tuple[Any, ...]:
    return draws(rank), logs_beside(rank), uses_collectives(rank, folder), groups()


@pytest.fixture(scope="module", params=[row("xla", 4)])
def outcomes(request, tmp_path_factory) -> dict[str, list[Any]]:
    found = request.param.run(does_it_all, str(tmp_path_factory.mktemp("saved")))
    return dict(zip(("draws", "logs", "collectives", "groups"), zip(*found)))


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def uses_collectives(rank: int, folder: str) -> dict[str, tuple[Any, Any]]:
    """Calls every collective of torch_xla; returns what it gives, and promises."""
    import torch_xla.core.functions as xf
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    n, device, ranks = xr.world_size(), xm.xla_device(), [0.0, 1.0, 2.0, 3.0]
    own = [n * (2 * rank + i) + 6.0 for i in range(2)]

    def mine(*more: float) -> torch.Tensor:
        return torch.tensor([float(rank), *more], device=device)

    halves = [list(range(0, n, 2)), list(range(1, n, 2))]
    half = ranks[rank % 2 :: 2]
    ring = [[i, (i + 1) % n] for i in range(n)]
    summed, sent, weight = [mine(), mine(1.0)], [mine()], torch.nn.Parameter(mine(1.0))
    xm.all_reduce("sum", summed)
    xm.collective_broadcast(sent, root_ordinal=2)
    xm.broadcast_master_param(torch.nn.ParameterList([weight]))
    xm.save({"sum": xm.all_reduce("sum", mine())}, f"{folder}/saved.pt")
    xm.rendezvous("saved")
    wide = torch.arange(2.0 * n).to(device) + mine()
    parts = torch.arange(n).to(device) + 10 * mine()
    found: dict[str, tuple[Any, Any]] = {
        "sum": (xm.all_reduce("sum", mine(2.0)), [6.0, 8.0]),
        "mul": (xm.all_reduce("mul", mine(2.0)), [0.0, 16.0]),
        "min": (xm.all_reduce("min", mine(2.0)), [0.0, 2.0]),
        "max": (xm.all_reduce("max", mine(2.0)), [3.0, 2.0]),
        "scaled": (xm.all_reduce("sum", mine(), scale=0.5), [3.0]),
        "by halves": (xm.all_reduce("sum", mine(), groups=halves), [sum(half)]),
        "in place": (summed, [[6.0], [6.0, 4.0]]),
        "gathered": (xm.all_gather(mine()), ranks),
        "gathered halves": (xm.all_gather(mine(), groups=halves), half),
        "gathered list": (xm.all_gather([mine(), mine(5.0)], pin_layout=False),
                          [ranks, [v for r in ranks for v in (r, 5.0)]]),
        "scattered": (xm.reduce_scatter("sum", wide, 1.0, 0, n), own),
        "scattered list": (xm.reduce_scatter_bucketized("sum", 2 * [wide], 1.0, 0, n),
                           [own, own]),
        "exchanged": (xm.all_to_all(parts, 0, 0, n), [rank + 10 * r for r in ranks]),
        "permuted": (xm.collective_permute(mine(), ring), [float((rank - 1) % n)]),
        "broadcast": (sent, [[2.0]]),
        "mesh": (xm.mesh_reduce("mesh", {"rank": rank}, list),
                 [{"rank": r} for r in range(n)]),
        "payloads": (list(xm.rendezvous("payloads", b"x" * rank)),
                     [b"x" * r for r in range(n)]),
        "differentiable": (xf.all_gather(mine().requires_grad_(), dim=0), ranks),
        "of replica 0": (weight, [0.0, 1.0]),
        "saved": (torch.load(f"{folder}/saved.pt")["sum"], [6.0]),
    }  # fmt: skip
    return {name: (plain(value), promise) for name, (value, promise) in found.items()}


def test_collectives_give_what_they_promise(outcomes):
    for outcome in outcomes["collectives"]:
        for name, (found, promised) in outcome.items():
            assert found == promised, name


def groups() -> tuple[list[Any], list[torch.Tensor]]:
    """Calls torch.distributed with torch_xla's backend, and trains under DDP."""
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_backend

    dist.init_process_group("xla", init_method="xla://")
    n, rank, device = dist.get_world_size(), dist.get_rank(), torch_xla.device()
    mine = torch.tensor([float(rank)], device=device)
    total, sent, *parts = (mine.clone() for _ in range(2 + n))
    dist.all_reduce(total)
    dist.all_gather(parts, mine)
    dist.broadcast(sent, src=1)
    dist.new_group(list(range(n)))
    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3).to(device) * mine).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
    weight = model.module.weight.detach().cpu()
    return plain([rank, total, *parts, sent]), xm.mesh_reduce("w", weight, list)


@pytest.mark.filterwarnings("ignore")
def test_replicas_have_process_groups_of_their_own(outcomes):
    for rank, (found, weights) in enumerate(outcomes["groups"]):
        assert all(torch.equal(weight, weights[0]) for weight in weights)
        assert found == [rank, [6.0], [0.0], [1.0], [2.0], [3.0], [1.0]]


def draws(rank: int) -> list[object]:
    """Draws in every way, beside others that draw at other times."""
    time.sleep(rank / 30)
    drawn: list[object] = [torch.rand(2)]
    torch.manual_seed(5)
    drawn.append(torch.initial_seed())
    for _ in range(20):
        time.sleep(rank / 1000)
        drawn.append(torch.randn(2))
    ones = torch.nn.functional.dropout(torch.ones(8))
    drawn += [torch.nn.Linear(2, 2).weight, ones, torch.randperm(5)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        drawn.append(torch.rand(1))
    drawn += torch.utils.data.DataLoader(torch.arange(6), shuffle=True)
    return plain([*drawn, torch.empty(2).uniform_()])


def test_every_replica_draws_what_a_process_would(outcomes):
    with torch.random.fork_rng(devices=[]):
        expected = draws(0)
    first, *others = outcomes["draws"]
    assert others == [first] * 3  # before the seed too, from the process's state
    assert first[1:] == expected[1:]


def logs_beside(rank: int) -> list[object]:
    """Reads losses in torch_xla's asynchronous closures, which run in a thread."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    seen: list[object] = []
    for step in range(3):
        value = torch.tensor([10.0 * step + rank], device=torch_xla.device())
        total = xm.all_reduce("sum", value)
        xm.add_step_closure(
            lambda x: seen.append((x.item(), xr.global_ordinal())),
            args=(total,),
            run_async=True,
        )
        torch_xla.sync()
    deadline = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def test_threads_that_a_replica_starts_belong_to_it(outcomes):
    for rank, seen in enumerate(outcomes["logs"]):
        assert seen == [(40.0 * step + 6, rank) for step in range(3)]
