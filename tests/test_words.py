"""What is written stays short, and what is claimed stands in a page of results."""

import re
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "benchmarks" / "results"
BLOCK = re.compile(r"^```.*?^```$", re.S | re.M)
LINK = re.compile(r"\]\([^)]*\)")
NUMBER = re.compile(r"(?<![\w@.\-/])\d+(?:[.,]\d+)*")
DECIMAL = re.compile(r"(?<![\w.])[+-]?0?\.(\d+)(?![\w.])")


def num_words(path: Path) -> int:
    """What has a letter or a digit in it, code and tables included; a bar of a table is no word."""
    return sum(bool(re.search(r"\w", word)) for word in path.read_text(encoding="utf-8").split())


def prose(path: Path) -> str:
    """The text without blocks of code and places of links."""
    return LINK.sub("]", BLOCK.sub("", path.read_text(encoding="utf-8")))


def decimals(text: str) -> set[str]:
    """Figures such as .1124 or 0.1124, by their digits behind the point."""
    return set(DECIMAL.findall(text))


def test_the_readme_is_read_in_a_minute():
    assert num_words(README) <= 700
    assert len(NUMBER.findall(prose(README))) <= 25


def test_documents_results_and_changelog_stay_short():
    assert sum(map(num_words, (REPOSITORY / "docs").glob("*.md"))) <= 25_000
    assert len(list(RESULTS.iterdir())) < 15
    assert num_words(REPOSITORY / "CHANGELOG.md") <= 1_500


def test_a_page_of_results_has_no_date_in_its_name_and_says_how_it_was_made():
    for page in RESULTS.iterdir():
        assert re.fullmatch(r"[a-z_]+\.md", page.name)
        text = page.read_text(encoding="utf-8")
        assert re.search(r"^- Dates?: ", text, re.M), page.name
        assert re.search(r"^- Commits?: ", text, re.M), page.name
        assert re.search(r"^- Commands?[:,] |^`python benchmarks", text, re.M), page.name


def test_figures_of_the_readme_and_of_what_links_to_a_page_stand_there():
    measured = {page.name: decimals(page.read_text(encoding="utf-8")) for page in RESULTS.iterdir()}
    everywhere = set().union(*measured.values())
    missing = {figure for figure in decimals(prose(README)) if len(figure) > 2} - everywhere
    assert not missing
    for document in (REPOSITORY / "docs").glob("*.md"):
        for line in document.read_text(encoding="utf-8").splitlines():
            if "benchmarks/results/" in line:
                found = {figure for figure in decimals(LINK.sub("]", line)) if len(figure) > 2}
                assert found <= everywhere, (document.name, found - everywhere)


def test_the_figure_of_the_readme_is_its_page():
    drawn = import_module("joining_figure")  # benchmarks/ is on the path of the tests
    assert drawn.FIGURE.read_text(encoding="utf-8") == drawn.svg(drawn.figures(drawn.PAGE.read_text(encoding="utf-8")))
    assert "figures/joining.svg" in README.read_text(encoding="utf-8")


def test_a_page_without_a_row_of_the_figure_is_an_error():
    drawn = import_module("joining_figure")
    with pytest.raises(ValueError, match="expected the rows"):
        drawn.figures("| a row | 1 |")
