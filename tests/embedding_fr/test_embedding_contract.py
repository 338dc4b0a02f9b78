"""What every method of the embedding track owes to the shared runner, in every variant."""

import dataclasses

import pytest
import torch
from toy_federation import NUM_ITEMS, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.methods import METHODS
from embedding_fr.reference import REFERENCES
from embedding_fr.reference.loop import run_reference
from fedecider.evaluation.protocols import PROTOCOLS
from fedecider.federation.state import is_mapped

VARIANTS: dict[str, list[dict]] = {
    "fedmf": [{"weighting": "uniform"}],
    "pfedclr": [{"variant": "cf"}, {"variant": "af"}, {"rank": 3, "buffer_learning_rate": 0.05}],
    "fedrap": [
        {"tables": "common"},
        {"tables": "personal"},
        {"sparsity": "none", "curriculum": "sin"},
        {"sparsity": "l2", "curriculum": "frac", "grad_clip": 0.3},
        {"distance": "bounded", "curriculum": "fixed", "keep_uploaded": True},
        {"encoding": "sparse", "sparsity_weight": 2.0},
        {"variant": "code", "grad_clip": 0.1, "distance_weight": 0.7, "sparsity_weight": 0.4},
        {"variant": "code", "tables": "common", "sparsity": "l2"},
        {"variant": "code", "distance": "bounded", "curriculum": "tanh", "sparsity": "none"},
    ],
    "fedncf": [{"hidden_sizes": ""}],
    "pfedrec": [{"variant": "code"}],
    "gpfedrec": [
        {"variant": "code", "graph_weight": 0.05, "hidden_sizes": ""},
        {"num_neighbours": 3, "graph_layers": 2, "graph_weight": 0.1},
        {"threshold": 1.3, "graph_weight": 0.0},
    ],
    "fedem": [
        {"merging": "DM", "similarity_weight": 1.1},
        {"merging": "SM", "rho": 0.3},
        {"merging": "SR"},
        {"merging": "EM", "aggregation": "mean", "adapter_layers": "", "adapter_learning_rate": 0.03},
        {"variant": "code", "mixed_share": 0.7, "adapter_learning_rate": 0.03},
    ],
    "fedrecgel": [
        {"variant": "code", "private_radius": 0.2, "server_learning_rate": 0.1},
        {"private_radius": 0.0, "hidden_sizes": "5"},
        {"shared_radius": 0.0},
    ],
    "fedmf_em": [{"scheme": "DM"}, {"scheme": "SM", "rho": 0.3}],
    "fedncf_em": [{"scheme": "DM", "adapter_learning_rate": 0.1}],
    "pfedrec_em": [{"scheme": "SM"}],
    "gpfedrec_em": [{"adapter_layers": ""}],
    "fedrap_em": [{"scheme": "DM"}],
}
CASES = [(name, variant) for name in METHODS for variant in ({}, *VARIANTS.get(name, []))]
COMPILED = ("fedmf", "fedncf", "pfedrec", "pfedclr")
"""Methods with compiled local training."""
REFERENCE_CASES = [(name, variant, {}) for name, variant in CASES if name in REFERENCES]
REFERENCE_CASES += [(name, variant, {"compiled": False}) for name, variant in CASES if name in COMPILED]
identify = lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value  # noqa: E731


@pytest.fixture
def double():
    """Adam turns rounding errors of gradients near zero into steps; double precision leaves only real differences."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape, name
        assert torch.allclose(left[name], right[name], rtol=tolerance, atol=tolerance), (
            f"{name}: largest difference {float((left[name] - right[name]).abs().max())}"
        )


@pytest.mark.parametrize(("name", "variant", "changes"), REFERENCE_CASES, ids=identify)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.usefixtures("double")
def test_the_batched_runtime_equals_the_per_user_loop(name, variant, changes, participation):
    federation, training, population = toy_federation(), toy_training(name, **changes), toy_population()
    method = toy_method(name, federation, training, **variant)
    reference = REFERENCES[name](federation, training, METHODS[name].config(**variant))
    server, local = run_reference(method, reference, federation, training, population, 3, participation)
    state, _ = run(method, population, 3, participation=participation)
    close(state.server, server, 1e-7)
    close(state.local, local, 1e-7)
    start = method.init()
    moved = [
        not torch.equal(tensor, start[side][key])
        for side, tree in enumerate((state.server, state.local))
        for key, tensor in tree.items()
        if tensor.shape == start[side][key].shape
    ]
    assert any(moved)


@pytest.mark.parametrize(("name", "variant"), CASES, ids=identify)
@pytest.mark.usefixtures("double")
def test_block_size_does_not_matter(name, variant):
    method = toy_method(name, **variant)
    alone, first = run(method, block_clients=1)
    together, second = run(method, block_clients=7)
    close(alone.server, together.server, 1e-9)
    close(alone.local, together.local, 1e-9)
    for one, other in zip(first, second, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-6)
        assert one["traffic"] == other["traffic"]
        for left, right in zip(one["clients"], other["clients"], strict=True):
            assert left["client"] == right["client"]
            assert left.keys() == right.keys()
            assert list(left.values()) == pytest.approx(list(right.values()), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("name", "variant"), CASES, ids=identify)
def test_same_seed_same_bits_another_seed_other_ones(name, variant):
    first, _ = run(toy_method(name, **variant))
    with torch.random.fork_rng():
        torch.manual_seed(99)  # the global generator has no influence
        second, _ = run(toy_method(name, **variant))
    for left, right in ((first.server, second.server), (first.local, second.local)):
        assert all(torch.equal(left[key], right[key]) for key in left)
    if name in REFERENCES:  # the others solve, and draw nothing
        other, _ = run(toy_method(name, toy_federation(seed=1), **variant), toy_population(seed=1), seed=1)
        moved = [key for key in first.server if not torch.equal(first.server[key], other.server[key])]
        moved += [key for key in first.local if not torch.equal(first.local[key], other.local[key])]
        assert moved


@pytest.mark.parametrize(("name", "variant"), CASES, ids=identify)
def test_personal_tables_in_files_give_the_same_bits(name, variant):
    """With no memory for them every personal table is mapped from a file, and read when its client is at work."""
    states = []
    for table_bytes in (1 << 20, 1):
        method = toy_method(name, toy_federation()._replace(table_bytes=table_bytes), **variant)
        states.append(run(method, participation=0.5)[0])
    memory, mapped = states
    assert not any(is_mapped(tensor) for tensor in memory.local.values())
    large = {key for key, one in memory.local.items() if one.dim() == 3 and one.shape[1] == NUM_ITEMS}
    assert {key for key, one in mapped.local.items() if is_mapped(one)} == large
    for left, right in ((memory.server, mapped.server), (memory.local, mapped.local)):
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", METHODS)
def test_absent_clients_are_untouched(name):
    method = toy_method(name)
    before = {key: tensor.clone() for key, tensor in method.init()[1].items()}
    after, records = run(method, rounds=1, participation=0.3)
    present = {client["client"] for client in records[0]["clients"]}
    assert len(present) == 3
    for key, tensor in after.local.items():
        for client in set(range(7)) - present:
            assert torch.equal(tensor[client], before[key][client]), (key, client)


@pytest.mark.parametrize("protocol", ["strict", "paper"])
@pytest.mark.parametrize("name", METHODS)
def test_held_out_items_reach_training_under_paper_only(name, protocol):
    """Swapping a client's two held-out items with other unseen ones changes nothing that is trained under strict."""
    chosen = dataclasses.replace(PROTOCOLS[protocol], num_sampled=None)
    sequences = [[3, 1, 4, 0, 5, 9, 2], [2, 7, 8, 0, 1], [6, 0, 13, 11, 3]]
    other = [[3, 1, 4, 0, 5, 7, 10], *sequences[1:]]
    federation = toy_federation(chosen, num_clients=3)
    states = [run(toy_method(name, federation), toy_population(chosen, s), 2)[0] for s in (sequences, other)]
    same = all(torch.equal(tensor, states[1].server[key]) for key, tensor in states[0].server.items()) and all(
        torch.equal(tensor, states[1].local[key]) for key, tensor in states[0].local.items()
    )
    assert same == (protocol == "strict" or not METHODS[name].negatives)


NOT_ON_THE_BOARD = {"fedrap_em"}  # FedRAP's personal table remembers each client's own items; no setting leaves it out


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NOT_ON_THE_BOARD])
def test_checkerboard(name):
    """Users like all items of their parity but one: that one must come first among the unseen."""
    num_items = 12
    sequences = []
    for user in range(24):
        liked = [item for item in range(num_items) if item % 2 == user % 2]
        turn = user // 2 % len(liked)
        order = liked[turn:] + liked[:turn]
        sequences.append(order)
    population = toy_population(sequences=sequences, num_items=num_items)
    federation = toy_federation(num_clients=24, num_items=num_items)
    base = name.removesuffix("_em")
    changes = CHECKERBOARD.get(name, CHECKERBOARD.get(base, {}))
    training = toy_training(name, embedding_size=8, batch_size=64, **changes)
    method = toy_method(name, federation, training, **CHECKERBOARD_CONFIG.get(name, {}))
    _, records = run(method, population, CHECKERBOARD_ROUNDS.get(base, 12), block_clients=8)
    best = max(record["valid"][view][0]["ndcg@10"] for record in records for view in record["valid"])
    assert best > 0.75, best  # the two held-out items share the first two places; chance is 0.34


CHECKERBOARD: dict[str, dict] = {
    "fedncf_em": {"learning_rate": 0.1},
    "fedncf": {"learning_rate": 0.1},
    "pfedclr": {"learning_rate": 0.03},
    "fedrecgel": {"learning_rate": 0.1},
    "fedrap": {"learning_rate": 0.2},
}
CHECKERBOARD_CONFIG: dict[str, dict] = {
    "pfedclr": {"buffer_learning_rate": 0.0},  # the buffer remembers each client's own items: nothing is left to share
    "fedrap": {"tables": "common"},  # so does the personal table
    # An adapter that learns keeps the own table, whose training loss is the lower one: nothing is shared.
    "fedem": {"merging": "SM", "rho": 0.9},
    **{name: {"scheme": "SM", "rho": 0.9} for name, method in METHODS.items() if method.plug_in},
}
CHECKERBOARD_ROUNDS: dict[str, int] = {"pfedclr": 30, "fedrap": 16}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_local_is_uploaded_and_every_upload_is_counted(name):
    method = toy_method(name)
    _, records = run(method, rounds=1)
    for group in records[0]["traffic"]:
        assert not set(group["up"]) & set(method.init()[1])
        assert sum(group["up"].values()) > 0
