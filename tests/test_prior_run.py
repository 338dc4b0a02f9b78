"""A run whose items are ranked by what the history adds: rounds, hybrid, hand-over and recommendations agree."""

import json

import pytest
import yaml
from test_pipeline import SETTINGS

from fedecider.cli.main import main
from fedecider.models.recommender import Recommender

SMALL = {"num_rounds": 1, "hybrid": {"kind": "mixture", "sources": "own"}, "domains": "crime,comics"}


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """Two runs that differ in the prior alone."""
    folder = tmp_path_factory.mktemp("prior")
    pretrain = {**SETTINGS["pretrain"], "train": {"max_steps": 30, "learning_rate": 3e-3, "batch_size": 64}}
    (folder / "toy.yaml").write_text(yaml.safe_dump({**SETTINGS, **SMALL, "pretrain": pretrain}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for weight in ("0", "0.8"):
            words = ("--prior_correction", weight, "--output", f"runs/{weight}")
            assert main(["federate", "--config", "toy.yaml", *words]) == 0
    return folder


@pytest.mark.slow
def test_the_prior_changes_what_is_ranked_and_evaluate_finds_it_again(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    found = {weight: json.loads((playground / f"runs/{weight}/metrics.json").read_text()) for weight in ("0", "0.8")}
    for row in ("fedecider (post_broadcast)", "zero-shot student", "fedecider + hybrid"):
        tests = [content["domains"]["crime"]["test"][row] for content in found.values()]
        assert tests[0] != tests[1], row
    for row in ("hybrid without a model", "text neighbours"):  # know nothing of the model
        tests = [content["domains"]["crime"]["test"][row] for content in found.values()]
        assert tests[0] == tests[1], row
    assert main(["evaluate", "--run", "runs/0.8"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_recommendations_take_the_prior_off(playground):
    run = {weight: playground / "runs" / weight for weight in ("0", "0.8")}
    loaded = {weight: Recommender.from_pretrained(path, "crime", hybrid=False) for weight, path in run.items()}
    history = [loaded["0"].items.titles[3], loaded["0"].items.titles[9]]
    plain, corrected = (one.recommend(history, 20) for one in loaded.values())
    assert [item.key for item in plain] != [item.key for item in corrected]
    trie = loaded["0.8"].task.trie
    assert loaded["0"].task.trie.score_N is None
    assert trie.score_N is not None
    assert float(trie.score_N.min()) >= 0.0  # log-probabilities are below 0, and are taken off
    both = {item.key: item.score for item in plain}
    for item in corrected:
        if item.key in both:  # the adapters are those of one round: near, not the same
            assert item.score > both[item.key]


@pytest.mark.slow
def test_the_card_says_that_its_program_ranks_otherwise(playground):
    cards = {weight: (playground / f"runs/{weight}/adapters/crime/README.md").read_text() for weight in ("0", "0.8")}
    assert "prior weight" in cards["0.8"]
    assert "prior weight" not in cards["0"]


def test_prompts_without_words_are_refused_before_anything_is_built(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--config", "configs/demo_causal.yaml", "--domains", "crime,comics", "--prior_correction", "0.5"]
    assert main(["federate", *words, "--output", "runs/none"]) == 2
    assert "empty without a history" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
