"""The step-time model: fitted to seconds, it tells those of other steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.trace_tools.step_time import StepTime, fit_step_time

POSITIVE = st.floats(1e-3, 10.0)


@given(POSITIVE, POSITIVE, st.lists(st.integers(1, 20), min_size=2, max_size=9))
def test_exact_seconds_give_the_model_back(per_update, per_substep, substeps):
    model = StepTime(per_update, per_substep)
    found = fit_step_time(model.seconds(np.array(substeps)), substeps)
    if len(set(substeps)) > 1:
        assert found == pytest.approx(model)
    else:  # nothing tells the two apart, but these steps are told right
        assert found.per_update == 0
        assert found.seconds(substeps[0]) == pytest.approx(model.seconds(substeps[0]))


@settings(deadline=None)
@given(
    st.lists(st.tuples(POSITIVE, st.integers(1, 20)), min_size=1, max_size=12),
    st.data(),
)
def test_no_other_model_has_a_smaller_squared_error(steps, data):
    seconds, substeps = map(np.array, zip(*steps))
    found = fit_step_time(seconds, substeps)
    assert min(found) >= 0

    def error(model: StepTime) -> float:
        return float(np.square(model.seconds(substeps) - seconds).sum())

    other = StepTime(data.draw(st.floats(0, 10)), data.draw(st.floats(0, 10)))
    assert error(found) <= error(other) + 1e-6


def test_several_steps_may_be_timed_together():
    """As where a device is waited for on logging steps alone."""
    model = StepTime(0.5, 0.125)
    substeps = np.array([[1, 2, 3], [4, 4, 4], [9, 1, 1]])
    found = fit_step_time(model.seconds(substeps).sum(1), substeps.sum(1), 3)
    assert found == pytest.approx(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "arrays of one length above 0, got shapes"),
        (([1.0], [1, 2]), "arrays of one length above 0, got shapes"),
        ((1.0, 1), "arrays of one length above 0, got shapes"),
        (([1.0, np.nan], [1, 2]), "seconds must be finite and >= 0"),
        (([1.0, -1.0], [1, 2]), "seconds must be finite and >= 0"),
        (([1.0, 1.0], [1, 0]), "num_substeps must be finite and >= 1"),
        (([1.0, 1.0], [1, 2], 0), "num_updates must be finite and >= 1"),
    ],
)
def test_what_cannot_be_fitted_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_step_time(*arguments)
