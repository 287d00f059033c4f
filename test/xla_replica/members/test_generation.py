"""Who trains next, from what members offer."""

import itertools

import pytest

from xla_replica import ReplicaError, Superseded
from xla_replica.members.generation import Generation, Offer, next_generation, prove

SETTINGS = {"seed": "1", "trace": "t"}
SURVIVOR = {"generation": (4, "abc"), "place": 0, "mark": (7, 0)}
NEW = {"generation": (0, ""), "place": 0, "mark": ()}


def offers_of(**members: dict) -> dict[str, Offer]:
    """Returns what members offer: what survivors do, unless they are told to differ."""
    same = {"settings": SETTINGS, **SURVIVOR}
    return {
        name: Offer(prove("secret", name), f"{name}:1", **{**same, **values})
        for name, values in members.items()
    }


def asked(offers: dict[str, Offer], me: str = "a", **options) -> Generation | None:
    """Returns what a member computes, which does not depend on the offers' order."""
    found, *others = (
        next_generation(dict(items), me, "secret", **options)
        for items in itertools.permutations(offers.items())
    )
    assert all(each == found for each in others)
    return found


def test_survivors_keep_their_order_and_new_ones_come_last():
    survivors = {name: {"place": n} for n, name in enumerate("zyba") if name != "y"}
    offers = offers_of(**survivors, m=NEW, c=NEW)
    generation = asked(offers)
    assert generation.members == ("z", "b", "a", "c", "m")
    assert generation.number == 5
    assert generation.lineage != "abc"
    assert [offer.store for offer in generation.offers][:2] == ["z:1", "b:1"]
    assert {asked(offers, name).lineage for name in offers} == {generation.lineage}


def test_who_is_in_a_generation():
    """The first members by id; who leaves gets an answer; who must wait asks again."""
    assert asked(offers_of(b=NEW, a=NEW)).members == ("a", "b")
    assert asked(offers_of(a=NEW), min_members=2) is None
    offers = offers_of(a={}, b={"place": 1, "leaves": True})
    assert asked(offers, "a").members == asked(offers, "b").members == ("a",)
    # Nobody joins between functions that follow an update.
    offers = offers_of(a={"is_between": True}, b=NEW)
    for min_members in (1, 2):
        assert asked(offers, min_members=min_members).members == ("a",)
        assert asked(offers, "b", min_members=min_members) is None


@pytest.mark.parametrize(("a", "b", "token", "error", "words"), [
    ({}, {"generation": (3, "xyz")}, "secret",
     Superseded, "generation 3, and the o.* to 4"),
    # Of two parts of a run the one ahead goes on.
    ({"generation": (4, "one"), "mark": (9, 0)},
     {"generation": (4, "two"), "mark": (8, 3)}, "secret",
     Superseded, "generation 4"),
    ({}, {**NEW, "settings": {**SETTINGS, "seed": "2"}}, "secret",
     ReplicaError, "seed is '2', not '1'"),
    ({}, NEW, "guess", ReplicaError, "token"),
])  # fmt: skip
def test_who_has_missed_something_or_differs_must_not_go_on(a, b, token, error, words):
    offers = offers_of(a=a, b=b)
    offers["b"] = offers["b"]._replace(proof=prove(token, "b"))
    found = asked(offers)
    assert found.members == ("a",)
    assert [*found.refused] == (["b"] if error is ReplicaError else [])
    assert words in found.refused.get("b", words)
    with pytest.raises(error, match=f"(?i){words}"):
        next_generation(offers, "b", token)
