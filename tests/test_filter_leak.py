"""The leak of a filter: what stays of a list, and what the split makes of it, with numbers by hand."""

import filter_leak
import numpy as np
import pytest

from fedecider.evaluation.sequences import SequenceArray


def at(*degrees):
    """Vectors of length 1; two that are less than 72.5 degrees apart have a cosine above 0.3."""
    angle_E = np.deg2rad(degrees)
    return np.stack([np.cos(angle_E), np.sin(angle_E)], 1)


@pytest.mark.parametrize(
    ("degrees", "kept"),
    [
        ((0, 60, 120, 250, 255), [True, True, True, False, False]),  # 0 and 120 are joined by 60
        ((0, 100, 110, 180), [False, True, True, True]),  # 180 is 70 from 110
        ((0, 10, 150, 160), [True, True, False, False]),  # two of one size: the one that begins first
        ((0, 90, 180), [False, False, False]),
        ((5,), [False]),
        ((), []),
    ],
)
def test_the_largest_component_stays(degrees, kept):
    assert filter_leak.component(at(*degrees), 0.3).tolist() == kept


def test_a_whole_list_may_lose_its_test_item_and_a_history_may_not():
    unit_ID = at(0, 20, 40, 180, 185)
    lists = SequenceArray.of([[0, 3, 1, 2, 4], [3, 4, 0, 2, 1]])
    assert filter_leak.filtered(lists, unit_ID, 0.3, num_spared=0) == [[0, 1, 2], [0, 2, 1]]
    assert filter_leak.filtered(lists, unit_ID, 0.3, num_spared=1) == [[0, 1, 2, 4], [3, 4, 1]]


def test_rows_say_who_is_left_and_whose_test_item_changed():
    """Eight users like items 0 to 5, which are near each other; four of them bought item 6, far from all, last."""
    vector_ID = at(0, 5, 10, 15, 20, 25, 200, 90)
    near = [[(user + place) % 6 for place in range(6)] for user in range(8)]
    lists = [[*items, 6] if user < 4 else items for user, items in enumerate(near)]
    lists.append([7, 6, 0])  # nobody is near another
    votes = filter_leak.text_votes(filter_leak.nearest_texts(filter_leak.unit_vectors(vector_ID)))
    given = filter_leak.row("as it is", SequenceArray.of(lists), votes)
    honest, same_users, leaking = filter_leak.compared(given, vector_ID, 0.3)
    assert leaking.user_U.tolist() == same_users.user_U.tolist() == list(range(8))
    assert same_users.lists.last().tolist() == [6, 6, 6, 6, 3, 4, 5, 0]
    assert leaking.lists.last().tolist() == [5, 0, 1, 2, 3, 4, 5, 0]
    assert honest.lists.last().tolist() == given.lists.last().tolist() == [6, 6, 6, 6, 3, 4, 5, 0, 0]
    assert honest.lists[8] == lists[8]
    assert leaking.near(vector_ID, 0.3) == 1.0
    assert given.near(vector_ID, 0.3) == 4 / 9
    assert (same_users.positions["text neighbours"] == given.positions["text neighbours"][:8]).all()
    assert (leaking.positions["text neighbours"][:4] < given.positions["text neighbours"][:4]).all()
