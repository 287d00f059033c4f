"""The pages about rigl_xla show code that runs."""

from __future__ import annotations

from support.documents import block, blocks

PAGE, DETAILS = "docs/rigl_xla.md", "docs/rigl_xla_details.md"


def test_the_example_of_snip_runs():
    names: dict[str, object] = {}
    exec(block(PAGE, "python", "snip_scores"), names)
    assert abs(names["pruner"].report().sparsity - 0.9) < 1e-3


def test_the_examples_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    examples = blocks(PAGE, "python")
    exec(examples[0], names)
    assert "num_rigl_steps=14" in capsys.readouterr().out
    exec(block(PAGE, "python", "for step in range(20):\n    with psg"), names)
    assert names["pruner"].step == 420
    of_reports = [text for text in blocks(DETAILS, "python") if "costs" in text]
    assert len(of_reports) == 2
    for text in of_reports:
        exec(text, names)
    assert "training: dense 1.0000" in capsys.readouterr().out
    assert abs(names["report"].sparsity - 0.9) < 1e-3
    exec(block(DETAILS, "python", "save_compact("), names)
    assert (tmp_path / "model.pt").stat().st_size < names["report"].size_in_bytes + 3000
    (events,) = tmp_path.glob("runs/events.out.tfevents.*")
    names["log"]._writer.close()
    assert b"rigl/inference_flops_ratio" in events.read_bytes()
