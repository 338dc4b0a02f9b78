"""Sequences and their split: read as lists of lists, the last items left out, means from the file per user."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.evaluation.metrics import NOT_RANKED, mean_metrics
from fedecider.evaluation.per_user import UserPositions, mean_table, read_per_user, write_per_user
from fedecider.evaluation.protocols import MIN_EVENTS, NUM_HELD_OUT, check_split, history, target, train_part
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


def records():
    return [
        UserPositions("crime", ["u2", "u1", "u3"], "test", "own", 7, torch.tensor([4, NOT_RANKED, 0])),
        UserPositions("comics", ["u9"], "test", "own", 7, torch.tensor([2.5])),
        UserPositions("crime", ["u2", "u1", "u3"], "valid", "popularity", 0, torch.tensor([11, 12, NOT_RANKED])),
    ]


def test_round_trip_keeps_users_order_and_positions(tmp_path):
    path = tmp_path / "per_user.parquet"
    write_per_user(path, iter(records()))
    found = read_per_user(path)
    assert [list(r[:5]) for r in found] == [list(r[:5]) for r in records()]
    assert [r.position_U.tolist() for r in found] == [[4.0, NOT_RANKED, 0.0], [2.5], [11.0, 12.0, NOT_RANKED]]
    assert [p.name for p in tmp_path.iterdir()] == ["per_user.parquet"]


def test_tables_can_be_computed_again(tmp_path):
    path = tmp_path / "per_user.parquet"
    write_per_user(path, records())
    rows = {(row["domain"], row["split"], row["variant"]): row for row in mean_table(read_per_user(path))}
    expected = mean_metrics(torch.tensor([4, NOT_RANKED, 0]))
    crime = rows["crime", "test", "own"]
    assert {name: crime[name] for name in expected} == expected
    assert rows["macro", "test", "own"]["hit@5"] == pytest.approx((2 / 3 + 1) / 2)
    assert rows["macro", "test", "own"]["num_users"] == 4
    assert rows["macro", "valid", "popularity"]["hit@20"] == pytest.approx(2 / 3)
