"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.experiment.track import Track, track_of, tracks
from fedecider.running.options import peek, run

DESCRIPTION = "Train recommenders together, without any client showing another one an interaction."
DEFAULT = "fedecider"
"""The method where none is named."""


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
        settings, _ = track.part("parse")(describe(track), words)

        from fedecider.experiment.engine import run_track  # after the options: --help does without

        run_track(track, settings)

    return run(work)
