"""Companies that sell parts of one catalogue: items matched by key, the union, silos that are cut, tables of events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedecider
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.prepare import PrepareConfig
from fedecider.data.sellers import by_catalogue, once_each, with_shared_catalogues
from fedecider.data.silos import share_out
from fedecider.data.store import load_domains, save_domains


def company(name: str, keys: str, public: Events = NO_EVENTS) -> Domain:
    """Sells the items ``keys``, a letter each, which it describes in its own words."""
    texts = [f"title: {key} at {name}" for key in keys]
    users = Events([f"{name}:{user}" for user in range(2)], [[0, 1, 2], [1, 2, 0]], None)
    return Domain(name, Catalogue("ean", list(keys), list(keys), texts), users, public, {})


NORTH = company("north", "abde", Events(["ann", "bob"], [[0, 1, 3], [3, 2, 0]], [[10, 20, 30], [1, 2, 3]]))
SOUTH = company("south", "bcd", Events(["ann", "eve"], [[0, 1, 2, 2], [2, 1, 0]], [[20, 25, 40, 41], [7, 8, 9]]))
BOTH = {"south": SOUTH, "north": NORTH}


def whole_of(domains) -> Domain:
    (sellers,) = by_catalogue(with_shared_catalogues(domains)).values()
    return sellers.whole


def test_the_union_has_every_item_once_and_public_users_who_are_one_person():
    whole, both = whole_of(BOTH), with_shared_catalogues(BOTH)
    assert (whole.name, whole.catalogue.name, "".join(whole.item_keys)) == ("ean", "ean", "abcde")
    of = ["north", "north", "south", "north", "north"]  # who is first by name and sells it, whatever the order given
    assert whole.item_texts == [f"title: {key} at {one}" for key, one in zip("abcde", of, strict=True)]
    # ann's b at 20 is told by both and counts once; her c at 25 stands before the e at 30
    assert dict(zip(whole.public.users, whole.public.sequences, strict=True)) == {
        "ann": [0, 1, 2, 4, 3, 3],
        "bob": [4, 3, 0],
        "eve": [3, 2, 1],
    }
    assert not whole.clients.users
    other = replace(SOUTH, public=SOUTH.public._replace(users=["zoe", "eve"]))
    alone = whole_of({"north": NORTH, "south": other}).public
    assert (alone.users, alone.sequences[3]) == (["ann", "bob", "eve", "zoe"], [1, 2, 3, 3])
    assert both["south"].catalogue_number_I.tolist() == [1, 2, 3]
    assert both["south"].catalogue is both["north"].catalogue
    assert list(once_each(both)) == ["south", "north"]
    assert whole_of(dict(reversed(BOTH.items()))).content_hash() == whole.content_hash()


def test_without_times_the_company_speaks_that_has_most_events():
    untimed = replace(NORTH, public=NORTH.public._replace(timestamps=None))
    whole = whole_of({"north": untimed, "south": SOUTH})
    assert whole.public.sequences[0] == [1, 2, 3, 3]


def test_what_cannot_be_is_refused(tmp_path):
    with_shared_catalogues(BOTH)
    named = replace(SOUTH, name="ean")
    with pytest.raises(ValueError, match="got the domain 'ean' with a part of the items of the catalogue 'ean'"):
        with_shared_catalogues({"ean": named, "north": NORTH})
    save_domains(BOTH, tmp_path)
    back = load_domains(tmp_path)
    assert {name: one.content_hash() for name, one in back.items()} == {
        n: one.content_hash() for n, one in BOTH.items()
    }
    for wrong in ("games", "a b", "../x"):
        with pytest.raises(ValueError, match="got catalogue"):
            PrepareConfig("packed", "raw", "games", catalogue=wrong)


def whole_domain(num_users=60, num_items=30) -> Domain:
    keys = [f"i{item:02d}" for item in range(num_items)]
    rng = np.random.default_rng(0)
    sequences = [rng.integers(num_items, size=9).tolist() for _ in range(num_users)]
    times = [list(range(100 * user, 100 * user + 9)) for user in range(num_users)]
    public = Events(["p1", "p2"], sequences[:2], times[:2])
    users = Events([f"u{user:02d}" for user in range(2, num_users)], sequences[2:], times[2:])
    return Domain(
        "shop", Catalogue("shop", keys, keys, [f"title: {key}" for key in keys]), users, public, {"items": {}}
    )


def test_silos_whose_catalogues_are_cut():
    shop = {"shop": whole_domain()}
    whole, cut = share_out(shop, 3, None, 0), share_out(shop, 3, None, 0, 0.5)
    sold = {name: set(one.item_keys) for name, one in cut.items()}
    common = set.intersection(*sold.values())
    assert len(common) == 15
    assert [len(keys) for keys in sold.values()] == [20, 20, 20]
    assert set.union(*sold.values()) == set(shop["shop"].item_keys)
    lost = 0
    for name, one in cut.items():
        events = whole[name].clients.arrays()
        kept = {}
        for user, items, times in zip(events.users, events.sequences, events.timestamps, strict=True):
            keys = [(whole[name].item_keys[item], time) for item, time in zip(items, times, strict=True)]
            keys = [(key, time) for key, time in keys if key in sold[name]]
            lost += len(items) - (len(keys) if len(keys) >= 3 else 0)
            kept |= {user: keys} if len(keys) >= 3 else {}
        own = zip(one.clients.sequences, one.clients.timestamps, strict=True)
        assert kept == {
            user: [(one.item_keys[item], time) for item, time in zip(items, times, strict=True)]
            for user, (items, times) in zip(one.clients.users, own, strict=True)
        }
        assert "same_catalogue" not in one.card["silo"]
    assert lost == sum(one.card["silo"]["events_of_others_items"] for one in cut.values()) > 0
    with_shared_catalogues(cut)
    apart = share_out(shop, 3, None, 0, 0.0)
    assert len(set.intersection(*(set(one.item_keys) for one in apart.values()))) == 0
    assert {n: one.content_hash() for n, one in share_out(shop, 3, None, 0, 1.0).items()} == {
        n: one.content_hash() for n, one in whole.items()
    }
    with pytest.raises(ValueError, match=r"who keep 3 events of its \d+ items, expected at least 2"):
        share_out({"shop": whole_domain(20)}, 9, None, 0, 0.0)
    with pytest.raises(ValueError, match=r"got silo_overlap 0\.5 with one silo"):
        PrepareConfig("packed", "raw", "games", silo_overlap=0.5)


WORDS = ["red wool scarf", "blue cotton hat", "green silk tie", "grey linen shirt", "white wool socks", "black belt"]


def tables(first, num_items=5, words=WORDS):
    items = [{"item": f"{first + number}", "title": words[(first + number) % 6]} for number in range(num_items)]
    events = [
        {"user": user, "item": f"{first + (user + step) % num_items}", "time": step}
        for user in range(6)
        for step in range(4)
    ]
    return events, items


def test_tables_of_companies_lead_there_where_equal_keys_have_the_same_texts():
    (north, of_north), (south, of_south) = tables(0), tables(2)
    of_south[0]["title"] = f"{of_south[0]['title']} new"  # three words of four are the same
    data = fedecider.from_events({"north": north, "south": south}, {"north": of_north, "south": of_south}, name="mall")
    assert {one.catalogue.name for one in data.values()} == {"mall"}
    assert "items matched by key, which have the same texts: north and south 3" in data.notes
    whole = data["north"].catalogue
    assert whole is data["south"].catalogue
    assert whole.keys == ["0", "1", "2", "3", "4", "5", "6"]
    assert data["south"].titles[0].endswith("new")  # its own words stay with it
    assert not whole.titles[2].endswith("new")


def test_categories_in_the_words_of_each_company_do_not_part_equal_keys():
    (north, of_north), (south, of_south) = tables(0), tables(2)
    for row in of_north:
        row["category"] = "Kleidung und Mode"
    for row in of_south:
        row["category"] = "vetements pour tous"
    data = fedecider.from_events({"north": north, "south": south}, {"north": of_north, "south": of_south}, name="mall")
    assert {one.catalogue.name for one in data.values()} == {"mall"}


@pytest.mark.parametrize("catalogue", ["", "ean"])
def test_keys_of_companies_that_differ_by_a_leading_zero_are_said(catalogue):
    (north, of_north), (south, of_south) = tables(0), tables(2)
    for row in (*south, *of_south):
        row["item"] = f"0{row['item']}"
    settings = {"catalogue": catalogue} if catalogue else {}
    data = fedecider.from_events({"north": north, "south": south}, {"north": of_north, "south": of_south}, **settings)
    (note,) = [note for note in data.notes if "leading zeros" in note]
    assert "different items: 3 of north and south (2 and 02). Where they are the same ones" in note


def test_numbers_of_each_company_own_are_not_matched():
    (north, of_north), (south, of_south) = tables(0), tables(2, words=WORDS[::-1])
    given = {"north": north, "south": south}, {"north": of_north, "south": of_south}
    data = fedecider.from_events(*given)
    assert [one.catalogue.name for one in data.values()] == ["north", "south"]
    assert any(note.startswith("keys in common, but not their texts: north and south 3") for note in data.notes)
    forced = fedecider.from_events(*given, catalogue="ean")
    assert {one.catalogue.name for one in forced.values()} == {"ean"}
    south, of_south = tables(2)
    with pytest.raises(ValueError, match="got a company and the catalogue of all called 'north'"):
        fedecider.from_events({"north": north, "south": south}, {"north": of_north, "south": of_south}, name="north")
