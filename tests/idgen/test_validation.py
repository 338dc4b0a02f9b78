"""The weights of the best step stay: public users' last items, which are not trained on, choose it."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tiny_tasks import make_domain, make_ids, make_tokenizer

from idgen import backbone_training, loss_guard, training
from idgen.backbone import build_backbone
from idgen.backbone_training import hold_out, num_steps, train_backbone
from idgen.checkpoints import Checkpoint
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig, TrainConfig
from idgen.events import is_target
from idgen.optimizer import STAGE_ONE_COURSE
from idgen.tasks import build_task
from idgen.training import Execution, Optimisation, train_model

DOMAIN = make_domain(num_items=11, lengths=(3, 4, 6, 9) * 4)
SEQUENCES = [sequence[: [2, 3, 4, 7][user % 4]] for user, sequence in enumerate(DOMAIN.public.sequences)]
TOKENIZER = make_tokenizer([DOMAIN], 250)
SAMPLES = SampleConfig(templates="compact", max_history=6)
PUBLIC = DOMAIN.public._replace(sequences=SEQUENCES)
TASK = build_task(DOMAIN, PUBLIC, make_ids(DOMAIN, TOKENIZER), TOKENIZER, SAMPLES, hold_out=False)
SMALL = BackboneConfig(d_model=8, num_layers=2)
SHORT = BackboneTraining(batch_size=8, learning_rate=1e-2, max_steps=20)


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(backbone_training, "LEAST_VALIDATED", 3)
    monkeypatch.setattr(backbone_training, "VALIDATION_SHARE", 10.0)


def trained_by(gains, checkpoint=None, kill_at=None):
    """A weight that is about the number of steps, and the logs: validation says ``gains`` at step 0, 2, ... 10."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)

    def on_step(done, total, note):
        if done == kill_at and note != "goes on":
            raise Killed

    logs = train_model(
        layer,
        lambda epoch: ({"labels": torch.zeros(1, 1)} for _ in range(4)),
        lambda _: -layer.weight.sum(),
        [{"params": [layer.weight]}],
        Optimisation(
            TrainConfig(learning_rate=1.0, batch_size=1),
            STAGE_ONE_COURSE._replace(schedule="constant", warmup=lambda total: 0, weight_decay=0.0),
            10,
        ),
        Execution(0, on_step=on_step, checkpoint=checkpoint),
        validate=lambda: torch.tensor(gains[round(float(layer.weight.detach()) / 2)], dtype=torch.float64),
    )
    return float(layer.weight.detach()), logs


def alike(*gains):
    """The same gain of four users at each step."""
    return [[gain] * 4 for gain in gains]


def test_the_best_step_stays_and_the_later_one_of_equals():
    weight, logs = trained_by(alike(0.1, 0.5, 0.2, 0.5, 0.3, 0.4))
    assert weight == pytest.approx(6.0, abs=1e-3)
    scores = {"0": 0.1, "2": 0.5, "4": 0.2, "6": 0.5, "8": 0.3, "10": 0.4}
    assert logs[-1]["validation"] == {"ndcg@10": pytest.approx(scores), "kept": 6, "num_users": 4}
    assert [(log["step"], "validation" in log) for log in logs] == [(4, False), (8, False), (10, True)]
    assert trained_by(alike(0.9, 0.5, 0.2, 0.5, 0.3, 0.4))[0] == 0.0  # all steps harmed


def test_the_last_step_stays_unless_an_earlier_one_is_clearly_ahead():
    """Leads of (.4, 0, 0, 0) have the mean .1 and the standard error .1; of (.4, .1, 0, 0) .125 and .0946."""
    for lead, kept in (([0.4, 0.0, 0.0, 0.0], 10.0), ([0.4, 0.1, 0.0, 0.0], 8.0)):
        gains = [*alike(0.0, 0.0, 0.0, 0.0), lead, [0.0] * 4]
        assert trained_by(gains)[0] == pytest.approx(kept, abs=1e-3)
    # between earlier steps the mean alone decides
    assert trained_by([*alike(0.0, 0.0, 0.0), [0.4, 0.0, 0.0, 0.0], *alike(0.05, 0.0)])[0] == pytest.approx(
        10, abs=1e-3
    )


@pytest.mark.parametrize("kill_at", [1, 2, 5, 8, 9])
def test_a_killed_training_keeps_the_same_step(monkeypatch, tmp_path, kill_at):
    monkeypatch.setattr(training, "NOTE_EVERY", 1)
    gains = alike(0.1, 0.2, 0.6, 0.3, 0.5, 0.4)
    weight, logs = trained_by(gains)
    path = tmp_path / "backbone.safetensors"
    with pytest.raises(Killed):
        trained_by(gains, Checkpoint(path, every_s=0.0), kill_at)
    for _ in range(2):  # once more when it has ended
        found, again = trained_by(gains, Checkpoint(path, every_s=0.0))
        assert found == weight == pytest.approx(4.0, abs=1e-3)
        assert again[-1]["validation"] == logs[-1]["validation"]


def test_a_backbone_that_training_harms_stays_as_it_was(monkeypatch):
    """It knows the last items by heart, and steps that are far too long make it forget them."""
    monkeypatch.setattr(loss_guard, "FAR_ABOVE", 1e9)  # else the training ends with an error
    monkeypatch.setattr(loss_guard, "EXPLODED", 1e9)
    knows = build_backbone(SMALL, TOKENIZER, 1)
    train_backbone(knows, TASK, replace(SHORT, max_steps=150), Execution(0))
    tasks, validation = hold_out([TASK], SHORT, 1)
    for learning_rate, is_kept in ((30.0, True), (1e-6, False)):
        model = deepcopy(knows)
        found = train_backbone(model, tasks, replace(SHORT, learning_rate=learning_rate), Execution(0), validation)
        told = found[-1]["validation"]
        assert told["num_users"] == 3
        assert (told["kept"] == 0) == is_kept
        assert (told["ndcg@10"]["0"] > told["ndcg@10"]["20"]) == is_kept
        after = model.state_dict().items()
        assert all(torch.equal(tensor, knows.state_dict()[name]) for name, tensor in after) == is_kept


def test_last_items_of_validated_users_are_no_part_of_the_training():
    (task,), (validation,) = hold_out([TASK], SHORT, 1)
    users, lengths = set(validation.user_U.tolist()), [len(sequence) for sequence in SEQUENCES]
    long_enough = [user for user, length in enumerate(lengths) if length >= 3]
    assert users <= set(long_enough)
    assert len(users) == len(long_enough) // 4
    assert [len(s) for s in task.training_sequences] == [n - (user in users) for user, n in enumerate(lengths)]
    assert int(is_target(TASK.train).sum() - is_target(task.train).sum()) == len(users)
    assert list(validation.task.sequences) == SEQUENCES
    assert hold_out([TASK], SHORT, 1)[1][0].user_U.tolist() == validation.user_U.tolist()
    assert hold_out([TASK], SHORT, 2)[1][0].user_U.tolist() != validation.user_U.tolist()


def test_users_are_drawn_over_all_tasks_and_no_more_than_can_be_afforded(monkeypatch):
    _, both = hold_out([TASK, TASK], SHORT, 1)
    assert sum(len(one.user_U) for one in both) == 2 * 12 // 4
    # 20 steps of 8 samples, five of them a user and validation: 10 users would take 10 * 5 * 6 / 160 of the time
    monkeypatch.setattr(backbone_training, "VALIDATION_SHARE", 4 * 5 * 6 / 160 + 1e-6)
    assert sum(len(one.user_U) for one in hold_out([TASK, TASK], SHORT, 1)[1]) == 4
    monkeypatch.setattr(backbone_training, "LEAST_VALIDATED", 5)
    assert hold_out([TASK, TASK], SHORT, 1) == ([TASK, TASK], [])
    assert (
        num_steps([TASK], replace(SHORT, max_steps=0, epochs=2)) == 2 * 6
    )  # 4 * (1 + 2 + 3 + 6) events with a history
