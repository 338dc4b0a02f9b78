"""Who may write into an output directory, and what is said when its record is damaged."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedecider.running.run_folder import RunFolder, check_run, is_locked, locked, opened_run, read_run

REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = {"config": {"run": {"method": "toy", "seed": 0}}, "data": {"crime": "abc"}}

HOLDER = """
import sys, time
from pathlib import Path
from fedecider.running.run_folder import opened_run
with opened_run(Path(sys.argv[1]), {record!r}, False):
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes the run ``tmp_path / "run"``."""
    program = HOLDER.format(record=RECORD)
    words = [sys.executable, "-c", program, str(tmp_path / "run")]
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_run_in_the_same_folder_is_refused_until_the_first_one_ends_by_any_means(resume, holder, tmp_path):
    root = tmp_path / "run"
    before = (root / "run.json").read_bytes()
    with pytest.raises(ValueError, match=r"run is being written by another process.*--output"):
        check_run(root, RECORD, resume)
    with pytest.raises(ValueError, match="is being written by another process"), opened_run(root, RECORD, resume):
        pass
    assert (root / "run.json").read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    check_run(root, RECORD, True)
    with opened_run(root, RECORD, True):
        assert is_locked(root / ".lock")
    assert not is_locked(root / ".lock")


def test_a_run_that_was_begun_and_ended_while_this_one_got_ready_is_refused(tmp_path):
    root = tmp_path / "run"
    check_run(root, RECORD, False)
    with opened_run(root, RECORD, False):
        pass
    with pytest.raises(ValueError, match="holds a run already"), opened_run(root, RECORD, False):
        pass


def test_only_one_of_several_processes_takes_the_lock(tmp_path):
    with (
        opened_run(tmp_path / "run", RECORD, False),
        opened_run(tmp_path / "run", RECORD, False, writes=False) as other,
    ):
        assert other == RunFolder(tmp_path / "run")


def test_looking_at_a_lock_does_not_hinder_who_wants_it(tmp_path):
    assert not is_locked(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "lock"):
        assert is_locked(tmp_path / "lock")
        started = time.monotonic()
        with pytest.raises(ValueError, match="busy"), locked(tmp_path / "lock", "busy"):
            pass
        assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "no config"),
        ("[]", "list"),
        ('{"config": ', "Expecting value"),
        ('{"config": 3, "data": {}}', "config is '3'"),
        ('{"config": {}, "data": {}}', "config.run"),
        ('{"config": {"run": []}, "data": {}}', "config.run"),
        ('{"config": {"run": {}, "method": 1}, "data": {}}', "config.method"),
        ('{"config": {"run": {}}}', "no data"),
        ("[" * 99_999, "recursion"),
    ],
)
def test_a_damaged_record_is_one_line_with_the_file_s_name(content, told, tmp_path):
    (tmp_path / "run.json").write_text(content)
    for look in (lambda: read_run(tmp_path), lambda: check_run(tmp_path, RECORD, True)):
        with pytest.raises(ValueError, match=r"got a damaged .*run\.json") as error:
            look()
        assert told in str(error.value)
        assert "\n" not in str(error.value)
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    assert read_run(tmp_path) == RECORD
