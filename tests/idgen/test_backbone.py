import json
import math

import pytest
import torch
from exact_scores import allowed_tokens
from tiny_tasks import make_domain, make_task, make_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

from fedecider.bounds import Diverged
from idgen import backbone, training
from idgen.backbone import build_backbone
from idgen.backbone_training import train_backbone
from idgen.backbones.family import num_targets as num_targets_of
from idgen.backbones.small_t5 import NUM_FLAGS
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig, TrainConfig
from idgen.loss_guard import LossGuard
from idgen.losses import sequence_loss
from idgen.optimizer import DISTILL_COURSE, Course, learning_rate_factor, parameter_groups
from idgen.samples import train_batches
from idgen.training import Execution, Optimisation, epoch_generator, train_model

DOMAIN = make_domain(num_items=11, lengths=(4, 6, 13))
TOKENIZER = make_tokenizer([DOMAIN], 250)
TASK = make_task(DOMAIN, TOKENIZER, SampleConfig(templates="compact", max_history=6))
SMALL = BackboneConfig(d_model=8, num_layers=2)


def first_batch():
    return next(train_batches(TASK, 6, torch.Generator().manual_seed(1)))


def same(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_scratch_has_the_asked_sizes_and_depends_on_the_seed_only():
    state = torch.get_rng_state()
    model = build_backbone(SMALL, TOKENIZER, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    config = model.config
    sizes = (config.vocab_size, config.d_model, config.num_layers, config.num_decoder_layers, config.d_ff, config.d_kv)
    assert sizes == (len(TOKENIZER), 8, 2, 2, 32, 2)
    assert not model.training
    torch.manual_seed(99)
    assert same(model.state_dict(), build_backbone(SMALL, TOKENIZER, seed=3).state_dict())
    assert not same(model.state_dict(), build_backbone(SMALL, TOKENIZER, seed=4).state_dict())


def test_saved_backbone_comes_back_and_padded_embeddings_are_cut(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    wide = T5ForConditionalGeneration(T5Config(vocab_size=len(TOKENIZER) + 5, **sizes)).eval()
    wide.save_pretrained(tmp_path)
    model = build_backbone(BackboneConfig(name_or_path=str(tmp_path)), TOKENIZER)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == len(TOKENIZER)
    batch = first_batch()
    with torch.no_grad():
        got, expected = (one(**batch).logits for one in (model, wide))
    assert torch.allclose(got, expected[..., : len(TOKENIZER)], atol=1e-6)
    model.save_pretrained(tmp_path / "again")
    again = build_backbone(BackboneConfig(name_or_path=str(tmp_path / "again")), TOKENIZER)
    assert same(model.state_dict(), again.state_dict())


def test_what_cannot_be_a_backbone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot load a backbone"):
        build_backbone(BackboneConfig(name_or_path=str(tmp_path / "nowhere")), TOKENIZER)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"of type 'bert' \(no architecture named\); expected one of"):
        build_backbone(BackboneConfig(name_or_path=str(tmp_path)), TOKENIZER)
    short = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2))
    short.save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="20 token embeddings"):
        build_backbone(BackboneConfig(name_or_path=str(tmp_path / "short")), TOKENIZER)
    with pytest.raises(ValueError, match="without tasks"):
        build_backbone(BackboneConfig(embedding_init="text"), TOKENIZER)
    for change in ({"num_layers": 0}, {"d_model": 0}, {"kind": "bert"}):
        with pytest.raises(ValueError, match="expected"):
            BackboneConfig(**change)


def test_text_start_fills_item_tokens():
    sizes = {"d_model": 8, "num_layers": 1}
    vector_ID = torch.nn.functional.normalize(
        torch.randn(len(TASK.trie), 8, generator=torch.Generator().manual_seed(0))
    )
    config = BackboneConfig(**sizes, embedding_init="text")
    model = build_backbone(config, TOKENIZER, 1, [TASK], {TASK.name: vector_ID})
    tokens = sorted({token for tokens in TASK.item_ids.token_ids for token in tokens})
    others = sorted(set(range(len(TOKENIZER))) - set(tokens))
    length_V = model.shared.weight[:, :-NUM_FLAGS].norm(dim=1)
    assert float(length_V[tokens].min()) > 10 * float(length_V[others].max())
    with pytest.raises(ValueError, match="no item vectors"):
        build_backbone(config, TOKENIZER, 1, [TASK])
    decoder = BackboneConfig(**sizes, kind="decoder", embedding_init="text")
    llama = build_backbone(decoder, TOKENIZER, 1, [TASK], {TASK.name: vector_ID})
    longest = max(len(tokens) for tokens in TASK.item_ids.token_ids) + 1  # and the end token, which is never read
    assert longest > 2
    assert llama.config.max_position_embeddings == TASK.config.max_source_tokens + longest - 1


def plain(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def test_loss_without_nodes_is_the_models_own_and_padding_has_no_influence():
    """Equal to the cross-entropy of transformers; more padding on the right of inputs and labels changes nothing."""
    model = build_backbone(SMALL, TOKENIZER, 1)
    batch = plain(first_batch())
    with torch.no_grad():
        loss = sequence_loss(model, batch)
        assert loss.item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)
        pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        wider = {name: torch.nn.functional.pad(batch[name], (0, 4), value=value) for name, value in pads.items()}
        assert sequence_loss(model, wider).item() == pytest.approx(loss.item(), abs=1e-6)
        wrong = {**wider, "labels": wider["labels"].clamp(min=0)}  # what the loss would be with pads as targets
        assert abs(sequence_loss(model, wrong).item() - loss.item()) > 1e-3


@pytest.mark.parametrize("dense_above", [0, 512])
def test_loss_of_batches_is_the_mean_of_what_items_are_ranked_by(dense_above, monkeypatch):
    """-log p(ID) along the trie of the row's own catalogue."""
    monkeypatch.setattr("idgen.losses.DENSE_ABOVE", dense_above)
    corner = make_domain("corner", num_items=14, lengths=(5, 7, 8), seed=1)
    tasks = [TASK, make_task(corner, TOKENIZER, TASK.config)]
    model = build_backbone(SMALL, TOKENIZER, 1)
    batch = next(train_batches(tasks, 64, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        logit_BTV, losses = model(**plain(batch)).logits, []
        for row, label_T in enumerate(batch["labels"].tolist()):
            prompt = TOKENIZER.decode(batch["input_ids"][row])
            trie, beginning, total = tasks["corner" in prompt].trie, [], 0.0
            for place, token in enumerate(label_T):
                if token < 0:
                    continue
                allowed = allowed_tokens(trie, beginning)
                total -= torch.log_softmax(logit_BTV[row, place, allowed], 0)[allowed.index(token)]
                beginning.append(token)
            losses.append(total)
        assert num_targets_of(batch) == len(losses)
        assert sequence_loss(model, batch).item() == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def test_learning_rate_by_hand():
    linear, cosine = DISTILL_COURSE._replace(warmup=lambda total: 2), DISTILL_COURSE._replace(schedule="cosine")
    factors = [learning_rate_factor(step, 10, linear) for step in range(10)]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert learning_rate_factor(0, 8, cosine) == 1.0
    assert learning_rate_factor(2, 8, cosine) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_norms_have_no_weight_decay():
    model = build_backbone(SMALL, TOKENIZER, 1)
    model.shared.weight.requires_grad_(False)
    decayed, kept = parameter_groups(model, 1e-3, DISTILL_COURSE._replace(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.3
    assert kept["weight_decay"] == 0.0
    assert all("layer_norm" in names[id(parameter)] for parameter in kept["params"])
    assert len(kept["params"]) == 2 * 2 + 2 * 3 + 2  # encoder layers, decoder layers, final norms
    assert not any("layer_norm" in names[id(parameter)] for parameter in decayed["params"])
    assert id(model.shared.weight) not in {id(parameter) for parameter in decayed["params"]}


def test_the_table_has_a_rate_of_its_own():
    model = build_backbone(SMALL, TOKENIZER, 1)
    config = BackboneTraining(learning_rate=1e-4, table_lr_multiplier=10.0, max_steps=3)
    groups = parameter_groups(model, 1e-4, DISTILL_COURSE, 10.0)
    assert [id(parameter) for parameter in groups[2]["params"]] == [id(model.shared.weight)]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train_backbone(model, TASK, config, Execution(0))
    moved = {
        name: float((parameter.detach() - before[name]).abs().max()) for name, parameter in model.named_parameters()
    }
    assert 1.5e-3 < moved.pop("shared.weight") < 2.5e-3  # three steps of AdamW at 1, 2 / 3 and 1 / 3 of the rate
    assert max(moved.values()) < 2.5e-4
    model.shared.weight.requires_grad_(False)
    assert len(parameter_groups(model, 1e-4, DISTILL_COURSE, 10.0)) == 2


def test_one_step_is_adamw_with_clipping_by_hand(monkeypatch):
    """First AdamW step: decay, then the learning rate times g / (|g| + eps) of the clipped gradient."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -2.0]]))
    monkeypatch.setattr(training, "CLIP_NORM", 1e-6)
    config = TrainConfig(learning_rate=0.1, batch_size=1)
    course = Course("linear", lambda total: 0, weight_decay=0.2, beta2=0.98, dropout=None)
    batch = {"labels": torch.zeros(1, 1)}

    def loss_fn(_):
        return (model.weight * torch.tensor([[3.0, -4.0]])).sum()

    train_model(
        model,
        lambda epoch: [batch],
        loss_fn,
        [{"params": [model.weight]}],
        Optimisation(config, course, 1),
        Execution(0),
    )
    clipped = torch.tensor([[0.6e-6, -0.8e-6]])  # of (3, -4), norm 5
    expected = torch.tensor([[0.5, -2.0]]) * (1 - 0.1 * 0.2) - 0.1 * clipped / (clipped.abs() + 1e-6)
    assert torch.allclose(model.weight, expected, atol=1e-5)


def test_same_seed_same_weights_and_the_global_stream_is_left_alone(monkeypatch):
    monkeypatch.setattr(backbone, "DROPOUT", 0.3)
    config = BackboneTraining(batch_size=7, epochs=2)
    states = []
    for seed in (5, 5, 6):
        model = build_backbone(SMALL, TOKENIZER, 1)
        before = torch.get_rng_state()
        train_backbone(model, TASK, config, Execution(seed))
        assert torch.equal(torch.get_rng_state(), before)
        states.append(model.state_dict())
    assert same(states[0], states[1])
    assert not same(states[0], states[2])
    draws = [int(torch.randint(2**60, (), generator=epoch_generator(*pair))) for pair in ((0, 1), (1, 0), (0, 1))]
    assert draws[0] == draws[2] != draws[1]


def guarded(losses, first=None, window=20):
    """Of windows with these mean losses."""
    guard = LossGuard(first)
    for number, loss in enumerate(losses):
        for step in range(window):
            done = number * window + step + 1
            guard.step(torch.tensor(loss), done, done == len(losses) * window, 0.1)


def test_a_loss_that_stays_above_its_start_ends_the_training():
    guarded([5.0, 6.1, 4.0, *[6.1] * 9, 5.9, *[6.1] * 9, 5.0])
    with pytest.raises(Diverged, match=r"diverged at step 240, learning_rate 0.1: the loss is 6.1, it was 5 at first"):
        guarded([5.0, 4.0, *[6.1] * 10, 5.0])
    with pytest.raises(Diverged, match=r"at step 20, .* it was 5 at first"):
        guarded([6.1], first=5.0)
    LossGuard(5.0).step(torch.tensor(6.1), 1003, True, 0.1)  # a few steps behind a checkpoint say little


def test_a_loss_that_rises_behind_the_last_window_ends_the_training():
    guard = LossGuard()
    for step, loss in enumerate([5.0] * 40 + [17.0] * 4, 1):
        guard.step(torch.tensor(loss), step, False, 0.1)
    with pytest.raises(Diverged, match=r"at step 45, .* the loss is 8, it was 5 at first"):
        guard.step(torch.tensor(17.0), 45, True, 0.1)


def test_a_loss_that_is_no_number_ends_the_training():
    with pytest.raises(Diverged, match=r"diverged at step 7, learning_rate 0.1: the loss is nan"):
        guarded([math.nan], window=7)


def test_divergence_and_wrong_settings_are_refused():
    model = build_backbone(SMALL, TOKENIZER, 1)
    with torch.no_grad():
        model.shared.weight[:] = math.nan
    with pytest.raises(Diverged, match=r"diverged at step \d+, learning_rate 0.001: the loss is nan"):
        train_backbone(model, TASK, BackboneTraining(batch_size=7), Execution(0))
    for change in (
        {"learning_rate": 0.0},
        {"batch_size": 0},
        {"epochs": -1},
        {"precision": "fp16"},
    ):
        with pytest.raises(ValueError, match="expected"):
            BackboneTraining(**change)
