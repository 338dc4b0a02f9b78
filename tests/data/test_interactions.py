"""Rating data for the cross-device track: filters, order, card; small files worked out by hand, then real counts."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from fedecider.data.interactions import (
    TOO_SHORT,
    Interactions,
    InteractionsConfig,
    load_interactions,
)
from fedecider.data.prepare import PrepareConfig, prepare
from fedecider.data.store import file_sha256, load_domains

BELOW = "below min_user_events or min_item_events"
# u1 has a twice and a tie at the end; u3 has 4 rows but 2 items; u4 has 2 rows, one of them the only z.
# fmt: off
ROWS = [  # user, item, stars, time
    "u1,a,5,5", "u1,b,1,3", "u3,a,4,1", "u2,c,4,20", "u1,a,4,1", "u1,c,4,7", "u4,z,4,2", "u1,d,2,7",
    "u2,e,4,40", "u2,d,4,30", "u3,a,4,2", "u2,b,3,10", "u3,b,4,4", "u4,a,4,1", "u3,a,4,3", "u1,,4,1",
]
# fmt: on


@pytest.fixture
def shop(write):
    """shop(rows) -> settings that read them: Amazon's form has all four columns."""

    def settings(rows=ROWS, **others):
        return InteractionsConfig("shop", "amazon_ratings", str(write("ratings.dat", rows).parent), **others)

    return settings


def test_filters_order_and_card_by_hand(shop, tmp_path):
    data = load_interactions(shop())
    assert (data.name, data.users, data.item_keys) == ("shop", ["u1", "u2"], ["a", "b", "c", "d", "e"])
    assert data.sequences == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert data.timestamps == [[1, 3, 7, 7], [10, 20, 30, 40]]
    assert (data.num_users, data.num_items, data.num_events) == (2, 5, 8)
    assert data.titles == [""] * 5
    card = data.card
    assert (card["users"], card["items"], card["events"], card["titled_items"]) == (2, 5, 8, 0)
    assert card["density"] == pytest.approx(8 / 10)
    assert card["length"] == {"min": 4, "mean": 4, "median": 4, "max": 4}
    # u1 ends with two events of time 7; its last is older than the newest training event (u2 at 20).
    assert (card["tied_last_two_share"], card["test_before_last_train_share"]) == (0.5, 0.5)
    assert card["tied_neighbours_share"] == pytest.approx(1 / 6)  # of 1 3 7 7 and 10 20 30 40
    assert card["dropped"] == {
        "unreadable lines": {"lines": 1},
        "blank lines": {"lines": 0},
        BELOW: {"users": 1, "items": 1, "events": 2},
        "repeats": {"users": 0, "items": 0, "events": 3},
        TOO_SHORT: {"users": 1, "items": 0, "events": 2},
    }
    assert card["raw"]["files"] == {"ratings.dat": file_sha256(tmp_path / "ratings.dat")}
    assert (card["raw"]["users"], card["raw"]["items"], card["raw"]["events"]) == (4, 6, 15)
    assert card["raw"]["bad_lines"] == {"count": 1, "examples": ["ratings.dat:16: no item in 'u1,,4,1'"]}
    assert card["order"] == "time, ties in file order"
    assert card["settings"]["min_user_events"] == 3
    assert str(tmp_path) not in str(card)


def test_thresholds(shop):
    # At least 3 stars: u1 keeps a, a, c, which are two items; u2 keeps all.
    with pytest.raises(ValueError, match=r"'shop': 1 user\(s\) and 4 item\(s\) are left"):
        load_interactions(shop(implicit_threshold=3))
    rows = [*ROWS, "u5,c,4,1", "u5,b,4,2", "u5,a,1,3", "u5,d,5,4"]
    data = load_interactions(shop(rows, implicit_threshold=3))
    assert (data.users, data.item_keys) == (["u2", "u5"], ["b", "c", "d", "e"])
    assert data.sequences == [[0, 1, 2, 3], [1, 0, 2]]
    assert data.card["dropped"]["rating below min_rating"] == {"events": 3}
    # Five rows a user, repeats included: u1 alone has them.
    with pytest.raises(ValueError, match=r"1 user\(s\)"):
        load_interactions(shop(min_user_events=5))
    # Two rows an item: z and e go; u2 is left with three.
    data = load_interactions(shop(min_item_events=2))
    assert data.item_keys == ["a", "b", "c", "d"]
    assert data.sequences == [[0, 1, 2, 3], [1, 2, 3]]
    with pytest.raises(ValueError, match="0 user"):
        load_interactions(shop(min_user_events=99))
    with pytest.raises(ValueError, match=r"no events in .*ratings.dat.*implicit_threshold"):
        load_interactions(shop(implicit_threshold=6))


def test_without_times_the_file_gives_the_order(write):
    numbers = str.maketrans("abcdez", "123459")
    rows = [row.rpartition(",")[0].removeprefix("u").translate(numbers).replace(",", " ") for row in ROWS]
    data = load_interactions(InteractionsConfig("shop", "filmtrust", str(write("ratings.txt", rows).parent)))
    assert data.sequences == [[0, 1, 2, 3], [2, 4, 3, 1]]
    assert data.timestamps is None
    assert (data.card["order"], data.card["tied_last_two_share"]) == ("file order", None)
    assert data.card["tied_neighbours_share"] is None
    assert data.card["test_before_last_train_share"] is None


def test_the_same_events_in_two_formats_and_any_row_order(write, tmp_path):
    dice = random.Random(5)
    events = [(u, i, dice.randrange(10**6)) for u in range(6) for i in dice.sample(range(20), 4 + u)]
    csv = InteractionsConfig("mine", "amazon_ratings", str(tmp_path))
    loaded = []
    for _ in range(2):
        dice.shuffle(events)
        write("ratings.dat", [f"mine-{u},{i},4,{t}" for u, i, t in events])
        loaded.append(load_interactions(csv))
    write("u.data", [f"{u}\t{i}\t4\t{t}" for u, i, t in events])
    loaded.append(load_interactions(InteractionsConfig("mine", "movielens", str(tmp_path))))
    assert len({data.content_hash() for data in loaded}) == 1
    assert list(map(len, loaded[0].sequences)) == [4, 5, 6, 7, 8, 9]


def test_titles_and_hash(write, tmp_path):
    write("u.data", [f"{u}\t{i}\t4\t{i}" for u in (1, 2) for i in (7, 8, 9)])
    write("movies.dat", ["7::Seven (1995)::Drama", "8::Eight::War", "8::Eight again::War"])
    config = InteractionsConfig("mine", "movielens", str(tmp_path))
    data = load_interactions(config)
    assert data.titles == ["Seven (1995)", "Eight", ""]
    assert data.card["titled_items"] == 2
    assert replace(data, titles=["", "", ""], card={}).content_hash() == data.content_hash()
    others = [
        replace(data, name="yours"),
        replace(data, sequences=[[0, 2, 1], [0, 1, 2]]),
        replace(data, timestamps=None),
        replace(data, item_keys=["6", "8", "9"]),
        replace(data, users=["mine-1", "mine-3"]),
    ]
    assert len({other.content_hash() for other in [data, *others]}) == 6


def test_known_data_set_below_the_data_root(write, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDECIDER_DATA", str(tmp_path))
    # A user needs ten rows; user 1 has a pair twice, user 3 only nine rows.
    rows = [f"{u} {i} 3" for u, n in ((1, 10), (2, 12), (3, 9)) for i in range(n)]
    write("filmtrust/ratings.txt", [rows[0], *rows])
    data = load_interactions(InteractionsConfig("filmtrust"))
    assert data.users == ["filmtrust-1", "filmtrust-2"]
    assert list(map(len, data.sequences)) == [10, 12]
    assert data.item_keys == sorted(map(str, range(12)))
    said = []
    with_all = load_interactions(InteractionsConfig("filmtrust", min_user_events=5), said.append)
    assert "order of a user's events: file order: no times, so a user's last row is the test item; left out" in said[-1]
    assert with_all.num_users == 3
    # raw says where its files are, instead of the data root.
    monkeypatch.setenv("FEDECIDER_DATA", str(tmp_path / "nowhere"))
    again = load_interactions(InteractionsConfig("filmtrust", raw=str(tmp_path / "filmtrust")))
    assert again.content_hash() == data.content_hash()
    given = str(tmp_path / "filmtrust" / "ratings.txt")
    with pytest.raises(
        ValueError,
        match=r"ratings.txt, a file; expected its folder; .*: fedecider import .*ratings.txt .*--source prepared",
    ):
        load_interactions(InteractionsConfig("filmtrust", raw=given))
    expected = r"'filmtrust': there is no folder .*nowhere.*Fetch ratings\.txt of https://.*Set FEDECIDER_DATA .*--raw"
    with pytest.raises(ValueError, match=expected):
        load_interactions(InteractionsConfig("filmtrust"))


def test_lastfm_counts_rows_before_pairs(write, tmp_path):
    rows = [f"1\t{artist}\t{tag}\t{10 - artist}\t1\t2009" for artist in (4, 5, 6) for tag in (1, 2)]
    rows += [f"2\t{artist}\t1\t1\t1\t2009" for artist in (4, 5, 7, 8)]  # 4 pairs, but 4 rows
    rows += [f"3\t6\t{tag}\t1\t1\t2009" for tag in range(5)]  # 5 rows, but 1 pair
    rows += [f"4\t{artist}\t1\t1\t1\t2009" for artist in range(4, 9)]
    write("user_taggedartists.dat", ["userID\tartistID\ttagID\tday\tmonth\tyear", *rows])
    data = load_interactions(InteractionsConfig("lastfm-2k", raw=str(tmp_path)))
    assert data.users == ["lastfm-2k-1", "lastfm-2k-4"]
    assert data.sequences == [[2, 1, 0], [0, 1, 2, 3, 4]]
    assert [data.card["dropped"][why]["users"] for why in (BELOW, TOO_SHORT)] == [1, 1]


def test_the_sources_own_order_and_its_many_domains(packed):
    folder = packed({"games": {"a": [(3, None), (1, None), (2, None)], "b": [(2, 5), (3, 4), (1, 9)]}})
    data = load_interactions(InteractionsConfig("games", "packed", str(folder)))
    assert data.sequences == [[2, 0, 1], [1, 2, 0]]
    assert data.timestamps == [[-1, -1, -1], [5, 4, 9]]
    assert data.titles[0] == "Title games 1"
    assert (data.card["order"], data.card["known_time_share"]) == ("the source's own order", 0.5)


def test_prepared_clients_with_the_whole_catalogue(packed, tmp_path):
    users = {f"u{n}": [(n % 4, 1), ((n + 1) % 4, 2), (n % 4, 3), ((n + 2) % 4, 4), (7, 5)] for n in range(8)}
    users["long"] = [(item, item + 1) for item in range(12)]
    folder = packed({"games": users})
    out = str(tmp_path / "prepared")
    prepare(PrepareConfig("packed", str(folder), "games", out, k_core=0, users_per_domain=4, seed=3))
    domain = load_domains(out)["games"]
    assert domain.public.users
    data = load_interactions(InteractionsConfig("games", "prepared", out))
    assert data.users == domain.clients.users
    assert (data.item_keys, data.titles) == (domain.item_keys, domain.titles)
    for sequence, original in zip(data.sequences, domain.clients.sequences, strict=True):
        assert sequence == list(dict.fromkeys(original))  # the third event repeats the first item
    assert data.timestamps[0] == [1, 2, 4, 5]
    assert data.card["dropped"]["repeats"]["events"] == 4
    assert data.card["settings"]["content_hash"] == domain.content_hash()
    assert sorted(data.card["raw"]["files"]) == [f"games/{name}.parquet" for name in ("clients", "items", "public")]
    with pytest.raises(ValueError, match=r"no prepared data for \['toys'\].*prepare_data.py"):
        load_interactions(InteractionsConfig("toys", "prepared", out))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": "netflix"}, r"dataset 'netflix'; expected one of \['amazon-gift-cards', .*'ml-100k'.*--source"),
        ({"dataset": "mine", "source": "excel", "raw": "x"}, r"source 'excel'; expected one of .*'prepared'"),
        ({"source": "lists", "raw": "x"}, "source 'lists' for the known data set 'ml-100k'"),
        ({"dataset": "mine", "source": "lists"}, "without raw"),
        ({"dataset": "../mine", "source": "lists", "raw": "x"}, "dataset '../mine'; expected letters"),
        ({"dataset": "mine", "source": "csv", "raw": "x"}, "source csv; .*fedecider import TABLE.csv .*prepared"),
        ({"min_user_events": -1}, "min_user_events -1"),
        ({"min_item_events": -2}, "min_item_events -2"),
        ({"max_bad_lines": -1}, "max_bad_lines -1"),
        ({"dataset": "m", "source": "prepared", "raw": "x", "min_item_events": 2}, "min_item_events with .*prepared"),
    ],
)
def test_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        InteractionsConfig(**settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"users": ["a"], "sequences": [[0, 1, 2]], "timestamps": None}, r"1 user\(s\)"),
        ({"item_keys": ["x", "z", "y"]}, "sorted, different item keys"),
        ({"titles": ["", ""]}, "one title for each"),
        ({"users": ["a", "a"]}, "different users"),
        ({"sequences": [[0, 1, 2], [0, 1]]}, "user 'b' has too few items"),
        ({"sequences": [[0, 1, 2], [0, 1, 0]]}, "user 'b' has too few items or one twice"),
        ({"sequences": [[0, 1, 3], [0, 1, 2]]}, "outside 0..2"),
        ({"timestamps": [[1, 2, 3], [1, 2]]}, "differ in length"),
    ],
)
def test_interactions_are_checked(change, words):
    good = Interactions("d", ["a", "b"], ["x", "y", "z"], [""] * 3, [[0, 1, 2], [2, 1, 0]], [[1, 2, 3], [1, 1, 1]], {})
    with pytest.raises(ValueError, match=words):
        replace(good, **change)


@pytest.fixture
def real(data_root, monkeypatch):
    """real(name, ...) -> the data set, read without a single bad line."""
    monkeypatch.setenv("FEDECIDER_DATA", str(data_root))
    return lambda name, **others: load_interactions(InteractionsConfig(name, max_bad_lines=0, **others))


def sizes(data):
    return data.num_users, data.num_items, data.num_events


@pytest.mark.data
def test_real_ml_100k(real):
    start = time.process_time()  # others may be at work
    data = real("ml-100k")
    assert time.process_time() - start < 2
    assert sizes(data) == (943, 1682, 100_000)
    assert data.card["tied_last_two_share"] == pytest.approx(0.44, abs=0.005)
    assert data.titles[data.item_keys.index("1")] == "Toy Story (1995)"
    liked = real("ml-100k", implicit_threshold=4)
    assert liked.card["dropped"]["rating below min_rating"] == {"events": 100_000 - 55_375}


@pytest.mark.data
def test_real_lastfm_2k(real):
    data = real("lastfm-2k")
    raw, dropped = data.card["raw"], data.card["dropped"]
    left = {name: raw[name] - dropped[BELOW][name] for name in ("users", "items", "events")}
    assert left == {"users": 1600, "items": 12_454, "events": 185_649}  # what the papers print, but for one lost row
    assert left["events"] - dropped["repeats"]["events"] == 70_508
    assert sizes(data) == (1400, 12_371, 70_226)
    assert dropped[TOO_SHORT] == {"users": 200, "items": 83, "events": 282}


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("lastfm-2k-plays", {}, (1874, 17_612, 92_780)),  # FedRAP, Table 2
        ("amazon-instant-video", {}, (8072, 11_830, 63_836)),  # FedRecGEL, Table 1
        ("amazon-instant-video", {"min_user_events": 10}, (1372, 7957, 23_181)),  # FedRAP, Table 2
        ("ml-latest-small", {}, (671, 9066, 100_004)),
        ("amazon-gift-cards", {}, (458, 148, 2965)),  # 7 of 2,972 reviews repeat a pair
    ],
)
def test_real_counts(real, name, settings, expected):
    assert sizes(real(name, **settings)) == expected


@pytest.mark.data
@pytest.mark.slow
def test_real_ml_1m(real):
    data = real("ml-1m")
    assert sizes(data) == (6040, 3706, 1_000_209)
    assert (data.card["order"], data.timestamps) == ("the source's own order", None)
