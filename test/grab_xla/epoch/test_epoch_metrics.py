"""Herding and norms are those of the gradients that are balanced."""

import numpy as np
import pytest
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("name", ["mean", "norm", "rr"])
def test_herding_is_that_around_the_mean_of_this_epoch_or_the_last(name, stale):
    options = {"record_herding": True, "stale_mean_herding": stale}
    sampler = KINDS[name].sampler(**options, record_norm=True)
    before = np.zeros(ordering.NUM_PARAMETERS)
    for epoch in range(3):
        assert sampler.sorter.herding == -np.inf or epoch
        rows = ordering.gradients(epoch)[ordering.run_epoch(sampler, epoch, 6)].numpy()
        prefixes = (rows - (before if stale else rows.mean(0))).cumsum(0)
        before = rows.mean(0)
        assert sampler.sorter.herding == pytest.approx(np.abs(prefixes).max())
        longest = np.linalg.norm(prefixes, axis=1).max()
        assert sampler.sorter.avg_grad_error == pytest.approx(longest)
        norms = np.linalg.norm(rows, axis=1)
        assert sampler.sorter.grad_norms == pytest.approx(norms)
