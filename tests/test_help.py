"""What ``--help`` shows, and what it imports to show it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedecider.methods import METHODS as LLM_METHODS
from fedecider.methods.config import METHOD_CONFIGS, TAKES_NO_MEAN

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
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


@pytest.fixture(scope="module")
def embedding_help():
    return shown("federate", "--method", "fedmf")


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
