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
        {**SMALL, "variant": "code"},
        {**SMALL, "pull_weight": 0.0, "sampled": False},
        {**SMALL, "share": "nothing", "kl_cap": 1.0},
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
CASES = [(name, variant) for name in METHODS for variant in VARIANTS[name]]
identify = lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value  # noqa: E731


@pytest.mark.parametrize("contract", ID_CONTRACT, ids=lambda part: part.__name__)
@pytest.mark.parametrize(("name", "variant"), CASES, ids=identify)
def test_it_keeps_the_contract(name, variant, contract):
    entry = METHODS[name]
    contract(IdBench(entry, entry.config(**variant)))
