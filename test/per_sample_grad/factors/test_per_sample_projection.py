"""Projections from factors are those of gradients, and keep inner products."""

from __future__ import annotations

import math

import pytest
import torch
from support.per_sample_grad.gradient_oracle import captured, error, flat, fold, oracle
from support.per_sample_grad.layer_cases import CASES
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors import projection as projections
from per_sample_grad.factors.forms import Dense, Outer

WIDE = 2**30


def by_hand(gradients: dict[str, torch.Tensor], projection: psg.Projection):
    """Returns every gradient times the map's matrix, made of where impulses go."""
    found = {}
    for name, values in gradients.items():
        count = values[0].numel()
        impulses = torch.eye(count, dtype=torch.float64).reshape(-1, *values.shape[1:])
        if values.dim() == 1:
            impulses = impulses.reshape(1, 1)
        places = projection.of(name, [Dense(impulses)], WIDE)
        found[name] = values.flatten(1) @ places
    return found


@pytest.mark.parametrize(("share", "budget"), [(0.3, 1), (0.3, WIDE), (1, WIDE)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_a_projection_is_a_linear_map_of_the_gradient(case, share, budget):
    model, inputs = case.make(torch.float64)
    truth, options = oracle(case, model, inputs), {"budget": budget, **case.options}
    factors = psg.per_sample_factors(model, case.loss, inputs, **options)
    total = sum(map(math.prod, factors.shapes.values()))
    size = max(len(factors.shapes), int(share * total))
    projection = psg.Projection(factors.shapes, size, seed=3)
    assert projection.size <= size
    found, expected = factors.project(projection), by_hand(truth, projection)
    assert found.keys() == expected.keys()
    assert error(flat(found), flat(expected)) <= 1e-10
    if share == 1:  # all numbers are kept
        assert error(flat(found), flat(truth)) <= 1e-10


SHAPES = {"w": (12, 10), "deep": (6, 4, 3, 3), "bias": (12,), "number": ()}


def test_inner_products_are_right_in_expectation():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    uses = {
        "w": Outer(draw(3, 1, 5, 12), draw(3, 1, 5, 10)),
        "deep": Outer(draw(3, 2, 7, 3), draw(3, 2, 7, 36)),
        "bias": Dense(draw(3, 12)),
        "number": Dense(draw(3, 1)),
    }

    def gram(size: int, seed: int) -> torch.Tensor:
        projection = psg.Projection(SHAPES, size, seed=seed)
        rows = [projection.of(name, [use], WIDE) for name, use in uses.items()]
        return torch.cat(rows, 1) @ torch.cat(rows, 1).T

    truth = gram(10**6, 0)  # of the gradients
    off = sum(gram(60, seed) for seed in range(400)) / 400 - truth
    assert 0 < off.abs().max() < 0.15 * truth.diagonal().max()


def test_parameters_keep_one_share_and_few_numbers_of_the_shorter_side():
    projection = psg.Projection({"a": (100, 50), "b": (100,), "c": (3, 2)}, 700)
    assert projection.kept == {"a": (100, 6), "b": (37, 1), "c": (1, 1)}
    assert projection.size == 100 * 6 + 37 + 1
    assert "to 638, seed 0" in str(projection)
    # Where the longer side would keep all, the shorter one would keep too few.
    assert psg.Projection({"a": (100, 50)}, 250).kept == {"a": (60, 4)}
    projection = psg.Projection({"a": (50, 100), "b": (32, 16, 3, 3)}, 1500)
    assert projection.kept == {"a": (8, 100), "b": (32, 9)}  # one channel
    assert psg.Projection(SHAPES, 10**6).kept["deep"] == (6, 36)


def test_the_projection_is_the_map_of_its_version():
    """Another map needs another `VERSION`: rows of earlier runs would be mixed."""
    shapes = {"w": (40, 30), "deep": (16, 8, 3, 3), "bias": (40,)}
    projection, rows = psg.Projection(shapes, 200, seed=5), []
    for name, shape in shapes.items():
        numbers = torch.arange(math.prod(shape), dtype=torch.float64) ** 2 % 19
        use = Dense(numbers.reshape(1, *shape))
        rows += projection.of(name, [use], WIDE).flatten().tolist()
    assert (projections.VERSION, len(rows)) == (3, 180)
    assert [*map(int, rows[:120:30])] == [-11, -9, -26, -16]


def test_the_map_depends_on_seed_and_names_and_not_on_what_wraps_a_model():
    """`DistributedDataParallel` and `torch.compile` put a prefix before names."""

    def of(projection: psg.Projection, name: str) -> torch.Tensor:
        return projection.of(name, [Dense(torch.ones(1, 9, 8))], WIDE)

    # A model's own attribute may have such a name, beside another.
    maps = {"w": (9, 8), "module.w": (9, 8)}
    both, other = psg.Projection(maps, 30), psg.Projection(maps, 30, seed=1)
    rows = [of(both, "w"), of(both, "module.w"), of(other, "w")]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 3
    told = set()
    for prefix in ("", "module.", "module._orig_mod."):
        projection = psg.Projection({f"{prefix}w": (9, 8), f"{prefix}v": (9, 8)}, 30)
        assert torch.equal(of(projection, f"{prefix}w"), rows[0])
        told.add(repr(projection))
    assert len(told) == 1
    # Other names, shapes or sequences are another map, and show it.
    for shapes in ({"u": (9, 8), "v": (9, 8)}, {"v": (9, 8), "w": (9, 8)}):
        assert repr(psg.Projection(shapes, 30)) not in told


def test_a_projection_of_another_model_is_refused():
    model, other = nn.Linear(2, 2), psg.Projection({"weight": (3, 2), "bias": (2,)}, 5)
    recorded, losses = captured(model, fold, torch.ones(1, 2))
    told = r"weight of shape \(2, 2\) is captured.*\(3,"
    with pytest.raises(ValueError, match=told):
        recorded.project(losses, other)
    with pytest.raises(ValueError, match=told):
        recorded.backward(losses).project(other)


def test_columns_follow_the_projection_and_not_the_model():
    model = nn.Linear(3, 2).double()
    projection = psg.Projection({"bias": (2,), "weight": (2, 3)}, 8)
    recorded, losses = captured(model, fold, torch.eye(3, dtype=torch.float64))
    found = recorded.project(losses, projection, retain_graph=True)
    expected = torch.autograd.grad(losses[1], [model.bias, model.weight])
    assert torch.allclose(found[1], torch.cat([g.flatten() for g in expected]))


def test_losses_of_few_digits_do_not_round_projections():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(4, 5, 3)
    answers = []
    for dtype in (torch.float32, torch.bfloat16):
        recorded, losses = captured(model, lambda m, to=dtype: fold(m, x).to(to))
        projection = psg.Projection(recorded.params, 12)
        answers.append(recorded.project(losses, projection, accumulate="sum"))
    assert answers[1].dtype == torch.float32
    torch.testing.assert_close(*answers)
