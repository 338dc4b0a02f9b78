"""How keys are written: what programs do to them, which differ by that alone, and which cannot be right."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

HALF = 0.5
"""Of the keys that lack, so many must be found when they are written otherwise."""
SCIENTIFIC = re.compile(r"\d([.,]\d+)?[eE]\+?\d+")
TOO_LARGE = re.compile(r"\d{16,}\.0+")
SEVERAL = re.compile(r"\s*[,;|]\s*")


def without_zeros(key: str) -> str:
    """007 -> 7."""
    return key.lstrip("0") or "0"


def without_point(key: str) -> str:
    """7.0 -> 7, as a number in a table of texts loses it."""
    return re.sub(r"\.0+$", "", key)


def without_marks(key: str) -> str:
    """978-3-16 -> 978316."""
    return re.sub(r"[\s\-‐-―]", "", key)


def without_isbn(key: str) -> str:
    """ISBN-10 and ISBN-13 of one book alike: the nine digits that both have."""
    plain = without_marks(key)
    if re.fullmatch(r"\d{9}[\dXx]", plain):
        return plain[:9]
    return plain[3:12] if re.fullmatch(r"97[89]\d{10}", plain) else plain


def plain_key(key: str) -> str:
    """A key without what programs add to it or take away: spaces around it, case, a .0 at the end, leading zeros."""
    return without_zeros(without_point(key.strip().casefold()))


def check_keys(keys: Collection[str], what: str, place: str) -> None:
    """``ValueError`` for keys that a spreadsheet or a float has rounded, so that several have become one."""
    odd = [key for key in keys if SCIENTIFIC.fullmatch(key)]
    if odd and len(odd) >= 0.01 * len(keys):
        raise ValueError(
            f"got the {what} {min(odd)!r} {place}, in scientific notation: digits are lost, and several keys have "
            "become one, expected all digits: export the column as text"
        )
    if large := [key for key in keys if TOO_LARGE.fullmatch(key)]:
        raise ValueError(
            f"got the {what} {large[0]!r} {place}, a float beyond 2^53, in which digits are lost, expected text or a "
            "whole number"
        )


def nearly_equal(keys: Collection[str], what: str) -> str:
    """What is said of keys of one table that differ by case, dashes and blanks alone; or nothing."""
    alike = defaultdict(list)
    for key in sorted(keys):
        alike[without_marks(key).casefold()].append(key)
    several = [group for group in alike.values() if len(group) > 1]
    if not several:
        return ""
    num = sum(map(len, several))
    return (
        f"{num:,} {what} differ from others by letter case, dashes or blanks alone ({' and '.join(several[0][:2])}): "
        "they are taken for different ones; where they are not, write them alike"
    )


def how_keys_differ(ours: Collection[str], theirs: Collection[str]) -> str:
    """How two tables write the same keys, where at least half of ``ours`` are among ``theirs`` then; else nothing."""
    for way, plain in _ways(ours, theirs):
        known: dict[str, str] = {}
        for key in sorted(theirs):
            known.setdefault(plain(key), key)
        pairs = [(key, known[plain(key)]) for key in ours if plain(key) in known]
        if pairs and len(pairs) >= HALF * len(ours):
            mine, their = min(pairs, key=lambda pair: (-len(pair[0].lstrip("0")), pair))
            return f"the tables write keys differently ({mine} and {their}: {way})"
    return ""


def _ways(ours: Collection[str], theirs: Collection[str]) -> list[tuple[str, Callable[[str], str]]]:
    prefixes = [_prefix(keys) for keys in (ours, theirs)]

    def without_prefix(key: str) -> str:
        return next((key[len(one) :] for one in prefixes if one and key.startswith(one)), key)

    def all_of_them(key: str) -> str:
        return plain_key(without_marks(without_prefix(key.strip())))

    return [
        ("spaces around them", str.strip),
        ("letter case", str.casefold),
        ("leading zeros", without_zeros),
        ("a point and a zero at the end", without_point),
        ("dashes and blanks", without_marks),
        ("ISBN-10 and ISBN-13", without_isbn),
        ("a prefix", without_prefix),
        ("prefix, case, zeros or dashes", all_of_them),
    ]


def _prefix(keys: Collection[str]) -> str:
    """What all keys begin with, up to the first digit."""
    first, last = min(keys, default=""), max(keys, default="")
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return re.sub(r"\d.*$", "", first[:num_same]) if first != last else ""


def parts_of(keys: Sequence[str], known: Collection[str] = ()) -> dict[str, list[str]]:
    """Keys that are several in one cell (``p0, p3``) -> these; empty unless all of them are known by themselves, or
    stand in several cells."""
    several = {key: SEVERAL.split(key) for key in keys if SEVERAL.search(key) and key not in known}
    alone = set(known) | {key for key in keys if key not in several}
    times = Counter(part for parts in several.values() for part in set(parts))
    fits = all(part in alone or (times[part] > 1 and not known) for part in times)
    return several if fits and "" not in times else {}
