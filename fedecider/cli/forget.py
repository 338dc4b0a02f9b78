"""A customer leaves: fedecider forget --run runs/x --company shop --customer 17."""

from __future__ import annotations

from collections.abc import Sequence

from fedecider.bounds import dataclass
from fedecider.running.command import run
from fedecider.running.options import keys_of, parse
from fedecider.running.progress import log_line

DESCRIPTION = (
    "Take customers out of the counts of a company's ensemble, exactly, and delete their histories, in every "
    "version of the run: there is no way back. What was trained with their events is said, as it remembers."
)


@dataclass(frozen=True)
class ForgetConfig:
    """Forget: whom, and where.

    Args:
        run: The output directory.
        customer: The customer's key; several are separated by commas. A key with a comma stands in quotes:
            '"Smith, J",17'.
        company: The company; may be left out where there is only one.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.
    """

    run: str
    customer: str
    company: str = ""
    data: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, ForgetConfig)
        from fedecider.lifecycle.forget import forget, in_words  # after the options: --help does without

        done = forget(config.run, config.company or None, keys_of(config.customer, "customer"), config.data)
        for line in in_words(done, config.company or config.run):
            log_line(line)

    return run(work)
