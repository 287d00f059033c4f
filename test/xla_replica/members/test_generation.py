"""Who trains next, from what members offer."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from xla_replica import ReplicaError, Superseded
from xla_replica.members.generation import (
    Generation,
    Offer,
    next_generation,
    prove,
)
from xla_replica.members.membership import _offer

TOKEN = "secret"
SETTINGS = {"seed": "1", "trace": "t"}
SURVIVOR = {"generation": (4, "abc"), "entered": (1, 0), "mark": (7, 0)}
SURVIVOR["settings"] = SETTINGS
NEW = {**SURVIVOR, "generation": (0, ""), "entered": (0, 0), "mark": ()}


def offers_of(**members: dict) -> dict[str, Offer]:
    """Returns what members offer: what survivors do, unless they are told to differ."""
    return {
        name: Offer(prove(TOKEN, name), f"{name}:1", **{**SURVIVOR, **values})
        for name, values in members.items()
    }


def asked(offers: dict[str, Offer], me: str = "a", **options) -> Generation | None:
    """Returns what a member computes, which does not depend on the offers' order."""
    found = [
        next_generation(dict(items), me, TOKEN, **options)
        for items in itertools.permutations(offers.items())
    ]
    assert all(each == found[0] for each in found)
    return found[0]


def test_survivors_keep_their_order_and_new_ones_come_last():
    survivors = {"z": {"entered": (1, 0)}, "b": {"entered": (1, 1)}}
    generation = asked(offers_of(**survivors, a={"entered": (3, 2)}, m=NEW, c=NEW))
    assert generation.members == ("z", "b", "a", "c", "m")
    assert generation.number == 5
    assert generation.lineage != "abc"
    assert [offer.store for offer in generation.offers][:2] == ["z:1", "b:1"]


def test_every_member_computes_the_same():
    offers = offers_of(**{name: {"entered": (1, n)} for n, name in enumerate("cab")})
    assert len({asked(offers, name).lineage for name in offers}) == 1


def test_the_first_members_are_ordered_by_id():
    assert asked(offers_of(b=NEW, a=NEW)).members == ("a", "b")
    assert asked(offers_of(a=NEW), min_members=2) is None


def test_who_leaves_is_in_no_generation_but_gets_an_answer():
    offers = offers_of(a={}, b={"entered": (1, 1), "leaves": True})
    assert asked(offers, "a").members == asked(offers, "b").members == ("a",)


def test_nobody_joins_between_functions_that_follow_an_update():
    offers = offers_of(a={"is_between": True}, b=NEW)
    assert asked(offers).members == ("a",)
    assert asked(offers, "b") is None  # it asks again


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        ({}, {"generation": (3, "xyz")}, Superseded, "generation 3, and the o.* to 4"),
        # Of two parts of a run the one ahead goes on.
        ({"generation": (4, "one"), "mark": (9, 0)},
         {"generation": (4, "two"), "mark": (8, 3)}, Superseded, "generation 4"),
        ({}, {**NEW, "settings": {**SETTINGS, "seed": "2"}},
         ReplicaError, "seed is '2', not '1'"),
    ],
)  # fmt: skip
def test_who_has_missed_something_or_differs_must_not_go_on(a, b, error, words):
    offers = offers_of(a=a, b=b)
    found = asked(offers)
    assert found.members == ("a",)
    assert found.refused == ({"b": words} if error is ReplicaError else {})
    with pytest.raises(error, match=words):
        asked(offers, "b")


def test_another_token_is_refused():
    offers = offers_of(a={}, b=NEW)
    offers["b"] = dataclasses.replace(offers["b"], proof=prove("guess", "b"))
    found = asked(offers)
    assert found.members == ("a",)
    assert "token" in found.refused["b"]
    with pytest.raises(ReplicaError, match="LIVE_TOKEN"):
        next_generation(offers, "b", "guess")


def test_offers_are_the_same_after_json():
    offer = offers_of(a={"is_between": True})["a"]
    assert _offer(json.loads(json.dumps(dataclasses.asdict(offer)))) == offer
    assert _offer(None).is_new  # of something else at the lighthouse
