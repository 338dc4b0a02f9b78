"""Next month: fedecider update --run runs/x --company shop --events new.parquet --output runs/x-february."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedecider.running.options import build_parser, parse, run
from fedecider.running.progress import log_line

DESCRIPTION = (
    "Put a company's new events into the counts of its hybrid, in seconds: nothing is trained. The updated counts rank "
    "the newest event of each customer before they are written, into a new run folder; the old one stays."
)


@dataclass(frozen=True)
class UpdateConfig:
    """Update: which run and company, and what is new.

    Args:
        run: The run folder whose hybrid is updated.
        events: The table of new events, with columns of customers, items and, better, times.
        output: The run folder to write.
        company: The company; may be left out where there is only one.
        data: Prepared data with the histories that are counted now; if empty, those of the run.
        force: If true, written also where the updated counts rank the newest events worse.
    """

    run: str
    events: str
    output: str
    company: str = ""
    data: str = ""
    force: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(build_parser(DESCRIPTION, UpdateConfig), argv, UpdateConfig)
        from fedecider.models.update import in_words, update_counts  # after the options: --help does without

        done = update_counts(
            config.run, config.company or None, config.events, config.output, config.data, config.force
        )
        for line in in_words(done, config.company or config.run):
            log_line(line)
        if done.folder is None:
            raise ValueError(
                f"got updated counts that rank worse (hit@10 {done.test.new:.4f}, before {done.test.old:.4f}), "
                "expected no loss of two standard errors; nothing was written. Look at the events, or give --force true"
            )
        log_line(f"written to {done.folder}; the way back is {config.run}")

    return run(work)
