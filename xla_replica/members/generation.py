"""Who trains next: a function of what all living members offer.

Every member computes the same generation from the same offers, so nobody has to be
told, and nobody leads.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, NamedTuple

from xla_replica.errors import ReplicaError, Superseded

_NEW = (0, "")


class Offer(NamedTuple):
    """What a member brings when members meet. Plain numbers and texts.

    Attributes:
        proof: Of the run's shared token, see `prove`.
        store: The address of the member's own key-value store.
        settings: What members must have in common, by name.
        generation: Number and lineage of the last one that the member was in.
        place: Its own place among that one's members.
        mark: How far it has come; a later one is larger.
        is_between: Whether it is amid functions that follow an update, where nobody can
            join.
        leaves: Why it goes, for people; empty if it does not.
        was_silent: Whether the others had reason to take it for dead.
        num_replicas: How many it has.
        name: Its process and host, for people.
        keeps_out: Whether nobody may join yet, because others have gone at once.
    """

    proof: str
    store: str
    settings: Mapping[str, Any]
    generation: tuple[int, str] = _NEW
    place: int = 0
    mark: tuple[int, ...] = ()
    is_between: bool = False
    leaves: str = ""
    was_silent: bool = False
    num_replicas: int = 1
    name: str = ""
    keeps_out: bool = False

    @property
    def is_new(self) -> bool:
        """Whether the member has not trained yet."""
        return self.generation == _NEW


class Generation(NamedTuple):
    """The members that train from now on.

    Attributes:
        number: One more than that of the generation before.
        lineage: Distinguishes it from others of that number.
        members: Their ids, by rank.
        offers: What they have brought, by rank.
        refused: Ids of members that are not of this run, and why.
    """

    number: int
    lineage: str
    members: tuple[str, ...]
    offers: tuple[Offer, ...]
    refused: dict[str, str]


def prove(token: str, member: str) -> str:
    """Returns what shows that a member knows the token, without telling it."""
    return hmac.new(token.encode(), member.encode(), hashlib.sha256).hexdigest()


def next_generation(
    offers: Mapping[str, Offer], me: str, token: str, min_members: int = 1
) -> Generation | None:
    """Returns the generation that these offers make; None if they must meet again.

    Survivors keep their order, and new members come last, by id. Those that have missed
    a generation, bring no proof or have other settings are not in it, nor is who
    leaves. While a survivor is between the functions that follow an update, new members
    wait, and it goes on without them.

    Raises:
        Superseded: ``me`` has missed a generation.
        ReplicaError: ``me`` is new and not of this run.
    """
    refused = {
        member: "it does not know the run's token (LIVE_TOKEN)"
        for member, offer in offers.items()
        if not hmac.compare_digest(offer.proof, prove(token, member))
    }
    known = {m: offer for m, offer in offers.items() if m not in refused}
    run_differs = any(not offers[member].is_new for member in refused)
    if known[me].is_new and (run_differs or (refused and len(known) == 1)):
        refused[me] = f"its LIVE_TOKEN is not that of {len(refused)} other members"
    last = _last_generation(known)
    if known[me].generation not in (last, _NEW):
        raise Superseded(
            f"this member was last in generation {known[me].generation[0]}, and the "
            f"others have gone on to {last[0]} without it, because it did not answer. "
            "It has written nothing since. Start it again, and it joins as a new one"
        )
    stay = {m: each for m, each in known.items() if not each.leaves}
    old = [m for m, each in stay.items() if each.generation == last != _NEW]
    old.sort(key=lambda member: stay[member].place)
    new = sorted(member for member, offer in stay.items() if offer.is_new)
    settings = [stay[member].settings for member in old or new]
    for member in new:
        expected = max(settings, key=settings.count)  # of two, those of the first
        if stay[member].settings != expected:
            refused[member] = difference(expected, stay[member].settings)
    if me in refused:
        raise ReplicaError(
            f"this member ({known[me].name}) is not of the run that it would join: "
            f"{refused[me]}. Start it with what the others have"
        )
    if any(stay[member].is_between for member in old):
        new, min_members = [], 1  # who waited for new ones here would wait for ever
    elif any(stay[m].keeps_out for m in old) and len(old) >= min_members:
        new = []
    members = tuple(old + [member for member in new if member not in refused])
    is_ready = me in members and len(members) >= min_members
    if not (is_ready or known[me].leaves):
        return None
    number = last[0] + 1
    text = f"{number} {last[1]} {' '.join(members)}"
    lineage = hashlib.sha256(text.encode()).hexdigest()[:12]
    brought = tuple(stay[member] for member in members)
    return Generation(number, lineage, members, brought, refused)


def _last_generation(offers: Mapping[str, Offer]) -> tuple[int, str]:
    """Returns the generation that goes on, of parts of a run the one ahead.

    A member that was silent does not count beside those who have gone on without it.
    """

    def rank(offer: Offer) -> tuple[Any, ...]:
        is_heard = not (offer.is_new or offer.was_silent)
        return is_heard, offer.generation[0], offer.mark, offer.store

    return max(offers.values(), key=rank).generation


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns which settings differ, with both values of the first ones; or nothing."""
    names = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
    parts = [f"{n} is {found.get(n)!r}, not {expected.get(n)!r}" for n in names[:4]]
    return "; ".join(parts)
