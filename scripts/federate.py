"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/: its distill.py would hide the package

from collections.abc import Sequence

from embedding_fr.commands import parse_embedding_settings
from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from embedding_fr.run import federate_embedding
from embedding_fr.setup import EmbeddingSettings
from fedecider.llm.commands import parse_settings
from fedecider.llm.config import RunConfig
from fedecider.llm.federate import federate
from fedecider.llm.setup import Settings
from fedecider.methods import METHODS
from fedecider.running.cli import peek, run
from fedecider.running.launch import start

DESCRIPTION = """Train one recommender per domain, together, without showing each other an interaction.
Missing stages (pre-training, distillation) are run first and kept for later runs. Without --config and --data the
embedded sample is used with the settings of configs/demo.yaml. --method decides which method options there are.
Methods of the embedding track (fedmf, fedrap, ...) take a rating data set instead, every user of which is a client:
--method fedmf --dataset ml-100k."""


def parse_run(description: str, argv: Sequence[str] | None) -> Settings | EmbeddingSettings:
    """Settings of a federated run; the method decides the track, and with it which options there are."""
    words = sys.argv[1:] if argv is None else list(argv)
    method = peek(words, "method", RunConfig.method)
    if method in EMBEDDING_METHODS:
        return parse_embedding_settings(description, words, method)
    if method in METHODS and peek(words, "dataset"):
        raise ValueError(f"got dataset with the method {method} of the LLM track, expected --domains and --data")
    if method not in METHODS:
        raise ValueError(
            f"got method {method!r}, expected one of {', '.join(sorted(METHODS))} (LLM track) or "
            f"{', '.join(sorted(EMBEDDING_METHODS))} (embedding track)"
        )
    return parse_settings(description, words)


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        settings = parse_run(DESCRIPTION, argv)
        with start(settings.run.num_threads, settings.run.tracker, settings.run.output or "runs") as launch:
            if isinstance(settings, EmbeddingSettings):
                federate_embedding(settings, launch)
            else:
                federate(settings, launch)

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
