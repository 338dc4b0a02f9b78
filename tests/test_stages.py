import os
import signal
from dataclasses import dataclass

import pytest

from fedecider.data import store
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains
from fedecider.engine.run import kept_data
from fedecider.federation.checksums import SUMS_FILE
from fedecider.running.plain import content_key
from fedecider.running.stages import begun_folder, cached_stage


@dataclass(frozen=True)
class Config:
    rate: float = 0.1
    inner: tuple = (1, 2)


def test_a_stage_runs_once_per_content(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "model.txt").write_text("weights")

    first = cached_stage(tmp_path, "pretrain", {"config": Config(), "data": "abc"}, build)
    again = cached_stage(tmp_path, "pretrain", {"data": "abc", "config": Config(0.1)}, build)
    other = cached_stage(tmp_path, "pretrain", {"config": Config(0.2), "data": "abc"}, build)
    assert (first.reused, again.reused, other.reused) == (False, True, False)
    assert first.folder == again.folder != other.folder
    assert len(calls) == 2
    assert (again.folder / "model.txt").read_text() == "weights"


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half.txt").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cached_stage(tmp_path, "distill", {}, build)
    assert list(tmp_path.iterdir()) == []


def test_content_key_sees_every_value():
    keys = {content_key(Config()), content_key(Config(inner=(2, 1))), content_key({"config": Config()})}
    assert len(keys) == 3


def stage(cache, content="weights"):
    def build(folder):
        (folder / "backbone").mkdir()
        (folder / "backbone" / "model.safetensors").write_text(content)

    return cached_stage(cache, "distill", {"seed": 1}, build)


@pytest.mark.parametrize("name", ["backbone/model.safetensors", "inputs.json", SUMS_FILE])
def test_a_stage_with_a_flipped_byte_is_refused_with_advice(name, tmp_path):
    folder = stage(tmp_path).folder
    content = bytearray((folder / name).read_bytes())
    content[3] ^= 1
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(ValueError, match=rf"got .*{folder.name}.*Remove the folder {folder}, and the stage is built"):
        stage(tmp_path)


def test_a_stage_that_lost_or_gained_a_file_is_refused(tmp_path):
    folder = stage(tmp_path).folder
    (folder / "backbone" / "pytorch_model.bin").write_text("other weights")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, expected no file"):
        stage(tmp_path)
    (folder / "backbone" / "pytorch_model.bin").unlink()
    assert stage(tmp_path).reused
    (folder / "backbone" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"without 'backbone/model\.safetensors'"):
        stage(tmp_path)


@pytest.mark.parametrize("name", ["inputs.json", SUMS_FILE])
def test_a_stage_folder_that_nobody_finished_is_replaced_by_what_was_built(name, tmp_path):
    folder = stage(tmp_path, "old").folder
    (folder / name).unlink()
    again = stage(tmp_path, "new")
    assert (again.folder, again.reused) == (folder, False)
    assert (folder / "backbone" / "model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert stage(tmp_path, "newest").reused


def test_of_two_builders_the_first_one_is_kept(tmp_path):
    def slow(folder):
        stage(tmp_path, "fast")
        (folder / "model.txt").write_text("slow")

    found = cached_stage(tmp_path, "distill", {"seed": 1}, slow)
    assert not found.reused
    assert (found.folder / "backbone" / "model.safetensors").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == [found.folder.name]


def test_what_a_killed_build_has_begun_is_found_by_the_next_and_then_removed(tmp_path):
    inputs = {"seed": 1}
    begun = begun_folder(tmp_path, "distill", inputs)

    def killed(folder):
        begun.mkdir()
        (begun / "step.txt").write_text("7")
        raise RuntimeError("killed")

    def build(folder):
        (folder / "model.txt").write_text((begun / "step.txt").read_text())

    with pytest.raises(RuntimeError):
        cached_stage(tmp_path, "distill", inputs, killed)
    others = [begun_folder(tmp_path, "pretrain", inputs), begun_folder(tmp_path, "distill", {"seed": 2})]
    assert not any(other.exists() for other in others)
    found = cached_stage(tmp_path, "distill", inputs, build)
    assert (found.folder / "model.txt").read_text() == "7"
    assert [path.name for path in tmp_path.iterdir()] == [found.folder.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process of its own is killed")
def test_data_in_memory_are_kept_whole_whatever_was_killed_before(tmp_path, monkeypatch):
    data, put = sample_domains(["crime", "comics"]), store._put_in_place

    def put_one_and_die(source, target):
        put(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        signal.alarm(60)
        monkeypatch.setattr(store, "_put_in_place", put_one_and_die)
        try:
            kept_data(data, tmp_path)
        finally:
            os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1  # one of two domains, under a name that nobody reads
    folder = kept_data(data, tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert load_domains(folder).keys() == data.keys()
    assert kept_data(data, tmp_path) == folder
