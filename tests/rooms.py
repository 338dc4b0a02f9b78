"""The rooms of the tree and who imports whom, read from the syntax trees: python tests/rooms.py prints the graph."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("fedecider", "idgen", "distill", "embedding_fr")
SPLIT = "fedecider"
"""The package whose folders are rooms of their own; every other package is one room, its tests for others left out."""

Graph = Mapping[str, set[str]]
"""Name -> names that it imports, itself not among them."""


def modules(root: Path = REPOSITORY) -> dict[str, Path]:
    """Dotted name -> file of every module of ours."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports_ours(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.ImportFrom) and (one.module or "").split(".")[0] in PACKAGES for one in ast.walk(node)
    )


def imported_names(source: str) -> list[str]:
    """Dotted names of ours that a file imports anywhere, also inside functions.

    Raises:
        ValueError: a relative import, or one that only a type checker would see.
    """
    tree, names = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and _imports_ours(node):
            raise ValueError("got TYPE_CHECKING, expected imports that hold at run time")
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"got a relative import in line {node.lineno}, expected the whole name")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in PACKAGES]


def module_graph(files: Mapping[str, Path]) -> Graph:
    """Module -> modules that it imports; ``from package import name`` leads to the module ``name`` where it is one."""

    def target(name: str) -> str:
        while name not in files:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {target(name) for name in imported_names(path.read_text())} - {module} for module, path in files.items()
    }


def room_of(module: str) -> str:
    """``fedecider.models.adapters`` -> ``fedecider.models``; ``idgen.trie`` -> ``idgen``."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == SPLIT or parts[1:2] == ["testing"] else parts[0]


def room_graph(graph: Graph) -> dict[str, set[str]]:
    """Room -> rooms that it imports."""
    rooms: dict[str, set[str]] = {room_of(module): set() for module in graph}
    for module, imported in graph.items():
        rooms[room_of(module)] |= {room_of(name) for name in imported} - {room_of(module)}
    rooms.pop(SPLIT, None)  # the package itself, which imports what it offers when it is asked for
    return rooms


def ordered(graph: Graph) -> list[str]:
    """Every name after all that it imports. Raises ``graphlib.CycleError`` with the circle where there is one."""
    return list(TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order())


def mermaid(rooms: Graph) -> str:
    """The graph as a Mermaid figure, without the arrows that follow from others."""

    def reach(room: str) -> set[str]:
        return rooms[room].union(*(reach(other) for other in rooms[room]))

    lines = ["```mermaid", "flowchart BT"]
    for room in ordered(rooms):
        implied = set().union(*(reach(other) for other in rooms[room]))
        lines += [f"  {other} --> {room}" for other in sorted(rooms[room] - implied)] or [f"  {room}"]
    return "\n".join([*lines, "```"])


def main() -> None:
    graph = module_graph(modules())
    rooms = room_graph(graph)
    ordered(graph)
    for room in ordered(rooms):
        print(f"{room} imports {', '.join(sorted(rooms[room])) or 'no other room'}")
    loose = sorted(path.name for path in (REPOSITORY / SPLIT).glob("*.py"))
    print(f"{len(graph)} modules in {len(rooms)} rooms, no circle; loose files in {SPLIT}/: {', '.join(loose)}\n")
    print(mermaid(rooms))


if __name__ == "__main__":
    main()
