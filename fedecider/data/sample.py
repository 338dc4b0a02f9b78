"""The embedded sample: three small book domains made by a documented, deterministic generator; no data is downloaded.

What is planted, so that texts tell more than counts, and other clients more than a client's own readers:

1. **Theme path.** Every book has one of eighteen themes, told by the same words in all domains ("comet", "wizard") in
   its title, categories and description. With probability ``PATH_STRENGTH`` a reader's next book has the theme that
   follows the newest book's theme on ``THEME_PATH``, the same path in all domains; else a theme of the reader's two
   favourites (``FAVOURITE`` of all steps) or the same theme again. Text neighbours point to the same theme, which is
   mostly the wrong one; a model can learn from words which theme follows.
2. **Homes and a trend.** Favourites lie in a third of the path, another one for every domain (``HOMES``). A share
   ``TREND`` of a domain's client readers goes over to the next third with the newest ``NUM_NEW`` books; another domain
   is at home there: what is new to one client has long been read at another one.
3. **A public pool that knows half.** Public readers begin anywhere, stay in a theme where it is one of ``PUBLIC_STAYS``
   (every other one), and go on along the path elsewhere. Two titles of fifteen are new: no public reader has them.
4. **Cold books.** Readers read little (4 to 7 books), and within a theme books are taken with Zipf weights (the order
   is drawn per domain), so that many books are read by a few only and counts of single books stay thin.
5. **Few series.** One title of fifteen in a theme is a series of two or three volumes; its next volume is read next
   with probability ``NEXT_VOLUME``.
6. **Noise.** With probability ``NOISE`` a step takes any book.

Readers are made per domain; ``NUM_SHARED`` readers are clients of two domains (the real data sets share users as well),
and no client is public anywhere. Times are whole days; a second book on the same day occurs. All draws come from
``random.Random(text).random()``, which is the same on every Python version.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

from fedecider.data.card import make_card, overlaps
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.readers.reading import DEFAULT_TEXT_FIELDS, ItemFields, item_text

THEMES: dict[str, tuple[str, ...]] = {
    "space": ("comet", "planet", "rocket", "orbit", "galaxy", "meteor", "moon", "star"),
    "magic": ("wizard", "spell", "dragon", "wand", "potion", "witch", "charm", "curse"),
    "sea": ("harbor", "island", "pirate", "anchor", "whale", "tide", "lighthouse", "coral"),
    "ghosts": ("phantom", "manor", "crypt", "shadow", "raven", "grave", "spirit", "haunting"),
    "machines": ("robot", "engine", "circuit", "clockwork", "piston", "signal", "machine", "gear"),
    "winter": ("glacier", "blizzard", "frost", "icicle", "sled", "snow", "avalanche", "tundra"),
    "jungle": ("tiger", "jaguar", "vine", "temple", "parrot", "canopy", "river", "orchid"),
    "music": ("violin", "opera", "drum", "piano", "melody", "trumpet", "choir", "ballad"),
    "desert": ("camel", "dune", "oasis", "caravan", "scorpion", "mirage", "cactus", "nomad"),
    "kitchen": ("baker", "honey", "pepper", "kettle", "feast", "recipe", "cinnamon", "saffron"),
    "railway": ("train", "station", "tunnel", "locomotive", "platform", "conductor", "freight", "viaduct"),
    "circus": ("clown", "acrobat", "trapeze", "juggler", "tent", "ringmaster", "carousel", "stilts"),
    "mountain": ("summit", "cliff", "climber", "ridge", "valley", "eagle", "cabin", "boulder"),
    "castle": ("knight", "tower", "throne", "moat", "sword", "crown", "dungeon", "banner"),
    "library": ("archive", "manuscript", "scholar", "ink", "atlas", "parchment", "librarian", "riddle"),
    "farm": ("barn", "harvest", "tractor", "meadow", "plough", "rooster", "windmill", "haystack"),
    "weather": ("storm", "thunder", "rainbow", "hurricane", "lightning", "cloud", "drizzle", "fog"),
    "jewels": ("diamond", "ruby", "sapphire", "pearl", "necklace", "topaz", "opal", "garnet"),
}
"""Theme -> its nouns. The same words occur in all domains: they are what the domains share."""

_ADJECTIVES = (
    "silver golden broken silent hidden crimson burning lonely ancient electric forgotten midnight velvet wandering "
    "bitter emerald restless hollow scarlet frozen whispering crooked distant amber"
)
ADJECTIVES = _ADJECTIVES.split()

DOMAIN_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "crime": {
        "label": ("Mystery", "Thriller", "Crime"),
        "series": ("Murders", "Investigations", "Casebook", "Inquests", "Suspects", "Alibis"),
        "volume": ("Verdict", "Witness", "Alibi", "Motive", "Confession", "Clue", "Suspect", "Trial"),
        "hero": ("a tired detective", "a retired judge", "a young reporter", "a stubborn inspector"),
        "deed": ("hunts a killer", "reopens a cold case", "doubts a confession", "follows a stolen letter"),
    },
    "comics": {
        "label": ("Comics", "Graphic Novels", "Manga"),
        "series": ("Avengers", "Squad", "Legends", "Guardians", "Rebels", "Outlaws"),
        "volume": ("Showdown", "Origin", "Rivals", "Uprising", "Mask", "Battle", "Escape", "Arena"),
        "hero": ("a masked hero", "a rookie sidekick", "a fallen champion", "a runaway mutant"),
        "deed": ("fights a tyrant", "defends the city", "loses a strange power", "joins a secret team"),
    },
    "children": {
        "label": ("Children", "Picture Books", "Early Readers"),
        "series": ("Kittens", "Puppies", "Friends", "Bunnies", "Adventures", "Playmates"),
        "volume": ("Picnic", "Birthday", "Surprise", "Secret", "Sleepover", "Parade", "Garden", "Lullaby"),
        "hero": ("a curious kitten", "a shy bear", "a brave girl", "a clumsy rabbit"),
        "deed": ("learns to share", "finds a new friend", "gets lost at the fair", "plans a party"),
    },
}
"""Domain -> words that only this domain uses."""


Value = TypeVar("Value")

NUM_CLIENTS = 240
NUM_PUBLIC = 160
NUM_SHARED = 12
"""Readers that each pair of domains shares."""
SINGLES_PER_THEME, SERIES_PER_THEME = 14, 1
CLIENT_LENGTHS, PUBLIC_LENGTHS = (4, 7), (4, 10)
"""Shortest and longest history."""
PATH_STRENGTH, FAVOURITE = 0.7, 0.15
NEXT_VOLUME = 0.6
NOISE = 0.03
SAME_DAY = 0.06
FIRST_DAY = 15_000  # days since 1970: 2011
THEME_PATH = (
    *("space", "ghosts", "sea", "music", "castle", "machines"),
    *("jungle", "library", "winter", "kitchen", "magic", "railway"),
    *("farm", "desert", "circus", "mountain", "weather", "jewels"),
)
"""Each theme is followed by the next one, the last one by the first."""
PUBLIC_STAYS = frozenset(THEME_PATH[::2])
"""Themes after which public readers take the same theme again."""
HOMES = {"crime": 0, "comics": 1, "children": 2}
"""Which third of the path a domain's readers know best."""
TREND = 0.2
NUM_NEW = 3
SOURCE = "embedded sample"
"""What its data cards name as their source."""


SHOPS = ("north", "south", "east", "west")
NUM_CUSTOMERS = 300
PLANTED = "planted-"
"""What every item key of planted tables begins with: whoever reads them says so beside each result."""


def write_shops(folder: Path) -> list[Path]:
    """Write the tables of four planted shops that sell the crime books, and ``products.csv``; returns their paths.

    Customers read as clients of the sample do, ``NUM_CUSTOMERS`` a shop.

    Raises:
        ValueError: a file of one of these names that is there already.
    """
    import pandas as pd

    texts, books = _catalogue("crime", _Draw("0/catalogue/crime"))
    keys = [f"{PLANTED}{place:04d}" for place in range(len(texts))]
    tables = {"products": pd.DataFrame({"item": keys, **pd.DataFrame(texts)})}
    for shop in SHOPS:
        readers = _numbered(f"{PLANTED}{shop}", NUM_CUSTOMERS)
        users, sequences, times = _events("crime", 0, books, readers, public=False).arrays()
        assert times is not None
        tables[shop] = pd.DataFrame(
            {
                "customer": [users[row] for row in sequences.row_E],
                "item": [keys[item] for item in sequences.value_E],
                "time": pd.to_datetime(times.value_E, unit="s").strftime("%Y-%m-%d"),
            }
        )
    paths = {name: folder / f"{name}.csv" for name in (*SHOPS, "products")}
    there = [path for path in paths.values() if path.exists()]
    if there:
        raise ValueError(f"got the output {folder}, where {there[0].name} is already, expected a free place")
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        tables[name].to_csv(path, index=False)
    return list(paths.values())


class _Book(NamedTuple):
    theme: str
    weight: float
    new: bool
    first: bool
    """Whether a reader can begin with it: no later volume of a series."""
    sequel: int | None
    """The next volume's place in the catalogue."""


def sample_domains(names: Sequence[str] = ("crime", "comics", "children"), seed: int = 0) -> dict[str, Domain]:
    """The sample's domains ``names``, the same for the same ``seed``; each one does not depend on the others.

    Errors: ``ValueError`` for an unknown name.
    """
    unknown = [name for name in names if name not in HOMES]
    if unknown or not names or len(set(names)) != len(names):
        raise ValueError(
            f"got domains {list(names)}; expected different names out of {sorted(HOMES)} (the embedded sample). "
            "For other domains prepare raw data with scripts/prepare_data.py and pass --data."
        )
    domains = {name: _domain(name, seed) for name in names}
    shared = overlaps(domains)
    for name, domain in domains.items():
        domain.card["overlap"] = shared[name]
    return domains


def _domain(name: str, seed: int) -> Domain:
    texts, books = _catalogue(name, _Draw(f"{seed}/catalogue/{name}"))
    keys = [f"{name}-{place:04d}" for place in range(len(texts))]
    domain = Domain(
        name=name,
        catalogue=Catalogue(
            name,
            keys,
            titles=[text["title"] for text in texts],
            texts=[item_text(text, DEFAULT_TEXT_FIELDS, 500) for text in texts],
        ),
        clients=_events(name, seed, books, _client_names(name), public=False),
        public=_events(name, seed, books, _numbered(f"{name}-public", NUM_PUBLIC), public=True),
        card={},
    )
    settings = {"source": SOURCE, "seed": seed}
    domain.card.update(make_card(domain, settings=settings))
    return domain


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number:03d}" for number in range(count)]


def _client_names(name: str) -> list[str]:
    pairs = ["-".join(sorted((name, other))) for other in HOMES if other != name]
    shared = [reader for pair in pairs for reader in _numbered(f"both-{pair}", NUM_SHARED)]
    return sorted([*shared, *_numbered(f"{name}-reader", NUM_CLIENTS - len(shared))])


def _catalogue(name: str, draw: _Draw) -> tuple[list[ItemFields], list[_Book]]:
    """Texts and plants of the books, in the order of their item keys."""
    words = DOMAIN_WORDS[name]
    texts: list[ItemFields] = []
    books: list[_Book] = []
    taken: set[str] = set()
    for theme, nouns in THEMES.items():
        count = SINGLES_PER_THEME + SERIES_PER_THEME
        ranks = draw.shuffled(range(count))
        heads = [f"{a.title()} {n.title()}" for a in ADJECTIVES for n in nouns]
        free = [(head, f"{head} {s}") for head in heads if head not in taken for s in words["series"]]
        for place in range(count):
            chosen, title = draw.one(free)
            taken.add(chosen)
            free = [choice for choice in free if choice[0] != chosen]
            num_volumes = 1 if place < SINGLES_PER_THEME else 2 + draw.below(2)
            labels = draw.one(words["label"])
            volume_words = draw.shuffled(words["volume"])
            for volume in range(1, num_volumes + 1):
                ending = f", Book {volume}: The {draw.one(ADJECTIVES).title()} {volume_words[volume - 1]}"
                texts.append(
                    {
                        "title": title + (ending if num_volumes > 1 else ""),
                        "categories": f"{labels}, {theme}",
                        "description": f"{draw.one(words['hero'])} {draw.one(words['deed'])}, "
                        "a story of the {}, the {} and the {}.".format(*draw.shuffled(nouns)[:3]),
                    }
                )
                sequel = len(texts) if volume < num_volumes else None
                weight = 1.0 / (ranks[place] + 1)
                books.append(_Book(theme, weight, place % 6 == 2, volume == 1, sequel))
    return texts, books


def _events(name: str, seed: int, books: list[_Book], readers: list[str], public: bool) -> Events:
    sequences, times = [], []
    for reader in readers:
        draw = _Draw(f"{seed}/reading/{name}/{reader}")
        favourites = [draw.one(_third(HOMES[name])) for _ in range(2)]
        sequence = _read_books(name, books, favourites, public, draw)
        sequences.append(sequence)
        times.append(_days(len(sequence), draw))
    return Events(readers, sequences, times)


def _read_books(name: str, books: list[_Book], favourites: Sequence[str], public: bool, draw: _Draw) -> list[int]:
    """One reader's books, oldest first, each at most once."""
    low, high = PUBLIC_LENGTHS if public else CLIENT_LENGTHS
    # The smaller of two draws: short histories are more frequent than long ones.
    length = low + min(draw.below(high - low + 1), draw.below(high - low + 1))
    known = [place for place, book in enumerate(books) if not (public and book.new)]
    seen: list[int] = []
    moves_at = length - NUM_NEW if not public and draw.chance(TREND) else None
    while len(seen) < length:
        newest = books[seen[-1]] if seen else None
        moves = len(seen) == moves_at
        sequel = newest.sequel if newest and not moves else None
        if sequel is not None and sequel not in seen and draw.chance(NEXT_VOLUME):
            seen.append(sequel)
            continue
        if draw.chance(NOISE):
            choices = [book for book in known if book not in seen]
        else:
            theme = _next_theme(newest and newest.theme, favourites, public, draw)
            if moves:
                theme = draw.one(_third(HOMES[name] + 1))
            choices = [b for b in known if books[b].theme == theme and books[b].first and b not in seen]
        if choices:
            seen.append(choices[draw.weighted([books[book].weight for book in choices])])
    return seen


def _next_theme(theme: str | None, favourites: Sequence[str], public: bool, draw: _Draw) -> str:
    """The theme of a reader's next book; ``theme`` is that of the newest one, None at the start."""
    if theme is not None and draw.chance(PATH_STRENGTH):
        follows = THEME_PATH[(THEME_PATH.index(theme) + 1) % len(THEME_PATH)]
        return theme if public and theme in PUBLIC_STAYS else follows
    if public:
        return draw.one(THEME_PATH)
    if theme is None or draw.chance(FAVOURITE / (1 - PATH_STRENGTH)):
        return draw.one(favourites)
    return theme


def _third(number: int) -> tuple[str, ...]:
    """A third of the path; the thirds follow each other in a circle."""
    size = len(THEME_PATH) // 3
    return THEME_PATH[number % 3 * size :][:size]


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
