"""Which layers become semi-structured: most on a CPU, one test on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla import RigLScheduler, to_semi_structured
from rigl_xla.contrib.semi_structured import DTYPES, Kernels, refusal_of


def two_of_four(linear: nn.Linear) -> nn.Linear:
    """Returns the layer without the third and fourth input of every group."""
    keep = torch.arange(linear.in_features) % 4 < 2
    with torch.no_grad():
        linear.weight.mul_(keep)
    return linear


class Fake:
    """Kernels for a CPU: copies, with times by the number of outputs."""

    def __init__(self, faster=(), wrong=(), refused=()) -> None:
        self.faster, self.wrong, self.refused = faster, wrong, refused
        self.converted: list[tuple[int, ...]] = []
        self.num_timed = 0

    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] in self.refused:
            raise RuntimeError("shape must be a multiple of 32\nstack of something")
        self.converted.append(tuple(weight.shape))
        return weight * (2 if weight.shape[0] in self.wrong else 1)

    def seconds(self, functions) -> list[float]:
        self.num_timed += 1
        outputs = [function() for function in functions]
        return [1e-5, 4e-6 if outputs[0].shape[1] in self.faster else 1.2e-5]

    @property
    def kernels(self) -> Kernels:
        return Kernels(lambda weight: None, self.convert, self.seconds)


def mlp(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(two_of_four(nn.Linear(i, o)) for i, o in pairs))


def test_what_is_faster_is_converted_and_the_rest_stays():
    model = mlp(8, 16, 32, 16, 32, 4)
    weights = [layer.weight for layer in model]
    x = torch.randn(6, 8)
    before, fake = model(x), Fake(faster=[16])
    report = to_semi_structured(model, x, kernels=fake.kernels)
    assert [c.converted for c in report.layers] == [True, False, True, False, False]
    assert report.num_converted == 2
    for layer, weight, conversion in zip(model, weights, report.layers):
        assert (layer.weight is weight) == (not conversion.converted)
        assert layer.weight.requires_grad == (not conversion.converted)
        assert conversion.shape == tuple(weight.shape)
        assert conversion.num_rows == 6
    assert torch.equal(model(x), before)
    # 16 x 8, 32 x 16 twice, 16 x 32, 4 x 32: every shape is measured once.
    assert fake.num_timed == 4
    speedups = [c.speedup for c in report.layers]
    assert speedups == pytest.approx([2.5, 1 / 1.2, 2.5, 1 / 1.2, 1 / 1.2])
    lines = str(report).splitlines()
    assert lines[0] == "2 of 5 linear layers converted"
    assert lines[1] == (
        "  0 16 x 8, 6 rows: dense 10.0 us, 2:4 4.0 us; converted, 2.50 times as fast"
    )
    assert lines[2].endswith("dense, because 2:4 is only 0.83 times as fast")


def test_what_gains_less_than_asked_for_stays():
    report = to_semi_structured(
        mlp(8, 16), torch.randn(3, 8), kernels=Fake([16]).kernels, min_speedup=3
    )
    assert report.num_converted == 0
    assert "only 2.50 times" in report.layers[0].reason


def test_wrong_and_refused_kernels_are_not_used():
    model = mlp(8, 16, 32, 4)
    fake = Fake(faster=[16, 32, 4], wrong=[16], refused=[32])
    report = to_semi_structured(model, torch.randn(3, 8), kernels=fake.kernels)
    wrong, refused, fine = report.layers
    assert not wrong.converted
    assert "2:4 kernel is wrong here, by 100.0%" in wrong.reason
    assert refused.reason == "torch refuses it: shape must be a multiple of 32"
    assert fine.converted
    assert "  1: dense, because torch refuses it" in str(report)


def test_a_failed_device_is_not_taken_for_a_refusal():
    def convert(weight: torch.Tensor) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    kernels = dataclasses.replace(Fake().kernels, convert=convert)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        to_semi_structured(mlp(8, 16), torch.randn(3, 8), kernels=kernels)


class Odd(nn.Module):
    """Layers that must stay as they are, one for every reason."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Linear(8, 8)
        self.narrow = two_of_four(nn.Linear(6, 8))
        self.tied = two_of_four(nn.Linear(8, 8))
        self.twin = two_of_four(nn.Linear(8, 8))
        self.twin.weight = self.tied.weight
        self.attention = nn.MultiheadAttention(8, 2)
        two_of_four(self.attention.out_proj)
        self.never = two_of_four(nn.Linear(8, 8))
        self.fine = two_of_four(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fine(self.twin(self.tied(self.full(x))))
        x = self.attention(x, x, x)[0]
        return self.narrow(self.fine(x)[..., :6])


def test_what_cannot_be_converted_says_why():
    model = Odd().train()
    x = torch.randn(5, 3, 8)
    report = to_semi_structured(model, x, kernels=Fake(faster=[8]).kernels)
    reasons = {layer.name: layer.reason for layer in report.layers}
    for name, says in {
        "full": r"not 2:4: \d+ of 16 groups of four",
        "narrow": "its 6 inputs are not a multiple of four",
        "tied": "shared by 2 modules",
        "twin": "shared by 2 modules",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear",
        "never": "a forward pass does not call it",
        "fine": "converted",
    }.items():
        assert re.search(says, reasons[name]), name
    assert report.num_converted == 1
    assert report.layers[-1].num_rows == 15
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_on_a_cpu_nothing_is_converted_and_the_report_says_why():
    model = mlp(64, 64, 64).to(torch.bfloat16)
    weights = [layer.weight for layer in model]
    report = to_semi_structured(model, torch.randn(2, 64, dtype=torch.bfloat16))
    assert report.num_converted == 0
    assert [layer.weight for layer in model] == weights
    assert str(report).splitlines() == [
        "0 of 2 linear layers converted",
        "  0, 1: dense, because its weight is on the cpu, and torch's 2:4 kernels run "
        "on NVIDIA GPUs of compute capability 8.0 (Ampere) or later only; move the "
        "model there first",
    ]
    none = to_semi_structured(nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 2, 2))
    assert str(none) == "nothing was converted: the model has no linear layers"


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "says"),
    [
        ("xla", None, torch.bfloat16, "a TPU has no units for 2:4 sparsity"),
        ("xla:1", None, torch.bfloat16, "a TPU has no units for 2:4 sparsity"),
        ("mps", None, torch.float16, "on the mps, and .* NVIDIA GPUs"),
        ("cuda", None, torch.float16, "this one has none"),
        ("cuda", (7, 5), torch.float16, r"\(Ampere\) or later, and this one has 7\.5"),
        ("cuda", (8, 0), torch.float32, r"float32, and .*model\.bfloat16\(\)"),
    ],
)
def test_refusals(device, capability, dtype, says):
    assert re.search(says, refusal_of(torch.device(device), capability, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_newer_gpus_are_not_refused(dtype):
    for capability in [(8, 0), (9, 0), (10, 0)]:
        assert refusal_of(torch.device("cuda"), capability, dtype) is None


def test_a_pruner_must_let_go_first():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = RigLScheduler(
        model, optimizer, 1, 100, structure="2:4", ignore_linear_layers=False, delta=1
    )
    for _ in range(5):
        model(torch.randn(4, 8)).square().sum().backward()
        if pruner():
            optimizer.step()
    fake = Fake(faster=[8])
    with pytest.raises(ValueError, match=r"'2' is kept sparse by .* close\(\)"):
        to_semi_structured(model, torch.randn(4, 8), kernels=fake.kernels)
    pruner.close()
    report = to_semi_structured(model, torch.randn(4, 8), kernels=fake.kernels)
    assert [layer.converted for layer in report.layers] == [False, True]
    assert "not 2:4" in report.layers[0].reason  # uniform: the first layer is dense
    with pytest.raises(ValueError, match="needs inputs"):
        to_semi_structured(model)


@pytest.mark.parametrize("wrong", [float("nan"), 0, -1.0])
def test_a_speedup_that_everything_has_is_refused(wrong):
    with pytest.raises(ValueError, match="min_speedup must be a finite number > 0"):
        to_semi_structured(nn.Linear(8, 8), torch.ones(1, 8), min_speedup=wrong)
    with pytest.raises(TypeError, match="kernels must be Kernels, got 'cusparselt'"):
        to_semi_structured(nn.Linear(8, 8), torch.ones(1, 8), kernels="cusparselt")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs an NVIDIA GPU of compute capability 8.0 or later",
)
def test_on_a_gpu_nothing_gets_slower_or_wrong():
    model = mlp(4096, 4096, 64, 64).to("cuda", torch.bfloat16)
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        report = to_semi_structured(model, x)
        after = model(x)
    for layer, conversion in zip(model, report.layers):
        kind = torch.sparse.SparseSemiStructuredTensor
        assert isinstance(layer.weight, kind) == conversion.converted, str(report)
        if conversion.converted:
            assert conversion.speedup >= 1.05
    assert F.mse_loss(after, before) < 1e-3 * before.square().mean()
