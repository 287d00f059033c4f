"""What readers type into the site's search, and the section that answers it."""

from __future__ import annotations

import re

# By page and heading.
ANSWERS = {
    "docs/recipes": {
        "Devices, seeds and tied weights": ("tied weights", "GPU choice"),
        "In a notebook": ("notebook",),
        "Mixed precision and gradient scaling": ("precision",),
        "Learning-rate warmup and schedulers": ("warmup",),
        "Evaluation on all replicas": ("evaluation",),
        "Early stopping": ("early stopping",),
        "Averaged weights: EMA and SWA": ("EMA",),
        "Two networks, such as a GAN": ("GAN", "several optimizers"),
        "Frozen layers": ("frozen layers",),
    },
    "docs/installing": {"Installing": ("installation",)},
    "docs/machines": {"Machines with GPUs": ("multi-node",)},
    "docs/runs": {"Run log": ("logging",)},
    "docs/resuming": {
        "Being asked to stop": ("preemption notice",),
        "Starting again": ("resume elsewhere",),
    },
    "docs/live": {"Starting members": ("spot VM",)},
    "docs/data": {"Files and streams": ("streaming data",)},
    "docs/variable_batch_size": {"Epochs": ("custom loop",)},
    "docs/traces": {"What a run will be": ("cost",)},
}
ENTRY = "\n\n```{{index}} {}\n```\n"


def with_entries(name: str, text: str) -> str:
    """Returns a page's text with an entry of the index for what its sections answer."""
    for heading, words in ANSWERS.get(name, {}).items():
        entries = ", ".join(f"! {each}" for each in words)
        text, number = re.subn(
            rf"(?m)^#+ {re.escape(heading)}$",
            lambda found: found[0] + ENTRY.format(entries),  # noqa: B023
            text,
        )
        if number != 1:
            raise ValueError(f"{name} has {number} sections {heading!r}")
    return text
