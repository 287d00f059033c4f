"""Every stage of docs/tutorial.md runs, learns, and leads to the composed example."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from support.documents import ROOT, block, blocks, patched
from support.scripts import run_script, words
from support.xla_replica.replicas import of_torch_alone, slow

import variable_batch_size as vbs

pytest.importorskip("sklearn")

PAGE = "docs/tutorial.md"
EXAMPLE = ROOT / "examples" / "composed" / "elastic_order.py"
EPOCHS = 4


def stages() -> dict[str, str]:
    """Returns the complete script of each stage, and the second one with AdaScale."""
    [ordinary] = blocks(PAGE, "python")
    to_elastic, to_adascale, to_resumable, to_ordered = blocks(PAGE, "diff")
    elastic = patched(ordinary, to_elastic)
    resumable = patched(elastic, to_resumable)
    return {
        "ordinary": ordinary,
        "elastic": elastic,
        "adascale": patched(elastic, to_adascale),
        "resumable": resumable,
        "ordered": patched(resumable, to_ordered),
    }


def write(folder: Path, stage: str) -> Path:
    """Writes what the reader has saved when a stage is reached."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    # The reader has installed the packages; this checkout is not.
    path = f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(path + stages()[stage])
    (folder / "trace.csv").write_text(block(PAGE, "csv", "step,batchsize"))
    return script


def accuracies(text: str) -> dict[int, float]:
    found = re.findall(r"^epoch (\d+): test accuracy ([\d.]+) %$", text, re.MULTILINE)
    return {int(epoch): float(percent) for epoch, percent in found}


def output_here(folder: Path, stage: str, epochs: int = EPOCHS) -> str:
    """Returns what a stage prints that runs in this process, which starts faster."""
    script, output = write(folder, stage), io.StringIO()
    where = ("--num-replicas", 1, "--device", "cpu") if stage != "ordinary" else ()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path.copy())
        patch.setattr(sys, "argv", words(["train.py", "--epochs", epochs, *where]))
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


def train_here(*given, **options) -> dict[int, float]:
    return accuracies(output_here(*given, **options))


def train(folder: Path, stage: str) -> dict[int, float]:
    """Runs a stage on three replicas in processes of their own, as the reader does."""
    arguments = ("--epochs", EPOCHS, "--num-replicas", 3, "--device", "cpu")
    return accuracies(run_script(write(folder, stage), *arguments, cwd=folder))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, float]:
    """The accuracies of the elastic script on one replica."""
    return train_here(tmp_path_factory.mktemp("elastic"), "elastic")


@pytest.mark.parametrize(("stage", "least"), [("ordinary", 85), slow("adascale", 75)])
def test_a_script_learns(tmp_path, stage, least):
    found = train_here(tmp_path, stage)
    assert list(found) == list(range(EPOCHS))
    assert max(found.values()) > least


@of_torch_alone
def test_the_elastic_script_learns_on_several_replicas(tmp_path, uninterrupted):
    assert list(uninterrupted) == list(range(EPOCHS))
    assert max(uninterrupted.values()) > 85
    assert train(tmp_path, "elastic") == pytest.approx(uninterrupted, abs=1)


def test_the_resumable_script_continues(tmp_path, uninterrupted, caplog):
    first = train_here(tmp_path, "resumable", epochs=2)
    second = train_here(tmp_path, "resumable")
    assert list(first) == [0, 1]
    assert list(second) == list(range(2, EPOCHS))
    assert first | second == uninterrupted
    updates = vbs.read_run(tmp_path / "checkpoints" / "run.jsonl").updates
    assert updates["step"].tolist() == list(range(len(updates)))
    read = updates["step"][updates["loss"].notna()].tolist()
    assert read == list(range(0, len(updates), 10))
    told = updates.dropna(subset="accuracy").set_index("epoch")["accuracy"]
    assert told.to_dict() == pytest.approx(first | second, abs=0.01)
    assert not output_here(tmp_path, "resumable")
    assert f"the run is complete: all {EPOCHS} epochs were trained" in caplog.text


@pytest.mark.slow
def test_the_ordered_script_learns_and_continues_on_replicas(tmp_path, uninterrupted):
    alone = train_here(tmp_path / "alone", "ordered")
    assert max(alone.values()) > 85
    assert alone != uninterrupted
    first = train_here(tmp_path, "ordered", epochs=2)
    second = train(tmp_path, "ordered")
    assert list(second) == list(range(2, EPOCHS))
    assert first | second == pytest.approx(alone, abs=1)


def test_the_last_stage_is_the_composed_example():
    [body, example] = (
        text[text.index("import argparse\n") :]
        for text in (stages()["ordered"], EXAMPLE.read_text(encoding="utf-8"))
    )
    # What puts a bare checkout on the path, with a blank line.
    own = r"(?m)^(import sys|from pathlib import Path|sys\.path\.insert\(0, .*\n)\n"
    assert re.sub(own, "", example) == body
    trace = EXAMPLE.with_name("trace.csv").read_text(encoding="utf-8")
    assert trace == block(PAGE, "csv", "step,batchsize")
