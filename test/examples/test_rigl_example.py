"""examples/sparse/rigl_mnist.py learns, resumes, and runs on replicas with a trace."""

import re
from pathlib import Path

import pytest
from support.scripts import run_script, words
from support.xla_replica.replicas import of_torch_alone

import variable_batch_size as vbs
from examples.sparse import rigl_mnist

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = ("--dataset", "digits", "--device", "cpu", "--delta", 10)


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    rigl_mnist.main(words([*COMMON, "--num-replicas", 1, *arguments]))
    return capsys.readouterr().out


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+) %", output)]


@of_torch_alone
@pytest.mark.filterwarnings("ignore:the saved schedule goes on")
def test_it_learns_and_resumes(tmp_path, capsys):
    checkpoint = ("--checkpoint", tmp_path / "digits")
    whole = run_here(capsys, "--epochs", 12, *checkpoint)
    assert accuracies(whole)[-1] > 80
    assert "num_rigl_steps=13" in whole  # T_end is 135
    assert "complete" not in whole
    again = run_here(capsys, "--epochs", 12, *checkpoint)
    assert f"complete: 12 epochs, test accuracy {accuracies(whole)[-1]:.2f} %" in again
    assert "the topology stays" not in again
    more = run_here(capsys, "--epochs", 14, *checkpoint)
    assert "the topology stays from update 135 on, as this run began" in more
    assert "would stop at 157" in more
    assert len(accuracies(more)) == 2
    assert "step=210" in more
    updates = vbs.read_run(tmp_path / "digits" / "run.jsonl").updates
    assert updates["step"].tolist() == list(range(210))
    told = updates["accuracy"].dropna().tolist()
    assert told == pytest.approx(accuracies(whole) + accuracies(more), abs=0.01)
    assert updates["loss"].dropna().iloc[-1] < updates["loss"].dropna().iloc[0] / 2
    refusal = "of another run: .*lr was 0.1 and is 9.*sparsity was 0"
    with pytest.raises(ValueError, match=refusal):
        run_here(capsys, "--sparsity", 0.5, "--lr", 9, *checkpoint)


@of_torch_alone
def test_on_replicas_with_a_trace(tmp_path, capsys):
    traced = ("--trace", "96,32,64", "--epochs", 3)
    alone, script = run_here(capsys, *traced), Path(rigl_mnist.__file__)
    arguments = (*COMMON, *traced, "--num-replicas", 2)
    together = run_script(script, *arguments, cwd=tmp_path)
    masks = re.compile(r"nonzero_params=.*")
    assert masks.search(alone).group() == masks.search(together).group()
    assert accuracies(together) == pytest.approx(accuracies(alone), abs=2)
