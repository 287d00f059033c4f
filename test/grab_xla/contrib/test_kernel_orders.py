"""Orders from kernels: oracles, conventions, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.grab_xla import balancing

from grab_xla import herding
from grab_xla.contrib.ntk import eigen_order, ntk_fixed_order

F64 = torch.float64


def vectors(n: int, d: int, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return mean + torch.randn(n, d, generator=generator, dtype=F64)


def balanced_one_by_one(z, rounds, order) -> list[int]:
    """Runs the algorithm as published, with the vectors themselves."""
    z = (z - z.mean(0)).numpy()
    for _ in range(rounds):
        order = balancing.mean(order, z[order], 0.0)
    return order


@pytest.mark.parametrize("rounds", [1, 16])
def test_the_fixed_order_balances_the_rows_of_the_kernel(rounds):
    features = vectors(200, 8, mean=1.0)
    kernel = features @ features.T
    draw = np.random.default_rng(0)
    begin, given = draw.permutation(200), kernel.clone()
    first = begin.tolist()
    found = ntk_fixed_order(kernel, rounds, begin)
    assert found.dtype == np.int64
    assert found.tolist() == balanced_one_by_one(kernel, rounds, first)
    eigen_order(kernel, largest=True)
    assert torch.equal(kernel, given)  # nothing given is changed
    assert begin.tolist() == first
    if rounds > 1:
        others = [draw.permutation(200) for _ in range(20)]
        for rows, share in ((kernel, 0.5), (features, 1.0)):
            least = min(herding(rows, order).euclidean for order in others)
            assert herding(rows, found).euclidean < share * least


def kernel_of(values, vectors) -> torch.Tensor:
    return vectors @ torch.diag(torch.tensor(values, dtype=F64)) @ vectors.T


# An orthonormal basis, each with its largest entry by magnitude positive.
SMALL = torch.tensor([0.8, -0.6, 0.0, 0.0], dtype=F64)
LARGE = torch.tensor([0.3, 0.4, 0.5, -(0.5**0.5)], dtype=F64) * -1
BASIS = torch.linalg.qr(torch.stack([SMALL, LARGE, *torch.eye(4, dtype=F64)[2:]], 1))[0]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 2, 3, 1]),  # of 0.8, -0.6, 0, 0
        ({"descending": False}, [1, 2, 3, 0]),
        ({"absolute": True}, [0, 1, 2, 3]),
        ({"absolute": True, "descending": False}, [2, 3, 1, 0]),
        ({"largest": True}, [3, 0, 1, 2]),  # of -0.3, -0.4, -0.5, 0.7
    ],
)
def test_an_eigenvector_is_sorted(options, expected, sign):
    kernel = kernel_of([1.0, 5.0, 3.0, 4.0], sign * BASIS)
    assert eigen_order(kernel, **options).tolist() == expected


def test_the_sign_is_that_of_the_first_of_several_largest_entries():
    vector = torch.tensor([[-0.5], [0.5], [0.5], [-0.5]], dtype=F64)
    for sign in (1, -1):
        noisy = sign * vector + 1e-13 * vectors(4, 1)
        order = eigen_order(noisy @ noisy.T, largest=True)
        assert order.tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("n", "d"), [(20, 100), (20, 5)])
def test_an_eigenvector_that_is_noise_is_warned_about(n, d, dtype):
    """This is the null vector of a centred kernel, or a vector of a null space."""
    features = vectors(n, d)
    features = features - features.mean(0)
    kernel = (features @ features.T).to(dtype)
    with pytest.warns(UserWarning, match="smallest.*is rounding noise"):
        order = eigen_order(kernel)
    assert sorted(order) == list(range(n))
    if d > n and dtype == F64:  # the null vector is constant
        assert order.tolist() == list(range(n))
    eigen_order(kernel, largest=True)


ORDERS = [ntk_fixed_order, eigen_order]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_not_finite_is_refused_by_name(order, bad):
    features, one = vectors(30, 3), torch.eye(30)
    features[[4, 17]] = one[2, 5] = bad
    for kernel, told in [
        (features @ features.T, r"samples \[4, 17\] of 30"),
        (one, r"samples \[2\] of 30"),
        (torch.full((30, 30), bad), r"\[0, 1, .*, 9\] and 20 more of 30"),
    ]:
        with pytest.raises(ValueError, match=told):
            order(kernel)


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_square_and_have_a_floating_dtype(order):
    assert order(torch.ones(1, 1)).tolist() == [0]
    for shape in ((3, 2), (3,), (0, 0)):
        with pytest.raises(ValueError, match=r"shape \(n, n\).*got \("):
            order(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"floating dtype, got torch.int64"):
        order(torch.eye(2, dtype=torch.int64))
