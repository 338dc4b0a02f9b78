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


PAGE = """# Leaderboard

## other: 3 users

| row | kind | strict hit@10 | strict ndcg@10 | against the best | `strict/sampled99` |
|---|---|---:|---:|---|---:|
| fedmf | federated | 0.900 [0.8, 1.0] | 0.800 [0.7, 0.9] | best | 0.950 / 0.900 |

## ml-100k: 943 users

| row | kind | strict hit@10 | strict ndcg@10 | against the best | `strict/sampled99` | `paper` |
|---|---|---:|---:|---|---:|---:|
| pfedrec | federated | 0.100 [0.0, 0.2] | 0.050 [0.0, 0.1] | best | 0.500 / 0.250 | - |
| fedmf | federated | 0.090 [0.0, 0.2] | 0.040 [0.0, 0.1] | below | 0.400 / 0.200 | - |
"""


def test_strict_figures_are_those_of_the_leaderboards_section(found, tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(ValueError, match="expected the leaderboard there"):
        leak.strict_figures(page)
    page.write_text(PAGE)
    strict = leak.strict_figures(page)
    assert strict == {"pfedrec": ("0.500 / 0.250", "0.100 / 0.050"), "fedmf": ("0.400 / 0.200", "0.090 / 0.040")}
    lines = {line.split(" | ")[0].strip("| "): line for line in leak.page(list(found.values()), strict, 60)}
    assert lines["fedmf"].endswith(" | 0.400 / 0.200 | 0.090 / 0.040 |")
    assert lines["pfedrec"].endswith(" | 0.500 / 0.250 | 0.100 / 0.050 (pfedrec) |"), "the variant that is named"


def test_the_section_has_a_line_for_each_method(found):
    lines = leak.page(list(found.values()), {}, 60)
    assert lines[2] == "| method | published | `paper` | `isolated99` | `strict/sampled99` | `strict` |"
    assert lines[6].startswith("| fedmf | 0.4 / 0.2 | ")
    assert lines[8:] == ["", "Not run: " + ", ".join(row.title for row in leak.ROWS if row.title != "popularity") + "."]
    assert "the last of 60 rounds" in lines[0]


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
