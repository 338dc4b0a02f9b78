"""Items that came after an ensemble's counts: their texts and the model speak for them, what counts says nothing."""

import numpy as np
import pytest

from fedecider.data.near_texts import unit_vectors
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.counts import count_events
from fedecider.models.ensemble import Ensemble, Weights, best_items, with_items
from fedecider.models.features import COUNTED, POPULARITY, TEXT, Knowledge, block_of, near_of

USERS = [[0, 1, 2, 0], [1, 2, 3], [4, 0, 1], [2, 3, 4, 1]]
VECTORS = np.random.default_rng(4).normal(size=(5, 6))
TWIN, FAR = 5, 6  # of item 3, and of no item
LATER = np.stack([VECTORS[3], np.random.default_rng(9).normal(size=6)])
WEIGHTS = Weights({TEXT: 0.5, **dict.fromkeys(COUNTED, 0.25)}, {})
ENSEMBLE = Ensemble(Knowledge(count_events(USERS, 5), unit_vectors(VECTORS)), WEIGHTS, None, ("own",))
LONGER = with_items(ENSEMBLE, unit_vectors(LATER, VECTORS.mean(0)))


def features(ensemble, histories):
    rows = SequenceArray.of(histories)
    return block_of(ensemble.knowledge, near_of(ensemble.knowledge, rows), rows).value


def test_a_text_that_comes_later_has_the_vector_that_it_would_have_had():
    unit_ID = LONGER.knowledge.unit_ID
    assert np.array_equal(unit_ID[:5], ENSEMBLE.knowledge.unit_ID)
    assert np.array_equal(unit_ID[TWIN], unit_ID[3])
    assert LONGER.knowledge.counts.event_I[5:].tolist() == [0, 0]
    assert (LONGER.knowledge.counts.pair_II[:5, :5] != ENSEMBLE.knowledge.counts.pair_II).nnz == 0
    assert (LONGER.knowledge.counts.next_II[:5, :5] != ENSEMBLE.knowledge.counts.next_II).nnz == 0


def test_what_counts_says_nothing_of_them_and_texts_speak():
    found = features(LONGER, [[0, 1], [TWIN, 4]])
    assert {name for name, value_BI in found.items() if name in COUNTED and value_BI[:, 5:].any()} == set()
    assert all(found[name][0, 2:5].any() for name in COUNTED), "of the others it does"
    assert found[TEXT][0, TWIN] == found[TEXT][0, 3]
    assert found[TEXT][0, FAR] != 0
    assert found[TEXT][1, 3] == found[TEXT][1].max(), "a later item in the history has near texts"


@pytest.mark.parametrize("history", [[0, 1], [2], [4, TWIN]])
def test_a_list_is_the_weighted_sum_over_old_and_new_items(history):
    (found,) = best_items(LONGER, SequenceArray.of([history]), None, 7, "drop")
    assert {one.item for one in found} == set(range(7)) - set(history)
    values = features(LONGER, [history])
    score_I = sum(theta * values[name][0].numpy().astype(float) for name, theta in WEIGHTS.value.items())
    log_prob_I = score_I - np.log(np.exp(score_I).sum())
    for one in found:
        assert one.log_prob == pytest.approx(log_prob_I[one.item], abs=1e-5)
        assert one.item < 5 or set(one.adds) - {name for name in COUNTED if one.adds[name] == 0} == {TEXT}


def test_vectors_of_another_encoder_are_refused():
    with pytest.raises(ValueError, match="expected width 6"):
        with_items(ENSEMBLE, np.ones((1, 3), np.float32))
    assert POPULARITY in COUNTED
