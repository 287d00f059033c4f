"""What all packages share: checks of arguments and trees."""

import collections
import math
import re
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.variable_batch_size.wrapping import CountingReplica
from torch import nn

from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_function,
    check_integer,
    check_number,
    check_type,
)


def test_what_is_allowed_is_returned():
    for value in (3, np.int64(3), np.uint8(3)):
        checked = check_integer("steps", value, least=3, most=3)
        assert (checked, type(checked)) == (3, int)
        assert check_number("delta", value) is value
    value = np.float32(0.5)
    assert check_number("delta", value, least=0.5, below=1) is value
    assert check_flag("verbose", False) is False
    assert check_choice("method", "b", ("a", "b")) == "b"


@pytest.mark.parametrize(("check", "arguments", "limits", "error", "says"), [
    *((check_integer, (value,), {}, TypeError, f"an integer, got {value}")
      for value in (3.0, True, None, [3])),
    *((check_number, (value,), {}, TypeError, f"a finite number, got {value!r}")
      for value in (True, None, [3], "3")),
    (check_integer, (0, 1), {}, ValueError, "an integer >= 1, got 0"),
    (check_integer, (3, 0, 2), {}, ValueError, "an integer >= 0 and <= 2, got 3"),
    (check_number, (math.nan,), {}, ValueError, "a finite number, got nan"),
    (check_number, (10**400,), {}, ValueError, f"a finite number, got {10**400}"),
    (check_number, (1.0,), {"above": 0, "below": 1}, ValueError,
     "a finite number > 0 and < 1, got 1.0"),
    (check_number, (0,), {"above": 0}, ValueError, "a finite number > 0, got 0"),
    (check_number, (2,), {"most": 1.5}, ValueError, "finite number <= 1.5, got 2"),
    (check_flag, ("no",), {}, TypeError, "True or False, got 'no'"),
    (check_flag, (1,), {}, TypeError, "True or False, got 1"),
    (check_choice, ("c", ("a", None)), {}, ValueError, "one of 'a', None, got 'c'"),
    (check_choice, (np.ones(2), ("a",)), {}, ValueError,
     "one of 'a', got array([1., 1.])"),
    (check_function, ("train",), {}, TypeError, "a function, got 'train'"),
    (check_type, ("ab", (tuple, list), "a tuple"), {}, TypeError,
     "a tuple, got 'ab' (str)"),
])  # fmt: skip
def test_messages_say_what_is_allowed_and_given(check, arguments, limits, error, says):
    with pytest.raises(error, match=f"^a must be .*{re.escape(says)}$"):
        check("a", *arguments, **limits)


class Place(NamedTuple):
    epoch: int
    weights: torch.Tensor


def test_a_state_comes_to_the_host_in_one_transfer():
    """And its containers keep their types."""
    norm = nn.BatchNorm1d(3)
    state = {
        "model": norm.state_dict(),
        "place": Place(2, torch.ones(2)),
        "milestones": collections.Counter([5, 5]),
        "read-only": types.MappingProxyType({"x": torch.zeros(1)}),
        "rest": [(torch.arange(3), "text"), None, 0.5],
    }
    replica = CountingReplica("cpu")
    found = replica.to_host(state)
    assert replica.num_fetches == 1
    assert found["model"]._metadata == state["model"]._metadata
    assert list(found["model"]) == list(state["model"])
    assert found["milestones"] == state["milestones"]
    assert type(found["milestones"]) is collections.Counter
    assert found["place"].epoch == 2
    (numbers, text), *rest = found["rest"]
    assert (numbers.tolist(), text, rest) == ([0, 1, 2], "text", [None, 0.5])
    assert found["read-only"]["x"].tolist() == [0.0]
    with torch.no_grad():  # a copy: training continues while it is written
        norm.weight.fill_(7.0)
    assert found["model"]["weight"].tolist() == [1.0] * 3
