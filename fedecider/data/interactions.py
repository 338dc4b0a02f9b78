"""Rating data for models of embeddings: every user is a client, an item is a number, a pair counts once.

Shape legend: E events, U users, I items.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedecider.bounds import ZeroOrMore, dataclass
from fedecider.data import filtering
from fedecider.data.card import describe
from fedecider.data.content import update_json
from fedecider.data.domain import UNKNOWN_TIME, EventArrays, Events, check_item_numbers
from fedecider.data.dropped import Dropped, Size
from fedecider.data.readers import SOURCES, RawDomain, ReadOptions, reading
from fedecider.data.store import file_sha256, load_domains
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.evaluation.sequences import SequenceArray

PREPARED = "prepared"
"""The source of domains that scripts/prepare_data.py wrote."""
OWN_TABLE = "fedecider import {table} --company NAME --output data, then --source prepared --raw data --dataset NAME"


class DataSet(NamedTuple):
    """Where a known data set lies and how the field cuts it."""

    source: str
    folder: str
    """Under the data root."""
    min_user_events: int
    domain: str = ""
    """What the reader calls it, where that is not the data set's own name."""
    fetch: str = ""
    """Which files to fetch, and the publisher's page; nothing is fetched by itself."""


MOVIELENS = "https://grouplens.org/datasets/movielens/"
HETREC = "https://grouplens.org/datasets/hetrec-2011/"
DATASETS: dict[str, DataSet] = {
    "ml-100k": DataSet("movielens", "movielens/ml-100k", 10, fetch=f"u.data and u.item of {MOVIELENS}100k/"),
    "ml-1m": DataSet("movielens", "movielens/ml-1m", 10, fetch=f"ratings.dat and movies.dat of {MOVIELENS}1m/"),
    "ml-latest-small": DataSet(
        "movielens", "movielens/ml-latest-small", 10, fetch=f"ratings.csv and movies.csv of {MOVIELENS}latest/"
    ),
    # FedEM and PFedCLR print 10 for this one too, but their 1,600 users are those with 5 tags.
    "lastfm-2k": DataSet(
        "lastfm_tags", "hetrec2011-lastfm-2k", 5, fetch=f"user_taggedartists.dat and artists.dat of {HETREC}"
    ),
    # FedRAP's 1,874 users are those with 10 artists.
    "lastfm-2k-plays": DataSet(
        "lastfm_plays", "hetrec2011-lastfm-2k", 10, fetch=f"user_artists.dat and artists.dat of {HETREC}"
    ),
    # 10: FedEM, PFedCLR (1,002 users); 5: FedRecGEL (1,227 users).
    "filmtrust": DataSet(
        "filmtrust",
        "filmtrust",
        10,
        fetch="ratings.txt of https://guoguibing.github.io/librec/datasets.html, or datasets/filmtrust/ratings.dat of "
        "https://github.com/hongleizhang/FedCA",
    ),
    # 5: FedRecGEL (8,072 users); 10: FedRAP (1,372 users).
    "amazon-instant-video": DataSet(
        "amazon_ratings",
        "amazon-instant-video",
        5,
        fetch="the ratings of Amazon Instant Video from http://jmcauley.ucsd.edu/data/amazon/, as ratings.dat",
    ),
    "amazon-gift-cards": DataSet(
        "amazon",
        "amazon2018-gift-cards-raw",
        5,
        "gift_cards",
        "Gift_Cards_5.json.gz and meta_Gift_Cards.json.gz of https://nijianmo.github.io/amazon/",
    ),
}
"""Data sets by name. ``min_user_events`` counts rows, before a repeated pair is counted once, as the papers do."""


@dataclass(frozen=True)
class InteractionsConfig:
    """Rating data: what to read and what to keep.

    Errors: ``ValueError``.
    """

    dataset: str = "ml-100k"
    """The data set: ml-100k, ml-1m, ml-latest-small, lastfm-2k, lastfm-2k-plays, filmtrust, amazon-instant-video or
    amazon-gift-cards; with source, a name of your own."""
    source: str = ""
    """The reader of files of your own: movielens, amazon, lists, prepared, ... It needs raw. A table of your own
    is imported first (fedecider import), and is prepared then."""
    raw: str = ""
    """The folder with the files. If empty, the place of the data set below FEDECIDER_DATA, ../shared/data or data."""
    min_user_events: ZeroOrMore | None = None
    """Users with fewer rows are dropped; rows are counted before repeats are removed. If not given, it is what the
    papers take (5 or 10), and 3 for data of your own."""
    min_item_events: ZeroOrMore | None = None
    """Items with fewer rows are dropped, in turns with the rule for users until nothing changes. If not given, no item
    is dropped."""
    implicit_threshold: float | None = None
    """Events with a lower rating are dropped. If not given, all events are kept, as in the papers."""
    max_bad_lines: ZeroOrMore = 100
    """So many unreadable lines of a file are skipped; one more is an error."""

    def __post_init__(self) -> None:
        _check_data_set(self)
        if self.source == PREPARED and self.filters:
            raise ValueError(
                f"got {', '.join(self.filters)} with source {PREPARED}; expected none, for prepared data are filtered "
                "already. Prepare them again (--k_core, --min_length, --min_rating of scripts/prepare_data.py)."
            )

    @property
    def filters(self) -> list[str]:
        """The names of the filters that are set."""
        names = ("min_user_events", "min_item_events", "implicit_threshold")
        return [name for name in names if getattr(self, name) is not None]


def data_root() -> Path:
    """The folder of the data sets: FEDECIDER_DATA, else shared/data beside the repository, else ``data``.

    It may not exist.
    """
    given = os.environ.get("FEDECIDER_DATA")
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(given) if given else beside if beside.is_dir() else Path("data")


def _check_data_set(config: InteractionsConfig) -> None:
    name = config.dataset
    if not config.source:
        if name not in DATASETS:
            raise ValueError(
                f"got dataset {name!r}; expected one of {sorted(DATASETS)}. "
                "For files of your own, give --source and --raw."
            )
        return
    if config.source == "csv":
        raise ValueError(
            f"got source csv; expected a table to be imported first: {OWN_TABLE.format(table='TABLE.csv')}"
        )
    if config.source not in SOURCES and config.source != PREPARED:
        raise ValueError(f"got source {config.source!r}; expected one of {sorted([*SOURCES, PREPARED])}")
    if name in DATASETS:
        raise ValueError(
            f"got source {config.source!r} for the known data set {name!r}; expected a name of your own with --source. "
            "Give another --dataset, or leave --source out."
        )
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"got dataset {name!r}; expected letters, digits, '_', '-' and '.' only")
    if not config.raw:
        raise ValueError(f"got source {config.source!r} without raw; expected the folder of the files. Give --raw.")


DESCRIPTION_CHARS = 500
"""Of an item's description, as in prepared data unless told otherwise."""
FILE_ORDER = "file order"
TOO_FEW = "below min_user_events or min_item_events"
REPEATS = "repeats"
TOO_SHORT = f"fewer than {MIN_EVENTS} items"
"""Why users are dropped that cannot be split."""


@dataclasses.dataclass(frozen=True)
class Interactions:
    """One data set, ready for training: each user's items, oldest first, each item once. Errors: ``ValueError``."""

    name: str
    users: list[str]
    item_keys: list[str]
    """Sorted; an item number is an index into this list."""
    titles: list[str]
    """Empty text where not known."""
    sequences: Sequence[list[int]]
    """Item numbers of each user, oldest first, at least ``MIN_EVENTS``: training, validation, test. Become arrays."""
    timestamps: Sequence[list[int]] | None
    """Unix seconds of each event (``UNKNOWN_TIME`` where not known), or None when no time at all is known."""
    card: dict[str, Any]
    """Counts, ties in time, what was dropped and why, checksums."""
    texts: Sequence[str] = ()
    """What is known of each item, as ``title: ...; genres: ...``; empty where nothing is, or for all items at once."""

    def __post_init__(self) -> None:
        events = Events(self.users, self.sequences, self.timestamps).arrays()
        _check(self, events)
        object.__setattr__(self, "sequences", events.sequences.of_type(np.int32))
        object.__setattr__(self, "timestamps", events.timestamps)

    @property
    def clients(self) -> Interactions:
        """Users and sequences under the name that a :class:`fedecider.data.domain.Domain` has for them."""
        return self

    @property
    def num_users(self) -> int:
        return len(self.users)

    @property
    def num_items(self) -> int:
        return len(self.item_keys)

    @property
    def num_events(self) -> int:
        return len(SequenceArray.of(self.sequences).value_E)

    def content_hash(self) -> str:
        """Hexadecimal SHA-256 over everything that can influence a result of embeddings (not titles, texts, card)."""
        digest = hashlib.sha256()
        update_json(digest, (self.name, self.users, self.item_keys, self.sequences, self.timestamps))
        return digest.hexdigest()


def load_interactions(config: InteractionsConfig, log: reading.Log = reading.to_stderr) -> Interactions:
    """Read the data set of ``config``, filter it, put each user's events in order, count each pair once.

    Order: the source's own where it gives one, else time, ties in file order. Filters, one after the other: the rating
    threshold, ``min_user_events`` and ``min_item_events`` on rows, repeats (the first event of a pair stays), users
    with fewer than ``MIN_EVENTS`` events. The items are those that are left; of prepared data the whole catalogue, so
    that models of texts and of embeddings rank the same candidates. ``log`` hears every few seconds how far a file is
    read, and at the end what was left out.
    Differs from the papers: that last filter. LastFM-2K has 200 users of 1,600 whose 5 tags name 1 or 2 artists.
    Errors: ``ValueError`` for a missing folder or file, too many bad lines, fewer than two users or items.
    """
    data = _from_prepared(config) if config.source == PREPARED else _from_files(config, log)
    size, order = Size(data.num_users, data.num_items, data.num_events), data.card["order"]
    untimed = ": no times, so a user's last row is the test item" if order == FILE_ORDER else ""
    log(f"{data.name}: {size}; order of a user's events: {order}{untimed}; {Dropped(data.card['dropped'])}")
    return data


def _from_files(config: InteractionsConfig, log: reading.Log) -> Interactions:
    plan = DATASETS.get(config.dataset) or DataSet(config.source, "", MIN_EVENTS)
    folder = _folder(config, plan)
    options = ReadOptions(
        min_rating=config.implicit_threshold,
        max_bad_lines=config.max_bad_lines,
        duplicate_items="first",  # titles are for the reader of a report only
        texts_required=False,
        log=log,
    )
    raw = SOURCES[plan.source](folder, plan.domain or config.dataset, options)
    if not len(raw.events.user_E):
        raise ValueError(
            f"data set {config.dataset!r}: no events in {raw.files[0].path} ({raw.dropped()}). "
            "Check --implicit_threshold."
        )
    min_user = plan.min_user_events if config.min_user_events is None else config.min_user_events
    min_item = config.min_item_events or 0
    kept_E = filtering.k_core(raw.events.user_E, raw.events.item_E, min_user, min_item)
    filtered = filtering.order_events(filtering.compress(raw.events, kept_E))
    steps, before = Dropped(), raw.events.size()
    sequences = _count_once(filtered, steps, steps.step(TOO_FEW, before, filtered.size()))
    used = np.unique(sequences.item_E)
    fields = raw.read_catalogue(frozenset(sequences.items[i] for i in used.tolist())).items
    titles = {key: reading.display_title(one) for key, one in fields.items()}
    texts = {key: reading.item_text(one, reading.DEFAULT_TEXT_FIELDS, DESCRIPTION_CHARS) for key, one in fields.items()}
    dropped = raw.dropped().include(steps).plain()  # now, for the file of titles may have bad lines, too
    card = {"order": _order(raw.events), "dropped": dropped, "raw": _raw_card(raw, before)}
    card["settings"] = _settings(config, plan, min_user, min_item)
    return _interactions(config.dataset, sequences, used, titles, texts, card)


def _from_prepared(config: InteractionsConfig) -> Interactions:
    """The client users of one prepared domain; public users belong to the language models."""
    domain = load_domains(config.raw, [config.dataset])[config.dataset]
    users, rows, times = domain.clients.arrays()
    unknown_E = np.full(len(rows.value_E), UNKNOWN_TIME, np.int64)
    events = filtering.Sequences(
        users=users,
        items=domain.item_keys,
        start_U=rows.start_U,
        item_E=rows.value_E,
        time_E=unknown_E if times is None else times.value_E,
    )
    dropped, before = Dropped(), events.size()
    dropped.add("public users", users=len(domain.public.users), events=domain.public.num_events)
    sequences = _count_once(events, dropped, before)
    files = {f"{domain.name}/{name}": value for name, value in domain.card.get("tables_sha256", {}).items()}
    bad_lines = domain.card.get("raw", {}).get("bad_lines", {"count": 0, "examples": []})
    card = {
        "order": "as prepared",
        "dropped": dropped.plain(),
        "raw": {"files": files, **before._asdict(), "bad_lines": bad_lines},
        "settings": {"source": PREPARED, "content_hash": domain.content_hash()},
    }
    titles, texts = (dict(zip(domain.item_keys, told, strict=True)) for told in (domain.titles, domain.item_texts))
    return _interactions(config.dataset, sequences, np.arange(len(domain.item_keys)), titles, texts, card)


def _count_once(sequences: filtering.Sequences, dropped: Dropped, size: Size) -> filtering.Sequences:
    """Each pair at its first event; and of that, the users with enough events to be split."""
    single = filtering.take(sequences, filtering.first_occurrences(sequences))
    left = filtering.filter_core(single, MIN_EVENTS, 1)
    dropped.step(TOO_SHORT, dropped.step(REPEATS, size, single.size()), left.size())
    return left


def _interactions(
    name: str,
    sequences: filtering.Sequences,
    used: np.ndarray,
    titles: Mapping[str, str],
    texts: Mapping[str, str],
    card: dict[str, Any],
) -> Interactions:
    """Number the ``used`` items by sorted key and cut the events into users; the card gets its counts."""
    order = sorted(used.tolist(), key=sequences.items.__getitem__)
    number_of = np.zeros(len(sequences.items), dtype=np.int32)
    number_of[order] = np.arange(len(order))
    keys = [sequences.items[i] for i in order]
    known = bool((sequences.time_E != UNKNOWN_TIME).any())
    users = Events(
        sequences.users,
        SequenceArray(sequences.start_U, number_of[sequences.item_E]),
        SequenceArray(sequences.start_U, sequences.time_E) if known else None,
    )
    titled = [titles.get(key, "") for key in keys]
    counts = {"name": name, "items": len(keys), "titled_items": sum(map(bool, titled))}
    counts |= {"density": users.num_events / max(1, len(users.users) * len(keys))}
    whole = {**counts, **describe(users), **card}
    told = [texts.get(key, "") for key in keys]
    return Interactions(name, users.users, keys, titled, users.sequences, users.timestamps, whole, told)


def _raw_card(raw: RawDomain, size: Size) -> dict[str, Any]:
    files = {file.path.name: file_sha256(file.path) for file in raw.files}
    return {"files": files, **size._asdict(), "bad_lines": reading.describe_bad_lines(raw.files)}


def _settings(config: InteractionsConfig, plan: DataSet, min_user: int, min_item: int) -> dict[str, Any]:
    """What shaped the data; no paths, so that the card does not depend on where things lie."""
    return {
        "source": plan.source,
        "min_user_events": min_user,
        "min_item_events": min_item,
        "implicit_threshold": config.implicit_threshold,
    }


def _order(events: reading.RawEvents) -> str:
    """What decides which event of a user is the last one."""
    if events.order_E is not None and not reading.finer_than_seconds(events):
        return "the source's own order"
    return "time, ties in file order" if bool((events.time_E != UNKNOWN_TIME).any()) else FILE_ORDER


def _folder(config: InteractionsConfig, plan: DataSet) -> Path:
    folder = Path(config.raw) if config.raw else data_root() / plan.folder
    if config.raw and folder.is_file():
        own = OWN_TABLE.format(table=folder)
        raise ValueError(f"got raw {folder}, a file; expected its folder; of a table of your own: {own}")
    if not folder.is_dir():
        raise ValueError(
            f"data set {config.dataset!r}: there is no folder {folder}; expected its files in it. "
            f"{f'Fetch {plan.fetch} and put them there, zipped by gzip or not. ' if plan.fetch else ''}"
            "Set FEDECIDER_DATA to the folder of the data sets, or give --raw."
        )
    return folder


def _check(data: Interactions, events: EventArrays) -> None:
    where = f"data set {data.name!r}"
    if len(data.users) < 2 or len(data.item_keys) < 2:
        raise ValueError(
            f"{where}: {len(data.users)} user(s) and {len(data.item_keys)} item(s) are left; expected at least 2 of "
            "each. Lower min_user_events, min_item_events or implicit_threshold, or give more raw data."
        )
    num_items = len(data.item_keys)
    if any(a >= b for a, b in pairwise(data.item_keys)) or len(data.titles) != num_items:
        raise ValueError(f"{where}: expected sorted, different item keys and one title for each.")
    if data.texts and len(data.texts) != num_items:
        raise ValueError(f"{where}: {len(data.texts)} texts for {num_items} items; expected one for each, or none.")
    if len(set(data.users)) < len(data.users) or len(data.users) != len(data.sequences):
        raise ValueError(f"{where}: expected different users and one sequence for each.")
    short_U = (events.sequences.length_U < MIN_EVENTS) | (events.sequences.num_repeats_U > 0)
    if short_U.any():
        user = data.users[int(short_U.argmax())]
        raise ValueError(
            f"{where}: user {user!r} has too few items or one twice; expected {MIN_EVENTS} different ones."
        )
    check_item_numbers(where, events, len(data.item_keys))
    if events.timestamps is not None and not np.array_equal(events.timestamps.start_U, events.sequences.start_U):
        raise ValueError(f"{where}: timestamps and sequences differ in length.")
