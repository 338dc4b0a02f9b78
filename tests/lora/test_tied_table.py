"""The target table: one pair of factors that changes a tied table in both places where it is read."""

import warnings

import pytest
import torch
from exact_scores import score_catalogue
from lora_toys import batch, held_factors, random_adapters, random_stack, tiny_t5
from tiny_causal import tiny_causal

from fedecider.models.adapters import (
    Adapters,
    LoraSettings,
    adapter_shapes,
    attach_lora,
    fusion,
    initial_adapters,
    named_factors,
    put,
)
from fedecider.models.export import load_adapter, save_peft_folder
from fedecider.models.fused_linear import fused_layers
from fedecider.models.tied_table import adapted_embeddings
from idgen.backbones.families import family_of
from idgen.decode import constrained_beam_search
from idgen.losses import sequence_loss
from idgen.trie import Trie

RANK = 3


def base_of(family):
    return tiny_t5() if family == "t5" else tiny_causal(family, tie_word_embeddings=True)


def inputs_of(family):
    found = batch()
    return found if family == "t5" else {name: found[name] for name in ("input_ids", "attention_mask")}


def adapted_table(family, *others):
    return attach_lora(base_of(family), LoraSettings(RANK, ("table", *others)))


def with_dense_table(family, update_VD):
    """A plain model whose one tied table is W + dW."""
    model = base_of(family)
    with torch.no_grad():
        model.get_input_embeddings().weight += update_VD
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model


def _loss(model, inputs):
    """Of positions that are no padding: what padding says of the table, nobody asks."""
    logits = model(**inputs).logits
    return logits.square().mean() if "labels" in inputs else logits[inputs["attention_mask"] != 0].square().mean()


FAMILIES = pytest.mark.parametrize("family", ["t5", "llama", "qwen2"])


@FAMILIES
@pytest.mark.parametrize("separate", [True, False])
def test_logits_are_those_of_one_table_that_was_changed(family, separate):
    model = adapted_table(family)
    weight_K = torch.tensor([1.5, -0.5, 2.0])
    put(model, fusion(random_stack(model, 3), 1, weight_K, separate=separate))
    factors = held_factors(model)
    dense = with_dense_table(family, factors["lm_head.lora_b"] @ factors["lm_head.lora_a"])
    expected = dense(**inputs_of(family)).logits
    torch.testing.assert_close(model(**inputs_of(family)).logits, expected, rtol=1e-4, atol=1e-4)
    outputs = attach_lora(base_of(family), LoraSettings(RANK, ("output",)))
    put(outputs, fusion(random_stack(outputs, 3), 1, weight_K, separate=separate))
    assert (outputs(**inputs_of(family)).logits - expected).abs().max() > 0.01  # the output alone is another model


@FAMILIES
def test_gradients_are_those_of_the_dense_table(family):
    model, inputs = adapted_table(family), inputs_of(family)
    alpha = put(model, fusion(random_stack(model, 2), 0, torch.tensor([1.0, 0.5])))
    named = named_factors(model)
    _loss(model, inputs).backward()
    dense = with_dense_table(family, torch.zeros(()))
    table = dense.get_input_embeddings().weight
    factors = held_factors(model)
    with torch.no_grad():
        table += factors["lm_head.lora_b"] @ factors["lm_head.lora_a"]
    _loss(dense, inputs).backward()
    grad_VD = table.grad
    own_a, own_b = named["lm_head.lora_a"], named["lm_head.lora_b"]
    torch.testing.assert_close(own_a.grad, own_b.detach().t() @ grad_VD, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(own_b.grad, grad_VD @ own_a.detach().t(), rtol=1e-3, atol=1e-4)
    # d loss / d alpha_j = <dL/dW, B_j A_j>; slots are own first, then the other
    pairs = [random_stack(model, 2)[f"lm_head.{factor}"] for factor in ("lora_b", "lora_a")]
    expected = torch.stack([(grad_VD * (pairs[0][client] @ pairs[1][client])).sum() for client in range(2)])
    torch.testing.assert_close(alpha.grad, expected, rtol=1e-3, atol=1e-3)


@FAMILIES
def test_plain_peft_reads_the_exported_pair_in_both_places(family, tmp_path):
    model = adapted_table(family, "attention")
    put(model, fusion(random_stack(model, 2), 0, torch.tensor([1.0, 0.5])))
    tables = adapted_embeddings(model.get_base_model())
    assert tables
    save_peft_folder(held_factors(model), tmp_path, "base", family_of(model).task_type, tables)
    reloaded = load_adapter(base_of(family), tmp_path).eval()
    expected = model(**inputs_of(family)).logits
    torch.testing.assert_close(reloaded(**inputs_of(family)).logits, expected, rtol=1e-5, atol=1e-5)
    save_peft_folder(held_factors(model), tmp_path, "base", family_of(model).task_type)
    half = load_adapter(base_of(family), tmp_path).eval()
    assert (half(**inputs_of(family)).logits - expected).abs().max() > 0.01


@FAMILIES
def test_disabled_and_merged_adapters_are_not_counted_twice(family):
    model = adapted_table(family)
    put(model, Adapters(random_adapters(model, 1)))
    expected, plain = model(**inputs_of(family)).logits, base_of(family)(**inputs_of(family)).logits
    with model.disable_adapter():
        torch.testing.assert_close(model(**inputs_of(family)).logits, plain)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")  # merged once is right here
        model.merge_adapter()
    torch.testing.assert_close(model(**inputs_of(family)).logits, expected, rtol=1e-4, atol=1e-4)


@FAMILIES
def test_decoding_gives_the_exact_scores(family):
    model = adapted_table(family, "attention")
    put(model, Adapters(random_adapters(model, 2)))
    ids = [[5, 7], [5, 8, 9], [6], [11, 12], [13, 5]]
    trie = Trie.build(ids, 1)
    prompt = {name: inputs_of(family)[name] for name in ("input_ids", "attention_mask")}
    item_BK, score_BK = constrained_beam_search(model, *prompt.values(), trie, num_beams=len(ids))
    score_BI = score_catalogue(model, *prompt.values(), trie)
    torch.testing.assert_close(score_BK, score_BI.gather(1, item_BK), rtol=1e-4, atol=1e-4)


def test_training_moves_items_of_the_history_too():
    model = adapted_table("llama")
    put(model, Adapters({name: 0.1 * tensor for name, tensor in random_adapters(model, 3).items()}))
    named = named_factors(model)
    rows = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    sequence_loss(model, {**rows, "row_labels": torch.tensor([[-100, -100, 7]])}).backward()
    grad_V = named["lm_head.lora_b"].grad.abs().sum(1)
    with torch.no_grad():
        model.get_base_model().lm_head.base_layer.weight.zero_()  # then only histories could give a gradient
    assert (grad_V[[5, 6]] > 0).all()


@FAMILIES
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("target", ["table", "output", "attention"])
def test_the_loss_over_a_catalogue_is_that_of_its_logits(family, separate, target):
    model = attach_lora(base_of(family), LoraSettings(RANK, (target,)))
    put(model, fusion(random_stack(model, 2), 0, torch.tensor([1.0, 0.5]), separate=separate))
    named = named_factors(model)
    token_C = torch.tensor([4, 7, 9, 11, 30])
    label_BT = torch.tensor([[-100, 4, 30], [-100, 11, -100], [-100, -100, 7]])
    rows = {"input_ids": torch.tensor([[5, 4, 30], [9, 11, 2], [7, 7, 7]]), "attention_mask": torch.ones(3, 3).long()}
    labels = {"labels": label_BT} if family == "t5" else {"row_labels": label_BT}
    loss = sequence_loss(model, {**rows, **labels, "catalogue": token_C})
    loss.backward()
    found = {name: factor.grad.clone() for name, factor in named.items()}
    model.zero_grad()
    hidden_RD, target_R = family_of(model).predictions(model.get_base_model(), {**rows, **labels})
    logit_RC = family_of(model).token_logits(model.get_base_model(), hidden_RD)[:, token_C]
    expected = torch.nn.functional.cross_entropy(logit_RC, torch.searchsorted(token_C, target_R))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    for name, factor in named.items():
        torch.testing.assert_close(found[name], factor.grad, rtol=1e-3, atol=1e-5)
    if target == "output":  # what is not in the catalogue is not touched
        outside_V = torch.ones(40, dtype=torch.bool).index_fill(0, token_C, False)
        assert not found["lm_head.lora_b"][outside_V].any()
        assert found["lm_head.lora_b"][token_C].any(1).all()


@FAMILIES
def test_a_table_starts_with_the_coordinates_of_its_vectors(family):
    model = adapted_table(family, "attention")
    shapes = adapter_shapes(model)
    start = initial_adapters(shapes, 7)
    width = shapes["lm_head"].in_features
    assert torch.equal(start["lm_head.lora_a"], torch.eye(width)[:RANK])
    assert not start["lm_head.lora_b"].any()
    assert torch.equal(start["lm_head.lora_a"], initial_adapters(shapes, 8)["lm_head.lora_a"])  # there is no draw
    others = [key for key in start if key.endswith("lora_a") and key != "lm_head.lora_a"]
    assert others
    assert not any(torch.equal(start[key], torch.eye(*start[key].shape)) for key in others)
    outputs = initial_adapters(adapter_shapes(attach_lora(base_of(family), LoraSettings(RANK, ("output",)))), 7)
    assert not torch.equal(outputs["lm_head.lora_a"], start["lm_head.lora_a"])  # an output alone starts as layers do


def test_rows_of_peers_are_those_of_their_products_however_often_they_are_asked_for():
    model = adapted_table("llama")
    weight_K = torch.tensor([1.5, -0.5, 2.0])
    (layer,) = fused_layers(model).values()
    ids_C = torch.tensor([3, 8, 11])
    found = []
    for seed in (1, 2):
        stack = random_stack(model, 3)
        stack = {name: seed * tensor for name, tensor in stack.items()}
        put(model, fusion(stack, 1, weight_K))
        pairs = zip(stack["lm_head.lora_b"], stack["lm_head.lora_a"], strict=True)
        update_VD = sum(weight * b @ a for weight, (b, a) in zip(weight_K, pairs, strict=True))
        expected_CD = layer.get_base_layer().weight[ids_C] + update_VD[ids_C]
        for _ in range(2):  # what is kept for a catalogue must not outlive its directions
            torch.testing.assert_close(layer.output_rows(ids_C), expected_CD, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            layer.update_rows(torch.tensor([[8, 2]])), update_VD[[8, 2]][None], rtol=1e-4, atol=1e-4
        )
        found.append(expected_CD)
    assert not torch.allclose(found[0], found[1])


def test_ranking_sees_every_change_of_what_is_loaded():
    """The dense update is made once; training makes it anew, by an optimiser that does not count versions too."""
    model, inputs = adapted_table("llama"), inputs_of("llama")
    alpha = put(model, fusion(random_stack(model, 3), 1, torch.tensor([1.5, -0.5, 2.0])))
    own_b = named_factors(model)["lm_head.lora_b"]

    def trained_by(optimizer):
        model(**inputs).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    changes = [
        lambda: own_b.add_(0.25),
        lambda: alpha.add_(0.25),
        lambda: own_b.add_(0.25),
        lambda: trained_by(torch.optim.AdamW([own_b, alpha], lr=0.1, fused=True)),
    ]
    for change in changes:
        with torch.no_grad():
            before = model(**inputs).logits
            with torch.set_grad_enabled(change is changes[-1]):
                change()
            ranked = model(**inputs).logits
        trained = model(**inputs).logits  # with gradients: low rank
        torch.testing.assert_close(ranked, trained.detach(), rtol=1e-4, atol=1e-4)
        assert (ranked - before).abs().max() > 0.01
