"""What every ID-based method owes to the runner, in every variant."""

import functools

import pytest
from slow import slow

from fedecider.id_based import METHODS
from fedecider.testing.id_contract import ID_CONTRACT, IdBench

pytestmark = pytest.mark.whole

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
        {"local_epochs": 1},
        {},
        {**SMALL, "num_heads": 1, "local_epochs": 1},
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
        {"embedding_size": 4, "batch_size": 3, "walk_steps": 3, "drop_share": 0.5},
        {"share": "filter", "embedding_size": 6, "dropout": 0.0, "contrast_weight": 0.0},
        {"share": "nothing", "batch_size": 5, "transfer_weight": 0.0},
    ],
    "pfcr": [
        {"text_encoder": "tfidf", "federated_rounds": 1, "num_codes": 2, "num_centroids": 3, **SMALL},
        {"text_encoder": "tfidf", "share": "all", "num_prompts": 3, "dropout": 0.0, **SMALL},
        {"text_encoder": "tfidf", "share": "nothing", "federated_rounds": 2, **SMALL},
    ],
}
"""The first one of a method is held to the contract in every run of the tests, the others among the slow ones."""
CASES = [
    slow(name, variant) if number else (name, variant)
    for name in METHODS
    for number, variant in enumerate(VARIANTS[name])
]
identify = lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value  # noqa: E731


@functools.cache
def bench(name, variant):
    """Runs that several parts of the contract compare with are made once."""
    entry = METHODS[name]
    return IdBench(entry, entry.config(**dict(variant)))


@pytest.mark.parametrize("contract", ID_CONTRACT, ids=lambda part: part.__name__)
@pytest.mark.parametrize(("name", "variant"), CASES, ids=identify)
def test_it_keeps_the_contract(name, variant, contract):
    contract(bench(name, tuple(variant.items())))


REFUSED = {
    "fedsasrec": {"num_heads": 3, "share": "most", "learning_rate": float("nan")},
    "feddcsr": {"embedding_size": 5, "pull_weight": -1.0, "kl_cap": float("nan"), "dropout": 1.0},
    "fedgcdr": {"embedding_size": 5, "epsilon": 0.0, "delta": 1.0, "friends": "some", "source_rounds": 0},
    "fedhcdr": {"share": "some", "drop_share": 1.0, "walk_steps": 0, "margin": -0.1},
    "pfcr": {"share": "some", "num_heads": 3, "num_codes": 0, "federated_rounds": 0},
}


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name in REFUSED for setting in REFUSED[name]])
def test_settings_that_cannot_be_are_refused(name, setting):
    with pytest.raises(ValueError, match=setting):
        METHODS[name].config(**{setting: REFUSED[name][setting]})
