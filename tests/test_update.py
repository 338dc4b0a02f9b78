"""Next month: counts are those of all events exactly, the old run stays, and what ranks worse is not written."""

import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.models import update
from fedecider.models.counts import count_events
from fedecider.models.hybrid import load_hybrid
from fedecider.models.recommender import Recommender
from fedecider.models.update import update_counts

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
    return load_hybrid(run / "private" / "crime", domain.item_keys).counts


def same(first, second):
    return np.array_equal(first.event_I, second.event_I) and (first.pair_II != second.pair_II).nnz == 0


def test_counts_are_those_of_all_events(run, domain, tmp_path):
    users = [*domain.clients.users[:40], "new-1", "new-2"]
    months = [month(domain, users, first, start) for first, start in ((0, 10), (40, 1000))]
    first = update_counts(run, "crime", table(months[0], tmp_path / "1.parquet"), tmp_path / "first", force=True)
    assert (first.num_new_customers, first.events.num_rows, first.events.num_known) == (2, 126, 0)
    update_counts(
        tmp_path / "first", "crime", table(months[1], tmp_path / "2.parquet"), tmp_path / "second", force=True
    )
    both = update_counts(
        run, "crime", table([*months[0], *months[1]], tmp_path / "3.parquet"), tmp_path / "both", force=True
    )
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
    with pytest.raises(ValueError, match="got 126 events of which none is new"):
        update_counts(tmp_path / "both", "crime", tmp_path / "2.parquet", again)
    assert not again.exists()


def test_lists_know_the_new_events(run, domain, tmp_path):
    rows = month(domain, [domain.clients.users[3], "new-1"], 7, 10)
    update_counts(run, "crime", table(rows, tmp_path / "new.parquet"), tmp_path / "next", force=True)
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
    rows = [*month(domain, domain.clients.users[:30], 0, 10), {"customer": "x", "sku": "gone", "time": 2**31}]
    events = table(rows, tmp_path / "new.parquet")
    before = {path: path.read_bytes() for path in (run / "private").rglob("*") if path.is_file()}
    words = ["update", "--run", run, "--company", "crime", "--events", events, "--output", tmp_path / "next"]
    monkeypatch.setattr(update, "LARGEST_LOSS", -1e9)
    assert main(list(map(str, words))) == 2
    said = capsys.readouterr()
    assert "got updated counts that rank worse" in said.err
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
    once = update_counts(run, "crime", table(rows[:60], tmp_path / "a.parquet"), tmp_path / "a", force=True)
    assert once.test.num_customers == 30
    twice = update_counts(tmp_path / "a", "crime", table(rows[60:], tmp_path / "b.parquet"), tmp_path / "b")
    assert once.test.is_worse  # what went before the last item is counted with other things, the last item not at all
    assert not twice.test.is_worse
    assert twice.test.new > once.test.new


def test_what_no_times_cannot_tell(run, domain, tmp_path):
    user = domain.clients.users[0]
    untimed = table([{"customer": user, "sku": domain.item_keys[7]}], tmp_path / "untimed.parquet")
    first = update_counts(run, "crime", untimed, tmp_path / "first", force=True)
    kept = pyarrow.parquet.read_table(first.folder / "private" / "crime" / "histories.parquet").to_pylist()
    (row,) = [row for row in kept if row["customer"] == user]
    assert row["last_time"] == max(domain.clients.timestamps[0]), "what was known of times stays"
    with pytest.raises(ValueError, match="got events without times of 1 customers whose histories end with just these"):
        update_counts(str(first.folder), "crime", untimed, tmp_path / "second", force=True)
    returned = [{"customer": user, "sku": domain.item_keys[9], "quantity": -1}]
    returned += [{"customer": user, "sku": domain.item_keys[11], "quantity": 2}]
    after = update_counts(run, "crime", table(returned, tmp_path / "returns.parquet"), tmp_path / "third", force=True)
    assert after.events.items == {user: [11]}, "a return is no purchase"


def test_an_updated_run_is_not_evaluated_on_what_it_has_counted(run, domain, tmp_path, capsys):
    untimed = table([{"customer": domain.clients.users[0], "sku": domain.item_keys[7]}], tmp_path / "one.parquet")
    update_counts(run, "crime", untimed, tmp_path / "updated", force=True)
    assert main(["evaluate", "--run", str(tmp_path / "updated"), "--split", "valid"]) == 2
    assert "were updated and hold its held-out events" in capsys.readouterr().err
