"""What every ID-based method owes to the runner, in every variant."""

import pytest

from fedecider.id_based import METHODS
from fedecider.testing import ID_CONTRACT, IdBench

SMALL = {"embedding_size": 8, "num_layers": 1, "batch_size": 3, "max_length": 5}
VARIANTS = {
    "fedsasrec": [
        {},
        {"share": "all", **SMALL},
        {"share": "layers", "weighting": "uniform", **SMALL},
        {"share": "nothing", **SMALL},
        {"moments": "fresh", **SMALL},
    ],
    "feddcsr": [
        {},
        {**SMALL, "num_heads": 1, "local_epochs": 1},
        {**SMALL, "variant": "code", "local_epochs": 1},
        {**SMALL, "pull_weight": 0.0, "sampled": False, "local_epochs": 1},
        {**SMALL, "share": "nothing", "kl_cap": 1.0, "local_epochs": 1},
    ],
    "fedgcdr": [
        {},
        {"source_rounds": 1, "target_rounds": 1, "embedding_size": 6, "batch_size": 3, "noise": "paper"},
        {"source_rounds": 1, "friends": "known", "embedding_size": 4, "num_layers": 1},
        {"source_rounds": 2, "target_rounds": 1, "noise": "none", "batch_size": 2},
        {"source_rounds": 1, "friends": "none"},
    ],
    "fedhcdr": [
        {},
        {"variant": "code", "embedding_size": 4, "batch_size": 3, "walk_steps": 3, "drop_share": 0.5},
        {"share": "filter", "embedding_size": 6, "dropout": 0.0, "contrast_weight": 0.0},
        {"share": "nothing", "batch_size": 5, "transfer_weight": 0.0},
    ],
}
FAST = 3
"""So many variants of a method are held to the contract in every run of the tests, the others among the slow ones."""
CASES = [
    pytest.param(name, variant, marks=[pytest.mark.slow] if number >= FAST else [])
    for name in METHODS
    for number, variant in enumerate(VARIANTS[name])
]
identify = lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value  # noqa: E731


@pytest.mark.parametrize("contract", ID_CONTRACT, ids=lambda part: part.__name__)
@pytest.mark.parametrize(("name", "variant"), CASES, ids=identify)
def test_it_keeps_the_contract(name, variant, contract):
    entry = METHODS[name]
    contract(IdBench(entry, entry.config(**variant)))
