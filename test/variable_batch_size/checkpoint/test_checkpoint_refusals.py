"""`Checkpointer`: what it refuses to save and to resume."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.variable_batch_size import elastic
from support.variable_batch_size.checkpointed import CASE, Order, Part, Training
from support.variable_batch_size.elastic import Case
from support.variable_batch_size.wrapping import sampler_of
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint import files
from variable_batch_size.step.scaling import hyperparameters


@pytest.mark.parametrize(("options", "message"), [
    ({"case": Case((4, 36, 8), 3, exact=True)}, "trace was '8 step"),
    ({"case": Case(CASE.trace, exact=True, minibatch_size=2)},
     "minibatch_size was 4 and is 2"),
    ({"settings": {"width": 3}}, "width was None and is 3"),
    ({"parts": {"other": nn.Linear(1, 1)}},
     r"parts was \['model', 'scheduler'\] and is \['model', 'other'.* same parts"),
])  # fmt: skip
def test_another_run_is_refused_and_nothing_is_touched(options, message, tmp_path):
    Training(tmp_path).train()
    other = Training(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        other.checkpointer.load()
    assert other.sampler.state_dict()["step"] == 0
    assert not other.optimizer.inner.state


@pytest.mark.parametrize(("value", "error", "says"), [
    (Path("/somewhere"), vbs.CheckpointError, r"pathlib.*may hold tensors"),
    ([lambda: 1], (AttributeError, pickle.PicklingError), "lambda"),
    ([torch.ones(2, device="meta")], TypeError, r"'unsafe\.value\.0' .* 'meta'"),
])  # fmt: skip
def test_what_would_not_load_is_an_error_when_it_is_saved(value, error, says, tmp_path):
    part = Part({1})
    training = Training(tmp_path, parts={"unsafe": part})
    before = training.checkpointer.save()
    part.value = value
    with pytest.raises(error, match=says):
        training.checkpointer.save()
    assert [*tmp_path.iterdir()] == [before]


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path):
    training = Training(tmp_path, parts={"part": Part([np.float32(0.5), np.int64(3)])})
    training.optimizer.param_groups[0]["lr"] = np.float64(0.2)
    training.checkpointer.save()
    part = Part()
    again = Training(tmp_path, parts={"part": part})
    again.checkpointer.load()
    assert repr((part.value, *again.optimizer.get_lr())) == "([0.5, 3], 0.2)"
    used = [hyperparameters(each.optimizer.param_groups) for each in (training, again)]
    assert repr(used[0]) == repr(used[1])  # what replicas compare


def apart(rank: int, folder: Path) -> None:
    Training(folder / str(rank)).checkpointer.load()


def test_hosts_that_do_not_share_the_folder_are_told(tmp_path):
    Training(tmp_path / "0").checkpointer.save()
    with pytest.raises(xla_replica.ReplicaError, match="all hosts must share") as error:
        xla_replica.launch(apart, (tmp_path,), 2, "cpu")
    assert isinstance(error.value.__cause__, vbs.CheckpointError)


def saved_with(training: elastic.Training, **parts) -> None:
    vbs.Checkpointer("folder", training.optimizer, **parts)


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"look_every": 100}, TypeError, "look_every=100 is not an argument"),
    ({"best": "highest"}, ValueError, "best must be one of 'max', 'min', None"),
    ({"best": Part()}, ValueError, "'min', None or a part by another name, got <"),
    ({"parts": {"x": 3}}, TypeError, "x=3 is not an argument, and as a"),
    ({"stop_on": ["SIGNAL"]}, ValueError, "SIGNAL"),
    ({"folder": "gs://bucket/job"}, ValueError, "mount the bucket"),
    (lambda t: t.checkpointer.save(0.5), ValueError, "metric=0.5 needs Chec"),
    (lambda t: saved_with(t), ValueError, "pass model=model"),
    # What the wrapper saves is not saved twice.
    (lambda t: saved_with(t, part=t.optimizer.inner), ValueError, "leave it out"),
    (lambda t: saved_with(t, part=t.sampler), ValueError, "leave it out"),
    (lambda t: vbs.Checkpointer("x", t.optimizer.inner), TypeError, "elastic wrap"),
    # It would begin anew between epochs, where no digest of the order could tell.
    (lambda t: saved_with(elastic.Training(CASE, sampler={"order": Order(128)})),
     ValueError, "order= has a state, which would begin anew"),
    (lambda t: files.write(t.checkpointer.folder, 3, {"version": 4})
     and t.checkpointer.load(), ValueError, "the format was None and is 5"),
    # Loading could not restore it in the next run.
    (lambda t: t.checkpointer.load() or t.optimizer.attach(
        CosineAnnealingLR(t.optimizer.inner, 30)
    ), ValueError, r"comes after Checkpointer\.load\(\), which"),
])  # fmt: skip
def test_bad_arguments_and_calls_are_named(wrong, error, message, tmp_path):
    options = {} if callable(wrong) else wrong
    call = wrong if callable(wrong) else print  # which is not reached
    with pytest.raises(error, match=message):
        call(Training(**{"folder": tmp_path} | options))


def test_orders_and_logs_of_what_is_saved_as_well_are_parts():
    order, other = Order(128), elastic.Training(CASE).optimizer
    training = elastic.Training(CASE, sampler={"order": order})
    parts = {"grab": order, "second": other, "log": vbs.RunLog(None, other)}
    saved_with(training, model=training.model, **parts)


def test_a_part_or_scheduler_attached_after_the_checkpointer_is_refused(tmp_path):
    order = Order(32)
    training = Training(tmp_path, parts={"order": order})
    training.optimizer.attach(training.checkpointer)
    scheduler = CosineAnnealingLR(training.optimizer.inner, 30)
    for late in (order.after_update, scheduler):
        with pytest.raises(ValueError, match="attach it before"):
            training.optimizer.attach(late)
    training.optimizer.attach(Order(32).after_update)  # nobody saves it


def test_an_epoch_before_the_restored_one_is_an_error():
    sampler, again = (sampler_of(16, 128, minibatch_size=4) for _ in range(2))
    again.load_state_dict({**sampler.state_dict(), "epoch": 2, "step": 3})
    with pytest.raises(ValueError, match=r"range\(sampler.epoch"):
        again.set_epoch(0)
    lengths = [(again.set_epoch(epoch), len(again))[1] for epoch in (2, 3)]
    assert lengths == [5 * 4, 32]


@pytest.mark.parametrize(("folder", "error", "message"), [
    ("run", vbs.CheckpointError, r"call load\(\) before training"),
    ("file/run", NotADirectoryError, r"file/run"),  # which cannot be written to
])  # fmt: skip
def test_another_run_s_folder_or_none_is_told_at_once(folder, error, message, tmp_path):
    Training(tmp_path / "run").train()
    (tmp_path / "file").touch()
    found = files.saved_files(tmp_path / "run")
    forgetful = Training(tmp_path / folder, every_updates=1000)
    with pytest.raises(error, match=message):
        forgetful.train()
    assert forgetful.steps == [0]
    assert files.saved_files(tmp_path / "run") == found


def wrapped(first=(), second=(), kind=SGD, is_frozen=False, pads=False, **options):
    each = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    each[1].requires_grad_(not is_frozen)
    groups = [{"params": p, **dict(own)} for p, own in zip(each, (first, second))]
    inner = kind(groups, lr=np.float64(0.1))  # computed; files hold numbers of Python
    sampler = sampler_of(8, 32, minibatch_size=4, pad_minibatches=pads)
    options = {"rule": "root", "ref_batchsize": 16} | options
    return vbs.ElasticOptimizer(inner, sampler, **options)


SUMS = {"reduction": "sum"}


# What may not change from one part of a run to the next, and what the error says.
@pytest.mark.parametrize(("before", "now", "message"), [
    ({}, {"first": {"lr": 0.3}}, "lr was 0.1 and is 0.3"),
    ({}, {"first": {"lr": np.float32(0.5)}}, "lr was 0.1 and is 0.5"),
    ({}, {"second": {"lr": 0.3}}, "lr of parameter group 1 was 0.1 and is 0.3"),
    ({}, {"first": {"weight_decay": 0.1}}, "weight_decay was 0 and is 0.1"),
    ({}, {"kind": torch.optim.AdamW}, "optimizer was 'SGD' and is 'AdamW"),
    ({}, {"rule": "linear"}, "rule was 'root' and is 'linear'"),
    ({}, {"ref_batchsize": 8}, "ref_batchsize was 16 and is 8"),
    ({}, {"max_grad_norm": 1.0}, "max_grad_norm was None and is 1.0"),
    ({}, SUMS, "reduction was 'mean' and is 'sum'"),
    (SUMS, {"pads": True} | SUMS, "pad_minibatches was False and is True"),
    ({}, {"is_frozen": True}, r"frozen parameters was \[\] and is \[1\]"),
    ({"is_frozen": True}, {}, r"frozen parameters was \[1\] and is \[\]"),
])  # fmt: skip
def test_other_settings_are_refused_on_resuming(before, now, message):
    """torch takes the saved hyperparameters silently in place of the script's."""
    saved = copy.deepcopy(wrapped(**before).state_dict())
    with pytest.raises(ValueError, match=message):
        wrapped(**now).load_state_dict(saved)
    wrapped(**before).load_state_dict(saved)
    wrapped({"fused": True}, {"foreach": True}, **before).load_state_dict(saved)
    if "kind" not in now:
        allowed = wrapped(**now)
        allowed.load_state_dict(saved, allow_changes=True)
        assert allowed.get_lr() == (0.1, 0.1)
        wrapped(**now).load_state_dict(saved, place=False)


def test_an_earlier_format_is_refused_by_name():
    saved = wrapped().state_dict()
    own = saved["elastic"]
    for older in ({"version": 1}, {"sampler": own["sampler"] | {"version": 1}}):
        with pytest.raises(ValueError, match=r"state has version 1, .* library reads"):
            wrapped().load_state_dict(saved | {"elastic": own | older})


def test_a_scheduler_that_is_missing_or_another_is_noticed():
    training, missing, allowed, other = (elastic.Training(CASE) for _ in range(4))
    training.optimizer.attach(CosineAnnealingLR(training.optimizer.inner, 30))
    training.epoch(0)
    saved = training.optimizer.state_dict()
    with pytest.raises(ValueError, match="had CosineAnnealingLR attached: attach"):
        missing.optimizer.load_state_dict(saved)
    allowed.optimizer.load_state_dict(saved, allow_changes=True)
    allowed.epoch(1)
    other.optimizer.attach(ExponentialLR(other.optimizer, 0.5), "samples", 8)
    told = "was 'CosineAnn.* and is 'Expon.*is 'samples'; its every was 1 and is 8"
    with pytest.raises(ValueError, match=told):
        other.optimizer.load_state_dict(saved)


def test_a_checkpointer_that_was_not_attached_does_not_save(tmp_path):
    """Nor would it hear that the run is asked to stop."""
    for loads in (False, True):
        forgetful = Training(tmp_path)
        assert (forgetful.checkpointer.load() is not None) == loads
        forgetful.epoch(3)
        with pytest.raises(ValueError, match=r"optimizer\.attach\(checkpointer\)"):
            forgetful.checkpointer.save()
        assert bool(files.saved_files(tmp_path)) == loads
        Training(tmp_path).checkpointer.save()  # before training it may


def test_a_run_that_has_not_begun_can_be_saved(tmp_path):
    training = Training(tmp_path)
    training.sampler.set_epoch(1)
    training.optimizer.set_epoch(1)
    training.checkpointer.save()
    training.optimizer.attach(training.checkpointer)
    training.epoch(1)
    training.checkpointer.save()
    again = Training(tmp_path)
    again.checkpointer.load()
    again.checkpointer.save()
