"""Several samples in one row, and layers that are computed again: the same numbers in less room."""

from itertools import pairwise

import pytest
import torch
from tiny_causal import FAMILIES, tiny_causal
from tiny_t5 import tiny_t5

from distill.losses import finetune_loss, pair_losses
from distill.pairing import build_student, pairs_of
from fedecider.models.adapters import LoraSettings, adapter_parameters, attach_lora
from idgen.backbones.family import num_samples_of, num_targets
from idgen.prompts import SampleConfig
from idgen.samples import packed
from idgen.training import MAX_LOGITS, checkpointed, sequence_loss

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


@pytest.mark.parametrize("num_tokens", [9, 11, 16, 64])
def test_packing_loses_no_sample(num_tokens):
    batch = batch_of()
    rows = packed(batch, num_tokens)
    assert rows["input_ids"].shape[1] <= num_tokens
    assert len(rows["input_ids"]) == {9: 4, 11: 3, 16: 2, 64: 1}[num_tokens]
    assert num_samples_of(rows) == num_samples_of(batch) == len(LENGTHS)
    assert num_targets(rows) == num_targets(batch)
    found = []
    for tokens, mask, labels, places in zip(
        *(rows[name] for name in ("input_ids", "attention_mask", "row_labels", "position_ids")), strict=True
    ):
        starts = [*torch.nonzero((places == 0) & (mask != 0)).flatten().tolist(), int(mask.sum())]
        for start, end in pairwise(starts):
            assert places[start:end].tolist() == list(range(end - start))
            found.append((tokens[start:end].tolist(), labels[start:end].tolist()))
    expected = [
        (tokens[:length].tolist(), labels[:length].tolist())
        for tokens, labels, length in zip(batch["input_ids"], batch["row_labels"], LENGTHS, strict=True)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [11, 64])
def test_samples_of_a_row_do_not_see_each_other(family, num_tokens):
    model, batch = tiny_causal(family), batch_of()
    loss, gradient = gradients(model, batch)
    packed_loss, packed_gradient = gradients(model, packed(batch, num_tokens))
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    for name, expected in gradient.items():
        assert torch.allclose(packed_gradient[name], expected, atol=1e-5), name


def test_distillation_reads_packed_rows():
    teacher, batch = tiny_causal(), batch_of()
    student = build_student(teacher)
    with torch.no_grad():
        plain = pair_losses(teacher, student, pairs_of(teacher), batch)
        rows = pair_losses(teacher, student, pairs_of(teacher), packed(batch, 16))
    assert torch.allclose(plain, rows, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"targets": "last"}, {"packed_tokens": 63}])
def test_settings_that_cannot_be_packed_are_refused(changes):
    row = {"templates": "history", "targets": "every", "user_wording": "none", "max_source_tokens": 64}
    assert SampleConfig(**row, packed_tokens=64).packed_tokens == 64
    with pytest.raises(ValueError, match="packed_tokens"):
        SampleConfig(**{**row, "packed_tokens": 64, **changes})


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
    monkeypatch.setattr("idgen.training.MAX_LOGITS", 4 * 40)
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
    monkeypatch.setattr("idgen.training.MAX_LOGITS", 4 * 40)
    calls = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    found = gradients(model, batch)
    handle.remove()
    assert max(calls) == 4
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert all(torch.allclose(found[1][name], value, atol=1e-5) for name, value in expected[1].items())
