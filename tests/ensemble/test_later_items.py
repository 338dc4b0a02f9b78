"""Items that came after an ensemble's counts: their texts and the model speak for them."""

import numpy as np
import pytest
import torch
from ensemble_toys import NUM_ITEMS, sequences, toy_model, vectors

from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.evaluation.protocols import train_part
from fedecider.federation.streams import stream
from fedecider.models import counts as experts
from fedecider.models.counts import count_events, new_contexts, training_contexts
from fedecider.models.ensemble import COUNTING, EnsembleConfig, ModelScores, fit_ensemble, rank, with_items

USERS = sequences(12)
VECTORS = vectors()
TWIN, FAR = NUM_ITEMS, NUM_ITEMS + 1  # of item 5, and of no item
LATER = np.stack([VECTORS[5], np.random.default_rng(9).normal(size=6)])
HISTORIES = [[1, 2], [3], [TWIN, 4], [4, FAR, TWIN]]


def longer_model() -> ModelScores:
    """The toy model; later items are as likely as the first two."""

    def log_probs(histories, item_BM):
        assert item_BM is None
        known = [[item % NUM_ITEMS for item in items] for items in histories]
        every_BI = torch.arange(NUM_ITEMS).expand(len(known), -1)
        score_BI = toy_model().log_probs(known, every_BI)
        return torch.cat([score_BI, score_BI[:, :2]], 1)

    return ModelScores(log_probs, None)


def fitted():
    """With weights of its own: a toy's texts say nothing."""
    counts = count_events([train_part(sequence) for sequence in USERS], NUM_ITEMS)
    contexts = training_contexts(USERS, stream(0, "toy"))
    ensemble = fit_ensemble(counts, unit_vectors(VECTORS), contexts, toy_model(), EnsembleConfig("mixture"))
    alone = ensemble.alone._replace(
        weight_QE=np.array([[0.4, 0.3, 0.1, 0.2], [0.1, 0.4, 0.3, 0.2], [0.2, 0.2, 0.3, 0.3]])
    )
    weight_QE = np.array([[0.3, 0.2, 0.1, 0.15, 0.15, 0.1], [0.1, 0.2, 0.1, 0.3, 0.2, 0.1], [0.2] * 4 + [0.1] * 2])
    return ensemble._replace(alone=alone, beside_model=ensemble.beside_model._replace(weight_QE=weight_QE))


ENSEMBLE = fitted()
LONGER = with_items(ENSEMBLE, unit_vectors(LATER, VECTORS.mean(0)))


def every_part(ensemble, histories, model):
    (ranked,) = rank(ensemble, new_contexts(histories), model)
    return ranked.prob_BM, ranked.parts(torch.arange(ensemble.counts.num_items).expand(len(histories), -1))


def test_a_text_that_comes_later_has_the_vector_that_it_would_have_had():
    assert np.array_equal(LONGER.unit_ID[:NUM_ITEMS], ENSEMBLE.unit_ID)
    assert np.array_equal(LONGER.unit_ID[TWIN], ENSEMBLE.unit_ID[5])
    assert LONGER.counts.event_I[NUM_ITEMS:].tolist() == [0, 0]
    assert (LONGER.counts.pair_II[:NUM_ITEMS, :NUM_ITEMS] != ENSEMBLE.counts.pair_II).nnz == 0


@pytest.mark.parametrize("model", [None, longer_model()], ids=["alone", "beside the model"])
def test_experts_that_count_abstain_and_all_sums_to_one(model):
    prob_BI, parts = every_part(LONGER, HISTORIES, model)
    assert torch.allclose(prob_BI.sum(1), torch.ones(len(HISTORIES), dtype=torch.float64))
    assert torch.allclose(sum(parts.values()), prob_BI)
    assert all((prob_BI[row, items] == 0).all() for row, items in enumerate(HISTORIES))
    for name, part_BI in parts.items():
        unseen = part_BI[:2, NUM_ITEMS:]
        assert bool((unseen > 0).any()) == (name not in COUNTING), name


def test_the_others_share_the_weights_of_those_that_count():
    """By hand: of a later item the mean of its text and the uniform floor by their weights."""
    history = [[1, 2]]
    found = experts.evidence(LONGER.counts, new_contexts(history))
    probs = experts.expert_probs(found, nearest_texts(LONGER.unit_ID))
    own = {name: prob_BI[0].numpy() for name, prob_BI in probs.each().items()}
    weight = dict(zip(LONGER.alone.experts, LONGER.alone.weights(experts.known(found))[0], strict=True))
    expected_I = sum(weight[name] * prob_I for name, prob_I in own.items())
    abstained_I = weight["text"] * own["text"] + weight["uniform"] * own["uniform"]
    expected_I[NUM_ITEMS:] = abstained_I[NUM_ITEMS:] / (weight["text"] + weight["uniform"])
    prob_BI, _ = every_part(LONGER, history, None)
    assert torch.allclose(prob_BI[0], torch.from_numpy(expected_I / expected_I.sum()))
