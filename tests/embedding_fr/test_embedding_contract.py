"""What every method of the cross-device track owes to the runner, in every variant: `fedecider.testing` and more."""

import functools
from contextlib import nullcontext

import pytest
from references import REFERENCES
from slow import fast_where
from toy_federation import run, stacked, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.methods import METHODS
from embedding_fr.testing import EMBEDDING_CONTRACT, EmbeddingBench, check_reference

pytestmark = pytest.mark.whole

VARIANTS: dict[str, list[dict]] = {
    "colr": [{"rank": 1}, {"rank": 2, "mean": "clients"}],
    "fedcia": [{"low_pass": "server"}, {"low_pass": "server", "num_vectors": 3}],
    "fedease": [{"precision": "float32"}, {"precision": "float32", "top_k": 4}],
    "fednear": [{"precision": "float32", "top_k": 4}],
    "fedmf": [{"weighting": "uniform"}],
    "pfedclr": [{"variant": "cf"}, {"variant": "af"}, {"rank": 3, "buffer_learning_rate": 0.05}],
    "fedrap": [
        {"tables": "common"},
        {"tables": "personal"},
        {"sparsity": "none", "curriculum": "sin"},
        {"sparsity": "l2", "curriculum": "frac"},
        {"distance": "bounded", "curriculum": "fixed"},
        {"variant": "code", "distance_weight": 0.7, "sparsity_weight": 0.4},
        {"variant": "code", "tables": "common", "sparsity": "l2"},
        {"variant": "code", "distance": "bounded", "curriculum": "tanh", "sparsity": "none"},
    ],
    "fedncf": [{"hidden_sizes": ""}],
    "pfedrec": [{"variant": "code"}],
    "gpfedrec": [
        {"variant": "code", "graph_weight": 0.05, "hidden_sizes": ""},
        {"num_neighbours": 3, "graph_weight": 0.1},
        {"threshold": 1.3, "graph_weight": 0.0},
    ],
    "fedem": [
        {"merging": "DM", "similarity_weight": 1.1},
        {"merging": "SM", "rho": 0.3},
        {"merging": "SR"},
        {"merging": "EM", "aggregation": "mean", "adapter_layers": "", "adapter_learning_rate": 0.03},
        {"variant": "code", "mixed_share": 0.7, "adapter_learning_rate": 0.03},
    ],
    "fedca": [
        {"mixed_share": 1.0, "own_share": 0.2, "num_components": 2},
        {"mixed_share": 0.7, "own_share": 0.0, "similarity_weight": 0.0, "complement_weight": 1.5},
    ],
    "pfedgraph": [
        {"size_weight": 0.2, "same_above": 0.3},
    ],
    "fedrecgel": [
        {"variant": "code", "private_radius": 0.2, "server_learning_rate": 0.1},
        {"private_radius": 0.0, "hidden_sizes": "5"},
        {"shared_radius": 0.0},
    ],
    "fedfast": [
        {"num_clusters": 2, "follow": 0.5, "follow_decay": 0.0},
        {"num_clusters": 1, "draw": "random", "follow": 0.0},
    ],
    "cofedrec": [
        {"num_categories": 3, "num_anchors": 9, "contrast_weight": 0.05},
        {"num_categories": 4, "contrast_weight": 0.02, "group": "random", "temperature": 0.2},
        {"group": "all", "num_categories": 2, "num_anchors": 0, "contrast_weight": 0.001},
        {"group": "core", "contrast_weight": 0.0},
    ],
    "perfedrec": [
        {"num_clusters": 2, "num_layers": 1, "draw": "random", "scores": "ego"},
        {"num_clusters": 7, "num_layers": 0},
        {"num_clusters": 3, "num_layers": 2, "target_edge": "in"},
        {"variant": "code", "num_clusters": 3, "scores": "ego", "target_edge": "in"},
        {"variant": "code", "num_clusters": 2},
    ],
    "feddae": [{"num_layers": 1, "dropout": 0.0}, {"num_layers": 2, "kl_weight": 0.0, "dropout": 0.3}],
    "ifedrec": [
        {"alignment_weight": 0.3, "attribute_layers": "5", "server_epochs": 3},
        {"backbone": "fedncf", "hidden_sizes": "6", "alignment_weight": 0.05},
        {"backbone": "fedncf", "hidden_sizes": "", "alignment_weight": 0.0},
    ],
    "fedmf_em": [{"scheme": "DM"}, {"scheme": "SM", "rho": 0.3}],
    "fedncf_em": [{"scheme": "DM", "adapter_learning_rate": 0.1}],
    "pfedrec_em": [{"scheme": "SM"}],
    "gpfedrec_em": [{"adapter_layers": ""}],
    "fedrap_em": [{"scheme": "DM"}],
}
CASES = [(name, variant) for name in METHODS for variant in ({}, *VARIANTS.get(name, []))]
COMPILED = ("fedmf", "pfedrec", "pfedclr", "fedca", "pfedgraph", "fedem")
"""Methods with compiled local training."""
WRAPPED = ("fedncf_em", "pfedrec_em", "gpfedrec_em", "fedrap_em")
"""Methods of others within FedEM's server; fedmf_em stands for them in the fast contract."""
OWN_SETTINGS_FAST = fast_where(lambda case: not case[1] and case[0] not in WRAPPED, CASES)
"""In the fast tests the whole contract is asked of a method as it is set by itself, and of its options that the batched
runtime equals the loop."""
REFERENCE_CASES = [
    (name, variant, nullcontext, participation)
    for name, variant in CASES
    if name in REFERENCES
    for participation in (1.0, 0.5)
]
REFERENCE_CASES += [
    (name, variant, stacked, participation)
    for name, variant in CASES
    if name in COMPILED
    for participation in (1.0, 0.5)
]


def identify(value):
    return (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else getattr(value, "__name__", value)
    )


@functools.cache
def bench(name, variant):
    """Runs that several parts of the contract compare with are made once."""
    return EmbeddingBench(METHODS[name], METHODS[name].config(**dict(variant)))


@pytest.mark.parametrize("part", EMBEDDING_CONTRACT, ids=lambda part: part.__name__)
@pytest.mark.parametrize(("name", "variant"), OWN_SETTINGS_FAST, ids=identify)
def test_contract(name, variant, part):
    part(bench(name, tuple(variant.items())))


@pytest.mark.parametrize(
    ("name", "variant", "runtime", "participation"),
    fast_where(lambda case: not case[1] or (case[2] is nullcontext and case[3] < 1), REFERENCE_CASES),
    ids=identify,
)
def test_the_batched_runtime_equals_the_per_user_loop(name, variant, runtime, participation):
    with runtime():
        check_reference(bench(name, tuple(variant.items())), REFERENCES[name], participation)


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
    best = max(record["valid"][variant][0]["ndcg@10"] for record in records for variant in record["valid"])
    assert best > 0.75, best  # the two held-out items share the first two places; chance is 0.34


CHECKERBOARD: dict[str, dict] = {
    "fedca": {"learning_rate": 0.1},
    "feddae": {"learning_rate": 0.05},
    "fedncf_em": {"learning_rate": 0.1},
    "fedncf": {"learning_rate": 0.1},
    "pfedclr": {"learning_rate": 0.03},
    "fedrecgel": {"learning_rate": 0.1},
    "fedrap": {"learning_rate": 0.2},
}
CHECKERBOARD_CONFIG: dict[str, dict] = {
    "pfedclr": {"buffer_learning_rate": 0.0},  # the buffer remembers each client's own items: nothing is left to share
    "fedca": {"own_share": 0.0, "mixed_share": 1.0},
    "fedrap": {"tables": "common"},  # so does the personal table
    "cofedrec": {"num_categories": 2},  # the two kinds of items
    "ifedrec": {"server_epochs": 20},  # twelve steps of the network teach it nothing
    # An adapter that learns keeps the own table, whose training loss is the lower one: nothing is shared.
    "fedem": {"merging": "SM", "rho": 0.9},
    **{name: {"scheme": "SM", "rho": 0.9} for name, method in METHODS.items() if method.plug_in},
}
CHECKERBOARD_ROUNDS: dict[str, int] = {"pfedclr": 30, "fedrap": 16, "cofedrec": 20, "ifedrec": 16}
