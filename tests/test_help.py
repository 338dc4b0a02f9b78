"""What ``--help`` shows, and what it imports to show it."""

import inspect
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from fedecider.methods import METHODS as LLM_METHODS
from fedecider.methods.config import METHOD_CONFIGS, TAKES_NO_MEAN

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
SCREEN = 110
"""Lines that the description and the first group may take at 80 columns."""
HEAVY = {"sklearn", "transformers", "peft", "datasets", "plotly", "accelerate", "numba", "scipy.stats", "pyarrow"}
IMPORTED = """
import runpy, sys
script, heavy = sys.argv[1], set(sys.argv[2].split(","))
sys.argv = [script, *sys.argv[3:], "--help"]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    assert end.code == 0
print("imported:", sorted(heavy & set(sys.modules)))
"""


def shown(script: str, *words: str) -> str:
    """What a new process prints for ``--help`` at 80 columns, and which heavy modules it has imported."""
    command = [sys.executable, "-c", IMPORTED, f"scripts/{script}.py", ",".join(HEAVY), *words]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def first_screen(text: str) -> str:
    """Description and first group: the groups are parted by empty lines."""
    usage, description, group = text.split("\n\n")[:3]
    return f"{usage}\n\n{description}\n\n{group}"


def texts(text: str) -> dict[str, str]:
    """Option -> its help text in one line."""
    parts = re.split(r"\n  (?:-h, )?--(?=[a-z])", text)[1:]
    return {part.split()[0]: " ".join(part.split("\n\n")[0].split()[1:]) for part in parts}


@pytest.fixture(scope="module")
def embedding_help():
    return shown("federate", "--method", "fedmf")


@pytest.fixture(scope="module")
def llm_help():
    return helped("--help")


def helped(*words: str) -> str:
    """In this process, where the language models are imported already."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as text:
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit):
            runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"](list(words))
    return text.getvalue()


def test_help_of_the_llm_track_imports_no_tensors():
    command = [sys.executable, "-c", IMPORTED, "scripts/federate.py", ",".join({*HEAVY, "torch", "pandas", "numpy"})]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120)
    assert "--alpha_init" in done.stdout
    assert done.stdout.endswith("imported: []\n")


def test_what_help_reads_without_models_is_what_the_entries_say():
    assert {name: entry.config for name, entry in LLM_METHODS.items()} == METHOD_CONFIGS
    assert {name for name, entry in LLM_METHODS.items() if not entry.takes_mean} == set(TAKES_NO_MEAN)


@pytest.mark.slow
def test_help_of_the_embedding_track_imports_nothing_of_language_models_or_figures(embedding_help):
    assert embedding_help.endswith("imported: []\n")


def test_help_of_the_leaderboard_imports_nothing_of_language_models_or_figures():
    assert shown("leaderboard").endswith("imported: []\n")


def test_the_first_screen_of_the_embedding_track_holds_what_people_set(embedding_help):
    first = first_screen(embedding_help)
    assert len(first.splitlines()) <= SCREEN
    assert set(texts(first)) >= {"method", "dataset", "raw", "output", "num_rounds", "seed", "config"}
    assert all(re.search(rf"\b{name}\b", first) for name in EMBEDDING_METHODS)
    assert "--method fedecider --help" in " ".join(first.split())  # the names of the other track take seconds


def test_the_first_screen_of_the_llm_track_holds_what_people_set(llm_help):
    first = first_screen(llm_help)
    assert len(first.splitlines()) <= SCREEN
    assert set(texts(first)) >= {"domains", "data", "method", "output", "num_rounds", "seed", "config"}
    assert all(re.search(rf"\b{name}\b", first) for name in (*EMBEDDING_METHODS, *LLM_METHODS))
    assert "--fdlora" not in llm_help, "blocks of a config file are no options"


def test_every_option_has_a_text_that_begins_with_its_subject():
    found = {**texts(helped("--method", "fedmf", "--help_all")), **texts(helped("--help_all"))}
    values = re.compile(r"^([A-Z_]+|\{[^}]*\}) ")
    found = {option: values.sub("", text) for option, text in found.items()}
    for method in (*EMBEDDING_METHODS.values(), *LLM_METHODS.values()):
        docs = inspect.getdoc(method.config)
        found |= {f"{method.config.__name__}.{name}": text for name, text in re.findall(r"\n    (\w+): (.*)", docs)}
    assert len(found) > 100
    for option, text in found.items():
        assert re.match(r'[A-Z"]', text), (option, text)
        assert not re.match(r"(Of|As|For|Whose)\b", text), (option, text)
