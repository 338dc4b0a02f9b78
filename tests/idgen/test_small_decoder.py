"""The small decoder: it starts as the rule it says, learns in every part, and is a plain Hugging Face folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from idgen.backbones import small_decoder
from idgen.backbones.small_decoder import HISTORY_WEIGHT, SCALE, age_weights, build_small_decoder
from idgen.text_vectors import token_vectors

FIRST = 1
"""Token of item 0; token 0 pads."""
MAX_TOKENS = 12
HISTORY = [4, 17, 2, 9, 30]  # oldest first


def vectors(num_items=40, width=16, seed=0):
    drawn = torch.randn(num_items, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn, dim=1)


def build(vector_ID, *, num_heads=2, seed=0):
    table_VD = token_vectors({"shop": vector_ID}, {"shop": [[FIRST + i] for i in range(len(vector_ID))]}, 41)
    sizes = {"num_layers": 2, "num_heads": num_heads, "d_ff": 24, "max_tokens": MAX_TOKENS, "padding": 0}
    return build_small_decoder(table_VD, seed=seed, **sizes)


def item_logits(model, history):
    ids = torch.tensor([history]) + FIRST
    with torch.no_grad():
        return model(input_ids=ids).logits[0, -1, FIRST:]


def test_without_history_weight_it_starts_as_the_neighbours_of_the_newest_item(monkeypatch):
    monkeypatch.setattr(small_decoder, "HISTORY_WEIGHT", 0.0)
    vector_ID = vectors()
    logit_I = item_logits(build(vector_ID), HISTORY)
    assert torch.allclose(logit_I, 12.0 * vector_ID @ vector_ID[HISTORY[-1]], atol=1e-4)


def test_it_starts_as_the_age_weighted_mean_of_the_history():
    vector_ID, model = vectors(), build(vectors())
    _, weight_L = age_weights(torch.arange(12).float(), model.model.rotary_emb.inv_freq)
    newest_first = vector_ID[HISTORY[::-1]]
    weight_H = weight_L[: len(HISTORY)] / weight_L[: len(HISTORY)].sum()
    query_D = newest_first[0] + HISTORY_WEIGHT * weight_H @ newest_first
    expected_I = SCALE * vector_ID @ torch.nn.functional.normalize(query_D, dim=0)
    assert torch.allclose(item_logits(model, HISTORY), expected_I, atol=1e-3)


def test_the_weights_fall_with_age_about_as_one_over_it():
    frequency_F = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    _, weight_L = age_weights(torch.arange(10).float(), frequency_F)
    wanted_L = 1 / torch.arange(1, 11) / (1 / torch.arange(1, 11)).sum()
    assert bool((weight_L[:4].diff() < 0).all())
    assert float(weight_L[4:].max()) < float(weight_L[3])
    assert torch.allclose(weight_L, wanted_L, atol=0.1)


def test_every_part_learns():
    model = build(vectors()).train()
    ids = torch.tensor([HISTORY]) + FIRST
    still = {name for name, parameter in model.named_parameters()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):  # behind a projection that is zero gradients come with its first step
        model(input_ids=ids, labels=ids).loss.backward()
        still -= {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        optimiser.step()
        optimiser.zero_grad()
    assert still == set()


def test_it_is_a_plain_folder(tmp_path):
    model = build(vectors())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert torch.equal(item_logits(again, HISTORY), item_logits(model, HISTORY))


def test_the_same_seed_gives_the_same_model():
    first, second, other = (build(vectors(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_width_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="multiple of 6"):
        build(vectors(width=16), num_heads=3)
