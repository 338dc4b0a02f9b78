import dataclasses
import math

import pytest
import torch
from tiny_tasks import make_domain, make_task, make_tokenizer
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from idgen import soft_ids
from idgen.backbones.t5 import T5
from idgen.config import SampleConfig
from idgen.losses import sequence_loss
from idgen.samples import train_batches
from idgen.segments import Prompts, join, lay_out, make_segments
from idgen.soft_ids import (
    banned_tokens,
    embed,
    greedy_ids,
    id_logits,
    soft_batches,
    soft_id_loss,
    soft_source,
    spliced,
    token_probabilities,
)

DOMAIN = make_domain(num_items=11, lengths=(4, 6, 13))
OTHER = make_domain("other", num_items=7, lengths=(5, 6), seed=3)
TOKENIZER = make_tokenizer([DOMAIN, OTHER], 250)
V = len(TOKENIZER)
PLAIN = SampleConfig(templates="compact", max_history=6)


def tiny_t5(seed, width=8, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    sizes = {"d_model": width, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=V, **{**sizes, **changes})).to(dtype).eval()


def make_source(tasks=None):
    tasks = tasks or [make_task(DOMAIN, TOKENIZER, PLAIN), make_task(OTHER, TOKENIZER, PLAIN)]
    texts = [DOMAIN.item_texts, OTHER.item_texts][: len(tasks)]
    return soft_source(tasks, texts, TOKENIZER, V)


def first_batch(source, size=5, seed=0):
    return next(soft_batches(source, size, torch.Generator().manual_seed(seed)))


def generated(model, source, batch):
    longest = soft_ids.MAX_NEW_TOKENS
    return greedy_ids(model, batch["text_ids"], batch["text_mask"], source.banned_V, source.end_token, longest)


def test_punctuation_and_specials_are_banned_by_the_text_of_the_piece():
    banned = banned_tokens(TOKENIZER, V + 3)
    assert banned[[0, 1, 2]].all()
    assert banned[V:].all()  # rows of the embedding table without a token
    pieces = TOKENIZER.convert_ids_to_tokens(list(range(V)))
    for text in (";", ":", ",", "."):
        for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
            assert banned[token] == (pieces[token] != "▁")  # the lone space begins spelled words: it stays
    assert not banned[TOKENIZER("lantern 2", add_special_tokens=False)["input_ids"]].any()


def test_teacher_forced_logits_choose_the_greedy_tokens():
    """The logits along the greedy IDs are those of the greedy loop: their arg-max is the next token of each ID."""
    source = make_source()
    batch = first_batch(source)
    for seed in range(3):
        model = tiny_t5(seed)
        token_ML, length_M = generated(model, source, batch)
        logits = id_logits(model, batch["text_ids"], batch["text_mask"], token_ML)
        allowed = logits.masked_fill(source.banned_V, -math.inf)
        allowed[:, 1:, source.end_token] = logits[:, 1:, source.end_token]
        best = allowed.argmax(-1)
        assert (length_M >= 1).all()
        for item in range(len(token_ML)):
            kept = int(length_M[item])
            assert torch.equal(best[item, :kept], token_ML[item, :kept])
            assert (token_ML[item, kept:] == source.end_token).all()
            if kept < token_ML.shape[1]:
                assert best[item, kept] == source.end_token


def test_probabilities_sum_to_one_and_ban():
    logits = torch.randn(3, 2, V) * 3
    banned = banned_tokens(TOKENIZER, V)
    prob = token_probabilities(logits, banned)
    assert torch.allclose(prob.sum(-1), torch.ones(3, 2))
    assert (prob[..., banned] == 0).all()
    two = torch.full((1, 1, V), -1e9)
    two[..., 10], two[..., 11] = 1.0, 0.0
    by_hand = 1 / (1 + math.exp(-1))
    got = token_probabilities(two, torch.zeros(V, dtype=torch.bool))
    assert got[0, 0, 10].item() == pytest.approx(by_hand)


def test_one_hot_probabilities_are_the_hard_forward_exactly():
    """Soft IDs that put all weight on one token give the prompts, embeddings and loss of a task with these IDs."""
    source = make_source()
    batch = first_batch(source)
    generator, recommender = tiny_t5(1), tiny_t5(2, width=12)
    table = recommender.get_input_embeddings().weight
    token_ML, length_M = generated(generator, source, batch)
    one_hot = torch.nn.functional.one_hot(token_ML, V).float()
    soft = one_hot @ table
    assert torch.equal(soft, table[token_ML])
    prompts = Prompts(*(batch[name].numpy() for name in Prompts._fields))
    place, length = spliced(
        source.parts, prompts, batch["item"].numpy(), length_M.numpy(), token_ML.shape[1], len(table)
    )
    mask = (torch.arange(place.shape[1]) < length[:, None]).long()
    inputs = {"inputs_embeds": embed(place, table, soft), "attention_mask": mask, "labels": batch["labels"]}

    # The same prompts made of hard tokens: new IDs in the segments, through the recommender's own path.
    old = source.parts.segments
    sequences = [
        old.token_F[start : start + count].tolist() for start, count in zip(old.start_G, old.length_G, strict=True)
    ]
    for item, tokens, count in zip(batch["item"].tolist(), token_ML.tolist(), length_M.tolist(), strict=True):
        sequences[item] = tokens[:count]
    parts = source.parts._replace(segments=make_segments(sequences))
    hard, hard_length = join(parts.segments, lay_out(parts, prompts), parts.padding)
    assert hard_length.tolist() == length.tolist()
    hard_inputs = {"input_ids": torch.from_numpy(hard), "attention_mask": mask, "labels": batch["labels"]}
    assert torch.equal(sequence_loss(recommender, inputs), sequence_loss(recommender, hard_inputs))


def test_the_layout_is_the_recommenders_own():
    """A generator that writes the current IDs reproduces the recommender's training prompts, token for token."""
    task = make_task(DOMAIN, TOKENIZER, dataclasses.replace(PLAIN, max_history=4))
    half = make_task(DOMAIN, TOKENIZER, dataclasses.replace(PLAIN, max_history=2))
    source = make_source(tasks=[task])
    table = torch.arange(V, dtype=torch.float32)[:, None]
    got = set()
    for batch in soft_batches(source, 4, torch.Generator().manual_seed(0)):
        ids = [task.item_ids.token_ids[item] for item in batch["item"] - source.parts.first_item_K[0]]
        width = max(map(len, ids))
        tokens = torch.tensor([[*one, *[1] * (width - len(one))] for one in ids])
        soft = torch.nn.functional.one_hot(tokens, V).float() @ table
        prompts = Prompts(*(batch[name].numpy() for name in Prompts._fields))
        lengths = torch.tensor([len(one) for one in ids])
        place, length = spliced(source.parts, prompts, batch["item"].numpy(), lengths.numpy(), width, V)
        for row, count in zip(embed(place, table, soft)[..., 0].long(), length.tolist(), strict=True):
            got.add(tuple(row[:count].tolist()))
    expected = set()
    for batch in train_batches(half, 4, torch.Generator()):
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            expected.add(tuple(row[mask == 1].tolist()))
    assert got == expected


def test_gradients_reach_the_generator_only_and_the_padding_does_not_matter():
    source = make_source()
    batch = first_batch(source, size=6)
    generator, recommender = tiny_t5(1), tiny_t5(2, width=12).requires_grad_(False)
    loss = soft_id_loss(generator, recommender, source, batch)
    loss.backward()
    reached = [name for name, parameter in generator.named_parameters() if parameter.grad is not None]
    assert len(reached) == len(list(generator.parameters()))
    assert sum(float(parameter.grad.abs().sum()) for parameter in generator.parameters()) > 0
    assert all(parameter.grad is None for parameter in recommender.parameters())
    wider = dict(batch)
    for name in ("text_ids", "text_mask"):
        wider[name] = torch.nn.functional.pad(batch[name], (0, 5))
    wider["labels"] = torch.nn.functional.pad(batch["labels"], (0, 2), value=-100)
    wider["node"] = torch.nn.functional.pad(batch["node"], (0, 2))
    assert soft_id_loss(generator, recommender, source, wider).item() == pytest.approx(loss.item(), abs=1e-6)


def test_the_loss_is_among_the_tokens_that_may_follow_as_in_the_recommenders_training():
    """Of a recommender that finds all tokens alike, the logarithms of the numbers of children on the way."""
    source = make_source()
    batch = first_batch(source, size=6)
    recommender = tiny_t5(2, width=12)
    torch.nn.init.zeros_(recommender.lm_head.weight)
    counts = batch["labels"] != -100
    first = batch["first_child"][batch["node"][counts]]
    children = batch["first_child"][batch["node"][counts] + 1] - first
    expected = children.float().log().sum() / 6
    assert soft_id_loss(tiny_t5(1), recommender, source, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert expected < counts.sum() / 6 * math.log(V) - 1


def test_gradient_equals_finite_differences(monkeypatch):
    """With the greedy tokens fixed, the loss along a random direction of the generator's weights, in float64."""

    def logits_in_float64(self, model, hidden, tokens=None):
        return model.lm_head(hidden * model.config.d_model**-0.5)

    def norm_in_float64(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(T5, "token_logits", logits_in_float64)
    monkeypatch.setattr(T5LayerNorm, "forward", norm_in_float64)
    monkeypatch.setattr(soft_ids, "MAX_NEW_TOKENS", 4)
    source = make_source()._replace(nodes=None)  # the loss along tries is in float32
    batch = first_batch(source, size=3)
    generator = tiny_t5(1, dtype=torch.float64)
    recommender = tiny_t5(2, width=12, dtype=torch.float64).requires_grad_(False)
    loss = soft_id_loss(generator, recommender, source, batch)
    loss.backward()
    before, _ = generated(generator, source, batch)
    torch.manual_seed(0)
    direction = {name: torch.randn_like(parameter) for name, parameter in generator.named_parameters()}
    slope = sum(float((parameter.grad * direction[name]).sum()) for name, parameter in generator.named_parameters())
    step, values = 1e-6, []
    for sign in (1, -1):
        moved = tiny_t5(1, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter.add_(sign * step * direction[name])
        assert torch.equal(generated(moved, source, batch)[0], before)
        values.append(soft_id_loss(moved, recommender, source, batch).item())
    assert abs(slope) > 1e-4
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_the_batch_reads_the_texts_of_the_items_in_its_histories():
    source = make_source()
    texts = [*DOMAIN.item_texts, *OTHER.item_texts]
    for seed in range(3):
        batch = first_batch(source, size=8, seed=seed)
        assert (batch["history_BH"] > 0).sum(1).max() <= 3  # half of max_history
        used = sorted(set(batch["history_BH"][batch["history_BH"] > 0].tolist()))
        assert batch["item"].tolist() == used
        for segment, tokens, mask in zip(batch["item"].tolist(), batch["text_ids"], batch["text_mask"], strict=True):
            first = source.parts.first_item_K
            number = segment - first[0] if segment < first[1] else 11 + segment - first[1]
            assert tokens[mask == 1].tolist() == TOKENIZER(texts[number])["input_ids"]
