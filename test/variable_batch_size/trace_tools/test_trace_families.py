"""Traces that are made from a few numbers."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.trace_tools.curves import decay
from variable_batch_size.trace_tools.families import FAMILIES, make
from variable_batch_size.trace_tools.options import amount
from variable_batch_size.traces.batch_trace import Trace, TraceError


def sizes(family: str, **options: object) -> list[int]:
    table = make(family, **options)
    assert table["step"].tolist() == [*range(len(table))]
    return table["batchsize"].tolist()


def test_simple_families_and_those_of_others_are_what_they_say(monkeypatch):
    assert sizes("constant", steps=3, batch_size=64) == [64] * 3
    assert sizes("ramp", steps=5, first=32, last=96) == [32, 48, 64, 80, 96]
    ramp = partial(sizes, "ramp", multiple_of=32)
    assert ramp(steps=5, first=32, last=96) == [32, 64, 64, 64, 96]
    assert ramp(steps=3, first=64, last=32) == [64, 64, 32]
    doubling = sizes("doubling", steps=7, first=3, every=2, most=13)
    assert doubling == [3, 3, 6, 6, 12, 12, 12]
    monkeypatch.setitem(FAMILIES, "saw", lambda *, steps: [8, 16] * steps)
    assert sizes("saw", steps=2) == [8, 16, 8, 16]


@given(
    st.lists(st.integers(1, 200), max_size=4, unique=True),
    st.lists(st.integers(1, 30), min_size=5, max_size=5),
    st.integers(1, 400),
    st.sampled_from(["steps", "samples", "tokens"]),
)
def test_thresholds_hold_in_their_unit(starts, values, total, unit):
    """Each step has the batch size of the last row that has begun, until the total."""
    rows = [*zip([0, *sorted(starts)], values)]
    text = " ".join(f"{start}:{size}" for start, size in rows)
    options = {"total": total, "unit": unit, "tokens_per_sample": 3}
    found = sizes("thresholds", rows=text, **options)
    expected, done = [], 0
    while done < total:
        size = [size for start, size in rows if start <= done][-1]
        expected.append(size)
        done += {"steps": 1, "samples": size, "tokens": 3 * size}[unit]
    assert found == expected


def test_seesaw_doubles_the_batch_where_it_divides_the_rate_by_the_root_of_two():
    """Where the cosine has halved: after 1/2, 2/3 - its arccos - of what is left."""
    total, warm_up = 60_000, 6_000
    options = {"total_samples": total, "warm_up_samples": warm_up}
    batch = np.array(sizes("seesaw", first=20, most=320, **options))
    begun = np.cumsum(batch) - batch
    assert begun[-1] < total <= begun[-1] + batch[-1]
    done = np.maximum(begun - warm_up, 0) / (total - warm_up)
    halvings = np.floor(1e-9 - np.log2((1 + np.cos(np.pi * done)) / 2))
    assert batch.tolist() == (20 * 2 ** np.clip(halvings, 0, 4)).tolist()
    assert set(batch) == {20, 40, 80, 160, 320}
    lr = decay("cosine", total, warm_up).halved().factor(begun) * np.sqrt(batch / 20)
    rising, capped = begun < warm_up, halvings > 4  # lr: of the rule 'root'
    assert lr[rising] == pytest.approx(begun[rising] / warm_up)
    whole = ~rising & ~capped
    assert (lr * np.sqrt(batch / 20))[whole] == pytest.approx(1.0)


def test_the_critical_batch_is_followed_upwards(tmp_path):
    """16 + samples: doubles at 16, 48 and 112; then the curve falls, and nothing."""
    path = tmp_path / "critical.csv"
    path.write_text("samples,critical_batch\n0,16\n200,216\n300,0\n")
    critical = partial(sizes, "critical-batch")
    found = critical(first=16, most=100, total_samples=500, curve=str(path))
    assert found == [16, 32, *[64] * 8]
    rising = critical(first=8, most=64, total_samples=4000, coefficient=1.0)
    begun = np.cumsum([0, *rising])[:-1]
    expected = [max(n for n in (8, 16, 32, 64) if n == 8 or n <= s**0.5) for s in begun]
    assert rising == expected
    path.write_text("samples,critical_batch\n0,16\n200,-1\n")
    with pytest.raises(TraceError, match=r"line 3, critical_batch: '-1' must be >= 0"):
        critical(first=16, most=100, total_samples=500, curve=str(path))


def test_a_spot_market_has_the_devices_that_its_probabilities_say():
    options = {"steps": 20_000, "devices": 8, "samples_per_device": 32, "lost": 0.1}
    options |= {"returned": 0.3, "devices_per_machine": 2}
    table, other = (make("spot-market", seed=seed, **options) for seed in (3, 4))
    assert not table.equals(other)
    assert Trace(table).batch_sizes.tolist() == (32 * table["devices"]).tolist()
    assert table["devices"][0] == 8
    assert set(table["devices"]) == {2, 4, 6, 8}
    # A machine is there for 0.3 / (0.1 + 0.3) of the time; all four are gone for 1/256.
    assert table["devices"].sum() / 20_000 == pytest.approx(6, rel=0.02)
    assert len(table) / 20_000 == pytest.approx(1 - 1 / 256, abs=0.002)


def test_amounts_are_read_exactly():
    texts = ("64", "-3", " 1.5m ", "1e3", "2T", "123456789012345678")
    numbers = [64, -3, 1_500_000, 1000, 2 * 10**12, 123456789012345678]
    assert [*map(amount, texts)] == numbers
    for text in ("", "K", ".", "1.5", "1.2.3", "0.0001K", "1_0", "inf", "nan", "6x"):
        with pytest.raises(ValueError, match="is not an integer such as 64, 500K"):
            amount(text)
