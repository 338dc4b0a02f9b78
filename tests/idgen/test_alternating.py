import copy
import dataclasses

import pytest
import torch
from tiny_tasks import make_domain, make_ids, make_task, make_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

from fedecider.bounds import Diverged
from idgen import alternating
from idgen.alternating import Writing, alternate, changed_ids, phases
from idgen.config import BackboneTraining, SampleConfig
from idgen.item_ids import assign_item_ids
from idgen.synthetic import nearest_items
from idgen.training import Execution

DOMAIN = make_domain(num_items=11, lengths=(4, 6, 13))
TOKENIZER = make_tokenizer([DOMAIN], 250)
PLAIN = SampleConfig(templates="compact", max_history=6)
TRAIN = BackboneTraining(learning_rate=1e-2, batch_size=5)


def tiny_t5(seed, dropout=0.0):
    torch.manual_seed(seed)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=len(TOKENIZER), dropout_rate=dropout, **sizes))


def ids_in_order(words):
    """IDs whose words are dealt anew on each call, as a generator that has changed would."""
    return assign_item_ids(DOMAIN.item_keys, [[word] for word in words], TOKENIZER)


def run(num_phases=1, seed=0, synthetic_share=0.0, dropout=0.0, epochs=1):
    first = make_ids(DOMAIN, TOKENIZER)
    written, used = [], []

    def assign():
        written.append(ids_in_order([first.texts[(item + len(written) + 1) % 11] for item in range(11)]))
        return written[-1]

    def tasks_of(ids):
        used.append(ids)
        task = make_task(DOMAIN, TOKENIZER, PLAIN, item_ids=ids)
        near = nearest_items(torch.randn(11, 4, generator=torch.Generator().manual_seed(0)))
        return [task._replace(config=dataclasses.replace(PLAIN, synthetic_share=synthetic_share), neighbours=near)]

    backbone, generator = tiny_t5(1, dropout), tiny_t5(2)
    before = copy.deepcopy(backbone.state_dict()), copy.deepcopy(generator.state_dict())
    ids, logs = alternate(
        backbone,
        generator,
        first,
        Writing(assign, tasks_of, [DOMAIN.item_texts], TOKENIZER),
        num_phases,
        dataclasses.replace(TRAIN, epochs=epochs),
        Execution(seed),
    )
    return ids, logs, backbone, generator, before, used


def same(model, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    monkeypatch.setattr(alternating, "GENERATOR_RATE", 1e-3)
    monkeypatch.setattr(alternating, "GENERATOR_BATCH", 4)


def test_ids_are_written_after_each_turn_and_used_by_the_next():
    ids, logs, *_, used = run(2, epochs=2)
    assert [log["trained"] for log in logs] == ["backbone", "ids", "backbone", "ids", "backbone"]
    assert [len(log["loss"]) for log in logs] == [2, 1, 2, 1, 2]
    assert len(used) == 3  # tasks at the start and after each turn of the generator
    assert used[-1] is ids
    assert len({tuple(one.texts) for one in used}) == 3
    for log in logs[1::2]:
        assert log["num_ids"] == 11
        assert log["ids_changed"] == sum(log["ids_changed_by_task"].values()) > 5


@pytest.mark.parametrize("frozen", ["backbone", "ids"])
def test_the_other_model_is_frozen(frozen, monkeypatch):
    monkeypatch.setattr(alternating, "phases", lambda num: [one for one in phases(num) if one != frozen])
    _, _, backbone, generator, (old_backbone, old_generator), _ = run()
    assert same(backbone, old_backbone) == (frozen == "backbone")
    assert same(generator, old_generator) == (frozen == "ids")
    assert all(parameter.requires_grad for parameter in backbone.parameters())


def test_same_seed_same_weights():
    first, second, third = (run(1, seed, dropout=0.2)[2].state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_changed_ids_counts_token_sequences():
    first = make_ids(DOMAIN, TOKENIZER)
    swapped = first._replace(token_ids=[first.token_ids[1], first.token_ids[0], *first.token_ids[2:]])
    old, new = (make_task(DOMAIN, TOKENIZER, PLAIN, item_ids=ids) for ids in (first, swapped))
    assert changed_ids([old, old], [old, new]) == {
        "ids_changed": 2,
        "num_ids": 22,
        "ids_changed_by_task": {"small_shop": 2},
    }


def test_a_loss_above_the_start_of_the_first_turn_ends_a_later_one():
    weight = torch.nn.Linear(1, 1)
    side = alternating._side(weight, TRAIN, 40)
    batches = [{"input_ids": torch.zeros(1, 1), "labels": torch.zeros(1, 1)}] * 20

    def loss_of(value):
        return lambda batch: 0.0 * weight.weight.sum() + value

    side, _ = alternating._run(side, [batches], loss_of(5.0), Execution(0))
    with pytest.raises(Diverged, match=r"at step 40, learning_rate 0.01: the loss is 7, it was 5 at first"):
        alternating._run(side, [batches], loss_of(7.0), Execution(0))
