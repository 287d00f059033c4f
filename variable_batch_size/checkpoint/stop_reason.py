"""Why a run stops, in the same words on every replica.

Whoever was asked knows; the others have only counted votes. With exit statuses that
differ it would be chance which of them the process ends with.
"""

from __future__ import annotations

import torch

import xla_replica
from xla_replica import Replica, StopRequest

_BYTES = 1000  # of a reason in UTF-8; what is longer is cut


def agreed_request(replica: Replica) -> StopRequest:
    """The request that the first replica that has one was asked with. Collective.

    Call it where at least one replica has been asked.
    """
    request = xla_replica.stop_requested()
    replica.sync()  # what this replica has pending is no part of the collective
    sent = replica.send(torch.tensor(_encoded(request), dtype=torch.int32))
    everybody = replica.fetch([replica.all_gather(sent)])[0].tolist()
    return next(
        StopRequest(bytes(text[:length]).decode(errors="ignore"), status)
        for status, length, *text in everybody
        if status >= 0
    )


def _encoded(request: StopRequest | None) -> list[int]:
    """Status, length of the reason, and its bytes; a status of -1 is no request."""
    if request is None:
        return [-1, 0] + [0] * _BYTES
    text = request.reason.encode(errors="replace")[:_BYTES]
    return [request.exit_status, len(text), *text.ljust(_BYTES, b"\0")]
