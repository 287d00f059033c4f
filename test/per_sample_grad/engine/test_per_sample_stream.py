"""Answers during the backward pass are the same and need the memory of training."""

import copy
import functools
import gc
import math

import pytest
import support.per_sample_grad.models as models
import torch
from support.per_sample_grad import captured, compared, fold, norms_of, rules_kept
from support.per_sample_grad.agreement import agree, answers, assert_same_grads
from support.per_sample_grad.models import BY_NAME, CASES, Apply, WithParameter, twice
from support.xla_replica.replicas import of_torch_alone
from torch import nn

import per_sample_grad as psg
import xla_replica
from tools.peak_memory import peak_memory
from xla_replica.common.trees import tensors_in

each_case = pytest.mark.parametrize("case", [*CASES, *models.BY_OPERATIONS], ids=str)


@each_case
def test_every_answer_of_one_pass_is_that_of_the_factors(case):
    model, inputs = case.make(torch.float64)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    half = sum(p.numel() for p in trained.values()) // 2
    projection = psg.Projection(trained, max(len(trained), half))

    def answers(factors: psg.Factors):
        return (
            [factors.norms(squared=True), factors.gram()],
            factors.dot({name: torch.cos(trained[name]) for name in factors.shapes}),
            factors.weighted_sum(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)),
            factors.materialize(),
            factors.project(projection),
        )

    recorded, losses = captured(model, case.loss, *inputs, **case.options)
    streamed = recorded.stream(losses, answers)
    recorded, losses = captured(model, case.loss, *inputs, **case.options)
    torch.testing.assert_close(streamed, answers(recorded.backward(losses)))


def deep_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        *(layer for _ in range(4) for layer in (
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


DEEP = {
    "tokens": (lambda: nn.Sequential(*(
        layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))),
        (32, 128, 64)),
    "images": (deep_cnn, (16, 3, 24, 24)),
    "flat": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in "abcd")), (64, 512)),
}  # fmt: skip


def peak_of_training(model: nn.Module, x: torch.Tensor) -> int:
    """Returns what a step takes, the gradients included."""
    for _ in range(2):
        model.zero_grad()
        peak = peak_memory(lambda: fold(model, x).sum().backward())
    model.zero_grad()
    return peak


@of_torch_alone
@pytest.mark.parametrize("name", DEEP)
def test_norms_and_gram_need_the_memory_of_training(name):
    build, shape = DEEP[name]
    model, x = build(), torch.randn(shape)
    training = peak_of_training(model, x)
    for answer in (psg.per_sample_grad_norms, psg.per_sample_gram):
        step = functools.partial(answer, model, fold, (x,))
        step()  # compared with autograd
        assert peak_memory(step) <= 1.1 * training
    kept = peak_memory(lambda: psg.per_sample_factors(model, fold, (x,)).norms())
    if name == "tokens":  # streaming helps where factors are larger than activations
        assert kept > 1.1 * training


@of_torch_alone
def test_gradients_are_made_when_the_activations_have_gone():
    """The head's gradients, the largest, would be kept during the whole pass."""
    model = nn.Sequential(deep_cnn(), nn.Linear(16, 512), nn.Linear(512, 100))
    x = torch.randn(32, 3, 24, 24)
    training = peak_of_training(model, x)
    step = functools.partial(psg.per_sample_grads, model, fold, (x,))
    assert sum(grad.nbytes for grad in step().values()) > 0.4 * training
    assert peak_memory(step) <= 1.1 * training


@of_torch_alone
@pytest.mark.parametrize("method", ["factored", "materialized"])
@pytest.mark.parametrize(("build", "shape"), [
    (lambda: nn.Conv2d(3, 8, 5, padding=2), (8, 3, 8, 8)),
    (lambda: nn.Conv2d(16, 8, 3, padding=1), (8, 16, 8, 8)),  # is fast
    (lambda: nn.Linear(64, 96), (8, 48, 64)), (lambda: nn.Embedding(50, 64), (16, 48)),
    (twice(lambda: nn.Linear(64, 64)), (12, 48, 64)),
])  # fmt: skip
def test_temporaries_fit_the_budget(build, shape, method):
    model, x, budget = build(), torch.rand(shape), 2**17
    x = (50 * x).long() if isinstance(model, nn.Embedding) else x
    options = {"params": lambda n, _: n.endswith("weight"), "method": method}
    factors = psg.per_sample_factors(model, fold, (x,), budget=budget, **options)
    ((weight, shape),) = factors.shapes.items()
    columns = math.prod(shape[1:])
    for quantity, answer in (("norms", factors.norms), ("gram", factors.gram)):
        choice = factors._choice(quantity, weight, factors)
        assert choice.form == method
        assert choice.samples < len(factors) or choice.columns < columns
        answer()
        # Beside the budget: an answer, and a matrix product's copies of its operands.
        assert peak_memory(answer) <= 1.5 * budget + 2**14


class Gate(WithParameter):
    """A module whose second input takes no gradient, although it has a graph."""


@rules_kept()
def test_an_input_that_takes_no_gradient_hides_no_call():
    """The graph says which calls are lowest, not the modules' inputs."""

    @psg.register_rule(Gate)
    def gate(call: psg.Call, grad: torch.Tensor):
        x, y = call.args
        return {"p": psg.Dense(grad * x * y)}

    parts = {"gate": Gate(lambda m, x, y: m.p * x * y.detach(), 3)}
    model = Apply(lambda m, x: m.gate(x, m.below(x)), **parts, below=nn.Linear(3, 3))
    x = torch.randn(3, 3)
    norms = psg.per_sample_grad_norms(model, fold, (x,))
    torch.testing.assert_close(norms, norms_of(fold(model, x), model.parameters()))


def test_a_convolution_is_unfolded_when_it_is_asked():
    model = nn.Conv2d(4, 8, 5, padding=2)
    x = torch.randn(8, 4, 20, 20)
    options = {"params": ["weight"], "check": "never"}
    recorded, losses = captured(model, fold, x, **options)
    factors: list[psg.Factors] = []
    peak = peak_memory(lambda: factors.append(recorded.backward(losses)))
    assert peak < 25 * x.nbytes / 4  # a quarter of all windows
    (windows,) = factors[0].contributions("weight")
    expected = nn.functional.unfold(x, 5, padding=2).transpose(1, 2)
    torch.testing.assert_close(windows.outer(2, 4).right[:, 0], expected[2:4])


ANSWERS = {
    "backward": lambda recorded, losses: recorded.backward(losses),
    "stream": lambda recorded, losses: recorded.stream(losses, psg.Factors.materialize),
    "norms": lambda recorded, losses: recorded.norms(losses),
    "project": lambda recorded, losses: recorded.project(
        losses, psg.Projection(recorded.params, 6), accumulate="mean"
    ),
}


@of_torch_alone
@pytest.mark.parametrize("answer", ANSWERS)
def test_nothing_is_kept_by_a_cycle(answer):
    """On a lazy device every tensor that is alive is an output of the program."""
    model, x = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten()), torch.randn(4, 3, 9)

    def alive_after_a_step() -> int:
        ANSWERS[answer](*captured(model, fold, x))
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    alive_after_a_step()
    gc.collect()
    gc.disable()
    try:
        assert alive_after_a_step() >= alive_after_a_step()
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("fallback", ["error", "loop"])
def test_a_capture_names_what_the_losses_do_not_depend_on(answer, fallback):
    model, inputs = BY_NAME["unused-part"].make(torch.float64)
    # The first one is compared, and takes what rules return.
    for _ in range(2):
        recorded, losses = captured(model, fold, *inputs, fallback=fallback)
        assert not recorded.unused
        ANSWERS[answer](recorded, losses)
        assert recorded.unused == {"unused.weight", "unused.bias"}
    # Small gradients wait until the pass has ended, and are used.
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU(), nn.LayerNorm(2))
    recorded, losses = captured(model, fold, torch.ones(4, 3), fallback=fallback)
    ANSWERS[answer](recorded, losses)
    assert not recorded.unused


# --- .grad of the same pass, also of no samples ---------------------------------------


@pytest.mark.parametrize(("accumulate", "options"), [
    ("mean", {"scale": 8.0}), ("sum", {"check": "always", "fallback": "loop"}),
])  # fmt: skip
@each_case
def test_grad_is_of_an_ordinary_pass_and_answers_of_losses(case, accumulate, options):
    """To the bit, and answers are not of the mean's smaller or the scaled gradients."""
    model, inputs = case.make(torch.float64)
    plain = copy.deepcopy(model)
    for answer in ("norms", "backward", "norms", "backward"):  # each adds to the last
        total = getattr(case.loss(plain, *inputs), accumulate)()
        (options.get("scale", 1) * total).backward()
        given = {**options, **case.options}
        recorded, losses = captured(model, case.loss, *inputs, **given)
        factors = getattr(recorded, answer)(losses, accumulate=accumulate)
        assert_same_grads(model, plain)
    agree(factors, case.oracle(model, inputs), 1e-10)


def test_a_loop_accumulates_once_and_for_parameters_that_are_not_captured():
    model, inputs = BY_NAME["turned"].make(torch.float32)
    plain = copy.deepcopy(model)
    for _ in range(2):
        fold(plain, *inputs).mean().backward()
        options = {"params": ["p"], "fallback": "loop"}
        recorded, losses = captured(model, fold, *inputs, **options)
        recorded.norms(losses, accumulate="mean")
        assert_same_grads(model, plain)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def test_hooks_of_the_ordinary_pass_run():
    model, x, ran = network(), torch.randn(4, 5), []
    model[0].weight.register_hook(xla_replica.AccumulationHook(torch.zeros_like))
    model[2].bias.register_post_accumulate_grad_hook(lambda p: ran.append(p.shape))
    recorded, losses = captured(model, fold, x)
    norms = recorded.backward(losses, accumulate="mean").norms_by_parameter()
    assert (model[0].weight.grad == 0).all()
    assert (norms["0.weight"] > 0).all()
    assert ran == [(3,)]


# --- batches of no samples ---------------------------------------------------------

NAMES = ["cnn", "tied-embedding-head", "batch-norm-2d", "transformer", "unused-part"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_answers_and_gradients_are_of_no_samples(name, dtype):
    model, some = BY_NAME[name].make(dtype, 2)
    params, plain = dict(model.named_parameters()), copy.deepcopy(model)
    wide = torch.promote_types(dtype, torch.float32)
    call = (model, fold, tuple(x[:0] for x in some))
    recorded, losses = captured(model, fold, *call[2])
    found = recorded.backward(losses, accumulate="mean")
    assert not recorded.compared
    fold(plain, *call[2]).mean().backward()
    assert_same_grads(model, plain)
    truth = {n: torch.zeros(0, *p.shape).double() for n, p in params.items()}
    for each in (found, psg.per_sample_factors(*call, fallback="loop")):
        agree(each, truth, 0.0)
    rows = [
        psg.per_sample_grad_norms(*call), psg.per_sample_gram(*call),
        *psg.per_sample_grads(*call).values(),
        *found.project(psg.Projection(params, 16)).values(),
    ]  # fmt: skip
    assert {len(found), *map(len, rows)} == {0}
    rows += tensors_in(answers(found, torch.ones(2, 0), params))
    assert {each.dtype for each in rows} == {wide}
    other = psg.per_sample_factors(model, fold, some)
    assert found.cross_gram(other).shape == (0, 2)
    assert other.cross_gram(found).shape == (2, 0)


def test_the_next_batch_is_compared_as_ever():
    model = network()
    found = [compared(model, fold, torch.randn(batch, 5)) for batch in (0, 5, 0, 5)]
    assert found == [False, True, False, False]


@pytest.mark.parametrize("options", [{}, {"score": "el2n"}, {"labels": "expected"}])
def test_an_empty_pool_has_no_scores(options, tmp_path):
    pool = torch.utils.data.TensorDataset(torch.randn(0, 4), torch.zeros(0).long())
    model = nn.Linear(4, 3)
    for folder in (None, tmp_path / "scores", tmp_path / "scores"):
        scores = psg.score_pool(model, pool, folder=folder, **options)
        assert len(scores) == 0
        assert len(scores.top(0)) == 0
