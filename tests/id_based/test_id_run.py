"""A run of an ID-based method from the command line: its folder, a stopped run that goes on, bad input."""

import json
from functools import partial

import pytest
import torch

from fedecider.cli import audit, federate, report
from fedecider.comparison.compare import Plan, Shared, collect, fill, positions_of
from fedecider.data.store import save_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.per_user import read_per_user
from fedecider.federation.record import read_records
from fedecider.id_based import METHODS
from fedecider.id_based.fedsasrec import FedsasrecConfig
from fedecider.id_based.run import IdRunConfig, table_row
from fedecider.models.folders import read_llm_run
from fedecider.running.run_folder import RunFolder
from fedecider.testing.id_contract import HISTORIES, tiny_domains

SMALL = "--embedding_size 8 --num_layers 1 --batch_size 3 --max_length 5 --num_threads 1"


@pytest.fixture
def data(tmp_path):
    save_domains(tiny_domains(), tmp_path / "data")
    return tmp_path / "data"


def call(data, output, *more):
    words = ["--method", "fedsasrec", "--data", str(data), "--output", str(output), *SMALL.split(), *more]
    return federate.main(words)


def test_a_run_leaves_what_a_comparison_reads(data, tmp_path, capsys):
    assert call(data, tmp_path / "run", "--num_rounds", "2") == 0
    folder = RunFolder(tmp_path / "run")
    metrics = json.loads(folder.metrics.read_text())
    assert metrics["reported"] == "fedsasrec (global)"
    rows = {(one.variant, one.domain): one for one in read_per_user(folder.per_user)}
    assert {variant for variant, _ in rows} == {"fedsasrec (global)", "fedsasrec (local)"}
    for name, users in HISTORIES.items():
        found = rows["fedsasrec (global)", name]
        assert list(found.users) == list(users)
        told = metrics["test"][name]["fedsasrec (global)"]["ndcg@10"]["mean"]
        assert told == pytest.approx(mean_metrics(found.position_U)["ndcg@10"])
    records = read_records(folder.rounds)
    assert metrics["best_valid_ndcg@10"] == max(record["score"] for record in records)
    sent = {
        way: 2 * sum(sum(one[way].values()) + one[f"header_{way}"] for one in each(records[0]))
        for way in ("up", "down")
    }
    assert metrics["bytes"] == {"up": sent["up"], "down": sent["down"]}
    assert "fedsasrec (global)" in folder.results.read_text()
    assert str(tmp_path / "run") in capsys.readouterr().out


def each(record):
    """The traffic of every client."""
    return [group for group in record["traffic"] for _ in group["clients"]]


def test_a_stopped_run_goes_on(data, tmp_path, monkeypatch):
    assert call(data, tmp_path / "whole", "--num_rounds", "3") == 0

    def stop_after_two(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    run = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("fedecider.running.rounds.round_logger", lambda *_: stop_after_two)
        assert call(data, run, "--num_rounds", "3") == 130
    assert not RunFolder(run).results.exists()
    assert call(data, run, "--num_rounds", "3", "--resume", "true") == 0
    whole, resumed = (json.loads(RunFolder(tmp_path / name).metrics.read_text()) for name in ("whole", "stopped"))
    for part in ("test", "valid", "bytes", "best_round"):
        assert whole[part] == resumed[part]
    assert [record["round"] for record in read_records(RunFolder(run).rounds)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_rounds", "0"], "got num_rounds 0"),
        (["--protocol", "strict/sampled99"], "got protocol 'strict/sampled99', expected one of whole catalogues"),
        (["--protocol", "loose"], "got protocol 'loose'"),
        (["--domains", "films.1,books"], "no prepared data for ['books']"),
        (["--data", ""], "got fedsasrec without data, expected a folder of prepared domains"),
        (["--lora_rank", "4"], "lora_rank"),
        (["--share", "most"], "share"),
        (["--resume", "true", "--output", ""], "got resume without output"),
    ],
)
def test_bad_input_is_told_in_one_line(data, tmp_path, capsys, words, message):
    assert call(data, tmp_path / "run", *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_rounds", "12"], "got num_rounds 12 with source_rounds 12, expected more"),
        (["--num_rounds", "20", "--patience", "4"], "got fedgcdr with patience 4, expected 0"),
        (["--num_rounds", "20", "--participation", "0.5"], "got fedgcdr with participation 0.5, expected 1"),
    ],
)
def test_rounds_in_which_nothing_could_be_handed_over_are_refused(data, tmp_path, capsys, words, message):
    command = ["--method", "fedgcdr", "--data", str(data), "--output", str(tmp_path / "run"), *words]
    assert federate.main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_page_is_made_again_and_other_commands_say_that_the_run_is_none_of_theirs(data, tmp_path, capsys):
    assert call(data, tmp_path / "run", "--num_rounds", "1") == 0
    page = tmp_path / "run" / "report.html"
    first = page.read_bytes()
    assert b"films.1" in first
    page.unlink()
    assert report.main(["--run", str(tmp_path / "run")]) == 0
    assert page.read_bytes() == first
    assert audit.main(["--run", str(tmp_path / "run")]) == 2
    assert "ID-based methods, which has no audit" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a run without a language model, expected one of the cross-silo track"):
        read_llm_run(tmp_path / "run")


def test_a_row_of_a_comparison_is_tuned_and_kept(tmp_path, monkeypatch):
    domains = tiny_domains()
    monkeypatch.setattr("fedecider.id_based.run.IdRunConfig", partial(IdRunConfig, num_rounds=2))
    small = partial(FedsasrecConfig, embedding_size=8, num_layers=1, batch_size=3, max_length=5)
    grid = ({}, {"share": "nothing"})
    entry = METHODS["fedsasrec"]._replace(config=small, grid=grid)
    monkeypatch.setitem(METHODS.own, "fedsasrec", entry)
    shared = Shared(domains, "strict", 2, tmp_path, "cpu")
    (row,) = fill([table_row("fedsasrec", shared)], 2)
    position_SU = positions_of(row, "strict")["fedsasrec"]
    assert {name: place.shape for name, place in position_SU.items()} == {
        name: (2, len(users)) for name, users in HISTORIES.items()
    }
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 3  # two settings with seed 0, the better one with seed 1
    (again,) = fill([table_row("fedsasrec", shared)], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    other = positions_of(again, "strict")["fedsasrec"]
    assert all(torch.equal(position_SU[name], other[name]) for name in domains)
    assert [cell.course().last_round for cell in row.cells] == [2, 2]
    assert _patience(tmp_path) == {4}
    valid = {}
    for folder in tmp_path.iterdir():
        setting = json.loads((folder / "inputs.json").read_text())
        if setting["run"]["seed"] == 0:
            valid[setting["method"]["share"]] = json.loads((folder / "info.json").read_text())["valid"]
    (other,) = [
        json.loads((folder / "inputs.json").read_text())["method"]["share"]
        for folder in tmp_path.iterdir()
        if json.loads((folder / "inputs.json").read_text())["run"]["seed"] == 1
    ]
    assert other == max(valid, key=lambda share: valid[share])


def _patience(folder) -> set[int]:
    return {json.loads((cell / "inputs.json").read_text())["run"]["patience"] for cell in folder.iterdir()}


def test_rounds_that_are_stages_are_all_run(tmp_path, monkeypatch):
    entry = METHODS["fedgcdr"]
    stages = partial(entry.config, source_rounds=1, target_rounds=1)
    monkeypatch.setitem(METHODS.own, "fedgcdr", entry._replace(config=stages))
    monkeypatch.setattr("fedecider.id_based.run.IdRunConfig", partial(IdRunConfig, num_rounds=7))
    (row,) = fill([table_row("fedgcdr", Shared(tiny_domains(), "strict", 1, tmp_path, "cpu"))], 1)
    assert len(row.cells[0].course().curve) == 7
    assert _patience(tmp_path) == {0}


def test_the_table_of_a_comparison_has_the_row_and_its_costs(tmp_path, monkeypatch):
    monkeypatch.setattr("fedecider.id_based.run.IdRunConfig", partial(IdRunConfig, num_rounds=2))
    small = partial(FedsasrecConfig, embedding_size=8, num_layers=1, batch_size=3, max_length=5)
    monkeypatch.setitem(METHODS.own, "fedsasrec", METHODS["fedsasrec"]._replace(config=small))
    domains = tiny_domains()
    rows = fill([table_row("fedsasrec", Shared(domains, "strict", 1, tmp_path, "cpu"))], 1)
    users = {name: domain.clients.users for name, domain in domains.items()}
    table = collect(Plan("", tmp_path, [], ["strict"], users, 1, baselines=["fedsasrec"]), [], rows)
    assert [row.label for row in table.results["strict"].rows] == ["fedsasrec"]
    cost = table.results["strict"].costs["fedsasrec"]
    layers = 5 * 8 + 4 * 8 + (3 * 8 * 8 + 3 * 8) + (8 * 8 + 8) + 2 * (8 * 8 + 8) + 2 * 8
    payload = 4 * (layers + (12 + 9 + 12) / 3 * 8)
    assert payload < cost.up == cost.down < payload + 2000  # and a header
    assert cost.best_rounds == [rows[0].cells[0].course().best_round]
