"""Two real processes (gloo on the CPU) compute what one does, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from pathlib import Path
import torch
sys.path[:0] = [{repository!r}, {tests!r}]
from test_rounds import run
from fedecider.federation.parties import Processes
from fedecider.federation.record import Recorder, write_json
folder = Path(sys.argv[1])
torch.distributed.init_process_group("gloo")
me = Processes(torch.distributed.get_rank(), torch.distributed.get_world_size())
state = run(rounds=4, processes=me, checkpoints=folder / "checkpoints",
            recorder=Recorder(folder / "rounds.jsonl" if me.index == 0 else None))
write_json(folder / f"process{{me.index}}.json", {{"count": me.count, "mean": state.server["mean"].double(),
           "seen": state.local["seen"], "best": [state.best_round, state.best_score]}})
torch.distributed.destroy_process_group()
"""


def launch(folder: Path, count: int) -> list[dict]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM.format(repository=str(REPOSITORY), tests=str(Path(__file__).parent)))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", str(program)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, str(folder)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"process{index}.json").read_text()) for index in range(count)]


def test_two_processes_give_the_bits_of_one(tmp_path):
    (one,) = launch(tmp_path / "one", 1)
    first, second = launch(tmp_path / "two", 2)
    assert (one["count"], first["count"], second["count"]) == (1, 2, 2)
    assert first == second
    assert {**first, "count": 1} == one
    scores = [
        [json.loads(line)["score"] for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert len(scores[0]) == 4
    assert scores[0] == scores[1]
    assert torch.tensor(one["seen"]).tolist() == [4, 4, 4]
