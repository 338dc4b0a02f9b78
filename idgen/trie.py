"""The catalogue as a prefix tree in flat arrays.

Shapes: N nodes (node 0 is the root), I items, T tokens of the longest ID with its end token if any, R rows (beams),
C children of all rows together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORED_LABEL = -100


class Children(NamedTuple):
    """The children of several nodes, one after the other: child c belongs to row ``row_C[c]`` of the question."""

    row_C: Tensor
    node_C: Tensor
    token_C: Tensor


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes in flat arrays. The tries of several catalogues stand below one node 0, whose children are their roots.

    Nodes are numbered breadth first and, within a depth, in the order of their token sequences. The children of
    node n are therefore the consecutive nodes ``first_child_N1[n] .. first_child_N1[n + 1] - 1`` with rising
    tokens: one offset array (CSR) says it all.
    """

    first_child_N1: Tensor  # (N + 1,) offsets of the children
    token_N: Tensor  # token that leads into the node; -1 for node 0

    def num_children(self, node_R: Tensor) -> Tensor:
        """Number of children of each node, (R,)."""
        return self.first_child_N1[node_R + 1] - self.first_child_N1[node_R]

    def children(self, node_R: Tensor) -> Children:
        """All children of the nodes, row after row and with rising tokens inside a row."""
        count_R = self.num_children(node_R)
        row_C = torch.repeat_interleave(torch.arange(len(node_R), device=node_R.device), count_R)
        before_R = torch.cumsum(count_R, 0) - count_R
        node_C = torch.arange(len(row_C), device=node_R.device) + (self.first_child_N1[node_R] - before_R)[row_C]
        return Children(row_C, node_C, self.token_N[node_C])

    def is_root(self, node_R: Tensor) -> Tensor:
        """Whether a node is the root of one of several tries."""
        return node_R < self.first_child_N1[1]


@dataclass(frozen=True, eq=False)
class Trie(Forest):
    """Prefix tree over the token sequences of a catalogue, every ID closed by the end token where IDs have one.

    Build it with `Trie.build`.
    """

    item_N: Tensor  # item number of a leaf (the node after the last token); -1 for inner nodes
    key_N: Tensor  # parent * stride + token: rises with the node number, so a child is found by bisection
    label_IT: Tensor  # the IDs as labels: tokens, end token if any, then -100
    stride: int
    eos_token_id: int | None  # None: IDs have no end token

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], eos_token_id: int | None) -> Trie:
        """Build the tree from the token sequences of items 0 .. I - 1, given WITHOUT the end token.

        Raises ValueError for an empty catalogue, an empty ID, an ID that contains the end token or a negative
        token, and for two items with the same ID; without an end token also for an ID that another one begins with.
        """
        token_IT = _padded_with_end(sequences, eos_token_id)
        order_I = np.lexsort(token_IT.T[::-1])
        sorted_IT = token_IT[order_I]
        # A row opens a new node at depth t when its first t + 1 tokens differ from those of the row before.
        new_IT = np.ones(sorted_IT.shape, dtype=bool)
        new_IT[1:] = np.logical_or.accumulate(sorted_IT[1:] != sorted_IT[:-1], axis=1)
        _refuse_duplicates(new_IT, order_I)
        new_IT &= sorted_IT >= 0

        length_I = (token_IT >= 0).sum(1)
        _refuse_beginnings(sorted_IT, order_I)
        parents, tokens, items = _levels(sorted_IT, new_IT, order_I, length_I[order_I])
        parent_N, token_N, item_N = (np.concatenate([[-1], *parts]) for parts in (parents, tokens, items))
        num_nodes = len(token_N)
        stride = int(token_N.max()) + 1
        first_child_N1 = 1 + np.cumsum(np.bincount(parent_N[1:] + 1, minlength=num_nodes + 1))
        return cls(
            first_child_N1=torch.from_numpy(first_child_N1),
            token_N=torch.from_numpy(token_N),
            item_N=torch.from_numpy(item_N),
            key_N=torch.from_numpy(parent_N * stride + token_N),
            label_IT=torch.from_numpy(np.where(token_IT < 0, IGNORED_LABEL, token_IT)),
            stride=stride,
            eos_token_id=eos_token_id,
        )

    def __len__(self) -> int:
        """Number of items."""
        return len(self.label_IT)

    @property
    def max_length(self) -> int:
        """Tokens of the longest ID with its end token."""
        return self.label_IT.shape[1]

    @cached_property
    def has_own_tokens(self) -> bool:
        """Whether every ID ends with a token that no other ID ends with, and nothing closes IDs: then one step of the
        model scores every item, by these tokens, and no beams are needed."""
        return self.eos_token_id is None and len(self.last_token_I.unique()) == len(self)

    @property
    def last_token_I(self) -> Tensor:
        """The last token of each ID, with its end token if any."""
        last_I1 = (self.label_IT != IGNORED_LABEL).sum(1, keepdim=True) - 1
        return self.label_IT.gather(1, last_I1)[:, 0]

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.token_N.device

    def to(self, device: torch.device | str) -> Trie:
        """The same tree on another device (itself when it is there already)."""
        if self.device == torch.device(device):
            return self
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def advance(self, node_R: Tensor, token_R: Tensor) -> Tensor:
        """Node after one more token; -1 when the tree has no such child (or the node already was -1)."""
        key_R = node_R * self.stride + token_R
        place_R = torch.searchsorted(self.key_N, key_R).clamp(max=len(self.key_N) - 1)
        known_R = (node_R >= 0) & (token_R >= 0) & (token_R < self.stride) & (self.key_N[place_R] == key_R)
        return torch.where(known_R, place_R, -1)

    def walk(self, token_RT: Tensor) -> Tensor:
        """Node reached from the root by each row of tokens; -1 for rows that leave the tree."""
        node_R = torch.zeros(len(token_RT), dtype=torch.long, device=token_RT.device)
        for token_R in token_RT.unbind(1):
            node_R = self.advance(node_R, token_R)
        return node_R


def log_softmax_of_rows(logit_C: Tensor, row_C: Tensor, num_rows: int) -> Tensor:
    """Log-probabilities of what stands in ``num_rows`` rows of unequal length one after the other, (C,)."""
    with torch.no_grad():  # it falls out of the result
        largest_R = logit_C.new_full((num_rows,), -torch.inf).scatter_reduce(0, row_C, logit_C, "amax")
    shifted_C = logit_C - largest_R[row_C]
    return shifted_C - torch.zeros_like(largest_R).index_add(0, row_C, shifted_C.exp()).log()[row_C]


class Parents(NamedTuple):
    """Where the labels of training batches stand in the tries of their catalogues."""

    trie: Trie
    """Of all catalogues, below a root for each."""
    root_K: Tensor

    @classmethod
    def of(cls, tries: Sequence[Trie]) -> Parents:
        """Catalogues may share tokens, and IDs."""
        first = max(trie.stride for trie in tries)
        rows = [
            [first + number, *(token for token in label_T if token >= 0)]
            for number, trie in enumerate(tries)
            for label_T in trie.label_IT.tolist()
        ]
        trie = Trie.build(rows, None)
        return cls(trie, trie.advance(torch.zeros(len(tries), dtype=torch.long), first + torch.arange(len(tries))))

    def batch(self, label_BT: Tensor, task_B: Tensor) -> dict[str, Tensor]:
        """What `idgen.losses.trie_loss` reads: the ``node`` (B, T) whose children each label is one of, and the tree.

        The IDs of a row follow each other, each from the root of its catalogue.
        """
        root_B = self.root_K[task_B]
        node_B, nodes = root_B, []
        for label_B in label_BT.unbind(1):
            nodes.append(node_B)
            next_B = self.trie.advance(node_B, label_B)
            ended_B = (next_B < 0) | (self.trie.num_children(next_B.clamp(min=0)) == 0)
            node_B = torch.where(ended_B, root_B, next_B)
        tree = {"first_child": self.trie.first_child_N1, "child_token": self.trie.token_N}
        return {"node": torch.stack(nodes, 1), **tree}


def _padded_with_end(sequences: Sequence[Sequence[int]], eos_token_id: int | None) -> np.ndarray:
    """(I, T) tokens with the end token if any, -1 behind it."""
    if len(sequences) == 0:
        raise ValueError("got an empty catalogue; expected at least one item ID. Check the prepared data")
    lengths = np.array([len(sequence) for sequence in sequences])
    if lengths.min() == 0:
        raise ValueError(
            f"item {int(lengths.argmin())} has an empty ID; expected at least one token. Assign the item IDs again"
        )
    flat = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    bad = np.flatnonzero((flat < 0) | (flat == (-1 if eos_token_id is None else eos_token_id)))
    if len(bad):
        item = int(np.searchsorted(np.cumsum(lengths), bad[0], side="right"))
        raise ValueError(
            f"the ID of item {item} contains token {flat[bad[0]]}; expected non-negative tokens without the end "
            f"token {eos_token_id}. Encode IDs with add_special_tokens=False"
        )
    token_IT = np.full((len(lengths), int(lengths.max()) + (eos_token_id is not None)), -1, dtype=np.int64)
    column_T = np.arange(token_IT.shape[1])
    token_IT[column_T < lengths[:, None]] = flat
    if eos_token_id is not None:
        token_IT[column_T == lengths[:, None]] = eos_token_id
    return token_IT


def _levels(
    sorted_IT: np.ndarray, new_IT: np.ndarray, order_I: np.ndarray, length_I: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Parent, token and item (-1 unless a leaf) of the nodes of each depth, from the sorted IDs."""
    parents, tokens, items = [], [], []
    node_I = np.zeros(len(sorted_IT), dtype=np.int64)  # node of each row at the depth before
    num_nodes = 1
    for depth, new_I in enumerate(new_IT.T):
        parents.append(node_I[new_I])
        tokens.append(sorted_IT[new_I, depth])
        items.append(np.where(length_I[new_I] == depth + 1, order_I[new_I], -1))
        node_I = np.where(sorted_IT[:, depth] >= 0, num_nodes - 1 + np.cumsum(new_I), node_I)
        num_nodes += len(parents[-1])
    return parents, tokens, items


def _refuse_beginnings(sorted_IT: np.ndarray, order_I: np.ndarray) -> None:
    """IDs are different here. In the order of their tokens, one that begins another stands right before such a one."""
    before_IT, after_IT = sorted_IT[:-1], sorted_IT[1:]
    begins = np.flatnonzero(((before_IT == after_IT) | (before_IT < 0)).all(1))
    if len(begins):
        raise ValueError(
            f"the ID of item {order_I[begins[0]]} is the beginning of that of item {order_I[begins[0] + 1]}; expected "
            "an end token, without which the first one could not be told from the second. Give one"
        )


def _refuse_duplicates(new_IT: np.ndarray, order_I: np.ndarray) -> None:
    same = np.flatnonzero(~new_IT[:, -1])  # equal over the whole padded row
    if len(same):
        first, second = sorted((int(order_I[same[0] - 1]), int(order_I[same[0]])))
        raise ValueError(
            f"items {first} and {second} have the same ID ({len(same)} such cases); expected unique token sequences. "
            "Assign the item IDs again"
        )
