import copy

import pytest
import torch
from distill_toys import make_task, make_teacher

from distill import train
from distill.pairing import build_student, pairs_of
from distill.train import DistillConfig, distill, train_pairs
from idgen import training
from idgen.backbone_training import train_backbone
from idgen.config import BackboneTraining
from idgen.decode import constrained_beam_search
from idgen.samples import eval_batches
from idgen.training import Execution

pytestmark = pytest.mark.whole

TASK, TOKENIZER = make_task()


def trained_teacher(**sizes):
    teacher = make_teacher(vocab_size=len(TOKENIZER), **sizes)
    train_backbone(teacher, TASK, BackboneTraining(learning_rate=1e-2, batch_size=8, epochs=9), Execution(0))
    return teacher


def copy_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


FROZEN = ("shared", "embed_tokens", "lm_head", "final_layer_norm", "relative_attention_bias", "encoder.block.1.")


def test_losses_fall_and_only_the_paired_blocks_change():
    teacher = trained_teacher(num_layers=3, num_decoder_layers=4)
    before, start = copy_of(teacher), copy_of(build_student(teacher))
    random_state = torch.get_rng_state()
    student, report = distill(
        teacher,
        TASK,
        DistillConfig(epochs=8, learning_rate=5e-3, batch_size=8),
        Execution(3),
        evaluate=lambda model: {"depth": model.config.num_decoder_layers, "training": model.training},
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    after = copy_of(teacher)
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, tensor in student.state_dict().items():
        frozen = any(part in name for part in FROZEN)  # block 1 of the encoder is the odd one
        assert torch.equal(tensor, start[name]) == frozen, name
    assert len(report["pairs"]) == 3
    assert all(pair["after"] < 0.9 * pair["before"] for pair in report["pairs"])
    assert list(report["chained_loss"]) == ["teacher", "init", "student"]
    assert report["chained_loss"]["teacher"] < report["chained_loss"]["init"]
    assert report["pairs"][1] == {
        **report["pairs"][1],
        "stack": "decoder",
        "student_block": 0,
        "teacher_blocks": [0, 1],
    }
    assert report["metrics"] == {
        "teacher": {"depth": 4, "training": False},
        "init": {"depth": 2, "training": False},
        "student": {"depth": 2, "training": False},
    }
    assert report["parameters"]["teacher"] == sum(parameter.numel() for parameter in teacher.parameters())
    assert report["parameters"]["student"] < report["parameters"]["teacher"]
    assert report["logs"]["pairs"][-1]["loss"] < report["logs"]["pairs"][0]["loss"]
    assert not student.training
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_the_student_recommends_items_of_the_catalogue_only():
    teacher = trained_teacher(num_layers=2, num_decoder_layers=2)
    student, _ = distill(teacher, [TASK], DistillConfig(epochs=1, batch_size=8), Execution(0))
    for _, input_ids, mask, _ in eval_batches(TASK, "test", 8):
        items, _ = constrained_beam_search(student, input_ids, mask, TASK.trie, 20)
        assert sorted(items[0].tolist()) == [-1] * 5 + list(range(15))


def test_pairs_do_not_influence_each_other(monkeypatch):
    """Clipped pair by pair, a pair learns the same whether or not another pair (with large losses) is there."""
    teacher = trained_teacher(num_layers=2, num_decoder_layers=2)
    monkeypatch.setattr(training, "CLIP_NORM", 0.01)
    config = DistillConfig(epochs=1, batch_size=8)
    both = build_student(teacher)
    train_pairs(teacher, both, TASK, config, Execution(1))
    alone = build_student(teacher)
    monkeypatch.setattr(train, "pairs_of", lambda teacher: pairs_of(teacher)[:1])
    train_pairs(teacher, alone, TASK, config, Execution(1))
    for name, tensor in both.encoder.state_dict().items():
        assert torch.equal(tensor, alone.encoder.state_dict()[name])
    assert not torch.equal(
        both.decoder.block[0].layer[2].DenseReluDense.wi.weight,
        alone.decoder.block[0].layer[2].DenseReluDense.wi.weight,
    )


def test_same_seed_same_student_and_no_dropout_while_learning():
    teacher = trained_teacher(num_layers=2, num_decoder_layers=2, dropout_rate=0.5)
    students = [distill(teacher, TASK, DistillConfig(epochs=1, batch_size=8), Execution(seed))[0] for seed in (4, 4, 5)]
    first, second, third = (copy_of(student) for student in students)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)
    assert {module.p for module in students[0].modules() if isinstance(module, torch.nn.Dropout)} == {0.5}
    with torch.random.fork_rng():
        torch.manual_seed(77)  # another global stream: were there dropout, batches would not fix the result
        again = distill(teacher, TASK, DistillConfig(epochs=1, batch_size=8), Execution(4))[0]
    assert all(torch.equal(first[name], again.state_dict()[name]) for name in first)


def test_finetuning_is_an_extension_that_lowers_the_chained_loss():
    teacher = trained_teacher(num_layers=2, num_decoder_layers=2)
    student, report = distill(teacher, TASK, DistillConfig(epochs=1, batch_size=8), Execution(0), finetune_rate=5e-3)
    chained = report["chained_loss"]
    assert chained["finetuned"] < chained["student"]
    assert torch.equal(student.shared.weight, teacher.shared.weight)
    assert len(report["logs"]["finetune"]) == 1


def test_student_survives_a_round_trip_through_its_folder(tmp_path):
    teacher = make_teacher(num_layers=4, num_decoder_layers=4, vocab_size=len(TOKENIZER))
    student, _ = distill(teacher, TASK, DistillConfig(epochs=1, batch_size=8), Execution(0))
    student.save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path)
    assert again.config.num_layers == again.config.num_decoder_layers == 2
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in student.state_dict().items())
    assert copy.deepcopy(again.config).num_layers == 2


def test_wrong_settings_are_refused():
    for change in ({"epochs": -1}, {"learning_rate": 0.0}, {"precision": "fp16"}):
        with pytest.raises(ValueError, match="expected"):
            DistillConfig(**change)
