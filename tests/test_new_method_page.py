"""docs/new_method.md shows the files of the example package as they are."""

import re
from pathlib import Path

from outside import EXAMPLE, REPOSITORY

PAGE = REPOSITORY / "docs" / "new_method.md"
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml"}


def shown_files() -> dict[str, tuple[str, str]]:
    """File named above a block -> language and content of the block."""
    found = re.findall(r"^`(examples/[^`]+)`\n\n```(\w+)\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert len({path for path, _, _ in found}) == len(found)
    return {path: (language, content) for path, language, content in found}


def test_every_block_is_its_file():
    for path, (language, content) in shown_files().items():
        assert (REPOSITORY / path).read_text() == content, f"{path} and its block in {PAGE.name} differ"
        assert language == LANGUAGES[Path(path).suffix]


def test_every_file_is_shown():
    files = {path for path in EXAMPLE.rglob("*") if path.suffix in LANGUAGES and path.name != "__init__.py"}
    own = {path for path in files if not {"build", "__pycache__"} & set(path.parts)}
    assert {str(path.relative_to(REPOSITORY)) for path in own} == set(shown_files())


def test_every_file_that_the_page_names_is_there():
    named = re.findall(r"`((?:fedecider|embedding_fr|tests|examples)/[\w./-]+)`", PAGE.read_text())
    assert len(named) > 10
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
