"""The teacher beside its student, on either held-out item (`zero_shot`, benchmarks/student_and_teacher.py)."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from fedecider.cross_silo import entries as baselines
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.entries import STUDENT, TEACHER, zero_shot
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.data.sample import sample_domains
from fedecider.running.stages import Stage
from fedecider.testing.llm_contract import tiny_t5

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "methods"))
from toy_recommender import toy_recommender, with_clients  # noqa: E402

PLACE = {"valid": 3, "test": 7}


@pytest.mark.parametrize("split", list(PLACE))
def test_both_rows_are_ranked_on_the_split_that_is_asked_for(monkeypatch, tmp_path, split):
    domains = sample_domains(("crime", "comics"), 0)
    monkeypatch.setattr(baselines, "load_backbone", lambda folder, tokenizer: tiny_t5())
    ranked = []

    def positions_of(client):
        def positions(model, split, share):
            ranked.append(model)
            return torch.tensor([PLACE[split]])

        return positions

    models = with_clients(toy_recommender(list(domains)), positions=positions_of)
    artifacts = BaseArtifacts(domains, {}, Stage(tmp_path, True), Stage(tmp_path, True), domains)
    settings = parse_settings(["--teacher_row", "true"])
    found = zero_shot(settings, artifacts, models, split)
    assert {row: {name: int(p) for name, p in places.items()} for row, places in found.items()} == {
        TEACHER: {"crime": PLACE[split], "comics": PLACE[split]},
        STUDENT: {"crime": PLACE[split], "comics": PLACE[split]},
    }
    assert [one is models.base.model for one in ranked] == [True, True, False, False]


def test_seeds_and_their_mean_are_told(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    main = runpy.run_path(str(REPOSITORY / "benchmarks" / "student_and_teacher.py"))["main"]
    asked = []

    def scores(words, seed):
        asked.append((words, seed))
        return {TEACHER: 0.1 + 0.1 * seed, STUDENT: 0.09 + 0.12 * seed}

    monkeypatch.setitem(main.__globals__, "scores", scores)
    output = tmp_path / "found.md"
    words = ["--seeds", "0,1", "--output", str(output), "--set", "--domains", "crime"]
    monkeypatch.setattr("sys.argv", ["student_and_teacher.py", *words])
    main()
    assert asked == [(["--domains", "crime"], 0), (["--domains", "crime"], 1)]
    told = output.read_text()
    assert told in capsys.readouterr().out
    assert told.splitlines()[-3:] == [
        "| 0 | 0.1000 | 0.0900 | 90.0 % |",
        "| 1 | 0.2000 | 0.2100 | 105.0 % |",
        "| mean | 0.1500 | 0.1500 | 100.0 % |",
    ]
