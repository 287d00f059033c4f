"""Numbers that change from step to step, as tensors on the device."""

from __future__ import annotations

import torch
from support.wrapping import CPU

from variable_batch_size.step.device_scalars import Numbers


def test_numbers_are_uploaded_once_and_never_shared_between_uses():
    numbers = Numbers(CPU, capacity=3)
    first = numbers.get("lr", 0.5)
    assert first.shape == (1,)
    assert numbers.get("lr", 0.5) is first
    assert numbers.get("divisor", 0.5) is not first  # one tensor would be another graph
    assert numbers.get("lr", 0.5, torch.float64).dtype == torch.float64
    numbers.get("lr", 0.25)
    assert numbers.get("lr", 0.5) is not first  # the oldest made room
