"""What would be wrong is an error that says why, or exact by a loop."""

import re

import pytest
import support.per_sample_grad.models as models
import torch
from support.per_sample_grad import Case, captured, error, fold, norms_of, rules_kept
from support.per_sample_grad.agreement import agree, agree_with_loop
from support.per_sample_grad.models import Apply
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import per_sample_grad as psg
from per_sample_grad.layers import registry


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("case", models.UNSEEN, ids=str)
def test_what_no_rule_accounts_for_is_an_error_or_exact_by_the_loop(case, batch):
    """The loop over one sample is an ordinary pass, and needs no permission."""
    model, inputs = case.make(torch.float64, batch)
    if batch == 1:
        agree_with_loop(case, model, inputs)
    else:
        with pytest.raises(psg.CoverageError, match=r"mixes it|its (in|out)put"):
            case.factors(model, inputs)
    options = {"fallback": "loop", **case.options}
    for _ in range(2):
        agree_with_loop(case, model, inputs, **options)
    # In a stream.
    norms = psg.per_sample_grad_norms(model, case.loss, inputs, **options)
    assert error(norms, case.norms(model, inputs)) <= 1e-10


def all_outputs(m: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns what a recurrent layer returns, between other layers, ``(B, *)``."""
    x = torch.tanh(m.before(x))
    out, states = m.inner(x.transpose(0, 1))
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    _, again = m.inner(packed, states)
    states = [*states, *again] if isinstance(states, tuple) else [states, again]
    parts = [m.after(out), *states]
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(("build", "width"), [
    # torch_xla puts another GRU in place of `nn.GRU`, which needs an XLA device.
    (lambda: rnn.GRU(3, 4, bias=False), 4),
    (lambda: rnn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), 4),
])  # fmt: skip
def test_recurrent_layers_are_refused_or_exact_by_the_loop(build, width):
    """Sequences and last states count, packed and not."""
    around = {"before": nn.Linear(3, 3), "after": nn.Linear(width, 2)}
    case = Case("", lambda: Apply(all_outputs, inner=build(), **around), lambda batch: (
        torch.randn(batch, 5, 3), torch.tensor([2, 5, 1])))  # fmt: skip
    model, inputs = case.make(torch.float64)
    told = r"(?s)inner\.weight_ih_l0.*no rule is registered for (GRU|LSTM)"
    # What is cheapest is recommended first.
    with pytest.raises(psg.CoverageError, match=f'{told}.*register_rule.*="loop"'):
        psg.per_sample_grad_norms(model, fold, inputs)
    for _ in range(2):
        agree_with_loop(case, model, inputs, fallback="loop")


@pytest.mark.parametrize("rows", [3, 6])
def test_a_wrong_rule_is_replaced_by_the_fallback_and_remembered(rows):
    """As many positions as samples, or a multiple, look like rows of samples."""
    case = Case("", lambda: models.positions(nn.Linear(3, 3), rows), (rows, 3))
    model, inputs = case.make(torch.float64)
    truth = case.oracle(model, inputs)
    for is_first in (True, False):
        recorded, losses = captured(model, fold, *inputs, fallback="loop")
        agree(recorded.backward(losses), truth, 1e-10)
        assert recorded.compared == is_first
    norms = psg.per_sample_grad_norms(model, fold, inputs, fallback="loop")
    assert error(norms, case.norms(model, inputs)) <= 1e-10
    told = r"(?s)embed\.weight: off by.*None for a module that returns the"
    with pytest.raises(psg.CouplingError, match=told):
        psg.per_sample_factors(model, fold, inputs)
    agree_with_loop(case, model, inputs, batch_dim={"embed": None, "deep": None})
    assert not psg.coverage(model, fold, inputs).parameters["embed.weight"].correct


@pytest.mark.parametrize("case", models.COUPLED, ids=lambda case: case.name)
@pytest.mark.parametrize("batch", [2, 3, 12])
@rules_kept()
def test_what_is_attributed_wrongly_is_an_error(case, batch):
    psg.register_rule(models.Doubling)(psg.layers.linear.linear)
    if case.name.endswith("square"):
        batch = 3
    model, inputs = case.make(torch.float32, batch=batch)
    with pytest.raises(psg.CouplingError, match="off by"):
        case.factors(model, inputs)


@pytest.mark.parametrize("is_tracked", [True, False])
def test_batch_statistics_are_refused_before_anything_happens(is_tracked):
    norm = nn.BatchNorm1d(3, track_running_stats=is_tracked).train(is_tracked)
    model = nn.Sequential(nn.Linear(3, 3), norm)
    with pytest.raises(psg.CouplingError, match="Freeze the statistics"):
        captured(model, lambda m: pytest.fail("not reached"))
    assert not model[0]._forward_hooks


@pytest.mark.parametrize(("module", "change"), [
    (nn.Linear(4, 2), lambda module, x: x.add_(1)),
    (nn.BatchNorm1d(5).eval(), lambda module, x: module.running_mean.add_(1)),
])  # fmt: skip
def test_a_tensor_that_a_rule_reads_later_must_not_have_changed(module, change):
    recorded, losses = captured(module, fold, x := torch.randn(3, 5, 4))
    with torch.no_grad():
        change(module, x)
    told = "or a tensor of it that its rule reads, was changed in place"
    with pytest.raises(psg.PerSampleError, match=told):
        recorded.norms(losses)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_attention_needs_no_rule_dropout_and_later_changes_included(batch_dim):
    """Nor does it matter which dimension counts its samples."""
    options = {"add_bias_kv": True, "batch_first": batch_dim == 0}
    module = nn.MultiheadAttention(4, 2, 0.5, **options)

    def losses_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, batch_dim)
        return module(x, x.sin(), x)[0].square().sum((1 - batch_dim, 2))

    for _ in range(2):
        recorded, losses = captured(module, losses_of, torch.randn(3, 5, 4))
        truth = norms_of(losses, module.parameters())
        with torch.no_grad():
            module.in_proj_weight.mul_(1.5)
        torch.testing.assert_close(recorded.norms(losses), truth)


def test_bags_whose_last_offset_is_not_the_end_are_refused():
    """Beyond it torch's own gradient may be of memory that nobody has set."""
    bags = nn.EmbeddingBag(20, 3, mode="sum", include_last_offset=True)

    def norms(*offsets: int) -> torch.Tensor:
        given = torch.randint(0, 20, (12,)), torch.tensor(offsets)
        recorded, losses = captured(bags, lambda m, *x: m(*x).sum(1), *given)
        return recorded.norms(losses)

    assert norms(0, 3, 6, 9, 12).shape == (4,)
    with pytest.raises(psg.CoverageError, match="its last offset is 11 and its"):
        norms(0, 1, 5, 9, 11)


def linear(answer="backward", *args, loss=fold, accumulate=None, **options) -> None:
    """Asks a capture of a Linear with these options for an answer."""
    recorded, losses = captured(nn.Linear(3, 2), loss, torch.randn(4, 3), **options)
    getattr(recorded, answer)(losses, *args, accumulate=accumulate)


LAYERS = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
FACTORS = psg.per_sample_factors(nn.Linear(3, 2), fold, (torch.ones(4, 3),))
OF_ANOTHER = psg.Projection({"weight": (3, 2), "bias": (2,)}, 5)
MANY = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))


@pytest.mark.parametrize(("call", "error", "told"), [
    (lambda: linear(loss=lambda m, x: m(x).sum()), ValueError, "reduction"),
    (lambda: linear(loss=lambda m, x: m(x)), ValueError, "one number per sample"),
    (lambda: linear(loss=lambda m, x: m(x).sum(1).detach()), ValueError, "no graph"),
    (lambda: linear(loss=lambda m, x: m(x).sum(1).long()), ValueError,
     "dtype torch.int64"),
    *((lambda option=option: linear(**{option: "no"}), ValueError,
       f"{option} must be one of .*, got 'no'")
      for option in ("fallback", "check", "method")),
    (lambda: linear(accumulate="max"), ValueError,
     "accumulate must be one of 'mean', 'sum'"),
    (lambda: linear("stream", lambda factors: "no number"), TypeError,
     "tuples, lists and dicts"),
    (lambda: psg.capture(LAYERS, ["2.weight"]), ValueError, r"allowed are 0\.weight"),
    (lambda: psg.capture(MANY, ["9.weight"]), ValueError, r"5\.bias and 6 more$"),
    (lambda: psg.capture(nn.Linear(2, 1, dtype=torch.complex64)), ValueError,
     "weight, bias are complex: leave them out"),
    (lambda: psg.per_sample_factors(nn.Embedding(5, 3, scale_grad_by_freq=True), fold,
        (torch.ones(3, 4).long(),)), psg.CoverageError,
     "counts over the whole batch"),
    (lambda: psg.coverage(nn.Linear(3, 2), fold, (torch.randn(0, 3),)), ValueError,
     "has no samples; give one"),
    (lambda: FACTORS.dot({"weight": torch.zeros(2, 3)}), ValueError,
     "bias must be both given and captured"),
    (lambda: FACTORS.dot({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}),
     ValueError, "parameters' shapes"),
    (lambda: FACTORS.weighted_sum(torch.zeros(5)), ValueError, "4 samples"),
    (lambda: FACTORS.cross_gram(psg.per_sample_factors(
        LAYERS, fold, (torch.ones(4, 3),))), ValueError, "different parameters"),
    *((call, ValueError, r"weight of shape \(2, 3\) is captured.*\(3,")
      for call in (lambda: linear("project", OF_ANOTHER),
                   lambda: FACTORS.project(OF_ANOTHER))),
    (lambda: psg.per_sample_factors(LAYERS, lambda m, x: checkpoint(
        m[1], m[0](x), use_reentrant=True).sum(1), (torch.randn(3, 3),)),
     psg.CoverageError, "use_reentrant=False"),
])  # fmt: skip
def test_what_cannot_be_asked_is_told(call, error, told):
    with pytest.raises(error, match=told):
        call()


N, Q, P = 5, 3, 2
LEFT, RIGHT = torch.zeros(N, 1, 4, P), torch.zeros(N, 1, 4, Q)
# From what a rule of a Linear returns for its weight to what the message says of it.
WRONG: list[tuple[object, str]] = [
    (torch.zeros(N, P, Q), "a Tensor"), ([torch.zeros(N, P, Q)], "a Tensor"),
    (None, "a NoneType"),
    (psg.Dense(torch.zeros(P, Q)), r"the Dense of \(2, 3\)"),
    (psg.Dense(torch.zeros(N, P * Q)), r"the Dense of \(5, 6\)"),
    (psg.Dense(torch.zeros(4, P, Q)), r"the Dense of \(4, 2, 3\)"),
    (psg.Outer(LEFT[:, 0], RIGHT[:, 0]), r"the Outer of \(5, 4, 2\) and \(5, 4, 3\)"),
    (psg.Outer(RIGHT, LEFT), "the Outer of"),  # exchanged
    (psg.Outer(LEFT, RIGHT[:, :, 1:]), "the Outer of"),
    (psg.Outer(LEFT[1:], RIGHT[1:]), "the Outer of"),
    (psg.Lookup(torch.zeros(N).long(), torch.zeros(N, Q)),
     r"the Lookup of \(5,\) and \(5, 3\)"),
    (psg.Lookup(torch.zeros(4, 1).long(), torch.zeros(4, 1, Q)), "the Lookup of"),
    ([psg.Outer(LEFT, RIGHT), psg.Dense(LEFT)], "the Dense of"),
]  # fmt: skip


@rules_kept()
@pytest.mark.parametrize("fallback", ["error", "loop"])
@pytest.mark.parametrize(("returned", "messages"), [
    *(({"weight": answer}, [message, r"'weight' of shape \(2, 3\)"])
      for answer, message in WRONG),
    (psg.Dense(torch.zeros(N, P, Q)), ["a Dense"]),
])  # fmt: skip
def test_an_answer_of_wrong_kind_or_shape_names_its_rule(returned, messages, fallback):
    def wrong_linear(call: psg.Call, grad: torch.Tensor) -> object:
        return returned

    psg.register_rule(nn.Linear)(wrong_linear)
    model = nn.Sequential(nn.Linear(Q, P, bias=False))
    with pytest.raises(psg.PerSampleError, match=r"Linear '0'.*wrong_linear") as caught:
        psg.per_sample_grad_norms(model, fold, (torch.ones(N, Q),), fallback=fallback)
    for message in (*messages, "must return a dict"):
        assert re.search(message, str(caught.value))


@rules_kept()
def test_several_contributions_are_added():
    def halves(call: psg.Call, grad: torch.Tensor) -> dict[str, object]:
        outer = psg.Outer(grad[:, None, None] / 2, call.input[:, None, None])
        return {"weight": (outer, outer)}

    call = nn.Sequential(nn.Linear(Q, P, bias=False)), fold, (torch.randn(N, Q),)
    expected = psg.per_sample_grad_norms(*call)
    psg.register_rule(nn.Linear)(halves)
    torch.testing.assert_close(psg.per_sample_grad_norms(*call), expected)


@rules_kept()
def test_sparse_gradients_are_exact_by_the_loop():
    del registry.RULES[nn.EmbeddingBag]
    model = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 2))
    index = torch.randint(5, (3, 4))
    recorded, losses = captured(model, fold, index, fallback="loop")
    found = recorded.norms(losses)
    model[0].sparse = False
    truth = norms_of(fold(model, index), model.parameters())
    torch.testing.assert_close(found, truth)


def test_answers_about_layers_of_several_dtypes_are_of_the_widest():
    narrow = Apply(lambda m, x: m.inner(x.float()).double(), inner=nn.Linear(4, 2))
    model = nn.Sequential(nn.Linear(3, 4).double(), narrow)
    recorded, losses = captured(model, fold, torch.randn(5, 3).double())
    factors = recorded.backward(losses, retain_graph=True)
    gradients = torch.autograd.grad(losses.sum(), [*model.parameters()])
    sums = factors.weighted_sum(torch.ones(5))
    for found, truth in zip(sums.values(), gradients):
        torch.testing.assert_close(found, truth.double(), rtol=1e-5, atol=1e-6)
    dots = factors.dot({n: each.float() for n, each in sums.items()})
    torch.testing.assert_close(dots, factors.gram().sum(0), rtol=1e-5, atol=1e-6)
