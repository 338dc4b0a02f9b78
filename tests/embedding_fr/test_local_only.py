"""Federation off, for every method: nobody learns from anybody, and a client alone trains as in a federation of one."""

import pytest
import torch
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.local_only import KEPT, local_only
from embedding_fr.methods import METHODS

NO_LOCAL_MODEL = {"fedease", "fednear", "fedcia"}  # clients upload histories, which only a server turns into a model
MADE_BY_SERVER = {"category"}
"""What clients receive and never send (CoFedRec): with federation off there is none."""
SENSIBLE = [name for name in METHODS if name not in NO_LOCAL_MODEL]


def off(name, federation=None, **config):
    federation = federation or toy_federation()
    return local_only(toy_method(name, federation, **config), federation)


@pytest.mark.parametrize("name", [name for name in SENSIBLE if name != "ifedrec"])  # its server trains a network too
@pytest.mark.usefixtures("double")
def test_with_one_client_federation_off_is_federation_on(name):
    federation, population = toy_federation(num_clients=1), toy_population(sequences=[SEQUENCES[2]])
    method = toy_method(name, federation)
    state, records = run(method, population, rounds=2)
    alone, alone_records = run(local_only(method, federation), population, rounds=2)
    for key, tensor in state.local.items():
        assert torch.allclose(alone.local[key], tensor, atol=1e-10), key
    received = method.broadcast(3, state.server, torch.tensor([0]))
    for key in {key.removeprefix(KEPT) for key in alone.local if key.startswith(KEPT)} - MADE_BY_SERVER:
        tensor = received.per_client[key] if key in received.per_client else received.shared[key][None]
        assert torch.allclose(alone.local[KEPT + key], tensor, atol=1e-10), key
    assert [record["valid"] for record in records] == [record["valid"] for record in alone_records]


@pytest.mark.parametrize("name", SENSIBLE)
def test_the_data_of_one_client_reach_the_others_with_federation_on(name):
    """With federation off they do not: `embedding_fr.testing.contract.federation_off`."""
    changed = [*SEQUENCES[:3], [9, 0, 13, 12], *SEQUENCES[4:]]
    others = torch.tensor([client for client in range(7) if client != 3])
    everybody = {"mixed_share": 1.0} if name == "fedca" else {}  # which mixes one of seven by itself
    one, _ = run(toy_method(name, **everybody), rounds=2, block_clients=1)
    other, _ = run(toy_method(name, **everybody), toy_population(sequences=changed), rounds=2, block_clients=1)
    left, right = ({key: tensor[others] for key, tensor in state.local.items()} for state in (one, other))
    if not left:  # FedFast: the server keeps what is theirs
        left, right = (toy_method(name).broadcast(3, state.server, others).per_client for state in (one, other))
    assert any(not torch.equal(left[key], right[key]) for key in left)


def test_a_client_starts_from_its_own_last_upload():
    """FedMF: the second round of a client is that of a client who is sent the table that it uploaded in the first."""
    federation, training = toy_federation(), toy_training("fedmf")
    method, population = toy_method("fedmf", federation, training), toy_population()
    start = method.init()[0]["item_table"]
    first, _ = run(local_only(method, federation), population, rounds=1)
    kept = first.local[KEPT + "item_table"]
    assert kept.shape == (7, NUM_ITEMS, training.embedding_size)
    moved_CI = (kept != start).any(2)
    assert moved_CI.any(1).all()
    assert not moved_CI.all()
    for client, sequence in enumerate(SEQUENCES):
        assert moved_CI[client, sequence[:-2]].all()
    second, _ = run(local_only(method, federation), population, rounds=2)
    own = {"user": first.local["user"]}
    again, _ = run(
        method._replace(
            init=lambda: ({"item_table": start}, own),
            broadcast=lambda round, server, clients: method.broadcast(round, server, clients)._replace(
                shared={}, per_client={"item_table": kept[clients]}
            ),
            # Draws depend on the round's number: the only round of this run is the second.
            client_update=lambda round, *rest: method.client_update(2, *rest),
        ),
        population,
        rounds=1,
    )
    assert torch.equal(again.local["user"], second.local["user"])
