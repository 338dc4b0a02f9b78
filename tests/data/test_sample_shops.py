"""Planted tables of shops: read as own tables are, the same every time, and known as planted."""

from pathlib import Path

import pytest

from fedecider.cli.main import main
from fedecider.data.frames import from_events
from fedecider.data.sample import NUM_CUSTOMERS, PLANTED, SHOPS, SOURCE, write_shops


def test_shops_are_read_as_own_tables_and_known_as_planted(tmp_path, capsys):
    assert main(["sample", "--output", str(tmp_path / "shops")]) == 0
    said = capsys.readouterr().out
    assert "--events" in said
    assert f"--items {tmp_path / 'shops' / 'products.csv'}" in said
    tables = {shop: str(tmp_path / "shops" / f"{shop}.csv") for shop in SHOPS}
    products = tmp_path / "shops" / "products.csv"
    found = from_events(tables, str(products))
    assert set(found) == set(SHOPS)
    for domain in found.values():
        assert len(domain.clients.users) == NUM_CUSTOMERS
        assert domain.catalogue is found["north"].catalogue
        assert domain.card["settings"]["source"] == SOURCE
    for path in map(Path, [*tables.values(), products]):  # one real item makes real data
        path.write_text(path.read_text().replace(f"{PLANTED}0000", "0000"))
    assert {domain.card["settings"]["source"] for domain in from_events(tables, str(products)).values()} == {"tables"}


def test_nothing_is_written_over(tmp_path):
    first = [path.read_bytes() for path in write_shops(tmp_path / "a")]
    assert [path.read_bytes() for path in write_shops(tmp_path / "b")] == first
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "south.csv").write_text("mine")
    with pytest.raises(ValueError, match=r"south\.csv"):
        write_shops(tmp_path / "c")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["south.csv"]
