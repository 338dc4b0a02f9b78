"""Rows with a memory in a comparison: shown, tested and chosen beside the models that they stand on."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.comparison import CompareConfig, RowRuns, Run, _chosen, collect, plan, shown_as
from fedecider.experiment.comparison_page import chosen_row, comparison_evidence, write_page_of
from fedecider.running.run_folder import RunFolder

pytestmark = pytest.mark.whole

NUM_USERS = 40
USERS = [f"u{number}" for number in range(NUM_USERS)]
BASELINES = ["zero-shot student", "popularity", "memory", "memoriser"]
# row -> share of the users whose item stands first
HITS = {"model": 0.3, "mixed": 0.6, "memory": 0.4, "zero-shot student": 0.2, "popularity": 0.1, "memoriser": 0.0}
OF_SILOS = {"own mixed": 0.5, "own memory": 0.35}


def finished(tmp_path, label: str, method: str, seed: int, memory: str, bonus: float = 0.0) -> Run:
    """A run of two domains, written by hand; ``memory`` "silos" is that of clients that have siblings."""
    folder = RunFolder(tmp_path / f"{label}-{seed}")
    folder.root.mkdir()
    names = {"model": f"{method} (own)", "mixed": f"{method} + memory", "own mixed": f"{method} + own memory"}
    hits = {**HITS, **OF_SILOS} if memory == "silos" else HITS
    shown = [name for name in hits if memory != "none" or name not in ("mixed", "memory")]
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
    folder.metrics.write_text(json.dumps(content))
    sent = {"clients": [0, 1], "up": {"B": 10}, "header_up": 1, "down": {"B": 10}, "header_down": 1}
    record = {"round": 1, "clients": [0, 1], "train_s": 1.0, "score": 0.3, "traffic": [sent]}
    folder.rounds.write_text(json.dumps(record) + "\n")
    words = ["--data", str(tmp_path), "--domains", "crime,comics", "--method", method]
    words += ["--hybrid.kind", "none" if memory == "none" else "mixture"]
    return Run(label, seed, {}, parse_settings("", words), folder)


def rows_of(tmp_path, **kinds: tuple[str, str, float]) -> list[RowRuns]:
    """label -> method, kind of the memory, what its models have above ``HITS``."""
    return [
        RowRuns(label, method, {}, [], [finished(tmp_path, label, method, seed, kind, bonus) for seed in range(2)])
        for label, (method, kind, bonus) in kinds.items()
    ]


@pytest.fixture
def domains():
    return {name: SimpleNamespace(clients=SimpleNamespace(users=USERS)) for name in ("crime", "comics")}


@pytest.fixture
def config(tmp_path):
    rows = {"ours": {"method": "fedecider"}, "local": {}}
    against = ["ours + memory"]
    return CompareConfig(rows=rows, seeds=2, baselines=BASELINES, against=against, data=str(tmp_path))


def test_a_row_with_a_memory_is_shown_tested_and_chosen(tmp_path, config, domains):
    methods = rows_of(tmp_path, ours=("fedecider", "mixture", 0.0), local=("local", "mixture", 0.1))
    found = collect(config, methods, domains)
    assert [row.label for row in found.rows] == ["ours", "ours + memory", "local", "local + memory", *BASELINES]
    assert {row.label: row.kind for row in found.rows}["memory"] == "baseline"
    assert found.views == []
    means = {row.label: row.values["macro"]["hit@10"].mean for row in found.rows}
    assert means["ours"] == pytest.approx(0.3)
    assert means["ours + memory"] == pytest.approx(0.6)
    assert means["local + memory"] == pytest.approx(0.7)
    assert means["memory"] == pytest.approx(0.4)
    assert found.valid == pytest.approx({"ours": 0.3, "ours + memory": 0.6, "local": 0.4, "local + memory": 0.7})
    tested = {(one.first, one.second) for one in found.comparisons}
    others = ("ours", "local", "local + memory", "zero-shot student", "popularity", "memory")
    assert tested == {("ours + memory", other) for other in others}
    assert set(found.costs) == {"ours", "local"}, "a memory costs no round"

    assert chosen_row(methods, found) == "local + memory"
    turned = found._replace(valid={**found.valid, "ours + memory": 0.9})
    assert chosen_row(methods, turned) == "ours + memory"
    evidence = comparison_evidence(config, methods, turned, "ours + memory")
    assert evidence.beside["ours"] == "the model without its memory"
    assert evidence.beside["memory"] == "the memory without a model"
    assert list(evidence.without_exchange) == ["local", "local + memory"]
    assert evidence.valid["ours + memory"] == pytest.approx(0.6)
    assert evidence.valid["ours"] == pytest.approx(0.3)


def test_settings_are_chosen_by_the_model_that_is_reported(tmp_path):
    runs = [finished(tmp_path, label, "local", 0, "none", bonus) for label, bonus in (("low", 0.0), ("high", 0.1))]
    for run, of_rounds in zip(runs, (0.4, 0.2), strict=True):
        run.folder.results.touch()
        metrics = json.loads(run.folder.metrics.read_text())
        run.folder.metrics.write_text(json.dumps({**metrics, "best_valid_ndcg@10": of_rounds}))
    chosen = _chosen("local", [[run] for run in runs])
    assert chosen.runs == runs[1:]
    assert [one["valid"] for one in chosen.tried] == pytest.approx([0.3, 0.4])
    for run in runs:
        metrics = json.loads(run.folder.metrics.read_text())
        for domain in metrics["domains"].values():
            del domain["valid"]
        run.folder.metrics.write_text(json.dumps(metrics))
    older = _chosen("local", [[run] for run in runs])
    assert [one["valid"] for one in older.tried] == pytest.approx([0.4, 0.2])


def test_pooled_data_with_a_memory_are_no_choice_either(tmp_path, config, domains):
    methods = rows_of(tmp_path, ours=("fedecider", "mixture", 0.0), pool=("centralised", "mixture", 0.3))
    found = collect(config, methods, domains)
    assert chosen_row(methods, found) == "ours + memory"
    evidence = comparison_evidence(config, methods, found, "ours + memory")
    assert evidence.beside["pool + memory"] == "all data in one place"


def test_rows_without_a_memory_are_as_they_were(tmp_path, config, domains):
    methods = rows_of(tmp_path, ours=("fedecider", "none", 0.0), local=("local", "mixture", 0.1))
    assert [list(shown_as(row).values()) for row in methods] == [["ours"], ["local", "local + memory"]]
    found = collect(config, methods, domains)
    labels = [row.label for row in found.rows]
    assert labels == ["ours", "local", "local + memory", *BASELINES], "the memory of the first row that has one"
    none = rows_of(tmp_path, bare=("fedecider", "none", 0.0))
    assert [row.label for row in collect(config, none, domains).rows] == [
        "bare",
        *(label for label in BASELINES if label != "memory"),
    ]


def test_what_companies_have_without_sending_counts_stands_beside(tmp_path, config, domains):
    methods = rows_of(tmp_path, ours=("fedecider", "silos", 0.0), local=("local", "silos", 0.0))
    config = dataclasses.replace(config, baselines=[*BASELINES, "own memory"], against=["ours + own memory"])
    found = collect(config, methods, domains)
    means = {row.label: row.values["macro"]["hit@10"].mean for row in found.rows}
    expected = {"ours": 0.3, "ours + memory": 0.6, "ours + own memory": 0.5, "own memory": 0.35}
    assert {label: means[label] for label in expected} == pytest.approx(expected)
    assert found.valid["ours + own memory"] == pytest.approx(0.5)
    assert {one.first for one in found.comparisons} == {"ours + own memory"}
    assert not any("no run has such a row" in note for note in found.notes)
    whole = collect(config, rows_of(tmp_path, whole=("fedecider", "mixture", 0.0)), domains)  # nobody has siblings
    assert "not tested against, since no run has such a row: ours + own memory" in whole.notes
    evidence = comparison_evidence(config, methods, found, "ours + memory")
    assert list(evidence.without_exchange) == ["local", "local + own memory"], "a sum of counts is an exchange"


def test_examples_are_those_of_the_model_under_its_own_name(tmp_path, config, domains, monkeypatch):
    methods = rows_of(tmp_path, ours=("fedecider", "mixture", 0.0), local=("local", "mixture", -0.1))
    for row in methods:
        example = {
            "history": ["Old"],
            "num_history": 1,
            "held_out": "Wanted",
            "position": 0,
            "recommended": [{"title": f"From {row.label}", "held_out": False}],
        }
        (row.runs[0].folder.root / "examples.json").write_text(json.dumps({"crime": [example]}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "compare").mkdir(parents=True)
    text = write_page_of(config, methods, collect(config, methods, domains), domains).read_text(encoding="utf-8")
    assert "Would one switch ours + memory on?" in text
    assert "took “Wanted” next: ours: found at place 1; local: found at place 1" in text


def test_a_test_against_a_memory_that_no_row_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump({"domains": "crime,comics", "num_rounds": 1}))
    rows = {"fedavg": {"hybrid.kind": "none"}, "local": {}}
    config = CompareConfig(runs="runs.yaml", rows=rows, seeds=1, against=["fedavg + memory"])
    with pytest.raises(ValueError, match=r"got 'fedavg \+ memory' in against, but fedavg is run with hybrid.kind none"):
        plan(config)
    config = CompareConfig(runs="runs.yaml", rows=rows, seeds=1, against=["fedavg + own memory"])
    with pytest.raises(ValueError, match=r"got 'fedavg \+ own memory' in against, but fedavg is run with hybrid.kind"):
        plan(config)
    with pytest.raises(ValueError, match="got against"):
        CompareConfig(rows=rows, seeds=1, against=["other + memory"])
