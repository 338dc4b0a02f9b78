"""Truncated adapters: the best approximation of their rank, in balanced factors, that plain peft loads."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_toys import RANK, adapted, batch, random_stack, tiny_t5
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM

from fedecider.experiment.settings import RunConfig
from fedecider.models.adapters import fused_factors, load_fusion
from fedecider.models.directions import compact, load_factors, truncate, truncate_loaded
from fedecider.models.export import Card, ItemTable, PromptLayout, export_adapter

ALPHA = torch.tensor([1.5, -0.5, 2.0])
ITEMS = ItemTable(["b7", "a2"], ["Émile's trial", "The heir"], ["trial emile", "heir"], [[5, 9, 4], [7]])


def pair(seed, rank=6, in_features=9, out_features=7):
    generator = torch.Generator().manual_seed(seed)
    return {
        "m.lora_a": torch.randn(rank, in_features, generator=generator),
        "m.lora_b": torch.randn(out_features, rank, generator=generator),
    }


def product(tree, name="m"):
    return tree[f"{name}.lora_b"].double() @ tree[f"{name}.lora_a"].double()


def fused(num_clients=3):
    model = adapted()
    load_fusion(model, random_stack(model, num_clients), 1, ALPHA[:num_clients])
    return model


def test_hand_numbers():
    # B A = diag(3, 4): the best rank-one part is the 4, and 3 of the norm 5 are lost
    tree = {"m.lora_a": torch.tensor([[3.0, 0.0], [0.0, 2.0]]), "m.lora_b": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}
    cut = truncate(tree, 1)
    torch.testing.assert_close(cut.tree["m.lora_a"], torch.tensor([[0.0, 2.0]]))
    torch.testing.assert_close(cut.tree["m.lora_b"], torch.tensor([[0.0], [2.0]]))
    assert cut.error_M.tolist() == [pytest.approx(0.6)]
    assert cut.summary() == {
        "rank": 1,
        "largest_relative_error": pytest.approx(0.6),
        "mean_relative_error": pytest.approx(0.6),
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7))
def test_it_is_the_truncated_dense_svd_with_the_error_of_eckart_and_young(
    seed, rank, in_features, out_features, cut_to
):
    tree = pair(seed, rank, in_features, out_features)
    cut = truncate(tree, min(cut_to, rank - 1))
    dense = product(tree)
    left, value, right = torch.linalg.svd(dense, full_matrices=False)
    kept = cut.rank
    assert kept == min(cut_to, rank - 1)
    best = left[:, :kept] @ torch.diag(value[:kept]) @ right[:kept]
    torch.testing.assert_close(product(cut.tree), best, rtol=0, atol=2e-5)
    lost = float(torch.linalg.matrix_norm(dense - product(cut.tree)) / torch.linalg.matrix_norm(dense))
    assert float(cut.error_M) == pytest.approx(lost, abs=1e-5)
    assert float(cut.error_M) == pytest.approx(float(value[kept:].norm() / value.norm()), abs=1e-9)


def test_factors_are_balanced_and_orthogonal():
    cut = truncate(pair(5), 4).tree
    gram_a, gram_b = cut["m.lora_a"] @ cut["m.lora_a"].T, cut["m.lora_b"].T @ cut["m.lora_b"]
    torch.testing.assert_close(gram_a, gram_b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gram_a, torch.diag(gram_a.diagonal()), rtol=1e-4, atol=1e-5)
    assert (gram_a.diagonal().diff() < 0).all()


@pytest.mark.parametrize("rank", [6, 60])
def test_the_full_rank_is_exact(rank):
    tree = pair(3)
    cut = truncate(tree, rank)
    assert all(torch.equal(cut.tree[key], tensor) for key, tensor in tree.items())
    assert cut.error_M.tolist() == [0.0]


def test_modules_are_cut_by_themselves_and_a_zero_update_stays_zero():
    tree = {
        key.replace("m.", f"{name}."): tensor
        for name, seed in (("z", 1), ("a", 2))
        for key, tensor in pair(seed).items()
    }
    tree["a.lora_b"].zero_()
    cut = truncate(tree, 2)
    assert float(cut.error_M[0]) == 0.0  # sorted by path: a comes first
    assert float(cut.error_M[1]) == pytest.approx(float(truncate(pair(1), 2).error_M))
    assert not product(cut.tree, "a").any()
    assert torch.isfinite(torch.cat([tensor.flatten() for tensor in cut.tree.values()])).all()


@pytest.mark.parametrize("rank", [1, RANK, RANK + 1, 3 * RANK - 1])
def test_the_loaded_model_is_the_truncated_one(rank):
    model = fused()
    full = fused_factors(model)
    cut = truncate_loaded(model, rank)
    assert (cut.rank, len(cut.error_M)) == (rank, 12)
    assert (cut.error_M > 0.0).all()
    loaded = fused_factors(model)
    for name in {key[:-7] for key in full}:
        torch.testing.assert_close(product(loaded, name), product(cut.tree, name), rtol=0, atol=1e-6)
        dense = product(full, name)
        assert (product(loaded, name) - dense).norm() > 1e-3
    other = adapted()
    load_factors(other, cut.tree)
    torch.testing.assert_close(other(**batch()).logits, model(**batch()).logits)


def test_nothing_to_cut_leaves_the_model_alone():
    model = fused()
    before = model(**batch()).logits
    assert truncate_loaded(model, 3 * RANK) is None
    assert torch.equal(model(**batch()).logits, before)


def test_the_export_has_the_rank_and_reproduces_the_truncated_model(tmp_path):
    tiny_t5().save_pretrained(tmp_path / "backbone")
    model = fused()
    full = model(**batch()).logits
    cut = truncate_loaded(model, 4)
    prompt = PromptLayout("crime :", "", ";", 1, 3, True, 64, 20, 0.0, "AutoModelForSeq2SeqLM", False)
    card = Card("fedecider", "crime", prompt, {}, {}, "leave-last-out", details=cut.summary())
    places = {"base_folder": tmp_path / "backbone", "base_name": "x", "items": ITEMS, "card": card, "prompts": batch()}
    assert export_adapter(model, tmp_path / "crime", factors=cut.tree, **places) <= 1e-5
    config = json.loads((tmp_path / "crime" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4
    base = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "backbone")
    reloaded = PeftModel.from_pretrained(base, tmp_path / "crime").eval()
    logits = reloaded(**batch()).logits
    torch.testing.assert_close(logits, model(**batch()).logits, rtol=0, atol=1e-5)
    assert (logits - full).abs().max() > 1e-3
    assert "| rank | 4 |" in (tmp_path / "crime" / "README.md").read_text()
    with pytest.raises(ValueError, match="logits that differ"):  # the check compares with what is loaded
        export_adapter(fused(), tmp_path / "other", factors=cut.tree, **places)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_the_least_rank_that_a_layer_can_have_loses_nothing(seed, rank, in_features, out_features, other):
    tree = pair(seed, rank, in_features, out_features)
    tree |= {key.replace("m.", "n."): tensor for key, tensor in pair(seed + 1, rank, other, other).items()}
    small = compact(tree)
    assert len(small["m.lora_a"]) == min(rank, max(min(in_features, out_features), other))
    for name in ("m", "n"):
        assert small[f"{name}.lora_a"].shape[0] == small[f"{name}.lora_b"].shape[1] == len(small["m.lora_a"])
        torch.testing.assert_close(product(small, name), product(tree, name), rtol=0, atol=1e-5)
    wider = compact(tree, len(small["m.lora_a"]) + 2)
    assert len(wider["m.lora_a"]) == wider["n.lora_b"].shape[1] == len(small["m.lora_a"]) + 2
    for name in ("m", "n"):
        torch.testing.assert_close(product(wider, name), product(tree, name), rtol=0, atol=1e-5)


def test_many_clients_are_handed_over_at_the_width_of_the_layers(tmp_path):
    model = adapted()  # attention of 10 to 12 features
    load_fusion(model, random_stack(model, 5), 1, torch.tensor([1.5, -0.5, 2.0, 0.3, -1.0]))
    assert len(next(iter(fused_factors(model).values()))) == 5 * RANK
    assert truncate_loaded(model, 5 * RANK - 1) is None  # nothing is lost there
    tiny_t5().save_pretrained(tmp_path / "backbone")
    prompt = PromptLayout("crime :", "", ";", 1, 3, True, 64, 20, 0.0, "AutoModelForSeq2SeqLM", False)
    card = Card("fedecider", "crime", prompt, {}, {}, "leave-last-out", details={})
    places = {"base_folder": tmp_path / "backbone", "base_name": "x", "items": ITEMS, "card": card, "prompts": batch()}
    assert export_adapter(model, tmp_path / "crime", **places) <= 1e-5
    config = json.loads((tmp_path / "crime" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 10
    base = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "backbone")
    reloaded = PeftModel.from_pretrained(base, tmp_path / "crime").eval()
    torch.testing.assert_close(reloaded(**batch()).logits, model(**batch()).logits, rtol=0, atol=1e-5)


def test_bad_ranks_are_refused():
    with pytest.raises(ValueError, match="got rank 0"):
        truncate(pair(1), 0)
    with pytest.raises(ValueError, match="got export_rank -1"):
        RunConfig(export_rank=-1)
