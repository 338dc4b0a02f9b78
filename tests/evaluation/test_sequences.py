"""Sequences as arrays read as the list of lists that they stand for."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.evaluation.sequences import SequenceArray

ROWS = st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=9)
PLACES = st.one_of(st.none(), st.integers(-12, 12))


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(-10, 10), st.builds(slice, PLACES, PLACES, st.sampled_from([None, 1, 2, -1, -3])))
def test_reads_as_a_list_of_lists(rows, place, part):
    made = SequenceArray.of(rows)
    assert (len(made), bool(made), list(made)) == (len(rows), bool(rows), rows)
    assert made == rows == list(made[:])
    assert made == SequenceArray.of(tuple(rows))
    assert made != [*rows, [1]]
    assert made != [*rows[1:], [9]]
    assert made[part] == rows[part]
    assert isinstance(made[part], SequenceArray)
    assert list(reversed(made)) == rows[::-1]
    assert pickle.loads(pickle.dumps(made)) == rows
    if -len(rows) <= place < len(rows):
        assert made[place] == rows[place]
        assert all(type(item) is int for item in made[place])
        assert made.index(made[place]) == rows.index(rows[place])
    else:
        with pytest.raises(IndexError):
            made[place]


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(0, 4), st.integers(1, 8), st.data())
def test_what_goes_over_all_rows(rows, num, piece, data):
    made = SequenceArray.of(rows).of_type(np.int32)
    assert made.length_U.tolist() == [len(row) for row in rows]
    assert made.row_E.tolist() == [place for place, row in enumerate(rows) for _ in row]
    assert made.without_last(num) == [row[: max(0, len(row) - num)] for row in rows]
    assert made.newest(num) == [row[len(row) - min(num, len(row)) :] for row in rows]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5)) if rows else []
    assert made.take(chosen) == [rows[place] for place in chosen]
    kept = np.array([len(row) > num for row in rows], bool)
    assert made.take(kept) == [row for row in rows if len(row) > num]
    long = made.take(kept)
    assert long.last(num).tolist() == [row[-1 - num] for row in rows if len(row) > num]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedecider.evaluation.sequences.PIECE", piece)
        patch.setattr("fedecider.evaluation.sequences.ROWS_AT_ONCE", piece)
        assert list(made) == rows
        first = [place == row.index(item) for row in rows for place, item in enumerate(row)]
        assert made.is_first_E.tolist() == first
        assert made.num_repeats_U.tolist() == [len(row) - len(set(row)) for row in rows]
