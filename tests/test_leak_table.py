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
        leak.Row("fedmf", "fedmf", "0.4 / 0.2", setting={"local_epochs": 1, "learning_rate": 1e-9}),
        leak.Row("pfedrec", "pfedrec/code", chosen="fedmf", setting={"local_epochs": 1, "learning_rate": 1e-9}),
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


def test_strict_has_the_chosen_variant_and_setting(found):
    """Both rows have one untrained FedMF under strict, and two different methods under the papers' protocol."""
    fedmf, other = found["fedmf"][1].metrics, found["pfedrec"][1].metrics
    assert fedmf["strict"] == other["strict"]
    assert fedmf["strict/sampled99"] == other["strict/sampled99"]
    assert fedmf["paper"] != other["paper"]


def test_the_section_has_a_line_for_each_method(found):
    lines = leak.page(list(found.values()), 60)
    assert lines[2] == "| method | published | `paper` | `isolated99` | `strict/sampled99` | `strict` |"
    assert lines[6].startswith("| fedmf | 0.4 / 0.2 | ")
    assert lines[8:] == ["", "Not run: " + ", ".join(row.title for row in leak.ROWS if row.title != "popularity") + "."]
    assert "after 60 rounds" in lines[0]


def test_a_row_is_made_once_and_again_where_its_settings_change(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(leak, "central", lambda data, row, rounds: made.append(row) or {"paper": {"hit@10": 0.5}})
    toy = Interactions("toy", ["a", "b"], ["i", "j", "k"], ["", "", ""], [[0, 1, 2], [2, 0, 1]], None, {})
    row = leak.Row("popular", "popularity")
    (first,), (again,) = (leak.table(toy, [row], 5, tmp_path) for _ in range(2))
    assert first == again
    assert len(made) == 1
    leak.table(toy, [row], 6, tmp_path)
    assert len(made) == 2
