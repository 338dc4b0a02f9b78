"""Settings of a method, searched on validation items: fedecider tune --method fedmf --dataset ml-100k --trials 20."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from fedecider.cli.federate import track_of
from fedecider.experiment.tuning import TuneConfig
from fedecider.running.options import peek, run

DESCRIPTION = """Search the settings of a method on validation items; the test items are not looked at. Options are
those of federate: one on the command line stays as it is, a file of --config gives the start of the search."""
OTHER = f"""Methods of the embedding track ({", ".join(EMBEDDING_METHODS)}) have other options: tune --method fedmf
--help."""


def given(words: Sequence[str]) -> list[str]:
    """Names of the options on the command line."""
    return [word[2:].partition("=")[0] for word in words if word.startswith("--")]


def run_embedding(words: Sequence[str]) -> None:
    from embedding_fr.commands import parse_embedding_settings_and

    method = peek(words, "method")
    settings, (config,) = parse_embedding_settings_and(DESCRIPTION, words, method, TuneConfig)

    from embedding_fr.tune import tune_embedding  # after the options: --help does without
    from fedecider.running.launch import start

    with start(settings.run.num_threads) as launch:
        tune_embedding(settings, config, given(words), launch)


def run_llm(words: Sequence[str]) -> None:
    from fedecider.experiment.command_line import parse_settings_and

    settings, (config,) = parse_settings_and(f"{DESCRIPTION} {OTHER}", words, TuneConfig)

    from fedecider.experiment.tune import tune_llm
    from fedecider.running.launch import start

    with start(settings.run.num_threads) as launch:
        tune_llm(settings, config, given(words), launch)


def refuse(words: Sequence[str]) -> None:
    raise ValueError(
        f"got method {peek(words, 'method')}, expected one of both tracks: ID-based methods are tuned by compare, "
        "which has them among its baselines"
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    tracks = {"embedding": run_embedding, "id": refuse, "llm": run_llm}
    return run(lambda: tracks[track_of(words)](words))
