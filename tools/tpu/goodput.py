"""Says on paper what lost TPU slices cost, with restarts and with live members.

Every number that goes in is in this file with its source; nothing was run on a TPU. A
goodput is the time of the steps alone over the time that a run takes. Members exchange
after the last minibatch of an update, from one host each, so the more minibatches an
update has, the less of it is exchange.

    python tools/tpu/goodput.py --output docs/benchmarks/goodput.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from tools.record import parser_with_output, save

RECORDS = Path(__file__).resolve().parents[2] / "docs/benchmarks"
# A chip of v5e, https://docs.cloud.google.com/tpu/docs/v5e.
FLOPS, BYTES = 197e12, 819e9  # in a second: bfloat16, high-bandwidth memory
CHIPS = 16  # of a slice
# Assumed: a host's link to its chips, and 100 Gbit/s between hosts, bytes a second.
TO_HOST, BETWEEN_HOSTS = 16e9, 12.5e9
# 419 unexpected interruptions of 16,384 accelerators in 54 days: The Llama 3 Herd of
# Models, arXiv:2407.21783, section 3.3.4.
LOSSES_PER_CHIP_HOUR = 419 / (54 * 24 * 16384)
# Assumed of machines at spot prices: a slice is taken away once a day.
LOSSES_PER_SPOT_SLICE_HOUR = 1 / 24
# 40 s: what Pathways is said to need for a slice more or less, once for the loss and
# once for the slice that replaces it.
RESTART_SECONDS, CHECKPOINT_SECONDS = 2 * 40.0, 600.0
DETECTION_SECONDS = 1.0
NUM_SLICES = (1, 2, 4, 16, 64)
# Minibatches of a chip in an update, and bytes that members exchange for each number.
COLUMNS = {
    "live, 4 minibatches": (4, 4),
    "live, 32": (32, 4),
    "live, 32, in bfloat16": (32, 2),
}


class Model(NamedTuple):
    """What a minibatch of one chip takes, and how many numbers a gradient has."""

    seconds: float
    num_parameters: float


def models() -> dict[str, Model]:
    """Returns the models of the table, by name."""
    costs = json.loads((RECORDS / "compile_costs-gpt2.json").read_text())
    step = costs["last steps"]["GPT-2, elastic step, root"]
    seconds = max(step["Gflop"] * 1e9 / FLOPS, step["GB"] * 1e9 / BYTES)
    # 6 flops for each parameter and token, 2,048 tokens a chip, at 40 % of its flops;
    # parameters are sharded over the slice, which exact sums do not allow yet.
    large = 6 * 7e9 * 2048 / (0.4 * FLOPS)
    return {"GPT-2 124M": Model(seconds, 124.4e6), "7B": Model(large, 7e9)}


def exchange_seconds(model: Model, num_slices: int, bytes_each: int) -> float:
    """Returns what an update's exchange takes: down, a ring between hosts, and up."""
    size = model.num_parameters * bytes_each
    ring = 2 * (num_slices - 1) / num_slices * size / BETWEEN_HOSTS
    return 2 * size / TO_HOST + ring if num_slices > 1 else 0.0


def goodputs(
    model: Model, num_slices: int, losses_per_slice_hour: float
) -> dict[str, float]:
    """Returns goodputs with restarts and with live slices, by what they exchange."""
    found = {}
    for name, (num_minibatches, bytes_each) in COLUMNS.items():
        # Shares of all time: a loss costs its restart and half of what is between two
        # checkpoints, or the step that live members run again.
        rate = losses_per_slice_hour * num_slices / 3600  # in a second
        exchange = exchange_seconds(model, num_slices, bytes_each)
        step, again = num_minibatches * model.seconds, DETECTION_SECONDS + exchange
        restarts = 1 - rate * (RESTART_SECONDS + CHECKPOINT_SECONDS / 2)
        live = (1 - rate * (step + again)) * step / (step + exchange)
        # The only slice has nobody who could go on.
        found |= {"restarts": restarts, name: restarts if num_slices == 1 else live}
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    options = parser_with_output(__doc__).parse_args()
    rates = {
        "failures": LOSSES_PER_CHIP_HOUR * CHIPS,
        "spot": LOSSES_PER_SPOT_SLICE_HOUR,
    }
    table: list[dict[str, Any]] = []
    for name, model in models().items():
        for losses, rate in rates.items():
            for number in NUM_SLICES:
                place = {"model": name, "losses": losses, "slices": number}
                table.append({**place, **goodputs(model, number, rate)})
    print("| " + " | ".join(table[0]) + " |\n" + "|---" * len(table[0]) + "|")
    for row in table:
        print("| " + " | ".join(map(str, row.values())) + " |")
    save(options.output, {"goodputs": table})


if __name__ == "__main__":
    main()
