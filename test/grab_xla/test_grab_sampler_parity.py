"""Orders equal those of grab-sampler 0.1.3, whose ties are negative, bit for bit."""

import pytest
import torch
from support.grab_xla.ordering import by_products, gradients
from support.reference import not_compared

import grab_xla
import per_sample_grad
from tools.references import grab_sampler

D = 40


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grab-sampler")
    error = grab_sampler.install(folder)
    if error is not None:
        not_compared(f"grab-sampler {grab_sampler.VERSION}", error)
    init = torch.utils.data.Sampler.__init__
    with grab_sampler.imported(folder) as imported:
        yield imported
    torch.utils.data.Sampler.__init__ = init


def sampler_of(package, n, balance_type, **options):
    parameters = {"w": torch.zeros(D, dtype=torch.float64)}
    options |= {"random_first_epoch": False, "dtype": torch.float64}
    return package.GraBSampler(range(n), parameters, balance_type, "cpu", **options)


def assert_same_orders(theirs, mine, size):
    orders, n = set(), len(mine)
    for epoch in range(5):
        order = list(theirs)
        assert list(mine) == order, epoch
        orders.add(tuple(order))
        rows = gradients(epoch, n, D)[order]
        for part in rows.split(size):
            theirs.step({"w": part})
            mine.step({"w": part})
    assert len(orders) == 5


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("normalize_grads", [False, True])
@pytest.mark.parametrize(("balance_type", "options", "size"), [
    *((name, {}, size) for name in ("mean", "pair", "recursive", "sign")
      for size in (1, 7, 32)),
    *(("recursive", {"depth": 3}, size) for size in (1, 7, 32)),
    # The blocks are the batches.
    *(("recursive-pair", {"batch_size": size}, size) for size in (2, 16, 32)),
])  # fmt: skip
def test_orders_are_equal(
    package, balance_type, options, size, normalize_grads, products, monkeypatch
):
    by_products(monkeypatch, products)
    num_samples = 96 if "batch_size" in options else 90
    given = {"normalize_grads": normalize_grads, **options}
    theirs = sampler_of(package, num_samples, balance_type, **given)
    mine = sampler_of(grab_xla, num_samples, balance_type, **given)
    assert_same_orders(theirs, mine, size)


SIZES = {"jl": 111, "kron": 121}


@pytest.mark.parametrize("balance_type", ["mean", "pair", "recursive"])
@pytest.mark.parametrize("kind", SIZES)
def test_projected_orders_are_equal(package, balance_type, kind):
    """Of one projection; ours keeps the 40 numbers, and zeros fill up theirs."""
    options = {"random_projection": kind, "pi_eps": 0.9}
    with pytest.warns(UserWarning, match=f"makes {SIZES[kind]} numbers of 40"):
        mine = sampler_of(grab_xla, 90, balance_type, **options)
    theirs = sampler_of(package, 90, balance_type, **options)
    assert theirs.sorter.PI.dd == SIZES[kind]

    def project(rows: torch.Tensor) -> torch.Tensor:
        found = mine.projection.of("w", [per_sample_grad.Dense(rows)], 2**20)
        return torch.nn.functional.pad(found, (0, SIZES[kind] - D))

    theirs.sorter.PI.project = project
    assert_same_orders(theirs, mine, 7)
