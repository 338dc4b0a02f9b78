"""The measurements of joining on an invented domain, at sizes that say nothing (benchmarks/joining.py)."""

import sys
from itertools import chain

import joining
import numpy as np
import pytest

import fedecider
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.store import save_domain
from fedecider.running.run_folder import Stage

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
    result = fedecider.federate(clients, "fedavg", **asked, **joining.SETTINGS)
    first, second = (Stage(next(cache.glob(f"{name}-*")), True) for name in ("pretrain", "distill"))
    cell = joining.companies_cells(0)[0]
    settings = joining.settings_of(clients, cell, cache, tmp_path / "run")
    ids = joining.load_ids(first.folder, clients, settings.run.pretrain)["beauty.1"]
    shared = joining.Shared(shop(), first, second, ids, {})
    found = joining.measured(cell, shared, load, tmp_path / "work")
    frame = result.per_user[result.per_user["split"] == "test"]
    of_run = {joining.JOINED: result.raw["reported"], joining.JOINED + joining.HYBRID: "fedavg + hybrid"}
    of_run |= {joining.ALONE: "local", joining.ALONE + joining.HYBRID: "local + hybrid"}
    for row, variant in of_run.items():
        for name in clients:
            expected = frame[(frame["variant"] == variant) & (frame["domain"] == name)]["position"]
            assert found["places"][row][name] == expected.fillna(10).clip(upper=10).astype(int).tolist(), row
    assert found["places"][joining.JOINED] != found["places"][joining.ALONE]
    assert found["keeps"] == {name: one["keeps"] for name, one in result.raw["joining"]["clients"].items()}


@pytest.mark.parametrize("kind", joining.WRONG)
def test_the_last_of_four_companies_is_wrong_and_the_others_are_as_they_were(monkeypatch, kind):
    monkeypatch.setattr(joining, "CUSTOMERS", 20)
    domain = shop()
    right, wrong = joining.four(domain, 3, load), joining.with_wrong(domain, 3, load, kind)
    *honest, last = right
    assert [name for name in right if joining.is_honest(name)] == honest
    for name in honest:
        assert wrong[name].content_hash() == right[name].content_hash()
    assert joining.with_wrong(domain, 3, load, "").keys() == set(honest)
    before, after = (list(map(list, of[last].clients.sequences)) for of in (right, wrong))
    assert wrong[last].clients.users == right[last].clients.users
    assert before != after
    halves = [{item >= 30 for item in items} for items in after]
    best = int(joining.popularity(domain).argmax())
    if kind == "item numbers mixed up":
        number_of = dict(zip(chain(*before), chain(*after), strict=True))
        assert len(set(number_of.values())) == len(number_of) > 50
        assert [[number_of[item] for item in items] for items in before] == after
    if kind == "one item":
        share = np.mean([item == best for items in after for item in items])
        assert 0.8 < share < 0.98
    if kind == "bots":
        assert all(len(half) == 2 for half in halves)
        assert list(map(len, after)) == list(map(len, before))
    if kind == "events of another domain":
        # what sells best there counts as what sells best here
        most = np.bincount(list(chain(*after)), minlength=60)
        assert most[np.argsort(-joining.popularity(domain), kind="stable")[:10]].mean() > most.mean()
    assert wrong[last].content_hash() == joining.with_wrong(domain, 3, load, kind)[last].content_hash()


def test_a_company_of_one_item_alone_is_refused(monkeypatch, tiny, tmp_path):
    monkeypatch.setattr(joining, "ONE_ITEM_SHARE", 1.0)
    domain, work = shop(), tmp_path / "work"
    cell = next(one for one in joining.wrong_cells(0) if one.row.startswith("one item"))
    companies = cell.companies(domain, 0, load)
    with pytest.raises(ValueError, match=r"beauty\.4: got 0 users"):
        joining.trained(cell, joining.Shared(domain, None, None, None, {}), companies, work)


def test_unequal_companies_and_newcomers_are_dealt_other_customers():
    sizes = {"large": 50, "small.1": 10, "new.00": 5}
    companies = joining.dealt(shop(), 0, load, sizes)
    assert {name: len(one.clients.users) for name, one in companies.items()} == sizes
    users = [user for one in companies.values() for user in one.clients.users]
    assert len(set(users)) == 65
    assert joining.newcomers_alone(shop(), 0, load, sizes).keys() == {"new.00"}
    assert joining.dealt(shop(), 1, load, sizes)["large"].clients.users != companies["large"].clients.users


@pytest.mark.parametrize("same", joining.COMMON.values())
def test_a_pair_of_companies_has_the_halves_of_the_same_customers_or_of_others(monkeypatch, same):
    monkeypatch.setattr(joining, "CUSTOMERS", 20)
    whole = shop()
    row_of = dict(zip(whole.clients.users, map(list, whole.clients.sequences), strict=True))
    found = joining.halves(whole, 0, load, same)
    assert [name for name in found if joining.is_first(name)] == ["first.1", "first.2"]
    for name, company in found.items():
        second = not joining.is_first(name)
        for user, row in zip(company.clients.users, company.clients.sequences, strict=True):
            assert list(row) == row_of[user][second::2]
    for pair in (1, 2):
        first, other = (set(found[f"{which}.{pair}"].clients.users) for which in ("first", "other"))
        assert first == other if same else not first & other
    apart = joining.halves(whole, 0, load, False)
    assert apart["first.2"].content_hash() == found["first.2"].content_hash()


def test_who_is_named_needs_no_training(tiny, monkeypatch):
    monkeypatch.setattr(joining, "FOREIGN", "beauty")
    monkeypatch.setattr(joining, "shared_of", None)
    text = tiny("--parts", "named", "--seeds", "1")
    for row in (
        "| without it | - | - | 0 of 3 | 0 of 3 | 1 |",
        "| item numbers mixed up | 1 of 1 | 0 of 1 | 0 of 3 | 0 of 3 | 1 |",
        "| bots | 1 of 1 | 0 of 1 | 0 of 3 | 0 of 3 | 1 |",
    ):
        assert row in text
    assert "| 1 of 1 | 0 of 3 | 0 of 3 | 1 |" in next(
        line for line in text.splitlines() if line.startswith("| one item")
    )


def test_noise_is_what_epsilon_asks_for():
    found = joining.hidden(8.0)
    epochs = joining.SETTINGS["num_rounds"] * joining.SETTINGS["local_epochs"]
    noise = joining.UserPrivacy(found["user_privacy.clip"], found["user_privacy.noise_scale"])
    assert joining.user_epsilon(noise, epochs, found["privacy.delta"]) == pytest.approx(8.0, rel=0.02)


def invented(cell, place):
    """A cell whose companies rank at ``place`` when joined, a place later alone, and one earlier with what they keep;
    one company, whose customers are many, is far better alone."""
    names = list(joining.LARGE) if cell.row in joining.WEIGHTS else [f"{cell.data}.{number}" for number in (1, 2, 3, 4)]
    names = list(joining.HUGE) if cell.row in (joining.HUGE_ALONE, joining.HUGE_JOINED) else names
    names = list(joining.NEWCOMERS) if cell.row in (joining.NEW_ALONE, joining.NEW_JOINED) else names
    if cell.part == "common":
        names = [f"{which}.{pair}" for pair in (1, 2) for which in (joining.FIRST_ONE, joining.OTHER)]
    users = {name: [f"{cell.seed}-{name}-{user}" for user in range(20)] for name in names}
    rows = {joining.POOLED: 3, joining.ALONE: place + 1, joining.JOINED: place}
    places = {
        f"{row}{after}": dict.fromkeys(names, [at] * 20) for row, at in rows.items() for after in ("", " + hybrid")
    }
    places[joining.ALONE] = {**places[joining.ALONE], names[0]: [0, 1] * 10}
    places[joining.KEPT] = {**places[joining.JOINED], names[0]: [0, 1] * 10}
    read = [name for name in names if cell.counts(name)]
    keeps = {name: "local" if name == names[0] else "joined" for name in names}
    size = dict(zip(names, (3.0, 3.0, 3.0, 1.0), strict=False))
    added = dict.fromkeys(names, size) if cell.method == "fedecider" else {}
    facts = {"num_items": 60, "events": 400, "minutes": 1.5, "machine": "any", "commit": "abc"}
    if cell.row == joining.POOLED:
        places = {row: of for row, of in places.items() if row.startswith(joining.POOLED)}
    said = {"before": ["No two share an item."], "asked": cell.method, "on_page": True, "weights": False}
    found = {
        "users": users,
        "places": places,
        "honest": read,
        "keeps": keeps,
        "added": added,
    }
    found |= {"method": "fedavg", "verdict": ["what", "was"]} | facts
    if cell.part == "named":
        found |= {"events": {name: {} for name in names}, "by texts": names[3:], "by one item": names[:1], "places": {}}
    return found | (said | {"places": {}, "honest": []} if cell.part == "departments" else {})


def test_the_page_has_every_part_and_counts_who_is_below_alone():
    cells = joining.cells_of(list(joining.PARTS), 2)
    assert len({cell.key for cell in cells}) == len(cells)
    first = [cell for cell in cells if cell.seed == 0]
    assert cells[: len(first)] == first
    text = "\n".join(joining.page({cell.key: invented(cell, 4) for cell in cells}, list(joining.PARTS), 2))
    for heading in ("one catalogue", "overlap in part", "three small ones", "is wrong", "common item", "leaves of it"):
        assert heading in text
    # the first of four companies is below alone without memory, and keeps its own model
    (row,) = [line for line in text.splitlines() if line.startswith("| companies | without |")]
    assert row == "| companies | without | 24 | 6 | 0 |"
    (row,) = [line for line in text.splitlines() if line.startswith("| companies | with |")]
    assert row == "| companies | with | 24 | 0 | 0 |"
    (row,) = [line for line in text.splitlines() if line.startswith("| bots | learned weights (fedecider) | without |")]
    assert row.endswith("| 2, 0 of 6 | 10 % | 2 |")
    assert "| bots | 6 of 6 | 0 of 6 | 0 of 18 | 6 of 18 | 2 |" in text
    assert "| by examples | large of 10,000 or 300 | without |" in text
    assert "| items and customers | with | .3562 | .3869 | +0.00 | +.0306 [" in text
    pooled = next(cell for cell in cells if cell.row == joining.POOLED)
    shifted = {cell.key: invented(cell, 4) for cell in cells if cell.key != pooled.key}
    with pytest.raises(AssertionError, match="a seed is missing"):
        joining.page(shifted, ["companies"], 2)
    half = joining.page({cell.key: invented(cell, 4) for cell in cells[:2]}, list(joining.PARTS), 2)
    assert not any("is wrong" in line for line in half)
