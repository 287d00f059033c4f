"""What stays sparse in a training loop, what moves, when, and which batches count."""

import copy
import functools

import pytest
import torch
from support.documents import block
from support.rigl_xla import sparse
from torch import nn


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sparse.OPTIMIZERS)
def test_every_optimizer_keeps_inactive_weights_and_their_state_at_zero(
    kind, skip_step
):
    """Steps 3, 6, 9 and 12 move connections, and other weights if not skipped."""
    model, optimizer, pruner = sparse.sparse_convnet(kind, skip_step=skip_step)
    active = sparse.counts(pruner)
    assert active == [231, 820, 32]  # 1152 - floor(0.8 * 1152), ...
    for step in range(15):
        masks, before = copy.deepcopy([pruner.masks, model.state_dict()])
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        is_update = step + 1 in (3, 6, 9, 12)
        for name, mask in pruner.masks.items():  # where they stay, weights do, too
            before[name] = torch.where(mask & masks[name], before[name], 0.0)
        same = sparse.equal(model.state_dict(), before)
        assert same == (is_update and skip_step)
        assert sparse.equal(pruner.masks, masks) != is_update
        assert sparse.counts(pruner) == active
        assert sparse.inactive_are_zero(pruner)
    assert (pruner.step, pruner.rigl_steps) == (15, 4)


def after_an_update(optimizer_of, fills: bool = False, **options):
    """Yields of every layer the optimizer's state, who grew, who stayed, gradients."""
    model = sparse.convnet()
    optimizer = optimizer_of(model.parameters())
    pruner = sparse.pruned(model, optimizer, **options)
    sparse.train(model, optimizer, pruner, range(2))
    masks, twin = copy.deepcopy(pruner.masks), copy.deepcopy(model)
    states = {name: optimizer.state[model.get_parameter(name)] for name in masks}
    for name, state in states.items() if fills else ():
        for tensor in sparse.kept_of(state, masks[name]):
            tensor.fill_(1.0)  # as in a state that was loaded
    sparse.train(model, optimizer, pruner, range(2, 3))
    twin.zero_grad()
    sparse.backward(twin, 2)
    for name, new in pruner.masks.items():
        grown, kept = new & ~masks[name], new & masks[name]
        yield states[name], grown, kept, twin.get_parameter(name).grad


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sorted(set(sparse.OPTIMIZERS) - {"sgd-plain"}))
def test_a_grown_connection_begins_without_the_optimizers_past(kind, skip_step):
    options = {"skip_step": skip_step, "bound_new_steps": False, "fills": True}
    for state, grown, kept, _ in after_an_update(sparse.OPTIMIZERS[kind], **options):
        assert grown.any()
        tensors = sparse.kept_of(state, grown)
        assert tensors
        for tensor in tensors:
            assert not tensor[grown].any()
            assert tensor[kept].all()


@pytest.mark.parametrize("kind", ["adamw", "nadam"])
def test_new_connections_move_no_further_under_adam_than_nine_in_ten_others(kind):
    """Their second moments make as large a step while their gradient is that one."""
    for state, grown, kept, gradient in after_an_update(sparse.OPTIMIZERS[kind]):
        moments = state["exp_avg_sq"]
        steps = (state["exp_avg"][kept].abs() / moments[kept].sqrt()).nan_to_num()
        furthest = steps.sort(descending=True).values[max(len(steps) // 10, 1) - 1]
        expected = (gradient / furthest).square().clamp(min=moments[kept].mean())
        torch.testing.assert_close(moments[grown], expected[grown])


def test_the_rates_of_rprop_begin_at_their_initial_value():
    for state, grown, kept, _ in after_an_update(lambda p: torch.optim.Rprop(p, 0.01)):
        assert state["step_size"][grown].unique().tolist() == pytest.approx([0.01])
        assert not state["step_size"][~(grown | kept)].any()


def test_a_layer_outside_of_the_loss_keeps_its_mask():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    pruner = sparse.pruned(model, delta=1)
    masks = copy.deepcopy(pruner.masks)
    for _ in range(3):
        model.zero_grad()
        model[1](model[0](torch.randn(4, 8))).square().sum().backward()
        pruner()
    assert not torch.equal(masks["1.weight"], pruner.masks["1.weight"])
    assert torch.equal(masks["2.weight"], pruner.masks["2.weight"])


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_the_gradient_is_sparse_before_anyone_clips_it(factor):
    model, _, pruner = sparse.sparse_convnet(delta=2, grad_accumulation_n=2)
    for step in range(4):
        model.zero_grad()
        sparse.backward(model, step, factor)
        for name, mask in pruner.masks.items():
            grad = model.get_parameter(name).grad
            assert not grad[~mask].any()
            assert grad[mask].isnan().all() == (factor != 1)
        pruner()


def test_single_call_mode_needs_no_call_and_takes_closures():
    weights = []
    for with_closure in (False, True):
        model, optimizer, pruner = sparse.sparse_convnet(skip_step=False)
        for step in range(10):
            optimizer.zero_grad()
            closure = functools.partial(sparse.backward, model, step)
            if not with_closure:
                closure()
            given = (closure,) * with_closure
            assert (optimizer.step(*given) is not None) == with_closure
        assert pruner.rigl_steps == 3
        weights.append(model.state_dict())
    assert sparse.equal(*weights)


@pytest.mark.parametrize("before", [True, False])
def test_lr_schedulers_made_before_or_after(before):
    model = sparse.convnet()
    optimizer = sparse.sgd(model)
    pruner = None if before else sparse.pruned(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pruner = pruner or sparse.pruned(model, optimizer)
    step = optimizer.step
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step == step


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [
    {},
    {"grad_accumulation_n": 3},
    {"structure": "constant-fan-in"},
    {"structure": "2:4", "dense_allocation": 1, "exclude": "7"},
])  # fmt: skip
def test_one_bad_batch_leaves_masks_and_counts(bad, options):
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    masks, active = copy.deepcopy(pruner.masks), sparse.counts(pruner)
    sparse.train(model, optimizer, pruner, range(2))
    sparse.backward(model, 2, bad)
    assert not pruner()
    assert pruner.rigl_steps == 1
    assert sparse.equal(pruner.masks, masks)
    sparse.train(model, optimizer, pruner, range(3, 9))
    assert sparse.counts(pruner) == active
    assert all(not torch.equal(pruner.masks[name], masks[name]) for name in masks)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_one_bad_batch_stays_out_of_the_running_mean(bad, at):
    model, factor = sparse.convnet(), 1.0
    model[5].weight.register_hook(lambda gradient: gradient * factor)
    pruner = sparse.pruned(model, method="snfs", delta=5)
    active, optimizer = sparse.counts(pruner), pruner.optimizer
    sparse.train(model, optimizer, pruner, range(at))
    optimizer.zero_grad()
    before, factor = pruner.state_dict()["layers"], bad
    sparse.backward(model, at)  # bad in one layer: all leave the step out
    factor = 1.0
    pruner()  # the optimizer takes no step here
    for name, layer in pruner.state_dict()["layers"].items():
        past = before[name].get("gradient", torch.zeros_like(layer["gradient"]))
        assert torch.equal(layer["gradient"], past)
    sparse.train(model, optimizer, pruner, range(at + 1, 5))
    masks = copy.deepcopy(pruner.masks)
    sparse.train(model, optimizer, pruner, range(5, 10))
    assert sparse.counts(pruner) == active
    assert all(not torch.equal(pruner.masks[name], masks[name]) for name in masks)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("skip_step", [True, False])
def test_gradient_scaling_leaves_a_step_out_of_the_update_too(skip_step, n):
    """With skip_step=False such a step is not even counted."""
    options = {"skip_step": skip_step, "grad_accumulation_n": n}
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    active, first = sparse.counts(pruner), copy.deepcopy(pruner.masks)
    for step in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            images, labels = sparse.batch(step)
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        if pruner():
            scaler.step(optimizer)
            scaler.update()
        if step == 2:
            assert sparse.equal(pruner.masks, first)
    assert (pruner.step, pruner.rigl_steps) == ((10, 3) if skip_step else (9, 3))
    assert not any(torch.equal(mask, first[n]) for n, mask in pruner.masks.items())
    assert sparse.counts(pruner) == active
    assert sparse.inactive_are_zero(pruner)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("factor", [100.0, float("nan")])
def test_a_batch_that_zero_grad_discards_does_not_take_part(
    set_to_none, called, skip_step, factor
):
    """Whether or not the pruner is called for it: then its update keeps all masks."""
    runs, ends = [], skip_step and called  # the update, without a batch
    for discards in (False, True):
        model, optimizer, pruner = sparse.sparse_convnet(skip_step=skip_step)
        sparse.train(model, optimizer, pruner, range(2))
        if discards:
            optimizer.zero_grad()
            sparse.backward(model, 99, factor)
            optimizer.zero_grad(set_to_none=set_to_none)
            masks = copy.deepcopy(pruner.masks)
            assert not called or pruner() != skip_step
            assert sparse.equal(pruner.masks, masks)
        sparse.train(model, optimizer, pruner, range(3 if ends else 2, 7))
        assert pruner.rigl_steps == 2
        runs.append(pruner.masks | model.state_dict(prefix="model."))
    assert ends or sparse.equal(*runs)


class Row:
    """A Linear of one row whose first four weights are active, and its pruner."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1, bias=False)
        self.sgd = torch.optim.SGD(self.model.parameters(), 0.1)
        own = {"initial_masks": {"weight": -torch.arange(8.0)[None]}, "delta": 1}
        own |= {"dense_first": False, "dense_allocation": 0.5, "alpha": 0.5}
        own |= {"T_end": 1000, **options}
        self.pruner = sparse.pruned(self.model, self.sgd, **own)

    def backward(self, *gradient: float) -> None:
        (self.model.weight * torch.tensor([gradient])).sum().backward()

    @property
    def active(self) -> list[int]:
        return self.pruner.masks["weight"][0].nonzero().flatten().tolist()


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clips", [False, True])
def test_a_layer_whose_masked_gradient_is_zero_grows(clips, set_to_none, skip_step):
    row, draw = Row(delta=2, skip_step=skip_step), torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(32, 8, generator=draw)
        x[:, :4] = 0
        row.sgd.zero_grad(set_to_none=set_to_none)
        (row.model(x)[:, 0] - x[:, 5] - x[:, 6]).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(row.model.parameters(), 1.0)
        if row.pruner():
            row.sgd.step()
    assert {5, 6} <= {*row.active}


A, B = (0, 0, 0, 0, 9, 0, 0, 0), (1, 1, 1, 1, 0, 5, 0, 0)
DISCARDS = [lambda grad: None, torch.zero_]
KEEPS = [lambda grad: grad, torch.clone, lambda grad: grad.clamp(-1, 1)]


@pytest.mark.parametrize(("passes", "between", "grown"), [
    *(((A, B), discard, 5) for discard in DISCARDS),
    *(((A, B), keep, 4) for keep in KEEPS),  # A's masked gradient is one of zeros
    *(((B, A), each, 4) for each in (KEEPS[0], *DISCARDS)),
])  # fmt: skip
def test_passes_add_up_and_discarded_ones_do_not(passes, between, grown):
    row, (first, second) = Row(), passes
    row.backward(*first)
    row.model.weight.grad = between(row.model.weight.grad)
    row.backward(*second)
    assert not row.pruner()
    assert len(row.active) == 4
    assert max(row.active) == grown


@pytest.mark.parametrize("replace", [
    lambda grad: grad.clamp(-1, 1),
    lambda grad: grad.clamp_(-1, 1),
    lambda grad: grad / 2,
    lambda grad: torch.tensor([[1.0, -2, 3, 1, 4, 0, 0, 0]]),  # a dense one
])  # fmt: skip
def test_a_discarded_batch_does_not_grow_if_the_next_gradient_is_replaced(replace):
    row = Row()
    row.backward(1, 1, 1, 1, 0, 0, 0, 1e6)
    row.sgd.zero_grad()
    row.backward(1, -2, 3, 1, 4, 0, 0, 0)
    row.model.weight.grad = replace(row.model.weight.grad)
    row.pruner()
    assert max(row.active) == 4
    assert not row.model.weight.grad[0, 5:].any()


def test_the_examples_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block("docs/rigl_xla.md", "python", "# line 1"), names)
    assert "num_rigl_steps=14" in capsys.readouterr().out
    exec(block("docs/rigl_xla.md", "python", "range(20)"), names)
    assert names["pruner"].step == 420
    exec(block("docs/rigl_xla_details.md", "python", "print(report)"), names)
    exec(block("docs/rigl_xla_details.md", "python", "cost_of("), names)
    exec(block("docs/rigl_xla_details.md", "python", "SummaryWriter"), names)
    assert "of dense training" in capsys.readouterr().out
    assert abs(names["report"].sparsity - 0.9) < 1e-3
    (events,) = tmp_path.glob("runs/events.out.tfevents.*")
    names["writer"].close()
    assert b"rigl/inference_flops_ratio" in events.read_bytes()
