"""What the comparison with autograd sees, and when it is made again."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_cases import Apply
from torch import nn

import per_sample_grad as psg
from per_sample_grad.layers import RULES


@pytest.fixture
def rules():
    """The registry, as it was afterwards."""
    kept = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(kept)


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.flatten(1).square().sum(1)


@pytest.mark.parametrize("lowest", [-torch.inf, -1e9])
def test_a_mask_hides_no_wrong_rule(rules, lowest):
    right = RULES[nn.MultiheadAttention].contributions

    def wrong(call: psg.Call, grad: torch.Tensor):
        found = dict(right(call, grad))
        found["out_proj.bias"] = psg.Dense(1.01 * found["out_proj.bias"].values)
        return found

    psg.register_rule(nn.MultiheadAttention)(wrong)
    model, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(3, 5, 4)
    mask = torch.full((5, 5), lowest).triu(1)
    with psg.capture(model) as recorded:
        losses = squares(model(x, x, x, attn_mask=mask, need_weights=False)[0])
    with pytest.raises(psg.CouplingError, match=r"out_proj\.bias: off by 0\.0"):
        recorded.backward(losses)


def test_a_bias_that_cancels_is_no_error():
    """Alone, so that the whole gradient is rounding."""
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(4, 4))
    with psg.capture(model, ["0.bias"]) as recorded:
        losses = squares(torch.sin(model(torch.randn(3, 2, 9))))
    assert recorded.backward(losses).norms().max() < 1e-3
