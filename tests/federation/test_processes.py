"""Two real processes (gloo on the CPU) compute what one does, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_rounds import run

from fedecider.federation.method import Block
from fedecider.federation.processes import Processes, in_client_order
from fedecider.federation.record import Recorder, write_json

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from pathlib import Path
import torch
sys.path[:0] = [{repository!r}, {tests!r}]
from test_processes import report
from fedecider.federation.processes import Processes
folder, index, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{{folder}}/meeting", rank=index, world_size=count)
report(folder, Processes(torch.distributed.get_rank(), torch.distributed.get_world_size()))
torch.distributed.destroy_process_group()
"""


def report(folder: Path, me: Processes) -> None:
    if (folder / "fails").exists():
        fail(folder, me)
        return
    recorder = Recorder(folder / "rounds.jsonl" if me.index == 0 else None)
    state = run(rounds=4, processes=me, checkpoints=folder / "checkpoints", recorder=recorder)
    found = {"count": me.count, "mean": state.server["mean"].double(), "seen": state.local["seen"]}
    write_json(folder / f"process{me.index}.json", {**found, "best": [state.best_round, state.best_score]})


def fail(folder: Path, me: Processes) -> None:
    """One of three clients has no result; what is exchanged afterwards must be in step."""

    def work(block):
        if block.clients.tolist() == [1]:
            raise ValueError("client 1 diverged")
        return block.clients.tolist()

    blocks = [Block(torch.tensor([client]), None) for client in range(3)]
    try:
        found = [result for _, result in in_client_order(blocks, work, me)]
    except ValueError as error:
        found = str(error)
    write_json(folder / f"process{me.index}.json", {"found": found, "next": me.gather("next")})


def launch(folder: Path, count: int) -> None:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(repository=str(REPOSITORY), tests=str(Path(__file__).parent)))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(program), str(folder)]
    started = [
        subprocess.Popen([*words, str(index), str(count)], env=env, stderr=subprocess.PIPE, text=True)
        for index in range(count)
    ]
    for process in started:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error


def test_two_processes_give_the_bits_of_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    report(tmp_path / "one", Processes())
    launch(tmp_path / "two", 2)
    one, first, second = (
        json.loads((tmp_path / name).read_text())
        for name in ("one/process0.json", "two/process0.json", "two/process1.json")
    )
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


def test_what_fails_in_one_process_fails_in_all_and_they_stay_in_step(tmp_path):
    (tmp_path / "fails").touch()
    launch(tmp_path, 2)
    for index in range(2):
        content = json.loads((tmp_path / f"process{index}.json").read_text())
        assert content == {"found": "client 1 diverged", "next": ["next", "next"]}
