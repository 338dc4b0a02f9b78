"""The import rule of the rooms, what may be named where, and how a benchmark ends."""

from graphlib import CycleError

import pytest
from rooms import (
    REPOSITORY,
    imported_names,
    mermaid,
    module_graph,
    modules,
    ordered,
    room_graph,
    room_of,
)

BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.py"))
BOUNDS = "fedecider.bounds"
"""One file that imports nothing of ours: settings of every room are checked in the same words."""
SCRATCH = "fedecider.scratch"
"""One file that imports nothing of ours: how every room writes aside."""
BASE = {BOUNDS, SCRATCH, "fedecider.federation", "fedecider.data", "fedecider.evaluation"}
SEARCHED = "fedecider.search_space"
"""One file that imports nothing of ours: what a method says of its settings for a search."""
SHARED = {*BASE, SEARCHED, "fedecider.running", "fedecider.baselines", "fedecider.report"}
"""What knows no track and no engine."""
MODELS = {"fedecider.models", "fedecider.methods", "idgen", "distill"}
ENGINE = {"fedecider.engine", "fedecider.comparison", "fedecider.audit"}
"""What runs, compares and attacks methods of any track."""
# room -> other rooms that it may import
ALLOWED = {
    BOUNDS: set(),
    SEARCHED: set(),
    SCRATCH: set(),
    "fedecider.federation": {BOUNDS, SCRATCH},
    "fedecider.evaluation": {BOUNDS, SCRATCH},
    "fedecider.data": {BOUNDS, SCRATCH, "fedecider.evaluation", "fedecider.federation"},  # of these: see FROM_DATA
    "fedecider.running": BASE,
    "fedecider.baselines": {SEARCHED, *BASE},
    "fedecider.report": {"fedecider.running", *BASE},
    "idgen": {BOUNDS, SCRATCH, "fedecider.data", "fedecider.evaluation"},
    "distill": {BOUNDS, "idgen"},
    "fedecider.models": {"fedecider.running", "idgen", *BASE},
    "fedecider.methods": {"fedecider.models", "idgen", SEARCHED, *BASE},
    "fedecider.audit": {*SHARED, "fedecider.engine"},
    "fedecider.engine": {*SHARED, "fedecider.models"},
    "fedecider.comparison": {*SHARED, "fedecider.engine"},
    "fedecider.cross_silo": {*SHARED, *MODELS, *ENGINE},
    "fedecider.lifecycle": {*SHARED, *MODELS, "fedecider.engine", "fedecider.cross_silo"},
    "fedecider.id_based": {*SHARED, *ENGINE},
    "fedecider.testing": {*SHARED, *MODELS, *ENGINE, "fedecider.cross_silo", "fedecider.id_based"},
    "fedecider.deployment": {*SHARED, *MODELS, *ENGINE, "fedecider.cross_silo", "fedecider.lifecycle"},
    "fedecider.serve": {BOUNDS, "fedecider.running", "fedecider.report", "fedecider.models"},
    "fedecider.result": {*SHARED, *MODELS, "fedecider.engine"},
    "fedecider.api": {*SHARED, *MODELS, *ENGINE, "fedecider.result"},
    "fedecider.cli": {
        *SHARED,
        *MODELS,
        *ENGINE,
        "fedecider.cross_silo",
        "fedecider.lifecycle",
        "fedecider.deployment",
        "fedecider.serve",
        "fedecider.api",
    },
    "embedding_fr": {*SHARED, *ENGINE, "fedecider.deployment"},
    "embedding_fr.testing": {*SHARED, *ENGINE, "fedecider.testing", "embedding_fr"},
}
FROM_DATA = {
    BOUNDS,
    SCRATCH,
    "fedecider.evaluation.protocols",
    "fedecider.evaluation.sequences",
    "fedecider.federation.streams",
}
"""Other modules that the data room may import: how users are split and kept, and how a draw is named."""


@pytest.fixture(scope="module")
def graph():
    return module_graph(modules())


def test_every_room_has_a_rule(graph):
    assert set(room_graph(graph)) == set(ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room, graph):
    assert room_graph(graph)[room] <= ALLOWED[room]


def test_data_know_the_split_and_named_draws_alone(graph):
    found = {other for module in graph if room_of(module) == "fedecider.data" for other in graph[module]}
    assert {other for other in found if room_of(other) != "fedecider.data"} <= FROM_DATA


def naming_a_track(track):
    """Room of every file of the package that names a track that lies outside it."""
    files = [path for path in (REPOSITORY / "fedecider").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    naming = [path.relative_to(REPOSITORY / "fedecider") for path in files if track in path.read_bytes()]
    return {f"fedecider.{path.parts[0]}" for path in naming}


def test_nothing_in_the_package_names_the_embedding_track():
    """Tracks come in by entry points."""
    assert not naming_a_track(b"embedding_fr")


def test_no_circles(graph):
    ordered(graph)
    ordered(room_graph(graph))


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        ordered({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_imports_that_hide_are_refused():
    assert imported_names("def f():\n    from idgen import trie\nimport torch") == ["idgen.trie"]
    with pytest.raises(ValueError, match="TYPE_CHECKING"):
        imported_names("if TYPE_CHECKING:\n    from idgen import trie")
    with pytest.raises(ValueError, match="relative"):
        imported_names("from . import trie")


def test_the_figure_in_the_docs_is_this_tree(graph):
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    assert mermaid(room_graph(graph)) in text, "run: python tests/rooms.py, and put its figure into the page"


def test_a_benchmark_ends_as_a_command_does():
    """Bad input is one line and exit code 2. Those that go on where something fails say so by a code of their own."""
    own_code = {"faults.py", "gpu_programme.py"}
    ends = {path.name: path.read_text().partition('if __name__ == "__main__":\n')[2] for path in BENCHMARKS}
    assert own_code < set(ends)
    for name, end in ends.items():
        assert name in own_code or end in ("", "    sys.exit(run(main))\n"), name
