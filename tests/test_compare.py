"""A table of runs from one command: resumed after a kill, tuned on validation, bad input refused before any run."""

import csv
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fedecider.comparison.compare import Cell, Entry, compare, fill
from fedecider.cross_silo import comparison as planning
from fedecider.cross_silo.comparison import CompareConfig, plan

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = {
    "domains": "crime,comics",
    "num_rounds": 2,
    "local_epochs": 1,
    "lora_rank": 2,
    "num_beams": 20,
    "num_eval_users": 20,
    "eval_batch_size": 40,
    "pretrain": {
        "ids": "keywords",
        "samples": {"templates": "compact", "max_history": 3, "max_source_tokens": 64},
        "backbone": {"d_model": 32, "num_layers": 2},
        "train": {"max_steps": 20, "learning_rate": 3e-3, "batch_size": 64},
    },
    "distill": {"epochs": 1, "batch_size": 256},
}
TABLE = {
    "runs": "runs.yaml",
    "output": "table",
    "seeds": 1,
    "tune": 2,
    "jobs": 2,
    "baselines": ["zero-shot student", "popularity", "sasrec", "memoriser"],
    "against": ["fedavg"],
    "rows": {"fedprox": {}, "fedavg": {"weighting": "examples"}},
}


@pytest.fixture
def playground(tmp_path):
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump(RUNS))
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(TABLE, sort_keys=False))
    return tmp_path


def begin(cwd: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(REPOSITORY / "scripts" / "compare.py"), "--config", "table.yaml", *words]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return out


def lasting(table: dict) -> dict:
    """The table without what a clock says."""
    costs = {
        name: {key: value for key, value in cost.items() if key != "seconds"}
        for name, cost in table["protocols"]["strict"]["costs"].items()
    }
    return {**table, "protocols": {"strict": {**table["protocols"]["strict"], "costs": costs}}}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_table_goes_on_and_is_the_same(playground):
    process = begin(playground)
    deadline = time.monotonic() + 200
    while not (begun := list((playground / "table" / "runs").glob("*/rounds.jsonl"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert begun
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (playground / "table" / "compare.md").exists()
    finish(begin(playground))
    resumed = json.loads((playground / "table" / "compare.json").read_text())
    again = finish(begin(playground))
    assert "done" not in again.replace("shared stages, seed 0: done", "")  # nothing was run a third time
    whole = finish(begin(playground, "--output", "whole"))
    assert "fedprox, default, seed 0" in whole
    assert lasting(json.loads((playground / "whole" / "compare.json").read_text())) == lasting(resumed)

    prox = next(one for one in resumed["settings"] if one["row"] == "fedprox")
    best = max(prox["tried"], key=lambda one: one["valid"])
    assert len(prox["tried"]) == 2
    assert prox["options"] == best["options"]
    labels = [row["row"] for row in resumed["rows"]]
    assert labels == ["fedprox", "fedavg", "zero-shot student", "popularity", "sasrec", "memoriser"]
    assert {(one["first"], one["second"]) for one in resumed["comparisons"]} == {
        ("fedavg", other) for other in ("fedprox", "zero-shot student", "popularity", "sasrec")
    }
    with (playground / "table" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    means = {(row["domain"], row["row"]): float(row["hit@10"]) for row in rows}
    assert means["macro", "popularity"] == pytest.approx(
        (means["crime", "popularity"] + means["comics", "popularity"]) / 2
    )
    marked = (playground / "table" / "compare.html").read_text()
    text = re.sub(r"<span class=\"tip\".*?</span>|</?dfn[^>]*>", "", marked)  # as it reads, words not explained
    assert "zero-shot student" in text


def scored(run) -> float:
    """A validation score that depends on what a row is run with, and on nothing else."""
    mu = getattr(run.settings.method, "mu", 0.0)
    return 0.3 - 0.1 * abs(math.log10(run.settings.training.learning_rate / 2e-3)) - 0.001 * mu


def scored_metrics(run) -> dict:
    """Metrics of a run whose reported model has that score; in the rounds, before its share was chosen, another."""
    shifts = {"crime": 0.01, "comics": -0.01}
    domains = {
        name: {"valid": {"own": {"ndcg@10": {"mean": scored(run) + by}}}, "test": {}} for name, by in shifts.items()
    }
    facts = {"method": "x", "reported": "own", "protocol": "strict", "best_round": 1}
    return {**facts, "best_valid_ndcg@10": 0.5 - scored(run), "domains": domains, "macro": {"test": {}}}


def pretend(called: list):
    """What runs a stage, with the least of what a run leaves; one setting fails."""

    def call(stage, run) -> str:
        label, mu = run.folder.root.name.partition("-")[0], getattr(run.settings.method, "mu", None)
        called.append((label, mu))
        if mu == 0.1:
            return "exit code 1"
        run.folder.root.mkdir(parents=True)
        run.folder.record.write_text(json.dumps({"config": {"run": {}}, "data": {}}))
        run.folder.rounds.touch()
        run.folder.metrics.write_text(json.dumps(scored_metrics(run)))
        run.folder.results.touch()
        return ""

    return call


@pytest.mark.slow
def test_every_row_has_the_same_number_of_trials_and_draws_are_repeated(playground, monkeypatch):
    monkeypatch.chdir(playground)
    called = []
    monkeypatch.setattr(planning, "_call", pretend(called))
    rows = {"fedprox": {}, "local": {}, "mine": {"method": "fedprox", "mu": 0.5}}
    config = CompareConfig(**{**TABLE, "rows": rows, "tune": 5, "against": []})
    entries = plan(config).entries
    ahead = {entry.label: entry.search.candidates[: entry.budget] for entry in entries}
    assert {label: len(settings) for label, settings in ahead.items()} == {"fedprox": 5, "local": 4, "mine": 1}
    assert [one.get("learning_rate") for one in ahead["local"]] == [None, 3e-3, 3e-4, 1e-2], "as before draws"
    assert [one.get("mu") for one in ahead["fedprox"][:4]] == [None, 0.001, 0.1, 1.0]
    found = {row.entry.label: row for row in fill(entries, 1)}
    assert {label: len(row.tried) for label, row in found.items()} == {"fedprox": 5, "local": 5, "mine": 1}
    assert [one.setting for one in found["fedprox"].tried if one.valid is None] == [{"mu": 0.1}]
    drawn = [one.setting["learning_rate"] for one in found["local"].tried[4:]]
    assert len(set(drawn) - {3e-3, 3e-4, 1e-2}) == 1
    assert found["local"].setting == max(found["local"].tried, key=lambda one: one.valid).setting
    called.clear()
    assert [row.tried for row in fill(entries, 1)] == [row.tried for row in found.values()]
    assert called == [("fedprox", 0.1)], "only what failed is tried again"
    more = fill(plan(replace(config, tune=6)).entries, 1)
    assert {row.entry.label: len(row.tried) for row in more} == {"fedprox": 6, "local": 6, "mine": 1}
    assert more[1].tried[:5] == found["local"].tried


def test_a_row_that_does_not_fit_into_the_memory_is_left_out_and_an_error_of_ours_is_not(capsys):
    def entry(label, error):
        def run(setting, seed):
            if error:
                raise error
            return Cell({label: 0.1}, dict)

        return Entry(label, label, "central", ["strict"], run)

    large = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    entries = [entry("fits", None), entry("large", large), entry("huge", MemoryError("Unable to allocate 27 GiB"))]
    assert [row.entry.label for row in fill(entries, 2)] == ["fits"]
    said = " ".join(capsys.readouterr().out.split())
    assert "huge, default, seed 0: failed: out of memory (Unable to allocate 27 GiB): fewer items or users" in said
    assert "left out: large (strict)" in said
    with pytest.raises(RuntimeError, match="a shape"):
        fill([entry("wrong", RuntimeError("a shape"))], 1)


def test_a_run_is_told_the_precision_under_whose_name_it_is_kept(playground, monkeypatch):
    monkeypatch.chdir(playground)
    content = {**RUNS, "precision": "auto"}
    Path("runs.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr("idgen.precision.fastest", lambda device: "bf16")
    monkeypatch.setattr("idgen.precision.bf16_speedup", lambda device: 2.0)
    called = []

    def run(command, **_):
        called.append(command)
        return subprocess.CompletedProcess([], int("federate" in command))

    monkeypatch.setattr(planning.subprocess, "run", run)
    config = CompareConfig(**{**TABLE, "rows": {"fedavg": {}}, "tune": 1})
    with pytest.raises(ValueError, match="got no row from fedavg"):  # nobody ran
        compare(plan(config))
    for command in called:
        content = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        assert content["precision"] == "bf16"
    assert len(called) >= 2  # the stages and the run


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": {"fedavg": {"teacher_row": False}}}, "teacher_row"),
        ({"rows": {}}, "rows"),
        ({"rows": {"mine": {"method": "fedsgd"}}}, "fedsgd"),
        ({"rows": {"fedavg": {"seed": 3}}}, "seed"),
        ({"rows": {5: {}}}, "5"),
        ({"rows": {"a/b": {"method": "local"}}}, "a/b"),
        ({"baselines": ["nobody"]}, "nobody"),
        ({"against": ["local"]}, "against"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": 2}, "several seeds without data"),
        ({"tune": 0}, "tune"),
        ({"rows": {"local": {"domains": "crime"}}}, "domains"),
        ({"rows": {"local": {"num_beams": 40}}}, "num_beams"),
        ({"rows": {"local": {"pretrain.ids": "item"}}}, "pretrain.ids"),
        ({"rows": {"popularity": {"method": "local"}}}, "popularity"),
        ({"lines": {"fedavg": {"weighting": "examples"}}}, "lines"),
        ({"runs": "broken.yaml"}, "broken.yaml"),
        ({"jobs": -1}, "jobs"),
        ({"domains": "crime,poetry"}, "poetry"),
        ({"rows": {"fedavg": {}, "fedprox": {"alpha_init": 1.0}}}, "alpha_init"),
        ({"rows": {"fedavg": {}, "fedprox": {"mu": -1.0}}}, "mu"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(playground, change, named, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    (playground / "table.yaml").write_text(yaml.safe_dump({**TABLE, **change}, sort_keys=False))
    (playground / "broken.yaml").write_text("domains: [crime")
    main = runpy.run_path(str(REPOSITORY / "scripts" / "compare.py"))["main"]
    try:
        code = main(["--config", "table.yaml"])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert named in capsys.readouterr().err
    assert not (playground / "table").exists()
