"""Tells whether a saved state is of the same sampler."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from per_sample_grad import Projection
from xla_replica.common.arguments import check_type
from xla_replica.common.differences import check_same

# The version of `GraBSampler.state_dict`.
VERSION = 1


def check_saved(
    state: Any, own: Mapping[str, Any], others: Set[str], projection: Projection | None
) -> Projection | None:
    """Returns the projection of ``own``, if any, as it was when a state was saved.

    Raises TypeError or ValueError if that is not such a state, with all that ``own``
    has and with ``others``, or of a sampler that is not like ``own``.
    """
    check_type("load_state_dict: the state", state, Mapping, "a dict")
    missing = sorted((own.keys() | others) - state.keys())
    if missing:
        raise ValueError(
            f"load_state_dict: the state has no {', '.join(missing)}; pass what "
            "GraBSampler.state_dict() returned"
        )
    settings, saved = own["settings"], state["settings"]
    if projection is not None and saved.get("projection"):
        projection = projection.saved_as(saved["projection"])
        settings = {**settings, "projection": repr(projection)}
    theirs = {**{name: state[name] for name in own}, "settings": None, **saved}
    error = "load_state_dict: the state of another sampler"
    check_same(theirs, {**own, "settings": None, **settings}, error)
    return projection
