"""A whole table of federated runs: python scripts/compare.py --config benchmarks/configs/compare/amazon_t5.yaml."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.engine.track import Track, track_named
from fedecider.running.command import run
from fedecider.running.options import parse

DESCRIPTION = """Methods x seeds x domains of the cross-silo track in one table, with equal tuning budgets on
validation, intervals and paired tests. Runs are kept: a stopped table goes on where it was, and several
processes may share it."""


def made_table(track: Track, description: str, command: str, words: Sequence[str], common: Sequence[str] = ()) -> None:
    """Make the table of a track that a command line describes, and write its files."""
    part = track.part("comparison")
    planned = part.plan(*parse(description, words, *part.configs, common=common, texts=part.texts()))

    from fedecider.comparison.compare import compare  # after the options: --help does without
    from fedecider.comparison.page import write_table
    from fedecider.running.run_folder import git_commit, locked

    table = compare(planned)
    if not planned.writes:
        return
    heading = [f"Commit of the table: {git_commit()}", f"Command: fedecider {command} {public_words(words)}"]
    with locked(planned.root / "table.lock"):  # several processes may fill one table, and end together
        for path in write_table(table, heading):
            print(f"written: {path}")


def public_words(words: Sequence[str]) -> str:
    """The command without the places of this machine."""
    private = ("--output", "--raw", "--cache", "--settings")
    kept = [word for before, word in zip(("", *words), words, strict=False) if before not in private]
    return " ".join(word for word in kept if word.partition("=")[0] not in private)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return run(lambda: made_table(track_named("llm"), DESCRIPTION, "compare", words))
