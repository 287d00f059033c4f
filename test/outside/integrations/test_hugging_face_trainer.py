"""Hugging Face's Trainer under a trace: on any number of processes, killed, resumed."""

import collections
import signal
import subprocess
import sys

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.documents import ROOT, block
from support.outside import package
from support.scripts import run_script, words
from support.variable_batch_size import hugging_face as runs
from support.variable_batch_size.elastic import batches, large_batch_run
from support.variable_batch_size.hugging_face import DECAY, TEXTS
from support.xla_replica.replicas import Backend
from support.xla_replica.torchrun import LAUNCHER

from examples.ordering import causal_language_model
from examples.ordering.hugging_face_model import GPTNeoX
from xla_replica import ReplicaError, Stopped

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def library():
    package("accelerate")
    return package("transformers")


def check(outcomes: list[dict], kind: str | None = None) -> None:
    """Fails unless a run has ended, from where it began, as one in plain torch."""
    measured = []

    def loss_of(model, tokens, labels):
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = runs.over_sequences(logits, labels) if kind == "sequences" else loss
        loss = loss + (runs.penalty(model) if kind == "term" else 0)
        gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        norm = torch.nn.utils.get_total_norm(gradients)
        measured.append({"loss": loss.item(), "grad_norm": norm.item()})
        return loss

    columns = {n: torch.stack([t[n] for t in runs.texts()]) for n in runs.texts()[0]}
    made = runs.language_model(), columns["input_ids"], columns["labels"]
    weights, updates = large_batch_run(TEXTS, loss_of, made, DECAY)
    seen = collections.defaultdict(list)
    for step, rows in [each for outcome in outcomes for each in outcome["seen"]]:
        seen[step] += rows
    assert [*seen] == [*range(min(seen), len(updates))]
    for step, (_, rows) in enumerate(batches(TEXTS)):
        expected = columns["input_ids"][rows].tolist()
        assert step < min(seen) or sorted(seen[step]) == sorted(expected)
    for outcome in outcomes:
        torch.testing.assert_close(outcome["weights"], weights, rtol=1e-6, atol=1e-9)
        logs = [log for log in outcome["logs"] if "loss" in log]
        assert len(logs) == len(updates)
        for log, (_, step, size, (lr,)), told in zip(logs, updates, measured):
            expected = {
                "step": step + 1, "batch_size": size, "effective_learning_rate": lr,
                "learning_rate": TEXTS.lr * DECAY**step, **told,
            }  # fmt: skip
            assert {n: log[n] for n in expected} == pytest.approx(expected, rel=1e-5)
        evaluated = [log["epoch"] for log in outcome["logs"] if "eval_loss" in log]
        assert evaluated == ([] if kind else [1.0, 2.0])


@pytest.mark.parametrize(("number", "kind"), [
    (1, None), (3, None), (1, "own"), (2, "term"), (2, "sequences"),
])  # fmt: skip
def test_a_language_model_is_that_of_a_loop_over_tokens(tmp_path, number, kind):
    """Also in a subclass with a loss of its own, or a term beside the trainer's."""
    check(Backend("cpu", number).run(runs.run, str(tmp_path), kind), kind)


def test_killed_and_asked_to_stop_it_goes_on_with_other_numbers_of_processes(tmp_path):
    """One of two is killed; one of three gets SIGTERM, and all save after an update."""
    folder = str(tmp_path)
    with pytest.raises(ReplicaError):
        Backend("cpu", 2).run(runs.run, folder, None, {1: (3, signal.SIGKILL)})
    assert (tmp_path / "checkpoint-2").exists()
    with pytest.raises(Stopped) as stopped:
        Backend("cpu", 3).run(runs.run, folder, None, {1: (5, signal.SIGTERM)})
    assert stopped.value.exit_status == 143
    assert not (tmp_path / "checkpoint-8").exists()
    outcome = runs.run(0, folder, dataloader_num_workers=1)
    assert outcome["seen"][0][0] in (5, 6)
    check([outcome])


def test_a_loss_of_ones_own_says_what_it_is_a_mean_over(tmp_path):
    """Also a function, and that of a module that is not of the library."""

    def function(outputs, labels, num_items_in_batch):
        return runs.over_sequences(outputs.logits, labels)

    class Module(torch.nn.ModuleList):
        def forward(self, input_ids, labels, **options):
            return {"loss": self[0](input_ids, labels=labels).loss}

    own, model = runs.with_own_loss("unsaid"), Module([runs.language_model()])
    for given in ({"cls": own}, {"compute_loss_func": function}, {"model": model}):
        with pytest.raises(ValueError, match="loss_is_scaled_for_ga: set it to"):
            runs.trainer_of(tmp_path, **given).train()
    told = runs.trainer_of(tmp_path, max_steps=2, compute_loss_func=function)
    told.loss_is_scaled_for_ga = False
    told.train()


REFUSED = {
    "gradient_accumulation_steps": (2, "the trace says"),
    "train_sampling_strategy": ("group_by_length", "pass order="),
    "include_num_input_tokens_seen": ("all", "update.weight"),
    "enable_jit_checkpoint": (True, "SIGTERM and SIGINT save"),
    "parallelism_config": (object(), "a whole model"),
    "optim": ("lomo", "updates in step"),
    "_n_gpu": (2, "start one for each"),
}


def test_what_a_trace_cannot_carry_is_refused(tmp_path):
    trainer = runs.trainer_of(tmp_path)
    for name, (value, says) in REFUSED.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.args, name, value)
            with pytest.raises(ValueError, match=f"not supported .*trace.*{says}"):
                trainer._refuse()
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="install accelerate"):
        trainer.training_step(wrapped, [])
    trainer.accelerator.scaler = object()
    with pytest.raises(ValueError, match="bf16=True"):
        trainer._refuse()
    trainer.is_model_parallel = True
    with pytest.raises(ValueError, match=r"device_map\): write a loop"):
        trainer._refuse()


def test_it_trains_once_to_the_traces_end_from_whole_checkpoints(tmp_path, library):
    cls = runs.with_own_loss("term", library.Seq2SeqTrainer)
    changes = {"max_steps": 20, "save_steps": 6, "bf16": True}
    trainer = runs.trainer_of(tmp_path, cls, on_end="stop", **changes)
    assert trainer.last_checkpoint() is None
    trainer.train()
    assert trainer.state.global_step == len(TEXTS.trace)
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    with pytest.raises(ValueError, match="or build both anew"):
        trainer.train()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"epoch": 2.0')
    assert trainer.last_checkpoint().endswith("checkpoint-6")
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="load an elastic checkpoint"):
        runs.trainer_of(tmp_path).train(tmp_path / "checkpoint-6")


SMALL = (
    "--steps", 6, "--most", 4, "--minibatch-size", 2, "--context", 16, "--width", 8,
    "--save-steps", 4, "--no-progress",
)  # fmt: skip


def test_the_example_trains_and_continues(tmp_path, capsys):
    from examples.huggingface import language_model

    command = words([*SMALL, "--folder", tmp_path])
    for _ in range(2):
        assert language_model.main(command) == 0
        rows = [row.split() for row in capsys.readouterr().out.splitlines()]
        steps = [row[0] for row in rows if row and row[0].isdigit()]
        assert steps == ["1", "2", "3", "4", "5", "6"]


def test_the_page_shows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text("step,batchsize\n" + "0,32\n1,64\n" * 20)
    names = {"model": runs.language_model(), "texts": runs.texts() * 4}
    exec(block("docs/trainers.md", "python", "ElasticTrainer("), names)
    assert [*tmp_path.glob("out/checkpoint-*")]


@pytest.mark.slow
def test_the_example_under_torchrun_is_continued_by_one_process(tmp_path):
    code = [sys.executable, "-c", "import torch, transformers.image_utils"]
    if subprocess.run(code, capture_output=True).returncode:
        pytest.skip("torchvision does not fit this torch, and transformers imports it")
    script = ROOT / "examples/huggingface/language_model.py"
    for command in (LAUNCHER, (sys.executable,)):
        run_script(script, *SMALL, "--folder", "run", cwd=tmp_path, command=command)
        assert (tmp_path / "run" / "checkpoint-6").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_says_which_parameters_it_ties(tied):
    """By which an optimizer knows of ties that a move has lost."""
    model = GPTNeoX(12, width=16, num_layers=2, num_heads=2, tied=tied)
    ties = [getattr(each, "all_tied_weights_keys", {}) for each in model.modules()]
    assert any(ties) == tied


@pytest.mark.parametrize("fidelity", ["exact", "projected", "group"])
def test_gpt_neox_has_right_gradients_and_trains_in_bfloat16(tmp_path, fidelity):
    book, trace = tmp_path / "book.txt", tmp_path / "trace.csv"
    book.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    trace.write_text("step,batchsize\n0,8\n1,16\n2,24\n")
    arguments = [
        "--model", "gpt-neox", "--text", book, "--max-bytes", 6000, "--context", 24,
        "--width", 16, "--num-layers", 1, "--num-heads", 2, "--batch-size", 8,
        "--order", "rr,mean", "--epochs", 2, "--bf16", "--trace", trace,
        "--fidelity", fidelity, "--projection-size", 60, "--no-progress",
        "--num-replicas", 1, "--device", "cpu", "--logdir", tmp_path / "log",
        "--check-gradients",
    ]  # fmt: skip
    assert causal_language_model.main(words(arguments)) == 0
    rows = pd.read_csv(tmp_path / "log" / "history.csv").set_index("epoch")
    for _, losses in rows.groupby("order")["train_loss"]:
        assert losses[2] < losses[0]
