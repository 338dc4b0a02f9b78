"""The trie holds the catalogue and nothing else; its mask lets exactly the children through."""

from __future__ import annotations

import pytest
import torch
from exact_scores import allowed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from idgen.trie import Trie

EOS = 1
IDS = [[5, 6], [5], [4, 9, 9], [5, 6, 7]]  # item 1 is a prefix of 0, item 0 of 3

catalogues = st.lists(
    st.lists(st.integers(2, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=25, unique=True
)


def leaves(trie: Trie, node: int = 0, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    """All paths to leaves, by walking the children."""
    item = int(trie.item_N[node])
    found = {prefix: item} if item >= 0 else {}
    child = trie.children(torch.tensor([node]))
    for next_node, token in zip(child.node_C.tolist(), child.token_C.tolist(), strict=True):
        found |= leaves(trie, next_node, (*prefix, token))
    return found


@settings(max_examples=100, deadline=None)
@given(catalogues)
def test_leaves_are_the_catalogue(ids):
    trie = Trie.build(ids, EOS)
    assert len(trie) == len(ids) == int((trie.item_N >= 0).sum())
    assert leaves(trie) == {(*tokens, EOS): item for item, tokens in enumerate(ids)}
    assert trie.max_length == max(map(len, ids)) + 1
    assert [row[row >= 0].tolist() for row in trie.label_IT] == [[*tokens, EOS] for tokens in ids]


@settings(max_examples=50, deadline=None)
@given(catalogues, st.lists(st.integers(0, 12), max_size=5))
def test_walk_and_allowed_tokens(ids, prefix):
    trie = Trie.build(ids, EOS)
    closed = [[*tokens, EOS] for tokens in ids]
    expected = sorted({c[len(prefix)] for c in closed if c[: len(prefix)] == prefix and len(c) > len(prefix)})
    assert allowed_tokens(trie, prefix) == (expected or [EOS])
    node = int(trie.walk(torch.tensor([prefix], dtype=torch.long)))
    assert (node >= 0) == any(c[: len(prefix)] == prefix for c in closed)


def test_children_of_several_nodes_by_hand():
    trie = Trie.build(IDS, EOS)
    nodes = trie.walk(torch.tensor([[5, 6], [4, 9], [5, 1]]))
    child = trie.children(nodes)
    assert child.row_C.tolist() == [0, 0, 1]
    assert child.token_C.tolist() == [EOS, 7, 9]
    assert trie.item_N[child.node_C].tolist() == [0, -1, -1]
    assert trie.item_N[nodes].tolist() == [-1, -1, 1]
    assert trie.num_children(nodes).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty catalogue"),
        ([[3], []], "item 1 has an empty ID"),
        ([[3], [4, 1]], "item 1 contains token 1"),
        ([[-2]], "item 0 contains token -2"),
        ([[3, 4], [5], [3, 4]], "items 0 and 2 have the same ID"),
    ],
)
def test_bad_catalogues_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        Trie.build(ids, EOS)


def test_moving_keeps_everything():
    trie = Trie.build(IDS, EOS)
    assert trie.to("cpu") is trie
    moved = trie.to("meta")
    assert moved.token_N.device.type == moved.label_IT.device.type == "meta"
    assert moved.stride == trie.stride
