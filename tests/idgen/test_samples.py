import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tasks import make_domain, make_ids, make_task, make_tokenizer

from fedecider.data.domain import Events
from idgen import events
from idgen.config import SampleConfig
from idgen.events import histories
from idgen.prompts import DOMAIN as DOMAIN_WORD
from idgen.prompts import HISTORY, domain_words, load_templates
from idgen.samples import eval_batches, num_batches, num_samples, train_batches

DOMAIN = make_domain()
OTHER = make_domain("other", num_items=9, lengths=(5, 12), seed=1)
TOKENIZER = make_tokenizer([DOMAIN, OTHER])
IDS = make_ids(DOMAIN, TOKENIZER)
PLAIN = SampleConfig()


def render(template, domain, texts):
    """The prompt as text: item ID texts in the given order."""
    return template.replace(DOMAIN_WORD, domain_words(domain)).replace(HISTORY, " ; ".join(texts))


def rows(batches):
    """Every sample as (input tokens, label tokens), padding dropped."""
    for batch in batches:
        assert (batch["attention_mask"].sum(1) > 0).all()
        for tokens, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            assert (mask.diff() <= 0).all()  # padding on the right only
            assert (tokens[mask == 0] == TOKENIZER.pad_token_id).all()
            yield tuple(tokens[mask == 1].tolist()), tuple(labels[labels != -100].tolist())


def epoch(task, seed=0, batch_size=7):
    return list(rows(train_batches(task, batch_size, torch.Generator().manual_seed(seed))))


def with_sequences(domain, sequences):
    return dataclasses.replace(domain, clients=Events(domain.clients.users, sequences, None))


def test_number_of_samples_is_the_papers():
    task = make_task(DOMAIN, TOKENIZER, PLAIN)
    expected = sum(max(0, len(sequence) - 3) for sequence in DOMAIN.clients.sequences)  # 0 + 1 + 6 + 24
    assert expected == 31
    assert num_samples(task) == len(epoch(task)) == expected
    assert num_batches(task, 7) == len(list(train_batches(task, 7, torch.Generator()))) == 5
    everything = make_task(DOMAIN, TOKENIZER, PLAIN, hold_out=False)
    assert num_samples(everything) == 39


@pytest.mark.parametrize("templates", ["natural", "compact"])
def test_assembled_tokens_are_those_of_the_full_text(templates):
    config = SampleConfig(templates=templates, max_history=4)
    task = make_task(DOMAIN, TOKENIZER, config)
    texts = set()
    for sequence in DOMAIN.clients.sequences:
        train = sequence[:-2]
        for place in range(1, len(train)):
            shown = [IDS.texts[item] for item in train[:place][-4:]]
            for template in load_templates(templates):
                texts.add((render(template, DOMAIN.name, shown), IDS.texts[train[place]]))
    expected = {(tuple(TOKENIZER(text)["input_ids"]), tuple(TOKENIZER(target)["input_ids"])) for text, target in texts}
    got = {row for seed in range(40) for row in epoch(task, seed)}
    assert got <= expected
    assert len(got) > 0.9 * len(expected)  # templates are drawn anew in every epoch


def test_the_oldest_items_give_way_and_the_newest_stay():
    roomy = make_task(DOMAIN, TOKENIZER, SampleConfig(templates="compact"))
    longest = max(len(tokens) for tokens, _ in epoch(roomy))
    config = SampleConfig(templates="compact", max_source_tokens=longest // 2)
    task = make_task(DOMAIN, TOKENIZER, config)
    _, input_ids, mask, _ = next(eval_batches(task, "test", 99, users=[3]))
    tokens = input_ids[0][mask[0] == 1].tolist()
    assert len(tokens) <= longest // 2
    sequence = DOMAIN.clients.sequences[3][:-1]
    for kept in range(1, 20):
        text = render("{domain} : {history}", DOMAIN.name, [IDS.texts[item] for item in sequence[-kept:]])
        if TOKENIZER(text)["input_ids"] == tokens:
            longer = render("{domain} : {history}", DOMAIN.name, [IDS.texts[i] for i in sequence[-kept - 1 :]])
            assert len(TOKENIZER(longer)["input_ids"]) > longest // 2  # as many as fit
            break
    else:
        pytest.fail("the prompt is not a suffix of the history")
    with pytest.raises(ValueError, match="max_source_tokens"):
        make_task(DOMAIN, TOKENIZER, SampleConfig(max_source_tokens=5))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_training_never_sees_held_out_items(data):
    """Replacing validation and test items changes no training batch, replacing the test item no input at all."""
    config = SampleConfig(
        item_dropout=data.draw(st.sampled_from([0.0, 0.4])),
        pairs=data.draw(st.booleans()),
    )
    item = st.integers(0, len(DOMAIN.item_keys) - 1)
    valid = data.draw(st.lists(item, min_size=4, max_size=4))
    test = data.draw(st.lists(item, min_size=4, max_size=4))
    old = DOMAIN.clients.sequences
    new = [[*sequence[:-2], a, b] for sequence, a, b in zip(old, valid, test, strict=True)]
    only_test = [[*sequence[:-1], b] for sequence, b in zip(old, test, strict=True)]
    before = make_task(DOMAIN, TOKENIZER, config, item_ids=IDS)
    after = make_task(with_sequences(DOMAIN, new), TOKENIZER, config, item_ids=IDS)
    assert epoch(before, 5) == epoch(after, 5)
    after = make_task(with_sequences(DOMAIN, only_test), TOKENIZER, config, item_ids=IDS)
    for split in ("valid", "test"):
        for first, second in zip(eval_batches(before, split, 3), eval_batches(after, split, 3), strict=True):
            assert torch.equal(first[1], second[1])
            assert torch.equal(first[2], second[2])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 24), st.integers(0, 22))
def test_a_sample_does_not_see_its_target_or_later_items(place, item):
    """Changing events from the target on leaves the items of the input alone."""
    old = DOMAIN.clients.sequences[3]
    new = [*old[:place], *([item] * (len(old) - 2 - place)), *old[-2:]]
    seen = []
    for sequence in (old, new):
        task = make_task(with_sequences(DOMAIN, [*DOMAIN.clients.sequences[:3], sequence]), TOKENIZER, PLAIN)
        events = task.train
        target = np.array([sum(map(len, DOMAIN.clients.sequences[:3])) + place])
        seen.append(events.item_E[histories(events, target, 20)[0]][: min(place, 20)].tolist())
    assert seen[0] == seen[1]
    assert seen[0] == old[:place][::-1][:20]


def test_eval_prompts_by_hand():
    task = make_task(DOMAIN, TOKENIZER, SampleConfig(max_history=5))
    template = load_templates("natural")[0]
    for split, cut in (("valid", 2), ("test", 1)):
        seen = []
        for user_B, input_ids, mask, target_B in eval_batches(task, split, 3):
            for user, tokens, keep, target in zip(user_B.tolist(), input_ids, mask, target_B.tolist(), strict=True):
                sequence = DOMAIN.clients.sequences[user]
                shown = [IDS.texts[item] for item in sequence[:-cut][-5:]]
                text = render(template, DOMAIN.name, shown)
                assert tokens[keep == 1].tolist() == TOKENIZER(text)["input_ids"]
                assert target == sequence[-cut]
                seen.append(user)
        assert sorted(seen) == [0, 1, 2, 3]
    chosen = torch.cat([batch[0] for batch in eval_batches(task, "test", 1, users=torch.tensor([3, 1]))])
    assert sorted(chosen.tolist()) == [1, 3]


def test_mixing_tasks_keeps_every_sample_of_each():
    ids = make_ids(OTHER, TOKENIZER)
    config = SampleConfig(templates="compact")
    one = make_task(DOMAIN, TOKENIZER, config, item_ids=IDS)
    two = make_task(OTHER, TOKENIZER, config, item_ids=ids)
    mixed = epoch([one, two], 3)
    assert sorted(mixed) == sorted(epoch(one, 4) + epoch(two, 5))  # one template and no augmentation: nothing is drawn
    assert num_samples([one, two]) == 31 + 2 + 9
    other = make_task(OTHER, TOKENIZER, dataclasses.replace(config, max_history=3), item_ids=ids)
    with pytest.raises(ValueError, match="same SampleConfig"):
        epoch([one, other])


def test_crops_and_dropout_shorten_histories_but_never_empty_them(monkeypatch):
    """With pairs histories have a geometric length, and one item outside training."""
    monkeypatch.setattr(events, "PAIR_SHARE", 0.0)
    monkeypatch.setattr(events, "CROP_RATE", 0.5)
    mark = TOKENIZER(";", add_special_tokens=False)["input_ids"][-1]
    full = SampleConfig(templates="compact")
    mean = {}
    for name, change in {"none": {}, "geometric": {"pairs": True}, "dropout": {"item_dropout": 0.5}}.items():
        task = make_task(DOMAIN, TOKENIZER, dataclasses.replace(full, **change), item_ids=IDS)
        drawn = [tokens for seed in range(8) for tokens, _ in epoch(task, seed)]
        mean[name] = np.mean([tokens.count(mark) + 1 for tokens in drawn])
        assert min(map(len, drawn)) >= len(TOKENIZER("small shop :")["input_ids"]) + 1
        assert task.config.shown_history == (1 if name == "geometric" else 20)
    assert mean["geometric"] < 2.05 < mean["dropout"]
    assert 0.45 * mean["none"] < mean["dropout"] < 0.58 * mean["none"]


def test_pairs_are_near_events_of_one_training_part(monkeypatch):
    monkeypatch.setattr(events, "PAIR_SHARE", 1.0)
    monkeypatch.setattr(events, "PAIR_WINDOW", 2)
    task = make_task(DOMAIN, TOKENIZER, SampleConfig(templates="compact", pairs=True, max_history=1))
    allowed, reverse = set(), set()
    for sequence in DOMAIN.clients.sequences:
        train = sequence[:-2]
        for distance in (1, 2):
            for earlier, later in zip(train, train[distance:], strict=False):
                allowed.add((earlier, later))
                reverse.add((later, earlier))
    known = {
        tuple(TOKENIZER(render("{domain} : {history}", DOMAIN.name, [text]))["input_ids"]): item
        for item, text in enumerate(IDS.texts)
    }
    targets = {tuple(TOKENIZER(text)["input_ids"]): item for item, text in enumerate(IDS.texts)}
    drawn = [sample for seed in range(30) for sample in epoch(task, seed)]
    got = {(known[tokens], targets[labels]) for tokens, labels in drawn if tokens in known}
    assert got <= allowed | reverse
    assert got & (reverse - allowed)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="22 item IDs for the 23 items"):
        make_task(DOMAIN, TOKENIZER, PLAIN, item_ids=IDS._replace(token_ids=IDS.token_ids[1:]))
    with pytest.raises(ValueError, match="hold_out=True"):
        next(eval_batches(make_task(DOMAIN, TOKENIZER, PLAIN, hold_out=False), "test", 3))
    short = make_task(with_sequences(DOMAIN, [[0, 1, 2]] * 4), TOKENIZER, PLAIN)
    with pytest.raises(ValueError, match="no training samples"):
        next(train_batches(short, 4, torch.Generator()))
    for change in (
        {"item_dropout": 1.0},
        {"max_history": 0},
        {"templates": "x"},
    ):
        with pytest.raises(ValueError, match="expected"):
            SampleConfig(**change)
