"""Blocks, negatives, touched rows and batches: exact on small data, and statistically unbiased."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from toy_federation import NUM_ITEMS, SEQUENCES, toy_population

from embedding_fr.blocks import (
    block_packer,
    make_block,
    positions_compiled,
    positions_stacked,
    rank_users,
)
from embedding_fr.examples import complement, draw_examples, epoch_batches, touched_rows
from fedecider.evaluation.protocols import PROTOCOLS, STRICT, rank_held_out, sampled_candidates
from fedecider.federation.streams import below, client_keys, counter_draws, stream


def examples_of(client: int, round: int = 1, num_negatives: int = 2, seed: int = 0, population=None):
    population = population or toy_population()
    block = make_block(population, [client])
    return draw_examples(block.data, block.clients, population.num_items, num_negatives, seed, round)


@given(
    avoided=st.sets(st.integers(0, 19), max_size=19),
    padding=st.integers(0, 3),
)
def test_complement_is_the_sorted_list_of_what_is_left(avoided, padding):
    left = sorted(set(range(20)) - avoided)
    avoid_CA = torch.tensor([sorted(avoided) + [20] * padding], dtype=torch.int64)
    assert complement(avoid_CA, torch.arange(len(left))[None]).tolist() == [left]


def test_negatives_are_uniform_outside_the_train_items_under_strict():
    """No held-out item is favoured or avoided: chi-square over many rounds, client by client."""
    for client in (0, 2):
        counts = torch.zeros(NUM_ITEMS)
        for round in range(1, 400):
            one = examples_of(client, round)
            negatives = one.item_CB[0, int(one.num_positive_C[0]) : int(one.count_C[0])]
            counts += torch.bincount(negatives, minlength=NUM_ITEMS)
        train = SEQUENCES[client][:-2]
        assert counts[train].sum() == 0
        left = torch.tensor([item for item in range(NUM_ITEMS) if item not in train])
        assert stats.chisquare(counts[left].numpy()).pvalue > 1e-4


def test_negatives_avoid_the_held_out_items_under_paper():
    population = toy_population(replace(PROTOCOLS["paper"], num_sampled=None))
    drawn = {int(i) for r in range(1, 200) for i in examples_of(0, r, population=population).item_CB[0, 5:]}
    assert drawn == set(range(NUM_ITEMS)) - set(SEQUENCES[0])


def test_examples_do_not_depend_on_who_shares_the_block():
    population = toy_population()
    order = sorted(range(7), key=lambda client: -len(SEQUENCES[client]))
    block = make_block(population, order)
    together = draw_examples(block.data, block.clients, NUM_ITEMS, 2, 0, 3)
    for row, client in enumerate(order):
        alone = examples_of(client, 3)
        count = int(alone.count_C[0])
        assert together.item_CB[row, :count].tolist() == alone.item_CB[0, :count].tolist()
        assert set(together.item_CB[row, count:].tolist()) <= {NUM_ITEMS}
    assert examples_of(0, 1).item_CB.tolist() != examples_of(0, 2).item_CB.tolist()
    assert examples_of(0, 1).item_CB.tolist() != examples_of(0, 1, seed=1).item_CB.tolist()


def test_every_example_comes_once_per_epoch_and_weights_are_means():
    population = toy_population()
    order = sorted(range(7), key=lambda client: -len(SEQUENCES[client]))
    block = make_block(population, order)
    examples = draw_examples(block.data, block.clients, NUM_ITEMS, 2, 0, 1)
    row_CR, place_CB = touched_rows(examples.item_CB, NUM_ITEMS)
    orders = []
    for epoch in range(2):
        seen = [[] for _ in order]
        for batch in epoch_batches(examples, place_CB, 5, range(epoch, epoch + 1)):
            assert batch.last_A is not None
            assert bool(batch.last_A.all())
            assert torch.allclose(batch.weight_AB.sum(1), torch.ones(batch.active))
            for row in range(batch.active):
                real = batch.weight_AB[row] > 0
                assert int(real.sum()) <= 5
                items = row_CR[row, batch.item_AB[row, real]].tolist()
                seen[row] += list(zip(items, batch.label_AB[row, real].tolist(), strict=True))
        for row, client in enumerate(order):
            count = int(examples.count_C[row])
            labels = [1.0] * len(SEQUENCES[client][:-2]) + [0.0] * (count - len(SEQUENCES[client][:-2]))
            assert sorted(seen[row]) == sorted(zip(examples.item_CB[row, :count].tolist(), labels, strict=True))
        orders.append(seen[0])
    assert orders[0] != orders[1]


def test_clients_go_from_epoch_to_epoch_at_their_own_pace():
    """What a client sees in epochs 1 to 3 with others in its block is what it sees alone, epoch by epoch."""
    order = sorted(range(7), key=lambda client: -len(SEQUENCES[client]))
    block = make_block(toy_population(), order)
    examples = draw_examples(block.data, block.clients, NUM_ITEMS, 2, 0, 1)
    row_CR, place_CB = touched_rows(examples.item_CB, NUM_ITEMS)
    seen: list[list] = [[] for _ in order]
    last: list[list] = [[] for _ in order]
    for batch in epoch_batches(examples, place_CB, 5, range(1, 4)):
        for row in range(batch.active):
            real = batch.weight_AB[row] > 0
            assert batch.weight_AB[row, real].tolist() == [pytest.approx(1.0 / int(real.sum()))] * int(real.sum())
            seen[row].append(
                (row_CR[row, batch.item_AB[row, real]].tolist(), batch.label_AB[row, real].tolist()),
            )
            last[row].append(batch.last_A is not None and bool(batch.last_A[row]))
    for row, client in enumerate(order):
        alone = examples_of(client)
        place = torch.arange(alone.item_CB.shape[1])[None]
        expected = []
        for epoch in range(1, 4):
            for batch in epoch_batches(alone, place, 5, range(epoch, epoch + 1)):
                real = batch.weight_AB[0] > 0
                items = alone.item_CB[0, batch.item_AB[0, real]].tolist()
                expected.append((items, batch.label_AB[0, real].tolist()))
        assert seen[row] == expected
        steps = len(expected) // 3
        assert last[row] == [False] * 2 * steps + [True] * steps


def test_shuffles_are_uniform():
    """The first example of an epoch is each of the 9 examples of client 4 equally often."""
    one = examples_of(4)
    first = torch.zeros(9)
    for epoch in range(1800):
        place = torch.arange(one.item_CB.shape[1])[None]
        batch = next(epoch_batches(one, place, 5, range(epoch, epoch + 1)))
        first[int(batch.item_AB[0, 0])] += 1
    assert stats.chisquare(first.numpy()).pvalue > 1e-4


def test_counter_draws_are_uniform_and_independent_of_the_block():
    keys = client_keys(torch.arange(200), 3, "test", 1)
    draws = counter_draws(keys, 50)
    assert int(draws.min()) >= 0
    assert torch.equal(counter_draws(keys[17:18], 50), draws[17:18])
    assert torch.equal(counter_draws(keys, 20, start=30), draws[:, 30:])
    counts = torch.bincount(below(draws, 7).flatten(), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    unit = draws.double() / 2.0**63
    assert stats.kstest(unit.flatten().numpy(), "uniform").pvalue > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([unit[:, :-1].flatten(), unit[:, 1:].flatten()]))[0, 1])) < 0.05
    assert abs(float(torch.corrcoef(torch.stack([unit[:-1].flatten(), unit[1:].flatten()]))[0, 1])) < 0.05


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("name", ["strict", "strict/keep_seen", "strict/sampled99"])
def test_ranking_equals_the_common_evaluation(name, split):
    num_items, protocol = 130, PROTOCOLS[name]
    population = toy_population(protocol, num_items=num_items)
    score = torch.rand(7, num_items, generator=stream(0, "scores")).mul(20).round()  # with ties
    candidates = sampled_candidates(SEQUENCES, num_items, stream(0, "candidates"), 99)
    expected = rank_held_out(lambda u: score[u], SEQUENCES, num_items, split, protocol, candidates=candidates)
    found = {}
    for block in block_packer(population, lambda n: 1, 3)(range(7)):
        positions = rank_users(score[block.clients], block.data, split, protocol)
        found.update(zip(block.clients.tolist(), positions, strict=True))
    assert torch.cat([found[client] for client in range(7)]).tolist() == expected.tolist()


def test_compiled_and_stacked_positions_are_the_same_and_nan_is_an_error():
    score_CI = torch.rand(5, 40, generator=stream(1, "scores")).mul(8).round()  # with ties
    target_C = torch.tensor([3, 0, 39, 7, 20])
    seen_CT = torch.tensor([[1, 2, 4], [39, 40, 40], [40, 40, 40], [0, 9, 40], [21, 22, 23]])  # 40 pads
    for seen in (seen_CT, seen_CT[:, :0]):
        expected = positions_stacked(score_CI, target_C, seen)
        assert torch.equal(positions_compiled(score_CI, target_C, seen), expected)
        assert torch.equal(positions_compiled(score_CI.double(), target_C, seen), expected)
    score_CI[1] = torch.nan
    assert positions_compiled(score_CI, target_C, seen_CT) is None
    data = make_block(toy_population(num_items=40), [0]).data
    with pytest.raises(ValueError, match="NaN scores"):
        rank_users(score_CI[1:2], data, "valid", STRICT)
