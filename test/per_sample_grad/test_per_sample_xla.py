"""Per-sample gradients on lazy tensors are right, compiled once and fetched once."""

import copy

import pytest
import torch
from support.per_sample_grad import HALF, Case, captured, compared, error, flat, fold
from support.per_sample_grad.agreement import agree
from support.per_sample_grad.models import BY_NAME, CASES, share
from support.xla_replica.replicas import COMPILED, HAS_XLA, IS_COMPILED, needs_xla
from torch import nn

import per_sample_grad as psg
import xla_replica

pytestmark = IS_COMPILED

# What the rest does on the host does not depend on the device: slow runs have all.
SOME = [
    "conv2d-groups", "conv2d-same-circular", "transposed2d-groups", "embedding-padding",
    "batch-norm-2d", "layer-norm", "attention", "positions", "masked",
]  # fmt: skip
# torch.utils.checkpoint knows no XLA device.
ALL = [case.name for case in CASES if case.name != "checkpointed"]
LONG = 900.0


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns the model on the device, with the ties that ``.to`` breaks."""
    before = [*model.named_parameters(remove_duplicate=False)]
    model = model.to(device)
    for name, param in before:
        share(model, name, next(first for first, each in before if each is param))
    return model


def wrong_answers(rank: int, names: list[str]) -> list[str]:
    """Returns what went wrong with the cases of these names."""
    replica = xla_replica.current()
    wrong = []
    for case in map(BY_NAME.__getitem__, names):
        model, inputs = case.make(torch.float32)
        truth = case.oracle(model, inputs)  # before `.to` unties what is tied
        moved(model, replica.device)
        # TorchTPU has a kernel for attention, which only TPUs run.
        math_alone = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        try:
            with xla_replica.count() as counts, math_alone:
                factors = case.factors(model, replica.send(inputs))
                replica.wait()
                agree(factors, truth, 2e-5, replica.to_host)
            assert not counts.fallbacks
        except AssertionError as error:
            wrong.append(f"{case.name}: {error}")
    return wrong


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_answer_equals_the_loop(names):
    assert COMPILED.run(wrong_answers, names, timeout=LONG) == [[]]


def compared_twice(rank: int) -> list[bool]:
    device = xla_replica.current().device
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Conv2d(2, 1, 2))
    x = torch.randn(3, 1, 8, 8).to(device)
    return [compared(model.to(device), fold, x) for _ in range(2)]


@needs_xla
def test_what_is_proven_once_is_not_compared_again_below_a_maximum():
    """XLA's backend has a pooling of its own, which keeps samples apart, too."""
    assert COMPILED.run(compared_twice) == [[True, False]]


def all_answers(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    factors = psg.per_sample_factors(model, fold, inputs)
    direction = factors.weighted_sum(torch.ones_like(factors.losses))
    return [factors.norms(), factors.gram(), factors.dot(direction)]


def streamed_norms(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [psg.per_sample_grad_norms(model, fold, inputs)]


def counted(rank: int, name: str) -> list[list[xla_replica.Counts]]:
    """Returns the counts of a first step, of a second one, and of 20 more."""
    replica = xla_replica.current()
    truth, last = BY_NAME[name].make(torch.float32, 3)
    model = copy.deepcopy(truth).to(replica.device)
    first, *rest = (BY_NAME[name].make(torch.float32, 4, n)[1] for n in range(20))
    # As many samples as ever, filled with copies of the last one.
    filled = [x[[0, 1, 2, 2]] for x in last]
    every = []
    for ask in (all_answers, streamed_norms):
        counts = []
        for batches in ([first], [first], [*rest, filled]):
            with xla_replica.count() as count:
                found = [replica.fetch(ask(model, *replica.send(x))) for x in batches]
            counts.append(count)
        every.append(counts)
        for batch, value in ((rest[-1], found[-2][0]), (last, found[-1][0][:3])):
            expected = streamed_norms(truth, *batch)[0]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    if HAS_XLA:
        import torch_xla.backends

        # Training beside the Gram matrix is what it was.
        assert torch_xla.backends.get_mat_mul_precision() == "default"
    return every


@pytest.mark.parametrize("name", [
    "inplace-relu-tokens",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn", "transformer")),
])  # fmt: skip
def test_new_data_compile_one_program_and_answers_take_one_transfer(name):
    """The same holds in a stream, and a short last batch adds none."""
    (found,) = COMPILED.run(counted, name, timeout=LONG)
    assert all(later.compilations == 0 for *_, later in found)
    if not HAS_XLA:
        return
    for first, second, later in found:
        # One program for all steps and, where the first is compared, another one that
        # ends with the comparison's read-back.
        assert first.compilations + second.compilations <= 2
        assert second.compilations <= 1
        assert (second.transfers, later.transfers) == (1, 20)
        assert not first.fallbacks
        assert not later.fallbacks
    # The first of all is compared; the structure is known by then.
    assert [first.transfers for first, *_ in found] == [2, 1]


def check_accumulation(replica: xla_replica.Replica) -> None:
    """Checks gradients that a capture's own pass accumulates."""
    with replica.seeded(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        inputs = (torch.randn(4, 3),)
    there = moved(copy.deepcopy(model), replica.device)
    fold(model, *inputs).mean().backward()
    norms = psg.per_sample_grad_norms(model, fold, inputs)
    for _ in range(3):
        there.zero_grad(set_to_none=False)
        with xla_replica.count(replica) as count:
            recorded, losses = captured(there, fold, *replica.send(inputs))
            answers = [recorded.backward(losses, accumulate="mean").norms()]
            found = replica.fetch([*answers, *(p.grad for p in there.parameters())])
        truth = [norms, *(p.grad for p in model.parameters())]
        for one, other in zip(found, truth, strict=True):
            assert error(one, other.double()) <= 2e-5
    assert (count.compilations, count.transfers) == (0, int(HAS_XLA))


def other_things(rank: int) -> None:
    """Checks reports, refusals, half precision and projections of tiny models."""
    replica = xla_replica.current()

    def made(case: Case, dtype: torch.dtype = torch.float32):
        model, inputs = case.make(dtype)
        return model, inputs, moved(copy.deepcopy(model), replica.device)

    def off(case: Case, dtype: torch.dtype = torch.float32, **options) -> float:
        model, inputs, there = made(case, dtype)
        truth = case.norms(model, inputs)
        norms = psg.per_sample_grad_norms(there, fold, replica.send(inputs), **options)
        return error(replica.fetch([norms])[0], truth)

    for name in ("turned", "coupled-square", "batch-mean"):
        _, inputs, model = made(BY_NAME[name])
        with pytest.raises(psg.PerSampleError):
            psg.per_sample_grad_norms(model, fold, replica.send(inputs))
    assert off(BY_NAME["turned"], fallback="loop") <= 2e-5
    for dtype, tolerance in HALF.items():
        assert off(BY_NAME["linear-3d"], dtype) <= tolerance, dtype
    model, inputs, there = made(BY_NAME["linear-3d"])
    x, same = replica.send((*inputs, torch.arange(len(inputs[0]))))

    def reordered(model: nn.Module, order: torch.Tensor) -> torch.Tensor:
        return fold(model, x)[order]

    psg.per_sample_grad_norms(there, reordered, (same,))
    with pytest.raises(psg.CouplingError):
        psg.per_sample_grad_norms(there, reordered, (same.roll(1),))
    assert psg.coverage(there, fold, replica.send(inputs)).complete
    factors = psg.per_sample_factors(there, fold, replica.send(inputs))
    projection = psg.Projection(dict(there.named_parameters()), 5, seed=1)
    own = psg.per_sample_factors(model, fold, inputs).project(projection)
    projected = replica.fetch([*factors.project(projection).values()])
    assert error(flat(projected), flat(own).double()) <= 2e-5
    check_accumulation(replica)


def test_reports_refusals_half_precision_and_projections():
    COMPILED.run(other_things, timeout=LONG)


def cancelling(rank: int) -> None:
    """Checks norms and Gram matrices, and that the first step compiles the others'."""
    replica = xla_replica.current()
    with replica.seeded(0):
        model = nn.Linear(64, 64)
        draws = [1 + 1e-3 * torch.randn(3, 16, 64) for _ in range(4)]
    wide = copy.deepcopy(model).double()
    model.to(replica.device)

    def deviations(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return (100 * (out - out.mean(1, keepdim=True))).square().sum((1, 2))

    for number, x in enumerate(draws):
        truth = flat(Case("", None, (), loss=deviations).oracle(wide, (x,)))
        with xla_replica.count() as counts:
            recorded, losses = captured(model, deviations, *replica.send((x,)))
            both = recorded.stream(losses, lambda f: [f.norms(squared=True), f.gram()])
            norms, gram = replica.fetch(both)
        assert error(norms, truth.square().sum(1)) < 1e-3
        assert error(gram, truth @ truth.T) < 1e-3
        assert number == 0 or counts.compilations == 0


def test_positions_that_cancel_are_noticed_by_the_first_comparison():
    """The first step's answer is right, and the second compiles what is the same."""
    COMPILED.run(cancelling, timeout=LONG)
