"""FedEM as a whole: what its settings come to at their ends, its ablations, variants and the public code's way."""

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_training

from embedding_fr.local_only import local_only
from embedding_fr.merging import ADAPTER, LAST
from embedding_fr.methods.fedem_code import few_of
from embedding_fr.mixing import PERSONAL, Cohort

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


@pytest.mark.parametrize("config", [{}, {"aggregation": "mean"}, {"variant": "code"}])
def test_with_federation_off_there_is_nothing_to_merge(config):
    alone, _ = run(local_only(toy_method("fedmf"), toy_federation()))
    state, _ = run(local_only(toy_method("fedem", **config), toy_federation()))
    assert torch.allclose(state.local[LAST], alone.local["kept.item_table"], atol=1e-10)


@pytest.mark.parametrize("merging", ["SR", "EM"])
def test_without_similarity_everybody_gets_the_weighted_mean(merging):
    mean, _ = run(toy_method("fedem", merging=merging, aggregation="mean"))
    state, _ = run(toy_method("fedem", merging=merging, similarity_weight=0.0))
    assert torch.allclose(state.server["item_table"], mean.server["item_table"].expand(7, -1, -1), atol=1e-10)
    assert same(state.local, mean.local)


def test_similarity_makes_a_client_s_mix_its_own():
    state, _ = run(toy_method("fedem", merging="SR"), rounds=1)
    table = state.server["item_table"]
    assert bool(state.server[PERSONAL].all())
    assert all(not torch.allclose(table[0], table[client]) for client in range(1, 7))


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


def test_the_first_round_merges_nothing_and_adapters_stay():
    method = toy_method("fedem")
    start = {name: tensor.clone() for name, tensor in method.init()[1].items()}
    first, _ = run(method, rounds=1)
    plain, _ = run(toy_method("fedmf"), rounds=1)
    assert torch.equal(first.local[ADAPTER], start[ADAPTER])
    assert torch.allclose(first.local["user"], plain.local["user"])
    second, records = run(method, rounds=2)
    assert not torch.equal(second.local[ADAPTER], start[ADAPTER])
    assert all(0.0 < client["rho"] < 1.0 for client in records[1]["clients"])


def test_variants_score_the_merge_and_the_own_table():
    """The merge lies between the own table and the received one: with rho 0 the variants agree, with 1 they do not."""
    for rho, agree in ((0.0, True), (1.0, False)):
        method = toy_method("fedem", merging="SM", rho=rho)
        assert method.variants == ("merged", "local")
        _, records = run(method)
        valid = records[-1]["valid"]
        assert (valid["merged"] == valid["local"]) == agree
    assert toy_method("fedem", merging="SR").variants == ("global",)


def test_uploads_are_whole_tables_and_adapters_stay_at_home():
    _, records = run(toy_method("fedem"), rounds=1)
    (group,) = records[0]["traffic"]
    assert group["up"] == group["down"] == {"item_table": 14 * 4 * 8}


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


def test_a_few_of_the_cohort_are_drawn_by_client_number():
    table = torch.arange(6.0)[:, None]
    cohort = Cohort(
        torch.tensor([5, 3, 4, 0, 1, 2]), torch.tensor([0.3, 0.1, 0.2, 0.1, 0.2, 0.1]), table, torch.zeros(1)
    )
    order = cohort.client_V.argsort()
    other = Cohort(cohort.client_V[order], cohort.share_V[order], table[order], torch.zeros(1))
    left, right = few_of(cohort, 0.5, 1, 2), few_of(other, 0.5, 1, 2)
    assert len(left.client_V) == 3
    assert all(torch.equal(one, same) for one, same in zip(left, right, strict=True))
    assert float(left.share_V.sum()) == pytest.approx(1.0)
    assert len(few_of(cohort, 0.01, 1, 2).client_V) == 1
    assert not torch.equal(few_of(cohort, 0.5, 1, 3).client_V, left.client_V)
