"""The model mixed with counts and text neighbours: weights, files, and when a client takes it.

p(item | history) = sum_e lambda_e p_e(item | history); e: counts, text neighbours, the agreement of both, the model,
its consensus with the others, a uniform floor. The idea of a memory beside a language model, mixed with a weight, is
that of kNN-LM (Khandelwal et al., ICLR 2020). Differs from it: the experts are counts and texts in place of hidden
states, weights are fitted by EM with every user left out, and they depend on how much is known of the newest item.

Weights are fitted to likelihood, on train events; places in a list are another thing, and the newest events of a user
are others than those before. On dense data (MovieLens-1M) a mixture was below the model that it held.

``hybrid.json`` says whose catalogue it is (SHA-256 of the item keys) and what the tensors must be (their SHA-256). It
holds counts of real users: neither file belongs into anything that is pushed or shared.

Shape legend: N contexts, E experts, Q buckets, B histories, M candidates of one, S seen items, I items, D dimensions,
U users.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from fedecider.data.near_texts import NearTexts, nearest_texts
from fedecider.evaluation.metrics import NOT_RANKED, user_metrics
from fedecider.evaluation.statistics import clearly_best
from fedecider.federation.record import plain, write_json
from fedecider.models import counts as experts
from fedecider.models.config import HybridConfig
from fedecider.models.counts import Contexts, Counts
from fedecider.running.damage import check_tensors, damage_names, read_object

# Settings of the private part of the hybrid.


# The weights of a mixture of experts: the most likely ones by expectation maximisation.

NUM_STEPS = 300
SMALLEST = 1e-300
"""In the place of 0 in a logarithm; float64 ends at 2e-308."""
NUM_BUCKETS = 3
"""Groups of histories with weights of their own: little, more and well known."""
BUCKET_PRIOR = 50.0
"""Events with which a bucket starts from the weights of all: few events of its own leave it there."""


class Mixture(NamedTuple):
    """How far a client trusts each expert."""

    experts: tuple[str, ...]
    """The last one is the floor, "uniform"."""
    cut_Q: np.ndarray
    """Rising: a history whose newest item has more behind it than q of the cuts belongs to bucket q."""
    weight_QE: np.ndarray
    """lambda: one row a bucket, each sums to 1."""
    mean_E: np.ndarray
    """lambda without buckets."""
    log_likelihood: float
    """Mean log-probability of the train events that it was fitted on."""
    num_contexts: int

    def weights(self, known_B: np.ndarray) -> np.ndarray:
        """(B, E) weights of histories by what is known of their newest items."""
        return self.weight_QE[np.searchsorted(self.cut_Q, known_B)]


def fit_weights(
    prob_NE: np.ndarray, prior_E: np.ndarray | None = None, num_steps: int = NUM_STEPS
) -> tuple[np.ndarray, float]:
    """lambda = argmax sum_n log sum_e lambda_e p_ne + sum_e a_e log lambda_e, and the mean log-likelihood.

    EM (Dempster et al., 1977): lambda_e <- (a_e + sum_n lambda_e p_ne / sum_e' lambda_e' p_ne') over its sum. The
    objective is concave for a >= 0, so its fixed point from inside is the maximum, and no step may lower it.
    ``prior_E``: a, none without it. Float64, deterministic.
    """
    prior_E = np.zeros(prob_NE.shape[1]) if prior_E is None else prior_E
    if not len(prob_NE) and not prior_E.any():
        prior_E = np.ones(prob_NE.shape[1])  # nothing is known: equal weights
    weight_E = np.full(prob_NE.shape[1], 1.0 / prob_NE.shape[1])
    before = -np.inf
    for _ in range(num_steps):
        joint_NE = prob_NE * weight_E
        total_N = np.maximum(joint_NE.sum(1), SMALLEST)
        logs_E = np.log(np.maximum(weight_E, SMALLEST))
        value = float(np.log(total_N).sum() + (prior_E * logs_E).sum())
        assert value >= before - 1e-9 * max(1.0, abs(value)), f"EM went down from {before} to {value}"
        before = value
        taken_E = (joint_NE / total_N[:, None]).sum(0) + prior_E
        weight_E = taken_E / taken_E.sum()
    return weight_E, log_likelihood(prob_NE, weight_E)


def log_likelihood(prob_NE: np.ndarray, weight_E: np.ndarray) -> float:
    """Mean log-probability of the targets; 0 without any."""
    return float(np.log(np.maximum(prob_NE @ weight_E, SMALLEST)).mean()) if len(prob_NE) else 0.0


def fit_mixture(
    prob_NE: np.ndarray,
    known_N: np.ndarray,
    experts: tuple[str, ...],
    num_buckets: int = NUM_BUCKETS,
    bucket_prior: float = BUCKET_PRIOR,
) -> Mixture:
    """Weights of all contexts, and of equal groups of them by ``known_N`` with those of all as their prior.

    lambda_q = argmax sum_{n in q} log sum_e lambda_e p_ne + ``bucket_prior`` sum_e lambda^all_e log lambda_e.
    """
    mean_E, value = fit_weights(prob_NE)
    shares = [number / num_buckets for number in range(1, num_buckets)]
    cut_Q = np.quantile(known_N, shares) if len(known_N) else np.zeros(len(shares))
    bucket_N = np.searchsorted(cut_Q, known_N)
    weight_QE = np.stack(
        [fit_weights(prob_NE[bucket_N == bucket], bucket_prior * mean_E)[0] for bucket in range(num_buckets)]
    )
    return Mixture(experts, cut_Q, weight_QE, mean_E, value, len(prob_NE))


# A client's hybrid: fitted once on its train events, then asked for the items that a history leads to.

MODEL, CONSENSUS = "model", "consensus"
"""Consensus is proportional to the root of the model times the mixture without it. It sums over the whole catalogue, so
there is none where IDs have several tokens."""
COUNTING = ("counts", "agreement")
"""Experts that have nothing to say of an item that came after the counts."""
ALONE = experts.EXPERTS
"""Experts of a mixture without a model, in their order."""
EXPERTS, FLOOR = ALONE[:-1], ALONE[-1]
BESIDE_MODEL = ((*EXPERTS, MODEL, FLOOR), (*EXPERTS, MODEL, CONSENSUS, FLOOR))
"""Those of one beside a model, where IDs have several tokens and where they have one."""
NUM_BEST = 50
"""Best items of the hybrid that join the model's beams as candidates: enough for every metric's list."""
MAX_NUMBERS = 2**21
"""Entries of a (B, I) matrix on a CPU: bounds memory, changes no result."""

Histories = Sequence[Sequence[int]]


class ModelScores(NamedTuple):
    """What the hybrid asks of the model that it stands beside."""

    log_probs: Callable[[Histories, Tensor | None], Tensor]
    """histories, items (B, M) with -1 as padding -> log-probabilities (B, M) over the catalogue. With None those of all
    items (B, I), but for a constant of each history, on the model's device; only where there are no beams."""
    beams: Callable[[Histories, int], Tensor] | None
    """histories, k -> items (B, K), -1 as padding, with room for k beside those of the history; k 0: as many as the
    evaluation has. None where asking for every item is cheap."""


class Hybrid(NamedTuple):
    """What a client keeps to itself. It holds counts of real users."""

    counts: Counts
    """Of all sources together."""
    unit_ID: np.ndarray
    """Vectors of the published item texts (`experts.unit_vectors`)."""
    alone: Mixture
    beside_model: Mixture | None
    """None where there was no model."""
    config: HybridConfig
    num_new: int = 0
    """Items at the end of the catalogue that came after the counts."""


class Ranked(NamedTuple):
    """Candidates of each history with their probabilities."""

    item_BM: Tensor
    """Distinct; -1 as padding."""
    prob_BM: Tensor
    """Float64; 0 for seen items and padding."""
    parts: Callable[[Tensor], dict[str, Tensor]]
    """places (B, N) among the candidates -> expert -> what it gives to the probabilities there (B, N), lambda_e p_e.
    They sum to the probability of a candidate that has one."""


def fit_hybrid(
    counts: Counts,
    unit_ID: np.ndarray,
    contexts: Contexts,
    model: ModelScores | None,
    config: HybridConfig,
    near: NearTexts | None = None,
) -> Hybrid:
    """The hybrid of a client whose ``counts`` hold its train events, fitted on those of ``contexts``.

    The weights maximise the likelihood of the targets of ``contexts`` by EM (docs/hybrid.md; ours, in no paper).

    Args:
        counts: Events, and pairs of items near each other.
        unit_ID: Text vectors of norm 1, a row an item.
        contexts: Histories with the train event behind each.
        model: The client's model; None: a hybrid without one. It must not have been trained on these events, or it
            would be overrated: fitted with adapters that know them, all weight goes to the model.
        config: What is counted.
        near: The nearest texts of all items, where they are known already.

    Raises:
        ValueError: no train event has one before it.
    """
    own = "own" in config.source_names
    near = near or _near(unit_ID, contexts)
    blocks = []
    for batch in _batches(contexts, counts.num_items, own):
        found = experts.evidence(counts, batch)
        blocks.append(Block(batch, experts.known(found), experts.expert_probs(found, near)))
    if not blocks:
        raise ValueError(
            "got no train event with one before it, expected some to fit the weights of the hybrid: prepare the data "
            "with a larger min_length, or set hybrid.kind to none"
        )
    parts = [_target_probs(block, model) for block in blocks]
    probs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    known_N = np.concatenate([block.known_B for block in blocks])

    def fitted(names: Sequence[str]) -> Mixture:
        prob_NE = np.stack([probs[name] for name in names], 1)
        return fit_mixture(prob_NE, known_N, tuple(names))

    hybrid = Hybrid(counts, unit_ID, fitted([name for name in probs if name != MODEL]), None, config)
    if model is None:
        return hybrid
    if model.beams is None:
        floor_N = probs.pop(FLOOR)
        consensus_N = np.concatenate([_consensus_of_targets(hybrid, block, model) for block in blocks])
        probs |= {CONSENSUS: consensus_N, FLOOR: floor_N}
    return hybrid._replace(beside_model=fitted(list(probs)))


def with_items(hybrid: Hybrid, unit_ND: np.ndarray) -> Hybrid:
    """The hybrid over a catalogue with N more items, behind the others, whose texts have the vectors ``unit_ND``.

    That nobody has one of them says nothing, since nobody could: experts that count abstain, and the others share their
    weights, p(b | h) proportional to sum_e lambda_e p_e(b | h) / sum_e lambda_e over the experts e that do not count.
    Weights stay as they were fitted.

    Raises:
        ValueError: vectors of another width.
    """
    if unit_ND.shape[1:] != hybrid.unit_ID.shape[1:]:
        raise ValueError(
            f"got new items with text vectors of shape {unit_ND.shape}, expected width {hybrid.unit_ID.shape[1]}: use "
            "the encoder with which the hybrid was made"
        )
    counts = hybrid.counts.with_items(len(unit_ND))
    unit_ID, num_new = np.concatenate([hybrid.unit_ID, unit_ND]), hybrid.num_new + len(unit_ND)
    return hybrid._replace(counts=counts, unit_ID=unit_ID, num_new=num_new)


def rank(
    hybrid: Hybrid, contexts: Contexts, model: ModelScores | None, k: int = 0, near: NearTexts | None = None
) -> Iterator[Ranked]:
    """The mixture for the history of each context, batch after batch; with ``model`` None that of the hybrid without a
    model. ``near``: where it is known, of all items.

    Exact on the candidates, which are the whole catalogue, or the model's beams and the `NUM_BEST` best items of the
    hybrid, and enough of both for a list of ``k``.

    Raises:
        ValueError: there is a model, and the hybrid was fitted without one.
    """
    mixture = hybrid.alone if model is None else hybrid.beside_model
    if mixture is None:
        raise ValueError("got a hybrid that was fitted without a model, expected one fitted beside it: fit it again")
    near = near or _near(hybrid.unit_ID, contexts)
    for block in blocks_of(hybrid, contexts, near):
        if model is None or model.beams is None:
            model_BI = (
                None if model is None else catalogue_probs(model.log_probs(block.contexts.histories, None), block)
            )
            yield _rank_catalogue(hybrid, mixture, block.to(model_BI), model_BI)
        else:
            yield _rank_candidates(mixture, block, model, k)


class Block(NamedTuple):
    """Some contexts, and what the experts that know no language model say of them."""

    contexts: Contexts
    known_B: np.ndarray
    own: experts.ExpertProbs

    def to(self, other: Tensor | None) -> Block:
        """The same on the device of ``other``."""
        return self if other is None else self._replace(own=self.own.to(other.device))


def blocks_of(hybrid: Hybrid, contexts: Contexts, near: NearTexts) -> Iterator[Block]:
    """The contexts, some after the other; ``near`` holds the neighbours of all items that vote there."""
    for batch in _batches(contexts, hybrid.counts.num_items, "own" in hybrid.config.source_names):
        found = experts.evidence(hybrid.counts, batch)
        yield Block(batch, experts.known(found), experts.expert_probs(found, near))


def _near(unit_ID: np.ndarray, contexts: Contexts) -> NearTexts:
    """Of the items that vote in ``contexts``."""
    newest = {item for items in contexts.histories for item in items[: -experts.NUM_CONTEXT - 1 : -1]}
    return nearest_texts(unit_ID, np.array(sorted(newest), np.int64))


def _rank_catalogue(hybrid: Hybrid, mixture: Mixture, block: Block, model_BI: Tensor | None) -> Ranked:
    """Every item is a candidate."""
    prob_BI, consensus_BI = mixed(hybrid, mixture, block, model_BI)
    item_BI = torch.arange(prob_BI.shape[1]).expand(len(prob_BI), -1)
    total_B1 = prob_BI.sum(1, keepdim=True).clamp(min=np.finfo(np.float64).tiny) if hybrid.num_new else None
    if total_B1 is not None:
        prob_BI = prob_BI / total_B1

    def parts(place_BN: Tensor) -> dict[str, Tensor]:
        there_BN = place_BN.to(prob_BI.device)
        given, beside = block.own.at(there_BN), {MODEL: model_BI, CONSENSUS: consensus_BI}
        given |= {name: whole_BI.gather(1, there_BN) for name, whole_BI in beside.items() if whole_BI is not None}
        is_new_BN = there_BN >= prob_BI.shape[1] - hybrid.num_new
        found = {}
        for name in mixture.experts:
            weight_BN = _weights(mixture, block)[name][:, None].expand(there_BN.shape)
            if hybrid.num_new:
                weight_BN = torch.where(is_new_BN, _weights(mixture, block, new=True)[name][:, None], weight_BN)
            part_BN = weight_BN * given[name]
            found[name] = (part_BN if total_B1 is None else part_BN / total_B1).cpu()
        return found

    return Ranked(item_BI, prob_BI.cpu(), parts)


def mixed(hybrid: Hybrid, mixture: Mixture, block: Block, model_BI: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sum of all experts, and their consensus where it is one of them; (B, I) on the device of the block.

    Over a catalogue with new items rows do not sum to 1 yet.
    """
    num_new = hybrid.num_new
    total_BI = _own_total(mixture, block, num_new)
    if model_BI is None:
        return total_BI, None
    weight = _weights(mixture, block)
    consensus_BI = None
    if MODEL in weight and bool(weight[MODEL].any()):
        total_BI += _weighted(mixture, block, num_new, MODEL, model_BI)
    if CONSENSUS in weight and bool(weight[CONSENSUS].any()):
        consensus_BI = consensus_probs(model_BI, _own_total(hybrid.alone, block, num_new), block)
        total_BI += _weighted(mixture, block, num_new, CONSENSUS, consensus_BI)
    elif CONSENSUS in weight:
        consensus_BI = torch.zeros_like(model_BI)
    return total_BI, consensus_BI


def _weights(mixture: Mixture, block: Block, new: bool = False) -> dict[str, Tensor]:
    """Expert -> (B,) its weights; for ``new`` items those that count have none, and the others what makes up for it."""
    weight_BE = mixture.weights(block.known_B)
    if new:
        weight_BE = weight_BE * np.array([name not in COUNTING for name in mixture.experts])
        weight_BE = weight_BE / np.maximum(weight_BE.sum(1, keepdims=True), np.finfo(np.float64).tiny)
    weight_EB = torch.from_numpy(np.ascontiguousarray(weight_BE.T)).to(block.own.base_BE.device)
    return dict(zip(mixture.experts, weight_EB, strict=True))


def _own_total(mixture: Mixture, block: Block, num_new: int) -> Tensor:
    """What the experts without the model give to ``mixture``, (B, I)."""

    def total(new: bool) -> Tensor:
        weight = _weights(mixture, block, new)
        return block.own.mixture(torch.stack([weight[name] for name in ALONE], 1))

    total_BI = total(new=False)
    if num_new:
        total_BI[:, -num_new:] = total(new=True)[:, -num_new:]
    return total_BI


def _weighted(mixture: Mixture, block: Block, num_new: int, name: str, prob_BI: Tensor) -> Tensor:
    """What the expert ``name`` gives to the mixture, (B, I)."""
    part_BI = _weights(mixture, block)[name][:, None] * prob_BI
    if num_new:
        part_BI[:, -num_new:] = _weights(mixture, block, new=True)[name][:, None] * prob_BI[:, -num_new:]
    return part_BI


def catalogue_probs(score_BI: Tensor, block: Block) -> Tensor:
    """p(item | history, not seen before) under the model, (B, I) float64; 0 for seen items."""
    prob_BI = score_BI.double()  # a copy, of float32
    prob_BI = prob_BI.clone() if prob_BI is score_BI else prob_BI
    seen_N = block.own.seen_N.to(prob_BI.device)
    prob_BI.view(-1)[seen_N] = -torch.inf
    prob_BI = torch.softmax(prob_BI, 1)
    num_seen_B = torch.bincount(seen_N // prob_BI.shape[1], minlength=len(prob_BI))
    prob_BI[num_seen_B == prob_BI.shape[1]] = 0.0
    if bool(prob_BI.sum(1).isnan().any()):
        raise ValueError("the model's scores are not numbers; expected a model that has not diverged. Train it again")
    return prob_BI


def consensus_probs(model_BI: Tensor, alone_BI: Tensor, block: Block) -> Tensor:
    """p(b | h) proportional to sqrt(p_model(b | h) p_hybrid(b | h)): what both find likely. (B, I).

    ``alone_BI`` is written over.
    """
    found_BI = alone_BI.mul_(model_BI).sqrt_()
    total_B1 = found_BI.sum(1, keepdim=True)
    found_BI /= total_B1.clamp(min=np.finfo(np.float64).tiny)
    if not bool((total_B1 > 0.0).all()):
        found_BI = torch.where(total_B1 > 0.0, found_BI, block.own.each()[FLOOR])
    return found_BI


def _rank_candidates(mixture: Mixture, block: Block, model: ModelScores, k: int) -> Ranked:
    """The model's beams and the best items of the hybrid."""
    assert model.beams is not None
    prob_BI, histories = _own_total(mixture, block, 0), block.contexts.histories
    num_best = max(NUM_BEST, k)
    if not prob_BI.any():  # the model alone has weights: no item of the hybrid is better than another
        num_best = 0
    item_BM = _candidates(prob_BI, model.beams(histories, k), num_best)
    unseen = torch.ones_like(prob_BI, dtype=torch.bool)
    unseen.view(-1)[block.own.seen_N] = False
    unseen_BM = unseen.gather(1, item_BM.clamp(min=0)) & (item_BM >= 0)
    model_BM = _weighted(mixture, block, 0, MODEL, candidate_probs(model, histories, item_BM, unseen_BM))
    given_BM = (prob_BI.gather(1, item_BM.clamp(min=0)) + model_BM) * unseen_BM

    def parts(place_BN: Tensor) -> dict[str, Tensor]:
        item_BN = item_BM.gather(1, place_BN).clamp(min=0)
        own = {name: _weighted(mixture, block, 0, name, part_BN) for name, part_BN in block.own.at(item_BN).items()}
        return {**own, MODEL: model_BM.gather(1, place_BN)}

    return Ranked(item_BM, given_BM, parts)


def candidate_probs(model: ModelScores, histories: Histories, item_BM: Tensor, unseen_BM: Tensor) -> Tensor:
    """p(item | history, not seen before) under the model, (B, M) float64; 0 where not ``unseen_BM``."""
    seen_BS = _padded([sorted(set(items)) for items in histories])
    asked = model.log_probs(histories, torch.cat([item_BM, seen_BS], 1)).cpu().double().exp()
    prob_BM, seen_prob_BS = asked.split([item_BM.shape[1], seen_BS.shape[1]], 1)
    found_BM = prob_BM * unseen_BM / (1.0 - seen_prob_BS.sum(1, keepdim=True)).clamp(min=1e-12)
    if bool(found_BM.isnan().any()):
        raise ValueError("the model's scores are not numbers; expected a model that has not diverged. Train it again")
    return found_BM


def _consensus_of_targets(hybrid: Hybrid, block: Block, model: ModelScores) -> np.ndarray:
    """(B,) of the targets."""
    model_BI = catalogue_probs(model.log_probs(block.contexts.histories, None), block)
    block = block.to(model_BI)
    found_BI = consensus_probs(model_BI, _own_total(hybrid.alone, block, 0), block)
    return _of_targets(found_BI, block)


def _of_targets(prob_BI: Tensor, block: Block) -> np.ndarray:
    target_B1 = torch.tensor(block.contexts.targets, device=prob_BI.device)[:, None]
    return prob_BI.gather(1, target_B1)[:, 0].cpu().numpy()


def _batches(contexts: Contexts, num_items: int, own: bool) -> Iterator[Contexts]:
    """Nobody is left out of counts that nobody's ``own`` events are in."""
    size = max(1, MAX_NUMBERS // num_items)
    for start in range(0, len(contexts.targets), size):
        part = slice(start, start + size)
        yield Contexts(contexts.histories[part], contexts.targets[part], contexts.left_out[part] if own else [])


def _target_probs(block: Block, model: ModelScores | None) -> dict[str, np.ndarray]:
    """Expert -> probabilities of the targets, (B,)."""
    alone = {name: _of_targets(prob_BI, block) for name, prob_BI in block.own.each().items()}
    probs = {name: alone[name] for name in EXPERTS}
    if model is not None and model.beams is None:
        probs[MODEL] = _of_targets(catalogue_probs(model.log_probs(block.contexts.histories, None), block), block)
    elif model is not None:
        target_B1 = torch.tensor(block.contexts.targets)[:, None]
        one_B1 = torch.ones_like(target_B1, dtype=torch.bool)  # a target is never a seen item
        probs[MODEL] = candidate_probs(model, block.contexts.histories, target_B1, one_B1)[:, 0].numpy()
    return {**probs, FLOOR: alone[FLOOR]}


def _candidates(prob_BI: Tensor, beam_BK: Tensor, num_best: int) -> Tensor:
    """Beams and the best items of the hybrid, each once, (B, M); -1 as padding."""
    best_BN = prob_BI.topk(min(num_best, prob_BI.shape[1]), dim=1).indices
    joined = [sorted(set(row) - {-1}) for row in torch.cat([beam_BK.cpu(), best_BN], 1).tolist()]
    return _padded(joined)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)


def positions(hybrid: Hybrid, contexts: Contexts, model: ModelScores | None) -> Tensor:
    """0-based places of the targets of N contexts, float64 (N,): the mean place among equals, `NOT_RANKED` where a
    target is no candidate. Raises as `rank`."""
    parts, start = [torch.zeros(0, dtype=torch.float64)], 0
    for ranked in rank(hybrid, contexts, model):
        target_B1 = torch.tensor(contexts.targets[start : start + len(ranked.item_BM)])[:, None]
        own_B1 = torch.where(ranked.item_BM == target_B1, ranked.prob_BM, 0.0).amax(1, keepdim=True)
        above_B = (ranked.prob_BM > own_B1).sum(1).double()
        tied_B = (ranked.prob_BM == own_B1).sum(1).double() - 1.0
        parts.append(torch.where(own_B1[:, 0] > 0, above_B + tied_B / 2, float(NOT_RANKED)))
        start += len(target_B1)
    return torch.cat(parts)


def block_positions(
    hybrid: Hybrid, near: NearTexts, contexts: Contexts, mixtures: Sequence[Mixture], score_BI: Tensor | None
) -> list[Tensor]:
    """Of each mixture what `positions` gives, for contexts whose items the model has scored, (B, I).

    A mixture without the model does not read ``score_BI``. ``near`` is of all items.
    """
    found: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.float64)] for _ in mixtures]
    start = 0
    for block in blocks_of(hybrid, contexts, near):
        model_BI = None
        if score_BI is not None:
            model_BI = catalogue_probs(score_BI[start : start + len(block.known_B)], block)
            block = block.to(model_BI)
        start += len(block.known_B)
        for parts, mixture in zip(found, mixtures, strict=True):
            prob_BI, _ = mixed(hybrid, mixture, block, model_BI if MODEL in mixture.experts else None)
            parts.append(_places(prob_BI, block))
    return [torch.cat(parts) for parts in found]


def _places(prob_BI: Tensor, block: Block) -> Tensor:
    """`positions` of all items."""
    own_B1 = prob_BI.gather(1, torch.tensor(block.contexts.targets, device=prob_BI.device)[:, None])
    above_B = torch.count_nonzero(prob_BI > own_B1, 1).double()
    tied_B = torch.count_nonzero(prob_BI == own_B1, 1).double() - 1.0
    return torch.where(own_B1[:, 0] > 0, above_B + tied_B / 2, float(NOT_RANKED)).cpu()


# Which weights a client takes: those of the mixture, unless one side of it ranks its validation items better.

Weights = Literal["mixture", "model", "counts and texts"]
METRIC = "ndcg@10"


class Choice(NamedTuple):
    """What was taken, and what decided it."""

    weights: Weights
    valid: dict[Weights, float]
    """Mean ndcg@10 of validation items."""


def beside_model_of(hybrid: Hybrid) -> Mixture:
    """The mixture of a hybrid that was fitted beside a model."""
    assert hybrid.beside_model is not None
    return hybrid.beside_model


def sides_of(hybrid: Hybrid) -> dict[Weights, Mixture]:
    """What `choose_weights` chooses from: the mixture beside the model, and those of one side alone."""
    mixture = beside_model_of(hybrid)
    return {
        "mixture": mixture,
        "model": _model_alone(hybrid, mixture),
        "counts and texts": _hybrid_alone(hybrid, mixture),
    }


def choose_weights(hybrid: Hybrid, positions: Mapping[Weights, Tensor]) -> tuple[Hybrid, Choice]:
    """The hybrid with the weights that ranked best, and why.

    ``positions``: places of its client's validation items (U,) with each of `sides_of`. A side is taken in place of the
    mixture where its mean ndcg@10 is clearly above that of the mixture, which is what is expected to be best
    (`fedecider.evaluation.statistics`); of two such sides, the better one.
    """
    sides = sides_of(hybrid)
    gain_U = {name: user_metrics(positions[name])[METRIC].double().numpy() for name in sides}
    valid = {name: float(values.mean()) for name, values in gain_U.items()}
    best = list(sides)[clearly_best([[gain_U[name]] for name in sides])]
    return hybrid._replace(beside_model=sides[best]), Choice(best, valid)


def _model_alone(hybrid: Hybrid, mixture: Mixture) -> Mixture:
    only_E = np.array([float(name == MODEL) for name in mixture.experts])
    return mixture._replace(weight_QE=np.tile(only_E, (len(mixture.weight_QE), 1)), mean_E=only_E)


def _hybrid_alone(hybrid: Hybrid, mixture: Mixture) -> Mixture:
    places = [mixture.experts.index(name) for name in hybrid.alone.experts]
    weight_QE, mean_E = np.zeros_like(mixture.weight_QE), np.zeros_like(mixture.mean_E)
    weight_QE[:, places], mean_E[places] = hybrid.alone.weight_QE, hybrid.alone.mean_E
    return mixture._replace(cut_Q=hybrid.alone.cut_Q, weight_QE=weight_QE, mean_E=mean_E)


# A hybrid on disk: ``hybrid.safetensors`` and ``hybrid.json`` in one folder of its own, marked private.

TENSOR_FILE, SETTINGS_FILE = "hybrid.safetensors", "hybrid.json"
PRIVATE = "counts of real users: for this client alone. Do not push, publish or share this folder"
FIELDS = {"private": str, "catalogue": str, "sha256": str, "config": dict, "mixtures": dict}
TENSORS = {
    "pair_start": np.int64,
    "pair_item": np.int64,
    "pair_count": np.int64,
    "event_count": np.int64,
    "item_vectors": np.float32,
}


def save_hybrid(hybrid: Hybrid, item_keys: Sequence[str], folder: Path) -> Path:
    """Write both files into ``folder``, the settings last; returns it. The same hybrid gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    pair_II = hybrid.counts.pair_II.copy()
    pair_II.sum_duplicates()
    pair_II.eliminate_zeros()
    values = (pair_II.indptr, pair_II.indices, pair_II.data, hybrid.counts.event_I, hybrid.unit_ID)
    tensors = {name: np.ascontiguousarray(v, TENSORS[name]) for name, v in zip(TENSORS, values, strict=True)}
    scratch = folder / f".{TENSOR_FILE}.tmp"
    save_file(tensors, scratch)
    os.replace(scratch, folder / TENSOR_FILE)  # never into the old file, whose bytes versions of a run may share
    mixtures = {"alone": hybrid.alone, "beside_model": hybrid.beside_model}
    content = {
        "private": PRIVATE,
        "catalogue": catalogue_hash(item_keys),
        "sha256": hashlib.sha256((folder / TENSOR_FILE).read_bytes()).hexdigest(),
        "config": asdict(hybrid.config),
        "mixtures": {name: None if one is None else mixture_data(one) for name, one in mixtures.items()},
    }
    write_json(folder / SETTINGS_FILE, {**content, "checksum": _checksum(content)})
    return folder


def load_hybrid(folder: Path, item_keys: Sequence[str]) -> Hybrid:
    """The hybrid in ``folder``.

    Raises:
        ValueError: a file is missing or damaged, was changed, or is of another catalogue; the message names it.
    """
    path, tensor_path = folder / SETTINGS_FILE, folder / TENSOR_FILE
    content = read_object(path, FIELDS)
    told = content.pop("checksum", "")
    if content["catalogue"] != catalogue_hash(item_keys):
        raise ValueError(
            f"got a hybrid of another catalogue in {folder}, expected that of these {len(item_keys)} items. Give the "
            "hybrid that was written with this run"
        )
    check_tensors(tensor_path)
    if hashlib.sha256(tensor_path.read_bytes()).hexdigest() != content["sha256"]:
        raise ValueError(
            f"{tensor_path} was changed since it was written, expected it unchanged. Copy both files again"
        )
    with damage_names(tensor_path):
        counts, unit_ID = _checked(load_file(tensor_path), len(item_keys))
    with damage_names(path):
        config = HybridConfig(**content["config"])
        alone, beside = (content["mixtures"][name] for name in ("alone", "beside_model"))
        mixture = None if beside is None else _mixture(beside, BESIDE_MODEL)
        found = Hybrid(counts, unit_ID, _mixture(alone, (ALONE,)), mixture, config)
    if told and told != _checksum(content):
        raise ValueError(f"{path} was changed since it was written, expected it unchanged. Copy both files again")
    return found


def _checksum(content: Mapping[str, Any]) -> str:
    """Over all that ``hybrid.json`` says, the checksum of the counts included."""
    return hashlib.sha256(json.dumps(plain(content), sort_keys=True).encode()).hexdigest()


def catalogue_hash(item_keys: Sequence[str]) -> str:
    """SHA-256 of the item keys in their order: what item numbers mean."""
    return hashlib.sha256(json.dumps(list(item_keys)).encode()).hexdigest()


def mixture_data(mixture: Mixture) -> dict[str, Any]:
    """A mixture as plain values."""
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in mixture._asdict().items()}


def _checked(tensors: dict[str, np.ndarray], num_items: int) -> tuple[Counts, np.ndarray]:
    start, item, count, event_I, unit_ID = (tensors[name] for name in TENSORS)
    wrong = [name for name, kind in TENSORS.items() if tensors[name].dtype != kind]
    shapes = (start.shape, event_I.shape, item.shape, unit_ID.shape[:1])
    if wrong or shapes != ((num_items + 1,), (num_items,), count.shape, (num_items,)) or unit_ID.ndim != 2:
        raise ValueError(f"tensors of other shapes or types than those of {num_items} items")
    if start[0] != 0 or start[-1] != len(item) or (np.diff(start) < 0).any():
        raise ValueError("rows that do not follow each other")
    inside = len(item) == 0 or (item.min() >= 0 and item.max() < num_items)
    if not inside or (count < 0).any() or (event_I < 0).any():
        raise ValueError("counts below 0, or of items outside the catalogue")
    if not np.isfinite(unit_ID).all():
        raise ValueError("item vectors that are no finite numbers")
    return Counts(scipy.sparse.csr_array((count, item, start), shape=(num_items, num_items)), event_I), unit_ID


def _mixture(data: dict[str, Any], known: Sequence[tuple[str, ...]]) -> Mixture:
    """``known``: the experts that it may have."""
    experts = tuple(str(name) for name in data["experts"])
    if experts not in known:
        raise ValueError(f"weights of the experts {', '.join(experts)}, not of {' or '.join(map(', '.join, known))}")
    cut_Q, weight_QE, mean_E = (np.array(data[name], np.float64) for name in ("cut_Q", "weight_QE", "mean_E"))
    shapes = ((NUM_BUCKETS - 1,), (NUM_BUCKETS, len(experts)), (len(experts),))
    if (cut_Q.shape, weight_QE.shape, mean_E.shape) != shapes:
        raise ValueError(f"weights that do not fit {len(experts)} experts and {NUM_BUCKETS} buckets")
    whole = np.abs(np.vstack([weight_QE, mean_E]).sum(1) - 1.0).max() < 1e-6 and weight_QE.min() >= 0
    if not whole or not np.isfinite(cut_Q).all():
        raise ValueError("weights that are no shares of 1")
    if (np.diff(cut_Q) < 0).any():
        raise ValueError("cuts that do not rise")
    likelihood, number = float(data["log_likelihood"]), int(data["num_contexts"])
    return Mixture(experts, cut_Q, weight_QE, mean_E, likelihood, number)
