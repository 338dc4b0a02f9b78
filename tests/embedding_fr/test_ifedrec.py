"""IFedRec: moves and gradients by hand, new items by their attributes, what the server keeps, where attributes come
from."""

import math
from types import SimpleNamespace

import cold_items
import pytest
import torch
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.attributes import item_attributes
from embedding_fr.blocks import make_block
from embedding_fr.methods.ifedrec import (
    BY_ATTRIBUTES,
    TABLE,
    IfedrecConfig,
    network_gradients,
    new_item_scores,
)
from fedecider.data.interactions import Interactions
from fedecider.federation.wire import dense

pytestmark = pytest.mark.usefixtures("double")

ITEMS = [f"item-{number:02}" for number in range(NUM_ITEMS)]


def data_with(texts):
    return Interactions("toy", [f"p{n}" for n in range(7)], ITEMS, [""] * len(ITEMS), SEQUENCES, None, {}, texts)


@pytest.mark.parametrize("backbone", ["pfedrec", "fedncf"])
def test_rows_without_examples_close_the_gap_step_by_step(backbone):
    """One client alone: its untouched rows end at r + (1 - rate)^steps (q - r), which nobody sent."""
    training = toy_training("ifedrec", num_negatives=1, item_learning_rate=2.0)
    method = toy_method("ifedrec", training=training, backbone=backbone, alignment_weight=3.0)
    (server, local), block = method.init(), make_block(toy_population(), [0])
    own = {name: tensor[block.clients] for name, tensor in local.items()}
    upload, _, _ = method.client_update(1, method.broadcast(1, server, block.clients), own, block)
    after = method.server_aggregate(1, server, iter([upload]))
    untouched = sorted(set(range(len(ITEMS))) - set(upload.rows[TABLE][0].tolist()))
    left = (1.0 - 2.0 * 2.0 * 3.0 / (14 * 4)) ** 4  # 10 examples in batches of 5, twice
    goal, gap = server[BY_ATTRIBUTES][untouched], (server[TABLE] - server[BY_ATTRIBUTES])[untouched]
    assert 0 < len(untouched) < len(ITEMS)
    assert torch.allclose(after[TABLE][untouched], goal + left * gap)
    whole = dense(upload, method.broadcast(1, server, block.clients)).tensors[TABLE][0]
    assert torch.equal(whole[untouched], server[TABLE][untouched])


def test_the_network_s_gradient():
    """tanh(0.5 * 2 - 0.25) = t against (t, 1): 2 (t - q) (1 - t^2) a over two items and one dim."""
    params = {"network.0.weight": torch.tensor([[[0.5]]]), "network.0.bias": torch.tensor([[-0.25]])}
    found = network_gradients(params, torch.tensor([[2.0], [0.5]]), torch.tensor([[0.1], [0.3]]))
    one, other = math.tanh(0.75), 0.0
    slopes = (one - 0.1) * (1 - one**2), (other - 0.3) * 1.0
    assert float(found["network.0.weight"]) == pytest.approx(slopes[0] * 2.0 + slopes[1] * 0.5)
    assert float(found["network.0.bias"]) == pytest.approx(sum(slopes))


@pytest.mark.parametrize("backbone", ["pfedrec", "fedncf"])
def test_new_items_are_scored_as_old_ones_with_their_attributes(backbone):
    federation = toy_federation()
    method = toy_method("ifedrec", federation, backbone=backbone, hidden_sizes="5", server_epochs=5)
    state, _ = run(method)
    block = make_block(toy_population(), [2, 5])
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    score_CI = new_item_scores(state.server, own, federation.attribute_IA)
    of_all = method.positions("attributes", method.broadcast(4, state.server, block.clients), own, block, "valid")
    for score_I, items, place in zip(score_CI, (SEQUENCES[2], SEQUENCES[5]), of_all, strict=True):
        score_I[items[:-2]] = -torch.inf
        assert float(place) == float((score_I > score_I[items[-2]]).sum())
    assert not torch.equal(score_CI, new_item_scores(state.server, own, federation.attribute_IA.flip(0)))


def test_the_server_takes_as_many_adam_steps_as_it_is_asked_for():
    """Far from its goal each moves a number by the rate: three by three times as much, up to what Adam's means lag."""
    after = {}
    for epochs in (1, 3):
        method = toy_method("ifedrec", server_epochs=epochs, server_learning_rate=1e-5)
        (server, local), block = method.init(), make_block(toy_population(), [0, 3])
        own = {name: tensor[block.clients] for name, tensor in local.items()}
        upload, _, _ = method.client_update(1, method.broadcast(1, server, block.clients), own, block)
        after[epochs] = method.server_aggregate(1, server, iter([upload]))
    for name in (name for name in server if name.startswith("network.") and name.endswith((".weight", ".bias"))):
        once, thrice = (after[epochs][name] - server[name] for epochs in (1, 3))
        assert torch.allclose(once.abs(), torch.full_like(once, 1e-5), rtol=1e-2), name
        assert torch.allclose(thrice, 3.0 * once, rtol=2e-2), name


def test_the_score_of_a_new_item_has_the_client_s_bias():
    """By hand: an attribute of 4 where the run's are of 2, so 2; r = tanh(2 * 0.5 - 0.25) in one dim, weight 3 and bias
    -1.5."""
    server = {"network.0.weight": torch.tensor([[0.5]]), "network.0.bias": torch.tensor([-0.25])}
    server["attribute_unit"] = torch.tensor(2.0)
    own = {"scorer.0.weight": torch.tensor([[[3.0]]]), "scorer.0.bias": torch.tensor([[-1.5]])}
    found = new_item_scores(server, own, torch.tensor([[4.0]]))
    assert found.tolist() == [[pytest.approx(3.0 * math.tanh(0.75) - 1.5)]]


def test_attributes_in_other_units_teach_the_same():
    """Vectors of unit length over many columns are small, and one Adam step a round would take them nowhere."""
    federation = toy_federation()
    assert federation.attribute_IA is not None
    small = federation._replace(attribute_IA=0.001 * federation.attribute_IA)
    first, second = (run(toy_method("ifedrec", one))[0].server for one in (federation, small))
    assert torch.allclose(first[BY_ATTRIBUTES], second[BY_ATTRIBUTES])
    assert torch.allclose(first["attribute_unit"], 1000.0 * second["attribute_unit"])


def test_who_likes_odd_items_gets_new_odd_ones_first():
    liked = [[item for item in range(12) if item % 2 == user % 2] for user in range(24)]
    federation = toy_federation(num_clients=24, num_items=12)
    method = toy_method("ifedrec", federation, toy_training("ifedrec", embedding_size=8), server_epochs=20)
    state, _ = run(method, toy_population(sequences=liked, num_items=12), 12, block_clients=8)
    new_JA = torch.tensor([[0.0, 0.3, 0.5], [1.0, 0.4, -0.5], [0.0, 0.9, 0.1], [1.0, 0.7, 0.2]])
    for user, score_J in enumerate(new_item_scores(state.server, state.local, new_JA)):
        assert set(score_J.topk(2).indices.tolist()) == ({1, 3} if user % 2 else {0, 2})


def test_attributes_stay_at_the_server():
    federation = toy_federation()
    method = toy_method("ifedrec", federation)
    server, _ = method.init()
    down = method.broadcast(1, server, torch.arange(7))
    assert set(down.shared) == {TABLE, BY_ATTRIBUTES}
    assert not down.per_client
    with pytest.raises(ValueError, match="got a federation without attributes"):
        toy_method("ifedrec", federation._replace(attribute_IA=None))


TEXTS = [f"title: film {n}; genres: {'crime, drama' if n % 2 else 'comedy'}" for n in range(14)]


def test_attributes_of_a_file(tmp_path):
    path = tmp_path / "items.csv"
    config = IfedrecConfig(attributes=str(path))
    path.write_text("item,x,y\n" + "".join(f"{key},{n},-0.5\n" for n, key in reversed(list(enumerate(ITEMS)))))
    assert item_attributes(data_with([]), config)[[0, 13]].tolist() == [[0.0, -0.5], [13.0, -0.5]]
    whole = path.read_text()
    for content, message in (
        (whole.replace("item-05,", "other,"), "got no line for item 'item-05' .*1 of 14"),
        (whole.replace(",5,", ",red,"), "could not convert"),
        (whole.replace(",5,", ",nan,"), "not finite"),
        ("", "got no line for item"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            item_attributes(data_with([]), config)


# The benchmark of new items.


def test_figures_by_hand():
    """Items 0 and 2 of four wanted, places 1 and 3 of 20 asked for; a user without new items is not asked."""
    score = torch.tensor([[0.9, 0.5, 0.4, 0.1], [0.0, 0.0, 0.0, 0.0]])
    recall, precision, ndcg = cold_items.figures(score, [[0, 2], []])
    assert (recall, precision) == (1.0, 2 / 20)
    assert ndcg == pytest.approx((1.0 + 1.0 / 2.0) / (1.0 + 1.0 / math.log2(3)))


def test_no_event_of_a_new_item_is_left_to_train(monkeypatch):
    texts = [f"genres: kind{n}" for n in range(14)]
    monkeypatch.setattr(cold_items, "load_interactions", lambda config: data_with(texts))
    cold = cold_items.withheld(SimpleNamespace(), 0)
    assert {part: len(one) for part, one in cold.attributes.items()} == {"train": 10, "valid": 1, "test": 3}
    kept = sum(len(items) for part in (cold.train, *cold.new.values()) for items in part)
    assert kept == sum(map(len, SEQUENCES))
    everything = torch.cat(list(cold.attributes.values())).double()
    assert torch.allclose(everything @ everything.T, torch.eye(14), atol=1e-6)  # each item in one part
