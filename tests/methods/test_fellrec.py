"""FellRec: weights by hand, its degenerate cases, and what is remembered of absent clients."""

import math

import pytest
import torch
from toy_recommender import blocks, run, toy_recommender

from fedecider.methods.fellrec import FellrecConfig, fellrec, mixing_weights
from fedecider.methods.local import LocalConfig, local
from fedecider.methods.personal_average import cosines, exact_sum, mixed_row, module_products
from fedecider.models.adapters import without_prefix

COSINE = torch.tensor([[1.0, 0.2, -0.6], [0.2, 1.0, 0.8], [-0.6, 0.8, 1.0]], dtype=torch.float64)
LOSS = torch.tensor([1.0, 1.05, 0.9])


def test_weights_by_hand():
    """Losses over the temperature are 20, 21 and 18; S of client 0 is 1, 0.6 and 0.2."""
    terms = [math.exp(-1.0), 1.0, math.exp(-3.0)]
    share = [term / sum(terms) for term in terms]
    warm = [math.tanh(0.7 / part) for part in share]
    found = mixing_weights(COSINE, LOSS, 1, FellrecConfig())
    expected = [
        [1.0, 0.6 * warm[0], 0.2 * warm[0]],
        [0.6 * warm[1], 1.0, 0.9 * warm[1]],
        [0.2 * warm[2], 0.9 * warm[2], 1.0],
    ]
    expected = torch.tensor([[value / sum(row) for value in row] for row in expected], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert warm[1] < 0.8 < 0.9 < warm[0] < warm[2]


def test_paper_and_code_agree_at_beta_one():
    for round in (1, 2, 7):
        paper, code = (mixing_weights(COSINE, LOSS, round, FellrecConfig(exponent=name)) for name in ("paper", "code"))
        assert torch.equal(paper, code)


def test_weights_are_convex_and_do_not_depend_on_the_order():
    generator = torch.Generator().manual_seed(5)
    for num_clients, round in ((2, 1), (5, 3), (7, 40)):
        vector_KN = torch.randn(num_clients, 4, generator=generator, dtype=torch.float64)
        cosine_KK = cosines(vector_KN @ vector_KN.T)
        loss_K = torch.rand(num_clients, generator=generator) * 9.0
        weight_KK = mixing_weights(cosine_KK, loss_K, round, FellrecConfig())
        assert (weight_KK >= 0.0).all()
        torch.testing.assert_close(weight_KK.sum(1), torch.ones(num_clients, dtype=torch.float64))
        order = torch.randperm(num_clients, generator=generator)
        moved = mixing_weights(cosine_KK[order][:, order], loss_K[order], round, FellrecConfig())
        torch.testing.assert_close(moved, weight_KK[order][:, order], rtol=1e-13, atol=1e-15)


def test_nobody_listening_is_local_training_bit_for_bit():
    state, _ = run(fellrec(toy_recommender(), FellrecConfig(a=0.0)), 3, 3)
    alone, _ = run(local(toy_recommender(), LocalConfig()), 3, 3)
    assert all(torch.equal(tensor, alone.local[f"local.now.{key[4:]}"]) for key, tensor in state.local.items())
    assert torch.equal(state.server["weights"], torch.eye(3, dtype=torch.float64))
    gap = torch.tensor([0.0, 50.0, 90.0])  # shares underflow: 0 / 0 must not turn up
    assert torch.equal(mixing_weights(COSINE, gap, 25, FellrecConfig(a=0.0)), torch.eye(3, dtype=torch.float64))


def test_all_alike_and_listening_fully_is_the_uniform_mean():
    """Positive multiples of one another have cosine 1, but are not the same."""
    scale_K = torch.tensor([0.5, 1.0, 4.0])[:, None, None]
    rows = {"x.lora_a": scale_K * torch.tensor([[1.0, -2.0]]), "x.lora_b": scale_K * torch.tensor([[3.0], [0.5]])}
    cosine_KK = cosines(exact_sum(module_products(rows).movedim(0, -1)))
    weight_KK = mixing_weights(cosine_KK, LOSS, 1, FellrecConfig(a=1e6))
    torch.testing.assert_close(weight_KK, torch.full((3, 3), 1 / 3, dtype=torch.float64))
    for client in range(3):
        mixed = mixed_row(rows, weight_KK[client], client, {})
        for key, tensor in mixed.items():
            torch.testing.assert_close(tensor, rows[key].mean(0))


def test_all_averages_come_from_the_uploads():
    config = FellrecConfig(a=0.4, temperature=2.0)
    method = fellrec(toy_recommender(), config)
    state, records = run(method, 3, 2)
    own, loss_K = without_prefix(state.local, "own"), torch.tensor([log["loss"] for log in records[1]["clients"]])
    flat_KN = torch.cat([own[key].flatten(1) for key in own], 1).double()
    cosine_KK = torch.nn.functional.cosine_similarity(flat_KN[:, None], flat_KN[None], dim=2)
    weight_KK = mixing_weights(cosine_KK, loss_K, 2, config)
    torch.testing.assert_close(state.server["weights"], weight_KK)
    assert (weight_KK - weight_KK.T).abs().max() > 1e-3
    for clients in (torch.tensor([0, 1, 2]), torch.tensor([2, 0]), torch.tensor([1])):
        download = method.broadcast(3, state.server, clients)
        assert not download.shared
        for key, tensor in own.items():
            mixed = torch.tensordot(weight_KK, tensor.double(), 1)[clients].float()
            torch.testing.assert_close(download.per_client[key], mixed, rtol=1e-6, atol=1e-7)
    assert records[1]["valid"]["aggregated"] != records[1]["valid"]["local"]


def test_absent_clients_keep_their_last_upload_and_loss():
    method = fellrec(toy_recommender(), FellrecConfig())
    before, _ = run(method, 3, 1)
    block = blocks(3)[1]
    own = {key: tensor[block.clients] for key, tensor in before.local.items()}
    upload, _, logs = method.client_update(2, method.broadcast(2, before.server, block.clients), own, block)
    after = method.server_aggregate(2, before.server, iter([upload]))
    for key, tensor in upload.tensors.items():
        assert torch.equal(after[key][1], tensor[0])
        assert torch.equal(after[key][[0, 2]], before.server[key][[0, 2]])
    assert float(upload.tensors["loss"]) == pytest.approx(logs[0]["loss"])
    assert not torch.equal(after["weights"], before.server["weights"])
    broken = upload._replace(tensors={**upload.tensors, "loss": torch.tensor([float("inf")])})
    assert method.server_aggregate(2, before.server, iter([broken])) is before.server
