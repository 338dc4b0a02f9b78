"""Local training through DeepSpeed in one process against the plain loop; each run is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_causal import tiny_causal
from toy_recommender import on, toy_recommender

from fedecider.methods.local_training import ProximalTerm, train_locally
from fedecider.models.adapters import LoraSettings, attach_lora

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("sharded_program.py")


def trained(folder, config=""):
    """What the program leaves in ``folder``; through DeepSpeed where a config is named."""
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if config:
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        file = str(REPOSITORY / "configs" / "deepspeed" / f"{config}.json")
        env |= {**place, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file}
    command = [sys.executable, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "state.safetensors"), json.loads((folder / "records.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_two_rounds_through_deepspeed_equal_the_plain_ones(config, plain, tmp_path):
    """Plain LoRA, then the fusion with its weights; evaluations in between; the program reloads what it exports."""
    pytest.importorskip("deepspeed", reason="deepspeed (the extra gpu) is not installed")
    state, records = trained(tmp_path, config)
    wanted_state, wanted_records = plain
    assert state.keys() == wanted_state.keys()
    for name, tensor in wanted_state.items():
        assert tensor.numel() > 0
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-4)
    for record, wanted in zip(records, wanted_records, strict=True):
        assert record["score"] == pytest.approx(wanted["score"], abs=1e-6)
        for client, other in zip(record["clients"], wanted["clients"], strict=True):
            assert client["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert all(client["loss"] < client["first_loss"] for client in records[0]["clients"])


def test_what_deepspeed_cannot_train_is_refused():
    plugin = SimpleNamespace(zero_stage=3)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    recommender = on(toy_recommender(), deepspeed=accelerator)
    with pytest.raises(ValueError, match="proximal term under DeepSpeed"):
        train_locally(recommender, 0, 1, recommender.start, proximal=ProximalTerm(recommender.start, 0.1))
    recommender.base.model.get_base_model().is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="quantised base with ZeRO-3"):
        train_locally(recommender, 0, 1, recommender.start)
    table = on(recommender, model=attach_lora(tiny_causal(tie_word_embeddings=True), LoraSettings(2, ("table",))))
    with pytest.raises(ValueError, match="lora_targets table with ZeRO-3"):
        train_locally(table, 0, 1, table.start)
