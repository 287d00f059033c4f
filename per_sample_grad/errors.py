"""What this package raises instead of a wrong answer."""

from __future__ import annotations


class PerSampleError(RuntimeError):
    """A per-sample gradient that cannot be had exactly; the message says the remedy."""


class CoverageError(PerSampleError):
    """Some use of a parameter is not accounted for: its gradient would be missing."""


class CouplingError(PerSampleError):
    """A sample's loss depends on other samples in a way that has no exact formula."""


class Refusal(Exception):
    """Raised by a layer rule that does not hold for the call at hand, with a reason.

    The engine turns it into a `CoverageError`, or into the fallback that was chosen.
    """
