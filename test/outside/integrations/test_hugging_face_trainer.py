"""Hugging Face's Trainer under a trace: on any number of processes, killed, resumed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch
from support.documents import ROOT
from support.outside import package
from support.scripts import run_script, words
from support.variable_batch_size import hugging_face as runs
from support.xla_replica.replicas import Backend
from support.xla_replica.torchrun import LAUNCHER

import xla_replica
from tools.outside import models
from xla_replica import ReplicaError

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def library():
    models.import_torchvision()
    package("accelerate")
    return package("transformers")


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A run of the exact model in one process, from the beginning to the end."""
    return runs.exact_run(0, str(tmp_path_factory.mktemp("whole")))


def test_one_process_sees_the_steps_of_the_trace(exact):
    assert runs.global_batches([exact]) == runs.expected_batches()
    assert exact["epoch"] == runs.EXACT.epochs


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_see_the_same_batches_and_end_with_the_same_weights(
    exact, tmp_path, num_processes
):
    outcomes = Backend("cpu", num_processes).run(runs.exact_run, str(tmp_path))
    assert runs.global_batches(outcomes) == runs.global_batches([exact])
    for outcome in outcomes:
        assert all(map(torch.equal, outcome["weights"], exact["weights"]))


def test_killed_and_resumed_on_other_numbers_of_processes(exact, tmp_path):
    folder = str(tmp_path)
    with pytest.raises(ReplicaError):
        Backend("cpu", 2).run(runs.exact_run, folder, False, {1: (5, runs.KILL)})
    assert (tmp_path / "checkpoint-3").exists()
    with pytest.raises(ReplicaError):
        Backend("cpu", 3).run(runs.exact_run, folder, True, {0: (10, runs.KILL)})
    outcome = runs.exact_run(0, folder, True)
    assert all(map(torch.equal, outcome["weights"], exact["weights"]))
    left = runs.global_batches([outcome])
    assert min(left) == 9
    assert left == {s: b for s, b in runs.expected_batches().items() if s >= 9}
    logs = [[log for log in run["logs"] if "loss" in log] for run in (outcome, exact)]
    for log, whole in zip(*logs, strict=True):
        expected = {name: whole[name] for name in ("step", "loss", "epoch")}
        assert {name: log[name] for name in expected} == pytest.approx(expected)


def test_asked_to_stop_it_saves_and_another_number_continues(exact, tmp_path):
    """One process of two is sent SIGTERM; both save after the same update."""
    folder = str(tmp_path)
    with pytest.raises(xla_replica.Stopped) as stopped:
        Backend("cpu", 2).run(runs.exact_run, folder, False, {1: (4, signal.SIGTERM)})
    assert stopped.value.exit_status == 143
    [*_, newest] = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert newest in ("checkpoint-4", "checkpoint-5")
    outcome = runs.exact_run(0, folder, True)
    assert all(map(torch.equal, outcome["weights"], exact["weights"]))


@pytest.mark.parametrize(
    ("num_processes", "kind"), [(1, None), (3, None), (1, "own"), (2, "term")]
)
def test_a_language_model_is_that_of_a_plain_loop_over_tokens(
    tmp_path, num_processes, kind
):
    """Also in a subclass with a loss of its own, or a term beside the trainer's."""
    weights, told = runs.text_run_in_plain_torch(kind)
    arguments = str(tmp_path), kind
    for outcome in Backend("cpu", num_processes).run(runs.text_run, *arguments):
        for ours, expected in zip(outcome["weights"], weights, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
        logs = [log for log in outcome["logs"] if "loss" in log]
        for log, expected in zip(logs, told, strict=True):
            assert {n: log[n] for n in expected} == pytest.approx(expected, rel=1e-5)
        evaluated = [log["epoch"] for log in outcome["logs"] if "eval_loss" in log]
        assert evaluated == [1.0, 2.0]


REFUSED = {
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "group_by_length",
    "dataloader_in_order": False,
    "ignore_data_skip": True,
    "auto_find_batch_size": True,
    "fp16": True,
    "fsdp": ["full_shard"],
    "deepspeed": {"train_batch_size": 4},
    "parallelism_config": object(),
    "enable_jit_checkpoint": True,
    "include_num_input_tokens_seen": "all",
    "optim": "lomo",
}
OF_ACCELERATE = {
    "split_batches": True,
    "dispatch_batches": True,
    "gradient_accumulation_kwargs": {"sync_each_batch": True},
}


def test_every_refusal_is_tested():
    from variable_batch_size.integrations.refusals import HUGGING_FACE

    assert {*REFUSED, "accelerator_config"} == HUGGING_FACE.keys()


@pytest.mark.parametrize("name", [*REFUSED, *OF_ACCELERATE])
def test_what_would_break_the_run_is_refused(tmp_path, name):
    arguments = runs.arguments(tmp_path)
    if name in REFUSED:
        says = rf"\({name}=.*does not work with Elastic"
        setattr(arguments, name, REFUSED[name])
    else:
        says = "leave out split_batches"
        setattr(arguments.accelerator_config, name, OF_ACCELERATE[name])
    with pytest.raises(ValueError, match=says):
        runs.exact_trainer(tmp_path, args=arguments)


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("is_fsdp_enabled", True, "fully_shard"),
        ("is_deepspeed_enabled", True, "its engine accumulates"),
        ("is_model_parallel", True, "spread over devices"),
        ("train_dataset", iter([]), "has no length"),
    ],
)
def test_what_only_the_trainer_shows_is_refused(tmp_path, attribute, value, said):
    from variable_batch_size.integrations.hugging_face_checks import check_trainer

    trainer = runs.exact_trainer(tmp_path)
    setattr(trainer, attribute, value)
    with pytest.raises((ValueError, TypeError), match=said):
        check_trainer(trainer)


def test_several_gpus_in_a_process_and_no_arguments_are_refused(tmp_path):
    from variable_batch_size.integrations.hugging_face import ElasticTrainer

    arguments = runs.arguments(tmp_path)
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match="one process for each"):
        runs.exact_trainer(tmp_path, args=arguments)
    with pytest.raises(TypeError, match="needs args="):
        ElasticTrainer(runs.ExactModel(), trace=[4])


def test_a_version_without_the_methods_and_xla_devices_are_refused(
    tmp_path, monkeypatch
):
    from variable_batch_size.integrations import hugging_face_checks

    arguments = runs.arguments(tmp_path)
    vars(arguments)["_setup_devices"] = torch.device("xla")
    with pytest.raises(TypeError, match="on XLA devices"):
        runs.exact_trainer(tmp_path, args=arguments)
    monkeypatch.setattr(hugging_face_checks, "_OVERRIDDEN", ("_gone",))
    with pytest.raises(ImportError, match="has no _gone"):
        runs.exact_trainer(tmp_path)


def test_it_trains_once_and_not_past_the_trace(tmp_path, caplog):
    trainer = runs.exact_trainer(tmp_path, on_end="stop")
    trainer.train()
    assert trainer.state.global_step == len(runs.EXACT.trace)
    assert "the trace ends after 8 steps" in caplog.text
    with pytest.raises(RuntimeError, match="build another ElasticTrainer"):
        trainer.train()
    with pytest.raises(TypeError, match="Write the change into the trace"):
        trainer.optimizer.change_batch_size(8)


def test_an_unfinished_checkpoint_is_not_resumed(tmp_path, caplog):
    trainer = runs.exact_trainer(tmp_path, max_steps=6)
    trainer.train()
    state = (tmp_path / "checkpoint-6" / "trainer_state.json").read_text()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(state[:50])
    assert runs.exact_trainer(tmp_path).last_checkpoint().endswith("checkpoint-6")
    assert "checkpoint-9 is not whole" in caplog.text
    assert "checkpoint-10 is not whole" in caplog.text


def test_a_checkpoint_without_the_place_in_the_trace_is_refused(tmp_path):
    runs.exact_trainer(tmp_path, max_steps=3, save_only_model=True).train()
    with pytest.raises(ValueError, match="save_only_model=True, which leaves out"):
        runs.exact_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_process_that_is_new_draws_other_random_numbers(tmp_path):
    trainer = runs.exact_trainer(tmp_path, max_steps=3)
    trainer.train()
    checkpoint = trainer.last_checkpoint()
    draws, folder = [], tmp_path / "checkpoint-3"
    for number in (1, 2, 1, 2):
        if len(draws) == 2:
            (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
        torch.manual_seed(number)
        trainer._load_rng_state(checkpoint)
        draws.append(torch.rand(1).item())
    assert draws[0] == draws[1] != draws[2] == draws[3]


def test_other_trainers_workers_and_bfloat16(exact, tmp_path):
    from transformers import Seq2SeqTrainer

    assert issubclass(runs.recording(Seq2SeqTrainer), Seq2SeqTrainer)
    outcome = runs.exact_run(0, str(tmp_path / "a"), dataloader_num_workers=1)
    assert all(map(torch.equal, outcome["weights"], exact["weights"]))
    outcome = runs.text_run(0, str(tmp_path / "b"), bf16=True)
    assert all(weight.isfinite().all() for weight in outcome["weights"])


SMALL = (
    "--steps", 6, "--most", 4, "--minibatch-size", 2, "--context", 16, "--width", 8,
    "--save-steps", 4, "--no-progress",
)  # fmt: skip


def test_the_example_trains_and_continues(tmp_path, capsys):
    from examples.huggingface import language_model

    command = words([*SMALL, "--folder", tmp_path])
    for _ in range(2):
        assert language_model.main(command) == 0
        rows = capsys.readouterr().out.splitlines()
        rows = [row.split() for row in rows[[*map(bool, rows)].index(True) :]]
        steps = [row[0] for row in rows if row and row[0].isdigit()]
        assert steps == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.slow
def test_the_example_under_torchrun_is_continued_by_one_process(tmp_path):
    script = ROOT / "examples" / "huggingface" / "language_model.py"
    if not torchvision_loads():
        pytest.skip("torchvision does not fit this torch, and transformers imports it")
    for command in (LAUNCHER, (sys.executable,)):
        status, output = run_script(
            script, *SMALL, "--folder", tmp_path / "run", cwd=tmp_path, command=command
        )
        assert status == 0, output
        assert (tmp_path / "run" / "checkpoint-6").exists()


def torchvision_loads() -> bool:
    """Returns whether transformers can import it; it can do without."""
    is_there = "__import__('importlib.util').util.find_spec('torchvision')"
    code = [sys.executable, "-c", f"{is_there} and __import__('torchvision')"]
    return subprocess.run(code, capture_output=True).returncode == 0
