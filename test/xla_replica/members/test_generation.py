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

TOKEN, LAST = "secret", (4, "abc")
SETTINGS = {"seed": "1", "trace": "t"}


def offered(name: str, **values) -> Offer:
    """Returns a survivor's offer, unless ``values`` make it another one's."""
    survivor = {"generation": LAST, "entered": (1, 0), "mark": (7, 0)}
    survivor["settings"] = SETTINGS
    return Offer(prove(TOKEN, name), f"{name}:1", **{**survivor, **values})


def new(name: str, **values) -> Offer:
    """Returns the offer of a member that has not trained."""
    start = {"generation": (0, ""), "entered": (0, 0), "mark": ()}
    return offered(name, **{**start, **values})


def asked(offers: dict[str, Offer], me: str = "b", **options) -> Generation | None:
    """Returns what a member computes, which does not depend on the offers' order."""
    found = [
        next_generation(dict(items), me, TOKEN, **options)
        for items in itertools.permutations(offers.items())
    ]
    assert all(each == found[0] for each in found)
    return found[0]


def test_survivors_keep_their_order_and_new_ones_come_last():
    offers = {
        "z": offered("z", entered=(1, 0)),
        "b": offered("b", entered=(1, 1)),
        "a": offered("a", entered=(3, 2)),
        "m": new("m"),
        "c": new("c"),
    }
    generation = asked(offers)
    assert generation.members == ("z", "b", "a", "c", "m")
    assert generation.number == 5
    assert generation.lineage != "abc"
    assert [offer.store for offer in generation.offers][:2] == ["z:1", "b:1"]


def test_every_member_computes_the_same():
    offers = {name: offered(name, entered=(1, n)) for n, name in enumerate("cab")}
    assert len({asked(offers, name).lineage for name in offers}) == 1


def test_the_first_members_are_ordered_by_id():
    assert asked({"b": new("b"), "a": new("a")}).members == ("a", "b")
    assert asked({"b": new("b")}, min_members=2) is None


def test_who_leaves_is_in_no_generation_but_gets_an_answer():
    offers = {"a": offered("a"), "b": offered("b", entered=(1, 1), leaves=True)}
    assert asked(offers, "a").members == asked(offers, "b").members == ("a",)


def test_nobody_joins_between_functions_that_follow_an_update():
    offers = {"a": offered("a", is_between=True), "b": new("b")}
    assert asked(offers, "a").members == ("a",)
    assert asked(offers, "b") is None  # it asks again


def test_who_has_missed_a_generation_must_not_go_on():
    offers = {"a": offered("a"), "b": offered("b", generation=(3, "xyz"))}
    assert asked(offers, "a").members == ("a",)
    with pytest.raises(Superseded, match=r"generation 3, and the others.* to 4"):
        asked(offers, "b")


def test_of_two_parts_of_a_run_the_one_ahead_goes_on():
    offers = {
        "a": offered("a", generation=(4, "one"), mark=(9, 0)),
        "b": offered("b", generation=(4, "two"), mark=(8, 3)),
    }
    assert asked(offers, "a").members == ("a",)
    with pytest.raises(Superseded):
        asked(offers, "b")


def test_another_token_is_refused():
    stranger = dataclasses.replace(new("b"), proof=prove("guess", "b"))
    offers = {"a": offered("a"), "b": stranger}
    found = asked(offers, "a")
    assert found.members == ("a",)
    assert "token" in found.refused["b"]
    with pytest.raises(ReplicaError, match="LIVE_TOKEN"):
        next_generation(offers, "b", "guess")


def test_other_settings_are_refused_by_name():
    offers = {"a": offered("a"), "b": new("b", settings={**SETTINGS, "seed": "2"})}
    found = asked(offers, "a")
    assert found.members == ("a",)
    assert found.refused == {"b": "seed is '2', not '1'"}
    with pytest.raises(ReplicaError, match="seed is '2', not '1'"):
        asked(offers, "b")


def test_offers_are_the_same_after_json():
    offer = offered("a", is_between=True)
    assert _offer(json.loads(json.dumps(dataclasses.asdict(offer)))) == offer
    assert _offer(None).is_new  # of something else at the lighthouse
