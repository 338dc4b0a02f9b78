"""Every method, baseline and protocol on one data set: python scripts/leaderboard.py --dataset ml-100k."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from embedding_fr.leaderboard import LeaderboardConfig
from fedecider.data.interactions import InteractionsConfig
from fedecider.running.options import build_parser, parse, run

DESCRIPTION = """Run and rank all methods of the embedding track on one data set, with equal tuning budgets on
validation, several seeds, intervals and paired tests. Runs are kept, so a stopped table goes on where it was."""

COMMON = ("help", "config", "dataset", "source", "raw", "output", "methods", "protocol", "seeds", "tune", "num_rounds")


def public_words(words: Sequence[str]) -> str:
    """The command without the places of this machine."""
    private = ("--output", "--raw")
    kept = [word for before, word in zip(("", *words), words, strict=False) if before not in private]
    return " ".join(word for word in kept if word.partition("=")[0] not in private)


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        classes = (LeaderboardConfig, InteractionsConfig)
        config, data = parse(build_parser(DESCRIPTION, *classes, common=COMMON), argv, *classes)

        import torch  # what only the work needs comes after the options: --help does without

        from embedding_fr.leaderboard import fill, write_leaderboard
        from fedecider.data.interactions import load_interactions
        from fedecider.running.run_folder import check_output, git_commit

        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        if config.output:
            check_output(Path(config.output))
        interactions = load_interactions(data)
        root = Path(config.output or f"runs/leaderboard-{interactions.name}")
        rows = list(fill(config, data, interactions, root))
        if not config.only_cells:
            words = public_words(sys.argv[1:] if argv is None else argv)
            heading = [f"- Commit: {git_commit()}", f"- Command: `python scripts/leaderboard.py {words}`"]
            print(f"written: {write_leaderboard(config, interactions, rows, root, heading)}")

    return run(work)
