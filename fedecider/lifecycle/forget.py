"""Customers leave: their events out of the counts of an ensemble, exactly, and their histories out of the folder.

What is written is a version of the run that nobody goes back from: all earlier ones count the customers, and what is
private of them is removed. Trained weights cannot be subtracted from; what still remembers is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedecider.lifecycle.update import Counted, counted, counted_part, put_private, with_counts
from fedecider.models.counts import count_events, without
from fedecider.models.ensemble_files import SETTINGS_FILE
from fedecider.models.item_table import read_item_ids
from fedecider.models.lists import HISTORIES_FILE
from fedecider.models.versions import add_version, changing, folder_of, home_of, in_force, read_versions
from fedecider.running.damage import read_object
from fedecider.running.manifest import note_changed, read_manifest
from fedecider.running.run_folder import SENT_FILE, RunFolder, read_run
from fedecider.scratch import aside


class Forgotten(NamedTuple):
    """What was taken out, and what still remembers."""

    folder: Path
    version: int
    num_customers: int
    num_events: int
    """Of their histories, counted or not."""
    removed: tuple[int, ...]
    """Versions of which nothing private is left."""
    remembers: tuple[str, ...]
    """Sentences."""


def forget(run: str | Path, company: str | None, customers: Sequence[str], data: str = "") -> Forgotten:
    """Take customers out of the counts and the histories of a company.

    Args:
        customers: Their keys, ``17`` or ``north:17``.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.

    Raises:
        ValueError: a customer whom the company does not have, nobody would be left, ``run`` is a version that is not in
            force, or as `fedecider.lifecycle.update.update`.
        FileNotFoundError: there is no such run or company.
    """
    now = counted(run, company, data)
    home, name = home_of(now.run.root), now.place.domain
    with changing(home):
        now = counted(run, company, data)  # nobody else changes it from here on
        if now.run.root != in_force(home):
            raise ValueError(
                f"got {run}, a version that is not in force, expected the run {home}: what later versions have counted "
                f"would be lost. If that is meant, go back first: fedecider update --run {home} --version "
                f"{now.run.root.name}"
            )
        left = _called(now, home, customers)
        gone, stay = now.histories.split(left)
        if not stay.customers:
            raise ValueError(f"got all {len(gone.customers)} customers of {name}, expected some to stay")
        gone_counts = count_events(counted_part(gone), len(now.keys))
        ensemble = with_counts(now.ensemble, without(now.ensemble.knowledge.counts, gone_counts))
        remembers = _remembers(now, home)
        removed = tuple(read_versions(home).numbers)

        def change(folder: RunFolder) -> None:
            put_private(folder, name, ensemble, now.keys, stay)
            files = [folder.root / file for file in read_manifest(folder.root).customers]
            for file in files:
                if file.name == folder.per_user.name:
                    _without(file, name, left)
                elif not file.is_relative_to(folder.private):
                    file.unlink(missing_ok=True)
            note_changed(folder.root, files)

        about = f"{_customers(len(left))} of {name} forgotten"
        number = add_version(home, now.run.root, about, change, forgets=True)
    return Forgotten(home, number, len(left), len(gone.sequences.value_E), removed, tuple(remembers))


def _called(now: Counted, home: Path, customers: Sequence[str]) -> set[str]:
    """Customers as the histories call them."""
    name, prefix = now.place.domain, now.histories.prefix(now.place.domain)
    known, found = _kept(now, home), set()
    for customer in customers:
        names = [one for one in (customer, f"{prefix}{customer}") if one in known]
        if not names:
            raise ValueError(
                f"got the customer {customer!r}, expected one of the {len(known):,} private ones of {name}. A public "
                "one is in the backbone and in everybody's counts: prepare the data without them, and run again"
            )
        found.add(names[0])
    if not found:
        raise ValueError("got no customer, expected some: --customer K, or K1,K2")
    return found


def _kept(now: Counted, home: Path) -> set[str]:
    """Customers of this version, and of others, which may have new ones of their own."""
    known = set(now.histories.customers)
    for number in read_versions(home).numbers:
        file = folder_of(home, number) / "private" / now.place.domain / HISTORIES_FILE
        known |= _column(file, "customer") if file.is_file() else set()
    return known


def _remembers(now: Counted, home: Path) -> list[str]:
    """Sentences about what has seen the customers, and stays."""
    name = now.place.domain
    said = [
        f"the adapter of {name} was trained with their events, and so was what others took from it: training on "
        "without them (update --epochs) lets it fade, a federation anew forgets it",
        "the weights of the ensemble, one number a feature, were fitted with their events: an update fits them again",
    ]
    sums = [one for one in now.source.domains if one != name and _sums(now, one)]
    if sums:
        said.append(f"the counts of {', '.join(sums)} hold their events in a sum over others, until a federation anew")
    elif len(now.source.domains) == 1 and "others" in now.ensemble.sources:  # a site, which sees no other
        said.append("counts of companies with the same catalogue may hold their events in a sum over others")
    if RunFolder(home).checkpoints.is_dir():
        said.append(f"{RunFolder(home).checkpoints} has the adapters as they were: remove it where no audit needs it")
    if (sent := home / SENT_FILE).is_file():
        said.append(f"{sent} is what this site sent last: remove it where no audit needs it")
    if where := read_run(home)["config"]["run"].get("data"):
        said.append(f"the prepared data in {where} hold their events: prepare them without these customers")
    return said


def _sums(now: Counted, other: str) -> bool:
    """Whether another company of the run counts the sum of this one's catalogue."""
    private, own = now.run.private / other / SETTINGS_FILE, read_item_ids(now.place.adapter).catalogue
    if not private.is_file() or not own or read_item_ids(now.run.adapters / other).catalogue != own:
        return False
    return "others" in read_object(private, {"sources": list})["sources"]


def _without(path: Path, company: str, customers: set[str]) -> None:
    """Take the customers of a company out of ``per_user.parquet``."""
    import pyarrow.compute as pc
    import pyarrow.parquet

    if path.is_file():
        theirs = (pc.field("domain") == company) & pc.field("user").isin(sorted(customers))
        with aside(path) as scratch:
            pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).filter(~theirs), scratch)


def _column(path: Path, name: str) -> set[str]:
    import pyarrow.parquet  # only where it is read: --help does without

    return set(map(str, pyarrow.parquet.read_table(path, columns=[name]).column(name).unique().to_pylist()))


def _customers(count: int) -> str:
    return f"{count:,} customer{'s' if count != 1 else ''}"


def in_words(done: Forgotten, company: str) -> list[str]:
    """What was forgotten, and what was not, line by line."""
    versions = ", ".join(map(str, done.removed))
    return [
        f"{company}: {_customers(done.num_customers)} and {done.num_events:,} events of theirs are out of the counts "
        f"and the histories; version {done.version} of {done.folder} is in force",
        f"removed: what was private of version {versions}, to which nobody can go back; everywhere the "
        "page and its examples, which hold purchases, and the customers' lines of per_user.parquet",
        *(f"still remembers: {one}" for one in done.remembers),
    ]
