"""Centralised training: every sample once an epoch, in mixed order, one adapter for all."""

from collections import Counter

import pytest
import torch
from toy_recommender import SIZES, blocks, positions_of, run, toy_data, toy_recommender

from fedecider.federation.method import Block
from fedecider.federation.rounds import evaluate
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.methods import METHODS
from fedecider.methods.centralised import CentralisedConfig, centralised, client_model, pooled_models, scalars
from fedecider.methods.local import LocalConfig, local
from fedecider.models.adapters import without_prefix

ALL = ("crime", "comics", "children")


def pooled_run(recommender, rounds, **options):
    return run(centralised(recommender, CentralisedConfig()), 3, rounds, block_size=3, **options)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def owner(batch):
    """The client whose data all rows of a batch are."""
    for client, name in enumerate(ALL):
        known = {tuple(row) for row in toy_data(name)["input_ids"].tolist()}
        if all(tuple(row) in known for row in batch["input_ids"].tolist()):
            return client
    raise AssertionError("a batch of several clients")


def test_every_sample_is_seen_once_an_epoch_in_mixed_order():
    pooled = pooled_models(toy_recommender())
    expected = Counter(tuple(row) for name in ALL for row in toy_data(name)["input_ids"].tolist())
    orders = []
    for epoch in range(6):
        found = list(pooled.clients[0].batches(stream(3, "batches", "pooled", 1, epoch)))
        assert Counter(tuple(row) for batch in found for row in batch["input_ids"].tolist()) == expected
        orders.append(tuple(owner(batch) for batch in found))
        assert Counter(orders[-1]) == {0: 2, 1: 2, 2: 3}
    assert len(set(orders)) > 3
    assert any(order != tuple(sorted(order)) for order in orders)
    assert pooled.clients[0].num_examples == sum(SIZES.values())
    assert (pooled.names, pooled.num_clients) == (["pooled"], 1)


def test_all_clients_hold_the_one_adapter_and_nothing_is_sent():
    recommender, config = toy_recommender(), CentralisedConfig()
    state, records = pooled_run(recommender, 2)
    assert state.server == {}
    for tensor in state.local.values():
        assert torch.equal(tensor[0], tensor[1])
        assert torch.equal(tensor[0], tensor[2])
    assert [log["steps"] for log in records[0]["clients"]] == [7, 7, 7]
    for group in records[1]["traffic"]:
        assert (group["down"], group["up"], group["header_down"], group["header_up"]) == ({}, {}, 0, 0)
    assert scalars({}, [{}] * 3, 1) == (0, 0)
    assert METHODS["centralised"].pooled
    method = centralised(recommender, config)
    together = evaluate(method, state.last, "pooled", "valid", blocks(3, 3))
    for client, found in enumerate(positions_of(method, state, "pooled", 3)):
        assert torch.equal(found, together[client])
        download = method.broadcast(3, state.server, torch.tensor([client]))
        model = client_model(recommender, config, "pooled", download, take_row(state.local, client), client)
        assert same(model.adapters.pair, take_row(without_prefix(state.local, "own"), client))
        assert torch.equal(model.positions("valid"), found)


def test_one_client_is_local_training():
    """The order of the samples has another stream; within the single batch of an epoch it changes rounding only."""
    data = [{key: tensor[:4] for key, tensor in toy_data("crime").items()}]
    method = centralised(toy_recommender(["crime"], data=data, local_epochs=2), CentralisedConfig())
    state, _ = run(method, 1, 2)
    alone, _ = run(local(toy_recommender(["crime"], data=data, local_epochs=2), LocalConfig()), 1, 2)
    for key, tensor in state.local.items():
        torch.testing.assert_close(tensor, alone.local[f"local.now.{key[4:]}"], rtol=1e-3, atol=1e-4)


def test_absent_clients_and_divided_blocks_are_refused():
    with pytest.raises(ValueError, match="raise participation"):
        pooled_run(toy_recommender(), 1, participation=0.5)
    method = centralised(toy_recommender(), CentralisedConfig())
    own = {key: tensor[:2] for key, tensor in method.init()[1].items()}
    with pytest.raises(ValueError, match=r"got a block of the clients \[0, 1\], expected one block of all 3"):
        method.client_update(1, method.broadcast(1, {}, torch.arange(2)), own, Block(torch.arange(2), None))
