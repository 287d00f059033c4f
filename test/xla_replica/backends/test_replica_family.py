"""All replica backends behave alike."""

from __future__ import annotations

import pytest
import torch
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
from xla_replica import ReplicaError


def plain(tensors: list[torch.Tensor]) -> list[tuple[torch.dtype, object]]:
    return [(tensor.dtype, tensor.tolist()) for tensor in tensors]


KINDS = [((2, 3), torch.float32), ((4,), torch.float64), ((), torch.int64),
         ((0,), torch.float32), ((2,), torch.bfloat16)]  # fmt: skip


def every_verb(rank: int) -> dict[str, tuple[object, object]]:
    """Returns what each verb has done, and what it should have."""
    replica = xla_replica.current()
    n, device = replica.num_replicas, replica.device
    total, number = n * (n + 1) / 2, replica.scalar(rank + 1)
    value = number.reshape(()).clone()
    sums = [torch.ones(s, dtype=d, device=device) * value.to(d) for s, d in KINDS]
    image = torch.ones(1, 2, 2, 3, device=device)
    sums.append(image.to(memory_format=torch.channels_last) * value)
    sums.append(torch.ones(3, 2, device=device).t() * value)  # not contiguous
    replica.sync()
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in sums]
    replica.all_reduce_(sums)
    after = [(tensor.data_ptr(), tensor.stride()) for tensor in sums]
    nan = torch.full((2,), float("nan")).to(device)
    sevens = torch.where(number == n, 7.0 * torch.ones_like(nan), nan)
    sent = [sevens, number == n, (number * 10).to(torch.int64), value]
    replica.broadcast_(sent, source=n - 1)
    last = [torch.tensor([7.0, 7.0]), torch.tensor([True]), torch.tensor([10 * n])]
    gathered = [replica.all_gather(number.reshape(1, 1))]
    receivers = torch.arange(n, device=device)
    parts = torch.stack([(number - 1).expand(n), receivers.float()], dim=1)
    both = [parts.unsqueeze(2).to(dtype) for dtype in (torch.float64, torch.bfloat16)]
    exchanged = [replica.all_to_all(each) for each in both]
    for_this = torch.tensor([[[sender], [rank]] for sender in range(n)])
    replica.barrier()
    state = torch.random.get_rng_state()
    with replica.seeded(3):
        seeded = torch.rand(2).tolist()
    is_restored = torch.equal(torch.random.get_rng_state(), state)
    replica.seed(0)
    # Short objects need one round; one that does not fit into it needs two.
    texts = [{"rank": r, "text": "ä" * r * 700} for r in range(n)]
    replica.check_agreement("the seed", 3, "")
    try:
        replica.check_agreement("the width", min(rank, 1), "Build alike.")
        disagreement = None
    except ReplicaError as error:
        disagreement = (str(error), error.rank)
    says = (
        "replicas disagree about the width: replica 0 has 0, replica 1 has 1, and "
        f"{n - 1} of {n} differ from replica 0 (rank "
        f"{', '.join(map(str, range(1, n)))}). Build alike."
    )
    own = [number, torch.ones(1)]  # an optimizer may count its steps on the host
    shared = {t.data_ptr() for t in own} & {t.data_ptr() for t in replica.fetch(own)}
    return {
        "the rank": (replica.rank, rank),
        "replica 0 is the primary one": (replica.is_primary, rank == 0),
        "the text": (f"of {n}" in str(replica), True),
        "sums of every dtype and shape": (
            plain(replica.fetch(sums)),
            plain([torch.full(t.shape, total, dtype=t.dtype) for t in sums]),
        ),
        "sums stay where others may have views of them": (after, places),
        "a broadcast takes the source and nothing else": (
            plain(replica.fetch(sent)),
            plain([*last, torch.tensor(float(n))]),
        ),
        "tensors are gathered by rank": (
            plain(replica.fetch(gathered)),
            plain([torch.arange(1.0, n + 1).reshape(n, 1, 1)]),
        ),
        "each receives what the others had for it": (
            plain(replica.fetch(exchanged)),
            plain([for_this.to(each.dtype) for each in both]),
        ),
        "objects of any length": (replica.all_gather_object(texts[rank]), texts),
        "values that differ": (disagreement, (says, 1) if n > 1 else None),
        "seeded draws leave the generator as it was": (is_restored, True),
        "seeded draws are equal": (replica.all_gather_object(seeded), [seeded] * n),
        "nothing": (replica.fetch([]), []),
        "a fetched tensor is a copy": (shared, set()),
    }


@pytest.mark.parametrize("backend", [*BACKENDS, SLICES, TPU_LIKE, FOUR_TPU_LIKE])
def test_every_verb_does_what_it_should_on_every_replica(backend):
    outcomes = backend.run(every_verb)
    assert len(outcomes) == backend.num_replicas
    with xla_replica.seeded(3):
        assert torch.rand(2).tolist() == outcomes[0]["seeded draws are equal"][1][0]
    for rank, outcome in enumerate(outcomes):
        assert outcome["the rank"] == (rank, rank)
        for what, (found, expected) in outcome.items():
            assert found == expected, what


class Faulty(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("sample 5 is broken")
        return torch.tensor([index])


def the_loader_raises_what_the_dataset_raises() -> None:
    replica = xla_replica.current()
    for _ in range(2):  # breaking out leaves the loader usable
        for batch in replica.loader(DataLoader(Faulty(), batch_size=2)):
            assert batch.device.type == replica.device.type
            assert replica.fetch([batch])[0].flatten().tolist() == [0, 1]
            break
    broken = iter(replica.loader(DataLoader(Faulty(), batch_size=2)))
    assert [len(next(broken)), len(next(broken))] == [2, 2]
    with pytest.raises(KeyError, match="sample 5"):
        next(broken)


def a_state_of_random_numbers_is_put_back() -> list[float]:
    """Returns the first numbers that a replica draws after a seed."""
    replica = xla_replica.current()
    replica.seed(1)

    def draw() -> list[float]:
        drawn = [torch.rand(2, device=replica.device) for _ in range(2)]
        replica.sync()
        drawn.append(torch.rand(2, device=replica.device))
        return torch.cat(replica.fetch(drawn)).tolist()

    seeded = draw()
    if replica.device.type != "cpu":
        torch.rand(3, device=replica.device)  # still to be run when the state is taken
    state = replica.rng_state()
    assert (state.dtype, state.dim(), state.device.type) == (torch.uint8, 1, "cpu")
    drawn = draw()
    replica.set_rng_state(state)
    assert draw() == drawn != draw()
    if replica.device.type != "cpu":
        with pytest.raises(ValueError, match="not that of a torch_xla device, 8 bytes"):
            replica.set_rng_state(torch.zeros(9, dtype=torch.uint8))
    return seeded


def verbs_refuse_what_is_no_list_of_tensors() -> None:
    replica = xla_replica.current()
    number = replica.scalar(1.0)
    for verb in (replica.all_reduce_, replica.broadcast_, replica.fetch):
        for tensors, got in (
            (number, r"a tensor of shape \(1,\)"), (None, "None"), ([number, 3], "3")
        ):  # fmt: skip
            takes = f"{verb.__name__} takes a list of tensors, such as .tensor., got "
            with pytest.raises(TypeError, match=f"^{takes}{got}$"):
                verb(tensors)
    replica.all_reduce_(tensor for tensor in [number])
    assert replica.fetch(iter([number]))[0].item() == replica.num_replicas


def further_verbs(rank: int) -> list[float]:
    the_loader_raises_what_the_dataset_raises()
    verbs_refuse_what_is_no_list_of_tensors()
    return a_state_of_random_numbers_is_put_back()


@pytest.mark.parametrize("backend", [row("cpu", 1), *SEVERAL_REPLICAS, TPU_LIKE])
def test_a_seed_draws_differently_and_further_verbs_hold_on_every_replica(backend):
    draws = backend.run(further_verbs)
    assert len({tuple(each) for each in draws}) == backend.num_replicas


def raises(rank: int, error: BaseException, *culprits: int) -> None:
    replica = xla_replica.current()
    if rank in culprits:
        raise error
    replica.all_reduce_([torch.ones(1, device=replica.device)])
    replica.wait()


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_replica_that_raises_ends_the_run_with_its_exception(backend):
    with pytest.raises(ReplicaError, match="replica 2 raised KeyError") as caught:
        backend.run(raises, KeyError("no such thing"), 2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 2
    assert "in raises\n    raise error\n" in str(caught.value)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_the_status_with_which_a_replica_exits_is_the_jobs(backend, caplog):
    """A script that does not catch it ends with this status and no traceback."""
    with pytest.raises(SystemExit) as caught:
        backend.run(raises, SystemExit(21), 1)
    assert caught.value.code == 21
    assert "replica 1 ended the job by sys.exit(21)" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(21), SystemExit(0), KeyError("a name")])
def test_a_replica_in_this_process_ends_as_it_would_without_launch(error):
    with pytest.raises(type(error)) as caught:
        Backend("cpu", 1).run(raises, error, 0)
    assert caught.value.args == error.args


@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_replicas_that_exit_well_have_left_their_peers(backend, culprits):
    who = "1" if culprits == (1,) else r"\d"
    with pytest.raises(ReplicaError, match=f"replica {who} raised SystemExit: 0"):
        backend.run(raises, SystemExit(0), *culprits)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_function_that_cannot_travel_is_an_error(backend):
    with pytest.raises(TypeError, match="top level of a module"):
        backend.run(lambda rank: rank)


# --- without other replicas ---------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_processes_of_another_launcher_do_not_each_train_alone(name, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setenv(name, "16")
    refused = f"{name}=16 says that .* Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PO"
    for start in (
        xla_replica.current,
        lambda: xla_replica.launch(raises, (1, 2), device="cpu"),
        lambda: xla_replica.launch(raises, (1, 2), num_replicas=2, device="cpu"),
    ):
        with pytest.raises(ReplicaError, match=refused):
            start()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert xla_replica.current().num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ReplicaError, match="init_process_group"):
        xla_replica.current()
