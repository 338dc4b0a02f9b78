"""The loss of a model that writes item IDs: over all of its vocabulary, a catalogue, or the trie of the IDs.

Shapes: B samples, T target tokens, R target tokens that count, C candidates, D width, U distinct tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import (
    Family,
    Predictions,
    TokenBatch,
    labels_of,
    output_rows,
)
from idgen.trie import IGNORED_LABEL, Forest, log_softmax_of_rows

MAX_LOGITS = 2**26
"""Logits that exist at a time in training: 256 MiB in fp32, and as much for their gradients."""


WRITING_WEIGHT = 0.5
"""Of `trie_loss` beside the softmax over the items, where a model learns both."""


def sequence_loss(model: Any, batch: TokenBatch) -> Tensor:
    """Mean cross-entropy in nats over the target tokens of a batch; labels of -100 do not count.

    ``model``: of any family, plain or wrapped by PEFT. Logits are computed for counting tokens only, and no more than
    `MAX_LOGITS` exist at a time: all of the vocabulary, or the tokens of ``catalogue`` in the batch. ``log_weights`` in
    the batch are added to all of them but the target's; ``target_probs`` (B, C) stand in the place of one target. With
    ``node`` in the batch it is `trie_loss`; with both, where every ID ends with a token of its own, the state before an
    ID has two targets: the ID's first word among those that may begin one, and the item's own token among those of
    ``catalogue``. The loss is that of the latter plus `WRITING_WEIGHT` times `trie_loss` (as LIGER, Yang et al. 2024,
    joins a dense with a generative loss).
    """
    family, base = family_of(model), unwrap(model)
    return predictions_loss(family, base, family.predictions(base, batch), batch)


def predictions_loss(family: Family, base: Any, predictions: Predictions, batch: TokenBatch) -> Tensor:
    """`sequence_loss` of a model that has run on ``batch``."""
    hidden_RD, target_R = predictions
    token_C, weight_BC, target_BC = (batch.get(name) for name in ("catalogue", "log_weights", "target_probs"))
    row_R = (labels_of(batch) != IGNORED_LABEL).nonzero()[:, 0]
    writing = hidden_RD.new_zeros((), dtype=torch.float32)
    if "node" in batch:
        writing = trie_loss(family, base, hidden_RD, target_R, batch)
        if token_C is None:
            return writing
        begins_R = batch["node"][labels_of(batch) != IGNORED_LABEL] < batch["first_child"][1]
        hidden_RD, row_R, target_R = hidden_RD[begins_R], row_R[begins_R], target_R[begins_R.roll(-1)]
    if token_C is not None:
        target_R = torch.searchsorted(token_C, target_R)

    def loss(rows_RD: Tensor, targets_R: Tensor, row_R: Tensor) -> Tensor:
        logit_RC = family.token_logits(base, rows_RD, token_C)
        if weight_BC is not None:
            logit_RC = logit_RC + weight_BC[row_R].scatter_(1, targets_R[:, None], 0.0)
        return F.cross_entropy(logit_RC, targets_R if target_BC is None else target_BC[row_R])

    num_logits = base.config.vocab_size if token_C is None else len(token_C)
    return mean_in_pieces(loss, num_logits, hidden_RD, target_R, row_R) + WRITING_WEIGHT * writing


DENSE_ABOVE = 512
"""Children of a node above which the logits of all of them are one product for all its rows, as at a root."""


def trie_loss(family: Family, model: Any, hidden_RD: Tensor, target_R: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over the target items of -log p(ID), in nats; p(ID) is the product over its tokens of their probabilities
    among the tokens that may follow in the trie.

    So no probability is spent on what is no item, and a token that the trie leaves no choice costs nothing. It is
    what constrained decoding ranks by (`idgen.decode`): a hierarchical softmax (Morin and Bengio 2005) along the
    IDs. Differs from IDGenRec (SIGIR 2024), which trains on all of the vocabulary.
    """
    forest = Forest(batch["first_child"], batch["child_token"])
    node_R = batch["node"][labels_of(batch) != IGNORED_LABEL]
    num_R = forest.num_children(node_R)
    total = hidden_RD.new_zeros((), dtype=torch.float32)
    for node in node_R[num_R > DENSE_ABOVE].unique():
        rows_R = node_R == node
        token_C = forest.children(node[None]).token_C

        def loss(rows_RD: Tensor, place_R: Tensor, token_C: Tensor = token_C) -> Tensor:
            return F.cross_entropy(family.token_logits(model, rows_RD, token_C), place_R)

        place_R = torch.searchsorted(token_C, target_R[rows_R])
        total = total + mean_in_pieces(loss, len(token_C), hidden_RD[rows_R], place_R) * len(place_R)
    open_R = (num_R > 1) & (num_R <= DENSE_ABOVE)
    if bool(open_R.any()):
        child = forest.children(node_R[open_R])
        token_U, place_C = child.token_C.unique(return_inverse=True)
        rows_UD = output_rows(model.lm_head, token_U)
        scaled_RD = hidden_RD[open_R] * family.output_scale(model)
        logit_C = (scaled_RD[child.row_C] * rows_UD[place_C]).sum(1).float()
        is_own_C = child.token_C == target_R[open_R][child.row_C]
        total = total - log_softmax_of_rows(logit_C, child.row_C, int(open_R.sum()))[is_own_C].sum()
    return total / forest.is_root(node_R).sum().clamp(min=1)


def mean_in_pieces(loss: Callable[..., Tensor], vocab_size: int, *rows: Tensor) -> Tensor:
    """``loss(*rows)``, a mean over their R rows, with at most `MAX_LOGITS` logits at a time.

    More are computed piece by piece, and again in the backward pass.
    """
    rows_at_once = max(1, MAX_LOGITS // vocab_size)
    if len(rows[0]) <= rows_at_once:
        return loss(*rows)
    pieces = zip(*(part.split(rows_at_once) for part in rows), strict=True)
    means = [cast(Tensor, checkpoint(loss, *piece, use_reentrant=False)) * len(piece[0]) for piece in pieces]
    return torch.stack(means).sum() / len(rows[0])
