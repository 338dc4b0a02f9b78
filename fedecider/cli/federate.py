"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedecider.bounds import NotNegative, dataclass
from fedecider.engine.command_line import CACHE, RunOptions, chosen_settings, data_options, read_command
from fedecider.engine.track import Track, tracks
from fedecider.running.command import run

SHOWN = 6
"""Notes on own tables on the console, the first ones; the file that its next line names has all."""
DESCRIPTION = "Train recommenders together, without any client showing another one an interaction."


@dataclass(frozen=True)
class OwnTables:
    """Own tables in place of prepared data, as they are; fedecider import reads unusual ones.

    Args:
        events: Tables of events, such as north.csv,south.csv: a company each, in place of data.
        items: The table of item texts; if empty, they are in events.
        yes: If true, what is chosen may take over an hour.
        minutes: Where all would take longer, customers and rounds are drawn so that the run takes so long; 0 takes all.
        verbose: If true, details are printed that are in the files too.
    """

    events: str = ""
    items: str = ""
    yes: bool = False
    minutes: NotNegative = 0.0
    verbose: bool = False


def describe(track: Track) -> str:
    """What help says of the command for methods of a track, and where the other methods are."""
    others = [
        f"Methods of {other.title} ({', '.join(other.method_names)}) have other options: "
        f"--method {other.method_names[0]} --help."
        for other in tracks()
        if other is not track
    ]
    return " ".join([DESCRIPTION, track.description, *others])


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)

    def work() -> None:
        asked = read_command(words, describe, OwnTables)

        from fedecider.engine.run import run_track  # torch, which help does without
        from fedecider.running.progress import verbose

        own = asked.own
        with verbose(own.verbose):
            options = {**_data_of_tables(asked), **asked.options}
            chosen = chosen_settings(asked.track, options, asked.config, own.yes, own.minutes)
            options = {name: value for name, value in options.items() if not own.minutes or name != "num_rounds"}
            settings = asked._replace(options=options, config=chosen.settings or asked.config).settings(words)
            run_track(asked.track, settings, chosen=chosen)

    return run(work)


def _data_of_tables(asked: RunOptions) -> dict[str, Any]:
    """Options that name what the tables of ``--events`` became; none where there are no tables.

    Raises:
        ValueError: a table that cannot be read, or ``--data`` beside them.
    """
    given: OwnTables = asked.own
    if not given.events:
        if given.items:
            raise ValueError("got --items without --events, expected the tables: --events north.csv,south.csv")
        return {}
    if {"data", "dataset"} & {*asked.options, *(asked.config or {})}:
        raise ValueError("got --events beside --data, expected tables or prepared data")

    from fedecider.data.frames import from_events
    from fedecider.running.progress import detail, log_line
    from fedecider.running.run_folder import locked

    paths = [one.strip() for one in given.events.split(",") if one.strip()]
    tables = {Path(one).stem: one for one in paths}
    if len(tables) < len(paths):
        raise ValueError(f"got --events {given.events}, expected files of different names: a company is called so")
    if len(paths) == 1:
        data = from_events(paths[0], given.items or None, name=Path(paths[0]).stem)
    else:
        data = from_events(tables, given.items or None)
    cache = Path(asked.options.get("cache", CACHE))
    with locked(cache / "data.lock"):  # processes of one launch write it once
        options = data_options(asked.track, data, cache)
    if os.environ.get("RANK", "0") == "0":
        num, where = min(SHOWN, len(data.report.first)), Path(options.get("data") or options["raw"]) / next(iter(data))
        for number, note in enumerate(data.notes):
            (log_line if number < num else detail)(note)
        log_line(f"{len(data.notes)} notes on how the tables were read: {where / 'README.md'}")
    return options
