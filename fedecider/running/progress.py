"""What a run tells of itself: progress of long steps, a rich bar on a terminal and plain lines otherwise, and the
seconds of its stages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedecider.federation.callbacks import ClientsDone
from fedecider.federation.record import read_json, write_json


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """``federate | head -1``: who read the output has gone, and the run goes on without a word to anybody."""
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


console = _Console()


def log_line(text: str) -> None:
    """Print ``text`` as it is: not coloured, and broken by the terminal only."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


_details: list[bool] = []


def detail(text: str) -> None:
    """`log_line` within `verbose`, else nothing: what files and the page say too."""
    if _details:
        log_line(text)


@contextmanager
def verbose(enabled: bool = True) -> Iterator[None]:
    """Print every `detail` while the block lasts."""
    _details.extend([True] * enabled)
    try:
        yield
    finally:
        del _details[len(_details) - enabled :]


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Print nothing on the console while the block lasts; warnings on stderr are printed all the same."""
    before, console.quiet = console.quiet, console.quiet or enabled
    try:
        yield
    finally:
        console.quiet = before


class _Clock:
    """Gives the seconds that go by to the innermost stage."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self.inside: list[str] = []
        self._read()

    def _read(self) -> None:
        self._last = (time.perf_counter(), time.process_time())

    def charge(self) -> None:
        before = self._last
        self._read()
        if self.inside:
            sums = self.spent.setdefault(self.inside[-1], [0.0, 0.0])
            for number in range(2):
                sums[number] += self._last[number] - before[number]


_clocks: list[_Clock] = []


@contextmanager
def timed_run() -> Iterator[None]:
    """Keep the seconds of every `stage` within the block; a block within another one is part of that."""
    if _clocks:
        yield
        return
    _clocks.append(_Clock())
    try:
        yield
    finally:
        _clocks.pop()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the seconds of the block under ``name``, without those of stages within it, so that all sum to the run's.

    Nothing is counted outside `timed_run`.
    """
    if not _clocks:
        yield
        return
    clock = _clocks[0]
    clock.charge()
    clock.inside.append(name)
    try:
        yield
    finally:
        clock.charge()
        clock.inside.pop()


def stage_seconds() -> dict[str, dict[str, float]]:
    """Stage -> ``wall_s`` and ``cpu_s`` of this process so far, all of its threads together; in the order of their
    ends."""
    if not _clocks:
        return {}
    _clocks[0].charge()
    return {name: {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)} for name, (wall, cpu) in _clocks[0].spent.items()}


def write_seconds(metrics: Path) -> None:
    """Put `stage_seconds` into ``metrics.json``, which is there; those in it stay: they are on the page."""
    if seconds := stage_seconds():
        content = read_json(metrics)
        write_json(metrics, {**content, "seconds": {**seconds, **content.get("seconds", {})}})


_FIRST_LINE_S, _SELDOM_S = 60.0, 600.0


class _Pace:
    """When the next line of one step is due: after a minute, then whenever the step has gone on for twice as long,
    and every ten minutes: a night takes some fifty lines."""

    def __init__(self) -> None:
        self.started, self._due = time.monotonic(), _FIRST_LINE_S

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def is_due(self, elapsed: float) -> bool:
        if elapsed < self._due:
            return False
        self._due = elapsed + min(elapsed, _SELDOM_S)
        return True


class Report(Protocol):
    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class _Step(Protocol):
    def __call__(self, title: str, done: int, total: int, note: str) -> None: ...


@contextmanager
def progress(title: str, enabled: bool = True) -> Iterator[Report]:
    """Yield ``report(done, total, note)``; on a terminal it moves a bar that is gone at the end, elsewhere
    it prints now and then, and nothing of what took less than a minute."""
    with _shown(enabled, says_end=True) as step:
        yield lambda done, total, note="": step(title, done, total, note)


@contextmanager
def round_progress(num_rounds: int, enabled: bool = True) -> Iterator[ClientsDone]:
    """Yield what :func:`fedecider.federation.rounds.run_rounds` tells of the clients of a round that are done.

    Shown as `progress` is, but for a line at the end of a round, which has one of its own.
    """
    with _shown(enabled, says_end=False) as step:
        yield lambda round, what, done, total: step(f"round {round}/{num_rounds}, {what}", done, total, "clients")


@contextmanager
def _shown(enabled: bool, says_end: bool) -> Iterator[_Step]:
    """Yield what shows one step after the other; one begins where nothing of it is done."""
    if not enabled:
        yield lambda title, done, total, note: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None, note="")

            def move(title: str, done: int, total: int, note: str) -> None:
                if done == 0:
                    bar.reset(task)
                bar.update(task, description=title, completed=done, total=total, note=note)

            yield move
    else:
        pace = _Pace()

        def write(title: str, done: int, total: int, note: str) -> None:
            nonlocal pace
            if done == 0:
                pace = _Pace()
                return
            elapsed = pace.elapsed()
            if pace.is_due(elapsed) if done < total else says_end and elapsed >= _FIRST_LINE_S:
                spent = _times(elapsed, done, total)
                console.print(f"{title}: {done}/{total} {note} ({spent})", highlight=False, soft_wrap=True)

        yield write


def _times(elapsed: float, done: int, total: int) -> str:
    """Seconds so far, and those that are left where the rest goes as fast."""
    left = f", about {elapsed * (total - done) / done:.0f} s left" if 0 < done < total else ""
    return f"{elapsed:.0f} s{left}"
