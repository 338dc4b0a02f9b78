"""The measurements of joining on an invented domain, at sizes that say nothing (benchmarks/joining.py)."""

import sys

import joining
import numpy as np
import pytest
import torch

import fedecider
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.store import save_domain
from fedecider.evaluation.statistics import paired_difference
from fedecider.running.stages import Stage

TINY = {
    "num_rounds": 1,
    "local_epochs": 1,
    "lora_rank": 16,
    "pretrain.text_encoder": "tfidf",
    "pretrain.backbone.d_model": 16,
    "pretrain.train.max_steps": 3,
    "distill.epochs": 0,
}


def shop(name="beauty", num_users=100, num_events=20):
    """Sixty items in two halves; a customer buys of one half."""
    rng = np.random.default_rng(len(name))
    half = [rng.choice(30, num_events, replace=False) + 30 * (user % 2) for user in range(num_users)]
    users = [f"{name}-{user:03}" for user in range(num_users)]
    clients, public = (
        Events(users[part], [items.tolist() for items in half[part]], None) for part in (slice(90), slice(90, None))
    )
    keys = [f"{name}-{item:02}" for item in range(60)]
    texts = [f"title: {'red' if item < 30 else 'blue'} thing {item}" for item in range(60)]
    return joining.with_card(Domain(name, Catalogue(name, keys, texts, texts), clients, public, {}))


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The script on an invented shop under the name of one of its data sets."""
    monkeypatch.setattr(joining, "SETTINGS", {**joining.SETTINGS, **TINY})
    monkeypatch.setattr(joining, "CUSTOMERS", 20)
    monkeypatch.setattr(joining, "SHARES", (0.0,))
    monkeypatch.setattr(joining, "FOLDERS", dict.fromkeys(joining.FOLDERS, "data"))
    monkeypatch.setattr(joining, "DATASETS", ("beauty",))
    monkeypatch.setattr(joining, "PUBLIC_USERS", 10)
    save_domain(shop(), tmp_path / "data")

    def run(*words):
        asked = ["--data", str(tmp_path), "--work", str(tmp_path / "work"), "--output", str(tmp_path / "page.md")]
        monkeypatch.setattr(sys, "argv", ["joining.py", *asked, *words])
        joining.main()
        return (tmp_path / "page.md").read_text()

    return run


def test_companies_and_overlap_come_to_a_page(tiny, tmp_path):
    (tmp_path / "page.md").write_text(f"# old\n\n{joining.OLDER}\n\nkept .1234\n")
    text = tiny("--parts", "companies,overlap", "--seeds", "1")
    assert "exactly 0" in next(line for line in text.splitlines() if line.startswith("| 0 % |"))
    assert "| 100 % |" in text
    assert text.count(joining.OLDER) == 1
    assert text.endswith("kept .1234\n")
    assert "# old" not in text
    for row in ("joined - alone", "joined - pooled"):
        assert row in text
    again = tiny("--parts", "companies,overlap", "--seeds", "1", "--cells", "0")
    assert [line for line in again.splitlines() if line.startswith("|")] == [
        line for line in text.splitlines() if line.startswith("|")
    ]


def load(name):
    return shop(name)


def test_a_cell_is_what_federate_gives(tiny, tmp_path):
    clients, cache = joining.four(shop(), 0, load), tmp_path / "cache"
    asked = {"config": joining.CONFIG, "output": tmp_path / "run", "cache": str(cache), "progress": False}
    asked["protocol"] = "strict"
    result = fedecider.federate(clients, "fedavg", **asked, **joining.SETTINGS)
    first, second = (Stage(next(cache.glob(f"{name}-*")), True) for name in ("pretrain", "distill"))
    cell = joining.companies_cells(0)[0]
    settings = joining.settings_of(clients, cell, cache, tmp_path / "run")
    ids = joining.load_ids(first.folder, clients, settings.run.pretrain)["beauty.1"]
    shared = joining.Shared(shop(), first, second, ids, {})
    found = joining.measured(cell, shared, load, tmp_path / "work")
    frame = result.per_user[result.per_user["split"] == "test"]
    of_run = {joining.JOINED: result.raw["reported"], joining.JOINED + joining.ENSEMBLE: "fedavg + ensemble"}
    of_run |= {joining.ALONE: "local", joining.ALONE + joining.ENSEMBLE: "local + ensemble"}
    for row, variant in of_run.items():
        for name in clients:
            expected = frame[(frame["variant"] == variant) & (frame["domain"] == name)]["position"]
            assert found["places"][row][name] == expected.fillna(10).clip(upper=10).astype(int).tolist(), row
    assert found["places"][joining.JOINED] != found["places"][joining.ALONE]
    assert found["keeps"] == {name: one["keeps"] for name, one in result.raw["joining"]["clients"].items()}


def test_runs_of_the_same_customers_are_seeds():
    draw, two = torch.Generator().manual_seed(3), ("north", "south")
    places = [
        {
            f"{seed}/{name}": torch.randint(0, 20, (30,), generator=draw)
            for seed in range(3)
            for name in ("north", "south")
        }
        for _ in range(2)
    ]
    users = {key: [f"{key[2:]}{number}" for number in range(30)] for key in places[0]}
    hit = [
        {name: torch.stack([of[f"{seed}/{name}"] < 10 for seed in range(3)]).double() for name in two} for of in places
    ]
    assert joining.compared(*places, users)["hit@10"].difference == paired_difference(*hit).interval
    other = {**users, "1/north": users["1/north"][::-1]}
    apart = joining.over_seeds(places[0], other)
    assert apart.keys() == places[0].keys()
    assert all(torch.equal(place_1U[0], places[0][name]) for name, place_1U in apart.items())
    single = [{key: place for key, place in of.items() if key.endswith("north")} for of in places]
    (only,) = {one.domain for one in joining.compared(*single, users).values()}
    assert only == "0/north"
