"""Settings of small runs of the cross-silo track."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

from fedecider.cli.main import main
from fedecider.data.sample import sample_domains

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


def later_purchases(folder: Path) -> Path:
    """A file for an update: of crime's sample, a purchase of 30 customers each, after all others."""
    crime = sample_domains(["crime"], 0)["crime"]
    last = max(max(times) for times in crime.clients.timestamps)
    rows = [(user, crime.item_keys[place], last + 9) for place, user in enumerate(crime.clients.users[:30])]
    pd.DataFrame(rows, columns=["user", "item", "time"]).to_parquet(folder / "new.parquet")
    return folder / "new.parquet"
