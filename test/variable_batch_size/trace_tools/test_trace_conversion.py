"""A log of devices becomes the steps that a run on them makes."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from variable_batch_size import trace_tools as tools
from variable_batch_size.traces.batch_trace import TraceError

# Of published logs, some of which have none.
HEADERS = "Time,TPU_cores\n", "time, replicas\n", " timestamp ,devices\n", ""


def log(text: str) -> io.StringIO:
    file = io.StringIO(text)
    file.name = "log.csv"
    return file


def availability(gaps: Sequence[int], devices: Sequence[int]) -> tools.Availability:
    return tools.Availability(1000.0 + np.cumsum(gaps), np.array(devices))


def by_the_second(
    found: tools.Availability, policy: Any, duration: Any, restart: int
) -> tuple[list[tuple[int, int, int]], int, int]:
    """Runs the log second by second: (start, size, devices) of steps, lost, idle."""
    times = (found.times - found.times[0]).astype(int).tolist()
    per_second: list[int] = []
    for begin, end, count in zip(times, times[1:], found.devices.tolist()):
        per_second += [count] * (end - begin)
    steps: list[tuple[int, int, int]] = []
    now = running = lost = idle = 0
    while now < len(per_second):
        count = per_second[now]
        if count == 0:
            running, now = 0, now + 1
        elif count != running:
            running = count
            for _ in range(restart):
                if now == len(per_second) or per_second[now] != count:
                    running = 0
                    break
                idle, now = idle + count, now + 1
        else:
            needed = duration(policy(count), count)
            seconds = per_second[now : now + needed]
            fewer = [n for n, there in enumerate(seconds) if there < count]
            kept = fewer[0] if fewer else len(seconds)
            idle += sum(seconds[:kept]) - kept * count
            if kept == needed:
                steps.append((now, policy(count), count))
            else:
                lost += kept * count
            now += kept
    return steps, lost, idle


ROWS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=2, max_size=12
)
LOGS = ROWS.map(lambda rows: availability(*zip(*rows)))


@given(LOGS, st.integers(0, 4), st.integers(1, 3), st.integers(0, 5))
@example(availability([0, 3, 1, 1, 1, 14], [2, 3, 2, 3, 2, 0]), 2, 3, 0)
def test_steps_are_those_of_a_run_second_by_second(found, update, substep, restart):
    """Every device-second is in a step, lost or idle; a second is a quarter, too."""
    policy = tools.POLICIES["capped"](samples_per_device=32, most=64)

    def duration(size: int, devices: int) -> int:  # of minibatches of 16 samples
        return update + substep * math.ceil(size / 16 / devices)

    steps, lost, idle = by_the_second(found, policy, duration, restart)
    for unit in (1, 0.25):
        scaled = tools.Availability(found.times * unit, found.devices)
        numbers = scaled, policy, tools.StepTime(unit * update, unit * substep)
        options = {"restart_seconds": unit * restart, "minibatch_size": 16}
        if not steps:
            with pytest.raises(TraceError, match=r"^no step is completed"):
                tools.convert(*numbers, **options)
            continue
        result = tools.convert(*numbers, **options)
        table = result.steps[["step", "start_seconds", "batchsize", "devices"]]
        expected = [[n, unit * start, *of] for n, (start, *of) in enumerate(steps)]
        assert table.values.tolist() == expected
        assert (result.lost, result.idle) == (unit * lost, unit * idle)
        total = result.in_steps + unit * (lost + idle)
        assert total == result.device_seconds == scaled.device_seconds


SIZES = st.integers(1, 4000)


@given(st.integers(1, 500), st.integers(1, 64), SIZES, SIZES)
def test_policies_keep_their_bounds(devices, per_device, first, second):
    least, most = sorted((first, second))
    own = {"samples_per_device": per_device}
    capped = tools.POLICIES["capped"](least=least, most=most, **own)
    proportional = tools.POLICIES["proportional"](**own)
    assert proportional(devices) == devices * per_device
    assert capped(devices) == min(max(devices * per_device, least), most)
    assert tools.POLICIES["fixed"](batch_size=most)(devices) == most


@pytest.mark.parametrize(("text", "times", "devices", "warns"), [
    *((f"{header}5,3\n7,0\n", [5, 7], [3, 0], False) for header in HEADERS),
    ("\n 5.5 , 3\n7,2", [5.5, 7], [3, 2], False),
    ("Time,GPUs\n5,3\n5,4\n6,1\n8,2\n8,0\n8,3\n", [5, 6, 8], [4, 1, 3], True),
    # As many rows as ticks, each as long as the others.
    ('{"metadata": {"gap_seconds": 300}, "data": [4, 0, 2]}',
     [0, 300, 600, 900], [4, 0, 2, 0], False),
])  # fmt: skip
def test_logs_that_people_have_are_read(text, times, devices, warns, caplog):
    found = tools.read_availability(log(text))
    assert (found.times.tolist(), found.devices.tolist()) == (times, devices)
    messages = [record.getMessage() for record in caplog.records]
    said = r"log.csv: the last of the rows of one time holds.* 3, the first at 5"
    assert [bool(re.match(said, each)) for each in messages] == [True] * warns
    rows = tools.convert_rows(found, tools.POLICIES["fixed"](batch_size=8))
    assert len(rows) == sum(count > 0 for count in devices)


@pytest.mark.parametrize(("text", "message"), [
    ("GPUs\n4\n", "one column Time or time or timestamp, found none"),
    ("Time,GPUs,TPU_cores\n1,4,4\n", "found ['GPUs', 'TPU_cores']"),
    ("Time,GPUs\n", "no rows; at least one is needed"),
    ("Time,GPUs\n1,4\n\n0,4\n", "line 4, Time: '0' must not be before"),
    ("1,4\n2,-1\n", "line 2, devices: '-1' must be an integer >= 0"),
    ('{"data": [1]}', "KeyError('metadata')"),
    ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds must be"),
    ('{"metadata": {"gap_seconds": 9}, "data": [1, null]}', "devices: None must"),
    ("Time,GPUs\n1652434464406,4\n", "seconds, not milliseconds"),
    ("Time,GPUs\n1,4\n2,many\n", "line 3, GPUs: 'many' must be an integer >= 0"),
    ("Time,GPUs\n1,0\n2,0\n", "no row has a device"),
])  # fmt: skip
def test_bad_logs_say_where_and_why(text, message):
    with pytest.raises(TraceError) as caught:
        tools.read_availability(log(text))
    assert str(caught.value).startswith("log.csv")
    assert message in str(caught.value)
