"""Makes, converts, checks and simulates traces; nothing is trained.

The command ``vbs`` offers the same: ``vbs --help``.
"""

# isort: off
from variable_batch_size.trace_tools.conversion import (
    POLICIES, Availability, Conversion, convert, convert_rows, read_availability,
)  # fmt: skip
from variable_batch_size.trace_tools.curves import LearningRates, decay, read_curve
from variable_batch_size.trace_tools.families import FAMILIES, make
from variable_batch_size.trace_tools.simulation import check, simulate, stats, totals
from variable_batch_size.trace_tools.step_time import StepTime, fit_step_time

__all__ = [
    "FAMILIES", "POLICIES", "Availability", "Conversion", "LearningRates", "StepTime",
    "check", "convert", "convert_rows", "decay", "fit_step_time", "make",
    "read_availability", "read_curve", "simulate", "stats", "totals",
]  # fmt: skip
