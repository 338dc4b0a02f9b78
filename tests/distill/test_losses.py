import pytest
import torch
import torch.nn.functional as F
from distill_toys import make_batch, make_task, make_teacher

from distill.losses import finetune_loss, pair_losses, recorded
from distill.pairing import build_student, pair_parameters, pairs_of
from idgen.losses import sequence_loss
from idgen.samples import train_batches


def test_recorded_outputs_are_the_models_hidden_states():
    """Against ``output_hidden_states``, whose last entry is behind the final norm; hooks are gone afterwards."""
    teacher, batch = make_teacher(num_layers=3, num_decoder_layers=2), make_batch()
    blocks = [*teacher.encoder.block, *teacher.decoder.block]
    with torch.no_grad():
        output = teacher(**batch, output_hidden_states=True, use_cache=False)  # transformers leaves hooks of its own
        hooks = [len(block._forward_hooks) for block in blocks]
        with recorded(teacher) as calls:
            teacher(**batch, use_cache=False)
    assert [len(block._forward_hooks) for block in blocks] == hooks
    assert set(calls) == {("encoder", 0), ("encoder", 1), ("encoder", 2), ("decoder", 0), ("decoder", 1)}
    assert torch.equal(calls["encoder", 0].args[0], output.encoder_hidden_states[0])
    assert torch.equal(calls["encoder", 1].output, output.encoder_hidden_states[2])
    assert torch.equal(calls["decoder", 0].output, calls["decoder", 1].args[0])
    assert not torch.equal(calls["encoder", 2].output, output.encoder_hidden_states[3])


def test_one_pair_by_hand():
    """Pair 1 of the encoder, spelled out: mask, the shared position bias and the sum over features."""
    teacher = make_teacher(num_layers=4, num_decoder_layers=2)
    student, batch = build_student(teacher), make_batch(samples=3)
    with torch.no_grad():
        number = pairs_of(teacher).index(("encoder", 1, 2, 3))
        loss = pair_losses(teacher, student, pairs_of(teacher), batch)[number].item()
        total, count = 0.0, 0
        for row in range(3):  # one sample at a time, without any padding
            tokens = batch["input_ids"][row][batch["attention_mask"][row] == 1][None]
            hidden = teacher.shared(tokens)
            bias = teacher.encoder.block[0].layer[0].SelfAttention.compute_bias(tokens.shape[1], tokens.shape[1])
            for block in teacher.encoder.block[:2]:
                hidden = block(hidden, position_bias=bias)[0]
            wanted = hidden
            for block in teacher.encoder.block[2:4]:
                wanted = block(wanted, position_bias=bias)[0]
            got = student.encoder.block[1](hidden, position_bias=bias)[0]
            total += float(((got - wanted) ** 2).sum())
            count += tokens.shape[1]
    assert loss == pytest.approx(total / count, rel=1e-4)


def test_padding_and_ignored_labels_have_no_influence():
    teacher = make_teacher(num_layers=4, num_decoder_layers=3)
    student, pairs, batch = build_student(teacher), pairs_of(teacher), make_batch()
    with torch.no_grad():
        losses = pair_losses(teacher, student, pairs, batch)
        pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        wider = {name: F.pad(batch[name], (0, 3), value=value) for name, value in pads.items()}
        assert torch.allclose(pair_losses(teacher, student, pairs, wider), losses, rtol=1e-4)
        junk = dict(batch)
        junk["input_ids"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 17)
        assert torch.allclose(pair_losses(teacher, student, pairs, junk), losses, rtol=1e-4)
        parts = [
            pair_losses(teacher, student, pairs, {name: tensor[row : row + 1] for name, tensor in batch.items()})
            for row in range(len(batch["labels"]))
        ]
        weight = (batch["labels"] != -100).sum(1)
        last = sum(float(part[-1]) * int(count) for part, count in zip(parts, weight, strict=True)) / int(weight.sum())
        assert losses[-1].item() == pytest.approx(last, rel=1e-4)  # the mean is over tokens, not over samples


def test_gradients_of_pairs_are_disjoint_and_spare_what_is_frozen():
    teacher = make_teacher(num_layers=4, num_decoder_layers=5)
    student, batch = build_student(teacher), make_batch()
    pairs = pairs_of(teacher)
    own = [{id(parameter) for parameter in pair_parameters(student, pair)} for pair in pairs]
    assert all(first.isdisjoint(second) for i, first in enumerate(own) for second in own[i + 1 :])
    losses = pair_losses(teacher, student, pairs, batch)
    for number, pair in enumerate(pairs):
        student.zero_grad(set_to_none=True)
        losses[number].backward(retain_graph=True)
        reached = {
            id(parameter)
            for name, parameter in student.named_parameters()
            if parameter.grad is not None and parameter.grad.abs().sum() > 0 and "attention_bias" not in name
        }
        assert reached == own[number], pair
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_finetune_loss_is_cross_entropy_plus_weighted_kl():
    teacher, batch = make_teacher(seed=1), make_batch()
    student = build_student(teacher)
    with torch.no_grad():
        counts = batch["labels"] != -100
        student_log, teacher_log = (model(**batch).logits.log_softmax(-1)[counts] for model in (student, teacher))
        kl = (teacher_log.exp() * (teacher_log - student_log)).sum(-1).mean()
        expected = sequence_loss(student, batch) + 0.3 * kl
        assert kl > 0.01
        assert finetune_loss(teacher, student, batch, 0.3).item() == pytest.approx(expected.item(), rel=1e-4)
        assert finetune_loss(teacher, student, batch, 0.0).item() == pytest.approx(
            sequence_loss(student, batch).item(), rel=1e-5
        )
        assert finetune_loss(teacher, teacher, batch, 5.0).item() == pytest.approx(
            sequence_loss(teacher, batch).item(), rel=1e-5
        )


def test_finetune_loss_is_among_the_tokens_that_may_follow_as_in_pretraining():
    task, tokenizer = make_task()
    teacher = make_teacher(seed=1, vocab_size=len(tokenizer))
    batch = next(train_batches(task, 5, torch.Generator().manual_seed(0)))
    assert "node" in batch
    with torch.no_grad():
        expected = sequence_loss(teacher, batch).item()
        everything = sequence_loss(teacher, {name: batch[name] for name in make_batch()}).item()
        assert finetune_loss(teacher, teacher, batch, 0.5).item() == pytest.approx(expected, rel=1e-5)
        assert everything != pytest.approx(expected, rel=0.1)
