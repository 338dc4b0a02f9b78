"""What is written stays short, and what is claimed stands in a page of results."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
PAGES = [README, *(page for page in sorted((REPOSITORY / "docs").glob("*.md")) if page.name != "settings.md")]
RESULTS = REPOSITORY / "benchmarks" / "results"
BLOCK = re.compile(r"^```.*?^```$", re.S | re.M)
LINK = re.compile(r"\]\([^)]*\)")
NUMBER = re.compile(r"(?<![\w@.\-/])\d+(?:[.,]\d+)*")


REJECTED = (
    "siblings",
    "own pool",
    "foreign pool",
    "hybrid",
    "phrase id",
    "catalogue walk",
    "settled",
    "secure sum",
    "simple rule",
    "hand-over",
    "handed over",
    "run folder",
    "shared out",
    "more than chance",
    "is told",
    "what it sent",
    "switch on",
)
"""Words that the field has another one for, and turns that no native speaker uses."""


def num_words(path: Path) -> int:
    """What has a letter or a digit in it, code and tables included; a bar of a table is no word."""
    return sum(bool(re.search(r"\w", word)) for word in path.read_text(encoding="utf-8").split())


def prose(path: Path) -> str:
    """The text without blocks of code and places of links."""
    return LINK.sub("]", BLOCK.sub("", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    text = " ".join(re.sub(r"`[^`]*`", "", prose(page)).lower().split())
    assert not [word for word in REJECTED if word in text]


def test_the_readme_is_read_in_a_minute():
    assert num_words(README) <= 700
    assert len(NUMBER.findall(prose(README))) <= 25


def test_every_figure_of_the_readme_is_in_a_page_of_results():
    pages = "".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md"))
    figures = re.findall(r"0(\.\d{4})", prose(README))
    assert len(figures) > 10
    assert not [figure for figure in figures if figure not in pages]


def test_documents_results_and_changelog_stay_short():
    assert sum(map(num_words, (REPOSITORY / "docs").glob("*.md"))) <= 25_000
    assert len(list(RESULTS.iterdir())) <= 20
    assert num_words(REPOSITORY / "CHANGELOG.md") <= 1_560
