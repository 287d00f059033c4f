"""The example of rules for computed weights: its script, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from support.documents import ROOT
from support.per_sample_grad.gradient_oracle import rules_kept
from support.scripts import run_script
from torch import nn

SCRIPT = ROOT / "examples/layer_rules/computed_weights.py"


def test_both_rules_agree_with_a_loop_of_autograd(tmp_path):
    status, output = run_script(SCRIPT, "--samples", 5, "--width", 12, cwd=tmp_path)
    assert status == 0, output
    found = re.findall(r"^(\w+): norms differ .* by (\S+) of", output, re.MULTILINE)
    assert [name for name, _ in found] == ["masked", "normalised"]
    assert all(float(error) < 1e-9 for _, error in found)


@rules_kept()
def test_a_width_of_nothing_is_refused(monkeypatch, capsys):
    from examples.layer_rules import computed_weights as example

    monkeypatch.setattr("sys.argv", ["computed_weights.py", "--width", "0"])
    with pytest.raises(SystemExit):
        example.main()
    assert "'0' is not at least 1" in capsys.readouterr().err


@rules_kept()
def test_layers_are_covered_by_their_rules_alone():
    import per_sample_grad as psg
    from examples.layer_rules import computed_weights as example

    layers = [example.MaskedLinear(4, 5, density=0.5), example.NormedLinear(5, 3)]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(6, 2, 4, dtype=torch.float64), torch.arange(6) % 3
    report = psg.coverage(model, example.losses_of, (x, y))
    assert report.complete
    for said in ("0.weight  ok", "MaskedLinear '0'", "NormedLinear '1'"):
        assert said in str(report)
