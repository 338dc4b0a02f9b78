"""Settings of an ID-based run from a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.id_based import METHODS
from fedecider.id_based.config import IdRunConfig, IdSettings
from fedecider.running.cli import build_parser, parse, peek
from fedecider.running.run_folder import check_output

COMMON = ("help", "config", "method", "domains", "data", "output", "num_rounds", "seed", "num_threads", "resume")
"""What ``--help`` shows first."""


def parse_id_settings(description: str, words: Sequence[str], method: str) -> IdSettings:
    """Settings of one run.

    Raises:
        ValueError: an option of another track, or a setting that cannot be.
    """
    foreign = [name for name in ("dataset", "lora_rank") if peek(words, name)]
    if foreign:
        raise ValueError(f"got {foreign[0]} with the method {method}, expected --data and --domains")
    classes = (IdRunConfig, METHODS[method].config)
    texts = {"method": f"The federated method: {', '.join(METHODS)}."}
    parser = build_parser(description, *classes, common=COMMON, texts=texts)
    parser.set_defaults(method=method)
    run, own = parse(parser, words, *classes)
    if run.output:
        check_output(Path(run.output))
    return IdSettings(run, own)
