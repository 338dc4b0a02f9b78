"""The ensemble of a client: a conditional logit over the catalogue whose few weights are learned on validation items.

log p(item | history) = sum_f theta_f x_f(item, history) - log sum_j exp(sum_f theta_f x_f(j, history)); the features x
are the model's log-probability and what the client knows beside it (`fedecider.models.features`).

theta = argmax sum_n mean over the targets y of customer n of log p(y | h_n) - strength / 2 |theta - prior|^2, by
Newton's method; concave, so there is one. "bought before" has no prior and is bounded: where nobody buys twice its best
weight is minus infinity. A conditional logit is McFadden's (1974); a log-linear pool of experts that of Genest and
Zidek (1986). Differs from the first: of a large catalogue, choices are items with weights, drawn by layers.

Shape legend: N customers, B histories of a block, I items, M choices of a customer, F features, K beams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecider.data.near_texts import NearOnDemand, NearTexts
from fedecider.evaluation.beyond import LIST_LENGTH, first_ten
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.answers import Repeats
from fedecider.models.features import (
    BOUGHT,
    COUNTS,
    FEATURES,
    MODEL,
    SUCCESSORS,
    TEXT,
    Block,
    Knowledge,
    check_histories,
    features_of,
    near_of,
    tables_of,
)

BOUND = 20.0
"""Of the weight of "bought before", either way: exp(-20) is never."""
STRENGTH = 50.0
"""Of the prior."""
PRIOR = {MODEL: 0.8, TEXT: 0.2, COUNTS: 0.1, SUCCESSORS: 0.1}
PRIOR_ALONE = {TEXT: 0.7, COUNTS: 0.4, SUCCESSORS: 0.2}
"""Weights before any customer, with a model and without, 0 for what is not there: about those of video games."""
MAX_CUSTOMERS = 2000
"""Validation customers of a client on whom the weights are fitted: far more than there are weights."""
MAX_CHOICES, MIN_CHOICES = 2**19, 512
"""Choices of all customers together, and at least of each: bounds memory."""
NUM_BEST = 50
"""Best items by all but the model that join its beams as candidates: enough for every metric's list."""
MAX_NUMBERS = 2**21
"""Entries of a (B, I) matrix: bounds memory, changes no result."""

Histories = Sequence[Sequence[int]]


class ModelScores(NamedTuple):
    """What an ensemble asks of the model that it stands beside."""

    log_probs: Callable[[Histories, Tensor | None], Tensor]
    """histories, items (B, M) with -1 as padding -> log-probabilities (B, M) over the catalogue. With None those of all
    items (B, I), but for a constant of each history, on the model's device; only where there are no beams."""
    beams: Callable[[Histories, int], Tensor] | None
    """histories, k -> items (B, K), -1 as padding, with room for k beside those of the history; k 0: as many as the
    evaluation has. None where asking for every item is cheap."""
    search: Callable[[Histories, int], tuple[Tensor, Tensor]] | None = None
    """The same with the log-probabilities of these items, by beams in any case."""


class Weights(NamedTuple):
    """What decides: a weight for each feature."""

    value: dict[str, float]
    """Feature -> theta; features that are not here have none."""
    error: dict[str, float]
    """Feature -> standard error, from the curvature of the likelihood; none of a weight at its bound."""
    constant: tuple[str, ...] = ()
    """Features that were left out, since they were the same for all choices of every customer."""
    num_customers: int = 0
    """On whom they were fitted."""

    @property
    def with_model(self) -> bool:
        return MODEL in self.value


class Ensemble(NamedTuple):
    """What a client keeps to itself. It holds counts of real users."""

    knowledge: Knowledge
    alone: Weights
    """Of the ensemble without a model."""
    beside_model: Weights | None
    """None where there was no model."""
    sources: tuple[str, ...]
    """Whose events are counted."""


MODEL_ALONE = Weights({MODEL: 1.0}, {})


class Candidates(NamedTuple):
    """Items that may be ranked behind each history of a block, with all features."""

    item_BM: Tensor | None
    """Distinct, -1 as padding; None: the whole catalogue in its order."""
    seen_BM: Tensor
    """bool: items of the history."""
    value: dict[str, Tensor]
    """Feature -> (B, M) float32."""

    def score(self, weights: Weights) -> Tensor:
        """(B, M) float32: sum_f theta_f x_f; minus infinity for padding."""
        score_BM = sum_of(self.value, weights)
        return score_BM if self.item_BM is None else score_BM.masked_fill_(self.item_BM < 0, -torch.inf)


def sum_of(value: Mapping[str, Tensor], weights: Weights) -> Tensor:
    """sum_f theta_f x_f over the features that are there."""
    score_BM = torch.zeros(next(iter(value.values())).shape)
    for name, theta in weights.value.items():
        if name in value and theta:
            score_BM.add_(value[name], alpha=theta)
    return score_BM


def candidates_of(
    knowledge: Knowledge,
    histories: SequenceArray,
    model: ModelScores | None,
    weights: Weights,
    near: NearTexts | NearOnDemand | None = None,
    k: int = 0,
) -> Iterator[Candidates]:
    """Candidates of the histories, block after block: all items; where there are beams, these and the `NUM_BEST` best
    by ``weights`` of all other features, and enough of both for a list of ``k``. ``near``: where it is known, of all
    items."""
    for block, part in blocks_of(knowledge, histories, near):
        if model is None or model.beams is None:
            value = block.value if model is None else {MODEL: of_catalogue(model, part, block), **block.value}
            yield Candidates(None, block.seen_BI, value)
        else:
            best_BM = sum_of(block.value, weights).topk(min(max(NUM_BEST, k), block.seen_BI.shape[1]), 1).indices
            yield asked_of(model, part, block, torch.cat([model.beams(list(part), k).cpu(), best_BM], 1))


def blocks_of(
    knowledge: Knowledge, histories: SequenceArray, near: NearTexts | NearOnDemand | None = None
) -> Iterator[tuple[Block, SequenceArray]]:
    """The histories, some after the other, with the features of all items.

    Raises:
        ValueError: an empty history, or item numbers out of range.
    """
    check_histories(histories, knowledge.counts.num_items)
    tables = tables_of(knowledge, near or near_of(knowledge, histories), histories)
    size = max(1, MAX_NUMBERS // knowledge.counts.num_items)
    for start in range(0, len(histories), size):
        part = histories[start : start + size]
        yield features_of(tables, part), part


def of_catalogue(model: ModelScores, histories: SequenceArray, block: Block) -> Tensor:
    """The feature `MODEL` of all items, (B, I)."""
    log_prob_BI = torch.log_softmax(model.log_probs(list(histories), None).float(), 1).cpu()
    return _of_model(log_prob_BI, block.seen_BI, log_prob_BI.shape[1])


def of_items(model: ModelScores, histories: SequenceArray, block: Block, item_BM: Tensor) -> Tensor:
    """The feature `MODEL` of some items, (B, M); 0 for a padding of -1."""
    log_prob_BM = model.log_probs(list(histories), item_BM).cpu().float()
    idle_BM = block.seen_BI.gather(1, item_BM.clamp(min=0)) | (item_BM < 0)
    return _of_model(log_prob_BM, idle_BM, block.seen_BI.shape[1])


def _of_model(log_prob_BM: Tensor, idle_BM: Tensor, num_items: int) -> Tensor:
    value_BM = log_prob_BM.add_(math.log(num_items)).masked_fill_(idle_BM, 0.0)
    if bool(value_BM.sum(1).isnan().any()):
        raise ValueError("the model's scores are not numbers; expected a model that has not diverged. Train it again")
    return value_BM


def asked_of(model: ModelScores, histories: SequenceArray, block: Block, item_BM: Tensor) -> Candidates:
    """Candidates with the features of ``item_BM``, of which each is kept once."""
    rows = [sorted(set(row) - {-1}) for row in item_BM.tolist()]
    item_BM = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=-1)
    place_BM = item_BM.clamp(min=0)
    value = {name: value_BI.gather(1, place_BM) for name, value_BI in block.value.items()}
    return Candidates(
        item_BM,
        block.seen_BI.gather(1, place_BM),
        {MODEL: of_items(model, histories, block, item_BM), **value},
    )


class Choices(NamedTuple):
    """What weights are fitted on: for each customer what could have been chosen, and what was."""

    value_FNM: Tensor
    """float32, of `FEATURES` in their order; zeros where there is no model."""
    offset_NM: Tensor
    """log of how many items of the catalogue the choice stands for; minus infinity for padding."""
    target_NM: Tensor
    """1 / number of targets where the choice is one, else 0."""


def choices_of(
    knowledge: Knowledge,
    histories: SequenceArray,
    targets: SequenceArray,
    model: ModelScores | None,
    generator: torch.Generator,
    near: NearTexts | None = None,
) -> Choices:
    """What the customers with ``histories`` could choose and what they chose, which is ``targets``.

    All items where that is not too many. Else a layered sample: the targets, items of the history, beams and the best
    items by the prior stand for themselves; an equal number of all others, drawn at random, for the rest.
    """
    num_items, parts, start = knowledge.counts.num_items, [], 0
    num_choices = min(num_items, max(MIN_CHOICES, MAX_CHOICES // max(1, len(histories))))
    for block, part in blocks_of(knowledge, histories, near):
        chosen = targets[start : start + len(part)]
        start += len(part)
        beside = model is not None and model.beams is not None
        most = min(num_items, 4 * NUM_BEST) if beside else num_choices
        value = dict(block.value)
        if model is not None and not beside:
            value[MODEL] = of_catalogue(model, part, block)
        target_BI = torch.zeros(block.seen_BI.shape)
        row_T, item_T = torch.from_numpy(chosen.row_E), torch.from_numpy(chosen.value_E.astype(np.int64))
        target_BI[row_T, item_T] = 1.0 / torch.from_numpy(chosen.length_U[chosen.row_E]).float()
        item_BM, offset_BM = torch.arange(num_items).expand(len(part), -1), torch.zeros(len(part), most)
        if most < num_items:
            score_BI = sum_of(value, Weights(PRIOR if MODEL in value else PRIOR_ALONE, {}))
            score_BI += 1e3 * block.seen_BI + 1e6 * (target_BI > 0)
            if beside:
                assert model is not None
                assert model.beams is not None
                beam_BK = model.beams(list(part), 0).cpu()
                score_BI.scatter_add_(1, beam_BK.clamp(min=0), 1e4 * (beam_BK >= 0).float())
            num_best = most // 2
            best_BM = score_BI.topk(num_best, 1).indices
            drawn_BI = torch.rand(score_BI.shape, generator=generator).scatter_(1, best_BM, -1.0)
            item_BM = torch.cat([best_BM, drawn_BI.topk(most - num_best, 1).indices], 1)
            offset_BM[:, num_best:] = math.log((num_items - num_best) / (most - num_best))
        columns = {name: value_BI.gather(1, item_BM) for name, value_BI in value.items()}
        if beside:
            assert model is not None
            columns[MODEL] = of_items(model, part, block, item_BM)
        zero_BM = torch.zeros(item_BM.shape)
        value_FBM = torch.stack([columns.get(name, zero_BM) for name in FEATURES])
        parts.append(Choices(value_FBM, offset_BM, target_BI.gather(1, item_BM)))
    if not parts:
        return Choices(torch.zeros(len(FEATURES), 0, 1), torch.zeros(0, 1), torch.zeros(0, 1))
    return Choices(
        torch.cat([part.value_FNM for part in parts], 1), *map(torch.cat, list(zip(*parts, strict=True))[1:])
    )


def fit_weights(
    choices: Choices, with_model: bool, prior: Mapping[str, float] | None = None, strength: float = STRENGTH
) -> Weights:
    """The weights of a client; ``prior``: the weights of all clients (`PRIOR` without).

    Without a customer the weights are those of the prior.
    """
    prior = prior if prior is not None else PRIOR if with_model else PRIOR_ALONE
    names = [name for name in FEATURES if with_model or name != MODEL]
    x_FNM = choices.value_FNM[[FEATURES.index(name) for name in names]].double()
    open_NM = choices.offset_NM > -torch.inf
    middle_FN1 = (x_FNM * open_NM).sum(2, keepdim=True) / open_NM.sum(1, keepdim=True)
    spread_F = ((x_FNM - middle_FN1) * open_NM).abs().amax((1, 2)) if x_FNM.shape[1] else torch.zeros(len(names))
    kept = [place for place, spread in enumerate(spread_F.tolist()) if spread > 1e-6]
    constant = tuple(name for place, name in enumerate(names) if place not in kept) if x_FNM.shape[1] else ()
    if not kept:
        return Weights({name: float(prior.get(name, 0.0)) for name in names}, {}, constant)
    names = [names[place] for place in kept]
    x_FNM = (x_FNM - middle_FN1)[kept]
    prior_F = torch.tensor([float(prior.get(name, 0.0)) for name in names], dtype=torch.float64)
    pull_F = torch.tensor([0.0 if name == BOUGHT else strength for name in names], dtype=torch.float64)
    theta_F, free_F = prior_F.clone(), torch.ones(len(names), dtype=torch.bool)
    offset_NM, target_NM = choices.offset_NM.double(), choices.target_NM.double()
    if BOUGHT in names:
        place = names.index(BOUGHT)
        share = float((target_NM * choices.value_FNM[FEATURES.index(BOUGHT)]).sum() / target_NM.sum())
        if share in (0.0, 1.0):  # nobody buys twice, or nothing else: the likelihood has no maximum inside
            theta_F[place], free_F[place] = (2.0 * share - 1.0) * BOUND, False

    def at(theta_F: Tensor) -> tuple[float, Tensor]:
        """The objective, and the probabilities (N, M)."""
        log_prob_NM = torch.log_softmax(torch.tensordot(theta_F, x_FNM, 1) + offset_NM, 1)
        given = (target_NM * (log_prob_NM - offset_NM).masked_fill(target_NM == 0, 0.0)).sum()
        return float(given - (pull_F * (theta_F - prior_F) ** 2).sum() / 2), log_prob_NM.exp()

    def curvature(prob_NM: Tensor) -> Tensor:
        mean_FN = (x_FNM * prob_NM).sum(2)
        return (x_FNM * prob_NM).flatten(1) @ x_FNM.flatten(1).T - mean_FN @ mean_FN.T + torch.diag(pull_F)

    value, prob_NM = at(theta_F)
    for _ in range(MAX_STEPS):
        slope_F = (x_FNM * (target_NM - prob_NM)).sum((1, 2)) - pull_F * (theta_F - prior_F)
        curve_FF = curvature(prob_NM)
        step_F = torch.zeros_like(theta_F)
        step_F[free_F] = torch.linalg.solve(
            curve_FF[free_F][:, free_F] + 1e-9 * torch.eye(int(free_F.sum())), slope_F[free_F]
        )
        for _ in range(30):
            tried_F = (theta_F + step_F).clamp(-BOUND, BOUND)
            tried, tried_NM = at(tried_F)
            if tried >= value - 1e-9:
                break
            step_F /= 2
        moved = float((tried_F - theta_F).abs().max())
        theta_F, value, prob_NM = tried_F, tried, tried_NM
        if moved < 1e-5:
            break
    error_F = torch.full_like(theta_F, torch.nan)
    curve_FF = curvature(prob_NM)[free_F][:, free_F]
    error_F[free_F] = torch.linalg.pinv(curve_FF).diagonal().clamp(min=0.0).sqrt()
    return Weights(
        dict(zip(names, theta_F.tolist(), strict=True)),
        {name: error for name, error in zip(names, error_F.tolist(), strict=True) if error == error},
        constant,
        x_FNM.shape[1],
    )


MAX_STEPS = 50
"""Of Newton's method; five to ten are needed."""


class Places(NamedTuple):
    """Positions of held-out items, (N,) or (N, T) float64; NaN behind the last one of a basket."""

    whole: Tensor
    again: Tensor
    """Among the items that their customer bought before, of those of them that were; NaN for others."""
    new: Tensor
    """The same of items that were not."""
    ten: Tensor
    """The first items of the list of `whole`, (N, K)."""


def positions(
    knowledge: Knowledge,
    histories: SequenceArray,
    target_NT: Tensor,
    model: ModelScores | None,
    every: Sequence[Weights],
    drop_seen: bool,
    near: NearTexts | None = None,
) -> list[Places]:
    """Places of the targets under each of ``every`` weights, whose features are worked out once.

    Args:
        target_NT: int64 (N,), or (N, T) with `NO_ITEM` behind the last one (`fedecider.evaluation.protocols.held_out`).
        drop_seen: Whether items of the history are no candidates; then `Places.whole` is `Places.new`.
    """
    parts: list[list[Places]] = [[] for _ in every]
    start, first = 0, every[0] if every else MODEL_ALONE
    for candidates in candidates_of(knowledge, histories, model, first, near):
        rows, item_BM = slice(start, start + len(candidates.seen_BM)), candidates.item_BM
        start, target_BT, past, num_items = rows.stop, target_NT[rows], histories[rows], knowledge.counts.num_items
        seen_BI = torch.zeros(len(past), num_items, dtype=torch.bool)
        seen_BI[past.row_E, past.value_E] = True  # also of what is no candidate
        repeated_BT = seen_BI.gather(1, target_BT.clamp(min=0).view(len(seen_BI), -1)).view(target_BT.shape)
        repeated_BT &= target_BT >= 0
        for part, weights in zip(parts, every, strict=True):
            score_BI = candidates.score(weights)
            if item_BM is not None:
                score_BI = _spread(item_BM, score_BI, num_items)
            new_BT = _places(score_BI.masked_fill(seen_BI, -torch.inf), target_BT)
            if drop_seen:
                ten_BK = first_ten(score_BI.masked_fill(seen_BI, -torch.inf))
                part.append(Places(new_BT, torch.full_like(new_BT, torch.nan), new_BT, ten_BK))
                continue
            again_BT = _places(score_BI.masked_fill(~seen_BI, -torch.inf), target_BT)
            part.append(
                Places(
                    _places(score_BI, target_BT),
                    again_BT.masked_fill_(~repeated_BT, torch.nan),
                    new_BT.masked_fill_(repeated_BT, torch.nan),
                    first_ten(score_BI),
                )
            )
    none_NT = torch.zeros(target_NT.shape, dtype=torch.float64)
    empty = Places(none_NT, none_NT, none_NT, torch.zeros(0, LIST_LENGTH, dtype=torch.int64))
    return [Places(*map(torch.cat, zip(*part, strict=True))) if part else empty for part in parts]


PAIRS_AT_ONCE = 64
"""Targets that are compared with all items together: bounds memory."""


def _places(score_BI: Tensor, target_BT: Tensor) -> Tensor:
    """0-based places of targets, the mean place among equals; `NOT_RANKED` for a score of minus infinity, NaN for
    `NO_ITEM`."""
    place_BT = torch.full(target_BT.shape, torch.nan, dtype=torch.float64).view(len(target_BT), -1)
    wide_BT = target_BT.view(len(target_BT), -1)
    for pair_P2 in (wide_BT >= 0).nonzero().split(PAIRS_AT_ONCE):
        row_P, column_P = pair_P2.T
        score_PI = score_BI[row_P]
        own_P1 = score_PI.gather(1, wide_BT[row_P, column_P][:, None])
        above_P, equal_P = (torch.count_nonzero(flag, 1).double() for flag in (score_PI > own_P1, score_PI == own_P1))
        place_P = above_P + (equal_P - 1.0) / 2
        place_BT[row_P, column_P] = place_P.masked_fill_(own_P1[:, 0] == -torch.inf, float(NOT_RANKED))
    return place_BT.view(target_BT.shape)


def _spread(item_BM: Tensor, value_BM: Tensor, num_items: int) -> Tensor:
    """(B, I) values of some items; minus infinity for the others."""
    value_BI = torch.full((len(item_BM), num_items + 1), -torch.inf)
    return value_BI.scatter_(1, torch.where(item_BM < 0, num_items, item_BM), value_BM)[:, :-1]


class Best(NamedTuple):
    """One recommended item."""

    item: int
    log_prob: float
    """Over the catalogue, or over the candidates where there are beams."""
    adds: dict[str, float]
    """Feature -> theta_f x_f: what it adds to the item's log-score."""


def best_items(
    ensemble: Ensemble,
    histories: SequenceArray,
    model: ModelScores | None,
    k: int,
    repeats: Repeats = "learned",
    allowed_I: Tensor | None = None,
    near: NearTexts | NearOnDemand | None = None,
) -> list[list[Best]]:
    """The k best items of each history; fewer where no more may come.

    ``allowed_I``: bool (I,), items that may come.

    Raises:
        ValueError: there is a model, and the ensemble was fitted without one; an empty history.
    """
    weights = ensemble.alone if model is None else ensemble.beside_model
    if weights is None:
        raise ValueError("got an ensemble that was fitted without a model, expected one fitted beside it: fit it again")
    if repeats == "only" and model is not None and model.beams is not None:
        model = _with_history(model, model.beams)
    from idgen.decode import stable_topk  # reads the library of models, which popular items do without

    lists = []
    for candidates in candidates_of(ensemble.knowledge, histories, model, weights, near, k):
        item_BM = candidates.item_BM
        if item_BM is None:
            item_BM = torch.arange(candidates.seen_BM.shape[1]).expand(len(candidates.seen_BM), -1)
        log_prob_BM = torch.log_softmax(candidates.score(weights).double(), 1)
        out_BM = item_BM < 0
        if repeats != "learned":
            out_BM = out_BM | (candidates.seen_BM if repeats == "drop" else ~candidates.seen_BM)
        if allowed_I is not None:
            out_BM = out_BM | ~allowed_I[item_BM.clamp(min=0)]
        log_prob_BK, place_BK = stable_topk(log_prob_BM.masked_fill(out_BM, -torch.inf), k)
        item_BK = item_BM.gather(1, place_BK).tolist()
        adds = {
            name: (candidates.value[name].gather(1, place_BK) * theta).tolist() for name, theta in weights.value.items()
        }
        for row, log_probs in enumerate(log_prob_BK.tolist()):
            lists.append(
                [
                    Best(item_BK[row][place], log_prob, {name: part[row][place] for name, part in adds.items()})
                    for place, log_prob in enumerate(log_probs)
                    if log_prob > -math.inf
                ]
            )
    return lists


def _with_history(model: ModelScores, beams: Callable[[Histories, int], Tensor]) -> ModelScores:
    """The model with the items of every history among its beams."""

    def longer(histories: Histories, k: int) -> Tensor:
        rows = [torch.tensor(items) for items in histories]
        own_BM = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return torch.cat([beams(histories, k).cpu(), own_BM], 1)

    return model._replace(beams=longer)


def with_items(ensemble: Ensemble, unit_ND: np.ndarray) -> Ensemble:
    """The ensemble over a catalogue with N more items, behind the others, whose texts have the vectors ``unit_ND``.

    That nobody has one of them says nothing, since nobody could: features that count have nothing to say of them.
    Weights stay as they were fitted.

    Raises:
        ValueError: vectors of another width.
    """
    knowledge = ensemble.knowledge
    if unit_ND.shape[1:] != knowledge.unit_ID.shape[1:]:
        raise ValueError(
            f"got new items with text vectors of shape {unit_ND.shape}, expected width {knowledge.unit_ID.shape[1]}: "
            "use the encoder with which the ensemble was made"
        )
    longer = Knowledge(
        knowledge.counts.with_items(len(unit_ND)),
        np.concatenate([knowledge.unit_ID, unit_ND]),
        knowledge.num_new + len(unit_ND),
    )
    return ensemble._replace(knowledge=longer)
