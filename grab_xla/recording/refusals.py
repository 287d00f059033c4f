"""What every fidelity refuses, in the same words."""

from __future__ import annotations


def not_recorded() -> RuntimeError:
    """Returns the error for a backward pass without a recorded forward pass."""
    return RuntimeError(
        "backward() without record(): compute the losses inside "
        "`with sampler.record(model):`, once for every backward()"
    )


def of_another_model() -> RuntimeError:
    """Returns the error for losses that no balanced parameter has a part in."""
    return RuntimeError(
        "backward(): the losses do not depend on the sampler's parameters: compute "
        "them from the model that was given to record()"
    )
