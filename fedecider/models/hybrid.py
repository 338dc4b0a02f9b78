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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from fedecider.evaluation.metrics import NOT_RANKED, user_metrics
from fedecider.evaluation.statistics import clearly_best
from fedecider.federation.record import write_json
from fedecider.models import counts as experts
from fedecider.models.config import HybridConfig
from fedecider.models.counts import Contexts, Counts
from fedecider.running.run_folder import check_tensors, damage_names, read_object

# Settings of the private part of the hybrid.


# The weights of a mixture of experts: the most likely ones by expectation maximisation.

NUM_STEPS = 300
SMALLEST = 1e-300
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

EXPERTS = ("counts", "text", "agreement")
MODEL, CONSENSUS = "model", "consensus"
"""Consensus is proportional to the root of the model times the mixture without it. It sums over the whole catalogue, so
there is none where IDs have several tokens."""
COUNTING = ("counts", "agreement")
"""Experts that have nothing to say of an item that came after the counts."""
FLOOR = "uniform"
ALONE = (*EXPERTS, FLOOR)
"""Experts of a mixture without a model, in their order."""
BESIDE_MODEL = ((*EXPERTS, MODEL, FLOOR), (*EXPERTS, MODEL, CONSENSUS, FLOOR))
"""Those of one beside a model, where IDs have several tokens and where they have one."""
COUNT_EXPONENT, TEXT_POWER = 1.5, 6.0
"""Of counts before they become probabilities, and of the cosine of two texts: chosen on validation items of two Amazon
pools and of the sample."""
NUM_BEST = 50
"""Best items of the hybrid that join the model's beams as candidates: enough for every metric's list."""
MAX_NUMBERS = 2**21
"""Entries of a (B, I) matrix: bounds memory, changes no result."""

Histories = Sequence[Sequence[int]]


class ModelScores(NamedTuple):
    """What the hybrid asks of the model that it stands beside."""

    log_probs: Callable[[Histories, Tensor], Tensor]
    """histories, items (B, M) with -1 as padding -> log-probabilities (B, M) over the catalogue."""
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
    counts: Counts, unit_ID: np.ndarray, contexts: Contexts, model: ModelScores | None, config: HybridConfig
) -> Hybrid:
    """The hybrid of a client whose ``counts`` hold its train events, fitted on those of ``contexts``.

    ``model`` must not have been trained on these events, or it would be overrated: fitted with adapters that know
    them, all weight goes to the model.
    """
    known_parts: list[np.ndarray] = []
    parts: list[dict[str, np.ndarray]] = []
    for batch in _batches(contexts, counts.num_items, config):
        found = experts.evidence(counts, batch)
        known_parts.append(experts.known(found))
        parts.append(_target_probs(found, unit_ID, batch, model))
    if not parts:
        raise ValueError(
            "got no train event with one before it, expected some to fit the weights of the hybrid: prepare the data "
            "with a larger min_length, or set hybrid.kind to none"
        )
    probs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    known_N = np.concatenate(known_parts)

    def fitted(names: Sequence[str]) -> Mixture:
        prob_NE = np.stack([probs[name] for name in names], 1)
        return fit_mixture(prob_NE, known_N, tuple(names))

    hybrid = Hybrid(counts, unit_ID, fitted([name for name in probs if name != MODEL]), None, config)
    if model is None:
        return hybrid
    if model.beams is None:
        floor_N = probs.pop(FLOOR)
        probs |= {CONSENSUS: _consensus_of_targets(hybrid, contexts, model), FLOOR: floor_N}
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


def rank(hybrid: Hybrid, contexts: Contexts, model: ModelScores | None, k: int = 0) -> Iterator[Ranked]:
    """The mixture for the history of each context, batch after batch; with ``model`` None that of the hybrid without a
    model.

    Exact on the candidates, which are the whole catalogue, or the model's beams and the `NUM_BEST` best items of the
    hybrid, and enough of both for a list of ``k``.
    """
    mixture = hybrid.alone if model is None else hybrid.beside_model
    if mixture is None:
        raise ValueError("got a hybrid that was fitted without a model, expected one fitted beside it: fit it again")
    num_items = hybrid.counts.num_items
    for batch in _batches(contexts, num_items, hybrid.config):
        found = experts.evidence(hybrid.counts, batch)
        own = alone_probs(found, hybrid.unit_ID)
        own_parts = _parts(mixture, found, own, hybrid.num_new)
        prob_BI = _total(own_parts)
        item_BM = torch.arange(num_items).expand(len(batch.targets), -1)
        if model is None:
            own_parts = _to_one(own_parts) if hybrid.num_new else own_parts
            yield Ranked(item_BM, torch.from_numpy(_total(own_parts)), _at_places(item_BM, own_parts, {}))
            continue
        if model.beams is not None:
            num_best = max(NUM_BEST, k)
            if not prob_BI.any():  # the model alone has weights: no item of the hybrid is better than another
                num_best = 0
            item_BM = _candidates(torch.from_numpy(prob_BI), model.beams(batch.histories, k), num_best)
        model_BM = model_probs(model, found.newest.unseen_BI, batch.histories, item_BM)
        asking = {MODEL: model_BM.numpy()}
        if CONSENSUS in mixture.experts:  # then the candidates are the catalogue
            alone_BI = _total(_parts(hybrid.alone, found, own, hybrid.num_new))
            asking[CONSENSUS] = consensus_probs(model_BM.numpy(), alone_BI, found.newest)
        model_parts = _parts(mixture, found, asking, hybrid.num_new)
        if hybrid.num_new:  # then IDs have one token, and the candidates are the catalogue
            both = _to_one({**own_parts, **model_parts})
            own_parts, model_parts = ({name: both[name] for name in parts} for parts in (own_parts, model_parts))
            prob_BI = _total(own_parts)
        given_BM = torch.from_numpy(prob_BI).gather(1, item_BM.clamp(min=0)) + torch.from_numpy(_total(model_parts))
        unseen_BM = torch.from_numpy(found.newest.unseen_BI).gather(1, item_BM.clamp(min=0)) & (item_BM >= 0)
        yield Ranked(item_BM, given_BM * unseen_BM, _at_places(item_BM, own_parts, model_parts))


def alone_probs(found: experts.Evidence, unit_ID: np.ndarray) -> dict[str, np.ndarray]:
    """Expert that needs no model -> (B, I), in the order of ``ALONE``."""
    near = experts.near_texts(unit_ID, found.newest)
    return {
        "counts": experts.count_probs(found, COUNT_EXPONENT),
        "text": experts.text_probs(near, found.newest, TEXT_POWER),
        "agreement": experts.agreement_probs(found, near),
        FLOOR: experts.uniform_probs(found.newest),
    }


def model_probs(model: ModelScores, unseen_BI: np.ndarray, histories: Histories, item_BM: Tensor) -> Tensor:
    """p(item | history, not seen before) under the model, (B, M) float64; 0 for seen items and padding."""
    unseen = torch.from_numpy(unseen_BI)
    keep_BM = unseen.gather(1, item_BM.clamp(min=0)) & (item_BM >= 0)
    if model.beams is None:
        every_BI = torch.arange(unseen.shape[1]).expand(len(unseen), -1)
        prob_BI = model.log_probs(histories, every_BI).cpu().double().exp() * unseen
        rest_B1 = prob_BI.sum(1, keepdim=True)
        prob_BM = prob_BI.gather(1, item_BM.clamp(min=0))
    else:
        seen_BS = _padded([sorted(set(items)) for items in histories])
        asked = model.log_probs(histories, torch.cat([item_BM, seen_BS], 1)).cpu().double().exp()
        prob_BM, seen_prob_BS = asked.split([item_BM.shape[1], seen_BS.shape[1]], 1)
        rest_B1 = 1.0 - seen_prob_BS.sum(1, keepdim=True)
    found_BM = prob_BM * keep_BM / rest_B1.clamp(min=1e-12)
    if bool(found_BM.isnan().any()):
        raise ValueError("the model's scores are not numbers; expected a model that has not diverged. Train it again")
    return found_BM


def consensus_probs(model_BI: np.ndarray, alone_BI: np.ndarray, newest: experts.Newest) -> np.ndarray:
    """p(b | h) proportional to sqrt(p_model(b | h) p_hybrid(b | h)): what both find likely. (B, I)."""
    return experts.normalised(np.sqrt(model_BI * alone_BI), newest)


def _parts(
    mixture: Mixture, found: experts.Evidence, probs: dict[str, np.ndarray], num_new: int = 0
) -> dict[str, np.ndarray]:
    """What each expert of ``probs``, expert -> (B, M), gives to the mixture. (B, M) each.

    For the last ``num_new`` items those that count give nothing, and the others what makes up for it.
    """
    weight_BE = mixture.weights(experts.known(found))
    parts = {name: weight_BE[:, mixture.experts.index(name), None] * prob_BM for name, prob_BM in probs.items()}
    if num_new:
        others_B1 = weight_BE[:, [name not in COUNTING for name in mixture.experts]].sum(1, keepdims=True)
        for name, part_BM in parts.items():
            share_B1 = 0.0 if name in COUNTING else 1.0 / np.maximum(others_B1, np.finfo(np.float64).tiny)
            part_BM[:, -num_new:] *= share_B1
    return parts


def _to_one(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parts over the whole catalogue, divided by their sum over all experts and items."""
    total_B1 = _total(parts).sum(1, keepdims=True)
    return {name: part_BI / np.maximum(total_B1, np.finfo(np.float64).tiny) for name, part_BI in parts.items()}


def _total(parts: dict[str, np.ndarray]) -> np.ndarray:
    return np.sum(list(parts.values()), axis=0)


def _at_places(
    item_BM: Tensor, own_parts: dict[str, np.ndarray], model_parts: dict[str, np.ndarray]
) -> Callable[[Tensor], dict[str, Tensor]]:
    """`Ranked.parts` of experts over all items and of those over the candidates."""

    def parts(place_BN: Tensor) -> dict[str, Tensor]:
        item_BN = item_BM.gather(1, place_BN).clamp(min=0)
        of_items = {name: torch.from_numpy(part_BI).gather(1, item_BN) for name, part_BI in own_parts.items()}
        of_places = {name: torch.from_numpy(part_BM).gather(1, place_BN) for name, part_BM in model_parts.items()}
        return {**of_items, **of_places}

    return parts


def _consensus_of_targets(hybrid: Hybrid, contexts: Contexts, model: ModelScores) -> np.ndarray:
    """(N,) of the targets."""
    found_N = []
    for batch in _batches(contexts, hybrid.counts.num_items, hybrid.config):
        found = experts.evidence(hybrid.counts, batch)
        own = alone_probs(found, hybrid.unit_ID)
        alone_BI, every_BI = _total(_parts(hybrid.alone, found, own)), torch.arange(hybrid.counts.num_items)
        asked = (found.newest.unseen_BI, batch.histories, every_BI.expand(len(alone_BI), -1))
        model_BI = model_probs(model, *asked).numpy()
        found_N.append(consensus_probs(model_BI, alone_BI, found.newest)[np.arange(len(alone_BI)), batch.targets])
    return np.concatenate(found_N)


def _batches(contexts: Contexts, num_items: int, config: HybridConfig) -> Iterator[Contexts]:
    """Nobody is left out of counts that nobody's own events are in."""
    own = "own" in config.source_names
    size = max(1, MAX_NUMBERS // num_items)
    for start in range(0, len(contexts.targets), size):
        part = slice(start, start + size)
        yield Contexts(contexts.histories[part], contexts.targets[part], contexts.left_out[part] if own else [])


def _target_probs(
    found: experts.Evidence, unit_ID: np.ndarray, batch: Contexts, model: ModelScores | None
) -> dict[str, np.ndarray]:
    """Expert -> probabilities of the targets, (B,)."""
    row_B, target_B = np.arange(len(batch.targets)), np.array(batch.targets)
    alone = {name: prob_BI[row_B, target_B] for name, prob_BI in alone_probs(found, unit_ID).items()}
    probs = {name: alone[name] for name in EXPERTS}
    if model is not None:
        asked = (found.newest.unseen_BI, batch.histories, torch.from_numpy(target_B)[:, None])
        probs[MODEL] = model_probs(model, *asked)[:, 0].numpy()
    return {**probs, FLOOR: alone[FLOOR]}


def _candidates(prob_BI: Tensor, beam_BK: Tensor, num_best: int) -> Tensor:
    """Beams and the best items of the hybrid, each once, (B, M); -1 as padding."""
    best_BN = prob_BI.topk(min(num_best, prob_BI.shape[1]), dim=1).indices
    joined = [sorted(set(row) - {-1}) for row in torch.cat([beam_BK.cpu(), best_BN], 1).tolist()]
    return _padded(joined)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)


def positions(hybrid: Hybrid, contexts: Contexts, model: ModelScores | None) -> Tensor:
    """0-based places of the targets, float64; the mean place among equals; `NOT_RANKED` where it is no candidate."""
    parts, start = [torch.zeros(0, dtype=torch.float64)], 0
    for ranked in rank(hybrid, contexts, model):
        target_B1 = torch.tensor(contexts.targets[start : start + len(ranked.item_BM)])[:, None]
        own_B1 = torch.where(ranked.item_BM == target_B1, ranked.prob_BM, 0.0).amax(1, keepdim=True)
        above_B = (ranked.prob_BM > own_B1).sum(1).double()
        tied_B = (ranked.prob_BM == own_B1).sum(1).double() - 1.0
        parts.append(torch.where(own_B1[:, 0] > 0, above_B + tied_B / 2, float(NOT_RANKED)))
        start += len(target_B1)
    return torch.cat(parts)


# Which weights a client takes: those of the mixture, unless one side of it ranks its validation items better.

Weights = Literal["mixture", "model", "counts and texts"]
METRIC = "ndcg@10"


class Choice(NamedTuple):
    """What was taken, and what decided it."""

    weights: Weights
    valid: dict[Weights, float]
    """Mean ndcg@10 of validation items."""


def one_sided(hybrid: Hybrid, weights: Weights) -> Hybrid:
    """``hybrid`` whose weights beside the model are those of one side alone, or as they are."""
    mixture = hybrid.beside_model
    assert mixture is not None
    if weights == "mixture":
        return hybrid
    only = {"model": _model_alone, "counts and texts": _hybrid_alone}[weights](hybrid, mixture)
    return hybrid._replace(beside_model=only)


def choose_weights(hybrid: Hybrid, positions_of: Callable[[Hybrid], Tensor]) -> tuple[Hybrid, Choice]:
    """The hybrid with the weights that ranked best, and why.

    ``positions_of``: a hybrid -> places of its client's validation items (U,). A side is taken in place of the mixture
    where its mean ndcg@10 is clearly above that of the mixture, which is what is expected to be best
    (`fedecider.evaluation.statistics`); of two such sides, the better one.
    """
    sides: dict[Weights, Hybrid] = {name: one_sided(hybrid, name) for name in ("mixture", "model", "counts and texts")}
    gain_U = {name: user_metrics(positions_of(one))[METRIC].double().numpy() for name, one in sides.items()}
    valid = {name: float(values.mean()) for name, values in gain_U.items()}
    best = list(sides)[clearly_best([[gain_U[name]] for name in sides])]
    return sides[best], Choice(best, valid)


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
    pair_II = hybrid.counts.pair_II.copy()
    pair_II.sum_duplicates()
    pair_II.eliminate_zeros()
    values = (pair_II.indptr, pair_II.indices, pair_II.data, hybrid.counts.event_I, hybrid.unit_ID)
    tensors = {name: np.ascontiguousarray(v, TENSORS[name]) for name, v in zip(TENSORS, values, strict=True)}
    save_file(tensors, folder / TENSOR_FILE)
    mixtures = {"alone": hybrid.alone, "beside_model": hybrid.beside_model}
    content = {
        "private": PRIVATE,
        "catalogue": catalogue_hash(item_keys),
        "sha256": hashlib.sha256((folder / TENSOR_FILE).read_bytes()).hexdigest(),
        "config": asdict(hybrid.config),
        "mixtures": {name: None if one is None else mixture_data(one) for name, one in mixtures.items()},
    }
    write_json(folder / SETTINGS_FILE, content)
    return folder


def load_hybrid(folder: Path, item_keys: Sequence[str]) -> Hybrid:
    """The hybrid in ``folder``.

    Raises:
        ValueError: a file is missing or damaged, was changed, or is of another catalogue; the message names it.
    """
    path, tensor_path = folder / SETTINGS_FILE, folder / TENSOR_FILE
    content = read_object(path, FIELDS)
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
        return Hybrid(counts, unit_ID, _mixture(alone, (ALONE,)), mixture, config)


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
