"""Size is a budget: lines of code, and what a reader has to follow."""

import importlib

import pytest

import variable_batch_size as vbs
from tools.size.count_calls import COUNTED, LIMITS, WAYS, counts, passed_by
from tools.size.count_lines import PACKAGES, ROOT, size_of, size_of_source, total

SOURCE = '''\
"""A module.

With a long docstring.
"""

import os  # a comment beside code counts as code

# a comment alone does not


def first(
    number: int,
) -> str:
    """Returns a text."""

    def inner() -> str:
        return """two
        lines"""

    return inner() * number


NAMES = [
    "a",

    "b",
]
'''
# Lines of code; of all text, docstrings are to stay a fifth.
CODE = 19_741
TEST_LINES = 32_189


def test_lines_are_counted():
    size = size_of_source(SOURCE)
    assert size.code == 1 + 7 + 4
    assert size.docstrings == 5
    assert size.lines == SOURCE.count("\n")
    assert sorted(size.functions) == [3, 7]
    assert size.median_function == 5


def test_the_packages_stay_within_their_budget():
    sizes = {name: size_of(ROOT / name) for name in PACKAGES}
    everything = total(list(sizes.values()))
    assert everything.code <= CODE, {name: size.code for name, size in sizes.items()}
    assert everything.docstrings >= everything.lines / 5
    assert everything.median_function <= 7
    texts = [path.read_text("utf-8") for path in (ROOT / "test").rglob("*.py")]
    assert sum(text.count("\n") for text in texts) <= TEST_LINES


@pytest.mark.parametrize("name", WAYS)
def test_a_way_costs_no_more_than_it_did(name, monkeypatch):
    # A pruner that another test has left looks at every optimizer's step.
    optimizer = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizer, "_global_optimizer_post_hooks", {})
    passed, numbers = counts(name)
    for what, number, most in zip(COUNTED, numbers, LIMITS[name], strict=True):
        assert number <= most, (what, passed)


def test_what_others_have_left_to_be_collected_is_not_counted():
    """A suspended generator runs once more when it is collected."""
    sampler = vbs.CustomSampler(range(8), [2, 2], minibatch_size=1, verbose=False)
    cycle: list[object] = [batches := iter(sampler)]
    next(batches)
    cycle.append(cycle)
    del batches, cycle
    assert passed_by(lambda: [[] for _ in range(100_000)]).calls == 0
