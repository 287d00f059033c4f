"""Losses that give one number per sample, ``(B,)``, whatever the number of tokens."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from xla_replica.common.arguments import check_choice

Reduction = Literal["mean", "sum"]


def token_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the cross-entropy of every sample over its own tokens.

    Args:
        logits: ``(B, C)`` or ``(B, *, C)``: classes last, any float dtype.
        targets: ``(B,)`` or ``(B, *)``, integers; ``ignore_index`` does not count.
        reduction: ``"sum"`` over a sample's tokens, or their ``"mean"``: the sum
            divided by the number of that sample's tokens that count, and 0 where none
            does. The mean is each sample's own and not the batch's, whose denominator
            would make samples depend on each other.
        ignore_index: The target that does not count.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.

    Returns:
        The losses, ``(B,)``.

    Raises:
        ValueError: Shapes do not match, or the reduction is not allowed.

    >>> logits = torch.zeros(2, 3, 4)
    >>> token_cross_entropy(logits, torch.tensor([[1, 2, -100], [0, -100, -100]]))
    tensor([1.3863, 1.3863])
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: give "
            "logits with the classes last, (B, *, C), and targets (B, *)"
        )
    flat = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    losses = flat.reshape(len(targets), -1).sum(1)
    if reduction == "sum":
        return losses
    counted = (targets != ignore_index).reshape(len(targets), -1).sum(1)
    return losses / counted.clamp(min=1)
