"""Commands that people wait for: what they do not import, and the quick answer, which is that of the recommender."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedecider.models.recommender import Recommender

pytestmark = pytest.mark.whole

MODELS = ("transformers", "peft", "accelerate", "torch._dynamo", "torch.distributed.tensor")
TABLES = ("datasets", "pandas", "polars", "pyarrow", "sklearn", "numba", "scipy.stats")
OTHERS = ("plotly", "optuna", "fastapi", "uvicorn", "opacus", "nvflare", "sentence_transformers", "matplotlib")
PROGRAM = """
import json, sys
from fedecider.cli.main import main
code = main(json.loads(sys.argv[1]))
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def run(decoder_run):
    """A finished run with ensembles."""
    return decoder_run / "runs" / "whole"


def imported(folder: Path, *words: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that are there at its end."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


def test_the_most_popular_items_need_no_model(run, tmp_path):
    words = ("recommend", "--run", str(run), "--domain", "crime", "--k", "5", "--json", "true")
    printed, modules = imported(tmp_path, *words)
    assert not modules & {*MODELS, *TABLES, *OTHERS}
    answer = Recommender.from_pretrained(run, "crime").recommend([], k=5)
    assert json.loads(printed) == {"domain": "crime", **json.loads(json.dumps(answer.to_dict()))}
    assert len(answer) == 5


@pytest.mark.slow
def test_a_history_needs_the_model_and_nothing_of_tables(run, tmp_path):
    words = ("recommend", "--run", str(run), "--domain", "crime", "--history", "crime-0000", "--json", "true")
    printed, modules = imported(tmp_path, *words)
    assert {"transformers", "peft"} <= modules
    assert not modules & {*TABLES, *OTHERS}
    assert json.loads(printed)["history"][0]["key"] == "crime-0000"


def test_help_loads_next_to_nothing(tmp_path):
    printed, modules = imported(tmp_path, "--help")
    assert "recommend" in printed
    assert not modules & {"torch", "numpy", *MODELS, *TABLES, *OTHERS}


def test_doctor_loads_no_library_of_models(tmp_path):
    printed, modules = imported(tmp_path, "doctor")
    assert "transformers" in printed
    assert not modules & {*MODELS, *TABLES, *OTHERS}
