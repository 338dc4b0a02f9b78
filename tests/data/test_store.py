"""Prepared folders: round trip, loading with ``datasets``, checksums, nothing half-written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pyarrow.parquet as parquet
import pytest

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.store import load_domains, save_domain, save_domains


def small_domain(name="games", clients=("a", "b"), public=("c",), times=True):
    def events(users):
        users = list(users)
        sequences = [[2, 0, 1], [1, 1, 2, 0], [0, 2, 1]][: len(users)]
        stamps = [[5, -1, 9], [1, 2, 3, 4], [7, 7, 8]][: len(users)]
        return Events(users, sequences, stamps if times and users else None)

    titles = ["Schön", "B | b", "C"]
    texts = ["title: schön", "title: b | b", "title: c"]
    return Domain(
        name, Catalogue(name, ["k0", "k1", "k2"], titles, texts), events(clients), events(public), {"name": name}
    )


@pytest.mark.parametrize("times", [True, False])
@pytest.mark.parametrize("public", [("c",), ()])
def test_round_trip(tmp_path, times, public):
    domain = small_domain(public=public, times=times)
    save_domain(domain, tmp_path)
    back = load_domains(tmp_path, ["games"])["games"]
    assert back.content_hash() == domain.content_hash()
    assert (back.item_keys, back.titles, back.item_texts) == (domain.item_keys, domain.titles, domain.item_texts)
    assert (back.clients, back.public) == (domain.clients, domain.public)
    assert back.card["name"] == "games"
    assert back.card["content_hash"] == domain.content_hash()
    # Saving what was loaded changes nothing, byte for byte.
    before = {path.name: path.read_bytes() for path in (tmp_path / "games").iterdir()}
    save_domain(back, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "games").iterdir()} == before


def test_content_hash_sees_everything_but_the_card():
    domain = small_domain()
    changed = [
        replace(domain, name="other"),
        replace(domain, catalogue=replace(domain.catalogue, keys=["k0", "k1", "k3"])),
        replace(domain, catalogue=replace(domain.catalogue, titles=["Schön", "B", "C"])),
        replace(domain, catalogue=replace(domain.catalogue, texts=["title: x", *domain.item_texts[1:]])),
        replace(domain, clients=domain.clients._replace(users=["a", "x"])),
        replace(domain, clients=domain.clients._replace(sequences=[[2, 0, 0], [1, 1, 2, 0]])),
        replace(domain, clients=domain.clients._replace(timestamps=[[5, -1, 9], [1, 2, 3, 5]])),
        replace(domain, public=Events([], [], None)),
    ]
    hashes = {one.content_hash() for one in (domain, *changed)}
    assert len(hashes) == 1 + len(changed)
    assert replace(domain, card={"x": 1}).content_hash() == domain.content_hash()


def test_loads_with_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    save_domain(small_domain(), tmp_path / "data")
    folder = str(tmp_path / "data" / "games")
    cache = str(tmp_path / "cache")
    clients = datasets.load_dataset(folder, "clients", split="train", cache_dir=cache)
    assert clients["user"][:] == ["a", "b"]
    assert clients["items"][1] == [1, 1, 2, 0]
    assert clients["timestamps"][0] == [5, -1, 9]
    items = datasets.load_dataset(folder, "items", split="train", cache_dir=cache)
    assert items[1] == {"domain": "games", "item": 1, "key": "k1", "title": "B | b", "text": "title: b | b"}
    assert datasets.get_dataset_config_names(folder) == ["items", "clients", "public"]


def test_missing_and_damaged(tmp_path):
    with pytest.raises(
        ValueError, match=r"no prepared data for \['comics'\].*found \[\].* import EVENTS .*prepare_data\.py"
    ):
        load_domains(tmp_path, ["comics"])
    save_domain(small_domain(), tmp_path)
    with pytest.raises(ValueError, match=r"no prepared data for \['comics'\].*found \['games'\]"):
        load_domains(tmp_path, ["games", "comics"])
    path = tmp_path / "games" / "clients.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"clients\.parquet is missing or does not match its checksum"):
        load_domains(tmp_path)
    (tmp_path / "games" / "card.json").write_text("{")
    with pytest.raises(ValueError, match=r"card\.json cannot be read"):
        load_domains(tmp_path)


def test_a_client_may_not_be_public_elsewhere(tmp_path):
    save_domain(small_domain("games", clients=("a", "b"), public=("c",)), tmp_path)
    save_domain(small_domain("films", clients=("d", "e"), public=("a",)), tmp_path)
    with pytest.raises(ValueError, match="'a' are clients of 'games' and public in 'films'"):
        load_domains(tmp_path)
    assert list(load_domains(tmp_path, ["films"])) == ["films"]


def test_nothing_half_written(tmp_path, monkeypatch):
    old = small_domain()
    save_domain(old, tmp_path)
    written = []

    def fail_late(table, path, **settings):
        written.append(path)
        if len(written) == 5:  # in the middle of the second domain
            raise OSError("disk full")
        return original(table, path, **settings)

    original = parquet.write_table
    monkeypatch.setattr(parquet, "write_table", fail_late)
    new = replace(old, catalogue=replace(old.catalogue, titles=["X", "Y", "Z"]))
    with pytest.raises(OSError, match="disk full"):
        save_domains({"games": new, "films": replace(new, name="films")}, tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "games"]
    assert load_domains(tmp_path)["games"].titles == old.titles


def test_replaces_only_prepared_domains(tmp_path):
    save_domain(small_domain(), tmp_path)
    save_domain(small_domain(times=False), tmp_path)
    assert load_domains(tmp_path)["games"].clients.timestamps is None
    precious = tmp_path / "films"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no prepared domain"):
        save_domain(small_domain("films"), tmp_path)
    assert (precious / "thesis.txt").read_text() == "mine"


def test_a_card_that_is_utf_16_or_a_folder(tmp_path):
    save_domain(small_domain(), tmp_path)
    path = tmp_path / "games" / "card.json"
    path.write_text(path.read_text(), encoding="utf-16")
    with pytest.raises(ValueError, match=r"card\.json cannot be read"):
        load_domains(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"card\.json cannot be read"):
        load_domains(tmp_path)


def test_every_table_needs_a_checksum_and_its_columns(tmp_path):
    folder = save_domain(small_domain(), tmp_path)
    path, card = folder / "public.parquet", json.loads((folder / "card.json").read_text())

    def written(content, checksum):
        path.write_bytes(content)
        card["tables_sha256"]["public.parquet"] = checksum
        (folder / "card.json").write_text(json.dumps(card))

    good = path.read_bytes()
    written(good, None)
    with pytest.raises(ValueError, match=r"public\.parquet is missing or does not match its checksum"):
        load_domains(tmp_path)
    written(good[:-9], hashlib.sha256(good[:-9]).hexdigest())
    with pytest.raises(ValueError, match=r"public\.parquet is no readable Parquet file"):
        load_domains(tmp_path)
    other = (folder / "items.parquet").read_bytes()
    written(other, hashlib.sha256(other).hexdigest())
    with pytest.raises(ValueError, match=r"public\.parquet has columns .* but not \['user', 'items', 'timestamps'\]"):
        load_domains(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"public\.parquet is missing"):
        load_domains(tmp_path)
