"""Nobody is public: the backbone learns from item texts and synthetic histories alone, and all that follows runs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fedecider.cli.main import main as command
from fedecider.cross_silo import base_stages
from fedecider.cross_silo.settings import PretrainConfig, RunConfig
from fedecider.data.domain import NO_EVENTS
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from idgen.config import BackboneConfig, SampleConfig
from idgen.samples import num_samples, train_batches

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CPU = torch.device("cpu")
DECODER = PretrainConfig(
    ids="item",
    samples=SampleConfig(templates="history", max_history=6, max_source_tokens=20, synthetic_share=0.3),
    text_encoder="tfidf",
    backbone=BackboneConfig(kind="decoder", embedding_init="text", d_model=16, num_layers=2),
)
SENTENCES = dataclasses.replace(
    DECODER,
    ids="keywords",
    samples=SampleConfig(templates="compact", max_history=3, synthetic_share=0.3),
    backbone=BackboneConfig(d_model=16, num_layers=1),
)


def without_public(names=("crime", "comics")):
    """The sample's first readers, none of them public."""
    return {
        name: dataclasses.replace(
            domain, clients=type(domain.clients)(*(column[:40] for column in domain.clients)), public=NO_EVENTS
        )
        for name, domain in sample_domains(names).items()
    }


@pytest.mark.parametrize("settings", [DECODER, SENTENCES], ids=["decoder", "sentences"])
def test_an_epoch_is_one_synthetic_history_for_each_item(settings, tmp_path):
    domains = without_public()
    made = base_stages.begin(RunConfig(cache=str(tmp_path), pretrain=settings), domains, CPU)
    num_items = sum(len(domain.item_keys) for domain in domains.values())
    assert num_samples(made.tasks) == num_items
    batches = list(train_batches(made.tasks, 64, torch.Generator().manual_seed(1)))
    again = list(train_batches(made.tasks, 64, torch.Generator().manual_seed(1)))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
    assert sum(len(batch["input_ids"]) for batch in batches) == num_items
    labels = [batch["row_labels" if settings is DECODER else "labels"] for batch in batches]
    assert all((label != -100).any(1).all() for label in labels)
    if settings is DECODER:  # the targets are items of both catalogues, and one token each
        tokens = {token for label in labels for token in label[label != -100].tolist()}
        for task in made.tasks:
            own = {token for tokens in task.item_ids.token_ids for token in tokens}
            assert np.mean([token in tokens for token in own]) > 0.4


def test_what_leaves_nothing_to_learn_from_is_refused(tmp_path):
    domains = without_public()
    none = dataclasses.replace(DECODER, samples=dataclasses.replace(DECODER.samples, synthetic_share=0.0))
    with pytest.raises(
        ValueError, match=r"got no public user in crime, comics, expected some, .*synthetic_share above 0"
    ):
        base_stages.begin(RunConfig(cache=str(tmp_path), pretrain=none), domains, CPU)
    turns = dataclasses.replace(SENTENCES, ids="generator", alternating_phases=1)
    with pytest.raises(ValueError, match=r"expected some with alternating_phases 1"):
        base_stages.begin(RunConfig(cache=str(tmp_path), pretrain=turns), domains, CPU)


@pytest.mark.whole
def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_domains(without_public(), tmp_path / "data")
    content = yaml.safe_load((CONFIGS / "demo_causal.yaml").read_text())
    content |= {"num_rounds": 1, "local_epochs": 1, "num_eval_users": 20, "data": "data", "domains": "crime,comics"}
    content["pretrain"]["train"] |= {"max_steps": 30}
    content["distill"] |= {"epochs": 1}
    Path("toy.yaml").write_text(yaml.safe_dump(content))
    assert command(["federate", "--config", "toy.yaml", "--output", "run"]) == 0
    rows = json.loads(Path("run/metrics.json").read_text())["domains"]["crime"]["test"]
    assert {"fedecider + ensemble", "zero-shot student", "last-item co-occurrence", "memoriser"} <= rows.keys()
    assert Path("run/report.html").is_file()
    assert "none" in Path("run/adapters/crime/README.md").read_text()
    assert command(["evaluate", "--run", "run"]) == 0
