"""Tables of papers, on a few users and in a few rounds: rows, what is kept of them, pictures' numbers, the page."""

import paper_tables
import pytest
import torch
from paper_rows import TABLES, Line, Table

from fedecider.data.interactions import Interactions

SMALL = {"local_epochs": 1, "embedding_size": 4}


@pytest.fixture(scope="module")
def toy():
    """20 users of 5 to 24 items each, 150 items: the later the user, the more events."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    sequences = [torch.randperm(150, generator=draws)[: 5 + user].tolist() for user in range(20)]
    keys = [f"{item:03d}" for item in range(150)]
    return Interactions("toy", [f"{user:02d}" for user in range(20)], keys, keys, sequences, None, {})


@pytest.mark.parametrize("key", TABLES, ids=" ".join)
def test_every_row_of_a_paper_can_be_set_up_and_differs_from_the_others(key):
    table = TABLES[key]
    data = paper_tables.data_of(table, "")
    assert len({line.label for line in table.lines}) == len(table.lines)
    settings = [repr((paper_tables.settings_of(data, line, 3), line.subset)) for line in table.lines]
    assert len(set(settings)) == len(settings)
    assert all(len(line.printed) in (0, len(table.data)) for line in table.lines)
    assert all(0.0 < value <= 1.0 for line in table.lines for pair in line.printed for value in pair)


def test_the_command_writes_a_section_of_what_is_kept(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper_tables, "load_interactions", lambda config: toy)
    table = Table(tuple(Line(name, name, SMALL, ((0.5, 0.2),)) for name in ("fedmf", "fedncf")), ("ml-100k",))
    monkeypatch.setitem(TABLES, ("fedem", "table 2"), table)
    words = ["paper_tables.py", "--paper", "fedem", "--table", "2", "--rounds", "3", "--rows", "2"]
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", [*words, "--work", str(tmp_path / "rows"), "--output", str(page)])
    paper_tables.main()
    text = page.read_text()
    assert "## FedEM, table 2, ml-100k" in text
    assert "| fedmf | 0.500 / 0.200 | not run | 3 |  |  |" in text  # no row of FedMF was tried
    assert "| fedncf | 0.500 / 0.200 | 0." in text
    assert "Command: `python benchmarks/paper_tables.py --paper fedem --table 2 --dataset ml-100k --rounds 3`" in text
