"""The command tune in both tracks: trials on validation items alone, kills, failures, what is left, bad input."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import yaml
from toy_ratings import REPOSITORY, options_of, script, write_ratings

from embedding_fr import commands
from embedding_fr import run as embedding_tune
from embedding_fr.methods import METHODS
from fedecider.cli.tune import main
from fedecider.cross_silo import federate as llm_tune
from fedecider.cross_silo.command_line import parse_settings
from fedecider.federation.record import Recorder, read_json, read_records
from fedecider.running.settings_files import CONFIGS

pytestmark = pytest.mark.whole

DEMO = CONFIGS / "demo_causal.yaml"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return options_of(write_ratings(tmp_path_factory.mktemp("raw")))


@pytest.fixture
def search(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words, method="fedmf") -> int:
        common = ["--method", method, *data, "--embedding_size", "4", "--num_threads", "1", "--num_rounds", "3"]
        return main([*common, *(str(word) for word in words)])

    return run


def test_a_search_over_settings_without_a_bound_goes_on(search):
    """One of FedNear's settings is infinite."""
    words = ("--output", "run", "--num_rounds", 1)
    assert search("--trials", 1, *words, method="fednear") == 0
    assert search("--trials", 2, *words, "--resume", "true", method="fednear") == 0


def trials(root="run") -> list[tuple]:
    """(setting, validation score or None) of every trial, as optuna reads them."""
    backend = optuna.storages.journal.JournalFileBackend(str(Path(root) / "journal.jsonl"))
    (study,) = optuna.get_all_study_names(storage := optuna.storages.JournalStorage(backend))
    found = optuna.load_study(study_name=study, storage=storage).trials
    return [(trial.user_attrs["setting"], trial.value) for trial in found if trial.state.is_finished()]


def test_a_search_leaves_trials_a_page_and_settings_that_a_run_takes(search, data, capsys):
    assert search("--trials", 11, "--output", "run") == 0
    printed = capsys.readouterr().out
    found = trials()
    assert len(found) == 11
    assert [setting for setting, _ in found[:5]] == list(METHODS["fedmf"].grid)
    assert "trial 11/11: " in printed
    settings, scores = zip(*found, strict=True)
    best = scores.index(max(scores))
    page = Path("run/tune.md").read_text()
    assert f"| {best + 1} | **{scores[best]:.4f}** |" in page
    assert "## What the differences come from" in page
    assert "| local_epochs | 1 to 10 | 10 |" in page
    assert {path.name for path in Path("run").iterdir()} == {
        *("run.json", "journal.jsonl", "tune.md", "best.yaml", "trials", ".lock")
    }
    assert [path.name for path in Path("run/trials/011").iterdir()] == ["rounds.jsonl"], "nothing about test items"
    start = commands.parse_settings(["--config", "run/best.yaml"])
    for name, value in settings[best].items():
        assert getattr(start.training, name) == value
    assert script("federate").main(["--config", "run/best.yaml", "--output", "best"]) == 0
    assert read_json(Path("best/metrics.json"))["best_valid_ndcg@10"] == scores[best]
    assert f"fedecider federate --config {Path('run/best.yaml')}" in printed


def test_a_search_that_was_killed_is_the_same_as_one_that_was_not(search, monkeypatch, capsys):
    words = ["--trials", 8, "--checkpoint_every", 1]
    assert search(*words, "--output", "whole") == 0

    class Killed(BaseException):
        pass

    for number, round in ((3, 2), (7, 3)):
        kept = Recorder.write

        def write(self, record, place=f"{number:03d}", round=round, kept=kept):
            if self.path.parent.name == place and record["round"] == round:
                raise Killed
            kept(self, record)

        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "write", write)
            with pytest.raises(Killed):
                search(*words, "--output", "run", "--resume", str(number > 3).lower())
        assert len(trials()) == number - 1
        before = Path(f"run/trials/{number:03d}/rounds.jsonl").read_text()
        assert list(Path(f"run/trials/{number:03d}/checkpoints").iterdir())
    damaged = Path("run/trials/007/rounds.jsonl")
    damaged.write_text(before.replace('"round": 1', '"round":  1'))
    assert search(*words, "--output", "run", "--resume", "true") == 2, "what cannot go on is no trial that failed"
    assert "007/rounds.jsonl" in capsys.readouterr().err
    assert len(trials()) == 6
    damaged.write_text(before)
    Path("run/journal.jsonl.lock").symlink_to("run/journal.jsonl")  # optuna's own lock, left behind by a kill
    capsys.readouterr()
    assert search(*words, "--output", Path("run").resolve(), "--resume", "true") == 0
    assert "6 trials are there already" in capsys.readouterr().out
    assert trials() == trials("whole")
    after = Path("run/trials/007/rounds.jsonl").read_text()
    assert after.startswith(before), "it went on after its second round: seconds are the same"
    assert (before.count("\n"), after.count("\n")) == (2, 3)
    assert search("--trials", 10, "--checkpoint_every", 1, "--output", "run", "--resume", "true") == 0
    assert trials()[:8] == trials("whole")
    assert len(trials()) == 10


def test_failed_trials_are_kept_with_their_sentence(search, monkeypatch, capsys):
    whole = METHODS["fedmf"]

    def build(federation, training, config):
        if training.init_std == 0.1:
            raise ValueError("got a loss that is not finite, expected finite ones")
        if training.local_epochs == 1:
            raise MemoryError
        return whole.build(federation, training, config)

    monkeypatch.setitem(METHODS.own, "fedmf", whole._replace(build=build))
    assert search("--trials", 7, "--output", "run") == 0
    scores = [valid for _, valid in trials()]
    assert [valid is None for valid in scores[:5]] == [False, True, True, True, True]
    assert None not in scores[5:]
    page = Path("run/tune.md").read_text()
    assert "7 trials, 4 of them failed" in page
    assert "| 2 | failed | - |" in page
    assert "local_epochs 1 (out of memory) |" in page
    assert "init_std 0.1 (got a loss that is not finite, expected finite ones) |" in page
    assert "failed: out of memory" in capsys.readouterr().out


def test_a_search_none_of_whose_trials_finished_ends_with_code_2(search, monkeypatch, capsys):
    real, calls = embedding_tune.set_up, []

    def set_up(*words):
        calls.append(words)
        if len(calls) > 1:
            raise ValueError("got nobody, expected somebody")
        return real(*words)

    monkeypatch.setattr(embedding_tune, "set_up", set_up)
    assert search("--trials", 2, "--output", "run") == 2
    assert "error: no trial of fedmf finished, expected one at least: see run/tune.md" in capsys.readouterr().err
    assert Path("run/tune.md").is_file()
    assert not Path("run/best.yaml").exists()


def test_test_items_are_not_looked_at(search, monkeypatch):
    """With other test items all trials are what they were."""
    assert search("--trials", 7, "--output", "run") == 0
    load = embedding_tune.load_interactions

    def other_test_items(*words, **options):
        found = load(*words, **options)
        last = [next(i for i in range(found.num_items) if i not in user) for user in map(set, found.sequences)]
        changed = [[*user[:-1], item] for user, item in zip(found.sequences, last, strict=True)]
        return replace(found, sequences=changed)

    monkeypatch.setattr(embedding_tune, "load_interactions", other_test_items)
    assert search("--trials", 7, "--output", "other") == 0
    assert read_json(Path("run/run.json"))["data"] != read_json(Path("other/run.json"))["data"]
    assert trials("other") == trials("run")


def test_what_is_given_on_the_command_line_is_not_searched(search):
    Path("start.yaml").write_text("learning_rate: 0.2\ninit_std: 0.05\n")
    assert (
        search("--config", "start.yaml", "--local_epochs", 3, "--init_std=0.2", "--trials", 4, "--output", "run") == 0
    )
    settings = [setting for setting, _ in trials()]
    assert settings[0] == {}
    assert all(set(setting) == {"learning_rate"} for setting in settings[1:])
    best = yaml.safe_load(Path("run/best.yaml").read_text())
    assert (best["local_epochs"], best["init_std"]) == (3, 0.2)
    record = read_json(Path("run/run.json"))["config"]
    assert list(record["tune"]["space"]) == ["learning_rate"]
    assert record["training"]["learning_rate"] == 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", 0], "got trials 0"),
        (["--trials", "many"], "trials"),
        (["--tracker", "tensorboard"], "got --tracker with a search"),
        (["--learning_rate", 0.1, "--init_std", 0.1, "--local_epochs", 1], "got nothing to search"),
        (["--num_negatives", 127], "got num_negatives 127"),
        (["--resume", "true"], "got resume without output"),
        (["--domains", "crime"], "got domains"),
    ],
)
def test_bad_input_ends_with_code_2_and_leaves_nothing(words, message, search, capsys):
    output = [] if "--resume" in words else ["--output", "run"]
    assert search(*words, *output) == 2
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


def test_another_search_and_a_damaged_journal_are_refused(search, capsys):
    assert search("--trials", 1, "--output", "run") == 0
    assert search("--trials", 1, "--output", "run") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert search("--trials", 1, "--output", "run", "--resume", "true", "--learning_rate", 0.3) == 2
    assert "holds a run of another configuration" in capsys.readouterr().err
    for text in ('{"op_code": 4}\n', "no journal\n"):
        Path("run/journal.jsonl").write_text(text)
        assert search("--trials", 1, "--output", "run", "--resume", "true") == 2
        assert "got a damaged run/journal.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_try_what_one_tries(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--method", "fedmf", *data, "--embedding_size", "4", "--num_threads", "1", "--num_rounds", "2"]
    assert main([*words, "--trials", "6", "--output", "one"]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    program = [*launch, "-m", "fedecider.cli.main", "tune", *words, "--output", "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    for number, resume in (("4", "false"), ("6", "true")):
        command = [*program, "--trials", number, "--resume", resume]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert trials("two") == trials("one")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A folder with small settings of the cross-silo track and a cache of its stages."""
    folder = tmp_path_factory.mktemp("llm")
    content = yaml.safe_load(DEMO.read_text())
    content |= {"num_rounds": 2, "local_epochs": 1, "lora_rank": 2, "domains": "crime,comics"}
    content |= {"lora_targets": "attention", "ensemble": {"kind": "none"}, "teacher_row": False, "num_threads": 1}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 16}
    content["pretrain"]["train"] |= {"max_steps": 5}
    content["distill"] |= {"epochs": 1}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.mark.slow
def test_a_search_of_the_llm_track(llm, monkeypatch, capsys):
    monkeypatch.chdir(llm)
    words = ["--config", "toy.yaml", "--method", "fedprox", "--trials"]
    assert main([*words, "3", "--output", "run"]) == 0
    settings, scores = zip(*trials(), strict=True)
    assert settings == ({}, {"mu": 0.001}, {"mu": 0.1})
    assert all(0.0 < valid < 1.0 for valid in scores)
    assert [record["round"] for record in read_records(Path("run/trials/003/rounds.jsonl"))] == [1, 2]
    assert not list(Path("run").rglob("metrics.json"))
    best = scores.index(max(scores))
    given, chosen = parse_settings(words[:4]), parse_settings(["--config", "run/best.yaml"])
    assert chosen.method == replace(given.method, **settings[best])
    assert (chosen.run, chosen.training, chosen.ranking) == given[:3]
    assert "distillation built" in capsys.readouterr().out

    load = llm_tune.load_data

    def other_test_items(run):
        return {name: with_other_test_items(domain) for name, domain in load(run).items()}

    monkeypatch.setattr(llm_tune, "load_data", other_test_items)
    assert main([*words, "3", "--output", "other"]) == 0
    assert read_json(Path("run/run.json"))["data"] != read_json(Path("other/run.json"))["data"]
    assert trials("other") == trials("run")


def with_other_test_items(domain):
    """The last event of every user is another item that they do not know."""
    events = domain.clients
    last = [next(item for item in range(len(domain.item_keys)) if item not in user) for user in events.sequences]
    changed = [[*user[:-1], item] for user, item in zip(events.sequences, last, strict=True)]
    return replace(domain, clients=events._replace(sequences=changed))
