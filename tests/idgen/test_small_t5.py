"""The small T5: it starts as the rule it says, learns in every part, and is a plain Hugging Face folder."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from idgen.backbones.small_t5 import NUM_FLAGS, SCALE, build_small_t5

PAD, EOS, WORD, FIRST = 0, 1, 2, 3
"""Tokens: a word of a template has no vector, the last one is that of item 0."""
NUM_ITEMS, WIDTH = 40, 32
HISTORY = [4, 17, 2, 9, 30]  # oldest first


def vectors(seed=0):
    drawn = torch.randn(NUM_ITEMS, WIDTH, generator=torch.Generator().manual_seed(seed))
    drawn[:, -NUM_FLAGS:] = 0.0  # the model has no room for more
    return torch.nn.functional.normalize(drawn, dim=1)


def build(vector_ID, *, num_layers=2, num_heads=4, tokens_per_item=1.0, seed=0):
    table_VD = torch.cat([torch.zeros(FIRST, WIDTH), vector_ID])
    config = T5Config(
        vocab_size=len(table_VD),
        d_model=WIDTH,
        d_kv=WIDTH // num_heads,
        d_ff=48,
        num_layers=num_layers,
        num_heads=num_heads,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
    )
    return build_small_t5(table_VD, config, tokens_per_item, seed)


def item_logits(model, history, written=()):
    source = torch.tensor([[*(FIRST + item for item in history), EOS]])
    given = torch.tensor([[PAD, *(FIRST + item for item in written)]])
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=given).logits[0, -1, FIRST:]


def cosines(vector_ID, history, tokens_per_item=1.0):
    """With the mean of the history, a token d places before the end weighed by 1 / (1 + d / tokens_per_item)."""
    weight_H = 1.0 / (1.0 + torch.arange(1.0, len(history) + 1) / tokens_per_item)
    query_D = weight_H @ vector_ID[list(reversed(history))]
    return vector_ID @ torch.nn.functional.normalize(query_D, dim=0)


@pytest.mark.parametrize("tokens_per_item", [1.0, 5.0])
def test_it_starts_as_the_age_weighted_mean_of_the_history(tokens_per_item):
    vector_ID = vectors()
    logit_I = item_logits(build(vector_ID, tokens_per_item=tokens_per_item), HISTORY)
    wanted_I = cosines(vector_ID, HISTORY, tokens_per_item)
    assert torch.corrcoef(torch.stack([logit_I, wanted_I]))[0, 1] > 0.99
    assert set(logit_I.topk(2).indices.tolist()) == set(wanted_I.topk(2).indices.tolist())
    assert 0.6 * SCALE < float(logit_I.std() / wanted_I.std()) < 1.05 * SCALE


def test_older_items_count_less():
    model = build(vectors())
    newest_first = [float(item_logits(model, [*HISTORY[:place], 39, *HISTORY[place:]])[39]) for place in (5, 3, 0)]
    assert newest_first == sorted(newest_first, reverse=True)


def test_a_token_that_was_written_does_not_hide_the_history():
    model = build(vectors())
    before_I, after_I = item_logits(model, HISTORY), item_logits(model, HISTORY, [25])
    assert torch.corrcoef(torch.stack([before_I, after_I]))[0, 1] > 0.6


def test_words_without_a_vector_change_little():
    model = build(vectors())
    plain_I = item_logits(model, HISTORY)
    source = torch.tensor([[WORD, WORD, *(FIRST + item for item in HISTORY), EOS]])
    with torch.no_grad():
        logit_I = model(input_ids=source, decoder_input_ids=torch.tensor([[PAD]])).logits[0, -1, FIRST:]
    assert torch.corrcoef(torch.stack([plain_I, logit_I]))[0, 1] > 0.98


def test_every_part_learns():
    model = build(vectors()).train()
    source = torch.tensor([[*(FIRST + item for item in HISTORY), EOS]])
    target = torch.tensor([[FIRST + 5, FIRST + 6, EOS]])
    still = {name for name, _ in model.named_parameters()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(4):  # behind a projection that is zero gradients come with its first step
        model(input_ids=source, labels=target).loss.backward()
        still -= {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        optimiser.step()
        optimiser.zero_grad()
    assert still == set()


def test_it_is_a_plain_folder_with_a_tied_table(tmp_path):
    model = build(vectors())
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, use_safetensors=True)
    assert again.lm_head.weight.data_ptr() == again.shared.weight.data_ptr()
    assert torch.allclose(item_logits(again, HISTORY), item_logits(model, HISTORY), atol=1e-5)
