"""Raw files -> prepared domains: filter, choose clients and a disjoint public pool, number the items, write."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from fedecider.bounds import Float, Int, Seed, ShareBelow1, ZeroOrMore, dataclass
from fedecider.bounds import Share as ShareUpTo1
from fedecider.data import filtering
from fedecider.data.card import RawSummary, make_card, overlaps, summary
from fedecider.data.catalogue import Catalogue, NewItem
from fedecider.data.consent import Consent, user_order
from fedecider.data.constant_words import CARD, ConstantWords, constant_words, without_constant
from fedecider.data.domain import Domain, check_public_disjoint
from fedecider.data.dropped import Dropped, Size
from fedecider.data.filtering import k_core
from fedecider.data.names import check_name
from fedecider.data.readers import SINGLE_DOMAIN, SOURCES, WITHOUT_TEXTS, RawDomain, Read, ReadOptions, reading
from fedecider.data.sellers import once_each, with_shared_catalogues
from fedecider.data.store import file_sha256, save_domains
from fedecider.evaluation.protocols import MIN_EVENTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareConfig:
    """Data: what to read, what to keep and where to write it.

    Errors: ``ValueError``.
    """

    source: Literal["goodreads", "amazon", "movielens", "goodbooks", "packed", "lastfm_tags", "lastfm_plays"]
    """The format of the raw files: UCSD Book Graph, Amazon reviews 2014 / 2018, MovieLens, goodbooks-10k, packed, or
    HetRec 2011 Last.fm (its tags or its listening counts)."""
    raw: str
    """The folder with the raw files."""
    domains: list[str] | str
    """The domains to prepare together, separated by commas (crime,comics,children)."""
    output: str = "data"
    """The folder to write to; each domain becomes a sub-folder."""
    min_rating: float | None = None
    """Events with a lower rating are dropped. If not given, all events are kept (Goodreads: all that are read or
    rated)."""
    k_core: ZeroOrMore = 5
    """Users and items with fewer events than this are dropped, until none is left; 0 or 1 drops none."""
    min_length: Annotated[Int, Field(ge=MIN_EVENTS)] = MIN_EVENTS
    """The least number of events of a user; leave-last-out needs 3."""
    max_length: Annotated[Int, Field(ge=MIN_EVENTS)] | None = None
    """So many newest events of each user are kept. If not given, all are kept."""
    repeats: Literal["keep", "first"] = "keep"
    """What becomes of events with an item that the user had before: they are kept, or only the first one is."""
    missing_text: Literal["error", "drop", "keep"] = "error"
    """What items without any text are: an error, dropped with their events, or kept, known by their keys alone."""
    duplicate_items: Literal["error", "first"] = "error"
    """What an item key that occurs twice in the catalogue is: an error, or the first one is kept."""
    users_per_domain: Annotated[Int, Field(ge=2)] | None = None
    """The number of client users sampled in each domain. If not given, all users that are not public."""
    public_users_per_domain: ZeroOrMore | None = None
    """The number of public users sampled in each domain among those who are no client anywhere. If not given, all."""
    public_interactions_per_domain: ZeroOrMore | None = None
    """Public users are added to a domain until they have this many events. If not given, there is no such limit."""
    public_share: ShareBelow1 = 0.0
    """The share of all users that everybody may see, by a hash of seed and key; 0 for nobody. Used only when
    users_per_domain is not given."""
    keep_split: str = ""
    """The folder of domains that were prepared before: who was public there stays public, who was private stays
    private, and public_share is of new users."""
    public_domains: str = ""
    """Further domains for an out-of-domain pool (scripts/federate.py --public_domains), separated by commas: they have
    no clients, and all their users that are a client of no other domain are public."""
    catalogue: str = ""
    """What item keys are, such as ean or asin: domains of one catalogue, prepared together or apart, have the same item
    under the same key, and companies that sell a part of it each learn from each other what they have in common. If not
    given, every domain's items are its own."""
    silos: Annotated[Int, Field(ge=1, le=1000)] = 1
    """The number of companies that share the clients of each domain out among them: movies becomes movies.1, movies.2,
    ... with the same catalogue and public users; 1 leaves domains whole."""
    silo_skew: Annotated[Float, Field(ge=0.01)] | None = None
    """The concentration of the Dirichlet distribution by which each taste cluster is split among the silos; the
    smaller, the more a silo has users of one taste. If not given, users are split uniformly."""
    silo_overlap: ShareUpTo1 = 1.0
    """The share of a domain's items that all its silos sell. Each of the others is sold by one silo, and events of it
    elsewhere are dropped: companies whose catalogues overlap in part, for experiments."""
    shared_users_first: bool = False
    """If true, users of several of the domains become clients before all others, to study domains that share users."""
    text_fields: tuple[str, ...] = reading.DEFAULT_TEXT_FIELDS
    """The fields of the item text, in order; price, sales_rank and year exist too but are off by default."""
    description_chars: ZeroOrMore = 500
    """The largest number of characters of a description in an item text."""
    max_bad_lines: ZeroOrMore = 100
    """So many unreadable lines of a file are skipped; one more is an error."""
    seed: Seed = 0
    """The seed that decides which users are clients and which are public."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES or self.source in WITHOUT_TEXTS:
            known = sorted(set(SOURCES) - WITHOUT_TEXTS)
            raise ValueError(f"got source {self.source!r}; expected one of {known} (others have no item texts)")
        if self.shared_users_first and self.users_per_domain is None:
            raise ValueError("got shared_users_first without users_per_domain, expected how many clients to choose")
        if self.keep_split and self.users_per_domain is not None:
            raise ValueError(
                f"got keep_split {self.keep_split} with users_per_domain {self.users_per_domain}, which samples anew, "
                "expected one of them"
            )
        if self.silo_overlap < 1.0 and self.silos == 1:
            raise ValueError(f"got silo_overlap {self.silo_overlap} with one silo, expected silos of 2 or more")
        if self.silo_skew is not None and self.silos == 1:
            raise ValueError(f"got silo_skew {self.silo_skew} with one silo, expected silos of 2 or more")
        fields = (*reading.DEFAULT_TEXT_FIELDS, *reading.OTHER_TEXT_FIELDS)
        unknown = [name for name in self.text_fields if name not in fields]
        if unknown or not self.text_fields:
            raise ValueError(f"got text_fields {list(self.text_fields)}; expected some of {list(fields)}")
        _check_names(self.source, [*self.domain_names, *self.public_names])
        if self.catalogue:
            _check_catalogue(self.catalogue, [*self.domain_names, *self.public_names])

    @property
    def domain_names(self) -> list[str]:
        """The domains as a list."""
        names = self.domains.split(",") if isinstance(self.domains, str) else self.domains
        return [name.strip() for name in names if name.strip()]

    @property
    def public_names(self) -> list[str]:
        """The further domains of an out-of-domain pool as a list."""
        return [name.strip() for name in self.public_domains.split(",") if name.strip()]


Share = Callable[[Mapping[str, Domain]], dict[str, Domain]]
"""Whole domains -> those of companies with their catalogues."""
CORE = "below k_core or min_length"
REPEATS = "repeats"
NO_TEXT = "items without text"
NOT_CHOSEN = "users chosen neither as clients nor for the public pool"
TOO_LONG = "older events beyond max_length"


def prepare(config: PrepareConfig) -> dict[str, Domain]:
    """Prepare all domains of ``config``, write them to ``config.output``, print a summary and what was left out.

    Nothing is written unless every domain could be prepared.
    """
    domains = prepare_domains(config, reading.to_stderr)
    save_domains(domains, config.output)
    print(summary(domains))
    for name, domain in once_each(domains).items():
        print(f"{name}: {Dropped(domain.card['dropped'])}")
    print(f"written to {config.output}")
    return domains


def prepare_domains(
    config: PrepareConfig,
    log: reading.Log | None = None,
    read: Read | None = None,
    share: Share | None = None,
    consent: Consent | None = None,
) -> dict[str, Domain]:
    """The prepared domains in memory, silos in the place of those that are split.

    A user who is a client in any domain is public in none.
    ``log`` hears every few seconds how far a file is read; ``read`` stands in for the reader of ``config.source``,
    ``share`` for the dealing out among ``config.silos``, and ``consent`` for ``config.public_share``.
    """
    consent = consent or Consent(config.public_share, config.seed)
    if config.keep_split:
        consent = consent.keeping(config.keep_split)
    names = [*config.domain_names, *config.public_names]
    filtered = {name: _read_and_filter(config, name, read or SOURCES[config.source], log) for name in names}
    if read:  # texts of public data stay those that were published
        filtered = {name: one._replace(constant=_constant(config, one.records)) for name, one in filtered.items()}
    if config.keep_split:
        consent.check_known({user for one in filtered.values() for user in one.sequences.users}, config.keep_split)
    num_domains = Counter(user for one in filtered.values() for user in one.sequences.users)
    ranked = {name: _ranked_users(config.seed, one.sequences.users) for name, one in filtered.items()}
    if config.shared_users_first:
        ranked = {name: sorted(users, key=lambda user: -num_domains[user]) for name, users in ranked.items()}
    clients = {name: _choose_clients(config, name, users, consent) for name, users in ranked.items()}
    client_anywhere = set().union(*clients.values(), consent.kept_private)
    domains = {}
    for name, one in filtered.items():
        public = _choose_public(config, name, one.sequences, ranked[name], client_anywhere)
        domains[name] = _build_domain(config, name, one, clients[name], public)
    domains = with_shared_catalogues(domains)
    if share or config.silos > 1:
        whole = {name: domains.pop(name) for name in config.domain_names}
        domains = {**(share(whole) if share else _deal_out(config, whole)), **domains}
    shared = overlaps(domains)
    for name, domain in domains.items():
        domain.card["overlap"] = shared[name]
    check_public_disjoint(domains)
    return domains


def _deal_out(config: PrepareConfig, whole: Mapping[str, Domain]) -> dict[str, Domain]:
    from fedecider.data.silos import share_out  # only here: --help does without torch

    return share_out(whole, config.silos, config.silo_skew, config.seed, config.silo_overlap)


class _Filtered(NamedTuple):
    sequences: filtering.Sequences
    records: reading.ItemRecords
    raw: RawSummary
    dropped: Dropped
    constant: ConstantWords = {}  # noqa: RUF012 (never written to)
    """What all texts have, of own tables."""


def _read_and_filter(config: PrepareConfig, name: str, read: Read, log: reading.Log | None) -> _Filtered:
    options = ReadOptions(config.min_rating, config.max_bad_lines, config.duplicate_items, log=log)
    logger.info("reading %s (%s) in %s", name, config.source, config.raw)
    raw = read(Path(config.raw), name, options)
    min_user, min_item = max(config.k_core, config.min_length), max(config.k_core, 1)
    raw_size = raw.events.size()
    if not raw_size.events:
        raise ValueError(f"domain {name!r}: no events in {raw.places(0, 1)} ({raw.dropped()}). Check --min_rating.")
    # Once before sorting, which keeps the memory for sorting small, and again after each later loss of events.
    events = filtering.compress(raw.events, k_core(raw.events.user_E, raw.events.item_E, min_user, min_item))
    empty = raw.events._replace(users=[], user_E=_NONE, item_E=_NONE, time_E=_NONE, order_E=None, basket_E=None)
    raw = raw._replace(events=empty)
    sequences = filtering.order_events(events)
    del events
    steps = [(CORE, sequences.size())]
    _check_not_empty(name, steps[-1][1], raw_size, config)
    num_duplicates = filtering.count_exact_duplicates(sequences)
    if config.repeats == "first":
        sequences = filtering.filter_core(
            filtering.take(sequences, filtering.first_occurrences(sequences)), min_user, min_item
        )
        steps.append((REPEATS, sequences.size()))
        _check_not_empty(name, steps[-1][1], raw_size, config)

    records = raw.read_catalogue(frozenset(sequences.used_items()))
    nameless = sum(not _text(config, fields) for fields in records.unused.values())  # nothing would tell what they are
    records = records._replace(num_unused=records.num_unused + nameless)
    with_text = _check_texts(config, name, sequences, records.items, raw)
    if with_text is not sequences:
        sequences = filtering.filter_core(with_text, min_user, min_item)
        steps.append((NO_TEXT, sequences.size()))
        _check_not_empty(name, steps[-1][1], raw_size, config)
    dropped = _dropped(raw, records, raw_size, steps)
    return _Filtered(sequences, records, _summarise(raw, raw_size, num_duplicates), dropped)


def _dropped(raw: RawDomain, records: reading.ItemRecords, size: Size, steps: Sequence[tuple[str, Size]]) -> Dropped:
    """What reading and the filters took away; ``steps``: each filter and what it left."""
    dropped = raw.dropped()
    dropped.add("texts of items without events", records=records.num_unused)
    dropped.add("repeated texts of an item", records=records.num_same + records.num_different)
    for reason, after in steps:
        size = dropped.step(reason, size, after)
    return dropped


_NONE = np.zeros(0, dtype=np.int32)


def _summarise(raw: RawDomain, size: Size, num_duplicates: int) -> RawSummary:
    return RawSummary(
        files={file.path.name: file_sha256(file.path) for file in raw.files},
        events=size.events,
        users=size.users,
        items=size.items,
        bad_lines=reading.describe_bad_lines(raw.files),
        exact_duplicate_events=num_duplicates,
    )


def _check_not_empty(name: str, left: Size, raw: Size, config: PrepareConfig) -> None:
    if left.users >= 2 and left.items >= 2:
        return
    raise ValueError(
        f"domain {name!r} has {left.users} user(s) and {left.items} item(s) after filtering "
        f"(raw: {raw.events} events, {raw.users} users, {raw.items} items); expected at least 2 of "
        f"each. Lower k_core ({config.k_core}) or min_length ({config.min_length}), or give more raw data."
    )


def _check_texts(
    config: PrepareConfig,
    name: str,
    sequences: filtering.Sequences,
    items: Mapping[str, reading.ItemFields],
    raw: RawDomain,
) -> filtering.Sequences:
    """``sequences`` without the events of items without text, itself when all have one; or ``ValueError``."""
    used = sequences.used_items()
    textless = {key for key in used if not _text(config, items.get(key, {}))}
    if not textless or config.missing_text == "keep":
        return sequences
    if config.missing_text == "error":
        raise ValueError(
            f"domain {name!r}: {len(textless)} of {len(used)} items without text, such as {min(textless)!r} "
            f"(files: {raw.places(1)}); expected at least one of "
            f"{', '.join(config.text_fields)}. Complete the file, or drop such items with --missing_text drop "
            f'(missing_text="drop" in Python){f"; {raw.hint}" if raw.hint else ""}.'
        )
    has_text = np.array([key not in textless for key in sequences.items], dtype=bool)
    return filtering.take(sequences, has_text[sequences.item_E])


def _text(config: PrepareConfig, fields: reading.ItemFields) -> str:
    return reading.item_text(fields, config.text_fields, config.description_chars)


def _ranked_users(seed: int, users: list[str]) -> list[str]:
    """``users`` (sorted by key) in the order of ``user_order``, ties by key."""
    order_U = np.fromiter((user_order(seed, user) for user in users), dtype=np.uint64, count=len(users))
    return [users[place] for place in np.argsort(order_U, kind="stable")]


def _choose_clients(config: PrepareConfig, name: str, ranked: list[str], consent: Consent) -> set[str]:
    """The clients are first in the order of ``user_order``, the public users last, in every domain alike."""
    if name in config.public_names:
        return set()
    if config.users_per_domain is None:
        # By the key alone: a user of several domains is a client in all of them or in none.
        chosen = {user for user in ranked if not consent.is_public(user)}
        if len(chosen) < 2:
            raise ValueError(
                f"domain {name!r}: {len(chosen)} of {len(ranked)} users are left as clients, the others are public; "
                "expected at least 2. Make fewer users public (public_share) or give more data."
            )
        return chosen
    if config.users_per_domain > len(ranked):
        raise ValueError(
            f"domain {name!r}: users_per_domain is {config.users_per_domain}, but {len(ranked)} users are left after "
            "filtering; expected at most that. Lower users_per_domain, k_core or min_length."
        )
    return set(ranked[: config.users_per_domain])


def _choose_public(
    config: PrepareConfig,
    name: str,
    sequences: filtering.Sequences,
    ranked: list[str],
    client_anywhere: Collection[str],
) -> set[str]:
    if name in config.public_names:
        return set(ranked).difference(client_anywhere)
    chosen: set[str] = set()
    num_events = 0
    for user in reversed(ranked):
        if config.public_users_per_domain is not None and len(chosen) >= config.public_users_per_domain:
            break
        wanted = config.public_interactions_per_domain
        if wanted is not None and num_events >= wanted:
            break
        if user not in client_anywhere:
            chosen.add(user)
            place = bisect_left(sequences.users, user)
            length = int(sequences.start_U[place + 1] - sequences.start_U[place])
            num_events += min(length, config.max_length or length)
    return chosen


def _build_domain(
    config: PrepareConfig, name: str, one: _Filtered, clients: Collection[str], public: Collection[str]
) -> Domain:
    users, items = one.sequences.users, one.sequences.items
    in_U = {
        group: np.array([user in chosen for user in users], bool) for group, chosen in (("c", clients), ("p", public))
    }
    events = {
        group: filtering.chosen_events(one.sequences, chosen_U, config.max_length) for group, chosen_U in in_U.items()
    }
    used_I = np.zeros(len(items), bool)
    for group in events.values():
        used_I[group.sequences.value_E] = True
    numbers = sorted(np.flatnonzero(used_I).tolist(), key=items.__getitem__)
    keys, number_I = [items[number] for number in numbers], np.zeros(len(items), np.int32)
    number_I[numbers] = np.arange(len(numbers))
    named = [(key, one.records.items.get(key, {})) for key in keys]
    domain = Domain(
        name=name,
        catalogue=Catalogue(
            # an out-of-domain pool has nothing of the clients
            name if name in config.public_names else config.catalogue or name,
            keys,
            titles=[reading.display_title(item) or _text(config, item)[:80] or key for key, item in named],
            # a key where items without text are kept
            texts=[without_constant(_text(config, item), one.constant) or key for key, item in named],
        ),
        clients=filtering.numbered(events["c"], number_I),
        public=filtering.numbered(events["p"], number_I),
        card={},
        unsold=_unsold(config, one, keys),
    )
    chosen = filtering.take(one.sequences, np.repeat(in_U["c"] | in_U["p"], np.diff(one.sequences.start_U)))
    size = one.dropped.step(NOT_CHOSEN, one.sequences.size(), chosen.size())
    if config.max_length is not None:
        one.dropped.step(TOO_LONG, size, domain.size())
    counts = {"repeated_same": one.records.num_same, "repeated_different": one.records.num_different}
    settings, dropped = _settings(config), one.dropped.plain()
    by_order = one.sequences.basket_E is not None
    domain.card.update(make_card(domain, one.raw, counts, dropped, settings, by_order))
    if one.constant:
        domain.card[CARD] = one.constant
    return domain


def _constant(config: PrepareConfig, records: reading.ItemRecords) -> ConstantWords:
    return constant_words([_text(config, fields) for fields in (*records.items.values(), *records.unused.values())])


def _unsold(config: PrepareConfig, one: _Filtered, keys: Sequence[str]) -> tuple[NewItem, ...]:
    """The items with a text of which no event is left, where the source keeps them."""
    if not one.records.unused:
        return ()
    fields = {**one.records.items, **one.records.unused}
    texts = {
        key: without_constant(_text(config, fields[key]), one.constant) for key in sorted(set(fields).difference(keys))
    }
    return tuple(
        NewItem(key, reading.display_title(fields[key]) or text[:80], text) for key, text in texts.items() if text
    )


def _settings(config: PrepareConfig) -> dict[str, object]:
    """What shaped the data; paths are left out, so that the card does not depend on where things lie."""
    without = {"raw", "output", "domains", "keep_split"}
    without |= {"silos", "silo_skew"} if config.silos == 1 else set()
    without |= {"silo_overlap"} if config.silo_overlap == 1.0 else set()
    without |= set() if config.public_names else {"public_domains"}
    without |= set() if config.catalogue else {"catalogue"}
    settings = {name: value for name, value in vars(config).items() if name not in without}
    return {**settings, "domains": config.domain_names, "text_fields": list(config.text_fields)}


def _check_catalogue(catalogue: str, names: list[str]) -> None:
    if not re.fullmatch(r"\w[\w.-]*", catalogue) or catalogue in names:
        raise ValueError(
            f"got catalogue {catalogue!r} of the domains {names}; expected letters, digits, '_', '-' and '.' only, and "
            "another name than that of a domain"
        )


def _check_names(source: str, names: list[str]) -> None:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"got domains {names}; expected one or more different names, such as crime,comics,children")
    for name in names:
        check_name(name, "domain")
    if source in SINGLE_DOMAIN and len(names) > 1:
        raise ValueError(f"got domains {names}; source {source} holds one domain, whose name is free. Give one name.")
