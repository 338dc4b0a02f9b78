"""Train parts of whole histories as distinct (user, item) pairs: what every centralised baseline learns from.

Shape legend: U users, I items, E distinct (user, item) pairs.
"""

from __future__ import annotations

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.evaluation.protocols import Sequences
from fedecider.evaluation.split import train_part


def distinct_pairs(parts: Sequences, num_items: int) -> tuple[Tensor, Tensor]:
    """User and item of each distinct pair in ``parts``, int64 (E,) each, sorted by user, then by item."""
    item_E = np.fromiter((item for part in parts for item in part), dtype=np.int64)
    user_E = np.repeat(np.arange(len(parts), dtype=np.int64), [len(part) for part in parts])
    key_E = torch.from_numpy(np.unique(user_E * num_items + item_E))
    return key_E // num_items, key_E % num_items


def train_pairs(sequences: Sequences, num_items: int) -> tuple[Tensor, Tensor]:
    """:func:`distinct_pairs` of the train parts, that is of everything but each user's last two events."""
    return distinct_pairs([train_part(sequence) for sequence in sequences], num_items)


def train_matrix(sequences: Sequences, num_items: int) -> scipy.sparse.csr_array:
    """Sparse (U, I), float64: 1 where the item is in the user's train part. Repeated events count once."""
    user_E, item_E = train_pairs(sequences, num_items)
    shape = (len(sequences), num_items)
    return scipy.sparse.coo_array((np.ones(len(user_E)), (user_E.numpy(), item_E.numpy())), shape=shape).tocsr()
