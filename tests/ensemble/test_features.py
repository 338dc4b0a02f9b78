"""Every feature of a tiny catalogue, by hand."""

import math

import numpy as np
import pytest
from ensemble_toys import baskets_of

from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.counts import count_events
from fedecider.models.features import FEATURES, Knowledge, block_of, near_of

# C[0, 1] = 1, C[1, 2] = 1, C[0, 2] = 1/2 + 1; N[0, 1] = N[1, 2] = N[0, 2] = 1; events 2, 1, 2, 0
COUNTS = count_events([[0, 1, 2], [0, 2]], 4)
POP = [2.1 / 5.4, 1.1 / 5.4, 2.1 / 5.4, 0.1 / 5.4]
UNIT = np.array([[1, 0], [0, 1], [0.6, 0.8], [-1, 0]], np.float32)
KNOWLEDGE = Knowledge(COUNTS, UNIT)
PAIRS = [[0, 1, 1.5, 0], [1, 0, 1, 0], [1.5, 1, 0, 0], [0, 0, 0, 0]]
NEXT = [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
SIXTH = [[1, 0, 0.6**6, 0], [0, 1, 0.8**6, 0], [0.6**6, 0.8**6, 1, 0], [0, 0, 0, 1]]


def vote(count_II, share: dict[int, float]) -> list[float]:
    total = {item: sum(count_II[item]) + 10 for item in share}
    return [sum(s * (count_II[a][b] + 10 * POP[b]) / total[a] for a, s in share.items()) for b in range(4)]


def expected(context: dict[int, float], last: dict[int, float], own: dict[int, float]) -> dict[str, list[float]]:
    """Shares of the items that vote -> each feature."""
    follow = vote(NEXT, own)
    of_all = {
        "text": [1e-3 + sum(s * SIXTH[a][b] for a, s in context.items()) for b in range(4)],
        "counts": vote(PAIRS, context),
        "successors": vote(NEXT, last),
        "followers": follow,
        "popularity": POP,
    }
    found = {
        name: [0.0 if b in own else math.log(v / (sum(of_item) / 4)) for b, v in enumerate(of_item)]
        for name, of_item in of_all.items()
    }
    found["bought before"] = [float(b in own) for b in range(4)]
    found["habit"] = [math.log(own[b] + follow[b]) if b in own else 0.0 for b in range(4)]
    return found


def rows_of(block, row: int = 0) -> dict[str, list[float]]:
    return {name: value_BI[row].tolist() for name, value_BI in block.value.items()}


def block(histories: SequenceArray, knowledge: Knowledge = KNOWLEDGE):
    return block_of(knowledge, near_of(knowledge, histories), histories)


def test_of_single_events():
    """0 was bought twice: votes 1/2 and 1/3, shares of what was bought .97 and .97^2."""
    found = block(SequenceArray.of([[0, 0, 1], [2]]))
    context = {1: 6 / 11, 0: 5 / 11}
    whole = 1 + 0.97 + 0.97**2
    own = {1: 1 / whole, 0: (0.97 + 0.97**2) / whole}
    for name, of_item in expected(context, {1: 1.0}, own).items():
        assert rows_of(found)[name] == pytest.approx(of_item, rel=1e-5), name
    for name, of_item in expected({2: 1.0}, {2: 1.0}, {2: 1.0}).items():
        assert rows_of(found, 1)[name] == pytest.approx(of_item, rel=1e-5), name
    assert found.seen_BI.tolist() == [[True, True, False, False], [False, False, True, False]]
    assert set(found.value) == set(FEATURES) - {"model"}


def test_of_baskets():
    """Items of one basket are of one age: 0 and 1 are the last ones together, 2 came a basket before."""
    found = rows_of(block(baskets_of([[[2], [0, 1]]])))
    whole = 2 + 0.97
    own = {0: 1 / whole, 1: 1 / whole, 2: 0.97 / whole}
    context, last = {0: 0.4, 1: 0.4, 2: 0.2}, {0: 0.5, 1: 0.5}
    for name, of_item in expected(context, last, own).items():
        assert found[name] == pytest.approx(of_item, rel=1e-5), name


def test_old_events_are_a_habit_and_do_not_vote():
    long = rows_of(block(SequenceArray.of([[2, *[0] * 10]])))
    assert long["counts"][1] == pytest.approx(expected({0: 1.0}, {0: 1.0}, {0: 1.0})["counts"][1], rel=1e-5)
    share = 0.97**10 / sum(0.97**age for age in range(11))
    assert long["habit"][2] == pytest.approx(math.log(share + vote(NEXT, {2: share, 0: 1 - share})[2]), rel=1e-5)


def test_of_a_new_item_counts_say_nothing_and_its_text_speaks():
    unit_ID = np.concatenate([UNIT, UNIT[2:3]])
    knowledge = Knowledge(COUNTS.with_items(1), unit_ID, num_new=1)
    found = rows_of(block(SequenceArray.of([[1]]), knowledge))
    assert [found[name][4] for name in ("counts", "successors", "followers", "popularity")] == [0.0] * 4
    assert found["text"][4] == found["text"][2] != 0.0
    assert found["counts"][3] < 0.0
