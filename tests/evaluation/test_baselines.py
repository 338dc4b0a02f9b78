"""Baselines against hand numbers and slow plain loops; the canary on generated data and on MovieLens 100K."""

import gzip
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.baselines.counts import (
    FARTHEST,
    cooccurrence_matrix,
    cooccurrence_scores,
    popularity,
    train_counts,
)
from fedecider.evaluation.canary import Draws, memoriser
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import PROTOCOLS, STRICT, chance_hit, rank_held_out, sampled_candidates

events = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=12), min_size=1, max_size=8)


def last_item_positions(sequences, num_items, split, protocol=STRICT, extra=()):
    score = cooccurrence_scores(sequences, num_items, split, extra)
    return rank_held_out(score, sequences, num_items, split, protocol)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_popularity_counts_train_parts_and_the_public_pool():
    sequences = [[0, 1, 1, 2, 3], [1, 4, 3], [5, 4, 2]]
    assert train_counts(sequences, 6).tolist() == [1, 3, 0, 0, 0, 1]
    assert train_counts(sequences, 6, [[2, 2, 3]]).tolist() == [1, 3, 2, 1, 0, 1]
    # user 0: candidates 3 4 5 with counts 0 0 1 -> places 1 and 2 in equal shares; user 1: 0 2 3 5 with 1 0 0 1;
    # user 2: 0 1 2 3 with 1 3 0 0
    assert popularity(sequences, 6, "test").tolist() == [1.5, 2.5, 2.5]
    assert popularity(sequences, 6, "test", extra=[[2, 2, 3]]).tolist() == [0.5, 2.0, 1.0]


def test_direct_successors_by_hand():
    sequences = [[0, 1, 0, 1, 2, 9, 9], [1, 2, 0, 9, 9]]
    matrix = cooccurrence_matrix(sequences, 10).toarray()
    assert matrix[0, 1] == 2
    assert matrix[1, 0] == 1
    assert matrix[1, 2] == 2
    assert matrix[2, 0] == 1
    assert matrix.sum() == 6  # held-out items take no part
    both = cooccurrence_matrix(sequences, 10, directed=False, window=2).toarray()
    assert both[0, 0] == 1.0  # 0 _ 0 at distance 2 counts 1/2 in each direction
    assert both[1, 2] == both[2, 1] == 2.0
    assert both[0, 2] == both[2, 0] == 1.5  # 0 1 2 at 1/2, and 2 0 at 1
    assert (both == both.T).all()


def test_pairs_far_apart_do_not_count():
    sequences = [[*range(60), 0, 1]]
    matrix = cooccurrence_matrix(sequences, 60, window=None).toarray()
    assert matrix[3, 3 + FARTHEST] == 1 / FARTHEST
    assert matrix[3, 3 + FARTHEST + 1 :].sum() == 0
    assert cooccurrence_matrix(sequences, 60, window=55).toarray()[3, 3 + 55] == 1 / 55


@given(events, events, st.sampled_from([None, 1, 2, 3]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_matrix_equals_the_plain_loop(sequences, extra, window, directed):
    expected = torch.zeros(10, 10, dtype=torch.float64)
    for part in [*(s[:-2] for s in sequences), *extra]:
        for i, a in enumerate(part):
            for j in range(i + 1, min(len(part), i + (window or 99) + 1)):
                expected[a, part[j]] += 1 / (j - i)
                if not directed:
                    expected[part[j], a] += 1 / (j - i)
    found = torch.from_numpy(cooccurrence_matrix(sequences, 10, extra, window=window, directed=directed).toarray())
    torch.testing.assert_close(found, expected)


@given(events, st.sampled_from(["valid", "test"]), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_decayed_scores_equal_the_plain_loop(sequences, split, num_context):
    score = cooccurrence_scores(sequences, 10, split, window=None, directed=False, num_context=num_context)
    found = score(torch.arange(len(sequences)))
    matrix = torch.from_numpy(cooccurrence_matrix(sequences, 10, window=None, directed=False).toarray())
    for user, sequence in enumerate(sequences):
        history = sequence[: -2 if split == "valid" else -1]
        expected = torch.zeros(10, dtype=torch.float64)
        for age, item in enumerate(reversed(history[-num_context:])):
            expected += matrix[item] / (1 + matrix[item].sum()) / (age + 1)
        torch.testing.assert_close(found[user], expected, atol=2e-9, rtol=0)


def test_last_item_wins_and_popularity_breaks_ties():
    # after 0 came 1 twice and 2 once; 5 is more popular than all, but never after 0
    public = [[0, 1], [0, 1], [0, 2], [5, 5, 5, 5], [4, 4], [3, 3, 3]]
    sequences = [[6, 0, 1], [6, 0, 2], [6, 0, 5], [6, 0, 3], [6, 0, 4]]
    assert last_item_positions(sequences, 8, "test", extra=public).tolist() == [0, 1, 2, 3, 4]
    # 6 is followed by nothing: 5 is above, 0 and 3 tie
    assert last_item_positions(sequences, 8, "valid", extra=public)[0] == 1.5


def test_held_out_items_never_count():
    torch.manual_seed(0)
    sequences = [torch.randint(0, 20, (8,)).tolist() for _ in range(30)]
    other = [[*s[:-1], (s[-1] + 7) % 20] for s in sequences]
    users = torch.arange(30)
    for window, directed, contexts in ((1, True, 1), (None, False, 10)):
        kind = {"window": window, "directed": directed, "num_context": contexts}
        a = cooccurrence_scores(sequences, 20, "test", **kind)(users)
        b = cooccurrence_scores(other, 20, "test", **kind)(users)
        assert torch.equal(a, b)


def random_users(num_users=400, num_items=300, seed=5):
    draw = generator(seed)
    sizes = torch.randint(12, 40, (num_users,), generator=draw).tolist()
    return [torch.randperm(num_items, generator=draw)[:size].tolist() for size in sizes], num_items


@pytest.mark.parametrize("name", ["strict", "strict/sampled99", "isolated99"])
@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("num_rounds", [1, 40])
def test_canary_is_at_chance_when_the_sampler_knows_nothing(name, split, num_rounds):
    sequences, num_items = random_users()
    candidates = sampled_candidates(sequences, num_items, generator(1))
    protocol = PROTOCOLS[name]
    position = memoriser(
        sequences, num_items, split, protocol, generator=generator(2), draws=Draws(num_rounds), candidates=candidates
    )
    chance = chance_hit(sequences, num_items, split, protocol)
    error = math.sqrt(chance * (1 - chance) / len(sequences))
    assert abs(mean_metrics(position)["hit@10"] - chance) < 4 * error


def test_canary_sings_when_the_sampler_avoids_the_held_out_item():
    sequences, num_items = random_users()
    candidates = sampled_candidates(sequences, num_items, generator(1))
    hits = [
        mean_metrics(
            memoriser(
                sequences,
                num_items,
                "test",
                PROTOCOLS["paper"],
                generator=generator(2),
                draws=Draws(rounds),
                candidates=candidates,
            )
        )["hit@10"]
        for rounds in (1, 5, 100)
    ]
    assert hits[0] < hits[1] < hits[2]
    assert hits[2] > 0.99


def movielens(data_root):
    path = data_root / "movielens" / "ml-100k" / "u.data.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    with gzip.open(path, "rt") as file:
        rows = [tuple(map(int, line.split())) for line in file]
    users: dict[int, list[int]] = {}
    for user, item, _, _ in sorted(rows, key=lambda row: (row[0], row[3])):  # stable: ties keep file order
        users.setdefault(user, []).append(item - 1)
    return list(users.values()), 1682


@pytest.mark.data
def test_canary_on_movielens_100k(data_root):
    sequences, num_items = movielens(data_root)
    candidates = sampled_candidates(sequences, num_items, generator(0))
    assert len(sequences) == 943
    for name, protocol in PROTOCOLS.items():
        if not protocol.drop_seen:
            continue
        position = memoriser(sequences, num_items, "test", protocol, generator=generator(1), candidates=candidates)
        hit = mean_metrics(position)["hit@10"]
        chance = chance_hit(sequences, num_items, "test", protocol)
        if protocol.leaks:
            assert hit > 0.95
        else:
            assert abs(hit - chance) < 4 * math.sqrt(chance * (1 - chance) / 943), name
    found = mean_metrics(popularity(sequences, num_items, "test", PROTOCOLS["strict/sampled99"], candidates=candidates))
    assert found["hit@10"] == pytest.approx(0.40, abs=0.03)
