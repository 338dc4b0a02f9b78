import pytest
import torch
from distill_toys import make_batch, make_teacher, silence

from distill.losses import pair_losses
from distill.pairing import Pair, build_student, pair_parameters, pairs_of, spans


def block_state(model, stack, number):
    return {
        name: tensor
        for name, tensor in getattr(model, stack).block[number].state_dict().items()
        if "relative_attention_bias" not in name
    }


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("depth", range(1, 31))
def test_students_have_half_the_depth_and_leave_nothing_out(depth):
    found = spans(depth)
    assert len(found) == (depth + 1) // 2
    assert [layer for first, last in found for layer in range(first, last + 1)] == list(range(depth))


def test_a_head_of_its_own_stays_one_where_the_config_calls_it_tied():
    teacher = make_teacher(tie_word_embeddings=True)
    teacher.lm_head.weight = torch.nn.Parameter(torch.randn_like(teacher.lm_head.weight))
    student = build_student(teacher)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert torch.equal(student.shared.weight, teacher.shared.weight)


def test_pairs_of_uneven_stacks():
    teacher = make_teacher(num_layers=4, num_decoder_layers=3)
    assert pairs_of(teacher) == [Pair("encoder", 0, 0, 1), Pair("encoder", 1, 2, 3), Pair("decoder", 0, 0, 1)]


def test_depth_is_halved_in_all_three_configs_and_layers_are_renumbered():
    teacher = make_teacher(num_layers=6, num_decoder_layers=4)
    student = build_student(teacher)
    assert (student.config.num_layers, student.config.num_decoder_layers) == (3, 2)
    assert student.encoder.config.num_layers == len(student.encoder.block) == 3
    assert student.decoder.config.num_layers == len(student.decoder.block) == 2
    for stack in (student.encoder, student.decoder):
        for number, block in enumerate(stack.block):
            attention = [module for module in block.modules() if type(module).__name__ == "T5Attention"]
            assert {module.layer_idx for module in attention} == {number}
            biased = [module for module in attention if module.has_relative_attention_bias]
            assert len(biased) == (1 if number == 0 else 0)
    assert teacher.config.num_layers == 6
    assert student.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=4).shape[0] == 1  # caches use the numbers


def test_blocks_start_from_the_first_of_their_teacher_blocks():
    teacher = make_teacher(num_layers=5, num_decoder_layers=4)
    state = torch.get_rng_state()
    student = build_student(teacher)
    assert torch.equal(torch.get_rng_state(), state)
    for pair in pairs_of(teacher):
        wanted = block_state(teacher, pair.stack, pair.first)
        assert equal(block_state(student, pair.stack, pair.student), wanted)
    assert equal(block_state(student, "encoder", 2), block_state(teacher, "encoder", 4))  # the odd one is copied
    names = [name for name in student.state_dict() if ".block." not in name or "relative_attention_bias" in name]
    assert len(names) == 4 + 2 + 2 - 0  # shared, two stacks' variants of it, lm_head; two final norms; two biases
    assert all(torch.equal(student.state_dict()[name], teacher.state_dict()[name]) for name in names)
    assert student.lm_head.weight.data_ptr() == student.shared.weight.data_ptr()
    assert student.shared.weight.data_ptr() != teacher.shared.weight.data_ptr()


def test_trained_parameters_are_the_blocks_without_position_bias():
    teacher = make_teacher(num_layers=5, num_decoder_layers=4)
    student = build_student(teacher)
    trained = {id(parameter) for pair in pairs_of(teacher) for parameter in pair_parameters(student, pair)}
    frozen = [name for name, parameter in student.named_parameters() if id(parameter) not in trained]
    allowed = ("shared", "final_layer_norm", "relative_attention_bias", "encoder.block.2.")
    assert all(any(part in name for part in allowed) for name in frozen)
    assert sum("relative_attention_bias" in name for name in frozen) == 2


def test_student_equals_teacher_when_every_second_block_is_the_identity():
    teacher = make_teacher(num_layers=6, num_decoder_layers=4)
    for stack in ("encoder", "decoder"):
        for block in getattr(teacher, stack).block[1::2]:
            silence(block)
    student, batch = build_student(teacher), make_batch()
    with torch.no_grad():
        losses = pair_losses(teacher, student, pairs_of(teacher), batch)
        assert losses.tolist() == [0.0] * 5
        assert torch.equal(student(**batch).logits, teacher(**batch).logits)


def test_loss_is_zero_when_the_first_block_is_the_identity_and_the_second_is_copied():
    teacher = make_teacher(num_layers=4, num_decoder_layers=6)
    for stack in ("encoder", "decoder"):
        for block in getattr(teacher, stack).block[2::2]:  # not block 0, which computes the position bias
            silence(block)
    student, pairs = build_student(teacher), pairs_of(teacher)
    for pair in pairs:
        second = block_state(teacher, pair.stack, pair.last)
        getattr(student, pair.stack).block[pair.student].load_state_dict(second, strict=False)
    with torch.no_grad():
        losses = pair_losses(teacher, student, pairs, make_batch())
    assert losses[[1, 3, 4]].tolist() == [0.0] * 3
    assert (losses[[0, 2]] > 0.01).all()


def test_nothing_to_halve_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        build_student(make_teacher(num_layers=1, num_decoder_layers=1))
    half = build_student(make_teacher(num_layers=1, num_decoder_layers=2)).config
    assert (half.num_layers, half.num_decoder_layers) == (1, 1)
