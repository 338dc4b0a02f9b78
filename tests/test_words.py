"""What is written stays short, and what is claimed stands in a page of results."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
SOURCES = [
    path for name in ("fedecider", "idgen", "distill", "embedding_fr") for path in (REPOSITORY / name).rglob("*.py")
]
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
    "best rule",
    "brings nothing",
    "cannot be said",
    "for sure",
)
"""Words that the field has another one for, and turns that no native speaker uses."""


def num_words(path: Path) -> int:
    """What has a letter or a digit in it, code and tables included; a bar of a table is no word."""
    return sum(bool(re.search(r"\w", word)) for word in path.read_text(encoding="utf-8").split())


def prose(path: Path) -> str:
    """The text without blocks of code and places of links."""
    return LINK.sub("]", BLOCK.sub("", path.read_text(encoding="utf-8")))


def rejected(text: str) -> list[str]:
    plain = " ".join(re.sub(r"`[^`]*`", "", text).lower().split())
    return [word for word in REJECTED if word in plain]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    assert not rejected(prose(page))


def strings(tree: ast.AST) -> list[str]:
    """Sentences that a program prints: all of its strings but docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in texts if id(node) not in docstrings and " " in node.value]


def public_docstrings() -> list[str]:
    """Those of the modules and objects that docs/api.md names."""
    found = []
    for name in re.findall(r"^::: (\S+)", (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8"), re.M):
        path = REPOSITORY / f"{name.replace('.', '/')}.py"
        path = path if path.exists() else REPOSITORY / f"{name.rpartition('.')[0].replace('.', '/')}.py"
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return found


def test_what_commands_print_and_python_documents_uses_them_too():
    """Help, console, errors, report pages; options are in docs/settings.md."""
    printed = [text for path in SOURCES for text in strings(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(printed) > 3000
    assert not [(words, text) for text in [*printed, *public_docstrings()] if (words := rejected(text))]


def test_the_readme_is_read_in_a_minute():
    assert num_words(README) <= 700
    assert len(NUMBER.findall(prose(README))) <= 25


def test_every_figure_of_the_readme_is_in_a_page_of_results():
    pages = "".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md"))
    figures = re.findall(r"0(\.\d{4})", prose(README))
    figures += [f".{tens}{hundredths}" for tens, hundredths in re.findall(r"\b(\d\d)\.(\d\d)\b", prose(README))]
    assert len(figures) > 10
    assert not [figure for figure in figures if figure not in pages]


def test_documents_results_and_changelog_stay_short():
    assert sum(map(num_words, (REPOSITORY / "docs").glob("*.md"))) <= 25_000
    assert len(list(RESULTS.iterdir())) <= 20
    assert num_words(REPOSITORY / "CHANGELOG.md") <= 1_560
