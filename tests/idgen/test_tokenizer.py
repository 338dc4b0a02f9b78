"""Tokenizers trained offline: round trip, layout, determinism, whole words and whole phrases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from idgen.config import TITLE_WORDS
from idgen.item_ids import unique_phrases
from idgen.tokenizer import decode_ids, encode_ids, load_tokenizer, train_tokenizer

_WORDS = "river lantern garden murder harbour winter atlas copper señor été fox kitten engine 1984 x_2 straße"
WORDS = _WORDS.split()


def texts(count: int = 200, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"title: {' '.join(rng.choices(WORDS, k=rng.randrange(2, 6)))}; brand: na" for _ in range(count)]


TOKENIZERS = {
    "word": train_tokenizer(texts(), 300),
    "phrase": train_tokenizer(texts(), 300, phrases=["copper fox", "winter garden 2", "fox"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(
        st.one_of(st.sampled_from(WORDS), st.text("abcxyz019_éß", min_size=1, max_size=8)), min_size=1, max_size=6
    )
)
def test_words_joined_by_spaces_come_back(name, words):
    tokenizer, text = TOKENIZERS[name], " ".join(words)
    tokens = encode_ids(tokenizer, [text])
    assert decode_ids(tokenizer, tokens) == [text]
    assert not set(tokenizer.all_special_ids) & set(tokens[0])


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_t5_layout(tokenizer, tmp_path):
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == ("<pad>", "</s>", "<unk>")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) <= 300
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    batch = tokenizer(["fox", "winter garden atlas"], padding=True)
    assert batch["input_ids"][1][-1] == 1
    assert batch["input_ids"][0][-1] == 0
    assert tokenizer("Fox\n  KITTEN").input_ids == tokenizer("fox kitten").input_ids
    assert 2 in tokenizer("fox 龍").input_ids
    tokenizer.save_pretrained(tmp_path)
    T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)  # the folder of a backbone holds both
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))):
        assert len(loaded) == len(tokenizer)
        assert loaded.pad_token_id == 0
        assert loaded.eos_token_id == 1
        assert loaded(texts()).input_ids == tokenizer(texts()).input_ids
        tokens = encode_ids(loaded, ["copper fox", "winter garden 2"])
        assert decode_ids(loaded, tokens) == ["copper fox", "winter garden 2"]


@pytest.mark.parametrize("phrases", [[], ["copper fox"]])
def test_the_same_texts_give_the_same_tokenizer(phrases):
    many = texts(2000, seed=1)
    twins = [train_tokenizer(many, 300, phrases).backend_tokenizer.to_str() for _ in range(3)]
    assert twins[0] == twins[1] == twins[2]


def test_known_words_and_phrases_stay_whole():
    word, phrase = TOKENIZERS["word"], TOKENIZERS["phrase"]
    assert word.tokenize("copper fox kitten") == ["▁copper", "▁fox", "▁kitten"]
    assert phrase.tokenize("copper fox kitten") == ["▁copper▁fox", "▁kitten"]
    assert phrase.tokenize("engine copper; fox winter garden 2") == [
        "▁engine",
        "▁copper",
        ";",
        "▁fox",
        "▁winter▁garden▁2",
    ]
    assert len(word.tokenize("zebra")) > 1


def test_a_phrase_is_one_token_whatever_its_words_are_made_of():
    keys, texts = (
        {"office": ["a", "b", "c"]},
        {"office": ["title: acc_121 dect_6", "title: ½ été_2", "title: z24_p5 x-y"]},
    )
    phrases = unique_phrases(keys, texts, TITLE_WORDS)["office"]
    tokenizer = train_tokenizer(texts["office"], 0, phrases)
    assert [len(tokens) for tokens in encode_ids(tokenizer, phrases)] == [1, 1, 1]
    assert decode_ids(tokenizer, encode_ids(tokenizer, phrases)) == phrases


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["fox"], 10), "vocab_size is 10"),
        (([" ; ", ""], 300), "got 2 texts without a single word"),
        ((["fox"], 300, [f"fox {number}" for number in range(400)]), "for 400 phrases"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        train_tokenizer(*arguments)


def test_a_vocabulary_of_phrases_alone():
    texts, phrases = [_WORDS], ["atlas castle", "fox harbour murder"]
    small = train_tokenizer(texts, 0, phrases)
    large = train_tokenizer(texts, 4000, phrases)
    assert len(small) < len(large)
    for phrase in phrases:
        (tokens,) = encode_ids(small, [phrase])
        assert len(tokens) == 1
        assert decode_ids(small, [tokens]) == [phrase]
    with pytest.raises(ValueError, match="0 without phrases"):
        train_tokenizer(texts, 0)
