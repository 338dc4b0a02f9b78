"""Learn from companies with other backbones: fedecider fedmd --run runs/north --events public.csv --lists a,b."""

from __future__ import annotations

from collections.abc import Sequence

from fedecider.bounds import OneOrMore, dataclass
from fedecider.running.command import run
from fedecider.running.options import keys_of, parse
from fedecider.running.progress import log_line

DESCRIPTION = (
    "A round of FedMD for companies whose backbones differ. First each company writes lists for the same table of "
    "public histories (fedecider recommend --all --events PUBLIC --k 50 --output north.parquet) and sends them to the "
    "others. Then its adapter learns from the mean of all lists and from its own events; the new version is in force "
    "where it ranks validation items better."
)


@dataclass(frozen=True)
class FedmdConfig:
    """FedMD: which run learns, and from which lists.

    Args:
        run: The output directory of the company's own run.
        lists: The files of lists of all companies, the own one too, separated by commas; .parquet.
        events: The table of public histories that the lists were made for.
        company: The company; may be left out where there is only one.
        epochs: Epochs over the public histories, and then over the company's own events.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.
    """

    run: str
    lists: str
    events: str
    company: str = ""
    epochs: OneOrMore = 2
    data: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, FedmdConfig)
        from fedecider.lifecycle.fedmd import fedmd  # after the options: --help does without

        lists, company = keys_of(config.lists, "lists"), config.company or None
        done = fedmd(config.run, lists, config.events, company, epochs=config.epochs, data=config.data)
        log_line(
            f"learned from {done.num_histories:,} public histories; validation ndcg@10 of the model "
            f"{done.old.ndcg:.4f} before, {done.new.ndcg:.4f} after (hit@10 {done.old.hit:.4f}, {done.new.hit:.4f})"
        )
        if done.version:
            log_line(
                f"version {done.version} of {config.run} is in force (all versions: fedecider update --run "
                f"{config.run}); for the next round write lists again"
            )
        else:
            log_line(f"no gain: {config.run} stays as it was; for the next round write lists again")

    return run(work)
