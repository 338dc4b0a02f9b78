"""The leak in one table, on a few users and in a few rounds: what each column is made of."""

import leak
import pytest
import torch

from fedecider.data.interactions import Interactions


@pytest.fixture(scope="module")
def found():
    """40 users of 12 items each; 300 items, so that 99 candidates leave enough for the negatives."""
    sequences = [torch.randperm(300, generator=torch.Generator().manual_seed(user))[:12].tolist() for user in range(40)]
    keys = [f"{item:03d}" for item in range(300)]
    toy = Interactions("toy", [f"{user:02d}" for user in range(40)], keys, keys, sequences, None, {})
    rows = (
        leak.Row("canary", "memoriser"),
        leak.Row("popularity", "popularity"),
        leak.Row("fedmf", "fedmf", "0.4 / 0.2"),
        leak.Row("pfedrec", "pfedrec/code", strict="pfedrec"),
    )
    torch.set_num_threads(1)
    return dict(zip(("canary", "popularity", "fedmf", "pfedrec"), leak.table(toy, rows, 60), strict=True))


def hits(one):
    return {name: metrics["hit@10"] for name, metrics in one[1].metrics.items()}


def test_only_the_leaking_protocol_has_anything_to_remember(found):
    canary = hits(found["canary"])
    assert canary["paper"] > 0.9
    assert canary["isolated99"] < 0.3
    assert canary["strict/sampled99"] < 0.3
    assert canary["strict"] < canary["strict/sampled99"] + 0.1


def test_the_three_sampled_columns_rank_the_same_candidates(found):
    popularity = hits(found["popularity"])
    assert popularity["paper"] == popularity["isolated99"] == popularity["strict/sampled99"] > popularity["strict"]
