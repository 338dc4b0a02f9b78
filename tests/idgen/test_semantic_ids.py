"""Semantic IDs: near vectors share first codes, codes are unique and the same again, later items find theirs."""

from __future__ import annotations

import pytest
import torch

from idgen import semantic_ids
from idgen.semantic_ids import SPARE_DIGITS, Codebook, fit_codebook, semantic_item_ids, semantic_texts, semantic_tokens
from idgen.tokenizer import train_tokenizer

KEYS = [f"i{(number * 37) % 101:03d}" for number in range(90)]
CENTRES = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 10
NOISE = torch.randn(90, 8, generator=torch.Generator().manual_seed(2))
VECTORS = CENTRES.repeat_interleave(30, 0) + NOISE
TEXTS = [f"title: part {number}; categories: goods, kind {number // 30}" for number in range(90)]


def test_codes_by_hand():
    book = Codebook([torch.tensor(rows).double() for rows in ([[0.0, 0], [10, 0]], [[0.0, 1], [2, 0], [0, -3]])])
    # (12, 0.5): near (10, 0), (2, 0.5) left, near (2, 0); (1, -2): (0, 0), then (0, -3) at distance 2 and (0, 1) at 10.
    found = book.codes(torch.tensor([[12.0, 0.5], [1.0, -2.0], [5.0, 5.0]]))
    assert found.tolist() == [[1, 1], [0, 2], [0, 1]]  # (5, 5) is as near to both first ones: the first of them


def test_near_items_share_the_first_code(monkeypatch):
    monkeypatch.setattr(semantic_ids, "ITEMS_PER_CODE", 30)
    book = fit_codebook(VECTORS, 0)
    first_N = book.codes(VECTORS)[:, 0]
    assert len(set(first_N.tolist())) == 3
    assert all(len(set(part.tolist())) == 1 for part in first_N.split(30))


def test_ids_are_unique_the_same_again_and_one_token_a_level():
    book, twin = fit_codebook(VECTORS, 5), fit_codebook(VECTORS, 5)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(book.centroids, twin.centroids, strict=True))
    assert [len(rows) for rows in book.centroids] == [11, 11, 11]
    equal = VECTORS.clone()
    equal[40:45] = equal[40]
    texts = semantic_texts(book, KEYS, equal)
    assert len(set(texts)) == 90
    order = sorted(range(40, 45), key=lambda item: KEYS[item])
    digits = [int(texts[item].split()[-1][1:]) for item in order]
    assert digits == sorted(digits)
    backwards = semantic_texts(book, KEYS[::-1], equal.flip(0))
    assert backwards[::-1] == texts
    tokens = semantic_tokens(book, texts)
    tokenizer = train_tokenizer([*TEXTS, "what comes next ?"], 400, tokens)
    ids = semantic_item_ids(KEYS, texts, tokenizer, TEXTS)
    assert ids.texts == texts
    assert {len(tokens) for tokens in ids.token_ids} == {4}
    assert ids.report["num_collisions"] == 90 - len({text.rsplit(" ", 1)[0] for text in texts}) >= 4
    assert ids.report["num_suffixes"] == ids.report["num_collisions_left"] == 0
    assert ids.report["own_word_share"] is None


def test_a_small_or_uniform_catalogue():
    same = torch.ones(5, 4)
    assert semantic_texts(fit_codebook(same, 0), list("abcde"), same) == [f"a0 b0 c0 d{number}" for number in range(5)]
    assert semantic_texts(fit_codebook(same[:1], 0), ["a"], same[:1]) == ["a0 b0 c0 d0"]


def test_later_items_get_codes_of_the_same_centroids():
    book = fit_codebook(VECTORS, 0)
    texts = semantic_texts(book, KEYS, VECTORS)
    later = semantic_texts(book, ["n1", "n2"], VECTORS[[7, 7]], texts)
    stem, digit = texts[7].rsplit(" d", 1)
    assert [text.rsplit(" d", 1)[0] for text in later] == [stem, stem]
    assert not set(later) & set(texts)
    assert int(later[0].rsplit(" d", 1)[1]) > int(digit) or texts.count(later[0]) == 0
    tokens = semantic_tokens(book, texts)
    assert set(later[1].split()) <= set(tokens)
    tokenizer = train_tokenizer(["what comes next ?"], 0, tokens)
    keys = [f"n{number:02d}" for number in range(3 * SPARE_DIGITS)]  # more than there are tokens for
    many = semantic_texts(book, keys, VECTORS[[7] * len(keys)], texts)
    ids = semantic_item_ids(keys, many, tokenizer, TEXTS[: len(keys)])
    assert ids.texts == many
    assert len(set(map(tuple, ids.token_ids))) == len(keys)
    assert [len(ids.token_ids[0]), ids.report["num_suffixes"]] == [4, 0]
    assert len(ids.token_ids[-1]) > 4


@pytest.mark.parametrize("seed", [0, 1])
def test_codes_are_those_of_the_nearest_centroids(seed):
    book = fit_codebook(VECTORS, seed)
    left_NE = VECTORS.double()
    for level, rows_CE in enumerate(book.centroids):
        nearest_N = torch.cdist(left_NE, rows_CE).argmin(1)
        assert torch.equal(book.codes(VECTORS)[:, level], nearest_N)
        left_NE = left_NE - rows_CE[nearest_N]
