"""Leave-last-out, by hand and as a rule of the whole tree."""

import re
from pathlib import Path

import pytest

from fedecider.evaluation.protocols import MIN_EVENTS, NUM_HELD_OUT, check_split, history, target, train_part

REPOSITORY = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize(
    ("pattern", "home"),
    [(r"\[:-2\]", None), (r"2\*\*31 - 1|2147483647", "fedecider/evaluation/metrics.py")],
    ids=["split", "not_ranked"],
)
def test_written_once(pattern, home):
    found = {
        str(path.relative_to(REPOSITORY))
        for room in ("fedecider", "idgen", "distill", "embedding_fr", "benchmarks", "scripts")
        for path in (REPOSITORY / room).rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    assert found == ({home} if home else set())
