"""A training that is killed and started again ends as one that never stopped."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_tasks import make_domain, make_task, make_tokenizer

from distill.train import DistillConfig, distill
from idgen import backbone, checkpoints, training
from idgen.backbone import build_backbone
from idgen.backbone_training import train_backbone
from idgen.checkpoints import Checkpoint
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig
from idgen.training import Execution

DOMAIN = make_domain(num_items=11, lengths=(4, 6, 13))
TOKENIZER = make_tokenizer([DOMAIN], 250)
TASK = make_task(DOMAIN, TOKENIZER, SampleConfig(templates="compact", max_history=6))
SMALL = BackboneConfig(d_model=8, num_layers=2)
PIECES = {
    "epochs": {"epochs": 3},
    "steps over epochs": {"max_steps": 17},
}


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def every_second_step(monkeypatch):
    monkeypatch.setattr(training, "NOTE_EVERY", 2)
    monkeypatch.setattr(backbone, "DROPOUT", 0.3)
    monkeypatch.setattr(checkpoints, "EVERY_S", 0.0)


def train(kind, path=None, kill_at=None):
    """Weights, logs and the steps that were told; 14 samples are 7 steps an epoch."""
    config = BackboneTraining(batch_size=2, learning_rate=1e-2, **PIECES[kind])
    model, told = build_backbone(SMALL, TOKENIZER, 1), []

    def on_step(done, total, note):
        told.append((done, note))
        if done == kill_at and note != "goes on":
            raise Killed

    checkpoint = None if path is None else Checkpoint(path, every_s=0.0)
    logs = train_backbone(model, TASK, config, Execution(0, on_step=on_step, checkpoint=checkpoint))
    return model.state_dict(), [{**log, "samples_per_s": 0.0} for log in logs], told


def change(path, tensors=None, **position):
    with safe_open(str(path), "pt") as file:
        told = json.loads(file.metadata()["position"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    save_file({**kept, **(tensors or {})}, path, {"position": json.dumps({**told, **position})})


def assert_same(found, expected):
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(tensor, expected[0][name]) for name, tensor in found[0].items())
    assert found[1] == expected[1]


@pytest.mark.parametrize("kind", PIECES)
def test_killed_twice_it_ends_with_the_same_weights_and_logs(kind, tmp_path):
    """Dropout, the schedule, the moments of AdamW, the order of the samples."""
    expected, path = train(kind), tmp_path / "begun" / "backbone.safetensors"
    places = [place for place, _ in expected[2]]
    assert_same(train(kind, tmp_path / "never killed"), expected)
    for first in (1, 5, 14):
        for kill_at in (first, first + 3):
            with pytest.raises(Killed):
                train(kind, path, kill_at)
        *found, told = train(kind, path)
        begin = told[0][0]
        assert told[0][1] == "goes on"
        assert first <= begin <= first + 3 <= begin + 3  # not more than the steps since the last checkpoint are lost
        assert [place for place, _ in told[1:]] == places[begin:]
        assert_same((*found,), expected)
        path.unlink()
        assert [one.name for one in path.parent.iterdir()] == []


def test_a_finished_training_is_not_repeated(tmp_path):
    expected = train("epochs", tmp_path / "a.safetensors")
    *found, told = train("epochs", tmp_path / "a.safetensors")
    assert told == [(21, "goes on")]
    assert_same((*found,), expected)


def test_short_trainings_write_nothing(tmp_path):
    model = build_backbone(SMALL, TOKENIZER, 1)
    checkpoint = Checkpoint(tmp_path / "begun" / "backbone.safetensors", every_s=60.0)
    train_backbone(model, TASK, BackboneTraining(batch_size=2, epochs=2), Execution(0, checkpoint=checkpoint))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "wider"])
def test_a_file_that_is_no_checkpoint_of_this_model_is_refused(damage, tmp_path):
    path = tmp_path / "begun" / "backbone.safetensors"
    with pytest.raises(Killed):
        train("epochs", path, 5)
    whole = path.read_bytes()
    if damage == "other":
        save_file({"parameter.0": torch.zeros(3)}, path)
    elif damage == "wider":
        change(path, tensors={"parameter.0": torch.zeros(3, 5)})
    else:
        cut = {"cut": whole[: len(whole) // 2], "empty": b"", "flipped": b"\x00" * 64 + whole[64:]}
        path.write_bytes(cut[damage])
    expected = "of another model" if damage == "wider" else "got a damaged"
    with pytest.raises(ValueError, match=rf"{expected}.*Delete {path.parent}, and the training starts anew"):
        train("epochs", path)


def test_distillation_goes_on_in_either_of_its_trainings(tmp_path):
    teacher = build_backbone(SMALL, TOKENIZER, 1)
    config = DistillConfig(epochs=2, batch_size=2)

    def student(folder=None, kill_at=None):
        told = []

        def on_step(done, total, note):
            told.append((done, total, note))
            if len(told) == kill_at:
                raise Killed

        made, report = distill(teacher, TASK, config, Execution(0, on_step=on_step), None, folder, 1e-2)
        return made.state_dict(), report["chained_loss"], told

    expected = student()
    assert [total for _, total, _ in expected[2]] == [14] * 14 + [7] * 7
    for kill_at, told in ((5, [(4, 14, "goes on")]), (19, [(14, 14, "goes on"), (4, 7, "goes on")])):
        folder = tmp_path / str(kill_at)
        with pytest.raises(Killed):
            student(folder, kill_at)
        found = student(folder)
        assert [one for one in found[2] if one[2] == "goes on"] == told
        assert all(torch.equal(tensor, expected[0][name]) for name, tensor in found[0].items())
        assert found[1] == expected[1]


def test_the_rate_counts_the_time_before_the_kill(tmp_path):
    path = tmp_path / "backbone.safetensors"
    with pytest.raises(Killed):
        train("epochs", path, 5)
    change(path, seconds=1000.0)
    config = BackboneTraining(batch_size=2, learning_rate=1e-2, epochs=3)
    execution = Execution(0, checkpoint=Checkpoint(path))
    logs = train_backbone(build_backbone(SMALL, TOKENIZER, 1), TASK, config, execution)
    assert logs[0]["samples_per_s"] < 14 / 1000 < 0.1 < logs[1]["samples_per_s"]
