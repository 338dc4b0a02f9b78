"""Tables of papers, on a few users and in a few rounds: rows, what is kept of them, pictures' numbers, the page."""

import paper_tables
import pytest
import torch
from leak import Found
from paper_rows import TABLES, Line, Subset, Table, laplace
from paper_tables import Row

from fedecider.data.interactions import Interactions, InteractionsConfig

DATA = InteractionsConfig()
SMALL = {"local_epochs": 1, "embedding_size": 4}


@pytest.fixture(scope="module")
def toy():
    """20 users of 5 to 24 items each, 150 items: the later the user, the more events."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    sequences = [torch.randperm(150, generator=draws)[: 5 + user].tolist() for user in range(20)]
    keys = [f"{item:03d}" for item in range(150)]
    return Interactions("toy", [f"{user:02d}" for user in range(20)], keys, keys, sequences, None, {})


def made(toy, tmp_path, *lines, rounds=2):
    return [paper_tables.made_row(toy, DATA, line, rounds, tmp_path).metrics["paper"] for line in lines]


@pytest.mark.parametrize("key", TABLES, ids=" ".join)
def test_every_row_of_a_paper_can_be_set_up_and_differs_from_the_others(key):
    table = TABLES[key]
    data = paper_tables.data_of(table, "")
    assert len({line.label for line in table.lines}) == len(table.lines)
    settings = [repr((paper_tables.settings_of(data, line, 3), line.subset)) for line in table.lines]
    assert len(set(settings)) == len(settings)
    assert all(len(line.printed) in (0, len(table.data)) for line in table.lines)
    assert all(0.0 < value <= 1.0 for line in table.lines for pair in line.printed for value in pair)


def test_tables_share_a_row_that_has_the_same_content(toy, tmp_path):
    """Rank 2 is the default; noise, another rank, rounds and data are other rows."""
    plain, named = Line("a", "pfedclr", SMALL), Line("b", "pfedclr", {**SMALL, "rank": 2})
    noisy = plain._replace(privacy=laplace(0.5))
    found = made(toy, tmp_path, plain, named, noisy, plain._replace(setting={**SMALL, "rank": 3}))
    assert found[0] == found[1]
    assert len(list(tmp_path.iterdir())) == 3
    made(toy, tmp_path, plain, rounds=3)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_noisy_row_has_its_noise(toy, tmp_path):
    """Where nothing is learnt, scores are the received table's: of the noise alone."""
    still = {**SMALL, "learning_rate": 1e-9}
    quiet, loud = made(toy, tmp_path, Line("a", "fedmf", still), Line("b", "fedmf", still, privacy=laplace(5.0)))
    assert quiet != loud


def test_pictures_have_numbers_with_the_right_ends(toy, tmp_path):
    frozen = {**SMALL, "adapter_learning_rate": 0.0, "similarity_weight": 0.0}
    spread, alike = made(
        toy, tmp_path, Line("em", "fedem", {**SMALL, "learning_rate": 0.1}), Line("mean", "fedem", frozen)
    )
    for one in (spread, alike):
        assert 0.0 < one["mean rho"] < 1.0
    assert alike["spread over receivers"] == pytest.approx(0.0, abs=1e-12)  # FedMF's weights
    assert spread["spread over receivers"] > 0.0
    assert spread["own weight over others'"] > 1.0
    (tables,) = made(toy, tmp_path, Line("em", "fedmf_em", {**SMALL, "local_epochs": 10, "learning_rate": 0.1}))
    assert tables["local table"] < tables["global table"]
    l1, l2 = made(
        toy,
        tmp_path,
        *(Line(name, "fedrap", {**SMALL, "sparsity": name, "sparsity_weight": 1.0}) for name in ("l1", "none")),
    )
    assert l1["share above 0.01"] < l2["share above 0.01"] <= 1.0
    assert l2["share above 0.1"] < l2["share above 0.01"]


def test_a_part_has_the_sparsity_that_is_asked_for(toy):
    active = paper_tables.part_of(toy, Subset("users", 5, 0.0))  # the most active ones are nearest
    assert [len(sequence) for sequence in active.sequences] == [20, 21, 22, 23, 24]
    assert active.num_items == toy.num_items
    middle = paper_tables.part_of(toy, Subset("users", 3, 1.0 - 30 / 450))
    assert [len(sequence) for sequence in middle.sequences] == [9, 10, 11]
    popular, rare = (paper_tables.part_of(toy, Subset("items", 60, sparsity)) for sparsity in (0.0, 0.99))
    assert popular.num_items == rare.num_items == 60
    assert popular.num_events > rare.num_events
    whole = {user: set(sequence) for user, sequence in zip(toy.users, toy.sequences, strict=True)}
    for user, sequence in zip(popular.users, popular.sequences, strict=True):
        names = [int(popular.item_keys[item]) for item in sequence]
        assert set(names) <= whole[user]
    with pytest.raises(ValueError, match="a part of 21 users, expected at most the 20"):
        paper_tables.part_of(toy, Subset("users", 21, 0.9))


def test_a_gap_over_ten_per_cent_has_its_cause_beside_it():
    table = Table((), ("ml-100k", "ml-1m"))
    lines = [
        Line(name, "fedmf", printed=((0.5, 0.3), (0.4, 0.2)), cause=cause)
        for name, cause in (("a", ""), ("b", "rates"))
    ]

    def section(hits, rounds=100, dataset="ml-100k"):
        found = [Found({"paper": {"hit@10": hit, "ndcg@10": 0.31}, "cost": {}}, 1.0) for hit in hits]
        return paper_tables.page(
            table, [Row(*one, rounds, 6.0) for one in zip(lines, found, strict=True)], 100, dataset
        )[4:]

    assert section((0.54, 0.56)) == [
        "| a | 0.500 / 0.300 | 0.540 / 0.310 | 100 | +8% |  |",
        "| b | 0.500 / 0.300 | 0.560 / 0.310 | 100 | +12% | rates |",
    ]
    assert section((0.4, 0.4))[0].endswith("| 100 | -20% | not known |")
    assert section((0.4, 0.4), rounds=30)[1].endswith("| 30 | -20% | rates; 30 rounds in place of 100 |")
    other = section((0.4, 0.5), dataset="ml-1m")  # what is known is of ML-100K
    assert other[1] == "| b | 0.400 / 0.200 | 0.500 / 0.310 | 100 | +25% | not known |"
    assert section((0.4, 0.5), dataset="lastfm-2k")[0] == "| a | - | 0.400 / 0.310 | 100 |  |  |"
    assert (
        section((0.4, 0.4), rounds=2)[0] == "| a | 0.500 / 0.300 | not run, at most about 10 CPU minutes | 100 |  |  |"
    )
    assert paper_tables.page(table, [Row(lines[0])], 100)[4].endswith("| not run | 100 |  |  |")


def test_a_figure_says_that_its_values_are_not_given():
    table = Table((Line("a", "fedmf"),), says="A curve.")
    assert paper_tables.page(table, [Row(table.lines[0])], 9)[1] == ("A curve. Read off the figure: no value is given.")


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--paper", "fedem", "--table", "9"], "'fedem' with 'table 9', expected one of fedem table 2, fedem table 3"),
        (["--paper", "fedem", "--table", "2", "--rows", "0,1"], "got rows '0,1', expected numbers from 1 to 6"),
        (["--paper", "fedem", "--table", "2", "--rounds", "0"], "got rounds 0, expected 1 or more"),
        (["--paper", "fedrap", "--table", "7", "--dataset", "ml-100k"], "got dataset 'ml-100k', expected ml-1m"),
        (["--paper", "fedem", "--table", "2", "--dataset", "ml-7"], "got dataset 'ml-7'"),
    ],
)
def test_what_is_not_there_is_told(words, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["paper_tables.py", *words])
    with pytest.raises(ValueError, match=message):
        paper_tables.main()


def test_the_list_says_how_many_rows_are_kept_and_what_the_others_take(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(paper_tables, "load_interactions", lambda config: toy)
    lines = tuple(Line(str(rank), "pfedclr", {**SMALL, "rank": rank}) for rank in (1, 2, 3))
    monkeypatch.setattr(paper_tables, "TABLES", {("fedem", "table 2"): Table(lines)})
    assert paper_tables.known_tables(3, tmp_path / "none") == ["--paper fedem --table 2"]
    tmp_path.joinpath("rows").mkdir()
    assert paper_tables.known_tables(3, tmp_path / "rows") == ["--paper fedem --table 2: 0 of 3 rows are kept"]
    made(toy, tmp_path / "rows", lines[0], rounds=3)
    made(toy, tmp_path / "rows", lines[1], rounds=2)  # tried
    assert paper_tables.known_tables(3, tmp_path / "rows") == [
        "--paper fedem --table 2: 1 of 3 rows are kept, the others take at most about 1 CPU minutes"
    ]
