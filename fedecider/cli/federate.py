"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedecider.engine.track import Track, track_of, tracks
from fedecider.running.options import HELP_ALL, pairs_of, peek, run

DESCRIPTION = "Train recommenders together, without any client showing another one an interaction."
DEFAULT = "fedecider"
"""The method where none is named."""


@dataclass(frozen=True)
class OwnTables:
    """Own tables in place of prepared data.

    Args:
        events: Tables of events, such as north.csv,south.csv: a company each, in place of data.
        items: The table of item texts; if empty, they are in events.
        columns: The columns' names, user=customer,item=sku, if unusual; with time_format, delimiter, encoding.
        public: The public customers: a column, a file of keys, a share.
        yes: If true, what is chosen may take over an hour.
    """

    events: str = ""
    items: str = ""
    columns: str = ""
    public: str = ""
    yes: bool = False


def describe(track: Track) -> str:
    """What help says of the command for methods of a track, and where the other methods are."""
    others = [
        f"Methods of {other.title} ({', '.join(other.method_names)}) have other options: "
        f"--method {other.method_names[0]} --help."
        for other in tracks()
        if other is not track
    ]
    return " ".join([DESCRIPTION, track.description, *others])


def chosen_track(words: Sequence[str]) -> Track:
    """The track of the method that a command line names; nothing of it is imported."""
    return track_of(peek(words, "method", DEFAULT))


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)

    def work() -> None:
        track = chosen_track(words)
        if {"-h", "--help", HELP_ALL} & set(words):  # does without torch
            track.part("parse")(describe(track), words, OwnTables)

        from fedecider.api import config_file
        from fedecider.engine.run import run_track

        full = [*_data_words(track, words), *words]
        chosen = track.part("choose")(full, peek(words, "yes") == "true") if track.choose else {}
        with config_file(chosen or None) as file:
            first = [f"--config={file}"] if chosen else []
            settings, _ = track.part("parse")(describe(track), [*first, *full], OwnTables)
        run_track(track, settings, chosen=chosen)

    return run(work)


def _data_words(track: Track, words: Sequence[str]) -> list[str]:
    """Options that name what the tables of ``--events`` became; none where there are no tables.

    Raises:
        ValueError: a table that cannot be read, or ``--data`` beside them.
    """
    given = {name: peek(words, name) for name in ("events", "items", "columns", "public")}
    if not given["events"]:
        beside = [name for name, value in given.items() if value]
        if beside:
            raise ValueError(f"got --{beside[0]} without --events, expected the tables: --events north.csv,south.csv")
        return []
    if peek(words, "data"):
        raise ValueError("got --events beside --data, expected tables or prepared data")

    from fedecider.api import data_words
    from fedecider.data.frames import from_events
    from fedecider.running.progress import log_line
    from fedecider.running.run_folder import locked

    paths = [one.strip() for one in given["events"].split(",") if one.strip()]
    tables = {Path(one).stem: one for one in paths}
    if len(tables) < len(paths):
        raise ValueError(f"got --events {given['events']}, expected files of different names: a company is called so")
    options: dict[str, Any] = {**_columns(given["columns"]), "public": who_is_public(given["public"])}
    if len(paths) == 1:
        data = from_events(paths[0], given["items"] or None, name=Path(paths[0]).stem, **options)
    else:
        data = from_events(tables, given["items"] or None, **options)
    if os.environ.get("RANK", "0") == "0":
        for note in data.notes:
            log_line(note)
    cache = Path(peek(words, "cache", ".cache"))
    with locked(cache / "data.lock"):  # processes of one launch write it once
        return data_words(track, peek(words, "method", DEFAULT), data, cache)


def who_is_public(text: str) -> float | str | None:
    """A share, a column or file of keys, or nobody."""
    return float(text) if text.replace(".", "", 1).isdecimal() else text or None


def _columns(text: str) -> dict[str, str]:
    """``user=customer,item=sku`` as a mapping."""
    from fedecider.data.frames import HOW

    known = ("rating", "domain", "company", *HOW)
    found = pairs_of(text, "columns", "user=customer,item=sku")
    if odd := sorted(set(found) - set(known)):
        raise ValueError(f"got --columns {text} with {odd[0]}, expected some of {', '.join(known)}")
    return found
