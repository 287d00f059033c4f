"""The neural tangent kernel against autograd, one sample at a time."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import ONE_XLA_BACKEND
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import xla_replica
from grab_xla.contrib import ntk
from grab_xla.contrib.ntk import empirical_ntk, per_sample_gradients

F64 = torch.float64
SAMPLES = 21


def mlp(dtype=F64, norm=nn.BatchNorm1d) -> nn.Module:
    """Returns a model that flattens, so it needs a batch axis, and has buffers."""
    with xla_replica.LocalReplica("cpu").seeded(0):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(6, 5), norm(5), nn.Tanh(), nn.Linear(5, 3)
        )
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2)
    return model.to(dtype).eval()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 2, 3, generator=generator, dtype=F64)
    return TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def given(model: nn.Module, data=None, loss_fn=cross_entropy) -> tuple:
    """Returns the arguments of `per_sample_gradients` that have no default."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return model, params, buffers, loss_fn, dataset() if data is None else data


def gradients_by_autograd(model, loss_fn=cross_entropy, data=None) -> torch.Tensor:
    rows = []
    for x, y in data or dataset():
        loss = loss_fn(model(x[None]), y[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


@pytest.mark.parametrize("loss_fn", [cross_entropy, mse_loss])
@pytest.mark.parametrize("batch_size", [1, 8, SAMPLES, 128])
def test_gradients_are_those_of_autograd(batch_size, loss_fn):
    """Targets may be numbers of classes, or real numbers."""
    model, data = mlp(), dataset()
    if loss_fn is mse_loss:
        data = TensorDataset(data.tensors[0], data.tensors[0][:, 0] / 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    found = per_sample_gradients(*given(model, data, loss_fn), batch_size, F64)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not found.requires_grad
    torch.testing.assert_close(found, gradients_by_autograd(model, loss_fn, data))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_and_unused_parameters_have_columns_too():
    """Whether gradients are enabled where it is called makes no difference."""
    model = mlp()
    expected = gradients_by_autograd(model)
    model[1].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=F64)))
    with torch.no_grad():
        found = per_sample_gradients(*given(model), 8, F64)
    unused = torch.zeros(SAMPLES, 3, dtype=F64)
    torch.testing.assert_close(found, torch.cat([unused, expected], 1))


def test_a_dtype_is_that_of_the_whole_computation():
    """A bfloat16 model and float64 data in float32 are as exact as float32."""
    found = per_sample_gradients(*given(mlp(torch.bfloat16)))
    assert found.dtype == torch.float32
    exact = gradients_by_autograd(mlp(torch.bfloat16).double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 20, ntk.CHUNK])
@pytest.mark.parametrize("centered", [True, False])
def test_the_kernel_is_that_of_autograd(centered, chunk, monkeypatch):
    monkeypatch.setattr(ntk, "CHUNK", chunk)
    model = mlp()
    features = gradients_by_autograd(model)
    if centered:
        features = features - features.mean(0)
    expected = torch.tensor([[float(a @ b) for b in features] for a in features])
    kernel = empirical_ntk(*given(model), 8, F64, centered=centered)
    assert torch.equal(kernel, kernel.T)
    torch.testing.assert_close(kernel, expected.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:autograd's gradients of")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(bad):
    data = dataset()
    data.tensors[0][[3, 20], 0, 0] = bad
    with pytest.raises(ValueError, match=r"gradients must be finite.*\[3, 20\] of 21"):
        empirical_ntk(*given(mlp(), data))


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([], ValueError, "or the dataset is empty"),
        ([torch.ones(2, 3)], TypeError, r"pairs \(input, target\).*\['Tensor'\]"),
        ([{"x": torch.ones(2, 3)}], TypeError, r"collate to \['dict'\]"),
        ([(torch.ones(2, 3), "cat")], TypeError, r"collate to \['Tensor', '\w+'\]"),
    ],
)
def test_datasets_that_are_refused(items, error, message):
    with pytest.raises(error, match=message):
        per_sample_gradients(*given(mlp(), items))


def kernel_on_the_device(rank: int) -> tuple[torch.Tensor, dict, tuple[int, int]]:
    replica = xla_replica.current()
    # Not BatchNorm, which torch_xla 2.9 does not differentiate in evaluation mode.
    model = mlp(torch.float32, nn.LayerNorm).to(replica.device)
    with xla_replica.count(replica) as count:
        kernel = empirical_ntk(*given(model), 2)
        found = replica.fetch([kernel])[0]
    return found, count.fallbacks, (count.compilations, count.transfers)


@pytest.mark.parametrize("backend", ONE_XLA_BACKEND[:1])
def test_a_compiled_backend_makes_the_same_kernel(backend):
    expected = empirical_ntk(*given(mlp(norm=nn.LayerNorm)), dtype=F64)
    kernel, fallbacks, (compilations, transfers) = backend.run(kernel_on_the_device)[0]
    torch.testing.assert_close(kernel.double(), expected, rtol=1e-4, atol=1e-5)
    assert fallbacks == {}
    # Eleven batches share one program.
    assert compilations <= 5
    # The comparison with autograd, whether the features are finite, and the fetch.
    assert transfers == 3
