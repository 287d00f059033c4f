"""Matrix products keep all their digits, and afterwards settings are what they were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.per_sample_grad.gradient_oracle import fold
from torch import nn

import per_sample_grad as psg
import xla_replica
from per_sample_grad.factors import factors


@pytest.mark.parametrize("chosen", ["tf32", "ieee", "none"])
def test_a_gpu_keeps_all_digits_inside_and_its_setting_after(chosen):
    """The setting exists even without a GPU."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = chosen
    try:
        with xla_replica.full_matmul_precision(torch.device("cuda")):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == chosen
        with (
            pytest.raises(KeyError),
            xla_replica.full_matmul_precision(torch.device("cuda")),
        ):
            raise KeyError
        assert matmul.fp32_precision == chosen
        with xla_replica.full_matmul_precision(torch.device("cpu")):
            assert matmul.fp32_precision == chosen
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_torchs_older_setting_can_be_read_inside_and_is_as_before(chosen):
    """It must not differ from the newer one, which it sets."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision(chosen)
        usual = matmul.allow_tf32, matmul.fp32_precision
        assert usual[0] == (chosen != "highest")
        with xla_replica.full_matmul_precision(torch.device("cuda")):
            assert not matmul.allow_tf32
            assert torch.get_float32_matmul_precision() == "highest"
        assert (matmul.allow_tf32, matmul.fp32_precision) == usual
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.fp32_precision = before[1]


def test_torch_tpu_computes_in_torchs_highest_precision_inside():
    """TorchTPU reads torch's setting, which it sets to "medium" when it is loaded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with xla_replica.full_matmul_precision(torch.device("privateuseone")):
            assert torch.get_float32_matmul_precision() == "medium"
        with xla_replica.full_matmul_precision(SimpleNamespace(type="tpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_gram_matrices_ask_for_it(monkeypatch):
    asked = []

    def noted(device: torch.device):
        asked.append(device)
        return xla_replica.full_matmul_precision(device)

    monkeypatch.setattr(factors, "full_matmul_precision", noted)
    model, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    found = psg.per_sample_factors(model, fold, (x,))
    found.norms()
    assert not asked
    found.gram()
    found.cross_gram(found)
    psg.per_sample_gram(model, fold, (x,))
    assert asked == 3 * [torch.device("cpu")]
