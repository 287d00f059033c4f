"""Neural tangent kernels against autograd, and orders from kernels."""

import numpy as np
import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.training import F64, samples
from support.per_sample_grad import flat, loop
from support.xla_replica.replicas import ONE_XLA_BACKEND
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import xla_replica
from grab_xla import herding
from grab_xla.contrib import ntk

SAMPLES = 21
INPUTS, TARGETS = samples(SAMPLES)
DATA = TensorDataset(INPUTS.unflatten(1, (2, 3)), TARGETS)


def vectors(n: int, d: int, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return mean + torch.randn(n, d, generator=generator, dtype=F64)


@pytest.mark.parametrize("rounds", [1, 16])
def test_the_fixed_order_balances_the_rows_of_the_kernel(rounds):
    features = vectors(200, 8, mean=1.0)
    kernel = features @ features.T
    draw = np.random.default_rng(0)
    begin, given = draw.permutation(200), kernel.clone()
    order, centred = begin.tolist(), (kernel - kernel.mean(0)).numpy()
    found = ntk.ntk_fixed_order(kernel, rounds, begin)
    ntk.eigen_order(kernel, largest=True)
    assert torch.equal(kernel, given)
    assert begin.tolist() == order
    for _ in range(rounds):
        order = ordering.mean(order, centred[order], 0.0)
    assert found.dtype == np.int64
    assert found.tolist() == order
    if rounds > 1:
        others = [draw.permutation(200) for _ in range(20)]
        for rows, share in ((kernel, 0.5), (features, 1.0)):
            least = min(herding(rows, order).euclidean for order in others)
            assert herding(rows, found).euclidean < share * least


# An orthonormal basis, each with its largest entry by magnitude positive.
FIRST = torch.tensor([[0.8, -0.6, 0, 0], [-0.3, -0.4, -0.5, 0.5**0.5]], dtype=F64)
BASIS = torch.linalg.qr(torch.cat([FIRST, torch.eye(4, dtype=F64)[2:]]).T)[0]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("options", "expected"), [
    ({}, [0, 2, 3, 1]),  # of 0.8, -0.6, 0, 0
    ({"descending": False}, [1, 2, 3, 0]),
    ({"absolute": True}, [0, 1, 2, 3]),
    ({"absolute": True, "descending": False}, [2, 3, 1, 0]),
    ({"largest": True}, [3, 0, 1, 2]),  # of -0.3, -0.4, -0.5, 0.7
])  # fmt: skip
def test_an_eigenvector_is_sorted(options, expected, sign):
    values = torch.tensor([1.0, 5.0, 3.0, 4.0], dtype=F64)
    kernel = (sign * BASIS * values) @ (sign * BASIS).T
    assert ntk.eigen_order(kernel, **options).tolist() == expected


def test_the_sign_is_that_of_the_first_of_several_largest_entries():
    vector = torch.tensor([[-0.5], [0.5], [0.5], [-0.5]], dtype=F64)
    for sign in (1, -1):
        noisy = sign * vector + 1e-13 * vectors(4, 1)
        order = ntk.eigen_order(noisy @ noisy.T, largest=True)
        assert order.tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("n", "d"), [(20, 100), (20, 5)])
def test_an_eigenvector_that_is_noise_is_warned_about(n, d, dtype):
    features = vectors(n, d)
    features = features - features.mean(0)
    kernel = (features @ features.T).to(dtype)
    with pytest.warns(UserWarning, match="smallest.*is rounding noise"):
        order = ntk.eigen_order(kernel)
    assert sorted(order) == list(range(n))
    if d > n and dtype == F64:  # the null vector is constant
        assert order.tolist() == list(range(n))
    ntk.eigen_order(kernel, largest=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("order", [ntk.ntk_fixed_order, ntk.eigen_order])
def test_matrices_are_square_and_finite(order, bad):
    assert order(torch.ones(1, 1)).tolist() == [0]
    features, one = vectors(30, 3), torch.eye(30)
    features[[4, 17]] = one[2, 5] = bad
    for kernel, told in [
        (features @ features.T, r"samples \[4, 17\] of 30"),
        (one, r"samples \[2\] of 30"),
        (torch.full((30, 30), bad), r"\[0, 1, .*, 9\] and 20 more of 30"),
        *((torch.zeros(size), r"\(n, n\).*got \(") for size in ((3, 2), (3,), (0, 0))),
    ]:
        with pytest.raises(ValueError, match=told):
            order(kernel)


def mlp(dtype=F64, norm=nn.BatchNorm1d) -> nn.Module:
    """Returns a model that flattens, so it needs a batch axis, and has buffers."""
    with xla_replica.LocalReplica("cpu").seeded(0):
        layers = nn.Linear(6, 5), norm(5), nn.Tanh(), nn.Linear(5, 3)
        model = nn.Sequential(nn.Flatten(), *layers)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2)
    return model.to(dtype).eval()


def given(model: nn.Module, data=DATA, loss_fn=cross_entropy) -> tuple:
    """Returns the arguments of `per_sample_gradients` that have no default."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return model, params, buffers, loss_fn, data


def gradients_by_autograd(model, data=DATA, loss_fn=cross_entropy) -> torch.Tensor:
    losses = (loss_fn(model(x[None]), y[None]) for x, y in data)
    return flat(loop(losses, model.parameters()))


@pytest.mark.parametrize("loss_fn", [cross_entropy, mse_loss])
@pytest.mark.parametrize("batch_size", [1, 8, SAMPLES, 128])
def test_gradients_are_those_of_autograd(batch_size, loss_fn):
    model, data = mlp(), DATA
    if loss_fn is mse_loss:
        data = TensorDataset(DATA.tensors[0], INPUTS[:, :3] / 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    found = ntk.per_sample_gradients(*given(model, data, loss_fn), batch_size, F64)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not found.requires_grad
    torch.testing.assert_close(found, gradients_by_autograd(model, data, loss_fn))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_and_unused_parameters_have_columns_too():
    model = mlp()
    expected = gradients_by_autograd(model)
    model[1].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=F64)))
    with torch.no_grad():
        found = ntk.per_sample_gradients(*given(model), 8, F64)
    unused = torch.zeros(SAMPLES, 3, dtype=F64)
    torch.testing.assert_close(found, torch.cat([unused, expected], 1))


def test_a_dtype_is_that_of_the_whole_computation():
    """A bfloat16 model and float64 data in float32 are as exact as float32."""
    found = ntk.per_sample_gradients(*given(mlp(torch.bfloat16)))
    assert found.dtype == torch.float32
    exact = gradients_by_autograd(mlp(torch.bfloat16).double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("centered", [True, False])
def test_the_kernel_is_that_of_autograd(centered):
    model = mlp()
    features = gradients_by_autograd(model)
    features = features - centered * features.mean(0)
    kernel = ntk.empirical_ntk(*given(model), 8, F64, centered=centered)
    assert torch.equal(kernel, kernel.T)
    torch.testing.assert_close(kernel, features @ features.T, rtol=1e-6, atol=1e-7)


def kernel_on_the_device(rank: int) -> tuple[torch.Tensor, xla_replica.Counts]:
    replica = xla_replica.current()
    # Not BatchNorm, which torch_xla 2.9 does not differentiate in evaluation mode.
    model = mlp(torch.float32, nn.LayerNorm).to(replica.device)
    with xla_replica.count(replica) as count:
        [found] = replica.fetch([ntk.empirical_ntk(*given(model), 2)])
    return found, count


@pytest.mark.parametrize("backend", ONE_XLA_BACKEND[:1])
def test_a_compiled_backend_makes_the_same_kernel(backend):
    expected = ntk.empirical_ntk(*given(mlp(norm=nn.LayerNorm)), dtype=F64)
    [(kernel, count)] = backend.run(kernel_on_the_device)
    torch.testing.assert_close(kernel.double(), expected, rtol=1e-4, atol=1e-5)
    assert count.compilations <= 5  # eleven batches share one program
    # The comparison with autograd, whether the features are finite, and the fetch.
    assert (count.transfers, count.fallbacks) == (3, {})
