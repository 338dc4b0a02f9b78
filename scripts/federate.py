"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/: its distill.py would hide the package

from collections.abc import Sequence

from fedecider.cli import run
from fedecider.commands import parse_run
from fedecider.embedding import EmbeddingSettings, federate_embedding
from fedecider.federate import federate
from fedecider.launch import start

DESCRIPTION = """Train one recommender per domain, together, without showing each other an interaction.
Missing stages (pre-training, distillation) are run first and kept for later runs. Without --config and --data the
embedded sample is used with the settings of configs/demo.yaml. --method decides which method options there are.
Methods of the embedding line (fedmf, fedrap, ...) take a rating data set instead, every user of which is a client:
--method fedmf --dataset ml-100k."""


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
