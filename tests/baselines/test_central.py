"""Centralised baselines: hand numbers, brute force, a checkerboard, negatives, and nothing held out in the scores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch.nn import functional

from fedecider.baselines import BASELINES, fitting, lightgcn
from fedecider.baselines.ease import ease_weights
from fedecider.baselines.item_knn import neighbour_similarities
from fedecider.baselines.lightgcn import normalised, propagate, sparse_tensor
from fedecider.baselines.mf import MatrixFactors, MfConfig
from fedecider.evaluation.protocols import PROTOCOLS, STRICT, negative_pool, no_negatives, rank_held_out
from fedecider.federation.streams import stream

PAPER = PROTOCOLS["paper"]
MATRIX_UI = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 1]])
SMALL = {  # settings that learn the checkerboard in a moment
    "item_knn": {"num_neighbours": 3},
    "ease": {"regularisation": 5.0},
    "mf": {"embedding_size": 4, "learning_rate": 0.02, "num_epochs": 40, "batch_size": 256, "weight_decay": 1e-3},
    "als": {"embedding_size": 4},
    "bpr": {"embedding_size": 4, "learning_rate": 0.02, "num_epochs": 40, "batch_size": 256, "weight_decay": 1e-3},
    "ncf": {"embedding_size": 4, "hidden_sizes": (8,), "learning_rate": 0.02, "num_epochs": 40, "batch_size": 256},
    "lightgcn": {"embedding_size": 4, "learning_rate": 0.02, "num_epochs": 40, "batch_size": 256, "weight_decay": 1e-3},
}
TRAINED = ("mf", "bpr", "ncf", "lightgcn")


def fitted(name, sequences, num_items, protocol=STRICT, seed=3, valid=None, **changes):
    baseline = BASELINES[name]
    config = baseline.config(**{**SMALL.get(name, {}), **changes})
    return baseline.fit(fitting.Pooled(sequences, num_items, protocol, seed, valid=valid), config)


def checkerboard(num_users=40, num_items=30):
    """Users like the items of their parity; two of them, of which the last one must be found, are held out."""
    users = []
    for user in range(num_users):
        items = list(range(user % 2, num_items, 2))
        turn = (7 * user) // 2 % len(items)
        users.append(items[turn:] + items[:turn])
    return users, num_items


def test_ease_equals_ridge_per_column_without_the_own_item():
    counts_UI = MATRIX_UI * torch.tensor([[1.0], [2], [-1], [1], [3]])
    found = ease_weights(counts_UI.T @ counts_UI, 0.7)
    x = counts_UI.double()
    for column in range(4):
        others = [item for item in range(4) if item != column]
        a = x[:, others]
        expected = torch.linalg.solve(a.T @ a + 0.7 * torch.eye(3, dtype=torch.float64), a.T @ x[:, column])
        torch.testing.assert_close(found[others, column], expected)
        assert found[column, column] == 0
    assert not torch.allclose(found, found.T)  # rows and columns are told apart


def test_ease_by_hand_and_bad_grams():
    # X^T X + I = [[3, 1], [1, 2]], inverse [[2, -1], [-1, 3]] / 5: B_01 = 1/3, B_10 = 1/2
    gram = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(ease_weights(gram, 1.0), torch.tensor([[0, 1 / 3], [1 / 2, 0]], dtype=torch.float64))
    with pytest.raises(ValueError, match="not positive definite"):
        ease_weights(torch.tensor([[-3.0, 0.0], [0.0, 1.0]]), 1.0)


def test_ease_scores_sum_over_distinct_train_items():
    sequences = [[0, 1, 1, 3, 2], [0, 1, 2, 3, 3], [1, 2, 0, 0], [3, 0, 1, 1]]
    x = torch.from_numpy(fitting.train_matrix(sequences, 4).toarray())
    assert x.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    score = fitted("ease", sequences, 4)(torch.tensor([2, 0]))
    torch.testing.assert_close(score, (x @ ease_weights(x.T @ x, 5.0))[[2, 0]])


def test_item_knn_by_hand():
    # columns have 4, 4, 2, 2 users; common users 01: 3, 02: 1, 03: 2, 12: 2, 13: 1, 23: 0; shrinkage 1
    matrix = sparse.csr_array(MATRIX_UI.double().numpy())
    root = math.sqrt(8)
    full = [
        [0, 3 / 5, 1 / (root + 1), 2 / (root + 1)],
        [3 / 5, 0, 2 / (root + 1), 1 / (root + 1)],
        [1 / (root + 1), 2 / (root + 1), 0, 0],
        [2 / (root + 1), 1 / (root + 1), 0, 0],
    ]
    found = torch.from_numpy(neighbour_similarities(matrix, 4, 1.0).toarray())
    torch.testing.assert_close(found, torch.tensor(full, dtype=torch.float64))
    nearest = torch.from_numpy(neighbour_similarities(matrix, 1, 1.0).toarray())
    assert nearest.nonzero().tolist() == [[0, 1], [1, 0], [2, 1], [3, 0]]  # 2 keeps 1, though 1 does not keep 2


def test_item_knn_scores_and_ties():
    # train pairs as MATRIX_UI, every user with two held-out events
    sequences = [[*row.nonzero()[:, 0].tolist(), 3, 2] for row in MATRIX_UI]
    score = fitted("item_knn", sequences, 4, num_neighbours=1, shrinkage=0.0)(torch.tensor([3, 2]))
    # nearest: 0 -> 1 (3/4), 1 -> 0 (3/4), 2 -> 1 and 3 -> 0 (2/sqrt 8); user 3 has 0 and 3, user 2 has 1 and 2
    near = 2 / math.sqrt(8)
    expected = torch.tensor([[0.0, 0.75, 0.0, near], [0.75, 0.0, near, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(score, expected)
    tied = sparse.csr_array(torch.tensor([[1.0, 1, 1]]).numpy())
    assert (neighbour_similarities(tied, 1, 0.0).toarray() > 0).sum() == 6  # which one is kept must not be chance


def test_lightgcn_propagation_by_hand():
    # users a, b; items 0, 1, 2; a has 0 and 1, b has 1 and 2: degrees 2, 2 and 1, 2, 1
    matrix = normalised(sparse.csr_array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
    outer, middle = 1 / math.sqrt(2), 0.5
    weights = torch.tensor([[outer, middle, 0], [0, middle, outer]], dtype=torch.float64)
    torch.testing.assert_close(torch.from_numpy(matrix.toarray()), weights)
    graphs = sparse_tensor(matrix, "cpu"), sparse_tensor(sparse.csr_array(matrix.T), "cpu")
    user, item = torch.tensor([[1.0], [-3.0]]), torch.tensor([[2.0], [4.0], [-1.0]])
    found = propagate(*graphs, (user, item), 1)
    users = [(1 + 2 * outer + 2) / 2, (-3 + 2 - outer) / 2]
    items = [(2 + outer) / 2, (4 + 0.5 - 1.5) / 2, (-1 - 3 * outer) / 2]
    torch.testing.assert_close(found[0][:, 0], torch.tensor(users))
    torch.testing.assert_close(found[1][:, 0], torch.tensor(items))
    dense = torch.zeros(5, 5)
    dense[:2, 2:] = torch.from_numpy(matrix.toarray())
    dense += dense.T.clone()
    start = torch.cat([user, item])
    three = (start + dense @ start + dense @ dense @ start + dense @ dense @ dense @ start) / 4
    torch.testing.assert_close(torch.cat(propagate(*graphs, (user, item), 3)), three)


def test_lightgcn_steps_equal_autograd_through_the_propagation():
    sequences, num_items = checkerboard(6, 12)
    config = lightgcn.LightgcnConfig(embedding_size=3, num_epochs=3, batch_size=16, weight_decay=0.1)
    found = lightgcn.fit(fitting.Pooled(sequences, num_items, seed=5), config)(torch.arange(6))
    model = MatrixFactors(6, num_items, 3, stream(5, "init"))
    graph = torch.from_numpy(normalised(fitting.train_matrix(sequences, num_items)).toarray()).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for epoch in range(3):
        for user_B, item_BN in fitting.training_batches(fitting.Pooled(sequences, num_items, seed=5), config)(epoch):
            user, item = propagate(graph, graph.T, (model.user_UD, model.item_ID), 2)
            gap = (user[user_B] * (item[item_BN[:, 0]] - item[item_BN[:, 1]])).sum(1)
            norms = model.user_UD[user_B].square().sum(1).mean() + model.item_ID[item_BN].square().sum(2).mean()
            optimizer.zero_grad()
            (0.1 * norms - functional.logsigmoid(gap).mean()).backward()
            optimizer.step()
    user, item = propagate(graph, graph.T, (model.user_UD, model.item_ID), 2)
    torch.testing.assert_close(found, (user @ item.T).detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_checkerboard(name):
    sequences, num_items = checkerboard()
    score = fitted(name, sequences, num_items)
    assert rank_held_out(score, sequences, num_items, "test").eq(0).all()


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "centrap"])
def test_held_out_items_never_shape_the_scores(name):
    sequences, num_items = checkerboard(10, 14)
    changed = [*sequences[:4], [*sequences[4][:-2], 1, 3], *sequences[5:]]
    assert changed[4] != sequences[4]
    fast = {"num_epochs": 2} if name in TRAINED else {"num_rounds": 3} if name == "memoriser" else {}
    users = torch.arange(10)
    before = fitted(name, sequences, num_items, **fast)(users)
    assert torch.equal(before, fitted(name, changed, num_items, **fast)(users))
    if name in ("mf", "memoriser"):  # under the leaking protocol they do: the test can fail
        leaks = [fitted(name, s, num_items, PAPER, **fast)(users) for s in (sequences, changed)]
        assert not torch.equal(*leaks)


def test_the_best_epoch_is_kept_and_patience_ends_training():
    model = torch.nn.Linear(1, 1)
    figures, epochs = [0.1, 0.4, 0.3, 0.4, 0.2, 0.9], []

    def run_epoch(epoch):
        epochs.append(epoch)
        torch.nn.init.constant_(model.weight, float(epoch))

    fitting.fit_epochs(model, run_epoch, lambda user_B: user_B, lambda score: figures[len(epochs) - 1], 6, 3)
    assert epochs == [0, 1, 2, 3, 4]  # the first of equal figures counts; 0.9 is never seen
    assert model.weight.item() == 1.0
    fitting.fit_epochs(model, run_epoch, lambda user_B: user_B, None, 3, 3)
    assert model.weight.item() == 2.0


def test_validation_reads_valid_items_in_the_whole_catalogue_and_no_test_item():
    sequences, num_items = [[0, 1, 2, 3], [1, 0, 4, 2], [2, 5, 0, 1]], 12
    score_UI = torch.arange(36.0).remainder(7).reshape(3, 12)
    score_UI[0, 2], score_UI[1, 4], score_UI[2, 0] = 50.0, 5.5, -1.0
    changed = [[*sequence[:-1], 11] for sequence in sequences]
    # user 0 first; user 1 behind its two or so better items; user 2 last of ten candidates
    places = [
        0,
        *(
            int((score_UI[u, [i for i in range(12) if i not in sequences[u][:2]]] > own).sum())
            for u, own in ((1, 5.5), (2, -1.0))
        ),
    ]
    assert places[2] == 9
    expected = sum(1 / math.log2(place + 2) for place in places) / 3
    for case in (sequences, changed):
        assert fitting.validation_ndcg(case, num_items)(lambda user_B: score_UI[user_B]) == pytest.approx(expected)


@given(
    st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=13), min_size=1, max_size=6),
    st.sampled_from([STRICT, PAPER]),
)
@settings(max_examples=60, deadline=None)
def test_ranks_enumerate_the_pool_of_the_protocol(sequences, protocol):
    sequences = [[item for item in sequence if item != 5] + [0, 1, 2] for sequence in sequences]
    excluded, avoided = fitting.excluded_items(sequences, 12, protocol, 0), no_negatives(sequences, protocol, {})
    for user, avoid in enumerate(avoided):
        pool_P = negative_pool(avoid, 12)
        assert int(excluded.pool_U[user]) == len(pool_P)
        users = torch.full((len(pool_P),), user)
        assert torch.equal(fitting.items_outside(excluded, users, torch.arange(len(pool_P))), pool_P)


def test_strict_negatives_may_be_held_out_items_and_paper_negatives_never_are():
    sequences, num_items = checkerboard(6, 14)  # 5 train, 1 valid, 1 test of 14
    config = MfConfig(num_negatives=4, batch_size=64)
    seen = {}
    for protocol in (STRICT, PAPER):
        pairs = set()
        for epoch in range(20):
            for user_B, item_BN in fitting.training_batches(fitting.Pooled(sequences, num_items, protocol), config)(
                epoch
            ):
                assert item_BN.shape[1] == 5
                for user, items in zip(user_B.tolist(), item_BN.tolist(), strict=True):
                    assert items[0] in sequences[user][:-2]
                    assert not set(items[1:]) & set(sequences[user][:-2])
                    pairs |= {(user, item) for item in items[1:]}
        seen[protocol.name] = pairs
    held = {(user, item) for user, sequence in enumerate(sequences) for item in sequence[-2:]}
    assert held <= seen["strict"]
    assert not held & seen["paper"]
    assert (
        seen["strict"] - held == seen["paper"] == {(u, i) for u in range(6) for i in range(14) if i not in sequences[u]}
    )


def test_negatives_are_uniform_over_the_complement_and_fresh_each_epoch():
    sequences, num_items = [[0, 4, 9, 2, 1], [3, 3, 3, 5, 6]], 10
    excluded = fitting.excluded_items(sequences, num_items, STRICT, 0)
    draws = fitting.draw_outside(excluded, torch.ones(90_000, dtype=torch.int64), stream(0, "test"))
    count_I = torch.bincount(draws, minlength=10).double()
    assert count_I[3] == 0
    assert ((count_I[[0, 1, 2, 4, 5, 6, 7, 8, 9]] - 10_000).abs() < 5 * math.sqrt(10_000 * 8 / 9)).all()
    epochs = fitting.training_batches(fitting.Pooled(sequences, num_items), MfConfig())
    first, second = (torch.cat([item_BN for _, item_BN in epochs(epoch)]) for epoch in (0, 1))
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == [0, 3, 4, 9]  # each distinct pair once
    assert not torch.equal(first, second)
