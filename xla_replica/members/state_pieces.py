"""The tensors of a state in pieces, of which several members send some each."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from xla_replica.common.trees import tensors_in

PIECE_BYTES = 1 << 20
_SAMPLES = 4096  # bytes of a piece

# A piece, who sends it, and who receives it: all others if that is None.
Delivery = tuple[int, int, int | None]


class Pieces:
    """The content of a state's tensors, on the host, in pieces of a megabyte at most.

    Args:
        state: Tensors that are received into are contiguous.
        outline: The state that others have; of another one no piece is right.
        has_come: Whether the content is there.

    Attributes:
        content: The bytes of each.
        sizes: Their numbers.
        sums: ``(pieces,)`` int64: their checksums, -1 for those that have not come.
    """

    def __init__(self, state: Any, outline: Any, has_come: bool) -> None:
        self.content, expected = _cut(state), _cut(outline)
        self.sizes = [len(piece) for piece in expected]
        self.sums = torch.full((len(expected),), -1)
        if has_come and [len(piece) for piece in self.content] == self.sizes:
            self.sums = torch.tensor([_checksum(piece) for piece in self.content])

    def keep(self, earlier: Pieces) -> None:
        """Takes what has come of a state that was not whole."""
        if earlier.sizes == self.sizes:
            self.sums = earlier.sums.clone()  # first: what comes late is not in it
            torch._foreach_copy_(self.content, earlier.content)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the content of a contiguous tensor, which shares its memory."""
    flat = tensor.reshape(-1)  # of one number, its stride may be 0
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _cut(state: Any) -> list[torch.Tensor]:
    content = [as_bytes(t.contiguous()) for t in tensors_in(state) if t.numel()]
    return [piece for each in content for piece in each.split(PIECE_BYTES)]


def _checksum(content: torch.Tensor) -> int:
    """Returns that of a sample of bytes: to read all would take as long as to send.

    States that have come apart differ nearly everywhere.
    """
    # Not every second one, or fourth: all bytes of a number.
    return zlib.crc32(content.numpy()[:: len(content) // _SAMPLES | 1].tobytes())


def deliveries(
    sums: torch.Tensor, source: int, receivers: Sequence[int], sizes: Sequence[int]
) -> list[Delivery]:
    """Returns who sends which piece to whom, so that all send about as many bytes.

    Args:
        sums: ``(members, pieces)``: the checksums of each.
        source: The member whose pieces are right; who has the same ones sends, too.
        receivers: Who receives what it lacks.
        sizes: The bytes of each piece.
    """
    found, sent = list[Delivery](), [0] * len(sums)
    has_right = (sums == sums[source]).T.tolist()
    for piece, (size, has) in enumerate(zip(sizes, has_right)):
        lack = [member for member in receivers if not has[member]]
        owners = [member for member, is_right in enumerate(has) if is_right]
        for receiver in [None] if len(lack) == len(sums) - 1 else lack:
            sender = min(owners, key=sent.__getitem__)
            sent[sender] += size
            found.append((piece, sender, receiver))
    return found


def deliver(group: Any, member: int, pieces: Pieces, found: list[Delivery]) -> None:
    """Sends and receives a member's pieces, all at once, by gloo.

    Whom it loses it notices by what has not come, or at the next sum.
    """
    works = []
    for piece, sender, receiver in found:
        if receiver is not None and member not in (sender, receiver):
            continue
        content = pieces.content[piece]
        with contextlib.suppress(RuntimeError):
            if receiver is None:
                work = group.broadcast(content, sender)
            elif member == sender:
                work = group.send([content], receiver, piece)
            else:
                work = group.recv([content], sender, piece)
            works.append((work, piece, sender))
    for work, piece, sender in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
            if member != sender:
                pieces.sums[piece] = _checksum(pieces.content[piece])
