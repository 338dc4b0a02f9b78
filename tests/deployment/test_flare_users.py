"""Users on sites through scripts/deploy.py: commands, a project from a catalogue alone, and (slow) FLARE."""

import json
import runpy
from pathlib import Path

import pytest

from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.deployment.commands import public_project
from fedecider.deployment.project import read_project

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = "".join(f"u{user},i{(7 * user + 3 * n) % 20},5,{n}\n" for user in range(9) for n in range(4 + user % 3))
DATA = ("--dataset", "toy", "--source", "amazon_ratings", "--raw", "raw", "--min_user_events", "3")
TOY = ("--method", "pfedrec", *DATA, "--num_rounds", "2", "--num_threads", "1")
NEEDS = "needs nvflare: pip install '.[deploy]'"


def script(name, *words):
    return runpy.run_path(str(REPOSITORY / "scripts" / f"{name}.py"))["main"](list(words))


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "ratings.dat").write_text(ROWS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", *TOY, "--output", "run"), "got no sites, expected them for users as clients: --sites 3"),
        (("simulate", *TOY, "--sites", "2"), "expected the output directory"),
        (("simulate", *TOY, "--sites", "12", "--output", "run"), "got 12 sites, expected 1 to 9"),
        (("simulate", *TOY, "--sites", "2", "--secure_sum", "true", "--output", "run"), "got secure_sum true"),
        (("simulate", *TOY, "--sites", "2", "--num_negatives", "90", "--output", "run"), "got num_negatives 90"),
        (("simulate", *TOY, "--sites", "2", "--output", "raw"), "which is not empty"),
        (
            ("provision", *TOY, "--sites", "2", "--host", "h", "--output", "run"),
            "expected prepared",
        ),
        (("provision", "--data", "raw", "--host", "h", "--output", "run"), "got data without a config, expected the"),
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
