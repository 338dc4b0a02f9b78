"""A client's memory: fitted once on its train events, then asked for the items that a history leads to.

p(item | history) = sum_e lambda_e p_e(item | history); e: counts, text neighbours, the agreement of both, the model,
its consensus with the others, a uniform floor. The idea of a memory beside a language model, mixed with a weight, is
that of kNN-LM (Khandelwal et al., ICLR 2020). Differs from it: the experts are counts and texts in place of hidden
states, weights are fitted by EM with every user left out, and they depend on how much is known of the newest item.

Shape legend: B histories, M candidates of one, S seen items, I items, D dimensions, N contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.memory import experts
from fedecider.memory.config import MemoryConfig
from fedecider.memory.contexts import Contexts
from fedecider.memory.counts import Counts
from fedecider.memory.mixture import Mixture, fit_mixture

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
MAX_NUMBERS = 2**21
"""Entries of a (B, I) matrix: bounds memory, changes no result."""

Histories = Sequence[Sequence[int]]


class ModelScores(NamedTuple):
    """What the memory asks of the model that it stands beside."""

    log_probs: Callable[[Histories, Tensor, float], Tensor]
    """histories, items (B, M) with -1 as padding, temperature -> log-probabilities (B, M) over the catalogue."""
    beams: Callable[[Histories, int], Tensor] | None
    """histories, k -> items (B, K), -1 as padding, with room for k beside those of the history; k 0: as many as the
    evaluation has. None where asking for every item is cheap."""


class Memory(NamedTuple):
    """What a client keeps to itself. It holds counts of real users."""

    counts: Counts
    """Of all sources together."""
    unit_ID: np.ndarray
    """Vectors of the published item texts (`experts.unit_vectors`)."""
    alone: Mixture
    beside_model: Mixture | None
    """None where there was no model."""
    config: MemoryConfig
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


def fit_memory(
    counts: Counts, unit_ID: np.ndarray, contexts: Contexts, model: ModelScores | None, config: MemoryConfig
) -> Memory:
    """The memory of a client whose ``counts`` hold its train events, fitted on those of ``contexts``.

    ``model`` must not have been trained on these events, or it would be overrated: fitted with adapters that know
    them, all weight goes to the model.
    """
    known_parts: list[np.ndarray] = []
    parts: list[dict[str, np.ndarray]] = []
    for batch in _batches(contexts, counts.num_items, config):
        found = experts.evidence(counts, batch, config.num_context)
        known_parts.append(experts.known(found))
        parts.append(_target_probs(found, unit_ID, batch, model, config))
    if not parts:
        raise ValueError(
            "got no train event with one before it, expected some to fit the weights of the memory: prepare the data "
            "with a larger min_length, or set memory.kind to none"
        )
    probs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    known_N = np.concatenate(known_parts)

    def fitted(names: Sequence[str]) -> Mixture:
        prob_NE = np.stack([probs[name] for name in names], 1)
        return fit_mixture(prob_NE, known_N, tuple(names), config.num_buckets, config.bucket_prior)

    memory = Memory(counts, unit_ID, fitted([name for name in probs if name != MODEL]), None, config)
    if model is None:
        return memory
    if model.beams is None:
        floor_N = probs.pop(FLOOR)
        probs |= {CONSENSUS: _consensus_of_targets(memory, contexts, model), FLOOR: floor_N}
    return memory._replace(beside_model=fitted(list(probs)))


def with_items(memory: Memory, unit_ND: np.ndarray) -> Memory:
    """The memory over a catalogue with N more items, behind the others, whose texts have the vectors ``unit_ND``.

    That nobody has one of them says nothing, since nobody could: experts that count abstain, and the others share their
    weights, p(b | h) proportional to sum_e lambda_e p_e(b | h) / sum_e lambda_e over the experts e that do not count.
    Weights stay as they were fitted.

    Raises:
        ValueError: vectors of another width.
    """
    if unit_ND.shape[1:] != memory.unit_ID.shape[1:]:
        raise ValueError(
            f"got new items with text vectors of shape {unit_ND.shape}, expected width {memory.unit_ID.shape[1]}: use "
            "the encoder with which the memory was made"
        )
    counts = memory.counts.with_items(len(unit_ND))
    unit_ID, num_new = np.concatenate([memory.unit_ID, unit_ND]), memory.num_new + len(unit_ND)
    return memory._replace(counts=counts, unit_ID=unit_ID, num_new=num_new)


def rank(memory: Memory, contexts: Contexts, model: ModelScores | None, k: int = 0) -> Iterator[Ranked]:
    """The mixture for the history of each context, batch after batch; with ``model`` None that of the memory alone.

    Exact on the candidates, which are the whole catalogue, or the model's beams and the ``num_best`` best items of the
    memory, and enough of both for a list of ``k``.
    """
    mixture = memory.alone if model is None else memory.beside_model
    if mixture is None:
        raise ValueError("got a memory that was fitted without a model, expected one fitted beside it: fit it again")
    num_items = memory.counts.num_items
    for batch in _batches(contexts, num_items, memory.config):
        found = experts.evidence(memory.counts, batch, memory.config.num_context)
        own = alone_probs(found, memory.unit_ID, memory.config)
        own_parts = _parts(mixture, found, own, memory.num_new)
        prob_BI = _total(own_parts)
        item_BM = torch.arange(num_items).expand(len(batch.targets), -1)
        if model is None:
            own_parts = _to_one(own_parts) if memory.num_new else own_parts
            yield Ranked(item_BM, torch.from_numpy(_total(own_parts)), _at_places(item_BM, own_parts, {}))
            continue
        if model.beams is not None:
            num_best = max(memory.config.num_best, k)
            if not prob_BI.any():  # the model alone has weights: no item of the memory is better than another
                num_best = 0
            item_BM = _candidates(torch.from_numpy(prob_BI), model.beams(batch.histories, k), num_best)
        asked = (found.newest.unseen_BI, batch.histories, item_BM, memory.config.temperature)
        model_BM = model_probs(model, *asked)
        asking = {MODEL: model_BM.numpy()}
        if CONSENSUS in mixture.experts:  # then the candidates are the catalogue
            alone_BI = _total(_parts(memory.alone, found, own, memory.num_new))
            asking[CONSENSUS] = consensus_probs(model_BM.numpy(), alone_BI, found.newest)
        model_parts = _parts(mixture, found, asking, memory.num_new)
        if memory.num_new:  # then IDs have one token, and the candidates are the catalogue
            both = _to_one({**own_parts, **model_parts})
            own_parts, model_parts = ({name: both[name] for name in parts} for parts in (own_parts, model_parts))
            prob_BI = _total(own_parts)
        given_BM = torch.from_numpy(prob_BI).gather(1, item_BM.clamp(min=0)) + torch.from_numpy(_total(model_parts))
        unseen_BM = torch.from_numpy(found.newest.unseen_BI).gather(1, item_BM.clamp(min=0)) & (item_BM >= 0)
        yield Ranked(item_BM, given_BM * unseen_BM, _at_places(item_BM, own_parts, model_parts))


def alone_probs(found: experts.Evidence, unit_ID: np.ndarray, config: MemoryConfig) -> dict[str, np.ndarray]:
    """Expert that needs no model -> (B, I), in the order of ``ALONE``."""
    near = experts.near_texts(unit_ID, found.newest)
    return {
        "counts": experts.count_probs(found, config.count_exponent),
        "text": experts.text_probs(near, found.newest, config.text_power),
        "agreement": experts.agreement_probs(found, near),
        FLOOR: experts.uniform_probs(found.newest),
    }


def model_probs(
    model: ModelScores, unseen_BI: np.ndarray, histories: Histories, item_BM: Tensor, temperature: float
) -> Tensor:
    """p(item | history, not seen before) under the model, (B, M) float64; 0 for seen items and padding."""
    unseen = torch.from_numpy(unseen_BI)
    keep_BM = unseen.gather(1, item_BM.clamp(min=0)) & (item_BM >= 0)
    if model.beams is None:
        every_BI = torch.arange(unseen.shape[1]).expand(len(unseen), -1)
        prob_BI = model.log_probs(histories, every_BI, temperature).cpu().double().exp() * unseen
        rest_B1 = prob_BI.sum(1, keepdim=True)
        prob_BM = prob_BI.gather(1, item_BM.clamp(min=0))
    else:
        seen_BS = _padded([sorted(set(items)) for items in histories])
        asked = model.log_probs(histories, torch.cat([item_BM, seen_BS], 1), temperature).cpu().double().exp()
        prob_BM, seen_prob_BS = asked.split([item_BM.shape[1], seen_BS.shape[1]], 1)
        rest_B1 = 1.0 - seen_prob_BS.sum(1, keepdim=True)
    found_BM = prob_BM * keep_BM / rest_B1.clamp(min=1e-12)
    if bool(found_BM.isnan().any()):
        raise ValueError("the model's scores are not numbers; expected a model that has not diverged. Train it again")
    return found_BM


def consensus_probs(model_BI: np.ndarray, alone_BI: np.ndarray, newest: experts.Newest) -> np.ndarray:
    """p(b | h) proportional to sqrt(p_model(b | h) p_memory(b | h)): what both find likely. (B, I)."""
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


def _consensus_of_targets(memory: Memory, contexts: Contexts, model: ModelScores) -> np.ndarray:
    """(N,) of the targets."""
    found_N = []
    for batch in _batches(contexts, memory.counts.num_items, memory.config):
        found = experts.evidence(memory.counts, batch, memory.config.num_context)
        own = alone_probs(found, memory.unit_ID, memory.config)
        alone_BI, every_BI = _total(_parts(memory.alone, found, own)), torch.arange(memory.counts.num_items)
        asked = (found.newest.unseen_BI, batch.histories, every_BI.expand(len(alone_BI), -1))
        model_BI = model_probs(model, *asked, memory.config.temperature).numpy()
        found_N.append(consensus_probs(model_BI, alone_BI, found.newest)[np.arange(len(alone_BI)), batch.targets])
    return np.concatenate(found_N)


def _batches(contexts: Contexts, num_items: int, config: MemoryConfig) -> Iterator[Contexts]:
    """Nobody is left out of counts that nobody's own events are in."""
    own = "own" in config.source_names
    size = max(1, MAX_NUMBERS // num_items)
    for start in range(0, len(contexts.targets), size):
        part = slice(start, start + size)
        yield Contexts(contexts.histories[part], contexts.targets[part], contexts.left_out[part] if own else [])


def _target_probs(
    found: experts.Evidence, unit_ID: np.ndarray, batch: Contexts, model: ModelScores | None, config: MemoryConfig
) -> dict[str, np.ndarray]:
    """Expert -> probabilities of the targets, (B,)."""
    row_B, target_B = np.arange(len(batch.targets)), np.array(batch.targets)
    alone = {name: prob_BI[row_B, target_B] for name, prob_BI in alone_probs(found, unit_ID, config).items()}
    probs = {name: alone[name] for name in EXPERTS}
    if model is not None:
        asked = (found.newest.unseen_BI, batch.histories, torch.from_numpy(target_B)[:, None], config.temperature)
        probs[MODEL] = model_probs(model, *asked)[:, 0].numpy()
    return {**probs, FLOOR: alone[FLOOR]}


def _candidates(prob_BI: Tensor, beam_BK: Tensor, num_best: int) -> Tensor:
    """Beams and the best items of the memory, each once, (B, M); -1 as padding."""
    best_BN = prob_BI.topk(min(num_best, prob_BI.shape[1]), dim=1).indices
    joined = [sorted(set(row) - {-1}) for row in torch.cat([beam_BK.cpu(), best_BN], 1).tolist()]
    return _padded(joined)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)


def positions(memory: Memory, contexts: Contexts, model: ModelScores | None) -> Tensor:
    """0-based places of the targets, float64; the mean place among equals; `NOT_RANKED` where it is no candidate."""
    parts, start = [torch.zeros(0, dtype=torch.float64)], 0
    for ranked in rank(memory, contexts, model):
        target_B1 = torch.tensor(contexts.targets[start : start + len(ranked.item_BM)])[:, None]
        own_B1 = torch.where(ranked.item_BM == target_B1, ranked.prob_BM, 0.0).amax(1, keepdim=True)
        above_B = (ranked.prob_BM > own_B1).sum(1).double()
        tied_B = (ranked.prob_BM == own_B1).sum(1).double() - 1.0
        parts.append(torch.where(own_B1[:, 0] > 0, above_B + tied_B / 2, float(NOT_RANKED)))
        start += len(target_B1)
    return torch.cat(parts)
