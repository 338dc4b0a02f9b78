"""The command line of ``fedecider federate``: frozen, short, documented, and seen by the engine alone."""

import ast
import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from fedecider.cli.federate import main
from fedecider.methods import METHODS

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
REFRESH = "python tests/golden/refresh.py"
PACKAGES = ("fedecider", "embedding_fr", "idgen", "distill")
WHOLE = {"Settings", "EmbeddingSettings", "IdSettings", "RunConfig"}
SEES_ALL = (
    *(
        "fedecider/engine/",
        "fedecider/comparison/",
        "fedecider/cross_silo/",
        "fedecider/lifecycle/",
        "fedecider/cli/",
        "fedecider/id_based/run.py",
    ),
    *(f"embedding_fr/{name}.py" for name in ["setup", "run", "results", "commands", "audit", "leaderboard"]),
    # What deployments of a track start from: their parts get what they need.
    *("fedecider/deployment/llm.py", "embedding_fr/deployment.py"),
)


@pytest.fixture(scope="module")
def surface():
    return runpy.run_path(str(REPOSITORY / "tests" / "golden" / "refresh.py"))


def helped(*words: str) -> list[str]:
    """The options that a help names."""
    with redirect_stdout(StringIO()) as text, pytest.raises(SystemExit):
        main(list(words))
    return re.findall(r"(?m)^  (?:-h, )?--([a-z][\w.]*)", text.getvalue())


def test_the_surface_is_the_one_that_was_agreed_on(surface):
    found = surface["GOLDEN"].read_text(encoding="utf-8")
    assert surface["golden"]() == found, f"options have changed; if that is meant, say so in CHANGELOG: {REFRESH}"


def test_the_page_of_settings_is_current(surface):
    assert surface["page"]() == surface["PAGE"].read_text(encoding="utf-8"), f"the page is old: {REFRESH}"


def test_there_are_few_options(surface):
    names = [one.name for one in surface["options"]("fedecider")]
    assert len(names) <= 73
    assert all(one.text for one in surface["options"]("fedecider"))
    assert set(names) <= set(helped("--help_all"))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_help_shows_what_people_set(method):
    found = helped("--method", method, "--help")
    assert {"method", "domains", "data", "output", "num_rounds", "seed", "config"} <= set(found)
    assert len(found) <= 25
    assert set(found) < set(helped("--method", method, "--help_all"))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_a_method_refuses_is_not_offered(method):
    offered = {"robust_mean", "secure_sum", "privacy.noise_on"} & set(helped("--method", method, "--help_all"))
    assert len(offered) == (3 if METHODS[method].takes_mean else 0)


def takers(path: Path) -> list[str]:
    """Functions in a file that take settings as a whole."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            hints = [ast.unparse(one.annotation) for one in given if one.annotation is not None]
            if any(WHOLE & set(re.findall(r"\w+", hint)) for hint in hints):
                found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}")
    return found


def test_only_the_engine_and_the_command_line_see_all_settings():
    paths = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    outside = [path for path in paths if not str(path.relative_to(REPOSITORY)).startswith(SEES_ALL)]
    assert len(outside) > 100
    assert [taker for path in outside for taker in takers(path)] == []
    assert takers(REPOSITORY / "fedecider" / "cross_silo" / "prepare.py"), "the check sees what it looks for"
