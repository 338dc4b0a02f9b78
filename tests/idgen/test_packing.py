"""Layers that are computed again, and logits in pieces: the same numbers in less room."""

import pytest
import torch
from tiny_causal import tiny_causal
from tiny_t5 import tiny_t5

from distill.losses import finetune_loss
from fedecider.models.adapters import LoraSettings, adapter_parameters, attach_lora
from idgen.backbones.family import num_targets
from idgen.losses import MAX_LOGITS, sequence_loss
from idgen.training import checkpointed

LENGTHS = [5, 2, 9, 4, 4, 7]


def batch_of(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    token_BS = torch.randint(2, 40, mask.shape, generator=generator)
    labels = token_BS.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": token_BS * mask, "attention_mask": mask, "row_labels": labels}


def gradients(model, batch):
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    loss = sequence_loss(model, batch)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model", [tiny_causal("llama"), tiny_causal("qwen2"), tiny_t5()], ids=["llama", "qwen2", "t5"])
def test_layers_that_are_computed_again_give_the_same_gradients(model):
    batch = batch_of()
    if not hasattr(model, "model"):
        batch = {**batch, "labels": batch["row_labels"][:, 1:4]}
    expected, calls = gradients(model.train(), batch), []
    last = model.model.layers[-1].mlp if hasattr(model, "model") else model.decoder.block[-1].layer[-1]
    handle = last.register_forward_pre_hook(lambda *_: calls.append(1))
    with checkpointed(model, True):
        again = gradients(model, batch)
    assert len(calls) == 2
    after = gradients(model, batch)
    handle.remove()
    assert len(calls) == 3
    for found in (again, after):
        assert found[0] == expected[0]
        assert all(torch.allclose(found[1][name], value, atol=1e-6) for name, value in expected[1].items())


def test_adapters_get_gradients_through_layers_that_are_computed_again():
    model, batch = attach_lora(tiny_causal(), LoraSettings(rank=2)), batch_of()
    for number, parameter in enumerate(adapter_parameters(model)):
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    found = []
    for wanted in (False, True):
        model.zero_grad()
        with checkpointed(model.train(), wanted):
            sequence_loss(model, batch).backward()
        found.append([parameter.grad.clone() for parameter in adapter_parameters(model)])
    assert all(torch.allclose(one, two, atol=1e-6) and bool(one.any()) for one, two in zip(*found, strict=True))


def test_fine_tuning_in_pieces_gives_the_same_gradients(monkeypatch):
    teacher, student, batch = tiny_causal(seed=1), tiny_causal(), batch_of()

    def found():
        student.zero_grad()
        loss = finetune_loss(teacher, student, batch, kl_weight=0.5)
        loss.backward()
        return float(loss.detach()), [parameter.grad.clone() for parameter in student.parameters()]

    expected, calls = found(), []
    monkeypatch.setattr("idgen.losses.MAX_LOGITS", 4 * 40)
    for model in (teacher, student):
        model.lm_head.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    pieces = found()
    assert max(calls) == 4
    assert pieces[0] == pytest.approx(expected[0], abs=1e-5)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(pieces[1], expected[1], strict=True))


def test_logits_in_pieces_give_the_same_gradients(monkeypatch):
    model, batch = tiny_causal(), batch_of()
    expected = gradients(model, batch)
    assert num_targets(batch) * 40 < MAX_LOGITS
    monkeypatch.setattr("idgen.losses.MAX_LOGITS", 4 * 40)
    calls = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    found = gradients(model, batch)
    handle.remove()
    assert max(calls) == 4
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert all(torch.allclose(found[1][name], value, atol=1e-5) for name, value in expected[1].items())
