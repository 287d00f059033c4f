"""The fidelities: what stands for a gradient in the balance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor

from grab_xla.balancers import Ordering
from xla_replica.common.arguments import check_choice, check_integer, check_type

Fidelity = Literal["exact", "projected", "group"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
# How many numbers the gradients of a model have that is exact by default: the float32
# gradients of 32 samples then take 128 MiB, if they are formed, and each vector of the
# balance 4 MiB. Below, projections save little time; above, both grow with the model.
EXACT_UP_TO = 2**20


def chosen(
    fidelity: Fidelity | None,
    parameters: Mapping[str, Tensor],
    ordering: Ordering,
    random_projection: str,
) -> Fidelity:
    """Returns the fidelity, which follows from the size of the model if it is None.

    Raises:
        TypeError, ValueError: An argument is not allowed.
    """
    allowed = "a dict from names to tensors, such as dict(model.named_parameters())"
    check_type("trainable_params", parameters, Mapping, allowed)
    if not parameters:
        raise ValueError("trainable_params is empty: there is nothing to balance")
    is_projected = random_projection != "none"
    if fidelity is None:
        is_small = sum(value.numel() for value in parameters.values()) <= EXACT_UP_TO
        is_exact = is_small or not ordering.needs_gradients
        return "exact" if is_exact and not is_projected else "projected"
    check_choice("fidelity", fidelity, FIDELITIES)
    if fidelity != "projected" and is_projected:
        raise ValueError(
            f"leave out {fidelity=} or random_projection={random_projection!r}"
        )
    return fidelity


def samples_together(
    fidelity: Fidelity, group_size: int | None, num_samples: int, ordering: Ordering
) -> int:
    """Returns how many samples of the order stay together: a group's, or one.

    Raises:
        TypeError, ValueError: ``group_size`` is missing, meaningless or out of range,
            or the balance type cannot order such groups, or samples.
    """
    size = 1
    if fidelity == "group":
        # The batch_size of the DataLoader, or CustomSampler's minibatch_size.
        size = check_integer("group_size", group_size, 1, num_samples)
        if not ordering.is_permutation:
            raise ValueError(
                f"fidelity='group' cannot be combined with {ordering}: it repeats "
                "samples"
            )
    elif group_size is not None:
        raise ValueError(
            f"group_size={group_size} needs fidelity='group', got {fidelity!r}"
        )
    num_groups, least = num_samples // size, ordering.piece_size or 1
    if 1 < num_groups < least:
        raise ValueError(
            f"{ordering} balances whole blocks of {least} samples (or groups), and "
            f"there are only {num_groups}: choose smaller blocks or another type"
        )
    return size
