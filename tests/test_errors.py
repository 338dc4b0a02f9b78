"""Bad input and faults of the machine end in one sentence; figures that say nothing are named."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from fedecider.cli import main as cli
from fedecider.data import from_events, publish
from fedecider.data.store import save_domains
from fedecider.evaluation.metrics import macro_mean, mean_metrics
from fedecider.evaluation.protocols import chance_hit, few_candidates, get_protocol
from fedecider.evaluation.statistics import compare_table
from fedecider.models.item_search import Items
from fedecider.models.recommender import Recommender
from fedecider.report.answer import Evidence
from fedecider.report.conclusion import conclusion
from fedecider.running.command import run
from fedecider.running.run_folder import opened_run, other_code

EVENTS = [
    {"user": f"u{user}", "item": f"i{(user + step) % 6}", "time": 1_600_000_000 + step}
    for user in range(9)
    for step in range(4)
]
ITEMS = [{"item": f"i{number}", "title": f"Thing {number}"} for number in range(6)]
TWO = (torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.0, 1.0, 7.0]))
CALLS = {
    "metrics that are none": (
        lambda: compare_table({"a": {"x": TWO[0]}, "b": {"x": TWO[1]}}, metrics=["foo"]),
        "got metrics ['foo'], expected hit@k",
    ),
    "positions of two runs": (lambda: mean_metrics(torch.zeros(2, 3, 4)), "got positions of the shape (2, 3, 4)"),
    "other metrics": (lambda: macro_mean({"a": {"x": 1.0}, "b": {"y": 1.0}}), "got the metrics y of b and x of a"),
    "numbers as companies": (lambda: publish(None, ITEMS, companies=[1, 2]), "got the name 1"),
    "a number as name": (lambda: from_events(EVENTS, ITEMS, name=5), "got the name 5"),
    "a text as texts": (lambda: from_events(EVENTS, ITEMS, texts="title"), "got texts 'title'"),
    "half of a character": (
        lambda: from_events([{**row, "user": "\ud800" + row["user"]} for row in EVENTS], ITEMS),
        "got events with half of a character",
    ),
    "no domains": (lambda: save_domains(None, "x"), "got NoneType for the folder 'x'"),
    "no folder": (lambda: from_events(EVENTS, ITEMS).save(None), "for the folder None"),
    "a number as folder": (lambda: from_events(EVENTS, ITEMS).save(5), "got the output 5"),
    "no search": (lambda: Items(["a"], ["b"]).search(None), "got the search None"),
    "no recommender": (lambda: Recommender.from_pretrained(None), "got None, expected the path"),
    "times that are truths": (
        lambda: from_events([{**row, "time": True} for row in EVENTS], ITEMS),
        "times such as 'true'",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_cannot_be_is_told_in_a_sentence(case):
    call, expected = CALLS[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        call()
    assert expected in str(error.value)


SYSTEM = {
    errno.ENOSPC: "got 'no space left on device' for runs/x, expected room",
    errno.EACCES: "got 'permission denied' for runs/x, expected a place that this user may read and write",
    errno.EROFS: "got 'read-only file system' for runs/x, expected a place that may be written",
    errno.ENOTDIR: "got 'not a directory' for runs/x, expected a folder",
}


FULL = {
    "python": MemoryError("Unable to allocate 27 GiB"),
    "the system": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "tables.bin"),
    "torch": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "an accelerator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "a mapped file": RuntimeError("unable to mmap 203 bytes from file <x>: Cannot allocate memory (12)"),
    "a library": ImportError("libtorch.so: failed to map segment from shared object"),
    "C++": RuntimeError("std::bad_alloc"),
    "a library of another one": OSError("Could not find/load shared object file 'libllvmlite.so'"),
}
FULL["a library of another one"].__context__ = FULL["a library"]


@pytest.mark.parametrize("kind", FULL)
def test_work_that_does_not_fit_into_the_memory_is_one_sentence_that_says_what_to_lower(kind, capsys):
    def work():
        raise FULL[kind]

    assert run(work) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: out of memory \(.+\), expected work that fits\. [^\n]+\n", said)
    assert "memory_gb" in said


def test_a_command_that_does_not_fit_while_it_is_loaded_says_so_too(monkeypatch, capsys):
    monkeypatch.setattr(cli, "import_module", lambda name: (_ for _ in ()).throw(MemoryError()))
    assert cli.main(["audit", "--run", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: out of memory (MemoryError), expected work that fits")


@pytest.mark.parametrize("number", SYSTEM)
def test_errors_of_the_system_say_what_to_do(number, capsys):
    def work():
        raise OSError(number, os.strerror(number), "runs/x")

    assert run(work) == 2
    assert capsys.readouterr().err.startswith(f"error: {SYSTEM[number]}")


def test_a_full_disk_is_said_as_such_whoever_writes(capsys):
    def work():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    assert run(work) == 2
    assert capsys.readouterr().err.startswith("error: got 'no space left on device', expected room")


def test_nothing_that_cannot_be_printed_is_printed(capsys):
    assert run(lambda: int("a\0b\x1b[31m")) == 2
    error = capsys.readouterr().err
    assert error.strip().isprintable()


def test_only_a_run_that_can_go_on_is_said_to(tmp_path, capsys):
    def work(begun):
        record = {"config": {"run": {}}, "data": {}}
        with opened_run(tmp_path / f"run{begun}", record, False) as folder:
            if begun:
                folder.rounds.write_text("{}\n")
            raise KeyboardInterrupt

    assert run(lambda: work(False)) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert run(lambda: work(True)) == 130
    assert capsys.readouterr().err == f"interrupted; {tmp_path / 'runTrue'} goes on with --resume true\n"


def test_resuming_under_other_code_is_said(tmp_path, capsys):
    old = {"config": {"run": {}}, "data": {}, "versions": {"torch": "2.7", "numpy": "2.0"}, "commit": "a"}
    new = {**old, "versions": {"torch": "2.8", "numpy": "2.0"}, "commit": "b"}
    with opened_run(tmp_path / "run", old, False):
        pass
    with opened_run(tmp_path / "run", new, True):
        pass
    said = capsys.readouterr().err
    assert "under other libraries (torch 2.8, not 2.7)" in said
    assert "under another commit (b, not a)" in said
    assert not other_code(old, old)
    method = {**old, "config": {"run": {"method": "fedavg"}}}
    with (
        pytest.raises(ValueError, match="holds a run of the method None, expected fedavg"),
        opened_run(tmp_path / "run", method, True),
    ):
        pass


LINES = """
from fedecider.running.progress import log_line
from pathlib import Path
import sys, time
for number in range(2000):
    log_line(f"line {number} " + "x" * 100)
Path(sys.argv[1]).write_text("done")
"""


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_reader_that_goes_away_ends_no_run(tmp_path):
    """`federate ... | head -1`."""
    child = subprocess.Popen([sys.executable, "-c", LINES, str(tmp_path / "end")], stdout=subprocess.PIPE)
    assert child.stdout.readline().startswith(b"line 0")
    child.stdout.close()
    assert child.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_figures_of_few_candidates_are_said_to_say_little():
    sequences = [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    chance = chance_hit(sequences, 8, "test", get_protocol("strict"))
    assert chance == 1.0
    assert "guessing has hit@10 1.0000; hit@10 says nothing here" in few_candidates({"shop": chance})[0]
    assert "says little" in few_candidates({"shop": 0.6})[0]
    assert not few_candidates({"shop": 0.49})
    row = {"hit@10": {"mean": 1.0, "low": 1.0, "high": 1.0}, "ndcg@10": {"mean": 1.0, "low": 1.0, "high": 1.0}}
    found = conclusion(Evidence(subject="a", rows={"a": row}, simple={}, protocol="strict", scope="shop", chance=1.0))
    assert "guessing scores 100.0 of 100: hit@10 says nothing here" in json.dumps(found._asdict(), default=str)


def test_no_lock_of_one_system_alone_is_imported():
    code = "import sys; sys.modules['fcntl'] = None; import fedecider.running.run_folder, fedecider.cli.federate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    # filelock itself does without it where there is none
    assert done.returncode == 0, done.stderr


def test_what_is_handed_over_can_be_read_by_others_and_what_is_private_cannot(tmp_path):
    from safetensors.torch import save_file

    from fedecider.running.manifest import write_manifest

    (tmp_path / "adapters").mkdir()
    path = tmp_path / "adapters" / "weights.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    before = os.umask(0o022)
    try:
        write_manifest(tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_ruined_models_of_the_test_bench_are_never_in_front():
    from fedecider.evaluation.metrics import NOT_RANKED
    from fedecider.testing.llm_contract import tiny_models, tiny_silos

    for make, last in ((tiny_models, NOT_RANKED), (tiny_silos, None)):
        models = make()
        student = models.student(models.names[0])
        whole = student.positions("valid")
        for parameter in models.base.model.parameters():
            parameter.data.fill_(float("nan"))
        found = student.positions("valid")
        assert found.min() >= (last if last is not None else whole.max())


def test_a_cache_that_is_a_file_is_told_before_any_work(tmp_path):
    from fedecider.running.stages import cached_stage

    (tmp_path / "cache").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        cached_stage(tmp_path / "cache", "stage", {}, lambda folder: pytest.fail("work has begun"))
