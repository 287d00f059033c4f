"""The errors that this package raises instead of giving a wrong answer."""


class PerSampleError(RuntimeError):
    """A per-sample gradient cannot be computed exactly; the message says the remedy."""


class CoverageError(PerSampleError):
    """Some use of a parameter is not accounted for; its gradient would be missing."""


class CouplingError(PerSampleError):
    """A sample's loss depends on other samples in a way that has no exact formula."""


class Refusal(Exception):
    """Raised by a layer rule that does not hold for a call, with the reason.

    The engine turns it into a `CoverageError`, or into the fallback that was chosen.
    """
