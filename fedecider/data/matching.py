"""The same goods under other names: which items of companies are one, by keys where they fit, else by titles.

Two items are a pair where each is the other's nearest by the cosine of its title's character n-grams, weighted by
TF-IDF, and where pack sizes, numbers and model numbers do not speak against it. Nothing is learned.

Shape legend: I items of a company and then of another, V n-grams, B items of a block.
"""

from __future__ import annotations

import csv
import hashlib
import hmac
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain
from fedecider.data.federated import FederatedData
from fedecider.data.keys import plain_key
from fedecider.data.sellers import with_shared_catalogues

LETTERS = (2, 4)
"""Of an n-gram, within words."""
MIN_SCORE = 0.4
"""Tuned on half of Abt-Buy (benchmarks/results/matching.md)."""
COMMON, LEAST_COMMON = 0.1, 100
"""n-grams in more than this share of titles, and in more titles than that, are left out: most cost, least said."""
KEYS_FIT = 0.3
"""Median cosine of the titles of items with equal keys from which on keys are of one kind: of equal goods 95 % are
above, of any two goods 1 %."""
NEAREST, BLOCK = 10, 256
"""Items that are looked at for each item, and items at a time: bounds memory."""
SAMPLE = 50
"""Pairs drawn to be labelled."""
ASKED, SURE, SAME, LEAST_SAME = 500, 0.7, 0.15, 20
"""Items of a company that are looked for elsewhere before training; the score, their share and their number from which
on they are said to be the same goods."""
CATALOGUE = "matched"
"""The catalogue whose parts matched companies sell."""
UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("l", "liter", "litre"), ("l", 1.0)),
    "dl": ("l", 0.1),
    "cl": ("l", 0.01),
    "ml": ("l", 0.001),
    "kg": ("kg", 1.0),
    "g": ("kg", 0.001),
    "gr": ("kg", 0.001),
    "mg": ("kg", 1e-6),
    "m": ("m", 1.0),
    "cm": ("m", 0.01),
    "mm": ("m", 0.001),
    "oz": ("oz", 1.0),
    "lb": ("oz", 16.0),
    "lbs": ("oz", 16.0),
    **dict.fromkeys(("in", "inch", "'", '"'), ("in", 1.0)),
    "ft": ("in", 12.0),
    "mb": ("gb", 1 / 1024),
    "gb": ("gb", 1.0),
    "tb": ("gb", 1024.0),
    "w": ("w", 1.0),
    "watt": ("w", 1.0),
    "v": ("v", 1.0),
    "hz": ("hz", 1.0),
    **dict.fromkeys(("x", "er", "pack", "packs", "pk", "ct", "count", "pcs", "pieces", "stk", "stück"), ("", 1.0)),
}
"""Unit -> what it measures, and in what; pieces have the kind of numbers without a unit."""
_NUMBER = re.compile(
    rf"(?<![\w.,])(\d+(?:[.,]\d+)?)(?:[\s-]?({'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))}))?"
    r"(?!\w|[.,-]\d)"
)
MODEL_LETTERS = 4
"""Letters and digits from which on a word with a digit is a model number; also more digits than a number has."""
FIELDS = ("company", "key", "title", "other", "other_key", "other_title", "score", "by", "sample", "right")
NO, YES = ("no", "n", "0", "false"), ("yes", "y", "1", "true")
FORMAT = 1
"""Of files of `Goods`."""


class Numbers(NamedTuple):
    """The numbers of a title."""

    sizes: Mapping[str, frozenset[str]]
    """What is measured -> values in one unit."""
    models: frozenset[str]
    """Model numbers, without what stands between their letters."""
    parts: frozenset[str]
    """All runs of `MODEL_LETTERS` and more in them."""


class Goods(NamedTuple):
    """What of a company's items is compared, plain or every piece of it under a keyed hash."""

    keys: Sequence[str]
    """As the company writes them; hashed: what stands for them in tables of pairs."""
    plain_keys: Sequence[str]
    titles: Sequence[str]
    """Empty texts where they are hashed."""
    grams: Sequence[str]
    count_IV: sp.csr_array
    numbers: Sequence[Numbers]


class Pair(NamedTuple):
    """Two items that are one."""

    company: str
    key: str
    title: str
    other: str
    other_key: str
    other_title: str
    score: float
    """Cosine of the titles."""
    by: str
    """key, title, or hand."""
    sample: str = ""
    right: str = ""


def goods_of(domain: Domain, secret: bytes = b"") -> Goods:
    """The items of a company, sold and unsold; with a ``secret``, HMAC-SHA-256 of 64 bits in the place of every piece,
    and items in an order that says nothing."""
    from sklearn.feature_extraction.text import CountVectorizer  # slow to import

    def hide(text: str) -> str:
        return _mark(text, secret)

    def hide_all(texts: Iterable[str]) -> frozenset[str]:
        return frozenset(map(hide, texts))

    titles = [*domain.titles, *(item.title for item in domain.unsold)]
    vectorizer = CountVectorizer(analyzer="char_wb", ngram_range=LETTERS, lowercase=False)
    count_IV = sp.csr_array(vectorizer.fit_transform([_letters(title) or title for title in titles]))
    grams = [hide(gram) for gram in vectorizer.get_feature_names_out()]
    numbers = []
    for one in map(numbers_of, titles):
        sizes = {hide(kind): hide_all(kind + value for value in values) for kind, values in one.sizes.items()}
        numbers.append(Numbers(sizes, hide_all(one.models), hide_all(one.parts)))
    keys = item_marks(domain, secret)
    plain = [hide(plain_key(key)) for key in item_marks(domain)]
    if not secret:
        return Goods(keys, plain, titles, grams, count_IV, numbers)
    order_I, order_V = np.argsort(keys), np.argsort(grams)
    sorted_IV = sp.csr_array(count_IV[order_I][:, order_V])
    keys, plain, numbers = ([column[place] for place in order_I] for column in (keys, plain, numbers))
    return Goods(keys, plain, [""] * len(keys), sorted(grams), sorted_IV, numbers)


def _mark(text: str, secret: bytes) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()[:16] if secret else text


def item_marks(domain: Domain, secret: bytes = b"") -> list[str]:
    """What a company's items, sold and then unsold, are called in tables of pairs: their keys, or under a secret marks
    that no other company's items have."""
    keys = [*domain.own_keys, *(item.key for item in domain.unsold)]
    return [_mark(f"{domain.name} {key}", secret) for key in keys] if secret else keys


def shown(goods: Goods) -> dict[str, Any]:
    """What a company shows, for a JSON file."""
    count = goods.count_IV
    sizes = [{kind: sorted(values) for kind, values in one.sizes.items()} for one in goods.numbers]
    return {
        "format": FORMAT,
        "keys": goods.keys,
        "plain_keys": goods.plain_keys,
        "grams": goods.grams,
        "of_items": [
            [column.tolist() for column in (count[[item]].indices, count[[item]].data)]
            for item in range(count.shape[0])
        ],
        "numbers": [
            [size, sorted(one.models), sorted(one.parts)] for size, one in zip(sizes, goods.numbers, strict=True)
        ],
    }


def goods_from(content: Mapping[str, Any], source: str) -> Goods:
    """What `shown` gave.

    Raises:
        ValueError: it is something else; the message names ``source``.
    """
    try:
        keys, plain, grams, rows, numbers = (
            content[name] for name in ("keys", "plain_keys", "grams", "of_items", "numbers")
        )
        starts = np.cumsum([0, *(len(row[0]) for row in rows)])
        index, count = (np.array([one for row in rows for one in row[side]], np.int64) for side in (0, 1))
        count_IV = sp.csr_array((count, index, starts), (len(keys), len(grams)))
        count_IV.check_format()
        found = [
            Numbers({kind: frozenset(values) for kind, values in sizes.items()}, frozenset(models), frozenset(parts))
            for sizes, models, parts in numbers
        ]
        good = content["format"] == FORMAT and len(keys) == len(plain) == len(rows) == len(found)
        good = good and all(isinstance(one, str) for one in (*keys, *plain, *grams))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"got {source} ({error}), expected a file of fedecider match --secret_file --output"
        ) from error
    if not good:
        raise ValueError(f"got {source}, expected a file of fedecider match --secret_file --output")
    return Goods(keys, plain, [""] * len(keys), grams, count_IV, found)


def _letters(title: str) -> str:
    """Small letters; SD-V296 is sdv296, and other signs are spaces."""
    return re.sub(r"[^\w]+", " ", re.sub(r"(?<=\w)[-./](?=\w)", "", title.lower())).strip()


def numbers_of(title: str) -> Numbers:
    """Sizes with a unit in one unit, other numbers, and model numbers: "6 x 0.5 l, SD-V296" has {"": 6, "l": 0.5} and
    sdv296."""
    sizes: dict[str, set[str]] = {}
    models = set()

    def read(match: re.Match[str]) -> str:
        kind, factor = UNITS[match[2]] if match[2] else ("", 1.0)
        if not match[2] and len(match[1]) > MODEL_LETTERS:
            return match[0]
        sizes.setdefault(kind, set()).add(f"{float(match[1].replace(',', '.')) * factor:.6g}")
        return " "

    rest = _NUMBER.sub(read, re.sub(r"(\d)\s*[x×]\s*(?=\d)", r"\1 x ", title.lower()))
    for word in (re.sub(r"\W", "", word) for word in rest.split()):
        if len(word) >= MODEL_LETTERS and re.search(r"\d", word):
            models.add(word)
        elif short := re.fullmatch(r"([^\W\d]+)(\d+)", word):  # PS4 is not PS3
            sizes.setdefault(short[1], set()).add(short[2])
    parts = {
        word[start:end]
        for word in models
        for start in range(len(word) - MODEL_LETTERS + 1)
        for end in range(start + MODEL_LETTERS, len(word) + 1)
    }
    return Numbers({kind: frozenset(values) for kind, values in sizes.items()}, frozenset(models), frozenset(parts))


def agree(one: Numbers, other: Numbers) -> bool:
    """Whether two titles may be of one item. Where both have model numbers, one must be part of the other's; else of
    what both measure, at most one of them may have a value that the other lacks."""
    if one.models and other.models:
        return bool(one.models & other.parts or one.parts & other.models)
    both = one.sizes.keys() & other.sizes.keys()
    return not any(one.sizes[kind] - other.sizes[kind] and other.sizes[kind] - one.sizes[kind] for kind in both)


def matches(
    first: Goods, second: Goods, pack_sizes: bool = True, min_score: float = MIN_SCORE
) -> list[tuple[int, int, float, str]]:
    """Places of two companies' items that are one, with score and by what; an item is in one pair at most.

    Equal keys (`plain_key`) are taken where the median cosine of their titles is `KEYS_FIT` or more: numbers that each
    company gave by itself are other items. Of what is left, those are pairs that are each other's nearest among the
    items whose numbers agree (`agree`; not asked without ``pack_sizes``), from ``min_score`` on. Of two equally near
    ones neither is taken. Cost: one product of all items with all items, twice, `BLOCK` rows at a time.
    """
    one_IV, other_IV = weighted(first, second)
    found = []
    key_P2 = _equal_keys(first.plain_keys, second.plain_keys)
    if len(key_P2):
        score_P = np.asarray(one_IV[key_P2[:, 0]].multiply(other_IV[key_P2[:, 1]]).sum(1)).ravel()
        if np.median(score_P) >= KEYS_FIT:
            found = [(int(i), int(j), float(score), "key") for (i, j), score in zip(key_P2, score_P, strict=True)]
    left = [
        np.setdiff1d(np.arange(len(goods.keys)), [pair[side] for pair in found])
        for side, goods in enumerate((first, second))
    ]

    def may(i: int, j: int) -> bool:
        return not pack_sizes or agree(first.numbers[i], second.numbers[j])

    there = _nearest((one_IV, other_IV), (left[0], left[1]), may, min_score)
    back = _nearest((other_IV, one_IV), (left[1], left[0]), lambda j, i: may(i, j), min_score)
    mutual = [(i, j, score, "title") for i, (j, score) in there.items() if back.get(j, (-1, 0.0))[0] == i]
    return sorted(found + mutual)


def weighted(first: Goods, second: Goods) -> tuple[sp.csr_array, sp.csr_array]:
    """Rows of length 1 over the n-grams of both; idf is ``ln((1 + N) / (1 + df)) + 1`` over both companies' items."""
    from sklearn.feature_extraction.text import TfidfTransformer

    place = {gram: number for number, gram in enumerate(sorted({*first.grams, *second.grams}))}
    parts = []
    for goods in (first, second):
        count = sp.coo_array(goods.count_IV)
        column = np.array([place[gram] for gram in goods.grams], np.int64)[count.col]
        parts.append(sp.csr_array((count.data, (count.row, column)), (len(goods.keys), len(place))))
    count_IV = sp.csr_array(sp.vstack(parts))
    num_items_V = np.bincount(count_IV.indices, minlength=len(place))
    count_IV = sp.csr_array(count_IV[:, num_items_V <= max(LEAST_COMMON, COMMON * count_IV.shape[0])])
    weight_IV = sp.csr_array(TfidfTransformer().fit_transform(count_IV.astype(np.float32)))
    return weight_IV[: len(first.keys)], weight_IV[len(first.keys) :]


def _equal_keys(first: Sequence[str], second: Sequence[str]) -> np.ndarray:
    """(P, 2) places of keys that each company has once."""
    places = []
    for keys in (first, second):
        values, place, count = np.unique(np.array(keys, dtype=str), return_index=True, return_counts=True)
        places.append(dict(zip(values[count == 1].tolist(), place[count == 1].tolist(), strict=True)))
    both = sorted(places[0].keys() & places[1].keys())
    return np.array([[place[key] for place in places] for key in both], np.int64).reshape(-1, 2)


def _nearest(
    weights: tuple[sp.csr_array, sp.csr_array],
    left: tuple[np.ndarray, np.ndarray],
    may: Callable[[int, int], bool],
    min_score: float,
) -> dict[int, tuple[int, float]]:
    """Item -> the nearest of the other company's that it may be, and the cosine; both by their places."""
    found = {}
    other_VI = sp.csc_array(weights[1][left[1]].T)
    for start in range(0, len(left[0]), BLOCK):
        item_B = left[0][start : start + BLOCK]
        score_BI = sp.csr_array(weights[0][item_B] @ other_VI)
        for row, item in enumerate(item_B.tolist()):
            ends = slice(score_BI.indptr[row], score_BI.indptr[row + 1])
            score, place = score_BI.data[ends], score_BI.indices[ends]
            if len(score) > NEAREST:
                top = np.argpartition(-score, NEAREST)[:NEAREST]
                score, place = score[top], place[top]
            near = [(float(score[one]), int(left[1][place[one]])) for one in np.lexsort((place, -score))]
            near = [(value, other) for value, other in near if value >= min_score and may(item, other)]
            if near and (len(near) == 1 or near[0][0] > near[1][0] + 1e-5):
                found[item] = (near[0][1], near[0][0])
    return found


def match_pairs(
    companies: Mapping[str, Goods], pack_sizes: bool = True, min_score: float = MIN_SCORE, seed: int = 0
) -> list[Pair]:
    """The pairs of every two companies; `SAMPLE` of them, drawn, are marked to be labelled."""
    pairs = []
    for (name, first), (other, second) in combinations(companies.items(), 2):
        for i, j, score, by in matches(first, second, pack_sizes, min_score):
            ends = (name, first.keys[i], first.titles[i], other, second.keys[j], second.titles[j])
            pairs.append(Pair(*ends, round(score, 3), by))
    drawn = set(random.Random(seed).sample(range(len(pairs)), min(SAMPLE, len(pairs))))
    return [pair._replace(sample="x" if place in drawn else "") for place, pair in enumerate(pairs)]


def write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """A table to be corrected: ``no`` under ``right``, or a row that is taken out or put in."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([FIELDS, *pairs])


def check_pairs_file(path: Path) -> None:
    """``ValueError`` where ``path`` is there and is no table of pairs: it is not overwritten."""
    if path.exists() and not path.read_bytes().startswith(",".join(FIELDS[:3]).encode()):
        raise ValueError(f"got the output {path}, which holds something else, expected a free name or a table of pairs")


def read_pairs(path: Path) -> list[Pair]:
    """What `write_pairs` wrote, as it was corrected; pairs that are not right are still in it.

    Raises:
        ValueError: no such table, or a word under ``right`` that is neither yes nor no.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = list(csv.DictReader(text.splitlines(), delimiter=max(",;\t", key=text.partition("\n")[0].count)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"got {path} ({error}), expected a table of pairs of fedecider match") from error
    needed = ("company", "key", "other", "other_key")
    if missing := [name for name in needed if not rows or name not in rows[0]]:
        raise ValueError(f"got {path} without {', '.join(missing)}, expected a table of pairs of fedecider match")
    pairs = []
    for number, row in enumerate(rows, 2):
        cells = {name: (row.get(name) or "").strip() for name in FIELDS}
        right, score = cells["right"].lower(), cells["score"].replace(",", ".") or "1"
        if right not in ("", *YES, *NO) or not re.fullmatch(r"\d(\.\d+)?", score):
            raise ValueError(f"got {row} in row {number} of {path}, expected a score from 0 to 1, and right yes or no")
        ends = (
            cells["company"],
            cells["key"],
            cells["title"],
            cells["other"],
            cells["other_key"],
            cells["other_title"],
        )
        pairs.append(Pair(*ends, float(score), cells["by"] or "hand", cells["sample"], right))
    return pairs


def precision(pairs: Sequence[Pair]) -> tuple[int, int, float, float]:
    """Right ones and all of the sample's pairs that are labelled, and Wilson's 95 % interval of their share."""
    labels = [pair.right in YES for pair in pairs if pair.sample and pair.right]
    right, num = sum(labels), len(labels)
    low, high = wilson(right, num)
    return right, num, low, high


def wilson(right: int, num: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927)."""
    if not num:
        return 0.0, 1.0
    z, share = 1.96, right / num
    middle, half = share + z * z / (2 * num), z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return (middle - half) / (1 + z * z / num), (middle + half) / (1 + z * z / num)


def common_names(
    keys: Mapping[str, Sequence[str]], pairs: Sequence[Pair], are_marks: bool = False
) -> tuple[dict[str, list[str]], int]:
    """Company -> a name of every item that the same goods have everywhere; and the pairs that are left out, since they
    would make two items of a company one. The best pairs come first.

    ``keys``: of the companies that are here. The name is company and key of the first that sells it; of marks the mark.
    """
    members: dict[tuple[str, str], dict[str, str]] = {}
    left_out = 0
    for pair in sorted(pairs, key=lambda pair: (-pair.score, pair)):
        if pair.right in NO:
            continue
        one, other = (members.setdefault(end, {end[0]: end[1]}) for end in (pair[:2], (pair.other, pair.other_key)))
        if one is other:
            continue
        if one.keys() & other.keys():
            left_out += 1
            continue
        one.update(other)
        members.update(dict.fromkeys(other.items(), one))
    names = {}
    for company, own in keys.items():
        groups = [members.get((company, key), {company: key}) for key in own]
        names[company] = [first[1] if are_marks else ":".join(first) for first in (min(one.items()) for one in groups)]
    return names, left_out


def named(domains: Mapping[str, Domain], names: Mapping[str, Sequence[str]]) -> dict[str, Domain]:
    """The companies on one catalogue, each with the keys that it has itself; ``names``: of every item of each, those of
    unsold ones behind."""
    found = {}
    for company, domain in domains.items():
        own = names[company][: len(domain.own_keys)]
        order = np.argsort(np.array(own, dtype=str), kind="stable")
        number_I = np.empty(len(order), np.int64)
        number_I[order] = np.arange(len(order))
        columns = (own, domain.titles, domain.item_texts, domain.own_keys)
        items = Catalogue(CATALOGUE, *([column[place] for place in order] for column in columns))
        clients, public = (group.renumbered(number_I) for group in (domain.clients, domain.public))
        found[company] = replace(domain, catalogue=items, own_items=None, clients=clients, public=public)
    return with_shared_catalogues(found)


def checked_pairs(pairs: Sequence[Pair], keys: Mapping[str, Sequence[str]], others: bool = False) -> list[Pair]:
    """The pairs with keys as companies write them: a table that went through another program may have lost zeros.
    ``others``: whether there may be companies without keys here.

    Raises:
        ValueError: a company or a key that is not there.
    """
    known = {name: {**{plain_key(key): key for key in own}, **{key: key for key in own}} for name, own in keys.items()}

    def key_of(company: str, key: str) -> str:
        own = known.get(company)
        if own is None and others:
            return key
        if own is None:
            raise ValueError(f"got a pair of {company}, expected one of {', '.join(known)}")
        if key not in own and plain_key(key) not in own:
            raise ValueError(f"got a pair with {key} of {company}, which it does not sell, expected one of its keys")
        return own.get(key) or own[plain_key(key)]

    return [
        pair._replace(key=key_of(pair.company, pair.key), other_key=key_of(pair.other, pair.other_key))
        for pair in pairs
    ]


def match(
    data: Mapping[str, Domain],
    pairs: str | Path | None = None,
    secret: bytes = b"",
    pack_sizes: bool = True,
    min_score: float = MIN_SCORE,
) -> FederatedData:
    """Companies whose items are matched: the same goods count as one item, in counts, training and what they have in
    common; every company keeps its own keys.

    Args:
        data: Prepared domains of two companies or more, as `from_events` gives them; with a secret one will do.
        pairs: A table of pairs that ``fedecider match --output`` wrote and a person corrected. None: what
            `match_pairs` finds.
        secret: That under which the table of pairs was made, where it shows no titles.
        pack_sizes: As `matches`; so is ``min_score``.

    Raises:
        ValueError: fewer than two companies, or a table that does not suit them.
    """
    if (len(data) < 2 and not secret) or CATALOGUE in data or (secret and not pairs):
        raise ValueError(
            f"got the companies {', '.join(data)}, expected two or more (under a secret one, and pairs), none of them "
            f"called {CATALOGUE}"
        )
    keys = {name: item_marks(domain, secret) for name, domain in data.items()}
    if pairs:
        rows = checked_pairs(read_pairs(Path(pairs)), keys, bool(secret))
    else:
        rows = match_pairs({name: goods_of(domain) for name, domain in data.items()}, pack_sizes, min_score)
    names, left_out = common_names(keys, rows, bool(secret))
    said = match_sentences(rows, {name: len(own) for name, own in keys.items()}, left_out)
    return FederatedData(named(data, names), said)


def unmatched(domains: Mapping[str, Domain]) -> str:
    """Whose items are not matched although keys or titles say that they are the same goods, in words; or nothing.

    `ASKED` items of each company are looked for at the one with most items. Of departments and categories with goods of
    their own at most 7 % were there, of shops that sell the same at least 48 %.
    """
    if len(domains) < 2:
        return ""
    largest, most = max(domains.items(), key=lambda one: len(one[1].item_keys))
    others = {name: one for name, one in domains.items() if one.catalogue is not most.catalogue}
    goods = goods_of(most) if others else None
    for name, domain in others.items():
        numbers = np.linspace(0, len(domain.item_keys) - 1, min(ASKED, len(domain.item_keys))).astype(int)
        part = goods_of(Domain(name, domain.items.part(name, numbers.tolist()), NO_EVENTS, NO_EVENTS, {}))
        num_same = len(matches(part, goods, min_score=SURE)) if goods else 0
        if num_same >= max(LEAST_SAME, SAME * len(numbers)):
            return (
                f"{num_same} of {len(numbers)} items of {name} seem to be sold by {largest} too, under other keys or "
                "without a common catalogue"
            )
    return ""


def match_sentences(pairs: Sequence[Pair], num_items: Mapping[str, int], left_out: int = 0) -> list[str]:
    """What was found, and how sure one may be of it."""
    kept = [pair for pair in pairs if pair.right not in NO]
    said = []
    for one, other in combinations(num_items, 2):
        both = [pair for pair in kept if {pair.company, pair.other} == {one, other}]
        by = [f"{sum(pair.by == how for pair in both):,} by {how}" for how in dict.fromkeys(pair.by for pair in both)]
        shares = " and ".join(f"{len(both) / num_items[name]:.0%} of {name}'s" for name in (one, other))
        said.append(f"{one} and {other}: {len(both):,} items in common ({', '.join(by)}), {shares}" if both else
                    f"{one} and {other}: no item in common")  # fmt: skip
    if left_out:
        said.append(f"{left_out:,} pairs are left out: they would make two items of one company the same")
    right, num, low, high = precision(pairs)
    if num:
        said.append(f"precision: {right} of {num} labelled pairs are right, {right / num:.0%} [{low:.0%}, {high:.0%}]")
    elif kept:
        said.append("precision: not known. Label the pairs with an x under sample: yes or no under right")
    return said
