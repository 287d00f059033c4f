"""Dropping and growing give the masks of a reference that sorts Python tuples."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigl_xla.topology import masks

# Few values, so that many are equal; an active weight of zero is one of them.
VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1e-30, 1e30])


def best(scores: list[float], eligible: list[bool], count: int) -> list[bool]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen = [i for i in order if eligible[i]][:count]
    return [i in chosen for i in range(len(scores))]


def updated(mask, weights, gradients, num_keep, num_grow):
    keep = best([abs(w) for w in weights], mask, num_keep)
    grow = best([abs(g) for g in gradients], [not k for k in keep], num_grow)
    return [k or g for k, g in zip(keep, grow)]


@st.composite
def layers(draw):
    size = draw(st.integers(1, 12))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    weights = draw(st.lists(VALUES, min_size=size, max_size=size))
    weights = [w if m else 0.0 for w, m in zip(weights, mask)]
    gradients = draw(st.lists(VALUES, min_size=size, max_size=size))
    dropped = draw(st.integers(0, sum(mask)))
    return mask, weights, gradients, sum(mask) - dropped, dropped


@settings(max_examples=300)
@given(layer=layers(), num_layers=st.integers(1, 2))
def test_the_kernel_equals_the_slow_one(layer, num_layers):
    mask, weights, gradients, num_keep, num_grow = layer
    found, _ = masks.drop_and_grow(
        torch.tensor([mask] * num_layers),
        torch.tensor([weights] * num_layers).abs(),
        torch.tensor([gradients] * num_layers).abs(),
        torch.tensor([num_keep] * num_layers),
        torch.tensor([num_grow] * num_layers),
    )
    assert found.tolist() == [updated(*layer)] * num_layers
    assert found.sum(1).tolist() == [num_keep + num_grow] * num_layers


def test_layers_of_one_size_are_chosen_at_once():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (5, 40), generator=generator).float()
    counts = [0, 1, 17, 39, 40]
    found = masks.top(scores, torch.tensor(counts))
    assert found.sum(1).tolist() == counts
    alone = [masks.top(s[None], torch.tensor([k])) for s, k in zip(scores, counts)]
    assert torch.equal(found, torch.cat(alone))
    for row, count, chosen in zip(scores.tolist(), counts, found.tolist()):
        assert chosen == best(row, [True] * 40, count)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 6),
    width=st.integers(1, 8),
    data=st.data(),
)
def test_rows_keep_their_number_of_connections(seed, rows, width, data):
    per_row = data.draw(st.integers(1, width))
    num_keep = data.draw(st.integers(0, rows * per_row))
    draw = torch.Generator().manual_seed(seed)
    drop, grow = (
        torch.randint(0, 5, (rows, width), generator=draw).float() for _ in range(2)
    )
    chances = torch.rand(rows, width, generator=draw)
    mask = masks.top(chances, torch.full((rows,), per_row))
    found, _ = masks.drop_and_grow_rows(
        mask, drop, grow, torch.tensor([num_keep]), per_row
    )
    keep = best(drop.flatten().tolist(), mask.flatten().tolist(), num_keep)
    for row in range(rows):
        kept = keep[row * width : (row + 1) * width]
        left = [not k for k in kept]
        grown = best(grow[row].tolist(), left, per_row - sum(kept))
        assert found[row].tolist() == [k or g for k, g in zip(kept, grown)]


def test_initial_masks_have_exactly_as_many_connections_and_leave_torch_random():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    mask = masks.random_mask(0, "fc.weight", 1000, 137)
    assert int(mask.sum()) == 137
    assert torch.equal(before, torch.get_rng_state())
    # A literal, so that a run resumes under another release: do not change it lightly.
    assert masks.random_mask(0, "fc.weight", 8, 3).nonzero().tolist() == [[4], [6], [7]]
