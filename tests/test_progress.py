"""What a long round tells while it goes on."""

import io
from contextlib import suppress

from rich.console import Console

from fedecider.running import progress


def told(monkeypatch, terminal: bool, seconds: list[float]) -> str:
    """What is printed when one client of four is done after each of these pauses."""
    text = io.StringIO()
    clock = iter([0.0, 0.0, *[sum(seconds[: number + 1]) for number in range(len(seconds))]])
    monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=terminal, width=80))
    if not terminal:
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.round_progress(5) as log:
        log(2, "training", 0, 4)
        for number in range(len(seconds)):
            log(2, "training", number + 1, 4)
    return text.getvalue()


def test_lines_come_after_a_minute_and_then_after_twice_the_time(monkeypatch):
    lines = told(monkeypatch, False, [59.0, 7.0, 2.0]).splitlines()
    assert lines == ["round 2/5, training: 2/4 clients (66 s, about 66 s left)"]
    assert told(monkeypatch, False, [60.0, 59.0, 1.0, 20.0]).splitlines() == [
        "round 2/5, training: 1/4 clients (60 s, about 180 s left)",
        "round 2/5, training: 3/4 clients (120 s, about 40 s left)",
    ]


def lines_of(monkeypatch, seconds: int) -> list[str]:
    """What a step prints that reports every second and takes so many."""
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=False, width=80))
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.progress("backbone") as report:
        for second in range(1, seconds + 1):
            clock[0] += 1.0
            report(second, seconds, "loss 2")
    return text.getvalue().splitlines()


def test_a_quick_step_is_silent_and_a_long_one_is_heard_of_every_ten_minutes(monkeypatch):
    assert lines_of(monkeypatch, 59) == []
    assert lines_of(monkeypatch, 150) == [
        "backbone: 60/150 loss 2 (60 s, about 90 s left)",
        "backbone: 120/150 loss 2 (120 s, about 30 s left)",
        "backbone: 150/150 loss 2 (150 s)",
    ]
    spent = [int(line.partition("(")[2].partition(" s")[0]) for line in lines_of(monkeypatch, 3600)]
    assert spent == [60, 120, 240, 480, 960, 1560, 2160, 2760, 3360, 3600]


def test_seconds_of_a_stage_are_without_those_inside_it(monkeypatch):
    wall, cpu = [0.0], [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(progress.time, "process_time", lambda: cpu[0])

    def work(seconds):
        wall[0] += seconds
        cpu[0] += 2 * seconds

    with progress.timed_run():
        work(100.0)  # outside any stage
        with progress.stage("prepare"):
            work(1.0)
            with progress.stage("texts"):
                work(8.0)
                with progress.timed_run(), progress.stage("texts"):  # within itself, counted once
                    work(16.0)
            work(2.0)
        with progress.stage("results"):
            work(4.0)
            assert progress.stage_seconds()["results"] == {"wall_s": 4.0, "cpu_s": 8.0}
        with suppress(KeyError), progress.stage("texts"):
            work(32.0)
            raise KeyError
        found = progress.stage_seconds()
    assert {name: spent["wall_s"] for name, spent in found.items()} == {"prepare": 3.0, "texts": 56.0, "results": 4.0}
    assert {name: spent["cpu_s"] for name, spent in found.items()} == {"prepare": 6.0, "texts": 112.0, "results": 8.0}
