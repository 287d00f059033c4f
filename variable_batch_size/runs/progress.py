"""Where a run is, for whoever looks on: a bar, or lines of logging."""

from __future__ import annotations

import dataclasses
import io
import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from variable_batch_size.runs.run_log import RunLog
from variable_batch_size.step.attached import Update

if TYPE_CHECKING:
    from variable_batch_size.optimizer import ElasticOptimizer

logger = logging.getLogger(__name__)
LINE = "{n_fmt} of {total_fmt} samples{postfix}, {rate_fmt}, {remaining} left"
SECONDS = 10.0  # from one line to the next


class Lines(io.StringIO):
    """A file for tqdm whose lines are logged."""

    def write(self, text: str) -> int:
        """Logs a line; returns its length."""
        if text.strip():
            logger.info(text.strip())
        return len(text)


@dataclasses.dataclass(eq=False, repr=False)
class Progress:
    """Says on replica 0 what a run begins with, and then where it is; attach it.

    The device is not read. Lines go to standard error if the program has set up no
    logging.

    Args:
        optimizer: The wrapper whose updates are shown.
        num_updates: Of the run.
        way: ``progress`` of `epochs`.
        log: The run's log, whose loss is shown.
        folder: Where checkpoints go.

    Attributes:
        bar: The bar, for a ``with`` statement.
    """

    optimizer: ElasticOptimizer
    num_updates: int
    way: bool | str | None
    log: RunLog | None
    folder: object

    def __post_init__(self) -> None:
        replica, sampler = self.optimizer.replica, self.optimizer.sampler
        first, samples = sampler.ledger.global_step, sampler.schedule.samples_before
        is_told = self.way is not False and replica.is_primary
        if is_told and not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%X"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        if is_told:
            logger.info(
                f"{replica}: updates {first} to {self.num_updates} of "
                f"{sampler.schedule.trace.name}, minibatches of "
                f"{sampler.minibatch_size}, checkpoints in {self.folder}"
            )
        is_watched = sys.stderr.isatty() or "ipykernel" in sys.modules
        lines = {"file": Lines(), "bar_format": LINE, "mininterval": SECONDS}
        self.bar: Any = tqdm(
            total=samples(self.num_updates), initial=samples(first), unit=" samples",
            unit_scale=True, disable=not is_told, delay=SECONDS, miniters=1,
            **lines if self.way == "log" or not is_watched else {},
        )  # fmt: skip
        self.bar.delay = 0.0  # a run that ends sooner shows its end

    def __call__(self, update: Update) -> None:
        """Shows an update; `ElasticOptimizer.attach` has it called."""
        numbers: dict[str, Any] = {"update": f"{update.step + 1}/{self.num_updates}"}
        numbers |= {"epoch": update.epoch, "batch": update.batch_size}
        if not isinstance(update.lr[0], torch.Tensor):  # else the device has it
            numbers["lr"] = update.lr[0]
        if self.log is not None and "loss" in self.log.newest:
            numbers["loss"] = self.log.newest["loss"]
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.update(update.batch_size)
