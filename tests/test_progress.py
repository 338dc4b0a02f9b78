"""What a long round tells while it goes on."""

import io

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


def test_lines_come_every_15_seconds_at_most(monkeypatch):
    lines = told(monkeypatch, False, [9.0, 9.0, 2.0]).splitlines()
    assert lines == ["round 2/5, training: 2/4 clients (18 s)"]
    assert told(monkeypatch, False, [5.0, 5.0, 20.0, 20.0]).splitlines() == ["round 2/5, training: 3/4 clients (30 s)"]


def test_a_quick_round_says_nothing(monkeypatch):
    assert told(monkeypatch, False, [1.0, 1.0, 1.0, 1.0]) == ""


def test_a_terminal_has_a_bar_that_is_gone_at_the_end(monkeypatch):
    text = told(monkeypatch, True, [0.0, 0.0])
    assert "round 2/5, training" in text
    assert "2/4" in text
    assert text.rstrip().endswith("\x1b[2K"), "the last thing is that the line is cleared"


def test_other_processes_are_silent(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=text))
    with progress.round_progress(5, enabled=False) as log:
        log(1, "training", 1, 4)
    assert text.getvalue() == ""
