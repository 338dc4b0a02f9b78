"""The rating data sets that are known by name, and the settings that choose one and cut it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedecider.bounds import ZeroOrMore, check
from fedecider.data.readers import SOURCES
from fedecider.data.readers.table import Columns

PREPARED = "prepared"
"""The source of domains that scripts/prepare_data.py wrote."""


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
        "filmtrust", "filmtrust", 10, fetch="ratings.txt of https://guoguibing.github.io/librec/datasets.html"
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
    """The reader of files of your own: movielens, amazon, csv, lists, prepared, ... It needs raw."""
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
    user_column: str = "user"
    """With source csv: the name of the column that holds the user."""
    item_column: str = "item"
    """With source csv: the name of the column that holds the item."""
    rating_column: str = ""
    """With source csv: the name of the column that holds the rating; empty if there is none."""
    time_column: str = ""
    """With source csv: the name of the column that holds the time in Unix seconds; empty if there is none, and the
    rows of a user are in order."""
    max_bad_lines: ZeroOrMore = 100
    """So many unreadable lines of a file are skipped; one more is an error."""

    def __post_init__(self) -> None:
        _check_data_set(self)
        check(self)
        if not self.user_column or not self.item_column:
            raise ValueError("got no user_column or no item_column; expected the name of both columns")
        named = [name for name in self.columns if name]
        if len(set(named)) < len(named):
            raise ValueError(f"got columns {named}; expected different ones for user, item, rating and time")
        if self.columns != Columns() and self.source != "csv":
            raise ValueError(f"got columns {named} with source {self.source!r}; expected them with source csv only")
        if self.source == PREPARED and self.filters:
            raise ValueError(
                f"got {', '.join(self.filters)} with source {PREPARED}; expected none, for prepared data are filtered "
                "already. Prepare them again (--k_core, --min_length, --min_rating of scripts/prepare_data.py)."
            )

    @property
    def columns(self) -> Columns:
        """The columns of a csv."""
        return Columns(self.user_column, self.item_column, self.rating_column, self.time_column)

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
