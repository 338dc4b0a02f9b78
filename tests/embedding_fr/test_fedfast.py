"""FedFast: the item rule, the followers and the draw by hand; its degenerate forms; what travels; the cohort."""

import math
from collections import Counter

import pytest
import torch
from toy_federation import run, toy_method

from embedding_fr.methods.fedfast import Moves, drawn_in_turn, followed
from fedecider.federation.cohort import choose_cohort, sample_cohort
from fedecider.federation.method import Upload
from fedecider.federation.streams import stream

EVERYONE = torch.ones(2, dtype=torch.bool)


def upload(rows, values):
    clients = torch.arange(len(values))
    return Upload(
        clients, torch.ones(len(values)), {"item_table": values}, rows={"item_table": rows} if rows.numel() else {}
    )


@pytest.mark.parametrize("whole", [False, True])
def test_an_item_is_weighted_by_how_far_it_moved(whole):
    """From (0, 0) to (3, 0) and (0, 1): weights 3 and 1, so (9/4, 1/4). The second item is moved by one client only."""
    start = torch.tensor([[0.0, 0.0], [5.0, 5.0], [7.0, 7.0]])
    if whole:
        values = start.expand(2, 3, 2).clone()
        values[0, 0], values[1, 0], values[1, 1] = torch.tensor([[3.0, 0.0], [0.0, 1.0], [5.0, 6.0]])
        sent = upload(torch.empty(0), values)
    else:
        values = torch.tensor([[[3.0, 0.0], [9.0, 9.0]], [[5.0, 6.0], [0.0, 1.0]]])
        sent = upload(torch.tensor([[0, -1], [1, 0]]), values)
    moves = Moves(start)
    moves.add(sent, EVERYONE)
    assert moves.table().tolist() == [[2.25, 0.25], [5.0, 6.0], [7.0, 7.0]]
    one = Moves(start)
    one.add(sent, torch.tensor([True, False]))
    assert one.table().tolist() == [[3.0, 0.0], [5.0, 5.0], [7.0, 7.0]]


def test_equal_moves_are_the_plain_mean():
    moves = Moves(torch.zeros(1, 2))
    moves.add(upload(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[[1.0, -1.0]], [[-2.0, 0.0]]])), EVERYONE)
    assert moves.table().tolist() == [[-0.5, -0.5]]


def test_absent_users_follow_their_cluster():
    """Present users moved by (1, 0) and (0, 2); with share 0.5 each absent one goes (0.25, 0.5)."""
    before = torch.arange(12.0).view(6, 2)
    after = before.clone()
    after[1] += torch.tensor([1.0, 0.0])
    after[4] += torch.tensor([0.0, 2.0])
    moved = followed(before, after, torch.tensor([1, 4]), torch.tensor([0, 0, 0, 1, 0, 1]), 0.5) - before
    half = [0.25, 0.5]
    assert moved.tolist() == [half, [1.0, 0.0], half, [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]  # cluster 1: nobody present
    assert torch.equal(followed(before, after, torch.tensor([1, 4]), torch.zeros(6, dtype=torch.long), 0.0), after)
    assert torch.equal(followed(before, after, torch.arange(6), torch.zeros(6, dtype=torch.long), 1.0), after)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (9, [3, 3, 3]),
        (18, [8, 6, 4]),  # 6 each; what the smallest lacks the others give, in turn, one of them first
        (1, None),
    ],
)
def test_clusters_give_users_in_turn(size, expected):
    cluster = torch.arange(3).repeat_interleave(torch.tensor([30, 20, 4]))
    cluster = cluster[torch.randperm(len(cluster), generator=stream(0, "mixed"))]
    seen = set()
    for seed in range(20):
        drawn = drawn_in_turn(cluster, size, stream(seed, "cohort", 1))
        assert len(drawn) == size
        found = Counter(cluster[sorted(drawn)].tolist())
        for number in range(3):
            fair = expected and expected[number]
            assert fair is None or abs(found[number] - fair) <= 1.0, (found, fair)
        seen.add(frozenset(drawn))
    assert len(seen) == 20 or size == 1


def test_every_user_of_a_cluster_is_drawn_as_often():
    cluster = torch.tensor([0, 0, 0, 0, 1, 1])
    times = Counter()
    for seed in range(1200):
        times.update(drawn_in_turn(cluster, 2, stream(seed, "cohort", 1)))
    for client, expected in ((0, 300), (3, 300), (4, 600), (5, 600)):
        assert abs(times[client] - expected) < 5 * math.sqrt(expected), times


def test_the_cohort_comes_from_the_servers_clusters():
    """Users 0 and 1 are one cluster, all others another one: each gives one of two."""
    method = toy_method("fedfast", num_clusters=2)
    server, _ = method.init()
    server["cluster"] = torch.tensor([1, 1, 0, 0, 0, 0, 0])
    cohorts = [choose_cohort(method, server, 7, 0.2, 0, round) for round in range(1, 30)]
    assert all(len(cohort & {0, 1}) == 1 and len(cohort) == 2 for cohort in cohorts)
    assert len(set(map(frozenset, cohorts))) > 4
    assert choose_cohort(method, server, 7, 1.0, 0, 1) == set(range(7))
    random = toy_method("fedfast", draw="random")
    assert choose_cohort(random, server, 7, 0.2, 0, 1) == sample_cohort(7, 0.2, 0, 1)


def test_absent_users_move_on_the_server_and_only_there():
    state, records = run(toy_method("fedfast", num_clusters=1), rounds=1, participation=0.3)
    start, _ = toy_method("fedfast").init()
    present = {log["client"] for log in records[0]["clients"]}
    step = state.server["user"] - start["user"]
    mean = step[sorted(present)].mean(0)
    for client in set(range(7)) - present:
        torch.testing.assert_close(step[client], mean)
    assert state.local == {}
    still, _ = run(toy_method("fedfast", num_clusters=1, follow=0.0), rounds=1, participation=0.3)
    absent = sorted(set(range(7)) - present)
    assert torch.equal(still.server["user"][absent], start["user"][absent])


def test_the_share_of_the_step_falls():
    steps = []
    for decay in (0.0, 2.0):
        method = toy_method("fedfast", num_clusters=1, follow=0.8, follow_decay=decay)
        state, _ = run(method, rounds=1, participation=0.3)
        again, records = run(method, rounds=2, participation=0.3)
        present = sorted(log["client"] for log in records[1]["clients"])
        absent = sorted(set(range(7)) - set(present))
        step = again.server["user"] - state.server["user"]
        steps.append((step[absent[0]] / step[present].mean(0)).mean())
    assert [float(step) for step in steps] == pytest.approx([0.8, 0.8 * math.exp(-2.0)], rel=1e-3)
