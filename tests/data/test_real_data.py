"""The readers on real files (FEDECIDER_DATA); numbers are those published with the files."""

from __future__ import annotations

import numpy as np
import pytest

from fedecider.data.prepare import PrepareConfig, prepare_domains
from fedecider.data.readers import SOURCES, ReadOptions

pytestmark = pytest.mark.data


def lengths(raw):
    return np.bincount(raw.events.user_E)


@pytest.mark.parametrize(
    ("folder", "domain", "users", "items", "events", "longest"),
    [
        ("amazon2018-d3", "movies_tv", 3663, 2653, 31085, 582),
        ("amazon2018-d3", "cds_vinyl", 7685, 5841, 69249, 312),
        ("amazon2018-d3", "video_games", 9066, 3858, 70483, 97),
        ("amazon2018-d3", "office", 3231, 3459, 22447, 30),
        ("amazon2018-d3", "industrial", 3285, 3686, 22743, 34),
        ("amazon2014-p5", "beauty", 22363, 12101, 198502, 204),
        ("amazon2014-p5", "toys", 19412, 11924, 167597, 550),
    ],
)
@pytest.mark.slow
def test_packed_statistics(data_root, folder, domain, users, items, events, longest):
    raw = SOURCES["packed"](data_root / folder, domain, ReadOptions(max_bad_lines=0))
    assert (len(raw.events.users), len(raw.events.user_E), lengths(raw).max()) == (users, events, longest)
    # The published number of items counts the catalogue; in the two subsets some of them have no event.
    without_event = {"office": 142, "industrial": 145}.get(domain, 0)
    assert len(raw.events.items) == items - without_event
    assert len(raw.read_catalogue(frozenset(raw.events.items)).items) == items - without_event


@pytest.mark.slow
def test_amazon2018_d3_prepared(data_root):
    names = ["movies_tv", "cds_vinyl", "video_games"]
    raw = str(data_root / "amazon2018-d3")
    domains = prepare_domains(PrepareConfig("packed", raw, names, k_core=0, users_per_domain=1000))
    sizes = {name: (len(d.item_keys), len(d.clients.users)) for name, d in domains.items()}
    assert sizes == {"movies_tv": (2653, 1000), "cds_vinyl": (5841, 1000), "video_games": (3858, 1000)}
    totals = {name: d.clients.num_events + d.public.num_events for name, d in domains.items()}
    # What is missing are the events of users who are clients of another domain.
    assert {name: d.card["raw"]["events"] for name, d in domains.items()} == {
        "movies_tv": 31085,
        "cds_vinyl": 69249,
        "video_games": 70483,
    }
    assert all(totals[name] <= d.card["raw"]["events"] for name, d in domains.items())
    clients = {user for d in domains.values() for user in d.clients.users}
    assert not any(clients & set(d.public.users) for d in domains.values())
    known = {name: d.card["clients"]["known_time_share"] for name, d in domains.items()}
    assert all(0.3 < share < 0.5 for share in known.values())
    for d in domains.values():
        for times in d.clients.timestamps or []:
            stamped = [time for time in times if time != -1]
            assert stamped == sorted(stamped)


@pytest.mark.slow
def test_sports_have_keywords_only(data_root):
    raw = SOURCES["packed"](data_root / "amazon2014-p5", "sports", ReadOptions())
    assert (len(raw.events.users), len(raw.events.items), len(raw.events.user_E)) == (35598, 18357, 296337)
    config = PrepareConfig(
        "packed", str(data_root / "amazon2014-p5"), "sports", users_per_domain=50, public_users_per_domain=10
    )
    domain = prepare_domains(config)["sports"]
    assert all(text.startswith("keywords: ") for text in domain.item_texts)
    assert all(domain.titles)
    assert domain.clients.timestamps is None


def test_raw_amazon_gift_cards(data_root):
    folder = data_root / "amazon2018-gift-cards-raw"
    raw = SOURCES["amazon"](folder, "gift_cards", ReadOptions(max_bad_lines=0))
    assert (len(raw.events.users), len(raw.events.items), len(raw.events.user_E)) == (458, 148, 2972)
    config = PrepareConfig("amazon", str(folder), "gift_cards", k_core=0, public_share=0.3)
    domain = prepare_domains(config)["gift_cards"]
    assert len(domain.clients.users) + len(domain.public.users) == len([n for n in lengths(raw).tolist() if n >= 3])
    assert domain.card["raw"]["exact_duplicate_events"] == 3
    assert any("brand: amazon" in text for text in domain.item_texts)


def test_ml_100k(data_root):
    folder = data_root / "movielens" / "ml-100k"
    raw = SOURCES["movielens"](folder, "films", ReadOptions(max_bad_lines=0))
    assert (len(raw.events.users), len(raw.events.items), len(raw.events.user_E)) == (943, 1682, 100000)
    config = PrepareConfig("movielens", str(folder), "films", k_core=0, public_share=0)
    domain = prepare_domains(config)["films"]
    # 44 % of the users rated their last two films in the same second: published with the evaluation protocol.
    assert domain.card["clients"]["tied_last_two_share"] == pytest.approx(0.44, abs=0.005)
    assert "title: toy story (1995); genres: animation, children's, comedy" in domain.item_texts
    assert any("\u00e9" in title for title in domain.titles)


def test_ml_latest_small(data_root):
    raw = SOURCES["movielens"](data_root / "movielens" / "ml-latest-small", "films", ReadOptions(max_bad_lines=0))
    assert (len(raw.events.users), len(raw.events.items), len(raw.events.user_E)) == (671, 9066, 100004)
    assert len(raw.read_catalogue(frozenset(raw.events.items)).items) == 9066


@pytest.mark.slow
def test_ml_1m(data_root):
    raw = SOURCES["movielens"](data_root / "movielens" / "ml-1m", "films", ReadOptions(max_bad_lines=0))
    assert (len(raw.events.users), len(raw.events.items), len(raw.events.user_E)) == (6040, 3706, 1000209)


def test_goodbooks_samples(data_root):
    folder = data_root / "goodbooks-10k"
    raw = SOURCES["goodbooks"](folder, "books", ReadOptions(max_bad_lines=0))
    assert len(raw.events.user_E) == 99  # the sample has 100 lines with its header
    catalogue = raw.read_catalogue(frozenset(raw.events.items))
    assert set(catalogue.items) == set(raw.events.items)
    assert all(fields["author"] for fields in catalogue.items.values())
    config = PrepareConfig("goodbooks", str(folder), "books", k_core=50)
    with pytest.raises(ValueError, match="after filtering"):
        prepare_domains(config)
