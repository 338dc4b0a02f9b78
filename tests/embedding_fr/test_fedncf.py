"""FedNCF: the network's score, what travels, how it is averaged."""

import torch
from toy_federation import SEQUENCES, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block
from embedding_fr.methods.fedncf import FedncfConfig, ncf_logits, ncf_model


def test_the_score_by_hand():
    """Users first, then items: [p_u, q_i] -> 2 hidden units -> 1; the two clients have different networks."""
    params = {
        "user": torch.tensor([[2.0], [-1.0]]),
        "item_table": torch.tensor([[[3.0], [-1.0], [0.0]], [[1.0], [0.5], [4.0]]]),
        "scorer.0.weight": torch.tensor([[[1.0, 0.5], [-1.0, 2.0]], [[2.0, 0.0], [3.0, -1.0]]]),
        "scorer.0.bias": torch.tensor([[0.5, -1.0], [0.0, 1.0]]),
        "scorer.1.weight": torch.tensor([[[2.0], [-0.5]], [[1.0], [10.0]]]),
        "scorer.1.bias": torch.tensor([[0.25], [-3.0]]),
    }
    # client 0, p = 2, hidden (2.5 - q, 2 q). q = 3: (0, 6) -> -2.75; q = -1: (3.5, 0) -> 7.25; q = 0: (2.5, 0) -> 5.25
    # client 1, p = -1, hidden (3 q - 2, 1 - q). q = 1: (1, 0) -> -2; q = .5: (0, .5) -> 2; q = 4: (10, 0) -> 7
    every = torch.tensor([[-2.75, 7.25, 5.25], [-2.0, 2.0, 7.0]])
    assert torch.allclose(ncf_logits(params, None), every)
    item_CB = torch.tensor([[2, 0], [1, 1]])
    assert torch.allclose(ncf_logits(params, item_CB), every.gather(1, item_CB))


def test_table_and_network_travel_the_user_embedding_does_not():
    """The sizes of table 6 of PFedCLR, ML-100K: 0.1053 MB at the client, 0.1027 MB without the network."""
    federation = toy_federation(num_items=1682)
    model = ncf_model(federation, toy_training("fedncf", embedding_size=16), FedncfConfig().hidden_sizes)
    count = lambda names: 4 * sum(model.shared[name].numel() for name in names) / 2**20  # noqa: E731
    assert round(count(["item_table"]) + 4 * 16 / 2**20, 4) == 0.1027
    assert round(count(model.shared) + 4 * 16 / 2**20, 4) == 0.1053
    _, records = run(toy_method("fedncf"), rounds=1)
    (group,) = records[0]["traffic"]
    assert group["up"] == group["down"]
    assert set(group["up"]) == {
        "item_table",
        *(f"scorer.{layer}.{part}" for layer in range(3) for part in ("weight", "bias")),
    }


def test_everything_shared_is_averaged_by_train_items():
    """Two clients with 5 and 1 train items: weights 5/6 and 1/6."""
    sequences = [SEQUENCES[0], SEQUENCES[1]]
    method = toy_method("fedncf", toy_federation(num_clients=2), toy_training("fedncf", learning_rate=0.1))
    population = toy_population(sequences=sequences)
    state, _ = run(method, population, rounds=1)
    server, local = method.init()
    uploads = []
    for client in range(2):
        block, own = make_block(population, [client]), {"user": local["user"][client][None]}
        uploads.append(method.client_update(1, method.broadcast(1, server, block.clients), own, block)[0])
    for name in server:
        if name == "item_table":
            continue
        one, other = (upload.tensors[name][0] for upload in uploads)
        assert not torch.allclose(one, other, atol=1e-3)
        assert torch.allclose(state.server[name], (5 * one + other) / 6, atol=1e-6), name
    row_R, others = uploads[0].rows["item_table"][0], uploads[1].rows["item_table"][0].tolist()
    places = [place for place, row in enumerate(row_R.tolist()) if row not in others]
    assert places  # the second client sends such rows as it got them
    for place in places:
        new, old = uploads[0].tensors["item_table"][0, place], server["item_table"][row_R[place]]
        assert torch.allclose(state.server["item_table"][row_R[place]], (5 * new + old) / 6, atol=1e-6)
