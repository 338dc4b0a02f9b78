import pytest
import torch
from distill_toys import make_batch, make_teacher, silence

from distill.losses import pair_losses
from distill.pairing import Pair, build_student, pair_parameters, pairs_of


def block_state(model, stack, number):
    return {
        name: tensor
        for name, tensor in getattr(model, stack).block[number].state_dict().items()
        if "relative_attention_bias" not in name
    }


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_pairs_of_uneven_stacks():
    teacher = make_teacher(num_layers=4, num_decoder_layers=3)
    assert pairs_of(teacher) == [Pair("encoder", 0, 0), Pair("encoder", 1, 2), Pair("decoder", 0, 0)]


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


@pytest.mark.parametrize("init", ["first", "second", "mean"])
def test_blocks_start_from_the_asked_teacher_blocks(init):
    teacher = make_teacher(num_layers=5, num_decoder_layers=4)
    state = torch.get_rng_state()
    student = build_student(teacher, init)
    assert torch.equal(torch.get_rng_state(), state)
    for pair in pairs_of(teacher):
        first, second = (block_state(teacher, pair.stack, pair.first + add) for add in (0, 1))
        wanted = {"first": first, "second": second}.get(init) or {
            name: (first[name] + second[name]) / 2 for name in first
        }
        assert equal(block_state(student, pair.stack, pair.student), wanted)
    assert equal(block_state(student, "encoder", 2), block_state(teacher, "encoder", 4))  # the odd one is copied
    names = [name for name in student.state_dict() if ".block." not in name or "relative_attention_bias" in name]
    assert len(names) == 4 + 2 + 2 - 0  # shared, two stacks' views of it, lm_head; two final norms; two biases
    assert all(torch.equal(student.state_dict()[name], teacher.state_dict()[name]) for name in names)
    assert student.lm_head.weight.data_ptr() == student.shared.weight.data_ptr()
    assert student.shared.weight.data_ptr() != teacher.shared.weight.data_ptr()


def test_parameter_count_halves_the_blocks_only():
    teacher = make_teacher(num_layers=6, num_decoder_layers=6)
    student = build_student(teacher)

    def count(module):
        return sum(parameter.numel() for name, parameter in module.named_parameters() if "attention_bias" not in name)

    for stack in ("encoder", "decoder"):
        assert count(getattr(teacher, stack).block) == 2 * count(getattr(student, stack).block)
    assert student.shared.weight.numel() == teacher.shared.weight.numel()


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
    student, batch = build_student(teacher, "first"), make_batch()
    with torch.no_grad():
        losses = pair_losses(teacher, student, pairs_of(teacher), batch)
        assert losses.tolist() == [0.0] * 5
        assert torch.equal(student(**batch).logits, teacher(**batch).logits)
        other = pair_losses(teacher, build_student(teacher, "second"), pairs_of(teacher), batch)
        assert (other > 0.01).all()


def test_loss_is_zero_when_the_first_block_is_the_identity_and_the_second_is_copied():
    teacher = make_teacher(num_layers=4, num_decoder_layers=6)
    for stack in ("encoder", "decoder"):
        for block in getattr(teacher, stack).block[2::2]:  # not block 0, which computes the position bias
            silence(block)
    student = build_student(teacher, "second")
    with torch.no_grad():
        losses = pair_losses(teacher, student, pairs_of(teacher), make_batch())
    assert losses[[1, 3, 4]].tolist() == [0.0] * 3
    assert (losses[[0, 2]] > 0.01).all()


def test_nothing_to_halve_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        build_student(make_teacher(num_layers=1, num_decoder_layers=1))
    with pytest.raises(ValueError, match="init"):
        build_student(make_teacher(), "last")  # type: ignore[arg-type]
    half = build_student(make_teacher(num_layers=1, num_decoder_layers=2)).config
    assert (half.num_layers, half.num_decoder_layers) == (1, 1)
