"""FedEM as a whole: what its settings come to at their ends, its ablations, variants and the public code's way."""

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_training

from embedding_fr.local_only import local_only
from embedding_fr.merging import LAST
from embedding_fr.mixing import PERSONAL

pytestmark = pytest.mark.usefixtures("double")


def same(left, right, names=None, tolerance=1e-10):
    return all(torch.allclose(left[name], right[name], atol=tolerance) for name in names or right)


@pytest.mark.parametrize("config", [{"merging": "SR"}, {"merging": "SM", "rho": 1.0}])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_taking_the_received_table_and_averaging_is_fedmf(config, participation):
    plain, _ = run(toy_method("fedmf"), participation=participation)
    state, _ = run(toy_method("fedem", aggregation="mean", **config), participation=participation)
    assert same(state.server, plain.server)
    assert same(state.local, plain.local)


@pytest.mark.parametrize("aggregation", ["mean", "similarity"])
def test_keeping_the_own_table_is_training_alone(aggregation):
    alone, _ = run(local_only(toy_method("fedmf"), toy_federation()))
    state, _ = run(toy_method("fedem", merging="SM", rho=0.0, aggregation=aggregation))
    assert same(state.local, alone.local, ["user"])
    assert torch.allclose(state.local[LAST], alone.local["kept.item_table"], atol=1e-10)


@pytest.mark.parametrize("merging", ["SR", "EM"])
def test_without_similarity_everybody_gets_the_weighted_mean(merging):
    mean, _ = run(toy_method("fedem", merging=merging, aggregation="mean"))
    state, _ = run(toy_method("fedem", merging=merging, similarity_weight=0.0))
    assert torch.allclose(state.server["item_table"], mean.server["item_table"].expand(7, -1, -1), atol=1e-10)
    assert same(state.local, mean.local)


@pytest.mark.parametrize("scheme", ["EM", "DM", "SM"])
def test_the_plug_in_on_fedmf_is_fedem_with_averaging_when_there_is_one_epoch(scheme):
    training = toy_training("fedem", local_epochs=1)
    state, records = run(toy_method("fedem", training=training, merging=scheme, aggregation="mean"))
    wrapped, others = run(toy_method("fedmf_em", training=training, scheme=scheme))
    assert same(wrapped.server, state.server)
    assert same(wrapped.local, state.local)
    for one, other in zip(records, others, strict=True):
        assert one["valid"] == other["valid"]
        assert [client["rho"] for client in one["clients"]] == pytest.approx([c["rho"] for c in other["clients"]])


def test_variants_score_the_merge_and_the_own_table():
    """The merge lies between the own table and the received one: with rho 0 the variants agree, with 1 they do not."""
    for rho, agree in ((0.0, True), (1.0, False)):
        method = toy_method("fedem", merging="SM", rho=rho)
        assert method.variants == ("merged", "local")
        _, records = run(method)
        valid = records[-1]["valid"]
        assert (valid["merged"] == valid["local"]) == agree
    assert toy_method("fedem", merging="SR").variants == ("global",)


def test_the_public_code_merges_only_clients_that_were_mixed():
    method = toy_method("fedem", variant="code", mixed_share=0.5)
    state, records = run(method, rounds=2)
    assert int(state.server[PERSONAL].sum()) == 3  # of seven, rounded down
    assert [client["rho"] for client in records[0]["clients"]] == [0.0] * 7
    assert sum(client["rho"] > 0.0 for client in records[1]["clients"]) == 3
    alone, _ = run(local_only(toy_method("fedmf"), toy_federation()), rounds=2)
    mixed = {client["client"] for client in records[1]["clients"] if client["rho"] > 0.0}
    for client in range(7):
        equal = torch.allclose(state.local[LAST][client], alone.local["kept.item_table"][client], atol=1e-9)
        assert equal == (client not in mixed)
