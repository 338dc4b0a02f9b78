"""Tokens and rows for items that come later: nothing that was there before moves."""

import copy

import pytest
import torch
from tiny_causal import byte_level_tokenizer, tiny_causal
from transformers import AutoModelForCausalLM

from fedecider.models.adapters import attach_lora, read_pair
from fedecider.models.config import LoraSettings
from fedecider.models.export import load_adapter, save_peft_folder
from fedecider.models.tied_table import adapted_embeddings
from idgen.config import Words
from idgen.item_ids import unique_phrases
from idgen.new_items import append_rows
from idgen.tokenizer import decode_ids, encode_ids, known_phrases, load_tokenizer, train_tokenizer, with_phrases

PHRASES = ["silent harbour", "last ledger", "the silent harbour"]
TEXTS = ["title: the silent harbour", "title: the last ledger of hull"]
ROWS = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[5, 9, 30, 12]])


def tokenizer():
    return train_tokenizer(TEXTS, 0, PHRASES)


def last_state(model, tokens=TOKENS):
    """(1, D) behind the last norm, what the output reads, and the logits (1, V)."""
    with torch.no_grad():
        found = model(input_ids=tokens, output_hidden_states=True)
    return found.hidden_states[-1][:, -1], found.logits[:, -1]


def adapted(folder, targets):
    """A tiny Llama with a large adapter, as plain peft loads it."""
    model = attach_lora(tiny_causal(tie_word_embeddings=True), LoraSettings(2, targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(2))
    folder.mkdir()
    save_peft_folder(read_pair(model), folder, "base", "CAUSAL_LM", adapted_embeddings(model.get_base_model()))
    return load_adapter(tiny_causal(tie_word_embeddings=True), folder).eval()


def test_new_phrases_are_the_next_tokens_and_the_old_ones_stay(tmp_path):
    old = tokenizer()
    longer = with_phrases(old, ["harbour lights", "ledger"])
    longer.save_pretrained(tmp_path)
    for found in (longer, load_tokenizer(tmp_path)):
        assert encode_ids(found, PHRASES) == encode_ids(old, PHRASES)
        ids = encode_ids(found, ["harbour lights", "ledger"])
        assert ids == [[len(old)], [len(old) + 1]]
        assert decode_ids(found, ids) == ["harbour lights", "ledger"]
        assert (found.pad_token_id, found.eos_token_id) == (old.pad_token_id, old.eos_token_id)


def test_a_phrase_that_is_there_is_not_chosen_again():
    keywords = Words(2, 3, False)
    texts = ["title: last ledger", "title: silent harbour nights"]
    (free,) = unique_phrases({"shop": ["a", "b"]}, {"shop": texts}, keywords).values()
    assert free == ["last ledger", "silent harbour"]
    (chosen,) = unique_phrases({"shop": ["a", "b"]}, {"shop": texts}, keywords, known_phrases(tokenizer())).values()
    assert chosen == ["last ledger 2", "silent harbour nights"]
    with pytest.raises(ValueError, match="one token already"):
        with_phrases(tokenizer(), ["last ledger"])
    with pytest.raises(ValueError, match="one token already"):
        with_phrases(tokenizer(), ["ledger", "ledger"])


@pytest.mark.timeout(20)  # every one of them counting from 2 took more than a minute
def test_many_equal_texts_get_the_first_free_numbers_in_the_order_of_their_keys():
    keys = [f"k{number:05d}" for number in range(20_000)]
    texts = ["title: last ledger"] * len(keys)
    taken = ["last ledger 3", "last ledger 5"]
    (chosen,) = unique_phrases({"shop": keys}, {"shop": texts}, Words(2, 3, False), taken).values()
    numbers = [number for number in range(2, len(keys) + 3) if number not in (3, 5)]
    assert chosen == ["last ledger", *(f"last ledger {number}" for number in numbers)]


def test_a_tokenizer_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="kind BPE"):
        with_phrases(byte_level_tokenizer(TEXTS), ["ledger"])


def test_a_plain_model_scores_the_new_rows_and_all_else_as_before(tmp_path):
    model = tiny_causal(tie_word_embeddings=True)
    before = copy.deepcopy(model)
    append_rows(model, ROWS)
    hidden_1D, logit_1V = last_state(model)
    assert torch.equal(hidden_1D, last_state(before)[0])
    assert torch.allclose(logit_1V[:, :40], last_state(before)[1], atol=1e-5)
    assert torch.allclose(logit_1V[:, 40:], hidden_1D @ ROWS.T, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    mixed = torch.tensor([[5, 41, 30]])  # a new item in the history
    assert torch.equal(last_state(again, mixed)[1], last_state(model, mixed)[1])


@pytest.mark.parametrize("targets", [("attention", "output"), ("table",), ("attention",)])
def test_an_adapter_leaves_the_new_rows_as_they_are(targets, tmp_path):
    model = adapted(tmp_path / "adapter", targets)
    hidden_before, logit_before = last_state(model)
    append_rows(model, ROWS)
    hidden_1D, logit_1V = last_state(model)
    assert torch.equal(hidden_1D, hidden_before)
    assert torch.allclose(logit_1V[:, :40], logit_before, rtol=1e-4, atol=1e-4)
    assert torch.allclose(logit_1V[:, 40:], hidden_1D @ ROWS.T, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        read = model.get_input_embeddings()(torch.tensor([40, 41, 42]))
    assert torch.equal(read, ROWS)


def test_rows_that_have_no_place_are_refused():
    with pytest.raises(ValueError, match="tied"):
        append_rows(tiny_causal(tie_word_embeddings=False), ROWS)
    with pytest.raises(ValueError, match="rows of width 8"):
        append_rows(tiny_causal(tie_word_embeddings=True), ROWS[:, :8])
