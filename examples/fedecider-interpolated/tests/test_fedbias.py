from collections.abc import Sequence

import pytest
import torch
from fedecider_interpolated.fedbias import METHOD, FedbiasConfig, fedbias

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedmf import FedmfConfig, fedmf
from embedding_fr.testing import EmbeddingBench, check_reference
from embedding_fr.testing.contract import run, tiny_federation, tiny_training
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree
from fedecider.testing import check_method


def one_by_one(federation: Federation, training: EmbeddingTraining, config: FedbiasConfig) -> Reference:
    """Score ``p_u . q_i + b_i``; table and biases are averaged, the user embedding stays."""
    rates = {"user": training.learning_rate, "item_table": training.item_rate, "item_bias": config.bias_learning_rate}

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        optimiser = torch.optim.Adam(
            [{"params": [theta[name]], "lr": rate} for name, rate in rates.items()], weight_decay=training.weight_decay
        )
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                logit_B = theta["item_table"][item_B] @ theta["user"] + theta["item_bias"][item_B, 0]
                step(optimiser, bce(logit_B, label_B))
        return {name: theta[name] for name in received}, {"user": theta["user"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, weights)

    return Reference(client, server)


def test_it_keeps_the_contract():
    check_method(METHOD)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_batched_method_equals_the_loop_over_users(participation):
    check_reference(EmbeddingBench(METHOD), one_by_one, participation)


def test_without_a_learning_rate_for_the_biases_it_is_fedmf():
    training = tiny_training(METHOD)
    found, _ = run(fedbias(tiny_federation(), training, FedbiasConfig(bias_learning_rate=0.0)))
    expected, _ = run(fedmf(tiny_federation(), training, FedmfConfig()))
    assert not found.server["item_bias"].any()
    assert torch.allclose(found.server["item_table"], expected.server["item_table"], atol=1e-4)
    learned, _ = run(fedbias(tiny_federation(), training, FedbiasConfig(bias_learning_rate=0.1)))
    assert learned.server["item_bias"].std() > 0.01


def test_a_negative_learning_rate_is_an_error():
    with pytest.raises(ValueError, match=r"got bias_learning_rate -0\.1, expected 0 or more"):
        FedbiasConfig(bias_learning_rate=-0.1)
