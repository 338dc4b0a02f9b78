"""The Python API: the same run as the command line, read as frames; callbacks, resuming, own methods, all tracks."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from small_runs import decoder_settings

import fedecider as fd
from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.federation.record import read_json
from fedecider.methods.fedavg import WeightingConfig, client_model, fedavg, scalars

pytestmark = pytest.mark.whole

SETTINGS = {**decoder_settings(), "domains": "crime,comics", "num_rounds": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.fixture(scope="module")
def result(place, seen):
    def watch(round):
        seen.append((round.number, round.clients, round.record["score"], round.state.round, round.is_best))

    return fd.federate(config=SETTINGS, callbacks=[watch], output="runs/api")


def test_the_command_line_gives_the_same_run_bit_for_bit(place, result):
    (place / "small.yaml").write_text(yaml.safe_dump(SETTINGS))
    assert main(["federate", "--config", "small.yaml", "--output", "runs/cli"]) == 0
    ours, theirs = (read_json(place / "runs" / name / "metrics.json") for name in ("api", "cli"))
    for one in (ours, theirs):
        one.pop("seconds", None)
    assert ours["domains"] == theirs["domains"]
    assert fd.load("runs/cli").per_user.equals(result.per_user)


def test_callbacks_see_every_round(result, seen):
    assert [(number, clients, state) for number, clients, _, state, _ in seen] == [
        (1, ["crime", "comics"], 1),
        (2, ["crime", "comics"], 2),
    ]
    assert [score for *_, score, _, _ in seen] == [
        result.rounds.query("round == @number and variant == 'fused'")["ndcg@10"].mean() for number in (1, 2)
    ]
    assert seen[0][-1]


def test_frames(result):
    test = result.metrics.query("client == 'crime' and split == 'test' and metric == 'hit@10'").set_index("entry")
    of_user = result.per_user.query("domain == 'crime' and split == 'test' and variant == 'popularity'")["hit@10"]
    assert test.loc["popularity", "mean"] == pytest.approx(of_user.mean())
    assert test.loc["popularity", "low"] < test.loc["popularity", "mean"] < test.loc["popularity", "high"]
    assert result.table.loc["popularity", "hit@10"] == pytest.approx(
        result.metrics.query("entry == 'popularity' and split == 'test' and metric == 'hit@10' and client != 'macro'")[
            "mean"
        ].mean()
    )
    assert set(result.rounds["round"]) == {1, 2}
    assert result.rounds["loss"].notna().all()
    weights = result.fusion_weights
    kept = json.loads((result.folder.fusion_weights).read_text())
    assert weights.to_numpy().tolist() == kept["alpha"][result.best_round - 1]
    assert list(weights.index) == list(weights.columns) == ["crime", "comics"]


def test_recommenders_from_the_run_from_a_copy_and_from_what_is_published(result, tmp_path):
    history = ["crime-0003", "crime-0005"]
    answer = result.recommender("crime").recommend(history, k=3)
    assert len(answer.items) == 3
    assert fd.load(result.save(tmp_path / "copy")).recommender("crime").recommend(history, k=3) == answer
    folder = result.export(tmp_path / "hub")
    assert not list(folder.rglob("private"))
    plain = fd.Recommender.from_pretrained(folder, "crime")
    without = result.recommender("crime", ensemble=False).recommend(history, k=3)
    assert plain.recommend(history, k=3).items == without.items
    with pytest.raises(ValueError, match="not empty"):
        result.save(folder)


def test_early_stopping_ends_the_run_and_a_stopped_run_goes_on(place, result):
    stopped = fd.federate(config=SETTINGS, output="runs/resumed", callbacks=[lambda round: round.number == 1])
    assert set(stopped.rounds["round"]) == {1}
    again = fd.federate(config=SETTINGS, output="runs/resumed", resume=True)
    assert again.rounds.equals(result.rounds)
    assert again.metrics.equals(result.metrics)


def test_early_stopping_counts_rounds_without_a_gain():
    rounds = [fd.EarlyStopping(2)(fd_round) for fd_round in (_round(2), _round(3), _round(4))]
    assert rounds == [False, False, True]
    with pytest.raises(ValueError, match="at least 1"):
        fd.EarlyStopping(0)


def _round(number):
    from fedecider.engine.run import Round

    class State:
        best_round = 2

    return Round(number, {}, State(), None, [])


def test_data_in_memory_are_those_of_a_folder(place, result):
    data = fd.FederatedData(sample_domains(["crime", "comics"]))
    settings = {name: value for name, value in SETTINGS.items() if name != "domains"}
    ours = fd.federate(data, config=settings)
    assert ours.clients == ["crime", "comics"]
    assert ours.metrics.equals(result.metrics)
    assert "synthetic" in ours.verdict
    folder = ours.folder.root
    assert folder.is_dir()
    del ours
    assert not folder.exists()


def test_a_method_of_ones_own_beside_built_in_ones(place):
    from fedecider.methods import METHODS, Method

    class AverageConfig(WeightingConfig):
        pass

    mine = Method(AverageConfig, fedavg, client_model, scalars)
    found = fd.compare(["fedavg", mine], config={**SETTINGS, "num_rounds": 1}, seeds=1, output="runs/compared")
    assert list(found.table.index) == ["fedavg", "average", "alone"]
    assert found.table.iloc[0]["ndcg@10"] == found.table.iloc[1]["ndcg@10"]
    assert "average" not in METHODS


def test_the_embedding_track_on_one_domain(place):
    data = fd.FederatedData(sample_domains(["crime"]))
    found = fd.federate(data, "fedmf", num_rounds=2, local_epochs=1)
    assert found.clients == ["crime"]
    assert {"fedmf", "popularity"} <= set(found.table.index)
    assert found.recommendation in found.verdict.lower()
    assert isinstance(found.fusion_weights, pd.DataFrame)
    with pytest.raises(ValueError, match="expected one that hands recommenders over"):
        found.recommender("crime")
    with pytest.raises(ValueError, match="expected one: every user is a client"):
        fd.federate(fd.FederatedData(sample_domains(["crime", "comics"])), "fedmf")


def test_methods_that_know_item_ids_alone(place):
    data = fd.FederatedData(sample_domains(["crime", "comics"]))
    found = fd.federate(data, "fedsasrec", num_rounds=1)
    assert found.clients == ["crime", "comics"]
    assert "fedsasrec" in found.verdict


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_round": 3}, "num_round"),
        ({"method": "fedavgg"}, "got method 'fedavgg'"),
        ({"resume": True, "output": None}, "got resume without output"),
        ({"data": 7}, "got data of the type int"),
        ({"method": 7}, "got the method 7"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"output": ""}, "got output '', expected the output directory"),
        ({"callbacks": 5}, "got callbacks 5, expected a list of functions"),
        ({"callbacks": "x"}, "got callbacks 'x', expected a list of functions"),
        ({"callbacks": [print, 5]}, "got callbacks .*, expected a list of functions"),
    ],
)
def test_bad_input_is_one_sentence(place, arguments, words):
    with pytest.raises(ValueError, match=words):
        fd.federate(**{"config": SETTINGS, "output": "runs/refused", **arguments})
    assert not Path("runs/refused").exists()
    assert not Path("run.json").exists()


def test_callbacks_of_a_generator_are_asked_in_every_round(place):
    seen = []
    fd.federate(config=SETTINGS, num_rounds=2, callbacks=(one for one in [lambda round: seen.append(round.number)]))
    assert seen == [1, 2]


def test_several_processes_need_a_folder_that_all_of_them_know(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got several processes without output"):
        fd.federate(config=SETTINGS)


def test_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run in"):
        fd.load(tmp_path)
    for folder in (5, None):
        with pytest.raises(ValueError, match=f"got {folder}, expected the path of an output directory"):
            fd.load(folder)


def test_the_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """As they stand, but for settings that make them short."""
    monkeypatch.chdir(tmp_path)
    domain = sample_domains(["crime"])["crime"]
    titles = ["A title that was bought", *domain.titles[1:]]
    pd.DataFrame({"item": domain.item_keys, "title": titles}).to_csv("products.csv", index=False)
    users = list(zip(domain.clients.users, domain.clients.sequences, strict=True))
    for name, part in (("north", users[::2]), ("south", users[1::2])):
        rows = [(user, domain.item_keys[item], place) for user, items in part for place, item in enumerate(items)]
        pd.DataFrame(rows, columns=["user", "item", "time"]).to_csv(f"{name}.csv", index=False)
    settings = {**decoder_settings(), "num_rounds": 1, "domains": "*"}
    short = fd.federate
    monkeypatch.setattr(fd, "federate", lambda data: short(data, config=settings, progress=False))
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    exec(compile(lines, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Gain: " in printed
    assert printed.count("Recommendation(") == 10
