"""Lists below a heading, closed by newlines, for pretrained decoders; titles as they are written."""

import pytest
import torch
from tiny_causal import byte_level_tokenizer
from tiny_tasks import make_domain, make_tokenizer
from transformers import PreTrainedTokenizerFast

from idgen.config import SampleConfig, Words
from idgen.item_ids import keyword_item_ids
from idgen.keywords import keyword_candidates
from idgen.samples import empty_prompt, encode_histories, train_batches
from idgen.synthetic import nearest_items
from idgen.tasks import build_task

DOMAIN = make_domain()
BYTES = byte_level_tokenizer([*DOMAIN.item_texts, "one customer chose, one after the other:\n"])
BYTES = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer, eos_token="<|end|>", pad_token="<|end|>")
LIST = {"templates": "list", "max_history": 4}
HEADING = "small shop that one customer chose, one after the other:"


def task_of(tokenizer=BYTES, neighbours=None, **settings):
    ids = keyword_item_ids(DOMAIN.item_keys, DOMAIN.item_texts, tokenizer)
    return build_task(DOMAIN, DOMAIN.clients, ids, tokenizer, SampleConfig(**{**LIST, **settings}), True, neighbours)


def texts_of(task, **options):
    """The whole row and its targets, as text."""
    for batch in train_batches(task, 4, torch.Generator().manual_seed(0)):
        for tokens, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["row_labels"], strict=True):
            yield BYTES.decode(tokens[mask > 0]), BYTES.decode(labels[labels >= 0])


def test_a_prompt_is_a_heading_and_a_line_for_each_item():
    task = task_of()
    prompt, mask = encode_histories(task, [[3, 0], [5]])
    names = task.item_ids.texts
    assert BYTES.decode(prompt[0][mask[0] > 0]) == f"{HEADING}\n{names[3]}\n{names[0]}\n"
    assert BYTES.decode(prompt[1][mask[1] > 0]) == f"{HEADING}\n{names[5]}\n"
    assert BYTES.decode(empty_prompt(task)[0][0]) == f"{HEADING}\n"
    assert [task.trie.eos_token_id] == BYTES("\n", add_special_tokens=False)["input_ids"]


def test_every_item_of_a_list_but_the_first_is_a_target():
    rows = list(texts_of(task_of()))
    assert len(rows) > len(DOMAIN.clients.sequences)
    for row, targets in rows:
        heading, first, *rest = row.splitlines()
        assert heading == HEADING
        assert first in task_of().item_ids.texts
        assert targets.splitlines() == rest


def test_the_last_item_of_a_synthetic_history_is_its_target():
    vector_ID = torch.randn(len(DOMAIN.item_keys), 4, generator=torch.Generator().manual_seed(0))
    rows = list(texts_of(task_of(neighbours=nearest_items(vector_ID), synthetic_share=0.9)))
    single = [targets for row, targets in rows if len(targets.splitlines()) == 1 and len(row.splitlines()) > 3]
    assert len(single) > 0.5 * len(rows)
    assert all(row.splitlines()[-1] == targets.splitlines()[-1] for row, targets in rows)


def test_prompts_without_words_are_not_empty_prompts():
    with pytest.raises(ValueError, match="got templates history, which are empty"):
        empty_prompt(task_of(templates="history"))


@pytest.mark.parametrize("templates", ["natural", "compact"])
def test_words_that_would_be_glued_together_are_refused(templates):
    with pytest.raises(ValueError, match="puts no space between words"):
        task_of(templates=templates)


def test_a_tokenizer_without_newlines_closes_with_its_end_token():
    tokenizer = make_tokenizer([DOMAIN])
    assert task_of(tokenizer).trie.eos_token_id == tokenizer.eos_token_id


def test_titles_are_cut_where_no_other_one_starts_alike():
    titles = ["the king of the sea", "the king of the hill, ps3", "the king", "the king of the hill", "a b a b a b"]
    texts = [f"title: {title}; brand: maker {n}" for n, title in enumerate([*titles, "", "the king"])]
    found = keyword_candidates(texts, Words(2, 6, True))
    assert found[0][:2] == ["the king of the sea", "the king of the sea 0"]
    assert found[1][0] == "the king of the hill ps3"
    assert found[2][0] == found[6][0] == "the king"
    assert found[2][1] != found[6][1]  # the brand tells them apart
    assert found[3][0] == "the king of the hill"
    assert found[4][0] == "a b"
    assert found[5][0] == "maker 5"
    assert keyword_candidates(texts, Words(1, 6, True))[4][0] == "a"
    alike = keyword_candidates(["title: a b c d e f; brand: zeta", "title: a b c d e f"], Words(2, 4, True))
    assert alike == [["a b c d", "a b c zeta", "a b c e", "a b c f"], ["a b c d", "a b c e", "a b c f"]]
