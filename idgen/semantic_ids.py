"""Semantic IDs: residual k-means over text vectors; near texts share their first codes.

Source: TIGER (Rajput et al., NeurIPS 2023), GRID (Snap, 2025). Differs from TIGER: k-means in the place of an RQ-VAE,
which GRID has too; smaller codebooks for small catalogues.

Shape legend: N texts, E width of the encoder, C codes of a level, L levels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from idgen.item_ids import ItemIds, assign_item_ids

NUM_LEVELS, NUM_CODES = 3, 256
"""As in TIGER."""
ITEMS_PER_CODE = 8
"""At least, on average: a small catalogue has fewer codes, so that codes are shared."""
SPARE_DIGITS = 8
"""Of the last token, beyond what the catalogue needs, for items that come later; larger ones are spelled."""
LEVEL_NAMES = "abcdefgh"


class Codebook(NamedTuple):
    """What gives texts their codes."""

    centroids: list[Tensor]
    """Of every level, (C, E) float64."""

    def codes(self, vector_NE: Tensor) -> Tensor:
        """(N, L): at each level the nearest centroid of what the levels before have left; the first one on ties."""
        left_NE, found = vector_NE.double(), []
        for centroid_CE in self.centroids:
            distance_NC = (centroid_CE**2).sum(1) - 2 * left_NE @ centroid_CE.T
            code_N = distance_NC.argmin(1)
            left_NE = left_NE - centroid_CE[code_N]
            found.append(code_N)
        return torch.stack(found, 1)


def fit_codebook(vector_NE: Tensor, seed: int, num_levels: int = NUM_LEVELS) -> Codebook:
    """Residual k-means; the same vectors and seed give the same codebook, on one number of threads bit for bit."""
    from sklearn.cluster import KMeans  # a second of imports, for this kind of IDs alone

    left_NE, centroids = vector_NE.double(), []
    for _ in range(num_levels):
        distinct = len(torch.unique(left_NE, dim=0))
        num_codes = min(NUM_CODES, max(2, len(left_NE) // ITEMS_PER_CODE), distinct)
        fitted = KMeans(num_codes, n_init=1, random_state=seed % 2**32).fit(left_NE.numpy())
        level = Codebook([torch.from_numpy(fitted.cluster_centers_).double()])
        left_NE = left_NE - level.centroids[0][level.codes(left_NE)[:, 0]]
        centroids += level.centroids
    return Codebook(centroids)


def semantic_texts(
    codebook: Codebook, item_keys: Sequence[str], vector_NE: Tensor, taken: Iterable[str] = ()
) -> list[str]:
    """An ID text an item, such as ``a12 b7 c201 d0``; none of ``taken``.

    The last token tells items of equal codes apart: in the order of their keys each gets the first number that is free.
    """
    used, next_digit = set(taken), defaultdict[str, int](int)
    texts = [""] * len(item_keys)
    code_NL = codebook.codes(vector_NE).tolist()
    digit = LEVEL_NAMES[len(codebook.centroids)]
    for item in sorted(range(len(item_keys)), key=lambda item: item_keys[item]):
        stem = " ".join(f"{name}{code}" for name, code in zip(LEVEL_NAMES, code_NL[item], strict=False))
        while (text := f"{stem} {digit}{next_digit[stem]}") in used:
            next_digit[stem] += 1
        used.add(text)
        texts[item] = text
    return texts


def semantic_tokens(codebook: Codebook, id_texts: Iterable[str]) -> list[str]:
    """The words of all possible IDs, which a tokenizer is trained with: codes of every level, and last numbers."""
    levels = [
        f"{name}{code}"
        for name, rows in zip(LEVEL_NAMES, codebook.centroids, strict=False)
        for code in range(len(rows))
    ]
    digit = LEVEL_NAMES[len(codebook.centroids)]
    largest = max(int(text.split()[-1][1:]) for text in id_texts)
    return [*levels, *(f"{digit}{number}" for number in range(largest + 1 + SPARE_DIGITS))]


def semantic_item_ids(
    item_keys: Sequence[str],
    id_texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    item_texts: Sequence[str],
) -> ItemIds:
    """IDs from `semantic_texts`; num_collisions counts items whose codes an item before them has."""
    ids = assign_item_ids(item_keys, [[text] for text in id_texts], tokenizer, item_texts=item_texts)
    stems = {text.rsplit(" ", 1)[0] for text in id_texts}
    no_words = {"own_word_share": None, "num_collisions": len(id_texts) - len(stems)}
    return ids._replace(report=ids.report | no_words)
