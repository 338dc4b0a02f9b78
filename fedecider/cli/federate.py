"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from fedecider.federation.registry import LLM_METHODS, of_fedecider, outside_methods
from fedecider.id_based import METHODS as ID_METHODS
from fedecider.running.options import peek, run

DESCRIPTION = "Train recommenders together, without any client showing another one an interaction."
LLM = f"""{DESCRIPTION} Every domain is a client; stages that are missing (pre-training, distillation) are run first and
kept. Without --config and --data the embedded sample is used with the settings of configs/demo_causal.yaml. Other
methods ({", ".join(EMBEDDING_METHODS)}) belong to the embedding track, where every user of a rating data set is a
client, and have other options: --method fedmf --help. So have methods over domains without a language model
({", ".join(ID_METHODS)})."""
EMBEDDING = f"""{DESCRIPTION} Every user of a rating data set is a client. Methods of the LLM track, where every domain
is a client, have other options: --method fedecider --help."""
ID_BASED = f"""{DESCRIPTION} Every prepared domain or silo is a client, and models know item IDs alone: no language
model. Methods of the LLM track have other options: --method fedecider --help."""


def track_of(words: Sequence[str]) -> Literal["llm", "embedding", "id"]:
    """The track of the chosen method; nothing of the LLM track is imported, which takes seconds.

    Raises:
        ValueError: the data are those of the other track, or both tracks have a method of that name.
    """
    method = peek(words, "method", "fedecider")
    if reason := taken_name(method):
        raise ValueError(reason)
    if method in EMBEDDING_METHODS:
        return "embedding"
    if method in ID_METHODS:
        return "id"
    if peek(words, "dataset"):
        raise ValueError(
            f"got dataset with the method {method}, expected --domains and --data, or a method of the embedding track: "
            f"{', '.join(EMBEDDING_METHODS)}"
        )
    return "llm"


def taken_name(method: str) -> str:
    """Why a method of an installed package cannot have its name, where a built-in one of the other track has it.

    Empty where none has. What a track refuses by itself is not looked at (`fedecider.federation.registry`).
    """
    if method in ID_METHODS:
        points = outside_methods(LLM_METHODS).get(method) or outside_methods(EMBEDDING_METHODS.group).get(method)
    elif method in EMBEDDING_METHODS.built_in:
        points = outside_methods(LLM_METHODS).get(method)
    elif method in EMBEDDING_METHODS:
        from fedecider.methods import BUILT_IN  # takes seconds, which only methods from outside cost

        points = outside_methods(EMBEDDING_METHODS.group)[method] if method in BUILT_IN else None
    else:
        points = None
    return of_fedecider(method, points[0]) if points else ""


def run_embedding(words: Sequence[str]) -> None:
    from embedding_fr.commands import parse_embedding_settings

    settings = parse_embedding_settings(EMBEDDING, words, peek(words, "method"))

    from embedding_fr.run import federate_embedding  # after the options: --help does without
    from fedecider.running.launch import start

    with start(settings.run.num_threads, settings.run.tracker) as launch:
        federate_embedding(settings, launch)


def run_id_based(words: Sequence[str]) -> None:
    from fedecider.id_based.run import parse_id_settings

    settings = parse_id_settings(ID_BASED, words, peek(words, "method"))

    from fedecider.id_based.run import federate_ids  # after the options: --help does without
    from fedecider.running.launch import start

    with start(settings.run.num_threads) as launch:
        federate_ids(settings, launch)


def run_llm(words: Sequence[str]) -> None:
    from fedecider.experiment.command_line import parse_settings
    from fedecider.methods import METHODS

    method = peek(words, "method", "fedecider")
    if method not in METHODS:
        raise ValueError(
            f"got method {method!r}, expected one of {', '.join(sorted(METHODS))} (LLM track) or "
            f"{', '.join(sorted(EMBEDDING_METHODS))} (embedding track) or {', '.join(ID_METHODS)} (item IDs alone)"
        )
    settings = parse_settings(LLM, words)

    from fedecider.experiment.federate import federate
    from fedecider.running.launch import start

    with start(settings.run.num_threads, settings.run.tracker) as launch:
        federate(settings, launch)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    tracks = {"embedding": run_embedding, "id": run_id_based, "llm": run_llm}
    return run(lambda: tracks[track_of(words)](words))
