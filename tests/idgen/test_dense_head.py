"""IDs that end with a token of their own item: two targets behind every history, and a ranking by the second one."""

import pytest
import torch
from exact_scores import score_catalogue
from tiny_t5 import tiny_t5
from tiny_tasks import make_domain, make_ids
from transformers import LlamaConfig, LlamaForCausalLM

from fedecider.evaluation.protocols import held_out
from fedecider.evaluation.sequences import SequenceArray
from idgen import item_scores
from idgen.backbone_training import compared_tokens
from idgen.candidates import Candidates, with_candidates
from idgen.config import SampleConfig
from idgen.decode import constrained_beam_search, top_items
from idgen.item_ids import item_words, later_item_words, with_item_words
from idgen.item_scores import trie_log_probs
from idgen.losses import WRITING_WEIGHT, sequence_loss
from idgen.prompts import prompt_texts
from idgen.ranking import RankingContext, rank_task
from idgen.samples import encode_histories, train_batches
from idgen.tasks import build_task
from idgen.tokenizer import train_tokenizer

DOMAIN = make_domain(num_items=12)
OWN = item_words({DOMAIN.name: DOMAIN.item_keys}, {DOMAIN.name: DOMAIN.item_texts})[DOMAIN.name]
TOKENIZER = train_tokenizer([*DOMAIN.item_texts, *prompt_texts("compact", [DOMAIN.name])], 500, OWN)
IDS = with_item_words(make_ids(DOMAIN, TOKENIZER), OWN, TOKENIZER)


def task_of(templates):
    config = SampleConfig(templates=templates, max_source_tokens=60, max_history=6, dense_head=True)
    return build_task(DOMAIN, DOMAIN.clients, IDS, TOKENIZER, config, True)


def llama():
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENIZER), tie_word_embeddings=True, initializer_range=0.5, **sizes)
    return LlamaForCausalLM(config).eval()


MODELS = {"history": llama, "compact": lambda: tiny_t5(3, len(TOKENIZER))}


def test_every_id_ends_with_a_token_of_its_item():
    assert [f"item{number}" for number in range(12)] == OWN  # keys rise with the number
    assert [tokens[-1] for tokens in IDS.token_ids] == [TOKENIZER.convert_tokens_to_ids("▁" + word) for word in OWN]
    assert all(text.endswith(" " + word) for text, word in zip(IDS.texts, OWN, strict=True))
    assert task_of("history").trie.eos_token_id is None
    assert TOKENIZER.decode(IDS.token_ids[4]) == IDS.texts[4]


def test_own_words_stand_in_no_text_and_are_numbered_on():
    found = item_words({"b": ["y", "x"], "a": ["z"]}, {"b": ["an item1 of glass", "item"], "a": ["itemm"]})
    assert found == {"a": ["itemmm0"], "b": ["itemmm2", "itemmm1"]}
    assert later_item_words("item3", 2, {"item12", "item7", "item", "item99x"}) == ["item13", "item14"]


@pytest.mark.parametrize("templates", MODELS)
def test_the_loss_is_that_of_the_vector_and_half_that_of_the_words(templates):
    task, model = task_of(templates), MODELS[templates]()
    token_I = task.item_tokens()
    batch = next(train_batches(task, 4, torch.Generator().manual_seed(1)))
    label_BS = batch.get("row_labels", batch.get("labels"))
    logit_BSV = model(
        **{name: batch[name] for name in ("input_ids", "attention_mask", "labels") if name in batch}
    ).logits
    if templates == "history":
        logit_BSV, label_BS = logit_BSV[:, :-1], label_BS[:, 1:]
    dense, writing, num_items = 0.0, 0.0, 0
    for logit_SV, label_S in zip(logit_BSV, label_BS, strict=True):
        tokens, places = [], []
        for place, token in enumerate(label_S.tolist()):
            if token < 0:
                continue
            tokens, places = [*tokens, token], [*places, place]
            if token not in token_I.tolist():
                continue
            assert tokens in IDS.token_ids
            log_prob_I = torch.log_softmax(logit_SV[places[0], token_I], 0)
            dense, num_items = dense - log_prob_I[token_I.tolist().index(token)], num_items + 1
            for number, (one, at) in enumerate(zip(tokens, places, strict=True)):
                may_follow = sorted({ids[number] for ids in IDS.token_ids if ids[:number] == tokens[:number]})
                writing = writing - torch.log_softmax(logit_SV[at, may_follow], 0)[may_follow.index(one)]
            tokens, places = [], []
        assert not tokens
    assert num_items > 4 or templates == "compact"
    found = sequence_loss(model, {**batch, "catalogue": token_I})
    torch.testing.assert_close(found, (dense + WRITING_WEIGHT * writing) / num_items)


def test_a_sample_that_holds_all_items_is_the_whole_softmax():
    task, model = task_of("history"), llama()
    token_I = compared_tokens(task, len(TOKENIZER))
    batch = next(train_batches(task, 4, torch.Generator().manual_seed(1)))
    share_V = torch.full((len(TOKENIZER),), 1 / 12)
    sampled = with_candidates(batch, Candidates(token_I, share_V, 12), torch.Generator().manual_seed(0))
    torch.testing.assert_close(sequence_loss(model, sampled), sequence_loss(model, {**batch, "catalogue": token_I}))


@pytest.mark.parametrize("templates", MODELS)
def test_items_are_ranked_by_their_own_tokens_and_written_by_their_words(templates, monkeypatch):
    task, model = task_of(templates), MODELS[templates]()
    histories = [list(sequence[:-1]) for sequence in DOMAIN.clients.sequences]
    prompts = encode_histories(task, histories)
    own_I = torch.tensor([tokens[-1] for tokens in IDS.token_ids])
    score_UI = torch.empty(len(histories), 12)
    for user, history in enumerate(histories):
        token_1S, mask_1S = encode_histories(task, [history])
        first = (
            {}
            if templates == "history"
            else {"decoder_input_ids": torch.tensor([[model.config.decoder_start_token_id]])}
        )
        with torch.no_grad():
            score_UI[user] = model(input_ids=token_1S, attention_mask=mask_1S, **first).logits[0, -1, own_I]
    item_UK, score_UK = top_items(model, *prompts, task.trie, 12)
    best = torch.log_softmax(score_UI, 1).sort(1, descending=True)
    assert torch.equal(item_UK, best.indices)
    torch.testing.assert_close(score_UK, best.values)
    targets = held_out(SequenceArray.of(DOMAIN.clients.sequences), "test")
    expected = [row.tolist().index(target) for row, target in zip(item_UK, targets.tolist(), strict=True)]
    assert rank_task(model, task, "test", None, RankingContext(drop_seen=False)).tolist() == expected
    written_UI = score_catalogue(model, *prompts, task.trie)
    every_UI = torch.arange(12).expand(len(histories), -1)
    torch.testing.assert_close(trie_log_probs(model, *prompts, task.trie, every_UI).float(), written_UI)
    monkeypatch.setattr(item_scores, "ITEMS_AT_ONCE", 5)
    torch.testing.assert_close(item_scores.written_log_probs(model, *prompts, task.trie).float(), written_UI)
    beam_UK, _ = constrained_beam_search(model, *prompts, task.trie, 12)
    assert torch.equal(beam_UK, written_UI.sort(1, descending=True).indices)
    assert not torch.equal(beam_UK, item_UK)  # two readings
