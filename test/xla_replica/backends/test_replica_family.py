"""All replica backends behave alike."""

from __future__ import annotations

import sys

import pytest
import torch
from support.scripts import python
from support.xla_replica.replicas import (
    BACKENDS,
    FOUR_TPU_LIKE,
    SEVERAL_REPLICAS,
    SLICES,
    TPU_LIKE,
    Backend,
    row,
)
from torch.utils.data import DataLoader, Dataset

import xla_replica
from xla_replica import LocalReplica, ReplicaError

LOCAL = LocalReplica("cpu")


def every_verb(rank: int) -> dict[str, object]:
    replica = xla_replica.current()
    number = replica.scalar(rank + 1)
    sums = [
        torch.ones(2, 3, device=replica.device) * number,
        torch.full((4,), 0.5, dtype=torch.float64, device=replica.device),
        torch.ones((), dtype=torch.int64, device=replica.device),
        torch.ones(3, 2, device=replica.device).t() * number,  # not contiguous
        torch.zeros(0, device=replica.device),
        torch.ones(2, dtype=torch.bfloat16, device=replica.device),
        torch.ones(1, 2, 2, 3, device=replica.device).to(
            memory_format=torch.channels_last
        ),
    ]
    replica.sync()
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in sums]
    replica.all_reduce_(sums)
    after = [(tensor.data_ptr(), tensor.stride()) for tensor in sums]
    last = replica.num_replicas - 1
    nan = torch.full((2,), float("nan")).to(replica.device)
    sent = [
        torch.where(number == replica.num_replicas, 7.0 * torch.ones_like(nan), nan),
        number == replica.num_replicas,
        (number * 10).to(torch.int64),
        number.reshape(()).clone(),
    ]
    replica.broadcast_(sent, source=last)
    gathered = replica.all_gather(number.reshape(1, 1))
    receivers = torch.arange(replica.num_replicas, device=replica.device)
    sender = (number - 1).expand(replica.num_replicas)
    parts = torch.stack([sender, receivers.float()], dim=1).unsqueeze(2)
    exchanged = replica.all_to_all(parts.to(torch.float64))
    narrow = replica.all_to_all(parts.to(torch.bfloat16))
    replica.barrier()
    with replica.seeded(3):
        seeded = torch.rand(2)
    replica.seed(0)
    texts = replica.all_gather_object({"rank": rank, "text": "ä" * rank * 700})
    replica.check_agreement("the seed", 3, "")
    try:
        replica.check_agreement("the width", min(rank, 1), "Build alike.")
        disagreement = None
    except ReplicaError as error:
        disagreement = (str(error), error.rank)
    fetched = replica.fetch([*sums, *sent, gathered, exchanged, narrow])
    own = [number, torch.ones(1)]  # an optimizer may count its steps on the host
    return {
        "place": (replica.rank, replica.num_replicas, rank, replica.is_primary),
        "sums": fetched[:7],
        "stay": after == places,
        "sent": fetched[7:11],
        "gathered": fetched[11],
        "exchanged": fetched[12:],
        "seeded": seeded,
        "texts": texts,
        "disagreement": disagreement,
        "empty": replica.fetch([]),
        "text": str(replica),
        "aliased": any(
            copy.data_ptr() == tensor.data_ptr()
            for copy, tensor in zip(replica.fetch(own), own, strict=True)
        ),
    }


@pytest.fixture(scope="module", params=[*BACKENDS, SLICES, TPU_LIKE, FOUR_TPU_LIKE])
def outcomes(request):
    return request.param.run(every_verb)


def test_ranks_count_the_replicas(outcomes):
    n = len(outcomes)
    places = [outcome["place"] for outcome in outcomes]
    assert places == [(rank, n, rank, rank == 0) for rank in range(n)]
    assert f"of {n}" in outcomes[0]["text"]


def test_sums_are_sums_of_every_dtype_and_shape(outcomes):
    n = len(outcomes)
    total = n * (n + 1) / 2
    expected = [
        torch.full((2, 3), total),
        torch.full((4,), n / 2, dtype=torch.float64),
        torch.tensor(n),
        torch.full((2, 3), total),
        torch.zeros(0),
        torch.full((2,), n, dtype=torch.bfloat16),
        torch.full((1, 2, 2, 3), float(n)),
    ]
    for outcome in outcomes:
        assert outcome["stay"]  # others may have views of what is summed
        for value, reference in zip(outcome["sums"], expected, strict=True):
            assert torch.equal(value, reference)
            assert value.dtype == reference.dtype


def test_broadcast_takes_the_source_and_nothing_else(outcomes):
    """Even where the other replicas hold NaN."""
    for outcome in outcomes:
        values, flag, number, scalar = outcome["sent"]
        assert values.tolist() == [7.0, 7.0]
        assert flag.tolist() == [True]
        assert flag.dtype == torch.bool
        assert number.tolist() == [10 * len(outcomes)]
        assert scalar.shape == ()
        assert scalar == len(outcomes)


def test_a_fetched_tensor_is_a_copy(outcomes):
    """Also of a tensor on the CPU: later changes of the run must not change it."""
    assert not any(outcome["aliased"] for outcome in outcomes)


def test_tensors_and_objects_of_any_length_are_gathered_by_rank(outcomes):
    """Short objects need one round; one that does not fit into it needs two."""
    n = len(outcomes)
    expected = torch.arange(1.0, n + 1).reshape(n, 1, 1)
    assert all(torch.equal(outcome["gathered"], expected) for outcome in outcomes)
    texts = [{"rank": rank, "text": "ä" * rank * 700} for rank in range(n)]
    assert all(outcome["texts"] == texts for outcome in outcomes)


def test_values_that_differ_are_an_error_on_every_replica(outcomes):
    n = len(outcomes)
    for outcome in outcomes:
        if n == 1:
            assert outcome["disagreement"] is None
        else:
            text, rank = outcome["disagreement"]
            assert rank == 1
            assert text == (
                "replicas disagree about the width: replica 0 has 0, replica 1 has 1, "
                f"and {n - 1} of {n} differ from replica 0 (rank "
                f"{', '.join(map(str, range(1, n)))}). Build alike."
            )


def test_all_to_all_gives_each_replica_what_the_others_had_for_it(outcomes):
    n = len(outcomes)
    for rank, outcome in enumerate(outcomes):
        expected = [[[sender], [rank]] for sender in range(n)]
        for received in outcome["exchanged"]:
            assert received.tolist() == expected
        assert outcome["exchanged"][0].dtype == torch.float64
        assert outcome["exchanged"][1].dtype == torch.bfloat16


def test_seeded_draws_are_equal_and_restore_the_generator(outcomes):
    assert all(torch.equal(o["seeded"], outcomes[0]["seeded"]) for o in outcomes)
    assert all(outcome["empty"] == [] for outcome in outcomes)
    state = torch.random.get_rng_state()
    with xla_replica.seeded(3):
        assert torch.equal(torch.rand(2), outcomes[0]["seeded"])
    assert torch.equal(torch.random.get_rng_state(), state)


class Faulty(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("sample 5 is broken")
        return torch.tensor([index])


def loads_and_fails() -> list[int]:
    replica = xla_replica.current()
    seen = []
    for _ in range(2):  # breaking out leaves the loader usable
        for batch in replica.loader(DataLoader(Faulty(), batch_size=2)):
            assert batch.device.type == replica.device.type
            seen += replica.fetch([batch])[0].flatten().tolist()
            break
    broken = iter(replica.loader(DataLoader(Faulty(), batch_size=2)))
    assert [len(next(broken)), len(next(broken))] == [2, 2]
    with pytest.raises(KeyError, match="sample 5"):
        next(broken)
    return seen


def repeats_its_noise() -> tuple[torch.Tensor, list[torch.Tensor]]:
    replica = xla_replica.current()
    replica.seed(1)

    def draw() -> torch.Tensor:
        drawn = [torch.rand(2, device=replica.device) for _ in range(2)]
        replica.sync()
        drawn.append(torch.rand(2, device=replica.device))
        return torch.cat(replica.fetch(drawn))

    drawn = [draw()]
    if replica.device.type != "cpu":
        torch.rand(3, device=replica.device)  # still to be run when the state is taken
    state = replica.rng_state()
    drawn += [draw(), replica.set_rng_state(state) or draw(), draw()]
    if replica.device.type != "cpu":
        with pytest.raises(ValueError, match="not that of a torch_xla device, 8 bytes"):
            replica.set_rng_state(torch.zeros(9, dtype=torch.uint8))
    return state, drawn


def what_is_refused() -> list[str]:
    """Returns what verbs say of arguments that are not lists of tensors."""
    replica = xla_replica.current()
    said = []
    for verb in (replica.all_reduce_, replica.broadcast_, replica.fetch):
        for tensors in (replica.scalar(1.0), None, [replica.scalar(1.0), 3]):
            with pytest.raises(TypeError) as caught:
                verb(tensors)
            said.append(str(caught.value))
    with pytest.raises(TypeError, match=r"seed must be an integer .* got 1\.5"):
        replica.seed(1.5)
    with pytest.raises(ValueError, match="seed must be an integer"):
        replica.seed(2**64)
    with pytest.raises(ValueError, match="prefetch must be an integer >= 1, got 0"):
        replica.loader([], 0)
    summed = [replica.scalar(1.0)]
    replica.all_reduce_(tensor for tensor in summed)
    assert replica.fetch(iter(summed))[0].item() == replica.num_replicas
    return said


def further_verbs(rank: int) -> dict[str, object]:
    return {
        "loaded": loads_and_fails(),
        "states": repeats_its_noise(),
        "refused": what_is_refused(),
    }


@pytest.fixture(scope="module", params=[row("cpu", 1), *SEVERAL_REPLICAS, TPU_LIKE])
def further(request):
    return request.param.run(further_verbs)


def test_the_loader_raises_what_the_dataset_raises(further):
    assert [outcome["loaded"] for outcome in further] == [[0, 1, 0, 1]] * len(further)


def test_seed_draws_differently_on_every_replica(further):
    draws = [tuple(outcome["states"][1][0].tolist()) for outcome in further]
    assert len(set(draws)) == len(further)


def test_a_state_of_random_numbers_is_put_back(further):
    for outcome in further:
        state, (_, first, again, later) = outcome["states"]
        assert (state.dtype, state.dim(), state.device.type) == (torch.uint8, 1, "cpu")
        assert torch.equal(first, again)
        assert not torch.equal(first, later)


def test_verbs_refuse_what_is_no_list_of_tensors(further):
    expected = [
        f"{verb} takes a list of tensors, such as [tensor], got {got}"
        for verb in ("all_reduce_", "broadcast_", "fetch")
        for got in ("a tensor of shape (1,)", "None", "3")
    ]
    assert [outcome["refused"] for outcome in further] == [expected] * len(further)


def raises(rank: int, culprit: int) -> None:
    replica = xla_replica.current()
    if rank == culprit:
        raise KeyError("no such thing")
    replica.all_reduce_([torch.ones(1, device=replica.device)])
    replica.wait()


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_replica_that_raises_ends_the_run_with_its_exception(backend):
    with pytest.raises(ReplicaError, match="replica 2 raised KeyError") as caught:
        backend.run(raises, 2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 2
    assert 'raise KeyError("no such thing")' in str(caught.value)


def exits(rank: int, status: object, culprits: tuple[int, ...]) -> None:
    if rank in culprits:
        sys.exit(status)
    raises(rank, -1)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_the_status_with_which_a_replica_exits_is_the_jobs(backend, caplog):
    """A script that does not catch it ends with this status and no traceback."""
    with pytest.raises(SystemExit) as caught:
        backend.run(exits, 21, (1,))
    assert caught.value.code == 21
    assert "replica 1 ended the job by sys.exit(21)" in caplog.text


def test_a_replica_in_this_process_exits_as_it_would_without_launch():
    for status in (21, 0):
        with pytest.raises(SystemExit) as caught:
            Backend("cpu", 1).run(exits, status, (0,))
        assert caught.value.code == status


@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_replicas_that_exit_well_have_left_their_peers(backend, culprits):
    who = "1" if culprits == (1,) else r"\d"
    with pytest.raises(ReplicaError, match=f"replica {who} raised SystemExit: 0"):
        backend.run(exits, 0, culprits)


def returns_early(rank: int) -> None:
    if rank != 1:
        raises(rank, -1)


def test_a_process_that_returns_early_is_an_error():
    """test_emulation.py has the same test of emulated replicas."""
    with pytest.raises(
        ReplicaError, match=r"replica 1 returned, but a peer|failed in all_reduce_ of 1"
    ):
        Backend("cpu", 2).run(returns_early, timeout=4)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_function_that_cannot_travel_is_an_error(backend):
    with pytest.raises(TypeError, match="top level of a module"):
        backend.run(lambda rank: rank)


# --- without other replicas ---------------------------------------------------------


def test_current_is_local_in_a_plain_script(monkeypatch):
    """In a separate process: other tests may have imported torch_xla in this one."""
    script = (
        "import xla_replica; replica = xla_replica.current(); print(replica);"
        "assert (replica.rank, replica.num_replicas) == (0, 1)"
    )
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    run = python("-c", script)
    assert run.returncode == 0, run.stderr
    assert "replica 0 of 1" in run.stdout


@pytest.mark.parametrize(
    ("value", "dtype", "error"),
    [
        (1.5, torch.int32, ValueError),
        (float("nan"), torch.int64, ValueError),
        (float("inf"), torch.int64, ValueError),
        (2, torch.bool, ValueError),
        (0.5, torch.bool, ValueError),
        (torch.ones(1), torch.float32, TypeError),
        ("1", torch.float32, TypeError),
    ],
)
def test_a_scalar_is_the_number_that_was_given(value, dtype, error):
    replica = xla_replica.LocalReplica("cpu")
    with pytest.raises(error, match=r"^scalar: "):
        replica.scalar(value, dtype)
    for held in (3, 3.0, -(2**40)):
        assert replica.scalar(held, torch.int64).tolist() == [held]
    assert replica.scalar(True, torch.bool).tolist() == [True]


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_processes_of_another_launcher_do_not_each_train_alone(name, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setenv(name, "16")
    refused = f"{name}=16 says that .* Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PO"
    for start in (
        xla_replica.current,
        lambda: xla_replica.launch(raises, (1,), device="cpu"),
        lambda: xla_replica.launch(raises, (1,), num_replicas=2, device="cpu"),
    ):
        with pytest.raises(ReplicaError, match=refused):
            start()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert xla_replica.current().num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ReplicaError, match="init_process_group"):
        xla_replica.current()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_replicas": 0}, "num_replicas must be an integer >= 1, got 0"),
        ({"device": "cuda"}, "device must be one of .*'accelerator'.*got 'cuda'"),
        pytest.param({"device": "accelerator"}, "device='accelerator', but torch finds",
                     marks=pytest.mark.skipif("torch.cuda.is_available()")),
        ({"timeout": 0}, "timeout must be a finite number > 0 and <= 2000000.0, got"),
        ({"fn": 3}, "fn must be a function, got 3"),
        ({"args": "ab"}, "args must be a tuple of the arguments .*, got 'ab' .str"),
    ],
)  # fmt: skip
def test_launch_rejects(arguments, error):
    with pytest.raises((TypeError, ValueError), match=error):
        xla_replica.launch(**{"fn": every_verb, **arguments})


@pytest.mark.parametrize(
    ("verb", "arguments", "error"),
    [
        (xla_replica.default_num_replicas, ["gpu"], "device must be one of .*, got 'g"),
        (xla_replica.default_num_replicas, ["cpu", 0], "on_cpu must be an integer >= "),
        (LOCAL.broadcast_, [[torch.ones(1)], 1], "broadcast_: source must be .* got 1"),
        (LOCAL.all_to_all, [torch.ones(2, 2)], "first dimension must be 1"),
        (LOCAL.all_to_all, [torch.ones(())], "first dimension must be 1"),
    ],
)
def test_what_fits_no_number_of_replicas_is_refused(verb, arguments, error):
    with pytest.raises(ValueError, match=error):
        verb(*arguments)


def test_a_single_replica_raises_its_own_exception():
    with pytest.raises(KeyError, match="no such thing"):
        xla_replica.launch(raises, (0,), num_replicas=1, device="cpu")
