"""Progress for long steps: a rich bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedecider.federation.rounds import OnClients, silent

console = Console()


def log_line(text: str) -> None:
    """Print ``text`` as it is: not coloured, and broken by the terminal only."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Print nothing on the console while the block lasts; warnings on stderr are printed all the same."""
    before, console.quiet = console.quiet, console.quiet or enabled
    try:
        yield
    finally:
        console.quiet = before


_LINE_EVERY_S = 15.0


class Report(Protocol):
    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def progress(title: str, enabled: bool = True) -> Iterator[Report]:
    """Yield ``report(done, total, note)``; on a terminal it moves a bar, elsewhere it prints now and then."""
    if not enabled:
        yield lambda done, total, note="": None
        return
    if not console.is_terminal:
        yield _plain_lines(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task(title, total=None, note="")

        def report(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield report


@contextmanager
def round_progress(num_rounds: int, enabled: bool = True) -> Iterator[OnClients]:
    """Yield what :func:`fedecider.federation.rounds.run_rounds` tells of the clients of a round that are done.

    On a terminal it moves a bar that is gone at the end, elsewhere it prints a line every 15 seconds at most.
    """
    if not enabled:
        yield silent
    elif not console.is_terminal:
        yield _plain_rounds(num_rounds)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)

            def log(round: int, what: str, done: int, total: int) -> None:
                if done == 0:
                    bar.reset(task)
                bar.update(task, description=f"round {round}/{num_rounds}, {what}", completed=done, total=total)

            yield log


def _plain_rounds(num_rounds: int) -> OnClients:
    started = last = time.monotonic()

    def log(round: int, what: str, done: int, total: int) -> None:
        nonlocal started, last
        now = time.monotonic()
        if done == 0:
            started = now
        elif done < total and now - last >= _LINE_EVERY_S:
            last = now
            text = f"round {round}/{num_rounds}, {what}: {done}/{total} clients ({now - started:.0f} s)"
            console.print(text, highlight=False, soft_wrap=True)

    return log


def _plain_lines(title: str) -> Report:
    started = last = time.monotonic()
    console.print(f"{title} ...", highlight=False)

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= _LINE_EVERY_S:
            last = now
            console.print(f"{title}: {done}/{total} {note} ({now - started:.0f} s)", highlight=False, soft_wrap=True)

    return report
