"""What becomes of items of the history: the weights decide, they are left out, or nothing else comes."""

import math

import numpy as np
import pytest
import torch

from fedecider.data.near_texts import unit_vectors
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.counts import count_events
from fedecider.models.ensemble import Ensemble, ModelScores, Weights, best_items
from fedecider.models.features import BOUGHT, HABIT, MODEL, POPULARITY, Knowledge
from fedecider.models.histories import as_histories, as_sequences, exact_history
from fedecider.models.item_search import Items

NUM_ITEMS = 80
KNOWLEDGE = Knowledge(
    count_events([[item, (3 * item) % NUM_ITEMS, 7] for item in range(NUM_ITEMS)], NUM_ITEMS),
    unit_vectors(np.random.default_rng(1).normal(size=(NUM_ITEMS, 4))),
)
HISTORIES = SequenceArray.of([[4, 9, 4, 4, 60], [1]])


def model(num_beams):
    """Items are the likelier the smaller their number."""
    log_prob_I = torch.log_softmax(-0.1 * torch.arange(NUM_ITEMS, dtype=torch.float64), 0)

    def log_probs(histories, item_BM):
        if item_BM is None:
            return log_prob_I.expand(len(histories), -1)
        return log_prob_I[item_BM.clamp(min=0)]

    def beams(histories, k):
        return torch.arange(num_beams).expand(len(histories), -1)

    return ModelScores(log_probs, beams if num_beams else None)


def ensemble(bought):
    weights = Weights({MODEL: 1.0, POPULARITY: 0.3, BOUGHT: bought, HABIT: 0.5}, {})
    return Ensemble(KNOWLEDGE, Weights({POPULARITY: 1.0}, {}), weights, ("own",))


@pytest.mark.parametrize("num_beams", [0, 5])
def test_repeats_are_what_was_bought_and_the_others_what_was_not(num_beams):
    """Also where no beam ends at what was bought, and its weight is far below that of all others."""

    def lists(bought, repeats):
        found = best_items(ensemble(bought), HISTORIES, model(num_beams), 5, repeats)
        return [[one.item for one in items] for items in found]

    assert [set(items) for items in lists(-20.0, "only")] == [{4, 9, 60}, {1}]
    assert lists(-20.0, "only")[0][0] == 4, "bought most often"
    for items, seen in zip(lists(3.0, "drop"), HISTORIES, strict=True):
        assert len(items) == 5
        assert not set(items) & set(seen)
    assert lists(-20.0, "learned") == lists(-20.0, "drop")
    assert [items[0] for items in lists(20.0, "learned")] == [4, 1]


def test_what_features_add_is_the_score():
    (found, _) = best_items(ensemble(1.5), HISTORIES, model(0), NUM_ITEMS)
    assert math.fsum(math.exp(one.log_prob) for one in found) == pytest.approx(1.0)
    rest = {one.log_prob - sum(one.adds.values()) for one in found}
    assert max(rest) - min(rest) < 1e-5
    adds = {one.item: one.adds for one in found}
    assert adds[60][BOUGHT] == 1.5
    assert adds[60][MODEL] == adds[61][BOUGHT] == adds[61][HABIT] == 0.0
    assert adds[61][MODEL] == pytest.approx(float(model(0).log_probs([[]], None)[0, 61]) + math.log(NUM_ITEMS))


ITEMS = Items(["a", "b", "c", "d"], ["Alpha", "Beta", "Gamma", "Delta"])


def rows(*histories):
    return as_sequences([exact_history(ITEMS, history, "refuse")[0] for history in histories])


def test_a_list_in_a_history_is_one_basket():
    found = rows(["a", ["b", "c", "b"], "d"], ["c", "Delta"], [["a", "b"], ["c"]])
    assert list(found) == [[0, 1, 2, 3], [2, 3], [0, 1, 2]]
    assert found.num_after_E.tolist() == [2, 1, 1, 0, 1, 0, 1, 1, 0]
    assert rows(["a", "b"], ["c"]) == SequenceArray.of([[0, 1], [2]])


def test_one_history_or_many():
    assert as_histories(["a", ["b", "c"]]) == (False, [["a", ["b", "c"]]])
    assert as_histories([["a", "b"], []]) == (True, [["a", "b"], []])
    assert as_histories([[["a", "b"], ["c"]]]) == (True, [[["a", "b"], ["c"]]])
    assert as_histories([]) == (False, [[]])
    for bad in ("abc", 3, [1, 2], ["a", 3], ["a", ["b", ["c"]]], [["a"], [["b", 1]]]):
        with pytest.raises(ValueError, match="of which those of one basket may be a list"):
            as_histories(bad)
