"""The import rule of the rooms, how long a file is, and how a benchmark ends."""

from graphlib import CycleError

import pytest
from rooms import REPOSITORY, imported_names, mermaid, module_graph, modules, ordered, room_graph

BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.py"))
BOUNDS = "fedecider.bounds"
"""One file that imports nothing of ours: settings of every room are checked in the same words."""
BASE = {BOUNDS, "fedecider.federation", "fedecider.data", "fedecider.evaluation"}
SHARED = {*BASE, "fedecider.running", "fedecider.baselines", "fedecider.report", "fedecider.tuning"}
TRACK = {*SHARED, "fedecider.audit"}
LLM = {*TRACK, "fedecider.lora", "fedecider.memory", "fedecider.methods", "idgen", "distill"}
# room -> other rooms that it may import
ALLOWED = {
    BOUNDS: set(),
    "fedecider.federation": {BOUNDS},
    "fedecider.data": {BOUNDS, "fedecider.evaluation", "fedecider.federation"},
    "fedecider.evaluation": set(),
    "fedecider.running": BASE,
    "fedecider.baselines": {"fedecider.tuning", *BASE},
    "fedecider.lora": {BOUNDS, "fedecider.federation", "idgen"},
    "fedecider.memory": {"fedecider.running", *BASE},
    "fedecider.methods": {"fedecider.lora", "fedecider.tuning", "idgen", *BASE},
    "fedecider.report": {"fedecider.running", *BASE},
    "fedecider.tuning": {"fedecider.running", "fedecider.report", *BASE},
    "fedecider.audit": {"fedecider.running", "fedecider.report", *BASE},
    "fedecider.llm": LLM,
    "fedecider.id_based": SHARED,
    "fedecider.comparison": {*LLM, "fedecider.llm", "fedecider.id_based"},
    "fedecider.serve": {BOUNDS, "fedecider.running", "fedecider.report", "fedecider.llm"},
    "fedecider.deployment": {*LLM, "fedecider.llm", "embedding_fr"},  # above both tracks, as scripts are
    # holds methods of both tracks, and those without a model of language, to their contracts
    "fedecider.testing": {*LLM, "fedecider.llm", "fedecider.id_based", "embedding_fr"},
    "idgen": {BOUNDS, "fedecider.data", "fedecider.evaluation"},
    "distill": {BOUNDS, "idgen"},
    "embedding_fr": TRACK,
    "fedecider.cli": {
        *LLM,
        "fedecider.llm",
        "fedecider.id_based",
        "fedecider.comparison",
        "fedecider.deployment",
        "fedecider.serve",
        "embedding_fr",
    },
}


@pytest.fixture(scope="module")
def graph():
    return module_graph(modules())


def test_every_room_has_a_rule(graph):
    assert set(room_graph(graph)) == set(ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room, graph):
    assert room_graph(graph)[room] <= ALLOWED[room]


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


def test_few_files_lie_outside_the_rooms():
    assert len(list((REPOSITORY / "fedecider").glob("*.py"))) <= 3


def test_the_figure_in_the_docs_is_this_tree(graph):
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    assert mermaid(room_graph(graph)) in text, "run: python tests/rooms.py, and put its figure into the page"


def test_files_stay_short():
    long = {name: lines for name, path in modules().items() if (lines := len(path.read_text().splitlines())) > 420}
    assert not long


def test_a_benchmark_ends_as_a_command_does():
    """Bad input is one line and exit code 2. Those that go on where something fails say so by a code of their own."""
    own_code = {"faults.py", "gpu.py"}
    ends = {path.name: path.read_text().partition('if __name__ == "__main__":\n')[2] for path in BENCHMARKS}
    assert own_code < set(ends)
    for name, end in ends.items():
        assert name in own_code or end in ("", "    sys.exit(run(main))\n"), name
