"""Settings of small runs of the cross-silo track."""

from pathlib import Path

import pytest
import yaml

from fedecider.cli.main import main

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo_causal.yaml"
SMALL = {"num_rounds": 1, "local_epochs": 1, "num_eval_users": 40, "lora_rank": 2, "update_scales": "1"}


def decoder_settings() -> dict:
    content = {**yaml.safe_load(DEMO.read_text()), **SMALL}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 32}
    content["pretrain"]["train"] |= {"max_steps": 10}
    content["distill"] |= {"epochs": 1}
    return content


def finished(folder: Path, settings: dict) -> Path:
    """``folder`` with these settings in ``toy.yaml``, the stages in ``.cache`` and a run of them, ``runs/whole``."""
    (folder / "toy.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["federate", "--config", "toy.yaml", "--output", "runs/whole"]) == 0
    return folder
