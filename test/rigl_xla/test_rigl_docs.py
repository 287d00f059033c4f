"""The pages about rigl_xla show code that runs."""

from __future__ import annotations

from support.documents import block

PAGE, DETAILS = "docs/rigl_xla.md", "docs/rigl_xla_details.md"


def test_the_examples_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block(PAGE, "python", "# line 1"), names)
    assert "num_rigl_steps=14" in capsys.readouterr().out
    exec(block(PAGE, "python", "range(20)"), names)
    assert names["pruner"].step == 420
    exec(block(DETAILS, "python", "print(report)"), names)
    exec(block(DETAILS, "python", "cost_of("), names)
    exec(block(DETAILS, "python", "SummaryWriter"), names)
    assert "of dense training" in capsys.readouterr().out
    assert abs(names["report"].sparsity - 0.9) < 1e-3
    (events,) = tmp_path.glob("runs/events.out.tfevents.*")
    names["writer"].close()
    assert b"rigl/inference_flops_ratio" in events.read_bytes()
