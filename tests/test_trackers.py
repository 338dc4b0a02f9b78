"""What trackers hold after a run, where it lies, and after a failure and a resume; nothing leaves the machine."""

import json
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_ratings import FAST, options_of, script, write_ratings

from fedecider.federation.record import read_json
from fedecider.running.run_folder import RunFolder
from fedecider.running.trackers import check, result_metrics

ENVIRONMENT = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_DIR")
VALID = "valid/global/ndcg_at_10"
TEST = "test/fedmf/toy/ndcg_at_10"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return options_of(write_ratings(tmp_path_factory.mktemp("raw")))


@pytest.fixture
def federate(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words) -> int:
        common = ["--method", "fedmf", *data, *FAST, "--num_rounds", 3, "--output", "run", "--checkpoint_every", 1]
        return script("federate").main([str(word) for word in (*common, *words)])

    return run


def expected() -> dict[str, float]:
    return dict(result_metrics(read_json(RunFolder(Path("run")).metrics)))


def recorded_scores() -> list[float]:
    lines = (Path("run") / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["valid"]["global"][0]["ndcg@10"] for line in lines]


def events() -> dict[str, dict[int, float]]:
    """Tag -> step -> value of all files of tensorboard; what a later file says of a step holds."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted((Path("run") / "trackers" / "tensorboard").rglob("events.out.tfevents*")):
        reader = EventAccumulator(str(path)).Reload()
        for tag in reader.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in reader.Scalars(tag)})
    return found


def test_results_of_both_tracks():
    row = {"fedavg (local)": {"hit@5": {"mean": 0.5, "low": 0.1, "high": 0.9}}}
    llm = {"domains": {"crime": {"test": row, "valid": row}}, "macro": {"test": row}}
    assert dict(result_metrics(llm)) == {
        "test/fedavg_local/crime/hit_at_5": 0.5,
        "test/fedavg_local/macro/hit_at_5": 0.5,
    }
    assert dict(result_metrics({"dataset": "ml-100k", "test": row})) == {"test/fedavg_local/ml-100k/hit_at_5": 0.5}


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", ["tensorboard"])
    for name in ("mlflow", "trackio", "wandb"):
        with pytest.raises(ValueError, match=name):
            check(f"tensorboard,{name}")


def test_tensorboard(federate):
    assert federate("--tracker", "tensorboard") == 0
    found = events()
    assert list(found[VALID].values()) == pytest.approx(recorded_scores())
    assert set(found[VALID]) == {1, 2, 3}
    tested = {tag: steps[3] for tag, steps in found.items() if tag.startswith("test/")}
    assert tested == pytest.approx(expected())
    assert {tag.split("/")[1] for tag in tested} == {"fedmf", "popularity", "memoriser"}
    settings = yaml.safe_load(next(Path("run").rglob("hparams.yml")).read_text())
    assert (settings["run.method"], settings["training.embedding_size"]) == ("fedmf", 4)
    assert not {"run.output", "run.tracker"} & set(settings)
    assert "data_hash.toy" in settings


def test_without_a_tracker_there_is_no_folder_of_them(federate):
    assert federate() == 0
    assert not Path("run/trackers").exists()


def test_mlflow(federate):
    mlflow = pytest.importorskip("mlflow")

    def runs():
        client = mlflow.MlflowClient(f"sqlite:///{Path('run/trackers/mlflow.db').absolute()}")
        (experiment,) = client.search_experiments(filter_string="name = 'fedecider'")
        return client, client.search_runs([experiment.experiment_id])

    assert federate("--tracker", "mlflow,tensorboard") == 0
    client, (run,) = runs()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["run.method"] == "fedmf"
    history = {one.step: one.value for one in client.get_metric_history(run.info.run_id, VALID)}
    assert list(history.values()) == pytest.approx(recorded_scores())
    assert {name: value for name, value in run.data.metrics.items() if name.startswith("test/")} == expected()
    assert set(events()[TEST]) == {3}, "both trackers are told"
    assert not Path("mlruns").exists()
    assert not Path("mlflow.db").exists()


def test_wandb_stays_offline(federate):
    pytest.importorskip("wandb")
    assert federate("--tracker", "wandb") == 0
    written = next(Path("run/trackers/wandb").glob("offline-run-*/run-*.wandb")).read_bytes()
    for text in (VALID, TEST, "test/memoriser/toy/hit_at_5", "training.embedding_size"):
        assert text.encode() in written
    assert not Path("wandb").exists()


def test_trackio(federate, monkeypatch):
    if find_spec("trackio") is None:  # importing it here would fix its folder before the run chooses one
        pytest.skip("no trackio")
    monkeypatch.setenv("TRACKIO_DIR", "")  # put back after the test
    monkeypatch.delenv("TRACKIO_DIR")
    assert federate("--tracker", "trackio") == 0
    with sqlite3.connect("run/trackers/trackio/fedecider.db") as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = base.execute("SELECT DISTINCT config FROM configs").fetchall()
    assert {name for name, _, _ in rows} == {"run"}
    found = [(step, json.loads(values)) for _, step, values in rows]
    assert [step for step, values in found if VALID in values] == [1, 2, 3]
    assert next(values for _, values in found if TEST in values)[TEST] == pytest.approx(expected()[TEST])
    assert json.loads(config)["run.method"] == "fedmf"


def test_a_tracker_that_does_not_start_ends_the_run_in_one_line(federate, monkeypatch, capsys):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda *words: 1 / 0)
    assert federate("--tracker", "tensorboard") == 2
    printed = capsys.readouterr().err
    assert "error: cannot start the trackers tensorboard (ZeroDivisionError: division by zero)" in printed
    assert not Path("run").exists()
