"""Users on sites through scripts/deploy.py: commands, a project from a catalogue alone, and (slow) FLARE."""

import json
import runpy
from pathlib import Path

import pytest

from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.deployment.commands import collect, public_project
from fedecider.deployment.project import read_project
from fedecider.running import progress

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = "user,item\n" + "".join(
    f"u{user},i{(7 * user + 3 * n) % 20}\n" for user in range(9) for n in range(4 + user % 3)
)
WORDS = "--method pfedrec --dataset toy --source csv --raw raw --min_user_events 3 --num_rounds 2 --num_threads 1"
TOY = WORDS.split()
NEEDS = "needs nvflare: pip install '.[deploy]'"


def script(name, *words):
    return runpy.run_path(str(REPOSITORY / "scripts" / f"{name}.py"))["main"](list(words))


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "toy.csv").write_text(ROWS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", *TOY, "--output", "run"), "got no sites, expected them for users as clients: --sites 3"),
        (("simulate", *TOY, "--sites", "2"), "expected the run folder"),
        (("simulate", *TOY, "--sites", "12", "--output", "run"), "got 12 sites, expected 1 to 9"),
        (("simulate", *TOY, "--sites", "2", "--secure_sum", "true", "--output", "run"), "got secure_sum true"),
        (("simulate", *TOY, "--sites", "2", "--num_negatives", "90", "--output", "run"), "got num_negatives 90"),
        (("simulate", *TOY, "--sites", "2", "--output", "raw"), "which is not empty"),
        (("provision", *TOY, "--sites", "2", "--host", "h", "--output", "run"), "got source 'csv', expected prepared"),
    ],
)
def test_bad_commands_are_one_line(words, message, toy, capsys):
    pytest.importorskip("nvflare", reason=NEEDS)
    assert script("deploy", *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert [path.name for path in toy.iterdir()] == ["raw"]


def test_a_project_is_made_from_a_catalogue_and_numbers_of_users(tmp_path):
    domains = sample_domains(["crime"])
    save_domains(domains, tmp_path / "public")
    (tmp_path / "sites.yaml").write_text("{north: 4, south: 3}")
    words = ["--method", "fedmf", "--source", "prepared", "--raw", str(tmp_path / "public"), "--dataset", "crime"]
    made = public_project(words, str(tmp_path / "sites.yaml"), tmp_path / "deployment")
    root, project = made.root, read_project(made.root)
    assert (project.run, project.names) == (made.run, made.names) == (made.run, ["north", "south"])
    assert project.hosts == {"north": [0, 1, 2, 3], "south": [4, 5, 6]}
    assert project.more["items"] == domains["crime"].item_keys
    content = (root / "project.json").read_text()
    assert not any(f'"{user}"' in content for user in domains["crime"].clients.users)
    assert str(tmp_path) not in content


def test_a_track_that_is_not_deployed_says_which_are(tmp_path):
    message = (
        "got the track of ID-based methods, which has no deployment, expected the cross-device track or the cross-silo "
        "track"
    )
    with pytest.raises(ValueError, match=message):
        public_project(["--method", "fedsasrec"], "", tmp_path / "deployment")
    with pytest.raises(ValueError, match="sites"):
        public_project(["--method", "fedavg", "--data", str(tmp_path)], "2", tmp_path / "deployment")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metrics", [{"dataset": "toy", "sites": {}}, {"domains": {}}])
def test_a_run_whose_test_nobody_told_says_where_to_look(metrics, tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"best_round": 1, **metrics}))
    (tmp_path / "wire.json").write_text('{"messages": []}')
    with pytest.raises(ValueError, match="refused_after_rounds"):
        collect(["--run", str(tmp_path)])


def test_rows_that_some_sites_alone_have_are_printed(tmp_path, capsys, monkeypatch):
    """Who shares a catalogue tells more rows than who does not."""
    monkeypatch.setattr(progress.console, "_width", 160)  # no label is broken
    figures = {"hit@10": {"mean": 0.25}, "ndcg@10": {"mean": 0.125}}
    tests = {
        "shop.1": {"fedavg": figures, "own hybrid without a model": figures},
        "comics": {"hybrid without a model": figures, "fedavg": figures},
    }
    domains = {site: {"test": test} for site, test in tests.items()}
    (tmp_path / "metrics.json").write_text(json.dumps({"best_round": 1, "domains": domains}))
    (tmp_path / "wire.json").write_text('{"messages": []}')
    collect(["--run", str(tmp_path)])
    table = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    assert ["fedavg", *["0.2500", "0.1250"] * 2] in table
    assert ["own", "hybrid", "without", "a", "model", "0.2500", "0.1250", "-", "-"] in table
    assert ["hybrid", "without", "a", "model", "-", "-", "0.2500", "0.1250"] in table


@pytest.mark.slow
def test_flares_simulator_has_the_figures_of_the_simulated_run(toy):
    pytest.importorskip("nvflare", reason=NEEDS)
    assert script("federate", *TOY, "--output", "runs/one") == 0
    assert script("deploy", "simulate", *TOY, "--sites", "2", "--output", "runs/sites") == 0
    expected, found = (json.loads(Path(f"runs/{run}/metrics.json").read_text()) for run in ("one", "sites"))
    assert found["best_round"] == expected["best_round"]
    assert found["best_valid_ndcg@10"] == pytest.approx(expected["best_valid_ndcg@10"], abs=1e-9)
    assert found["reported"] == expected["reported"]
    for row, metrics in found["test"].items():
        for metric, value in metrics.items():
            assert value["mean"] == pytest.approx(expected["test"][row][metric]["mean"], abs=1e-6)
    for site in ("1", "2"):
        assert (toy / "runs" / "sites" / "sites" / site / "run" / "metrics.json").is_file()
    assert script("deploy", "collect", "--run", "runs/sites") == 0
