"""The embedded sample: three small book domains made by a documented, deterministic generator; no data is downloaded.

What is planted, strongest first:

1. **Series.** Every book is a volume of a series (3 to 6 volumes). A reader goes on to the next volume of the series at
   hand with probability 0.68 (crime), 0.70 (comics), 0.62 (children). Titles carry the series name and the volume
   ("Silver Comet Murders, Book 2: ..."), so the signal is in the words too.
2. **Theme path.** Each series has one of eight themes, with the same theme words in all domains ("comet", "wizard").
   A reader who leaves a series takes a new one: with probability ``PATH_STRENGTH`` of the theme that follows the last
   one on the domain's theme path, else of one of the reader's two favourite themes. Crime and comics have the same path
   but for one exchange of two themes; the path of children is another one. So crime and comics can learn from each
   other, and children cannot learn this from them.
3. **Popularity.** Within a theme, series are taken with Zipf weights (the order is drawn per domain), and many readers
   stop after the first volumes, so early volumes of few series are read most.
4. **New series.** About one series in eight is new: only the clients read it, never the public pool, so a backbone that
   was trained on the public pool has something left to learn.
5. **Noise.** At each step a random book is read with probability ``NOISE``.

Readers are made per domain; ``NUM_SHARED`` readers are clients of two domains with the same favourites (the real data
sets share users as well), and no client is public anywhere. Times are whole days; a second book on the same day occurs.
All draws come from ``random.Random(text).random()``, which is the same on every Python version.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from fedecider.data.card import make_card, overlaps
from fedecider.data.domain import Domain, Events
from fedecider.data.readers.table import DEFAULT_TEXT_FIELDS, ItemFields, item_text
from fedecider.data.sample_words import ADJECTIVES, DOMAIN_WORDS, FAMILY_NAMES, GIVEN_NAMES, THEMES

Value = TypeVar("Value")

NUM_CLIENTS = 240
NUM_PUBLIC = 160
NUM_SHARED = 12
"""Readers that each pair of domains shares."""
SERIES_PER_THEME = 5
MIN_LENGTH, MAX_LENGTH = 6, 20
PATH_STRENGTH = 0.7
NOISE = 0.03
SAME_DAY = 0.06
FIRST_DAY = 15_000  # days since 1970: 2011
NEXT_VOLUME = {"crime": 0.68, "comics": 0.70, "children": 0.62}
THEME_PATHS = {
    "crime": ("space", "ghosts", "sea", "music", "machines", "jungle", "magic", "winter"),
    "comics": ("space", "ghosts", "sea", "music", "machines", "jungle", "winter", "magic"),
    "children": ("space", "magic", "music", "winter", "sea", "machines", "ghosts", "jungle"),
}
"""Each theme is followed by the next one, the last one by the first."""


class _Series(NamedTuple):
    theme: str
    weight: float
    new: bool
    volumes: tuple[int, ...]
    """Places in the unsorted list of books."""


def sample_domains(names: Sequence[str] = ("crime", "comics", "children"), seed: int = 0) -> dict[str, Domain]:
    """The sample's domains ``names``, the same for the same ``seed``; each one does not depend on the others.

    Errors: ``ValueError`` for an unknown name.
    """
    unknown = [name for name in names if name not in THEME_PATHS]
    if unknown or not names or len(set(names)) != len(names):
        raise ValueError(
            f"got domains {list(names)}; expected different names out of {sorted(THEME_PATHS)} (the embedded sample). "
            "For other domains prepare raw data with scripts/prepare_data.py and pass --data."
        )
    domains = {name: _domain(name, seed) for name in names}
    shared = overlaps(domains)
    for name, domain in domains.items():
        domain.card["overlap"] = shared[name]
    return domains


def _domain(name: str, seed: int) -> Domain:
    books, series = _catalogue(name, _Draw(f"{seed}/catalogue/{name}"))
    keys = [f"{name}-{place:04d}" for place in range(len(books))]
    domain = Domain(
        name=name,
        item_keys=keys,
        titles=[book["title"] for book in books],
        item_texts=[item_text(book, DEFAULT_TEXT_FIELDS, 500) for book in books],
        clients=_events(name, seed, series, len(books), _client_names(name), public=False),
        public=_events(name, seed, series, len(books), _numbered(f"{name}-public", NUM_PUBLIC), public=True),
        card={},
    )
    settings = {"source": "embedded sample", "seed": seed}
    domain.card.update(make_card(domain, settings=settings))
    return domain


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number:03d}" for number in range(count)]


def _client_names(name: str) -> list[str]:
    pairs = ["-".join(sorted((name, other))) for other in THEME_PATHS if other != name]
    shared = [reader for pair in pairs for reader in _numbered(f"both-{pair}", NUM_SHARED)]
    return sorted([*shared, *_numbered(f"{name}-reader", NUM_CLIENTS - len(shared))])


def _catalogue(name: str, draw: _Draw) -> tuple[list[ItemFields], dict[str, list[_Series]]]:
    """Books in the order of their item keys, and the series of each theme."""
    words = DOMAIN_WORDS[name]
    books: list[ItemFields] = []
    series: dict[str, list[_Series]] = {}
    taken: set[str] = set()
    for theme, nouns in THEMES.items():
        series[theme] = []
        ranks = draw.shuffled(range(SERIES_PER_THEME))
        for place in range(SERIES_PER_THEME):
            title = draw.unused(
                (f"{a.title()} {n.title()} {s}" for a in ADJECTIVES for n in nouns for s in words["series"]), taken
            )
            count = 3 + draw.below(4)
            start = len(books)
            author = f"{draw.one(GIVEN_NAMES)} {draw.one(FAMILY_NAMES)}"
            labels = draw.one(words["label"])
            volume_words = draw.shuffled(words["volume"])
            for volume in range(1, count + 1):
                ending = f"The {draw.one(ADJECTIVES).title()} {volume_words[volume - 1]}"
                books.append(
                    {
                        "title": f"{title}, Book {volume}: {ending}",
                        "author": author,
                        "series": title,
                        "categories": f"{labels}, {theme}",
                        "description": f"{draw.one(words['hero'])} {draw.one(words['deed'])} in volume {volume} of "
                        f"{title}, a story of the {draw.one(nouns)} and the {draw.one(nouns)}.",
                    }
                )
            # The third series of a theme is new, in five themes of eight.
            new = place == 2 and len(series) <= 5
            series[theme].append(_Series(theme, 1.0 / (ranks[place] + 1), new, tuple(range(start, len(books)))))
    return books, series


def _events(
    name: str, seed: int, series: dict[str, list[_Series]], num_books: int, readers: list[str], public: bool
) -> Events:
    sequences, times = [], []
    for reader in readers:
        # Favourites belong to the reader, whatever the domain; the rest of the path is drawn for each domain.
        favourites = _Draw(f"{seed}/favourites/{reader}").shuffled(tuple(THEMES))[:2]
        draw = _Draw(f"{seed}/reading/{name}/{reader}")
        sequence = _read_books(name, series, num_books, favourites, public, draw)
        sequences.append(sequence)
        times.append(_days(len(sequence), draw))
    return Events(readers, sequences, times)


def _read_books(
    name: str,
    series: dict[str, list[_Series]],
    num_books: int,
    favourites: Sequence[str],
    public: bool,
    draw: _Draw,
) -> list[int]:
    """One reader's books, oldest first, each at most once."""
    # The smaller of two draws: short histories are more frequent than long ones.
    length = MIN_LENGTH + min(draw.below(MAX_LENGTH - MIN_LENGTH + 1), draw.below(MAX_LENGTH - MIN_LENGTH + 1))
    known_books = {b for group in series.values() for one in group for b in one.volumes if not (public and one.new)}
    seen: list[int] = []
    current, volume = _start_series(series, draw.one(favourites), public, seen, draw), 0
    while len(seen) < length:
        if draw.chance(NOISE):
            book = draw.below(num_books)
            if book in known_books and book not in seen:
                seen.append(book)
            continue
        if current is None or volume >= len(current.volumes):
            theme = _next_theme(name, current, favourites, draw)
            current, volume = _start_series(series, theme, public, seen, draw), 0
            continue
        if current.volumes[volume] not in seen:
            seen.append(current.volumes[volume])
        volume += 1
        if not draw.chance(NEXT_VOLUME[name]):
            volume = len(current.volumes)
    return seen


def _next_theme(name: str, current: _Series | None, favourites: Sequence[str], draw: _Draw) -> str:
    if current is None or not draw.chance(PATH_STRENGTH):
        return draw.one(favourites)
    path = THEME_PATHS[name]
    return path[(path.index(current.theme) + 1) % len(path)]


def _start_series(
    series: dict[str, list[_Series]], theme: str, public: bool, seen: list[int], draw: _Draw
) -> _Series | None:
    """A series of the theme that the reader has not begun; None when there is none."""
    open_ones = [one for one in series[theme] if one.volumes[0] not in seen and not (public and one.new)]
    if not open_ones:
        return None
    return open_ones[draw.weighted([one.weight for one in open_ones])]


def _days(length: int, draw: _Draw) -> list[int]:
    day = FIRST_DAY + draw.below(1500)
    times = []
    for _ in range(length):
        times.append(day * 86_400)
        if not draw.chance(SAME_DAY):
            day += 1 + draw.below(40)
    return times


class _Draw:
    """Draws that are the same on every Python version: only ``Random.random`` of a text seed is used."""

    def __init__(self, label: str) -> None:
        self._random = random.Random(f"fedecider sample/{label}").random

    def below(self, bound: int) -> int:
        return int(self._random() * bound)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def one(self, values: Sequence[Value]) -> Value:
        return values[self.below(len(values))]

    def weighted(self, weights: Sequence[float]) -> int:
        sums = list(accumulate(weights))
        return min(bisect_right(sums, self._random() * sums[-1]), len(sums) - 1)

    def shuffled(self, values: Sequence[Value]) -> list[Value]:
        keyed = sorted((self._random(), place) for place in range(len(values)))
        return [values[place] for _, place in keyed]

    def unused(self, choices: Iterable[str], taken: set[str]) -> str:
        """One of ``choices`` whose words but the last are not taken yet; they are taken then."""
        free = [choice for choice in choices if choice.rsplit(" ", 1)[0] not in taken]
        chosen = self.one(free)
        taken.add(chosen.rsplit(" ", 1)[0])
        return chosen
