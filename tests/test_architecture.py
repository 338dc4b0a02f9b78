"""The import rule of the rooms, read from the syntax trees."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
OURS = ("fedecider", "idgen", "distill", "embedding_fr")

# room -> prefixes of ours that it may import
ALLOWED = {
    "fedecider/federation": ("fedecider.federation",),
    "fedecider/data": ("fedecider.data", "fedecider.evaluation.split"),  # the one home of the split, imports nothing
    "fedecider/evaluation": ("fedecider.evaluation",),
    "embedding_fr": ("embedding_fr", "fedecider.federation", "fedecider.data", "fedecider.evaluation"),
    "idgen": ("idgen", "fedecider.data", "fedecider.evaluation"),
    "distill": ("distill", "idgen"),
}


def imported_modules(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in OURS]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    files = sorted((REPOSITORY / room).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            assert name.startswith(ALLOWED[room]), f"{path.relative_to(REPOSITORY)} imports {name}"


def test_files_stay_short():
    long = {
        str(path.relative_to(REPOSITORY)): lines
        for room in OURS
        for path in (REPOSITORY / room).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 420
    }
    assert not long
