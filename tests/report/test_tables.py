"""Tables: protocol stamp, intervals, macro block, bold only where earned."""

import pytest
import torch
from rich.console import Console

from fedecider.evaluation.protocols import PROTOCOLS, STRICT
from fedecider.report.tables import (
    CANARY,
    ResultTable,
    csv_text,
    interval_text,
    markdown_grid,
    markdown_table,
    result_rows,
    rich_table,
    rows_data,
    variant_labels,
    variant_of,
)


def plain_text(table, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


POOR = {"crime": [40, 2, 30, 44, 66], "comics": [41, 50, 3]}


def rows():
    good = {"crime": torch.tensor([0, 2, 30, 4, 6]), "comics": torch.tensor([1, 50, 3])}
    poor = {domain: torch.tensor(positions) for domain, positions in POOR.items()}
    chance = {"crime": torch.tensor([40, 2, 30, 44, 66]), "comics": torch.tensor([41, 50, 33])}
    return result_rows({"fede | cider": good}, {"popularity": poor, CANARY: chance})


def test_markdown_holds_every_domain_interval_and_the_protocol():
    text = markdown_table(ResultTable(rows(), STRICT, ["3 seeds"], {("crime", "hit@10", "fede | cider")}), title="Test")
    lines = text.splitlines()
    assert lines[0] == "### Test"
    assert lines[2] == "| domain | method | hit@5 | hit@10 | ndcg@5 | ndcg@10 |"
    table = [line for line in lines if line.startswith("|")][2:]
    assert [line.split(" | ")[0] for line in table] == ["| crime"] * 3 + ["| comics"] * 3 + ["| macro"] * 3
    assert "**0.8000** [" in table[0]
    assert text.count("**") == 2
    assert table[0].startswith("| crime | fede \\| cider |")
    assert table[2].startswith("| crime | *memoriser* |")
    assert "0.7333 [" in table[6]  # macro hit@10: (0.8 + 2/3) / 2
    assert "- protocol: strict (whole catalogue, items seen by the user dropped)" in lines
    assert lines[-1] == "- 3 seeds"


def test_a_leaking_protocol_shows_what_the_memoriser_gets():
    table = ResultTable(rows(), PROTOCOLS["paper"])
    assert "LEAKS the held-out item; the memoriser scores hit@10 0.100" in markdown_table(table)  # (0.2 + 0) / 2
    assert "the memoriser was not run" in markdown_table(ResultTable(rows()[:2], PROTOCOLS["paper"]))


def test_rich_table_fits_a_terminal_with_a_line_for_each_row():
    text = plain_text(rich_table(ResultTable(rows(), STRICT)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[0] for line in text.splitlines() if "[." in line] == ["fede", "popularity", CANARY] * 3
    for word in (
        "crime",
        "comics",
        "macro",
        "fede | cider",
        "popularity",
        "0.800",
        "hit@10",
        "protocol: strict",
        "[.",
    ):
        assert word in text
    assert "…" not in text


def test_long_names_leave_every_cell_of_a_rich_table_whole():
    (row,) = result_rows({"fedrap (personal), best validation round": {"ml-100k": torch.arange(40)}})
    text = plain_text(rich_table(ResultTable([row], STRICT)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("[") == 2 == text.count("]")
    assert all(line.count("[") in (0, 2) for line in text.splitlines()), "an interval was broken"


def test_one_domain_has_no_macro_block():
    found = result_rows({"local": {"crime": torch.tensor([0, 9])}})
    assert "macro" not in markdown_table(ResultTable(found, STRICT))


def test_rows_must_share_their_domains():
    other = result_rows({"local": {"children": torch.tensor([0])}})
    with pytest.raises(ValueError, match="other domains"):
        markdown_table(ResultTable([*rows(), *other], STRICT))
    with pytest.raises(ValueError, match="without rows"):
        markdown_table(ResultTable([], STRICT))


def test_rows_have_kinds_and_the_intervals_they_get_alone():
    found = rows()
    assert [row.kind for row in found] == ["method", "baseline", "canary"]
    (alone,) = result_rows({"popularity": {d: torch.tensor(p) for d, p in POOR.items()}})
    assert rows_data([alone], "crime")["popularity"] == rows_data(found, "crime")["popularity"]
    assert rows_data([alone], "macro")["popularity"] == rows_data(found, "macro")["popularity"]


def test_labels_of_variants():
    assert variant_labels("local", ["local"]) == {"local": "local"}
    labels = variant_labels("fedavg", ["global", "fine_tuned"])
    assert labels == {"global": "fedavg (global)", "fine_tuned": "fedavg (fine_tuned)"}
    assert variant_of(labels["fine_tuned"]) == "fine_tuned"


def test_grid_interval_and_csv():
    assert markdown_grid(["a", "b"], [["x|y", "1"]], ["b"]) == ["| a | b |", "|---|---:|", "| x\\|y | 1 |"]
    assert interval_text({"mean": 0.12345, "low": None, "high": 0.2}, 3, bold=True) == "**0.123** [-, 0.200]"
    assert interval_text(None) == "-"
    assert csv_text(["a", "b"], [["x,y", 1]]) == 'a,b\n"x,y",1\n'
