"""Leave-last-out, by hand."""

import pytest

from fedecider.evaluation.split import MIN_EVENTS, NUM_HELD_OUT, check_split, history, target, train_part

SEQUENCE = [4, 9, 9, 2, 7]


def test_by_hand():
    assert train_part(SEQUENCE) == [4, 9, 9]
    assert (history(SEQUENCE, "valid"), target(SEQUENCE, "valid")) == ([4, 9, 9], 2)
    assert (history(SEQUENCE, "test"), target(SEQUENCE, "test")) == ([4, 9, 9, 2], 7)
    assert (NUM_HELD_OUT, MIN_EVENTS) == (2, 3)
    assert train_part((1, 2, 3)) == (1,)
    for broken in (check_split, lambda split: history(SEQUENCE, split), lambda split: target(SEQUENCE, split)):
        with pytest.raises(ValueError, match="got split 'train', expected one of"):
            broken("train")
