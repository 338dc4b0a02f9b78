"""Several training runs of one set-up: figures are means over customers and runs, the first one is handed over."""

import json
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from small_runs import decoder_settings

import fedecider as fd
from fedecider.cli.main import main

pytestmark = pytest.mark.whole
WORDS = ("federate", "--config", "toy.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two seeds, and each of them by itself."""
    root = tmp_path_factory.mktemp("seeds")
    settings = {**decoder_settings(), "num_rounds": 1, "domains": "crime,comics", "method": "fedavg"}
    settings |= {"ensemble": {"kind": "logit"}}
    (root / "toy.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main([*WORDS, "--seeds", "2", "--output", "both"]) == 0
        for seed in ("0", "1"):
            assert main([*WORDS, "--seed", seed, "--output", f"run{seed}"]) == 0
        yield root


def metrics(run: str) -> dict:
    return json.loads(Path(run, "metrics.json").read_text())


def test_figures_are_the_means_of_the_runs_and_the_first_one_is_handed_over(folder):
    both, first, second = map(metrics, ("both", "run0", "run1"))
    assert both["seeds"] == [0, 1]
    for entry in ("fedavg + ensemble", "local + ensemble", "popularity"):
        for client in ("crime", "comics"):
            means = [one["domains"][client]["test"][entry]["ndcg@10"]["mean"] for one in (first, second)]
            assert both["domains"][client]["test"][entry]["ndcg@10"]["mean"] == pytest.approx(fmean(means))
    entries = [one["macro"]["test"] for one in (first, second)]
    gains = [one["fedavg + ensemble"]["hit@10"]["mean"] - one["local + ensemble"]["hit@10"]["mean"] for one in entries]
    assert both["seed_gains"] == pytest.approx(gains)
    adapters = [Path(run, "adapters", "crime", "adapter_model.safetensors") for run in ("both", "run0")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert not Path("both/seeds/1/adapters").exists()


def test_the_answer_is_over_all_runs_and_the_same_everywhere(folder, capsys):
    result = fd.load("both")
    assert "2 training runs" in result.verdict
    assert "one training run" in fd.load("run0").verdict
    page = Path("both/report.html").read_text()
    assert all(line.partition("&")[0] in page for line in result.verdict.splitlines()[:2])
    assert main([*WORDS, "--seeds", "2", "--output", "both", "--resume", "true"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 25
    assert said.rstrip().endswith(result.verdict)
    asked = {"config": yaml.safe_load(Path("toy.yaml").read_text()), "seeds": 2, "output": "table"}
    compared = fd.compare(["fedavg"], **asked)
    assert (compared.recommendation, compared.verdict) == (result.recommendation, result.verdict)
    assert list(compared.table.index) == ["fedavg", "alone"]
    assert fd.compare(["fedavg"], **asked).verdict == compared.verdict  # of the runs that are there


def test_noise_is_not_spent_twice_unasked(folder, capsys):
    noise = ("--user_privacy.clip", "1", "--user_privacy.noise_scale", "1")
    assert main([*WORDS, *noise, "--seeds", "2", "--output", "noised"]) == 2
    assert "every training run spends the epsilon again" in capsys.readouterr().err
