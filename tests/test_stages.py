from dataclasses import dataclass

import pytest

from fedecider.running.stages import cached_stage, content_key


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
