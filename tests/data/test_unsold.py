"""Products that nobody has bought yet, and items without any text, come in beside what is sold and named."""

from datetime import datetime, timedelta, timezone

import pytest

from fedecider.data import from_events
from fedecider.data.catalogue import NewItem
from fedecider.data.store import load_domains

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
NAMES = {"user": "customer", "item": "sku", "time": "when"}
SETTINGS = {"public": 0.3}


def events():
    return [
        {"customer": 100 + user, "sku": f"0{(user + step) % 6}", "when": START + timedelta(hours=step)}
        for user in range(12)
        for step in range(3)
    ]


def items():
    return [{"sku": f"0{number}", "title": f"Thing {number}"} for number in range(6)]


def test_products_that_nobody_has_bought_are_kept_beside_the_catalogue(tmp_path):
    """They change no number of what is trained: the same catalogue, users and content as without them."""
    new = [{"sku": "07", "title": "New <b>one</b>"}, {"sku": "06", "title": ""}, {"sku": "05b", "title": "B"}]
    rows = [*events(), {"customer": 999, "sku": "07", "when": START}]  # too few events: the customer is left out
    found = from_events(rows, [*new, *items()], **NAMES, **SETTINGS)
    plain = from_events(events(), items(), **NAMES, **SETTINGS)
    assert found["shop"].unsold == (NewItem("05b", "B", "title: b"), NewItem("07", "New one", "title: new one"))
    assert found["shop"].content_hash() == plain["shop"].content_hash()
    assert "shop: 2 products without an event can be recommended as new items" in str(found.report)
    found.save(tmp_path / "data")
    assert load_domains(tmp_path / "data")["shop"].unsold == found["shop"].unsold
    (tmp_path / "data" / "shop" / "unsold.parquet").unlink()
    with pytest.raises(ValueError, match=r"unsold\.parquet is missing"):
        load_domains(tmp_path / "data")
    assert plain["shop"].unsold == ()


def test_items_without_any_text_are_known_by_their_keys_and_said_first(tmp_path):
    bare = [{"sku": one["sku"], "title": ""} for one in items()]
    found = from_events(events(), bare, **NAMES, **SETTINGS)
    assert found["shop"].item_texts == found["shop"].titles == found["shop"].item_keys
    assert not found["shop"].items.has_texts
    more = from_events(events(), [*bare, {"sku": "07", "title": ""}], **NAMES, **SETTINGS)["shop"]
    assert more.unsold == ()
    assert more.card["dropped"]["texts of items without events"] == {"records": 1}
    assert "no item has a text" in "".join(str(found.report).splitlines()[:2])
    found.save(tmp_path / "data")
    assert load_domains(tmp_path / "data")["shop"].content_hash() == found["shop"].content_hash()


def test_an_item_without_a_text_is_kept_under_its_key_where_that_is_wanted():
    some = [{**one, "title": one["title"] * (one["sku"] != "02")} for one in items()]
    found = from_events(events(), some, **NAMES, **SETTINGS, missing_text="keep")["shop"]
    assert found.item_texts[1:4] == ["title: thing 1", "02", "title: thing 3"]
    assert found.items.has_texts
