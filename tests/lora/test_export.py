"""Exports load with plain transformers and peft, at the least rank that holds them, and a wrong one never appears."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_toys import RANK, adapted, batch, held_factors, random_stack, tiny_t5
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM

from fedecider.models.adapters import fusion, put
from fedecider.models.directions import compact
from fedecider.models.export import Card, PromptLayout, SavedBase, export_adapter
from fedecider.models.item_table import ItemTable, read_item_ids

ALPHA = torch.tensor([1.5, -0.5, 2.0])


ITEMS = ItemTable(["b7", "a2"], ["Émile's trial", "The heir"], ["trial emile", "heir"], [[5, 9, 4], [7]])


CARD = Card(
    method="fedecider",
    domain="crime",
    prompt=PromptLayout("crime :", "", ";", 1, 3, 64, 20),
    alpha={"crime": 1.5, "comics": -0.5, "children": 2.0},
    metrics={"ndcg@10": 0.123456},
    protocol="leave-last-out, full catalogue",
)


def exported(tmp_path, **changes):
    base_folder = tmp_path / "backbone"
    tiny_t5().save_pretrained(base_folder)
    model = adapted()
    put(model, fusion(random_stack(model, 3), 0, ALPHA))
    base = SavedBase(changes.pop("base_folder", base_folder), "../backbone")
    items = changes.pop("items", ITEMS)
    return model, export_adapter(model, held_factors(model), tmp_path / "crime", base, items, CARD, batch())


def test_plain_peft_reproduces_the_logits(tmp_path):
    model, difference = exported(tmp_path)
    assert difference <= 1e-5
    base = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "backbone")
    reloaded = PeftModel.from_pretrained(base, tmp_path / "crime").eval()
    expected = model(**batch()).logits
    torch.testing.assert_close(reloaded(**batch()).logits, expected, rtol=0, atol=1e-5)
    assert (tiny_t5()(**batch()).logits - expected).abs().max() > 0.1
    config = json.loads((tmp_path / "crime" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 3 * RANK
    assert config["base_model_name_or_path"] == "../backbone"
    assert config["target_modules"] == ["k", "o", "q", "v"]  # sorted: equal runs hand over equal bytes
    files = {path.name for path in (tmp_path / "crime").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "item_ids.json", "README.md"}


def test_another_backbone_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "other").mkdir()
    tiny_t5(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="logits that differ"):
        exported(tmp_path, base_folder=tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"backbone", "other"}


def test_an_export_replaces_an_older_one_only_when_it_is_right(tmp_path):
    exported(tmp_path)
    before = (tmp_path / "crime" / "item_ids.json").read_text()
    (tmp_path / "other").mkdir()
    tiny_t5(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="logits that differ"):
        exported(tmp_path, base_folder=tmp_path / "other", items=ITEMS._replace(titles=["x", "y"]))
    assert (tmp_path / "crime" / "item_ids.json").read_text() == before
    exported(tmp_path, items=ITEMS._replace(titles=["x", "y"]))
    assert read_item_ids(tmp_path / "crime").titles == ["x", "y"]


def test_item_table_round_trips_in_item_number_order(tmp_path):
    exported(tmp_path)
    assert read_item_ids(tmp_path / "crime") == ITEMS
    content = json.loads((tmp_path / "crime" / "item_ids.json").read_text())
    assert content["eos_token_id"] == 1


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
    put(model, fusion(random_stack(model, num_clients), 1, ALPHA[:num_clients]))
    return model


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
