"""docs/extending.md adds a member to each family from outside, in a few lines.

test_page_blocks.py runs them.
"""

from __future__ import annotations

import pytest
from support.documents import read

FAMILIES = (
    "A learning-rate rule", "A balance type", "A layer rule", "A sparsity method",
    "A replica backend", "A score of a pool", "A family of traces",
)  # fmt: skip
MOST_LINES = 30  # of code; blank lines are free


@pytest.mark.parametrize("family", FAMILIES)
def test_a_member_is_added_from_outside_in_a_few_lines(family):
    _, _, section = read("docs/extending.md").partition(f"\n## {family}\n")
    code, *more = section.partition("\n## ")[0].split("```python\n")[1:]
    lines = filter(str.strip, code.partition("```")[0].splitlines())
    assert 0 < len([*lines]) <= MOST_LINES
    assert not more
