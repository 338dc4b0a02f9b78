"""Customers leave: counts are those of all others counted anew, nothing private stays, what remembers is said."""

import shutil

import pandas as pd
import pyarrow.parquet
import pytest

from fedecider.api import load
from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.evaluation.protocols import train_part
from fedecider.lifecycle.forget import forget
from fedecider.lifecycle.update import update
from fedecider.models.counts import count_events, without
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.recommender import Recommender
from fedecider.models.versions import read_versions

pytestmark = pytest.mark.whole


@pytest.fixture
def run(two_clients_run, tmp_path):
    return shutil.copytree(two_clients_run / "runs" / "whole", tmp_path / "run")


@pytest.fixture(scope="module")
def domain():
    return sample_domains(["crime"], 0)["crime"]


def counts(folder, domain):
    return load_ensemble(folder / "private" / "crime", domain.item_keys).knowledge.counts


def same(first, second):
    parts = ((first.pair_II, second.pair_II), (first.next_II, second.next_II))
    return (first.event_I == second.event_I).all() and not any((one != other).nnz for one, other in parts)


def test_counts_are_those_of_the_others_counted_anew(run, domain, tmp_path, capsys):
    users, num_items = list(domain.clients.users), len(domain.item_keys)
    parts = [train_part(items) for items in domain.clients.sequences]
    nobody = without(counts(run, domain), count_events(parts, num_items))
    words = ["forget", "--run", str(run), "--company", "crime", "--customer"]
    (run / "sent.safetensors").write_bytes(b"the last upload of a site")
    assert main([*words, f"{users[3]},{users[5]}"]) == 0
    said = capsys.readouterr().out
    assert "crime: 2 customers and" in said
    assert "still remembers: the adapter of crime was trained with their events" in said
    assert "still remembers: the weights of the ensemble" in said
    assert f"still remembers: {run / 'sent.safetensors'} is what this site sent last" in " ".join(said.split())
    assert "the page and its examples, which hold purchases" in said
    assert "same catalogue" not in said, "here every company has its own"
    left = [place for place in range(len(users)) if place not in (3, 5)]
    folder = run / "versions" / "2"
    for name in ("report.html", "examples.json"):
        assert not list(run.rglob(name)), "nobody knows whose purchases they show"
    rows = pd.read_parquet(run / "per_user.parquet")
    assert {users[3], users[5]}.isdisjoint(rows.user)
    assert users[0] in set(rows.user)
    assert rows.equals(pd.read_parquet(folder / "per_user.parquet"))
    assert same(counts(folder, domain), nobody.plus(count_events([parts[place] for place in left], num_items)))
    kept = pyarrow.parquet.read_table(folder / "private" / "crime" / "histories.parquet").to_pylist()
    assert {row["customer"] for row in kept} == {users[place] for place in left}
    assert not (run / "private").exists()
    names = {user.encode() for user in (users[3], users[5])}
    everything = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in everything if any(name in path.read_bytes() for name in names)]
    assert main(["report", "--run", str(run)]) == 0
    assert not load(run).run.examples
    assert main(["update", "--run", str(run), "--version", "1"]) == 2
    assert "forgotten" in capsys.readouterr().err

    # next month: the held-out events of those who stay are counted, and whoever comes back is a new customer
    last = max(max(times) for times in domain.clients.timestamps)
    rows = [
        {"customer": user, "sku": key, "time": last + 5 + step}
        for user in (users[0], users[3])
        for step, key in enumerate(domain.item_keys[:3])
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "new.parquet")
    done = update(run, "crime", tmp_path / "new.parquet", force=True)
    assert done.num_new_customers == 1
    whole = [list(domain.clients.sequences[place]) + [0, 1, 2] * (place == 0) for place in left]
    whole.append([0, 1, 2])
    third = run / "versions" / "3"
    assert same(counts(third, domain), nobody.plus(count_events(whole, num_items)))
    forget(run, "crime", [users[0]])
    assert same(counts(run / "versions" / "4", domain), nobody.plus(count_events(whole[1:], num_items)))
    assert not third.exists()
    assert not folder.exists()
    Recommender.from_pretrained(run, "crime")


def test_who_is_in_another_version_alone_is_forgotten_too(run, domain, tmp_path):
    """An update was taken back, and with it a new customer."""
    last = max(max(times) for times in domain.clients.timestamps)
    pd.DataFrame([{"user": "new", "item": domain.item_keys[3], "time": last + 5}]).to_parquet(tmp_path / "1.parquet")
    update(run, "crime", tmp_path / "1.parquet", force=True)
    assert main(["update", "--run", str(run), "--version", "1"]) == 0
    before = counts(run, domain)
    assert forget(run, "crime", ["new"]).num_events == 0
    assert same(counts(run / "versions" / "3", domain), before)
    assert not (run / "versions" / "2").exists()


def test_a_version_that_is_not_in_force_is_not_forgotten_from(run, domain, tmp_path, capsys):
    """What later versions have counted would go with it."""
    last = max(max(times) for times in domain.clients.timestamps)
    for number in (1, 2):
        rows = [{"user": f"new-{number}", "item": domain.item_keys[number], "time": last + number}]
        pd.DataFrame(rows).to_parquet(tmp_path / "new.parquet")
        update(run, "crime", tmp_path / "new.parquet", force=True)
    words = ["forget", "--company", "crime", "--customer", domain.clients.users[3], "--run"]
    assert main([*words, str(run / "versions" / "2")]) == 2
    said = capsys.readouterr().err
    assert "versions/2, a version that is not in force, expected the run" in said
    assert f"go back first: fedecider update --run {run} --version 2" in said
    assert read_versions(run).numbers == [1, 2, 3]
    assert main([*words, str(run / "versions" / "3")]) == 0
    assert read_versions(run).numbers == [4]


def test_a_key_with_a_comma_stands_in_quotes(run, domain, tmp_path, capsys):
    last = max(max(times) for times in domain.clients.timestamps)
    rows = [{"user": key, "item": domain.item_keys[3], "time": last + 5} for key in ("Smith, J", "Smith", "17")]
    pd.DataFrame(rows).to_parquet(tmp_path / "new.parquet")
    update(run, "crime", tmp_path / "new.parquet", force=True)
    words = ["forget", "--run", str(run), "--company", "crime", "--customer"]
    assert main([*words, '"Smith, J", "17']) == 2
    assert (
        "expected keys separated by commas, on one line; one with a comma stands in quotes" in capsys.readouterr().err
    )
    assert main([*words, '"Smith, J", 17']) == 0
    left = pyarrow.parquet.read_table(run / "versions" / "3" / "private" / "crime" / "histories.parquet").to_pylist()
    assert {row["customer"] for row in left} == {*domain.clients.users, "Smith"}


@pytest.mark.parametrize(
    ("customers", "message"),
    [
        ("nobody", "got the customer 'nobody', expected one of the 240 private ones of crime"),
        (" , ", "got no customer, expected some"),
        ("ALL", "got all 240 customers of crime, expected some to stay"),
    ],
)
def test_what_cannot_be_forgotten(run, domain, capsys, customers, message):
    asked = ",".join(domain.clients.users) if customers == "ALL" else customers
    before = sorted(path for path in run.rglob("*") if path.name != ".lock")
    assert main(["forget", "--run", str(run), "--company", "crime", "--customer", asked]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path for path in run.rglob("*") if path.name != ".lock") == before
