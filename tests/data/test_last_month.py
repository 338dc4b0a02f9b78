"""The last month held out: what trains, validates and tests by the calendar, and who has a target in which."""

from __future__ import annotations

from datetime import date

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.data import protocol as read
from fedecider.data.domain import Events
from fedecider.data.frames import from_events
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import (
    LAST_MONTH,
    chance_hit,
    get_protocol,
    histories,
    rank_held_out,
    targets,
    train_parts,
    with_target,
)
from fedecider.evaluation.sequences import SequenceArray
from idgen.events import event_table, is_target

THINGS = [{"item": one, "title": f"Thing {one}"} for one in "abcdefgh"]
DAY_S = 86_400
FIRST = (date(2014, 1, 1) - date(1970, 1, 1)).days
PURCHASES = {
    "all": [(0, "ab"), (5, "c"), (59, "h"), (60, "a"), (75, "da"), (90, "b"), (119, "bg")],
    "no test": [(1, "a"), (2, "b"), (89, "c")],
    "no validation": [(3, "ab"), (3, "c"), (120, "ae")],
    "neither": [(3, "h"), (20, "c"), (59, "a")],
    "new": [(61, "a"), (100, "bc")],
}
"""Purchases on days of 2014: the last 30 of all are 91 to 120, those before 61 to 90."""


def rows_of(purchases):
    return [
        {"user": user, "item": item, "time": (FIRST + day) * DAY_S + 3600 * 23}
        for user, bought in purchases.items()
        for day, items in bought
        for item in items
    ]


def shop(purchases):
    return dict(from_events(rows_of(purchases), THINGS))


def keys_of(domain, rows):
    return ["".join(domain.item_keys[item] for item in row) for row in rows]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(read, "FEWEST_TESTED", 1)


def test_the_last_thirty_days_are_one_test_basket_and_those_before_one_validation_basket(few):
    data = shop(PURCHASES)
    name, (why,) = read.chosen_protocol("last_month", data)
    assert name == "last_month/2014-04-02"
    assert why.startswith(f"protocol {name}: ")
    found, lines = read.under(name, data)
    shown = found["shop"]
    rows = shown.clients.sequences
    assert shown.clients.users == ["all", "neither", "no test", "no validation"]
    assert keys_of(shown, train_parts(rows)) == ["abcha", "hca", "ab", "abc"]
    assert train_parts(rows).num_baskets_U.tolist() == [4, 3, 2, 1]  # two purchases on one day are one
    assert keys_of(shown, histories(rows, "valid")) == ["abcha", "hca", "ab", "abc"]
    assert keys_of(shown, targets(rows, "valid")) == ["dab", "", "c", ""]
    assert keys_of(shown, histories(rows, "test")) == ["abchadab", "hca", "abc", "abc"]
    assert histories(rows, "test").num_baskets_U.tolist() == [5, 3, 3, 1]
    assert keys_of(shown, targets(rows, "test")) == ["bg", "", "", "ae"]
    assert (with_target(rows, "valid").tolist(), with_target(rows, "test").tolist()) == ([0, 2], [0, 3])
    assert read.customers_tested(shown) == ["all", "no validation"]
    assert "1 of 5 customers have bought nothing before both windows" in lines[0]
    assert "2 of 4 customers bought from 2014-04-02 to 2014-05-01 and are tested, 2 from 2014-03-03 on" in lines[1]
    again, lines = read.under(name, found)
    assert again["shop"].content_hash() == shown.content_hash()
    assert again["shop"].clients.sequences == rows
    assert [keys_of(shown, targets(again["shop"].clients.sequences, "test"))[0]] == ["bg"]


def test_who_has_no_target_is_in_no_mean(few):
    found, _ = read.under("last_month/2014-04-02", shop(PURCHASES))
    rows, protocol = found["shop"].clients.sequences, get_protocol("last_month/2014-04-02")
    score_I = torch.arange(7, 0, -1, dtype=torch.float64)  # a first, h last; nobody buys f
    place_UT = rank_held_out(lambda user_B: score_I.expand(len(user_B), -1), rows, 7, "test", protocol)
    assert place_UT.tolist() == [[1.0, 5.0], [0.0, 4.0]]  # b and g; a and e, though a was bought before
    assert mean_metrics(place_UT, (5,))["recall@5"] == (0.5 + 1.0) / 2
    assert chance_hit(rows, 7, "test", protocol, k=2) == 2 / 7


def test_an_event_is_trained_on_or_in_a_basket_of_the_calendar(few):
    rows = read.under("last_month/2014-04-02", shop(PURCHASES))[0]["shop"].clients.sequences
    events = event_table(rows, hold_out=True)
    assert events.item_E[is_target(events)].tolist() == [2, 6, 0, 2, 0, 1]  # c h a, c a, b; "abc" was one basket
    assert (events.train_end_E - events.first_E)[rows.start_U[:-1]].tolist() == [5, 3, 2, 3]


def test_a_first_day_may_be_given_and_what_is_later_is_left_out(few):
    found, lines = read.under("last_month/2014-03-03", shop(PURCHASES))
    assert keys_of(found["shop"], targets(found["shop"].clients.sequences, "test")) == ["dab", "", "c", ""]
    assert keys_of(found["shop"], targets(found["shop"].clients.sequences, "valid")) == ["ha", "a", "", ""]
    assert "shop: 6 events after the 30 days of the test are left out" in lines


def test_all_companies_and_the_public_have_one_calendar(few):
    late = {user: [(0, "ab"), (70, "c"), (130, "d")] for user in ("u", "v")}
    name, _ = read.chosen_protocol(
        "last_month", from_events({"north": rows_of(PURCHASES), "late": rows_of(late)}, THINGS)
    )
    assert name == "last_month/2014-04-12"
    data = shop(PURCHASES | {user: [(0, "ab"), (5, "c"), (59, "d"), (61, "e")] for user in ("p", "q")})
    domain = data["shop"]
    users = domain.clients.users
    public = domain.clients.take([users.index("p"), users.index("q")])
    private = domain.clients.take([users.index(one) for one in PURCHASES if one != "new"])
    object.__setattr__(domain, "clients", private)
    object.__setattr__(domain, "public", public)
    found, _ = read.under("last_month/2014-04-02", data)
    assert keys_of(found["shop"], found["shop"].public.sequences) == ["abcd", "abcd"]


ROWS = st.lists(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 7)), min_size=1, max_size=9), min_size=2)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans())
def test_nothing_is_trained_on_that_was_bought_after_the_cut(rows, is_sorted):
    """Also where an order of several days stands in front of a later one; its parts stay in their order."""
    rows = [sorted(row) if is_sorted else row for row in rows]
    times = SequenceArray.of([[(FIRST + day) * DAY_S for day, _ in row] for row in rows])
    marked = SequenceArray.of([[100 * number + item for number, (_, item) in enumerate(row)] for row in rows])
    users = [f"u{number}" for number in range(len(rows))]
    asked = get_protocol("last_month/2014-04-02")
    for is_public in (False, True):
        (left, read_rows, _), _ = read._read("shop", Events(users, marked, times), asked, is_public)
        trained = read_rows if is_public else train_parts(read_rows)
        for user, part in zip(left, trained, strict=True):
            assert all(rows[int(user[1:])][mark // 100][0] <= 60 for mark in part)
        if is_public:
            continue
        for split, last in (("valid", 90), ("test", 120)):
            known = histories(read_rows, split)
            for user, past, held in zip(left, known, targets(read_rows, split), strict=True):
                row = rows[int(user[1:])]
                assert all(row[mark // 100][0] <= last - 30 for mark in past)
                assert all(row[mark // 100][0] <= last for mark in held)
                assert not set(past) & set(held)
                if is_sorted:
                    assert all(row[mark // 100][0] > last - 30 for mark in held)


def test_data_that_the_calendar_cannot_split_are_refused():
    data = shop(PURCHASES)
    with pytest.raises(ValueError, match=r"got 2 customers of shop to test, .* and 2 to validate, .* expected 20"):
        read.under("last_month/2014-04-02", data)
    untimed = dict(from_events([{"user": u, "item": i} for u in "uv" for i in "abcd"], THINGS))
    with pytest.raises(ValueError, match=r"got protocol last_month for data without times .* expected times: import"):
        read.chosen_protocol("last_month", untimed)
    with pytest.raises(ValueError, match="got events of shop without a time, expected the time of every one"):
        read.under("last_month/2014-04-02", untimed)
    with pytest.raises(
        ValueError, match=r"got protocol 'last_month/April', expected its first day as in last_month/2014"
    ):
        get_protocol("last_month/April")
    assert get_protocol("last_month") == LAST_MONTH
