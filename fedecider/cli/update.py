"""Next month: fedecider update --run runs/x --company shop --events new.parquet; back: --run runs/x --version 1."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fedecider.bounds import ZeroOrMore, dataclass
from fedecider.running.command import run
from fedecider.running.options import parse
from fedecider.running.progress import log_line

DESCRIPTION = (
    "Put a company's new events into the counts of its ensemble and fit its weights again, in seconds; with --epochs "
    "train its adapter on. Each customer's newest event or basket is ranked by the old and the new before a new "
    "version of the run is in force. Without events: the versions of the run, or another one in force."
)


@dataclass(frozen=True)
class UpdateConfig:
    """Update: which run and company, and what is new.

    Args:
        run: The output directory whose ensemble is updated.
        events: The table of new events, with columns of customers, items and, better, times.
        columns: How it is read, as import takes it: a mapping file, or user=customer,time_format=%d.%m.%Y.
        company: The company; may be left out where there is only one.
        epochs: Epochs of training of the company's adapter over the customers with new events; 0 leaves it as it is.
        new_items: A file with items that came after the training, .csv or .jsonl with key, title and text: those of the
            events are counted from now on, and those that nobody has bought yet are recommended by their texts.
        version: The version that is in force from now on, such as the one before; 1 is the run as it was trained.
        output: An output directory to write in the place of a new version of the run.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.
        device: The device of the model, cpu or cuda.
        force: If true, written also where the updated ensemble ranks the newest events worse.
    """

    run: str
    events: str = ""
    columns: str = ""
    company: str = ""
    epochs: ZeroOrMore = 0
    new_items: str = ""
    version: ZeroOrMore = 0
    output: str = ""
    data: str = ""
    device: str = "cpu"
    force: bool = False

    def __post_init__(self) -> None:
        names = ("columns", "company", "epochs", "new_items", "output", "data", "force")
        given = [name for name in names if getattr(self, name)]
        if self.events and self.version:
            raise ValueError("got --events and --version, expected one of them: new events, or another version")
        if given and not self.events:
            raise ValueError(f"got --{given[0]} without --events, expected the table of new events")


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, UpdateConfig)
        if not config.events:
            _versions(config)
            return
        from fedecider.data.mapping import columns_from
        from fedecider.lifecycle.update import in_words, update  # after the options: --help does without

        done = update(
            config.run,
            config.company or None,
            config.events,
            config.output,
            data=config.data,
            force=config.force,
            epochs=config.epochs,
            device=config.device,
            new_items=config.new_items,
            how=columns_from(config.columns),
        )
        for line in in_words(done, config.company or config.run):
            log_line(line)
        if done.folder is None:
            if done.events.num_unknown:
                log_line(_counted_too(config, done.takes_none, ""))
            raise ValueError(
                f"got an updated ensemble that ranks worse (hit@10 {done.test.new:.4f}, before {done.test.old:.4f}), "
                "expected no loss of two standard errors; nothing was written. Look at the events, or give --force true"
            )
        next_one = "; next: fedecider recommend --all --output lists.csv" + _where(config, str(done.folder))
        if not done.version:
            if done.events.num_unknown:
                log_line(_counted_too(config, done.takes_none, ""))
            log_line(f"written to {done.folder}; the way back is {config.run}{next_one}")
            return
        from fedecider.models.versions import read_versions

        before = read_versions(done.folder).known[done.version].made_from
        back = f"fedecider update --run {done.folder} --version {before}"
        if done.events.num_unknown:
            log_line(_counted_too(config, done.takes_none, f"{back}, and then "))
        log_line(
            f"version {done.version} of {done.folder} is in force; a service takes it when it is started again; the "
            f"way back: {back}{next_one}"
        )

    return run(work)


def _where(config: UpdateConfig, run: str) -> str:
    return f" --run {run}" + (f" --company {config.company}" if config.company else "")


def _counted_too(config: UpdateConfig, takes_none: str, before: str) -> str:
    """How events of items that the catalogue does not have are counted too."""
    if takes_none:
        return f"the events that were left out cannot be counted in this run: {takes_none}"
    names = ("events", "columns", "epochs", "output", "data")
    given = [f" --{name} {shlex.quote(str(getattr(config, name)))}" for name in names if getattr(config, name)]
    return (
        f"to count the events that were left out: {before}fedecider update{_where(config, config.run)}{''.join(given)} "
        "--new_items FILE, a .csv with key,title,text of these items"
    )


def _versions(config: UpdateConfig) -> None:
    """What versions there are, after another one has been put in force if that is asked."""
    from fedecider.models.source import find_source
    from fedecider.models.versions import changing, go_back, home_of, read_versions

    source = find_source(config.run)
    if source.run is None:
        raise ValueError(f"got {config.run}, which is no output directory, expected one: it has no versions")
    home = home_of(source.run.root)
    if config.version:
        with changing(home):
            go_back(home, config.version)
    for line in read_versions(home).in_words():
        log_line(line)
