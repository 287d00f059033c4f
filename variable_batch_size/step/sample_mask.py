"""Which samples of a minibatch count, where some are padding."""

from __future__ import annotations

import torch

from variable_batch_size.step.settings import StepContext


class SampleMask:
    """Makes the mask of a minibatch's samples, and sees that the loss has used it."""

    def __init__(self, context: StepContext) -> None:
        size = context.sampler.minibatch_size
        self._numbers = context.replica.send(torch.arange(size, dtype=torch.float32))
        self._scalars = context.scalars
        self._was_read = False

    def weights(self, num_real: int) -> torch.Tensor:
        """Returns ``(minibatch_size,)``: 1 for so many real samples, then 0."""
        self._was_read = True
        number = self._scalars.get("samples", float(num_real))
        return (self._numbers < number).to(number.dtype)

    def end_minibatch(self, num_real: int) -> None:
        """Raises ValueError if it had padding and nobody has asked for `weights`."""
        was_read, self._was_read = self._was_read, False
        padding = len(self._numbers) - num_real
        if padding and not was_read:
            raise ValueError(
                f"{padding} of the {len(self._numbers)} samples of this minibatch are "
                "padding, and nobody has asked for optimizer.sample_weights, which "
                "leave them out: call (losses * optimizer.sample_weights).sum()"
                ".backward() with the loss of every sample (reduction='none' in "
                "torch's losses)"
            )
