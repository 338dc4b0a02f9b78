"""Damaged checkpoints and records: named and refused, or the checkpoint before them is used."""

import json
import re
import shutil

import pytest
import torch
from test_rounds import run

from fedecider.federation.checksums import SUMS_FILE, write_sums
from fedecider.federation.record import CannotResume, Recorder, read_records
from fedecider.federation.state import RunState, load_state, save_state


def saved(folder, rounds=3):
    return run(rounds=rounds, checkpoints=folder / "checkpoints", recorder=Recorder(folder / "rounds.jsonl"))


def resumed(folder, rounds=5):
    recorder = Recorder(folder / "rounds.jsonl")
    return run(rounds=rounds, checkpoints=folder / "checkpoints", recorder=recorder, resume=True)


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def state_says(checkpoint, **changes):
    """The same checkpoint with other numbers and fitting sums: what a program wrote, not what a disk spoilt."""
    path = checkpoint / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    write_sums(checkpoint)


DAMAGE = {
    "a flipped byte of a tensor": lambda folder: flip(folder / "server.safetensors"),
    "a flipped byte of the private tensors": lambda folder: flip(folder / "local.safetensors"),
    "a digit of the best score": lambda folder: flip(folder / "state.json", -60),
    "a truncated tensor": lambda folder: (folder / "local.safetensors").write_bytes(b"\x08\0\0"),
    "a file that is gone": lambda folder: (folder / "state.json").unlink(),
    "a file too many": lambda folder: (folder / "model.bin").write_text("x"),
    "no sums": lambda folder: (folder / SUMS_FILE).unlink(),
    "empty sums": lambda folder: (folder / SUMS_FILE).write_text(""),
    "sums that are no text": lambda folder: (folder / SUMS_FILE).write_bytes(b"\xff\xfe\0"),
    "an empty object": lambda folder: (folder / "state.json").write_text("{}"),
    "a best round of text": lambda folder: state_says(folder, best_round="3"),
    "a round of nothing": lambda folder: state_says(folder, round=None),
    "a best round to come": lambda folder: state_says(folder, best_round=9),
    "another round": lambda folder: state_says(folder, round=7),
    "a score that is no number": lambda folder: state_says(folder, best_score=float("nan")),
    "a list": lambda folder: ((folder / "state.json").write_text("[3]"), write_sums(folder)),
    "nested without end": lambda folder: ((folder / "state.json").write_text("[" * 99_999), write_sums(folder)),
    "another version": lambda folder: state_says(folder, format=1),
    "no safetensors": lambda folder: ((folder / "server.safetensors").write_text("oops"), write_sums(folder)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_used_and_said(kind, tmp_path, capsys):
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    whole, _ = saved(tmp_path / "whole", 5), saved(tmp_path / "part", 3)
    DAMAGE[kind](tmp_path / "part" / "checkpoints" / "round_00003")
    again = resumed(tmp_path / "part")
    told = capsys.readouterr().err
    assert told.startswith("warning: got ")
    assert "round_00003" in told
    assert "goes on from round_00002" in told
    assert torch.equal(again.server["mean"], whole.server["mean"])
    scores = [[one["score"] for one in read_records(tmp_path / name / "rounds.jsonl")] for name in ("whole", "part")]
    assert scores[0] == scores[1]
    assert [path.name for path in sorted((tmp_path / "part" / "checkpoints").iterdir())] == [
        "round_00004",
        "round_00005",
    ]


@pytest.mark.parametrize("kind", DAMAGE)
def test_without_a_whole_checkpoint_the_run_is_refused_with_the_file_s_name(kind, tmp_path):
    saved(tmp_path, 1)
    DAMAGE[kind](tmp_path / "checkpoints" / "round_00001")
    with pytest.raises(ValueError, match=r"round_00001.*another --output") as error:
        resumed(tmp_path)
    assert "\n" not in str(error.value)


def test_an_older_checkpoint_of_another_configuration_is_not_used(tmp_path):
    saved(tmp_path, 2)
    flip(tmp_path / "checkpoints" / "round_00002" / "server.safetensors")
    with pytest.raises(ValueError, match="another configuration"):
        load_state(tmp_path / "checkpoints", "something else")


def test_two_checkpoints_are_kept_and_those_of_later_rounds_go(tmp_path):
    folder = tmp_path / "checkpoints"
    saved(tmp_path, 4)
    assert [path.name for path in sorted(folder.iterdir())] == ["round_00003", "round_00004"]
    shutil.copytree(folder / "round_00004", folder / "round_00009")  # of a run that was there before
    (tmp_path / "rounds.jsonl").unlink()
    saved(tmp_path, 1)
    assert [path.name for path in sorted(folder.iterdir())] == ["round_00001"]


def test_the_best_round_is_written_again_only_where_it_is_an_earlier_one(tmp_path):
    state = RunState(3, {"s": torch.ones(1)}, {"l": torch.ones(2)}, 3, 0.5, {"s": torch.ones(1)}, {"l": torch.ones(2)})
    save_state(state, tmp_path, "x")
    assert {path.stem for path in (tmp_path / "round_00003").iterdir()} == {"server", "local", "state", "SHA256SUMS"}
    again = load_state(tmp_path, "x")
    assert torch.equal(again.best_local["l"], state.best_local["l"])
    again.local["l"].zero_()  # trained in place in the next round
    assert again.best_local["l"].tolist() == [1.0, 1.0]
    shutil.copytree(tmp_path / "round_00003", tmp_path / "wrong" / "round_00003")
    state_says(tmp_path / "wrong" / "round_00003", best_round=1)
    with pytest.raises(CannotResume, match=r"got a damaged .*best_server"):
        load_state(tmp_path / "wrong", "x")
    save_state(again._replace(round=4), tmp_path, "x")
    assert {"best_server", "best_local"} < {path.stem for path in (tmp_path / "round_00004").iterdir()}
    later = load_state(tmp_path, "x")
    assert (later.local["l"].tolist(), later.best_local["l"].tolist(), later.best_round) == ([0.0] * 2, [1.0] * 2, 3)


def test_a_kill_while_a_checkpoint_is_removed_leaves_nothing_for_ever(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def half(path, **options):
        (path / "state.json").unlink()
        raise Killed

    saved(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr("fedecider.scratch.shutil.rmtree", half)
        with pytest.raises(Killed):
            resumed(tmp_path, 3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[1:] == ["round_00002", "round_00003"]  # what has its name is whole
    assert re.fullmatch(r"\.scratch-.*-round_00001", names[0])
    resumed(tmp_path, 3)  # nothing is left to do
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["round_00002", "round_00003"]


def lines_of(path):
    return path.read_text().splitlines(keepends=True)


RECORDS = {
    "gone": (lambda path: path.unlink(), "at line 1"),
    "the first one gone": (lambda path: path.write_text("".join(lines_of(path)[1:])), "at line 1"),
    "the last one gone": (lambda path: path.write_text("".join(lines_of(path)[:-1])), "at line 3"),
    "one twice": (lambda path: path.write_text("".join(sorted(lines_of(path) * 2))), "at line 2"),
    "half a line": (lambda path: path.write_text(path.read_text()[:-20]), "at line 3"),
    "an empty object": (lambda path: path.write_text("{}\n" * 3), "at line 1"),
    "text for a round": (lambda path: path.write_text('{"round": "1"}\n' * 3), "at line 1"),
    "another byte count": (
        lambda path: path.write_text(path.read_text().replace('"mean": 4', '"mean": 5')),
        "some line",
    ),
    "no text": (lambda path: path.write_bytes(b"\xff" * 40), "at line 1"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_records_that_are_not_those_of_the_rounds_so_far_are_refused(kind, tmp_path):
    damage, place = RECORDS[kind]
    saved(tmp_path)
    damage(tmp_path / "rounds.jsonl")
    with pytest.raises(ValueError, match=rf"rounds.jsonl damaged .*{place}.*the rounds 1 to 3") as error:
        resumed(tmp_path)
    assert "\n" not in str(error.value)
