"""What all packages share: checks of arguments, trees, whole files and differences."""

from __future__ import annotations

import collections
import errno
import math
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from support.variable_batch_size.reports import CountingReplica
from torch import nn

from xla_replica import LocalReplica
from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_function,
    check_integer,
    check_number,
    check_type,
    is_integer,
    is_number,
)
from xla_replica.common.differences import check_same, differences
from xla_replica.common.files import locked, write_whole
from xla_replica.common.trees import leaves, map_tensors, tensors_in

# --- arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_python_and_numpy_are_integers(value):
    assert is_integer(value)
    assert is_number(value)
    checked = check_integer("steps", value, least=3, most=3)
    assert (checked, type(checked)) == (3, int)


@pytest.mark.parametrize("value", [True, "3", None, [3]])
def test_a_bool_and_a_text_are_not_numbers(value):
    assert not is_integer(value)
    assert not is_number(value)
    got = re.escape(f"got {value!r}")
    with pytest.raises(TypeError, match=f"steps must be an integer, {got}"):
        check_integer("steps", value)
    with pytest.raises(TypeError, match=f"delta must be a finite number, {got}"):
        check_number("delta", value)


def test_what_is_allowed_is_returned_unchanged():
    assert is_number(0.5)
    assert not is_integer(3.0)
    value = np.float32(0.5)
    assert check_number("delta", value, least=0.5, below=1) is value
    assert check_flag("verbose", False) is False
    assert check_choice("method", "b", ("a", "b")) == "b"


@pytest.mark.parametrize(
    ("check", "arguments", "limits", "error", "says"),
    [
        (check_integer, (3.0,), {}, TypeError, "an integer, got 3.0"),
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
    ],
)  # fmt: skip
def test_messages_say_what_is_allowed_and_what_was_received(
    check, arguments, limits, error, says
):
    with pytest.raises(error, match=f"^a must be .*{re.escape(says)}$"):
        check("a", *arguments, **limits)


# --- trees --------------------------------------------------------------------------


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
    replica = CountingReplica()
    found = replica.to_host(state)
    assert replica.num_fetches == 1
    assert found["model"]._metadata == state["model"]._metadata
    assert list(found["model"]) == list(state["model"])
    assert found["milestones"] == state["milestones"]
    assert type(found["milestones"]) is collections.Counter
    assert found["place"].epoch == 2
    assert found["rest"][0][0].tolist() == [0, 1, 2]
    assert found["rest"][0][1:] + tuple(found["rest"][1:]) == ("text", None, 0.5)
    assert found["read-only"]["x"].tolist() == [0.0]
    with torch.no_grad():  # a copy: training continues while it is written
        norm.weight.fill_(7.0)
    assert found["model"]["weight"].tolist() == [1.0] * 3


class Event:
    """One of a device that comes to it when it is told to."""

    recorded: ClassVar[list[Event]] = []

    def __init__(self, device) -> None:
        self.has_come = False

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.has_come


@pytest.mark.parametrize("is_host", [True, False])
def test_a_copy_that_nobody_waits_for_is_there_when_the_device_has_come_to_it(
    is_host, monkeypatch
):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(LocalReplica, "is_host", is_host)
    tensor = torch.ones(1)
    copy = LocalReplica("cpu").fetch_later(tensor)
    tensor.zero_()
    if not is_host:
        assert copy() is None
        Event.recorded[-1].has_come = True
    assert copy().tolist() == [1.0]


def test_tensors_are_visited_in_the_order_in_which_they_are_listed():
    value = {"b": [torch.zeros(1), 2], "a": (Place(1, torch.ones(1)), "text")}
    seen = []
    map_tensors(value, lambda tensor: seen.append(tensor) or tensor)
    assert [id(tensor) for tensor in seen] == [id(t) for t in tensors_in(value)]
    assert list(leaves(value))[1:3] == [2, 1]
    assert tensors_in(torch.ones(1)) == [torch.ones(1)]
    assert tensors_in("text") == []


# --- files --------------------------------------------------------------------------


def test_a_file_appears_under_its_name_when_it_is_complete(tmp_path):
    unfinished, path = tmp_path / "new" / "unfinished", tmp_path / "new" / "file-7"

    def write(file) -> Path:
        file.write(b"content")
        assert [p.name for p in unfinished.parent.iterdir()] == ["unfinished"]
        return path

    assert write_whole(unfinished, write) == path
    assert [p.name for p in path.parent.iterdir()] == ["file-7"]
    assert path.read_bytes() == b"content"


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"earlier")

    def write(file) -> Path:
        file.write(b"half of")
        raise OSError(errno.ENOSPC, "the disk is full")  # as a write, without a name

    with pytest.raises(OSError, match=r"the disk is full: '.*unfinished'"):
        write_whole(tmp_path / "unfinished", write)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"earlier"


LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | "
LOCK += "fcntl.LOCK_NB)"


def test_a_lock_is_of_one_process_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def another_gets_it() -> bool:
        command = [sys.executable, "-c", LOCK, str(path)]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    with locked(path) as has_it:
        assert has_it
        assert not another_gets_it()
    assert another_gets_it()
    assert path.read_bytes() == b"content"
    with locked(tmp_path / "nothing") as has_it:  # nobody can lock that
        assert has_it


# --- differences --------------------------------------------------------------------

SAVED = {"lr": 0.1, "seed": 1}
OWN = {"lr": 0.2, "seed": 1, "width": 3}


def test_settings_that_differ_are_listed_by_the_names_that_people_use():
    assert differences(SAVED, SAVED) == []
    called = {"width": "the width", "seed": "the seed"}
    assert differences(SAVED, OWN, called) == ["the width was None and is 3"]
    check_same(SAVED, SAVED, "load_state_dict")
    with pytest.raises(ValueError, match="lr was") as caught:
        check_same(SAVED, OWN, "load_state_dict: another run", "Use the same settings.")
    assert str(caught.value) == (
        "load_state_dict: another run: lr was 0.1 and is 0.2; width was None and is 3. "
        "Use the same settings."
    )
