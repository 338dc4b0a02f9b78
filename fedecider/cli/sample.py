"""The tables of four planted shops: fedecider sample --output shops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.bounds import dataclass
from fedecider.running.command import run
from fedecider.running.options import parse

DESCRIPTION = """Write the tables of four shops that sell the same books, with planted orders, and say how they are
trained on: a way to see fedecider federate --events at work before there are tables of your own."""


@dataclass(frozen=True)
class SampleConfig:
    """Planted tables.

    Args:
        output: The folder of the tables.
    """

    output: str = "shops"


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, SampleConfig)

        from fedecider.data.sample import write_shops

        *shops, products = write_shops(Path(config.output))
        print(f"now: fedecider federate --events {','.join(map(str, shops))} --items {products}")

    return run(work)
