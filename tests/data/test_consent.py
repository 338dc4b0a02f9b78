"""Nobody is public unless somebody says so, and who is private stays private."""

import pandas as pd
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.data import from_events
from fedecider.data.consent import Consent, user_order
from fedecider.data.prepare import PrepareConfig

ITEMS = [{"sku": f"s{number}", "title": f"Thing {number}"} for number in range(5)]


def events(keys, **more):
    """Four events of each customer; with times, so that the order of rows tells nothing."""
    return [
        {"customer": key, "sku": f"s{(place + step) % 5}", "time": 1000 * step + place, **more}
        for place, key in enumerate(keys)
        for step in range(4)
    ]


def groups(data):
    clients = {user for domain in data.values() for user in domain.clients.users}
    return clients, {user for domain in data.values() for user in domain.public.users}


def test_nobody_is_public_by_default():
    assert groups(from_events(events("abcdefghij"), ITEMS))[1] == set()
    assert PrepareConfig("packed", "raw", "games").public_share == 0.0
    assert not any(Consent().is_public(str(user)) for user in range(10_000))


def test_a_share_is_that_of_all_hashes_and_keyed_by_the_seed():
    users = [str(user) for user in range(20_000)]
    public = {user for user in users if Consent(0.2, 3).is_public(user)}
    assert abs(len(public) / len(users) - 0.2) < 0.01
    assert public == {user for user in users if user_order(3, user) >= 0.8 * 2**64}
    assert public <= {user for user in users if Consent(0.3, 3).is_public(user)}  # a larger share adds
    assert public != {user for user in users if Consent(0.2, 4).is_public(user)}


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 10**6), min_size=24, max_size=60, unique=True),
    share=st.sampled_from([0.2, 0.5]),
    order=st.randoms(use_true_random=False),
)
def test_a_table_that_grows_by_a_third_moves_nobody(numbers, share, order):
    old = [str(number) for number in numbers[: len(numbers) * 3 // 4]]
    rows = events([str(number) for number in numbers])
    order.shuffle(rows)
    private, public = groups(from_events(events(old), ITEMS, public=share))
    later = groups(from_events(rows, ITEMS, public=share))
    assert private <= later[0]
    assert public <= later[1]
    assert later[0] | later[1] == set(map(str, numbers))


def test_rows_in_another_order_give_the_same_data():
    rows = events([str(number) for number in range(40)])
    found = from_events(rows, ITEMS, public=0.3)["shop"]
    assert from_events(rows[::-1], ITEMS[::-1], public=0.3)["shop"].content_hash() == found.content_hash()


def test_companies_hash_the_key_as_it_was_given():
    tables = {"north": events("abcdefghijklmnop"), "south": events("abcdefghijklmnop")}
    alone = groups(from_events(events("abcdefghijklmnop"), ITEMS, public=0.4))[1]
    together = groups(from_events(tables, ITEMS, public=0.4))[1]
    assert alone
    assert together == {f"{name}:{key}" for name in tables for key in alone}


NAMED = {
    "a list": ["c", "e"],
    "a set": {"c", "e"},
    "a series": pd.Series(["c", "e"]),
    "an array": pd.Series(["c", "e"]).to_numpy(),
    "a polars series": polars.Series(["c", "e"]),
    "a frame": pd.DataFrame({"customer": ["c", "e"], "since": [1, 2]}),
    "a frame of one column": pd.DataFrame({"who": ["c", "e"]}),
    "rows": [{"customer": "c"}, {"customer": "e"}],
    "a share column": "consents",
}


@pytest.mark.parametrize("kind", NAMED)
def test_the_public_customers_can_be_named(kind, tmp_path):
    rows = [{**row, "consents": row["customer"] in "ce"} for row in events("abcdef")]
    for form in (rows, pd.DataFrame(rows)):
        assert groups(from_events(form, ITEMS, public=NAMED[kind])) == (set("abdf"), set("ce"))
    pd.DataFrame(rows).to_csv(tmp_path / "events.csv", index=False)
    pd.DataFrame({"customer": ["c", "e"]}).to_csv(tmp_path / "yes.csv", index=False)
    assert groups(from_events(tmp_path / "events.csv", ITEMS, public=str(tmp_path / "yes.csv")))[1] == set("ce")
    assert groups(from_events(tmp_path / "events.csv", ITEMS, public="consents"))[1] == set("ce")


def test_numbers_as_keys():
    assert groups(from_events(events(range(6)), ITEMS, public=[2, "4"]))[1] == {"2", "4"}


def test_named_customers_of_companies():
    tables = {"north": events("abc"), "south": events("cdef")}
    for public in (["a", "south:c", "d"], {"north": ["a"], "south": pd.Series(["c", "d"])}):
        assert groups(from_events({"north": events("abcxy"), "south": tables["south"]}, ITEMS, public=public))[1] == {
            "north:a",
            "south:c",
            "south:d",
        }
    with pytest.raises(ValueError, match="the public customer 'c', who may be north:c or south:c, expected one"):
        from_events(tables, ITEMS, public=["c"])


def test_who_is_named_without_an_event_is_told():
    data = from_events(events("abcdef"), ITEMS, public=["a", "z"])
    assert "1 of 2 public customers have no event, such as 'z'" in data.notes
    assert "1 of 6 customers are public" in data.notes


BAD = {
    "nobody known": (["x", "y"], "got 2 public customers such as 'x', of whom none has an event"),
    "all": (1.0, "got public 1.0, expected a share"),
    "a truth": (True, "got public True"),
    "no such column": ("agreed", "got public 'agreed', which is no column of the events"),
    "no such file": ("agreed.csv", "there is no file agreed.csv"),
    "by company": ({"north": ["a"]}, "got public by company without companies"),
    "a key that is none": ([None], "got None among the public customers"),
    "no answer": ("maybe", "got 'perhaps' in row 1 of the events (column 'maybe'), expected true or false"),
    "two answers": (
        "mixed",
        "got true and false for the customer 'a' in the events (column 'mixed'), expected the same",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_says_nothing_about_consent_is_refused(case):
    public, expected = BAD[case]
    rows = [{**row, "maybe": "perhaps", "mixed": number % 2 == 0} for number, row in enumerate(events("abcdef"))]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        from_events(rows, ITEMS, public=public)
    assert expected in str(error.value)


def test_one_way_of_choosing():
    with pytest.raises(ValueError, match=r"expected public=0\.2"):
        from_events(events("abcdef"), ITEMS, public_share=0.2)
    with pytest.raises(ValueError, match="got public beside users_per_domain"):
        from_events(events("abcdef"), ITEMS, public=0.2, users_per_domain=3)
    with pytest.raises(ValueError, match="got keep_split data with users_per_domain 3"):
        PrepareConfig("packed", "raw", "games", keep_split="data", users_per_domain=3)


def test_a_split_is_kept(tmp_path):
    keys = [str(number) for number in range(30)]
    old = from_events(events(keys[:20]), ITEMS, public=0.3, seed=1)
    old.save(tmp_path)
    private, public = groups(old)
    anew = groups(from_events(events(keys), ITEMS, public=0.3, seed=2))
    assert private & anew[1]  # another seed would make some of them public
    kept = groups(from_events(events(keys), ITEMS, public=0.3, seed=2, keep_split=str(tmp_path)))
    assert private <= kept[0]
    assert public <= kept[1]
    assert {key for key in keys[20:] if key in kept[1]} == anew[1] & set(keys[20:])


def test_a_private_customer_cannot_be_named_later(tmp_path):
    from_events(events("abcdef"), ITEMS, public=["a", "b"]).save(tmp_path)
    with pytest.raises(ValueError, match=r"^got the customer 'c' as public, who is private in [^\n]*$"):
        from_events(events("abcdefgh"), ITEMS, public=["a", "c"], keep_split=str(tmp_path))
    later = groups(from_events(events("abcdefgh"), ITEMS, public=["a", "h"], keep_split=str(tmp_path)))
    assert later == (set("bcdefg"), set("ah"))  # b has withdrawn
    with pytest.raises(ValueError, match=r"got none of the 6 customers of .* again, expected some"):
        from_events(events("uvwxyz"), ITEMS, keep_split=str(tmp_path))


def test_a_foreign_pool_does_not_make_a_private_customer_public(tmp_path):
    rows = [*events("abcdef", area="a"), *events("defghi", area="b")]
    things = [{**one, "area": area} for one in ITEMS for area in "ab"]
    from_events(rows, things, domain="area").save(tmp_path)
    fresh = [*rows, *events("jkl", area="b")]
    pooled = from_events(fresh, things, domain="area", public_domains="b", keep_split=str(tmp_path))
    assert groups(pooled) == (set("abcdef"), set("jkl"))
