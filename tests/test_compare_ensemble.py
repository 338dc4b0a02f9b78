"""Rows with an ensemble in a comparison: shown, tested and chosen beside the models that they stand on."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from fedecider.comparison.compare import Entry, Plan, Row, Table, collect, fill
from fedecider.comparison.page import chosen_row, evidence
from fedecider.comparison.search import Search
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.comparison import CompareConfig, Scope, cell_of, plan, words_of
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.methods import METHODS
from fedecider.running.run_folder import RunFolder

pytestmark = pytest.mark.whole

NUM_USERS = 40
USERS = [f"u{number}" for number in range(NUM_USERS)]
BASELINES = ["zero-shot student", "popularity", "ensemble without a model", "memoriser"]
# row -> share of the users whose item stands first
HITS = {
    "model": 0.3,
    "mixed": 0.6,
    "ensemble without a model": 0.4,
    "zero-shot student": 0.2,
    "popularity": 0.1,
    "memoriser": 0.0,
}
OF_SILOS = {"own mixed": 0.5, "own ensemble without a model": 0.35}


def finished(tmp_path, label: str, method: str, seed: int, ensemble: str, bonus: float = 0.0) -> RunFolder:
    """A run of two domains, written by hand; ``ensemble`` "silos" is that of clients that share a catalogue."""
    folder = RunFolder(tmp_path / f"{label}-{seed}")
    folder.root.mkdir()
    names = {"model": f"{method} (own)", "mixed": f"{method} + ensemble", "own mixed": f"{method} + own ensemble"}
    hits = {**HITS, **OF_SILOS} if ensemble == "silos" else HITS
    shown = [name for name in hits if ensemble != "none" or name not in ("mixed", "ensemble without a model")]
    shares = {names.get(name, name): hits[name] + bonus * (name in names) for name in shown}
    records = []
    for domain in ("crime", "comics"):
        for row, share in shares.items():
            position_U = torch.tensor([0 if user < share * NUM_USERS else 50 for user in range(NUM_USERS)])
            records.append(UserPositions(domain, USERS, "test", row, 1, position_U))
    write_per_user(folder.per_user, records)
    cell = {row: {"mean": share, "low": 0.0, "high": 1.0} for row, share in shares.items()}
    means = {row: {"hit@10": value, "ndcg@10": value} for row, value in cell.items()}
    domain = {"chance_hit@10": 0.03, "test": means, "valid": means}
    content = {
        "protocol": "strict",
        "reported": names["model"],
        "best_round": 1,
        "best_valid_ndcg@10": 0.9,  # in the rounds, before the share of the update was chosen
        "domains": {"crime": domain, "comics": domain},
    }
    folder.metrics.write_text(json.dumps({"method": method, **content}))
    folder.record.write_text(json.dumps({"config": {"run": {"method": method}}, "data": {}}))
    sent = {"clients": [0, 1], "up": {"B": 10}, "header_up": 1, "down": {"B": 10}, "header_down": 1}
    record = {"round": 1, "clients": [0, 1], "train_s": 1.0, "score": 0.3, "traffic": [sent]}
    folder.rounds.write_text(json.dumps(record) + "\n")
    return folder


def rows_of(tmp_path, **kinds: tuple[str, str, float]) -> list[Row]:
    """label -> method, kind of the ensemble, what its models have above ``HITS``."""
    found = []
    for label, (method, ensemble, bonus) in kinds.items():
        folders = [finished(tmp_path, label, method, seed, ensemble, bonus) for seed in range(2)]
        kind = "central" if METHODS[method].pooled else "local" if method == "local" else "federated"
        cells = [cell_of(label, method, folder.root) for folder in folders]
        found.append(Row(Entry(label, method, kind, ["strict"], never), {}, [], cells))
    return found


def never(setting, seed):
    raise AssertionError("a finished run is not run again")


def table_of(config, rows) -> Table:
    users = dict.fromkeys(("crime", "comics"), USERS)
    sequences = [[0, 1, 2]] * NUM_USERS
    domain = SimpleNamespace(clients=SimpleNamespace(users=USERS, sequences=sequences), item_keys=range(300))
    settings = parse_settings(["--protocol", "strict", "--data", config.data, "--domains", "crime,comics"])
    words = words_of(Scope(config, settings, dict.fromkeys(users, domain)))._replace(heading=lambda table: [])
    asked = Plan("compare", Path(config.output), [], ["strict"], users, 2, baselines=config.baselines, words=words)
    return collect(asked._replace(against=config.against), rows)


@pytest.fixture
def config(tmp_path):
    rows = {"ours": {"method": "fedecider"}, "local": {}}
    against = ["ours + ensemble"]
    return CompareConfig(rows=rows, seeds=2, baselines=BASELINES, against=against, data=str(tmp_path))


def test_a_row_with_an_ensemble_is_shown_tested_and_chosen(tmp_path, config):
    methods = rows_of(tmp_path, ours=("fedecider", "logit", 0.0), local=("local", "logit", 0.1))
    table = table_of(config, methods)
    found = table.results["strict"]
    assert [row.label for row in found.rows] == ["ours", "ours + ensemble", "local", "local + ensemble", *BASELINES]
    assert {row.label: row.kind for row in found.rows}["ensemble without a model"] == "baseline"
    assert found.variants == []
    means = {row.label: row.values["macro"]["hit@10"].mean for row in found.rows}
    assert means["ours"] == pytest.approx(0.3)
    assert means["ours + ensemble"] == pytest.approx(0.6)
    assert means["local + ensemble"] == pytest.approx(0.7)
    assert means["ensemble without a model"] == pytest.approx(0.4)
    assert found.valid == pytest.approx({"ours": 0.3, "ours + ensemble": 0.6, "local": 0.4, "local + ensemble": 0.7})
    tested = {(one.first, one.second) for one in found.tests}
    others = ("ours", "local", "local + ensemble", "zero-shot student", "popularity", "ensemble without a model")
    assert tested == {("ours + ensemble", other) for other in others}
    assert set(found.costs) == {"ours", "local"}, "an ensemble costs no round"

    assert chosen_row(table) == ("strict", "local + ensemble")
    turned = table._replace(results={"strict": found._replace(valid={**found.valid, "ours + ensemble": 0.9})})
    assert chosen_row(turned) == ("strict", "ours + ensemble")
    said = evidence(turned, "strict", "ours + ensemble")
    assert said.beside["ours"] == "the model without its private part"
    assert said.beside["ensemble without a model"] == "all companies' counts and texts"
    assert said.alone in ("local", "local + ensemble")


def test_settings_are_chosen_by_the_model_that_is_reported(tmp_path):
    folders = [finished(tmp_path, label, "local", 0, "none", bonus) for label, bonus in (("low", 0.0), ("high", 0.1))]
    for folder, of_rounds in zip(folders, (0.4, 0.2), strict=True):
        metrics = json.loads(folder.metrics.read_text())
        folder.metrics.write_text(json.dumps({**metrics, "best_valid_ndcg@10": of_rounds}))

    def valid() -> list[float]:
        def run(setting, seed):
            return cell_of("local", "local", folders[setting.get("number", 0)].root)

        search = Search({}, {"number": 0}, ({}, {"number": 1}))
        (row,) = fill([Entry("local", "local", "local", ["strict"], run, search, 2)], 1)
        return [one.valid for one in row.tried]

    assert valid() == pytest.approx([0.3, 0.4])


def test_what_companies_have_without_sending_counts_stands_beside(tmp_path, config):
    methods = rows_of(tmp_path, ours=("fedecider", "silos", 0.0), local=("local", "silos", 0.0))
    config = dataclasses.replace(
        config, baselines=[*BASELINES, "own ensemble without a model"], against=["ours + own ensemble"]
    )
    table = table_of(config, methods)
    found = table.results["strict"]
    means = {row.label: row.values["macro"]["hit@10"].mean for row in found.rows}
    expected = {"ours": 0.3, "ours + ensemble": 0.6, "ours + own ensemble": 0.5, "own ensemble without a model": 0.35}
    assert {label: means[label] for label in expected} == pytest.approx(expected)
    assert found.valid["ours + own ensemble"] == pytest.approx(0.5)
    assert {one.first for one in found.tests} == {"ours + own ensemble"}
    said = evidence(table, "strict", "ours + ensemble")
    assert said.alone in ("local", "local + own ensemble"), "a sum of counts is an exchange"


def test_a_test_against_an_ensemble_that_no_row_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump({"domains": "crime,comics", "num_rounds": 1}))
    rows = {"fedavg": {"ensemble.kind": "none"}, "local": {}}
    config = CompareConfig(runs="runs.yaml", rows=rows, seeds=1, against=["fedavg + ensemble"])
    with pytest.raises(
        ValueError, match=r"got 'fedavg \+ ensemble' in against, but fedavg is run with ensemble.kind none"
    ):
        plan(config)
    config = CompareConfig(runs="runs.yaml", rows=rows, seeds=1, against=["fedavg + own ensemble"])
    with pytest.raises(
        ValueError, match=r"got 'fedavg \+ own ensemble' in against, but fedavg is run with ensemble.kind"
    ):
        plan(config)
    with pytest.raises(ValueError, match="got against"):
        CompareConfig(rows=rows, seeds=1, against=["other + ensemble"])
