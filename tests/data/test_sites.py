"""What the parties of a federation prepare apart fits together: one catalogue, public users, each company's own."""

import pandas as pd
import pytest

from fedecider.data import from_events
from fedecider.data.sellers import with_shared_catalogues
from fedecider.data.sites import own_users, publish
from fedecider.data.store import load_domains

COLUMNS = {"user": "customer", "item": "sku", "time": "at"}
ITEMS = [{"sku": f"0{number}", "title": f"Thing {number}"} for number in range(8)]


def orders(first, num_users, items=6, **more):
    """User u bought items u, u + 1, u + 2 of the first ``items``, newest first in the table."""
    return [
        {"customer": user, "sku": f"0{(user + step) % items}", "at": 1000 + step, **more}
        for user in range(first, first + num_users)
        for step in (2, 1, 0)
    ]


@pytest.fixture
def public(tmp_path):
    publish(orders(100, 5), ITEMS, tmp_path / "public", companies=["north", "south"], **COLUMNS)
    return tmp_path / "public"


def test_every_company_has_the_whole_catalogue_and_the_same_public_users(public):
    domains = load_domains(public)
    assert list(domains) == ["shop.north", "shop.south"]
    with_shared_catalogues(domains)
    for domain in domains.values():
        assert domain.catalogue.name == "shop"
        assert domain.item_keys == [one["sku"] for one in ITEMS]  # 06 and 07 too, which no public user bought
        assert domain.titles[7] == "Thing 7"
        assert domain.item_texts[7] == "title: thing 7"
        assert domain.public.users == [str(user) for user in range(100, 105)]
        assert domain.public.sequences[0] == [4, 5, 0]  # oldest first, by the times
        assert not domain.clients.users


def test_own_users_change_nothing_that_is_shared(public, tmp_path):
    found = own_users(orders(0, 4), public, "shop.north", tmp_path / "own", **COLUMNS)
    shared = load_domains(public, ["shop.north"])["shop.north"]
    assert load_domains(tmp_path / "own")["shop.north"].content_hash() == found.content_hash()
    assert (found.item_keys, found.titles, found.item_texts) == (shared.item_keys, shared.titles, shared.item_texts)
    assert found.public == shared.public
    assert found.catalogue.name == "shop"
    assert dict(zip(found.clients.users, found.clients.sequences, strict=True)) == {
        str(user): [(user + step) % 6 for step in range(3)] for user in range(4)
    }
    assert not any(counts["events"] for counts in found.card["dropped"].values())


def test_what_does_not_fit_is_left_out_and_counted(public):
    rows = orders(0, 3)
    rows += [{"customer": 0, "sku": "99", "at": 5000}]  # an item of its own
    rows += [{"customer": 7, "sku": sku, "at": 1} for sku in ("01", "99", "98")]  # one item left
    rows += orders(104, 1)  # has a public user's key
    found = own_users(rows, public, "shop.south", **COLUMNS)
    assert found.clients.users == ["0", "1", "2"]
    assert found.clients.sequences[0] == [0, 1, 2]
    dropped = found.card["dropped"]
    assert dropped["items that the catalogue does not have"] == {"users": 0, "items": 2, "events": 3}
    assert dropped["users of the public pool"] == {"users": 1, "items": 0, "events": 3}
    assert dropped["users with too few events"]["users"] == 1


def test_lengths_hold_for_both(public, tmp_path):
    long = orders(0, 3) + [{**row, "at": row["at"] + 100, "sku": "07"} for row in orders(0, 3)]
    found = own_users(long, public, "shop.north", **COLUMNS, max_length=4)
    assert found.clients.sequences == [[user + 2, 7, 7, 7] for user in range(3)]
    assert found.card["dropped"]["older events beyond max_length"] == {"events": 6}
    few = publish(orders(100, 5) + orders(0, 2), ITEMS, companies=["a", "b"], **COLUMNS, max_length=3)
    assert all(len(sequence) == 3 for sequence in few["shop.a"].public.sequences)
    with pytest.raises(ValueError, match="min_length 2"):
        own_users(orders(0, 3), public, "shop.north", **COLUMNS, min_length=2)


def test_nobody_has_to_be_public(tmp_path):
    publish(None, ITEMS, tmp_path, companies=["north", "south"], **COLUMNS)
    domain = own_users(orders(0, 5), tmp_path, "shop.north", **COLUMNS)
    assert (len(domain.item_keys), len(domain.clients.users), domain.public.users) == (len(ITEMS), 5, [])


def test_tables_of_several_companies_in_one_place(tmp_path):
    rows = orders(0, 12, company="north") + orders(0, 9, company="south")
    found = from_events(rows, ITEMS, **COLUMNS, company="company", public=0.3)
    found.save(tmp_path)
    assert list(found) == ["north", "south"]
    assert list(load_domains(tmp_path)) == list(found)
    for name, domain in found.items():
        assert domain.catalogue.name == "shop"
        assert {user.partition(":")[0] for user in domain.clients.users} == {name}
        assert domain.card["silo"]["shared_out"] == "by company"
    users = [user for domain in found.values() for user in domain.clients.users] + found["north"].public.users
    assert len(set(users)) == len(users) == 21  # customer 3 of one is not customer 3 of the other
    assert 0 < len(found["north"].public.users) < 12


def test_a_company_may_sell_one_of_two_catalogues(tmp_path):
    rows = orders(0, 12, company="north", area="a") + orders(20, 12, company="south", area="a")
    rows += orders(40, 12, company="south", area="b")
    things = [{**one, "area": area} for one in ITEMS for area in "ab"]
    found = from_events(
        rows, things, **COLUMNS, company="company", domain="area", k_core=0, users_per_domain=10, seed=1
    )
    assert list(found) == ["a.north", "a.south", "b.south"]


BAD = {
    "one company": (lambda: publish(orders(0, 3), ITEMS, companies=["a"], **COLUMNS), "expected two or more different"),
    "a text as companies": (lambda: publish(orders(0, 3), ITEMS, companies="ab", **COLUMNS), "got companies 'ab'"),
    "a path as company": (lambda: publish(orders(0, 3), ITEMS, companies=["a", "/b"], **COLUMNS), "got the name '/b'"),
    "no public user": (lambda: publish(orders(0, 3)[:2], ITEMS, companies=["a", "b"], **COLUMNS), "got no public user"),
    "an item without text": (
        lambda: publish(orders(0, 3), [*ITEMS, {"sku": "08", "title": " "}], companies=["a", "b"], **COLUMNS),
        "got 1 of 9 items without text, such as '08'",
    ),
    "an unknown wish": (
        lambda: publish(orders(0, 3), ITEMS, companies=["a", "b"], **COLUMNS, missing_text="keep"),
        "got missing_text 'keep', expected error or drop",
    ),
    "silos of silos": (
        lambda: from_events(orders(0, 9, company="a"), ITEMS, **COLUMNS, company="company", silos=2),
        "got silos 2 beside a company column",
    ),
    "an odd company": (
        lambda: from_events(orders(0, 9, company="a:b"), ITEMS, **COLUMNS, company="company"),
        "got the company 'a:b', expected",
    ),
    "no company": (
        lambda: from_events(orders(0, 9, company=" "), ITEMS, **COLUMNS, company="company"),
        "got no company in row 1",
    ),
    "a company with one client": (
        lambda: from_events(
            orders(0, 9, company="a") + orders(0, 1, company="b"), ITEMS, **COLUMNS, company="company", k_core=0,
            public_users_per_domain=0, users_per_domain=10
        ),
        "got 1 client users in the silo b of 10 in 'shop', expected at least 2. Give more users of this company",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_prepared_is_told_in_a_sentence(case):
    attempt, expected = BAD[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        attempt()
    assert expected in str(error.value)


def test_items_without_text_can_be_left_out(tmp_path):
    things = pd.DataFrame([*ITEMS, {"sku": "08", "title": None}])
    found = publish(orders(100, 5), things, companies=["a", "b"], **COLUMNS, missing_text="drop")["shop.a"]
    assert len(found.item_keys) == 8
    assert found.card["dropped"]["items without text"] == {"items": 1}


def test_another_companys_keys_are_told(public):
    with pytest.raises(ValueError, match="are keys written as they are there"):
        own_users([{**row, "sku": f"x{row['sku']}"} for row in orders(0, 5)], public, "shop.north", **COLUMNS)
    with pytest.raises(ValueError, match=r"no prepared data for \['shop.west'\]"):
        own_users(orders(0, 5), public, "shop.west", **COLUMNS)


def test_a_file_as_output_is_told_before_the_work(public, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="which is a file, expected a folder"):
        publish(7, 7, tmp_path / "taken", companies=["a", "b"])
    with pytest.raises(ValueError, match="which is a file, expected a folder"):
        own_users(7, public, "shop.north", tmp_path / "taken")
