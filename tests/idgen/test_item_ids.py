"""Unique, valid, order-independent item IDs from any source of candidates."""

from __future__ import annotations

import random

import pytest
from exact_scores import allowed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_causal import byte_level_tokenizer

from idgen.config import Words
from idgen.item_ids import ItemIds, assign_item_ids, keyword_item_ids, quality
from idgen.keywords import keyword_candidates
from idgen.tokenizer import decode_ids, encode_ids, train_tokenizer
from idgen.trie import Trie

_NOUNS = "river lantern garden murder harbour winter atlas copper fox kitten engine violin"
NOUNS = _NOUNS.split()
KINDS = ["red", "blue", "quiet", "broken"]


def item_text(number: int) -> str:
    rng = random.Random(number)
    title = " ".join([rng.choice(KINDS), *rng.sample(NOUNS, 2)])
    return f"title: the {title}; brand: {rng.choice(NOUNS)} press; categories: books, {rng.choice(KINDS)} stories"


TEXTS = [item_text(number) for number in range(60)]
KEYS = [f"b{(number * 37) % 101:03d}" for number in range(60)]  # not in the order of the items
TOKENIZER = train_tokenizer(TEXTS, 300)
BYTES = byte_level_tokenizer(TEXTS, 330)
BOTH = pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTES], ids=["words", "bytes"])


def check(ids: ItemIds, max_id_tokens: int = 16, tokenizer=TOKENIZER) -> None:
    sequences = [tuple(tokens) for tokens in ids.token_ids]
    end = tokenizer.eos_token_id
    assert len(set(sequences)) == len(sequences)
    assert encode_ids(tokenizer, ids.texts) == ids.token_ids
    assert decode_ids(tokenizer, ids.token_ids) == ids.texts
    for text, tokens in zip(ids.texts, sequences, strict=True):
        assert text
        assert 0 < len(tokens) <= max_id_tokens
        assert not set(tokens) & set(tokenizer.all_special_ids)
    trie = Trie.build(ids.token_ids, end)
    assert all(allowed_tokens(trie, [*tokens, end]) == [end] for tokens in sequences)
    assert all(end in allowed_tokens(trie, tokens) for tokens in sequences)
    assert int((trie.item_N >= 0).sum()) == len(ids.texts)
    assert ids.report["num_items"] == len(sequences)
    assert ids.report["max_tokens"] == max(map(len, sequences))
    assert ids.report["mean_tokens"] == pytest.approx(sum(map(len, sequences)) / len(sequences))


def test_assignment_by_hand():
    keys = ["c", "a", "b", "d", "e"]
    candidates = [
        ["Red fox", "blue fox"],
        ["Red  fox!"],
        ["red fox", "龍", "", "blue fox", "quiet, fox"],
        ["<pad>"],
        [],
    ]
    ids = assign_item_ids(keys, candidates, TOKENIZER)
    # In the order of keys: a has its first; d "pad", a word like any; b and c find theirs taken; e has none.
    assert ids.texts == ["red fox 2", "red fox", "blue fox", "pad", "item 2"]
    assert ids.report["num_collisions"] == 2
    assert ids.report["num_collisions_left"] == 0
    assert ids.report["num_suffixes"] == 2
    assert ids.report["mean_words"] == 10 / 5
    assert ids.report["max_words"] == 3
    check(ids)


def test_a_first_candidate_is_not_lost_to_another_items_second_one():
    ids = assign_item_ids(["a", "b", "c"], [["red fox"], ["red fox", "blue fox"], ["blue fox"]], TOKENIZER)
    assert ids.texts == ["red fox", "red fox 2", "blue fox"]


def test_ids_that_are_taken_stay_taken():
    taken = encode_ids(TOKENIZER, ["red fox", "red fox 2"])
    ids = assign_item_ids(["a", "b"], [["red fox"], ["red fox", "fox"]], TOKENIZER, taken=taken)
    assert ids.texts == ["red fox 3", "fox"]


@BOTH
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([*NOUNS, "", "龍", "<unk>", "<|end|>", "a b", "fox fox"]), max_size=3),
        min_size=1,
        max_size=30,
    ),
    st.integers(2, 6),
    st.randoms(use_true_random=False),
)
def test_any_candidates_give_valid_ids_that_do_not_depend_on_order(tokenizer, candidates, max_id_tokens, rng):
    keys = [f"k{number:02d}" for number in range(len(candidates))]
    ids = assign_item_ids(keys, candidates, tokenizer, max_id_tokens)
    check(ids, max_id_tokens, tokenizer)
    order = list(range(len(keys)))
    rng.shuffle(order)
    shuffled = assign_item_ids(
        [keys[item] for item in order], [candidates[item] for item in order], tokenizer, max_id_tokens
    )
    assert [shuffled.texts[order.index(item)] for item in range(len(keys))] == ids.texts
    assert shuffled.report == ids.report


def test_fallback_takes_numbers_then_hashes():
    keys = [f"k{number:03d}" for number in range(103)]
    ids = assign_item_ids(keys, [["red fox"]] * len(keys), TOKENIZER)
    assert ids.texts[:3] == ["red fox", "red fox 2", "red fox 3"]
    assert ids.texts[98] == "red fox 99"
    assert all(text.startswith("red fox ") and len(text) == 12 for text in ids.texts[99:])
    assert ids.report["num_suffixes"] == 102
    check(ids)
    tight = assign_item_ids(["a", "b"], [["red fox"]] * 2, TOKENIZER, 2)
    assert tight.texts == ["red fox", "red 2"]  # no room for three tokens: the base gives way


def test_keywords_by_hand():
    texts = ["title: the red fox; categories: books, sea tales", "title: red kitten fox", "title: red", "title: !"]
    # Items with the word: red 3, fox 2, kitten 1, books / sea / tales 1 each (a later field).
    found = keyword_candidates(texts, Words(2, 3, False))
    assert found[0] == ["red fox", "red fox books", "red fox sea", "red fox tales"]
    assert found[1] == ["kitten fox", "red kitten fox"]
    assert found[2] == ["red"]
    assert found[3] == []


def test_quality_by_hand():
    texts = [
        "title: the red fox; categories: books, foxes",
        "title: red kitten; categories: pets, foxes",
        "title: atlas; categories: books, maps",
        "title: !",
    ]
    found = quality(["red fox 2", "kitten red kitten", "atlas novel", "item 2"], texts, {0, 3})
    # Words before suffixes, of items with words: red fox, kitten red kitten, atlas novel; "novel" is of no text.
    assert found["own_word_share"] == 6 / 7
    assert found["num_without_words"] == 1
    assert found["repeat_share"] == 1 / 4
    assert found["category_share"] == 1 / 2  # foxes: red, kitten; the map is alone
    assert found["examples"][0] == ["the red fox", "red fox 2"]
    assert len(found["examples"]) == 4
    ids = keyword_item_ids(KEYS, TEXTS, TOKENIZER)
    assert len(ids.report["examples"]) == 20
    assert quality(["a"], ["red"])["category_share"] is None


@BOTH
def test_keyword_ids(tokenizer):
    ids = keyword_item_ids(KEYS, TEXTS, tokenizer)
    check(ids, 16, tokenizer)
    assert ids.report["mean_tokens"] > 2
    assert ids.report["num_collisions"] < 40
    assert ids.report["own_word_share"] == 1.0
    shuffled = list(range(60))
    random.Random(1).shuffle(shuffled)
    again = keyword_item_ids([KEYS[item] for item in shuffled], [TEXTS[item] for item in shuffled], tokenizer)
    assert again.texts == [ids.texts[item] for item in shuffled]


def test_words_of_a_byte_level_tokenizer_have_other_tokens_at_the_start():
    """So IDs that share a word at another place share no token, and an ID may begin another one."""
    alone, behind = encode_ids(BYTES, ["fox", "red fox"])
    assert not set(alone) & set(behind)
    ids = assign_item_ids(["a", "b", "c"], [["red"], ["red fox"], ["fox"]], BYTES)
    check(ids, 16, BYTES)
    red, both, _ = ids.token_ids
    assert both[: len(red)] == red
    trie = Trie.build(ids.token_ids, BYTES.eos_token_id)
    assert sorted(allowed_tokens(trie, red)) == sorted([both[len(red)], BYTES.eos_token_id])
    with pytest.raises(ValueError, match="the ID of item 0 is the beginning of that of item 1"):
        Trie.build(ids.token_ids, None)
