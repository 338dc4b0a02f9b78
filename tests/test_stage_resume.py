"""Pre-training and distillation that are killed go on where they were when the command is started again."""

import dataclasses
import re
from contextlib import contextmanager

import pytest
import torch

from distill.train import DistillConfig
from fedecider.cross_silo import base_stages
from fedecider.cross_silo.base_stages import distill_stage, kept_step, pretrain_stage
from fedecider.cross_silo.settings import PretrainConfig, RunConfig
from fedecider.data.sample import sample_domains
from fedecider.federation.checksums import SUMS_FILE
from idgen import backbone_training, checkpoints, training
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig

pytestmark = pytest.mark.whole

DOMAINS = sample_domains(["crime", "comics"], 0)
SAMPLES = SampleConfig(templates="history", max_history=8, max_source_tokens=24)
PRETRAIN = PretrainConfig(
    ids="item",
    text_encoder="tfidf",
    samples=SAMPLES,
    backbone=BackboneConfig(kind="decoder", embedding_init="text", d_model=16, num_layers=2),
    train=BackboneTraining(batch_size=64, max_steps=11),
)


class Killed(Exception):
    pass


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Both stages in a cache of this name, killed at a step of the training with this title; and what was told."""
    monkeypatch.setattr(training, "NOTE_EVERY", 2)
    monkeypatch.setattr(checkpoints, "EVERY_S", 0.0)
    monkeypatch.setattr(backbone_training, "VALIDATION_SHARE", 10.0)  # so that so few steps are enough for it

    def stages(cache, title=None, step=None):
        told = []

        @contextmanager
        def reports(name, enabled):
            def report(done, total, note=""):
                told.append((name, done, note))
                if (name, done) == (title, step) and note != "goes on":
                    raise Killed

            yield report

        monkeypatch.setattr(base_stages, "progress", reports)
        config = RunConfig(
            protocol="strict",
            domains="crime,comics",
            cache=str(tmp_path / cache),
            pretrain=PRETRAIN,
            distill=DistillConfig(epochs=1, batch_size=64),
        )
        teacher = pretrain_stage(config, DOMAINS, torch.device("cpu"))
        return teacher, distill_stage(config, teacher, DOMAINS, torch.device("cpu")), told

    return stages


def weights(stage):
    """Checksums of the files that hold no times."""
    lines = (stage.folder / SUMS_FILE).read_text().splitlines()
    return [line for line in lines if not line.endswith("report.json")]


@pytest.mark.parametrize(("title", "step", "goes_on"), [("backbone", 7, 6), ("distillation", 3, 2)])
def test_a_killed_stage_goes_on_and_ends_with_the_same_files(build, tmp_path, title, step, goes_on):
    expected = build("never killed")
    assert not any(note == "goes on" for *_, note in expected[2])
    with pytest.raises(Killed):
        build("killed", title, step)
    begun = [path.name for path in (tmp_path / "killed").iterdir() if path.name.startswith(".")]
    assert len(begun) == 1
    assert begun[0].endswith(".begun")
    *stages, told = build("killed")
    assert [one for one in told if one[2] == "goes on"] == [(title, goes_on, "goes on")]
    assert all(weights(found) == weights(one) for found, one in zip(stages, expected[:2], strict=True))
    assert not any(path.name.startswith(".") for path in (tmp_path / "killed").iterdir())
    assert all(stage.reused for stage in build("killed")[:2])


def test_a_teacher_tells_which_of_its_steps_it_is(build, monkeypatch):
    told = kept_step(build("validated")[0])
    score = r"0\.\d{4}"
    where = rf"\(.*{score} at the .*; last items of 80 public users\)"
    assert re.fullmatch(rf"kept step \d+ of 11, public validation ndcg@10 {score} {where}", told)
    monkeypatch.setattr(backbone_training, "VALIDATION_SHARE", 0.1)
    told = kept_step(build("unvalidated")[0])
    assert told == "kept the last of 11 steps: too few public users or steps to select by validation"


def test_other_settings_do_not_go_on_with_it(build, monkeypatch):
    with pytest.raises(Killed):
        build("cache", "backbone", 7)
    monkeypatch.setitem(
        globals(),
        "PRETRAIN",
        dataclasses.replace(PRETRAIN, train=dataclasses.replace(PRETRAIN.train, table_lr_multiplier=0.9)),
    )
    assert not any(note == "goes on" for *_, note in build("cache")[2])
