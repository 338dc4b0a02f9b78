"""Raw files of a public data set -> prepared domains; python scripts/prepare_data.py --help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.data.prepare import PrepareConfig, prepare
from fedecider.running.command import run
from fedecider.running.options import parse
from fedecider.running.run_folder import check_output

DESCRIPTION = (
    "Read the original files of a public data set and write a prepared folder per domain (Parquet, data card)."
)


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, PrepareConfig)
        check_output(Path(config.output))
        prepare(config)

    return run(work)
