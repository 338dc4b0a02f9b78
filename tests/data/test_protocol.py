"""Which protocol data decide for, and how data are read under it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.data.frames import from_events
from fedecider.data.protocol import chosen_protocol, repeated_share, under
from fedecider.data.sample import sample_domains
from fedecider.evaluation.protocols import histories, targets, train_parts
from fedecider.evaluation.sequences import SequenceArray

THINGS = [{"item": one, "title": f"Thing {one}"} for one in "abcdefgh"]


def shop(baskets_of, order=None):
    """Baskets of users, such as {"u": ["ab", "c"]}, a day each."""
    rows = [
        {"user": user, "item": item, "time": 86_400 * day, "nr": f"{user}{day}"}
        for user, baskets in baskets_of.items()
        for day, basket in enumerate(baskets, 1)
        for item in basket
    ]
    return dict(from_events(rows, THINGS, order=order))


ONE_REPEAT_OF_FOUR = {"u": ["ab", "c", "ad"], "v": ["a", "b", "ce"], "w": ["ab"]}


def test_data_in_which_customers_buy_again_are_read_in_baskets():
    data = shop(ONE_REPEAT_OF_FOUR)
    assert repeated_share(data) == 0.25
    name, (reason,) = chosen_protocol("auto", data)
    assert name == "next_basket"
    assert reason.startswith("protocol next_basket")
    assert "25.0%" in reason
    name, (reason,) = chosen_protocol("auto", data, "this method knows no baskets")
    assert name == "strict"
    assert reason.startswith("warning: protocol strict, because this method knows no baskets, although 25.0%")
    assert chosen_protocol("strict/keep_seen", data) == ("strict/keep_seen", [])


def test_data_without_repeats_are_strict_unless_they_have_order_numbers():
    baskets = {"u": ["ab", "c", "de"], "v": ["a", "b", "ce"]}
    name, (reason,) = chosen_protocol("auto", shop(baskets))
    assert name == "strict"
    assert "0.0%" in reason
    assert chosen_protocol("auto", shop(baskets, "nr"))[0] == "next_basket"
    assert chosen_protocol("auto", sample_domains(["crime"]))[0] == "strict"


def test_strict_takes_every_event_by_itself_and_next_basket_whole_baskets():
    data = shop(ONE_REPEAT_OF_FOUR | {"x": ["abc"]} | {"y": ["aa", "b", "c"]})
    plain, lines = under("strict", data)
    rows = plain["shop"].clients.arrays().sequences
    assert (rows.basket_E, lines) == (None, [])
    assert plain["shop"].clients.users == ["u", "v", "x", "y"]
    assert rows == list(data["shop"].clients.sequences)
    found, lines = under("next_basket", data)
    assert found["shop"].clients.users == ["u", "v", "y"]
    assert sorted(targets(found["shop"].clients.sequences, "test")[0]) == [0, 3]
    assert found["shop"].clients.sequences[2] == [0, 1, 2]  # the second a of a basket is gone
    assert list(map(len, found["shop"].clients.timestamps)) == list(map(len, found["shop"].clients.sequences))
    assert lines == [
        "shop: 1 events repeat an item of their basket and count once",
        "shop: 1 of 4 customers have fewer than 3 baskets and are left out",
    ]
    again, lines = under("next_basket", found)
    assert lines == []
    assert again["shop"].content_hash() == found["shop"].content_hash()
    with pytest.raises(ValueError, match="got 1 customers of shop with 3 baskets"):
        under("next_basket", shop({"u": ["ab", "c", "ad"], "v": ["abc"]}))


def test_silos_keep_one_object_of_their_public_users():
    domain = shop({"u": ["ab", "c", "d"], "v": ["ab", "c", "d"], "p": ["aab", "c", "d"]})["shop"]
    public = domain.clients.take([0])
    two = {name: replace(domain, name=name, clients=domain.clients.take([1, 2]), public=public) for name in ("n", "s")}
    for protocol in ("strict", "next_basket"):
        read, _ = under(protocol, two)
        assert read["n"].public is read["s"].public


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6), max_size=5))
def test_no_event_of_a_held_out_basket_is_in_a_train_part_or_history(users):
    """Events carry their own number in the place of items: every one is somewhere, and none on both sides."""
    lengths = [sum(map(len, baskets)) for baskets in users]
    basket_E = [number for baskets in users for number, basket in enumerate(baskets) for _ in basket]
    events = SequenceArray.of([list(range(length)) for length in lengths])
    rows = events.with_baskets(SequenceArray.of([basket_E]).value_E)
    train = train_parts(rows)
    for user, baskets in enumerate(users):
        counted = [len(basket) for basket in baskets]
        for split, num_after in (("valid", 1), ("test", 0)):
            cut = sum(counted[: max(len(counted) - 1 - num_after, 0)])
            assert histories(rows, split)[user] == list(range(cut))
            held = counted[-1 - num_after] if len(counted) > num_after else 0
            assert targets(rows, split)[user] == list(range(cut, cut + held))
        assert train[user] == list(range(sum(counted[:-2])))


def test_without_baskets_every_event_is_one():
    domain = sample_domains(["crime"])["crime"]
    assert under("strict", {"crime": domain})[0]["crime"] is domain
    read, lines = under("next_basket", {"crime": domain})
    assert (read["crime"].clients.arrays().sequences.num_baskets_U >= 3).all()
    assert read["crime"].clients.sequences == list(domain.clients.sequences)
    assert lines == []
