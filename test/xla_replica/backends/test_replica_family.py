"""All replica backends behave alike, also one from outside the package."""

import contextlib
import threading

import pytest
import torch
from support.documents import block
from support.xla_replica import replicas
from support.xla_replica.replicas import SEVERAL_REPLICAS, TPU_LIKE, Backend, row
from torch import nn
from torch.utils.data import DataLoader

import xla_replica
from xla_replica import ReplicaError

BACKENDS = [*replicas.BACKENDS, replicas.SLICES, TPU_LIKE, replicas.FOUR_TPU_LIKE]
KINDS = [((2, 3), torch.float32), ((4,), torch.float64), ((), torch.int64),
         ((0,), torch.float32), ((2,), torch.bfloat16)]  # fmt: skip


def gives(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    found = xla_replica.current().fetch(tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def every_collective(rank: int, place: str = "") -> None:
    replica = xla_replica.current()
    n, device = replica.num_replicas, replica.device
    assert (replica.rank, replica.is_primary) == (rank, rank == 0)
    assert f"replica {rank} of {n} on {place}" in str(replica)
    number = replica.scalar(rank + 1)
    value = number.reshape(()).clone()
    sums = [torch.ones(s, dtype=d, device=device) * value.to(d) for s, d in KINDS]
    image = torch.ones(1, 2, 2, 3, device=device)
    sums.append(image.to(memory_format=torch.channels_last) * value)
    sums.append(torch.ones(3, 2, device=device).t() * value)  # not contiguous
    replica.sync()
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in sums]
    replica.all_reduce_(sums)
    # They stay where others may have views of them.
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in sums] == places
    gives(sums, [torch.full(t.shape, n * (n + 1) / 2, dtype=t.dtype) for t in sums])
    nan = torch.full((2,), float("nan")).to(device)
    sevens = torch.where(number == n, 7.0 * torch.ones_like(nan), nan)
    sent = [sevens, number == n, (number * 10).to(torch.int64), value]
    replica.broadcast_(sent, source=n - 1)  # takes the source and nothing else
    last = [torch.tensor([True]), torch.tensor([10 * n]), torch.tensor(float(n))]
    gives(sent, [torch.tensor([7.0, 7.0]), *last])
    gathered = replica.all_gather(number.reshape(1, 1))
    gives([gathered], [torch.arange(1.0, n + 1).reshape(n, 1, 1)])
    receivers = torch.arange(n, device=device)
    parts = torch.stack([(number - 1).expand(n), receivers.float()], dim=1)
    for_this = torch.tensor([[[sender], [rank]] for sender in range(n)])
    for dtype in (torch.float64, torch.bfloat16):
        received = replica.all_to_all(parts.unsqueeze(2).to(dtype))
        gives([received], [for_this.to(dtype)])
    replica.barrier()
    # Short objects need one round; one that does not fit into it needs two.
    texts = [{"rank": r, "text": "ä" * r * 700} for r in range(n)]
    assert replica.all_gather_object(texts[rank]) == texts
    replica.check_agreement("the seed", 3, "")
    says = (
        "^replicas disagree about the width: replica 0 has 0, replica 1 has 1, and "
        rf"{n - 1} of {n} differ from replica 0 \(rank "
        rf"{', '.join(map(str, range(1, n)))}\)\. Build alike\.$"
    )
    differ = pytest.raises(ReplicaError, match=says)
    with differ if n > 1 else contextlib.nullcontext() as caught:
        replica.check_agreement("the width", min(rank, 1), "Build alike.")
    assert n == 1 or caught.value.rank == 1
    own = [number, torch.ones(1)]  # an optimizer may count its steps on the host
    assert not {t.data_ptr() for t in own} & {t.data_ptr() for t in replica.fetch(own)}
    assert replica.fetch([]) == []


def every_verb(rank: int) -> list[float]:
    """Asserts what each verb does; returns what is drawn after a seed."""
    every_collective(rank)
    replica = xla_replica.current()
    state = torch.random.get_rng_state()
    with replica.seeded(3):
        seeded = torch.rand(2).tolist()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert replica.all_gather_object(seeded) == [seeded] * replica.num_replicas
    replica.seed(0)
    models = []
    for drawn in (rank, 0):  # tied, and of other weights on every replica
        with replica.seeded(drawn):
            models.append(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        models[-1][2].weight = models[-1][0].weight
    model, expected = models
    assert replica.setup(model) is model
    assert model[2].weight is model[0].weight
    gives([*model.parameters()], [*expected.parameters()])
    return seeded


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_verb_does_what_it_should_on_every_replica(backend):
    with xla_replica.seeded(3):
        expected = torch.rand(2).tolist()
    assert backend.run(every_verb) == [expected] * backend.num_replicas


class Faulty:
    """A dataset without its last sample."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return {n: torch.tensor([n]) for n in range(5)}[index]


def the_loader_raises_what_the_dataset_raises() -> None:
    replica = xla_replica.current()
    loader = replica.loader(DataLoader(Faulty(), batch_size=2))
    for _ in range(2):  # breaking out leaves the loader usable
        batches = iter(loader)
        batch = next(batches)
        assert batch.device.type == replica.device.type
        assert replica.fetch([batch])[0].flatten().tolist() == [0, 1]
    assert len(next(batches)) == 2
    with pytest.raises(KeyError, match="5"):
        next(batches)


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
    """But those that exit well have left their peers."""
    with pytest.raises(SystemExit) as caught:
        backend.run(raises, SystemExit(21), 1)
    assert caught.value.code == 21
    assert "replica 1 ended the job by sys.exit(21)" in caplog.text
    for culprits in ([1], [0, 1, 2]):
        with pytest.raises(ReplicaError, match=f"replica {culprits} raised SystemExit"):
            backend.run(raises, SystemExit(0), *culprits)


@pytest.mark.parametrize("error", [SystemExit(21), SystemExit(0), KeyError("a name")])
def test_a_replica_in_this_process_ends_as_it_would_without_launch(error):
    with pytest.raises(type(error)) as caught:
        Backend("cpu", 1).run(raises, error, 0)
    assert caught.value is error


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_function_that_cannot_travel_is_an_error(backend):
    with pytest.raises(TypeError, match="top level of a module"):
        backend.run(lambda rank: rank)


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_processes_of_another_launcher_do_not_each_train_alone(name, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setenv(name, "16")
    refused = f"{name}=16 says that .* RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    with pytest.raises(ReplicaError, match=refused):
        xla_replica.current()
    for number in (None, 2):
        with pytest.raises(ReplicaError, match=refused):
            xla_replica.launch(raises, (1, 2), number, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert xla_replica.current().num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ReplicaError, match="init_process_group"):
        xla_replica.current()


# --- a backend from outside the package ---------------------------------------------


@pytest.fixture
def threads():
    """The names of the page's backend, whose replicas are threads."""
    before, names = dict(xla_replica.DEVICES), {}
    exec(block("docs/extending.md", "python", "ThreadReplica"), names)
    yield names
    xla_replica.DEVICES.clear()
    xla_replica.DEVICES.update(before)


def test_all_collectives_follow_from_all_gather(threads):
    every = every_collective, ("cpu (a thread)",)
    assert xla_replica.launch(*every, 3, "threads") == [None] * 3


def test_an_all_gather_without_the_dimension_of_replicas_is_an_error(threads):
    """Sums and broadcasts of what it returns have the right shape and other numbers."""

    class WithoutReplicas(threads["ThreadReplica"]):
        def all_gather(self, tensor):
            return super().all_gather(tensor).flatten(0, 1)

    tensor = torch.ones(2, 3)
    replica = WithoutReplicas(0, [None, tensor], threading.Barrier(1))
    says = (
        r"WithoutReplicas\.all_gather must return a tensor of shape \(num_replicas, "
        r"\*tensor\.shape\), here \(2, 2, 3\), got one of shape \(4, 3\)"
    )
    for collective, *arguments in (
        (replica.all_gather, tensor), (replica.all_reduce_, [tensor]),
        (replica.broadcast_, [tensor]), (replica.all_to_all, tensor),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            collective(*arguments)


def test_a_backend_from_outside_is_used_only_if_it_is_asked_for(threads):
    assert "threads" in xla_replica.DEVICES
    [place] = xla_replica.launch(lambda rank: str(xla_replica.current()), device="cpu")
    assert "launched alone" in place
    assert xla_replica.default_num_replicas("threads", on_cpu=7) == 7


def test_a_backend_without_launch_is_found_but_cannot_be_launched(threads):
    local = xla_replica.LocalReplica("cpu", "found by a test")
    xla_replica.register_backend("found", lambda: "a test", lambda reason: local)
    assert xla_replica.current() is local
    with pytest.raises(ValueError, match=r"device must be one of .* got 'found'"):
        xla_replica.launch(every_collective, device="found")


def test_a_kind_of_device_has_the_traits_that_were_registered(monkeypatch):
    monkeypatch.setattr("xla_replica.device.device_traits._TRAITS", {})
    meta = torch.ones(1, device="meta")
    assert xla_replica.traits(meta) == xla_replica.DeviceTraits()
    xla_replica.register_device("meta", xla_replica.DeviceTraits(is_lazy=True))
    for each in (meta, meta.device):
        assert xla_replica.traits(each).is_lazy
    assert xla_replica.LocalReplica("meta").is_lazy
