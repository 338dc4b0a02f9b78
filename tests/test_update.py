"""Next month: counts are those of all events exactly, the old run stays, and what ranks worse is not written."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from slow import fast_where

import fedecider as fd
from fedecider.cli.main import main
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.data.near_texts import unit_vectors
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.lifecycle import update as updating
from fedecider.lifecycle.update import in_words, merged, new_events, refitted, update
from fedecider.lifecycle.warm_start import Scores, ranked_by, train_on
from fedecider.models.counts import count_events, no_counts
from fedecider.models.ensemble import MODEL_ALONE, Ensemble, Weights, choices_of, fit_weights
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.features import BOUGHT, SUCCESSORS, Knowledge
from fedecider.models.lists import Histories
from fedecider.models.recommender import Recommender
from fedecider.models.source import find_source
from fedecider.models.versions import read_versions
from fedecider.running.manifest import verify

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def run(two_clients_run, tmp_path_factory):
    return shutil.copytree(two_clients_run / "runs" / "whole", tmp_path_factory.mktemp("update") / "run")


@pytest.fixture(scope="module")
def domain():
    return sample_domains(["crime"], 0)["crime"]


def month(domain, users, first, start):
    """Three new events of each of some customers."""
    last = max(max(times) for times in domain.clients.timestamps)
    return [
        {"customer": user, "sku": domain.item_keys[(first + 5 * place + step) % 90], "time": last + start + step}
        for place, user in enumerate(users)
        for step in range(3)
    ]


def table(rows, path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pandas(pd.DataFrame(rows)), path)
    return path


def counts(run, domain):
    return load_ensemble(run / "private" / "crime", domain.item_keys).knowledge.counts


def same(first, second):
    parts = ((first.pair_II, second.pair_II), (first.next_II, second.next_II))
    return np.array_equal(first.event_I, second.event_I) and not any((one != other).nnz for one, other in parts)


def test_counts_are_those_of_all_events(run, domain, tmp_path):
    users = [*domain.clients.users[:40], "new-1", "new-2"]
    months = [month(domain, users, first, start) for first, start in ((0, 10), (40, 1000))]
    first = update(run, "crime", table(months[0], tmp_path / "1.parquet"), tmp_path / "first", force=True)
    assert (first.num_new_customers, first.events.num_rows, first.events.num_known) == (2, 126, 0)
    update(tmp_path / "first", "crime", table(months[1], tmp_path / "2.parquet"), tmp_path / "second", force=True)
    both = update(run, "crime", table([*months[0], *months[1]], tmp_path / "3.parquet"), tmp_path / "both", force=True)
    assert both.folder == tmp_path / "both"
    assert same(counts(tmp_path / "second", domain), counts(tmp_path / "both", domain))
    number_of = {key: number for number, key in enumerate(domain.item_keys)}
    whole = {user: list(items) for user, items in zip(domain.clients.users, domain.clients.sequences, strict=True)}
    for row in [*months[0], *months[1]]:
        whole.setdefault(row["customer"], []).append(number_of[row["sku"]])
    old = [items[:-2] for items in domain.clients.sequences]
    expected = count_events(list(whole.values()), len(number_of)).event_I - count_events(old, len(number_of)).event_I
    assert np.array_equal(counts(tmp_path / "both", domain).event_I - counts(run, domain).event_I, expected)
    again = tmp_path / "again"
    with pytest.raises(ValueError, match="126 events"):
        update(tmp_path / "both", "crime", tmp_path / "2.parquet", again)
    assert not again.exists()


def test_lists_know_the_new_events(run, domain, tmp_path):
    rows = month(domain, [domain.clients.users[3], "new-1"], 7, 10)
    update(run, "crime", table(rows, tmp_path / "new.parquet"), tmp_path / "next", force=True)
    out = tmp_path / "lists.parquet"
    assert (
        main(["recommend", "--run", str(tmp_path / "next"), "--company", "crime", "--all", "--output", str(out)]) == 0
    )
    found = {row["customer"]: row["items"] for row in pyarrow.parquet.read_table(out).to_pylist()}
    assert len(found) == len(domain.clients.users) + 1
    answer = Recommender.from_pretrained(tmp_path / "next", "crime").recommend([row["sku"] for row in rows[3:]])
    assert found["new-1"] == [item.key for item in answer]
    assert not {row["sku"] for row in rows[:3]} & set(found[domain.clients.users[3]])


def test_what_ranks_worse_is_not_written(run, domain, tmp_path, monkeypatch, capsys):
    rows = [*month(domain, domain.clients.users[:30], 0, 10), {"customer": "x", "sku": "gone", "time": 1_700_000_000}]
    events = table(rows, tmp_path / "new.parquet")
    before = {path: path.read_bytes() for path in (run / "private").rglob("*") if path.is_file()}
    words = ["update", "--run", run, "--company", "crime", "--events", events, "--output", tmp_path / "next"]
    monkeypatch.setattr(updating, "LARGEST_LOSS", -1e9)
    assert main(list(map(str, words))) == 2
    said = capsys.readouterr()
    assert "got an updated ensemble that ranks worse" in said.err
    assert "1 events of 1 items that the catalogue does not have, such as gone" in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["new.parquet"]
    assert main([*map(str, words), "--force", "true"]) == 0
    assert "crime: 90 new events of 30 customers, 0 of them new" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in (run / "private").rglob("*") if path.is_file()}
    assert main(list(map(str, words))) == 2
    assert "which is there already" in capsys.readouterr().err


def test_a_test_is_by_events_that_no_count_holds(run, domain, tmp_path):
    """Thirty customers buy one thing after another, and then thirty others do: now counts know it."""
    last = max(max(times) for times in domain.clients.timestamps)
    pair = [
        key
        for key in domain.item_keys
        if key not in {domain.item_keys[i] for s in domain.clients.sequences[:60] for i in s}
    ][:2]
    rows = [
        {"customer": user, "sku": key, "time": last + 10 + step}
        for user in domain.clients.users[:60]
        for step, key in enumerate(pair)
    ]
    once = update(run, "crime", table(rows[:60], tmp_path / "a.parquet"), tmp_path / "a", force=True)
    assert once.test.num_customers == 30
    twice = update(tmp_path / "a", "crime", table(rows[60:], tmp_path / "b.parquet"), tmp_path / "b")
    assert once.test.is_worse  # what went before the last item is counted with other things, the last item not at all
    assert not twice.test.is_worse
    assert twice.test.new > once.test.new


def test_what_no_times_cannot_tell(run, domain, tmp_path):
    user = domain.clients.users[0]
    untimed = table([{"customer": user, "sku": domain.item_keys[7]}], tmp_path / "untimed.parquet")
    first = update(run, "crime", untimed, tmp_path / "first", force=True)
    kept = pyarrow.parquet.read_table(first.folder / "private" / "crime" / "histories.parquet").to_pylist()
    (row,) = [row for row in kept if row["customer"] == user]
    assert row["last_time"] == max(domain.clients.timestamps[0]), "what was known of times stays"
    with pytest.raises(ValueError, match="1 customers"):
        update(str(first.folder), "crime", untimed, tmp_path / "second", force=True)
    returned = [{"customer": user, "sku": domain.item_keys[9], "quantity": -1}]
    returned += [{"customer": user, "sku": domain.item_keys[11], "quantity": 2}]
    after = update(run, "crime", table(returned, tmp_path / "returns.parquet"), tmp_path / "third", force=True)
    assert after.events.items == {user: [11]}, "a return is no purchase"


def test_an_updated_run_is_not_evaluated_on_what_it_has_counted(run, domain, tmp_path, capsys):
    untimed = table([{"customer": domain.clients.users[0], "sku": domain.item_keys[7]}], tmp_path / "one.parquet")
    update(run, "crime", untimed, tmp_path / "updated", force=True)
    assert main(["evaluate", "--run", str(tmp_path / "updated"), "--split", "valid"]) == 2
    assert "were updated and hold its held-out events" in capsys.readouterr().err


def own(run, tmp_path):
    """A copy of the run, to be changed."""
    return shutil.copytree(run, tmp_path / "own")


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {"versions", ".lock"} & set(path.relative_to(folder).parts)
    }


def test_a_run_has_versions_and_a_way_back(run, domain, tmp_path, capsys):
    mine = own(run, tmp_path)
    as_trained, histories = content(mine), [domain.item_keys[:3]]
    events = table(month(domain, [*domain.clients.users[:30], "new-1"], 0, 10), tmp_path / "1.parquet")
    answers = {1: Recommender.from_pretrained(mine, "crime").recommend(histories)}
    words = ["update", "--run", str(mine)]
    assert main([*words, "--company", "crime", "--events", str(events), "--force", "true"]) == 0
    assert f"the way back: fedecider update --run {mine} --version 1" in capsys.readouterr().out
    answers[2] = Recommender.from_pretrained(mine, "crime").recommend(histories)
    assert answers[2] != answers[1]
    changed = content(mine).items() ^ as_trained.items()
    assert {str(path) for path, _ in changed} == {"manifest.json"}, "the run as it was trained stays"
    again = table(month(domain, domain.clients.users[:30], 40, 1000), tmp_path / "2.parquet")
    assert update(mine, "crime", again, force=True).version == 3
    assert main([*words, "--version", "2"]) == 0
    said = capsys.readouterr().out
    assert "version 2: 93 new events of crime in its counts (made from 1), in force" in said
    assert "version 3: 90 new events of crime in its counts (made from 2)\n" in said
    assert Recommender.from_pretrained(mine, "crime").recommend(histories) == answers[2]
    assert Recommender.from_pretrained(mine / "versions" / "3", "crime").recommend(histories) != answers[2]
    assert main([*words, "--version", "1"]) == 0
    assert Recommender.from_pretrained(mine, "crime").recommend(histories) == answers[1]
    assert Recommender.from_pretrained(mine / "adapters" / "crime").recommend(histories) == answers[1]
    assert update(mine, "crime", again, force=True).version == 4, "a number is given once"
    assert {number: one.made_from for number, one in read_versions(mine).known.items()} == {2: 1, 3: 2, 4: 1}
    capsys.readouterr()
    assert main([*words, "--version", "9"]) == 2
    assert "got the version 9" in capsys.readouterr().err
    assert main([*words, "--version", "2", "--events", str(events)]) == 2
    assert main([*words, "--epochs", "2"]) == 2
    assert main(words) == 0
    assert capsys.readouterr().out.count("in force") == 1


def pairs(domain, first, num_users, name):
    """Customers who buy three things in a row, always the same ones."""
    last = max(max(times) for times in domain.clients.timestamps)
    return [
        {"customer": f"{name}{user}", "sku": domain.item_keys[first + 7 * step], "time": last + 10 + step}
        for user in range(num_users)
        for step in range(3)
    ]


def test_training_on_learns_what_customers_do_now(run, domain, tmp_path):
    """By the model alone, and by the files that are written."""
    source = find_source(run)
    place, items = source.place("crime"), [[20, 27, 34]] * 40
    settings, cpu = recorded_settings(run), torch.device("cpu")
    train_on(place, SequenceArray.of(items), settings, 20, cpu, tmp_path / "new")
    ensemble = load_ensemble(place.ensemble, domain.item_keys)
    asked = ensemble._replace(beside_model=MODEL_ALONE), SequenceArray.of([[20, 27, 34]]), cpu
    before = ranked_by(source, place, *asked)
    after = ranked_by(source, place._replace(adapter=tmp_path / "new"), *asked)
    assert before.ndcg < 0.5
    assert after.ndcg == 1.0
    old, new = (load_file(one / "adapter_model.safetensors") for one in (place.adapter, tmp_path / "new"))
    assert {name: tensor.shape for name, tensor in old.items()} == {name: tensor.shape for name, tensor in new.items()}
    card = (tmp_path / "new" / "README.md").read_text()
    assert card.endswith("The adapter was trained on by 40 customers after that; the figures are those from before.\n")


def test_the_better_adapter_is_taken(run, domain, tmp_path, monkeypatch):
    mine = own(run, tmp_path)
    scores = [Scores(0.2, 0.1), Scores(0.2, 0.11), Scores(0.3, 0.2), Scores(0.4, 0.2)]
    monkeypatch.setattr(updating, "ranked_by", lambda *_: scores.pop(0))
    events = table(pairs(domain, 20, 30, "a"), tmp_path / "1.parquet")
    done = update(mine, "crime", events, epochs=1, force=True)
    assert done.trained.is_better
    assert (done.trained.num_customers, done.version) == (30, 2)
    first, second = mine / "versions" / "2", mine / "versions" / "3"
    old, new = (load_file(one / "adapters" / "crime" / "adapter_model.safetensors") for one in (mine, first))
    assert any(not torch.equal(old[name], new[name]) for name in old)
    assert content(first / "adapters" / "comics") == content(mine / "adapters" / "comics")
    verify(first, [first / "adapters" / "crime", first / "adapters" / "comics", first / "backbone"])
    Recommender.from_pretrained(mine, "crime")
    fd.load(mine).export(tmp_path / "new")
    assert content(tmp_path / "new" / "adapters") == content(first / "adapters"), "what is in force is handed over"
    kept = update(mine, "crime", table(pairs(domain, 21, 30, "b"), tmp_path / "2.parquet"), epochs=1, force=True)
    assert not kept.trained.is_better, "as good is not better"
    assert content(second / "adapters") == content(first / "adapters"), "the last good one stays"
    assert in_words(kept, "crime")[-2].endswith("(hit@10 0.3000, 0.4000): the old one stays")


@pytest.mark.parametrize("company", ["north", "books.north", "shop.de"])
def test_customers_of_a_company_are_known_by_their_own_keys(tmp_path, company):
    """With several catalogues a company is called ``books.north``, and its customers ``north:17`` all the same."""
    owner = company.removeprefix("books.")
    before = Histories([f"{owner}:1", f"{owner}:17"], ["a", "b"], SequenceArray.of([[0], [1]]), {}, True)
    rows = [{"user": user, "item": "a"} for user in ("17", "18")]
    found = new_events(str(table(rows, tmp_path / "new.parquet")), before, company)
    assert found.items == {f"{owner}:17": [0], f"{owner}:18": [0]}
    assert list(before.of(["17", f"{owner}:1", "18"], company)) == [("17", ["b"]), ("1", ["a"]), ("18", [])]
    both = [{"user": user, "item": "a"} for user in ("17", f"{owner}:17")]
    with pytest.raises(ValueError, match=f"{owner}:17"):
        new_events(str(table(both, tmp_path / "both.parquet")), before, company)
    theirs = [{**rows[0], "Company": owner}, {**rows[0], "Company": "south"}]
    assert new_events(str(table(theirs[:1], tmp_path / "own.parquet")), before, company).items == {f"{owner}:17": [0]}
    with pytest.raises(ValueError, match="south"):
        new_events(str(table(theirs, tmp_path / "theirs.parquet")), before, company)
    plain = before._replace(customers=["1:x", "17"])
    assert new_events(str(tmp_path / "new.parquet"), plain, company).items == {"17": [0], "18": [0]}


def test_events_of_one_time_are_one_basket_where_a_run_knows_baskets(tmp_path):
    rows = SequenceArray.of([[0, 1, 2], [3]]).with_baskets(np.array([0, 0, 1, 0]))
    before = Histories(["1", "2"], ["a", "b", "c", "d"], rows, {"1": 50}, True)
    keys = ("user", "item", "time")
    events = [("1", "b", 60), ("1", "c", 60), ("1", "d", 70), ("1", "d", 70), ("3", "a", 60), ("3", "b", 60)]
    path = table([dict(zip(keys, one, strict=True)) for one in events], tmp_path / "new.parquet")
    new = new_events(path, before, "shop", baskets=True)
    assert new.items == {"1": [1, 2, 3], "3": [0, 1]}
    after, kept = merged(before, new), merged(before, new, without_last=True)
    assert (after.customers, kept.customers) == (["1", "2", "3"], ["1", "2"])
    assert list(after.sequences) == [[0, 1, 2, 1, 2, 3], [3], [0, 1]]
    assert after.sequences.num_after_E.tolist() == [3, 3, 2, 1, 1, 0, 0, 0, 0]
    assert kept.sequences.num_after_E.tolist() == [2, 2, 1, 0, 0, 0]
    apart = new_events(path, before, "shop")
    assert apart.items["1"] == [1, 2, 3, 3]
    assert merged(before, apart, without_last=True).sequences.num_baskets_U.tolist() == [5, 1, 1]


def test_weights_are_fitted_on_the_newest_basket_behind_counts_without_it():
    """By hand; and what follows an item again and again gets weight, as does buying twice."""
    rows = SequenceArray.of([[0, 1, 2], [2, 0, 1], [3, 4, 0, 1], [5, 0, 1, 5]] * 10)
    others = count_events([[3, 5, 5]], 6)
    knowledge = Knowledge(no_counts(6), unit_vectors(np.random.default_rng(0).normal(size=(6, 3))))
    alone = Weights({SUCCESSORS: 0.1, BOUGHT: -20.0}, {}, (), 7)
    ensemble = Ensemble(knowledge, alone, Weights({"model": 1.0}, {}), ("own",))
    place = SimpleNamespace(domain="shop")
    now = SimpleNamespace(ensemble=ensemble, others=others, keys=list("abcdef"), place=place)
    found = refitted(now, rows, None)
    assert same(found.knowledge.counts, others.plus(count_events(rows, 6)))
    assert found.beside_model == ensemble.beside_model
    past, newest = [items[:-1] for items in rows], [items[-1:] for items in rows]
    held = knowledge._replace(counts=others.plus(count_events(past, 6)))
    asked = (held, SequenceArray.of(past), SequenceArray.of(newest), None, stream(0, "x"))
    expected = fit_weights(choices_of(*asked), False, alone.value)
    assert found.alone.value == pytest.approx(expected.value, abs=1e-6)
    assert found.alone.num_customers == 40
    assert found.alone.value[SUCCESSORS] > 0.3
    assert found.alone.value[BOUGHT] > -20.0


def test_a_table_in_a_form_of_its_own_is_read_as_it_was_imported(tmp_path):
    before = Histories(["17"], ["a", "b"], SequenceArray.of([[0]]), {}, True)
    path = tmp_path / "neu.csv"
    rows = ["K\u00e4ufer|Artikelnr|Rechnung|Menge", "17|b|2.1.2026|1", "17|a|1.1.2026|1", "18|b|3.1.2026|-1"]
    path.write_text("\n".join(rows), encoding="latin-1")
    how = {"user": "K\u00e4ufer", "time": "Rechnung", "time_format": "%d.%m.%Y", "encoding": "latin-1"}
    assert new_events(path, before, "shop", how).items == {"17": [0, 1]}
    with pytest.raises(ValueError, match="titel"):
        new_events(path, before, "shop", {"titel": "x"})
    words = ["--run", str(tmp_path), "--columns", "user=K"]
    assert main(["update", *words]) == 2
    assert main(["recommend", *words, "--customers", "17"]) == 2


def test_data_of_another_count_are_refused(run, domain, tmp_path, capsys):
    """The same catalogue, and other customers."""
    events = table(month(domain, domain.clients.users[:5], 0, 10), tmp_path / "1.parquet")
    clients = domain.clients.take(range(len(domain.clients.users) - 1))
    other = {**sample_domains(["crime", "comics"], 0), "crime": replace(domain, clients=clients)}
    save_domains(other, tmp_path / "less")
    mine = own(run, tmp_path)
    words = ["update", "--run", str(mine), "--company", "crime", "--events", str(events)]
    assert main([*words, "--data", str(tmp_path / "less")]) == 2
    assert "got other data of crime than those that" in capsys.readouterr().err
    save_domains(sample_domains(["crime", "comics"], 0), tmp_path / "same")
    assert main([*words, "--data", str(tmp_path / "same"), "--force", "true"]) == 0
    assert main([*words, "--data", str(tmp_path / "same")]) == 2
    assert "leave --data out" in capsys.readouterr().err


DAMAGED = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "garbled": lambda content: bytes(one ^ 85 if place % 97 == 0 else one for place, one in enumerate(content)),
}
FILES = [
    "run.json",
    "manifest.json",
    "private/crime/ensemble.json",
    "private/crime/ensemble.safetensors",
    "adapters/crime/adapter_model.safetensors",
    "adapters/crime/adapter_config.json",
    "adapters/crime/item_ids.json",
    "backbone/config.json",
    "backbone/model.safetensors",
]


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("name", fast_where(["run.json", "private/crime/ensemble.safetensors"], FILES))
def test_a_damaged_file_stops_every_command_and_nothing_is_written(run, domain, tmp_path, capsys, name, kind):
    mine = own(run, tmp_path)
    events = table(month(domain, domain.clients.users[:5], 0, 10), tmp_path / "1.parquet")
    damaged = DAMAGED[kind]((mine / name).read_bytes())
    (mine / name).unlink()
    if damaged is not None:
        (mine / name).write_bytes(damaged)
    before = content(mine)
    lists = tmp_path / "lists.parquet"
    for command, words in {
        "update": ["--events", events, "--force", "true"],
        "forget": ["--customer", domain.clients.users[0]],
        "recommend": ["--all", "--output", lists],
    }.items():
        assert main([command, "--run", str(mine), "--company", "crime", *map(str, words)]) == 2, command
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert content(mine) == before
        assert not (mine / "versions").exists()
        assert not lists.exists()
