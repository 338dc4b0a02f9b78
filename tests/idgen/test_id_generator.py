"""The ID generator writes words of the item's own text alone, none twice, whatever its weights are."""

from __future__ import annotations

import pytest
import torch
from test_item_ids import KEYS, TEXTS, TOKENIZER, check
from tiny_causal import byte_level_tokenizer

from fedecider.bounds import Diverged
from idgen import id_generator
from idgen.config import TITLE_WORDS, Words
from idgen.id_generator import (
    IDGenerator,
    _Draft,
    _next,
    _Spelling,
    build_id_generator,
    make_item_ids,
    train_id_generator,
)
from idgen.keywords import STOP_WORDS, own_words
from idgen.tokenizer import clean_words, train_tokenizer

HARD = [
    "title: the the fox fox fox; brand: fox",
    "title: 3 in 1 shampoo 500ml; categories: hair, 2024",
    "title: Crème brûlée — l'été №5; brand: ŒUVRE",
    "title: of the and; brand: to",
    "title: !!!; brand: ...",
    "title: the red fox",
    "title: the red fox",
    "title: the red fox",
    "title: fo fox foxes foxglove",
    "title: 龍の歌; brand: sea",
    "title: antidisestablishmentarianism " + "supercalifragilistic" * 12 + " fox",
]
HARD_KEYS = [f"h{number:02d}" for number in range(len(HARD))]
EVERYTHING = [*TEXTS, *HARD[:-2]]
PIECES = train_tokenizer(EVERYTHING, 270)
"""Most words are several pieces."""
BYTES, LETTERS = byte_level_tokenizer(EVERYTHING, 400), byte_level_tokenizer(EVERYTHING, 300)
for bytes_tokenizer in (BYTES, LETTERS):
    bytes_tokenizer.pad_token = bytes_tokenizer.eos_token


def random_generator(tokenizer, seed: int, words: Words = TITLE_WORDS) -> IDGenerator:
    generator = build_id_generator("", tokenizer, seed, words=words)
    with torch.no_grad():  # far from uniform, so that seeds write different words
        for parameter in generator.model.parameters():
            parameter.mul_(2.0)
    return generator


def own(text: str) -> set[str]:
    return {word for kind in own_words(text) for word in kind}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokenizer", [TOKENIZER, PIECES, BYTES, LETTERS], ids=["words", "pieces", "bytes", "letters"])
def test_random_weights_write_own_words_and_none_twice(tokenizer, seed):
    texts = [*TEXTS, *HARD]
    ids = make_item_ids([*KEYS, *HARD_KEYS], texts, tokenizer, random_generator(tokenizer, seed))
    check(ids, 40, tokenizer)
    assert ids.report["own_word_share"] == 1.0
    assert ids.report["repeat_share"] == 0.0
    assert ids.report["num_collisions_left"] == 0
    assert ids.report["num_without_words"] == 1  # "!!!"
    assert ids.report["num_suffixes"] <= 3
    for text, candidates in zip(texts, random_generator(tokenizer, seed).candidates(texts), strict=True):
        for words in map(str.split, candidates):
            assert set(words) <= own(text)
            assert len(set(words)) == len(words)


def test_a_word_is_not_left_in_its_middle():
    """fo, fox and foxes begin alike: an ID ends, and goes on, at the end of one of them."""
    spelling = {"fo": _Spelling((7,), (7,)), "fox": _Spelling((7, 8), (7, 8)), "sea": _Spelling((9,), (9,))}
    start = _Draft([], ["fo", "fox", "sea"])
    limits = Words(1, 2, False)
    assert set(_next(start, spelling, limits, 1)) == {7, 9}  # no end before a word
    behind_fo = _next(_next(start, spelling, limits, 1)[7], spelling, limits, 1)
    assert set(behind_fo) == {8, 7, 9, 1}  # fox; fo and then fox again; fo, sea; the end of fo
    assert (behind_fo[8].words, behind_fo[8].prefix) == ([], (7, 8))
    assert (behind_fo[1].words, behind_fo[1].ended) == (["fo"], True)
    behind_fox = _next(behind_fo[8], spelling, limits, 1)
    assert set(behind_fox) == {7, 9, 1}
    assert behind_fox[7].left == ["fo", "sea"]  # not fox again
    last = _next(behind_fox[9], spelling, limits, 1)
    assert set(last) == {1}
    assert last[1].words == ["fox", "sea"]
    assert _next(last[1], spelling, limits, 1) == {}


def test_stop_words_come_last():
    generator = random_generator(TOKENIZER, 1)
    plenty, none, single = generator.candidates([HARD[5], HARD[3], "title: the fox"])
    assert not STOP_WORDS.intersection(plenty[0].split())
    assert set(none[0].split()) <= {"of", "the", "and", "to"}
    assert single == ["fox", "fox the", "the"]
    for text, found in zip([HARD[0], HARD[5], *TEXTS], generator.candidates([HARD[0], HARD[5], *TEXTS]), strict=True):
        stop = [not set(own_words(text)[1]).isdisjoint(candidate.split()) for candidate in found]
        assert stop == sorted(stop)  # first all without one
    assert any(stop)


def test_equal_texts_have_other_words_before_suffixes():
    keys, texts = ["a", "b", "c", "d"], ["title: quiet red fox"] * 4
    ids = make_item_ids(keys, texts, TOKENIZER, random_generator(TOKENIZER, 0))
    assert ids.report["num_collisions"] == 3
    assert ids.report["num_suffixes"] == 0
    bare = make_item_ids(keys, ["title: fox"] * 4, TOKENIZER, random_generator(TOKENIZER, 0))
    assert bare.texts == ["fox", "fox 2", "fox 3", "fox 4"]
    assert bare.report["num_suffixes"] == 3
    number = make_item_ids(["a", "b"], ["title: fox 2"] * 2, TOKENIZER, random_generator(TOKENIZER, 0))
    assert all(len(set(text.split())) == len(text.split()) for text in number.texts)


def test_the_same_ids_again_in_any_order_and_batch(monkeypatch):
    texts, keys = [*TEXTS, *HARD], [*KEYS, *HARD_KEYS]
    state = torch.get_rng_state()
    ids = make_item_ids(keys, texts, TOKENIZER, random_generator(TOKENIZER, 4))
    assert torch.equal(state, torch.get_rng_state())
    monkeypatch.setattr(id_generator, "BATCH_SIZE", 7)
    again = make_item_ids(keys[::-1], texts[::-1], TOKENIZER, random_generator(TOKENIZER, 4))
    assert again.texts[::-1] == ids.texts
    assert make_item_ids(keys, texts, TOKENIZER, random_generator(TOKENIZER, 5)).texts != ids.texts


def test_a_later_item_gets_an_id_that_none_has():
    generator = random_generator(TOKENIZER, 2)
    ids = make_item_ids(KEYS, TEXTS, TOKENIZER, generator)
    later = make_item_ids(["n1", "n2"], [TEXTS[3], "title: violin engine"], TOKENIZER, generator, taken=ids.token_ids)
    assert not set(map(tuple, later.token_ids)) & set(map(tuple, ids.token_ids))
    assert later.report["own_word_share"] == 1.0
    assert (
        later.texts
        == make_item_ids(
            ["n1", "n2"], [TEXTS[3], "title: violin engine"], TOKENIZER, generator, taken=ids.token_ids
        ).texts
    )


def trained(seed: int) -> tuple[IDGenerator, list[dict[str, float]]]:
    generator = build_id_generator("", TOKENIZER, seed, words=Words(2, 3, False))
    return generator, train_id_generator(generator, TEXTS, seed, epochs=30)


def test_it_learns_keywords_and_gives_the_same_ids_again():
    state = torch.get_rng_state()
    generator, logs = trained(0)
    assert torch.equal(state, torch.get_rng_state())
    assert logs[-1]["loss"] < 0.6 * logs[0]["loss"]
    assert len(logs) == 30
    ids = make_item_ids(KEYS, TEXTS, TOKENIZER, generator)
    check(ids, 40)
    assert ids.report["max_words"] <= 5
    twin = make_item_ids(KEYS[::-1], TEXTS[::-1], TOKENIZER, trained(0)[0])
    assert twin.texts[::-1] == ids.texts
    assert {**twin.report, "examples": []} == {**ids.report, "examples": []}
    assert make_item_ids(KEYS, TEXTS, TOKENIZER, trained(1)[0]).texts != ids.texts


LATE = [3.0] + [1.0] * 43 + [9.0] * 6
"""50 steps are no whole number of windows: the mean of the last 20 is 3.4, that of the last whole window 1.0."""


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([3.0, float("nan")], "at step 3, learning_rate 0.003: the loss is nan"),
        ([3.0, float("inf")], "at step 3, learning_rate 0.003: the loss is inf"),
        ([3.0, 2.0, 7.0], "at step 3, learning_rate 0.003: the loss is 4, it was 3 at first"),
        ([3.0, 4.0, 3.1], None),
        (LATE, None),
        ([loss if loss < 9.0 else 11.0 for loss in LATE], "at step 50, learning_rate 0.003: the loss is 4, it was 3"),
        ([3.0] + [9.0] * 199, "at step 200, learning_rate 0.003: the loss is 9"),
        ([3.0] + [9.0] * 30 + [1.0] * 169, None),
    ],
)
def test_a_diverged_training_is_told(losses, told, monkeypatch):
    rest = iter([*losses, losses[-1]])
    monkeypatch.setattr(id_generator, "_step", lambda *_: torch.tensor(next(rest)))
    generator, epochs = build_id_generator("", TOKENIZER, 0), max(3, len(losses))
    if told is None:
        assert len(train_id_generator(generator, TEXTS, epochs=epochs)) == epochs
        return
    with pytest.raises(Diverged, match=rf"^diverged {told}.*pretrain\.ids keywords"):
        train_id_generator(generator, TEXTS, epochs=epochs)


def test_a_generator_from_a_folder(tmp_path):
    generator = random_generator(TOKENIZER, 3, Words(5, 12, True))
    generator.model.save_pretrained(tmp_path)
    loaded = build_id_generator(str(tmp_path), TOKENIZER, words=Words(5, 12, True))
    assert loaded.candidates(TEXTS[:9]) == generator.candidates(TEXTS[:9])
    ids = make_item_ids(KEYS, TEXTS, TOKENIZER, loaded)
    assert ids.report["own_word_share"] == 1.0
    assert ids.report["repeat_share"] == 0.0
    for text, candidates in zip(TEXTS, loaded.candidates(TEXTS), strict=True):
        assert 5 <= len(candidates[0].split()) <= 12 or set(candidates[0].split()) == set(own_words(text)[0])
        assert set(candidates[0].split()) <= set(clean_words(text))
    generator.model.resize_token_embeddings(len(TOKENIZER) + 5, mean_resizing=False)
    own_VD = torch.randn(len(TOKENIZER) + 5, id_generator.D_MODEL, generator=torch.Generator().manual_seed(1))
    generator.model.lm_head.weight = torch.nn.Parameter(own_VD)  # as in flan-t5
    generator.model.save_pretrained(tmp_path)
    cut = build_id_generator(str(tmp_path), TOKENIZER).model
    assert torch.equal(cut.lm_head.weight, own_VD[: len(TOKENIZER)])
    assert torch.equal(cut.shared.weight, loaded.model.shared.weight)
    larger = train_tokenizer(TEXTS, 400, phrases=[f"fox {number}" for number in range(99)])
    with pytest.raises(ValueError, match="expected one shared tokenizer"):
        build_id_generator(str(tmp_path), larger)
    with pytest.raises(ValueError, match="no T5 model could be loaded"):
        build_id_generator(str(tmp_path / "none"), TOKENIZER)
