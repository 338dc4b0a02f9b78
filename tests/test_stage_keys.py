"""What decides whether pre-training and distillation are reused."""

import dataclasses

import pytest
import torch

from fedecider.cross_silo import base_stages
from fedecider.cross_silo.base_stages import distill_stage, pretrain_stage
from fedecider.cross_silo.settings import RunConfig
from fedecider.data.sample import sample_domains
from fedecider.running.stages import Stage

DOMAINS = sample_domains(["crime", "comics"], 0)
CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Settings whose stages write one file."""
    for name in ("_pretrain", "_distill"):
        monkeypatch.setattr(base_stages, name, lambda *given: (given[-3] / "model.txt").write_text("weights"))
    return RunConfig(domains="crime,comics", cache=str(tmp_path))


def test_pretraining_is_made_anew_for_another_seed_setting_data_or_order(config):
    first = pretrain_stage(config, DOMAINS, CPU)
    assert not first.reused
    assert pretrain_stage(config, DOMAINS, CPU) == Stage(first.folder, True)
    others = [
        (dataclasses.replace(config, seed=1), DOMAINS),
        (dataclasses.replace(config, pretrain=dataclasses.replace(config.pretrain, alternating_phases=2)), DOMAINS),
        (config, sample_domains(["crime", "comics"], 1)),
        (config, dict(reversed(DOMAINS.items()))),
    ]
    folders = {pretrain_stage(other, domains, CPU).folder for other, domains in others}
    assert len(folders | {first.folder}) == 5


def test_distillation_is_made_anew_for_another_seed_teacher_or_setting(config, tmp_path):
    teacher, other_teacher = Stage(tmp_path / "pretrain-a", True), Stage(tmp_path / "pretrain-b", True)
    first = distill_stage(config, teacher, DOMAINS, CPU)
    assert distill_stage(config, teacher, DOMAINS, CPU).reused
    more_epochs = dataclasses.replace(config.distill, epochs=config.distill.epochs + 1)
    folders = {
        distill_stage(dataclasses.replace(config, seed=1), teacher, DOMAINS, CPU).folder,
        distill_stage(config, other_teacher, DOMAINS, CPU).folder,
        distill_stage(dataclasses.replace(config, distill=more_epochs), teacher, DOMAINS, CPU).folder,
    }
    assert len(folders | {first.folder}) == 4
