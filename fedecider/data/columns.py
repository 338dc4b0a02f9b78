"""Which column of a table is the customer, the item, the time, the order, the quantity, and which hold texts.

A name is cut into known words of six languages (``Kundennr`` = kunden + nr, ``date_commande`` = date + commande); a
column has the role of its words when nothing else is in its name. Values decide where names leave two: a column of
times has to hold times.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from fedecider.data.readers.reading import DEFAULT_TEXT_FIELDS, OTHER_TEXT_FIELDS
from fedecider.data.tables import Question, Table
from fedecider.data.times import are_numbers, holds_times, is_clock

TEXT_COLUMNS = (*DEFAULT_TEXT_FIELDS, *OTHER_TEXT_FIELDS)
USER = (
    "unique household customer client clients buyer member patron borrower kunde kunden kaeufer klant cliente acheteur "
    "kd comprador utente usuario utilisateur gebruiker user account visitor person shopper debitor pseudo reviewer "
    "debitoren loyalty username email mail"
)
ITEM = (
    "parentasin item items sku product prod article artikel produkt produit producto prodotto articulo articolo "
    "lineitem art stockcode material game movie book track song news business asin isbn ean gtin upc barcode plu aid"
)
ORDER = (
    "basket order invoice receipt kassenbon bon beleg rechnung rechnungs auftrag auftrags bestell bestellung orders "
    "commande commandes facture pedido factura ordine fattura scontrino bestelling ticket transaction"
)
QUANTITY = "quantity qty menge anzahl stueck stueckzahl stk quantite qte cantidad quantita aantal units pieces"
TIME = "timestamp datetime time ts date dat day datum zeitstempel zeitpunkt zeit uhrzeit fecha hora data ora heure jour"
NEUTRAL = {
    "id": "id key code card sales nr no num number nummer numero n ref reference codigo codice uid the of de del des "
    "du la le el",
    "time": "at on event purchase purchased bought sale sold ordered created paid checkout loan t "
    "tdat unix review unixreview kauf verkauf verkaufs einkaufs achat vente compra venta acquisto vendita aankoop "
    "verkoop epoch ms utc best bestel",
}
"""Words that may stand beside a role's words."""
_OF_TIME = set(NEUTRAL["time"].split())
RANKS = {
    "user": USER.split(),
    "item": ITEM.split(),
    "order": ORDER.split(),
    "quantity": QUANTITY.split(),
    "time": TIME.split(),
}
"""Role -> its words; where two columns have a role, one with an earlier word of another kind is taken."""
EQUAL_RANKS = {
    "user": ("unique", "household", "username", "email", "mail"),
    "item": ("parentasin", "asin", "isbn", "ean", "gtin", "upc", "barcode", "plu"),
    "time": TIME.split(),
    "order": ORDER.split(),
    "quantity": QUANTITY.split(),
}
"""Words by which two columns of one role are told apart; with any others somebody has to say which one is meant."""
FIRST = {"unique", "household", "parentasin"}
"""Words that are better than none of these."""
LATER = ("created", "paid")
"""Of several times, the time of the purchase comes first."""
USUAL_TEXTS = {
    "title": "title maintitle fulltitle lineitemname itemsitemname name label itemname itemtitle productname prodname "
    "producttitle appname booktitle movietitle gametitle trackname songname headline bezeichnung artikelbezeichnung "
    "artikelname produktname titel titre libelle designation nomproduit libelleproduit nombre nombreproducto titulo "
    "denominacion titolo nome nomeprodotto denominazione naam productnaam omschrijving itemdescription "
    "productdescriptionshort stockdescription",
    "author": "author authors bookauthor writer artist artistname autor auteur autore",
    "brand": "brand brandname manufacturer maker vendor store publisher developer marke hersteller marque fabricant "
    "marca fabricante produttore merk fabrikant",
    "categories": "categories category categoryname maincategory productcategory producttype producttypename "
    "productgroupname department departmentname subcategory warengruppe kategorie categorie rayon famille categoria "
    "familia seccion reparto categoriecode groep categorycode",
    "genres": "genres genre",
    "keywords": "keywords tags subjects",
    "description": "description desc detaildesc productdescription longdescription abstract summary beschreibung "
    "descripcion descrizione beschrijving",
    "price": "price unitprice listprice preis einzelpreis prix precio prezzo prijs",
    "year": "year yearofpublication releaseyear jahr annee",
}
"""Text field -> what its column is called, in small letters without accents and marks; the first one that is there."""
OF_REVIEWS = {"text", "reviewtext", "reviewbody", "verifiedpurchase"}
"""Columns of reviews, whose title is not the item's."""
NOT_TITLES = re.compile(
    r"(^|[\W_])(id|nr|no|url|link|image|img|date|datum|price|preis|prix|status|ean|gtin|sku|code)($|[\W_])"
)
NOT_A_TEXT = re.compile(
    r"status|(?<!product)type$|event|session|country|city|currency|method|channel|mail|note|comment|address|phone"
)
SAME_TITLES = 0.5
"""A column of texts with fewer different values than this share of the items is no title, where keys are words."""
LEAST_TITLES = 0.05
"""The same where there is nothing better: types of products say more than no title."""


UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss"})


class Columns(NamedTuple):
    """What was found of a table of events."""

    by_role: dict[str, str]
    """Ours -> theirs."""
    guessed: dict[str, str]
    """Those of them that nobody named."""


def bare(name: str) -> str:
    """A name in small letters, without accents and whatever is no letter or digit."""
    german = unicodedata.normalize("NFKC", name).lower().translate(UMLAUTS)
    plain = unicodedata.normalize("NFKD", german).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]", "", plain)


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    """The known words that a bare name is made of; none where something else is in it."""
    known = {word for words in RANKS.values() for word in words} | set(" ".join(NEUTRAL.values()).split())
    ends: dict[int, tuple[str, ...]] = {0: ()}
    for end in range(1, len(name) + 1):
        found = [(*ends[start], name[start:end]) for start in ends if name[start:end] in known]
        if found:
            ends[end] = min(found, key=len)
    return ends.get(len(name), ())


def role_of(name: str) -> str:
    """``user``, ``item``, ``time``, ``order`` or ``quantity``; empty: a name that says nothing."""
    parts = name.split(".")
    return next(filter(None, (_role(bare(".".join(some))) for some in (parts, parts[-1:], parts[-2:]))), "")


@lru_cache(maxsize=4096)
def _role(name: str) -> str:
    words = _words(name)
    if name in ("t", "tdat") or (len(words) > 1 and words[-1] in ("at", "on") and set(words) <= _OF_TIME):
        return "time"  # ordered_at
    order = ("time", "quantity", "user", "item", "order")
    known = [role for role in (next((one for one in order if word in RANKS[one]), "") for word in words) if role]
    for role in ("time", "quantity"):
        if role in known:
            return role
    if not known or {"item", "order"} <= set(known):
        return ""  # order_item_id is the number of a line
    return "" if _OF_TIME & set(words) - {"of", "t", "no", "n", "ms"} else known[-1]


def candidates(table: Table, role: str) -> list[str]:
    """The columns of a role by their names, the best first; several of one rank are all at the front."""
    named = [name for name in dict.fromkeys(table.column_names) if role_of(name) == role]
    return sorted(named, key=lambda name: _rank(name, role))


def _rank(name: str, role: str) -> tuple[int, int, int]:
    words = _words(bare(name)) or _words(bare(name.rpartition(".")[2]))
    apart = EQUAL_RANKS[role]
    places = [apart.index(word) for word in words if word in apart]
    first = 0 if FIRST & set(words) else 1
    later = max((LATER.index(word) + 1 for word in words if word in LATER), default=0)
    if role in ("user", "item"):
        rank = 0 if first == 0 else 1 if not places else 2 + min(places)
    else:
        rank = min(places, default=0)
    return (0, later, rank)


def find_columns(
    table: Table, asked: Mapping[str, str | None], optional: Collection[str] = (), of_items: Collection[str] = ()
) -> Columns:
    """The columns of a table: those ``asked`` for, by role, and those that are called as they usually are.

    Args:
        table: The table.
        asked: Role -> a column's name; None: to be found; "": there is none.
        optional: Roles that may be missing; all others are needed.
        of_items: The columns of the table of items: a name that both have may be the items'.

    Raises:
        ValueError: columns are missing, or could be two: all of them are named at once, with proposals.
    """
    named = {role: name for role, name in asked.items() if name}
    table.check(named.values())
    guessed: dict[str, str] = {}
    problems, missing, proposals = [], list[str](), dict[str, str]()
    sample = table.sample(1000)
    for role in [role for role, name in asked.items() if name is None and role in RANKS]:
        found = [name for name in candidates(table, role) if name not in named.values() and sample.get(name)]
        if role == "time":
            found = [one for one in found if holds_times(sample[one]) or are_numbers(sample[one])] or found
        if role == "item" and not found:
            found = [name for name in sample if name in of_items and name not in named.values() and not role_of(name)]
        item = {**named, **guessed}.get("item", "")
        beside = tuple(f"{one}." for one in table.lists if item and not item.startswith(f"{one}."))
        found = [name for name in found if not name.startswith(beside)]
        if role == "order":
            found = [name for name in found if not holds_times(sample[name], name)]
        best = [name for name in found if _rank(name, role) == _rank(found[0], role)]
        if len(best) == 1:
            guessed[role] = best[0]
        elif len(best) > 1 and role not in optional:
            proposals[role] = best[0]
            problems.append(f"{' and '.join(map(repr, best))} could both be the {role}: {role}={best[0]!r} (--{role})")
        elif len(best) > 1 and role == "time":
            problems.append(f"{' and '.join(map(repr, best))} could both be the time: time={best[0]!r} (--time)")
        elif not best and role not in optional:
            missing.append(role)
    for role in missing:  # when it is known which columns the others are
        proposals[role] = _proposal(sample, role, {**named, **guessed, **proposals})
        problems.append(f"none is called as the {role} usually is: {role}={proposals[role]!r} (--{role})")
    is_shopify = any(bare(name).startswith("lineitem") for name in table.column_names) and "Name" in table.column_names
    if is_shopify and asked.get("order", "") is None and "order" not in guessed:
        guessed["order"] = "Name"
    if problems:
        keys = {name: len(set(values)) for name, values in sample.items() if values and not holds_times(values, name)}
        shown = ", ".join(f"{name} ({count:,} different)" for name, count in keys.items())
        raise Question(
            f"got {table.what} with the columns {', '.join(table.column_names)[:300]}; {'; '.join(problems)}. In the "
            f"first rows: {shown[:300]}. A file without a line of names: header='user,item,...'; "
            "another mark between its fields: delimiter='...' (--delimiter)",
            {**named, **guessed, **proposals},
        )
    return Columns({**named, **guessed}, guessed)


def _proposal(sample: Mapping[str, list[str]], role: str, named: Mapping[str, str]) -> str:
    """The column whose values look most like a role's."""
    words = RANKS[role]
    free = [name for name in sample if name not in named.values()]
    free = [
        name for name in free if sample[name] and not holds_times(sample[name], name) and not is_clock(sample[name])
    ]
    by_word = [name for name in free if any(word in bare(name) for word in words if len(word) > 3)]
    different = {name: len(set(sample[name])) for name in free}
    keys = [name for name in free if 1 < different[name] < 0.9 * len(sample[name])]
    keys.sort(key=lambda name: -different[name])
    return next(iter([*by_word, *keys, *free]), "...")


def clock_column(table: Table, time: str, used: Collection[str]) -> str:
    """The column of clock times (``14:05``) beside one of days; empty: none."""
    sample = table.sample(1000)
    if any(len(value) > 10 for value in sample.get(time, [])[:100]):
        return ""
    found = [name for name, values in sample.items() if name not in used and values and is_clock(values)]
    return found[0] if len(found) == 1 else ""


def time_like_columns(table: Table, used: Collection[str]) -> dict[str, str]:
    """Columns outside ``used`` whose first values are times, whatever they are called -> the first one; those with
    most different ones come first."""
    sample = sorted(table.sample(1000).items(), key=lambda one: -len(set(one[1])))
    return {name: values[0] for name, values in sample if name not in used and values and holds_times(values, name)}


def text_columns(
    table: Table, texts: Mapping[str, str] | None, item: str, used: Iterable[str] = (), of_events: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Text field -> its column, by ``texts`` or else by names and values; and what has to be said first.

    ``item`` holds the items' keys; ``used`` hold other keys and times. ``of_events``: the table is one of events, and
    may be of reviews.

    Raises:
        ValueError: a field that is none, or the texts are those of reviews.
    """
    odd = sorted(set(texts or ()) - set(TEXT_COLUMNS))
    if odd:
        raise ValueError(f"got the text field {odd[0]!r}, expected some of {', '.join(TEXT_COLUMNS)}")
    if texts:
        table.check(texts.values())
        return {field: texts[field] for field in TEXT_COLUMNS if field in texts}, []
    taken = {item, *used}
    names = [name for name in dict.fromkeys(table.column_names) if name not in taken]
    chosen = {field: field for field in TEXT_COLUMNS if field in names}
    beside = item[: item.rfind(".") + 1]

    def within(name: str) -> str:
        """A name inside the object that holds the key too."""
        return name[len(beside) :] if name.startswith(beside) else name

    for field, usual in USUAL_TEXTS.items():
        free = {bare(within(name)): name for name in reversed(names) if name not in chosen.values()}
        free |= {bare(name): name for name in reversed(names) if name not in chosen.values()}
        if field not in chosen and (found := next((free[one] for one in usual.split() if one in free), None)):
            chosen[field] = found
    if of_events and OF_REVIEWS & set(map(bare, table.column_names)) and texts is None and chosen:
        raise ValueError(
            f"got reviews ({', '.join(table.column_names)[:200]}) without a table of items: the texts are those of "
            "reviews, expected items, or the columns with items' texts: texts={'title': '...'}"
        )
    chosen, said = _with_title(table, chosen, names, item, of_events)
    return {field: chosen[field] for field in TEXT_COLUMNS if field in chosen}, said


def _with_title(
    table: Table, chosen: dict[str, str], names: list[str], item: str, of_events: bool
) -> tuple[dict[str, str], list[str]]:
    """The same with a title: where no column is called so, the one whose texts differ most."""
    if "title" in chosen or (of_events and not chosen):
        return chosen, []
    sample = table.sample(5000)
    num_rows = max((len(values) for values in sample.values()), default=0)
    different = {
        name: len(set(sample[name]))
        for name in names
        if sample.get(name)
        and name not in (chosen.get("brand"), chosen.get("author"), chosen.get("price"), chosen.get("year"))
        and not NOT_TITLES.search(name.lower())
        and not NOT_A_TEXT.search(bare(name))
        and _are_words(sample[name])
    }
    num_items = len(set(sample.get(item, ())))
    if of_events and max(different.values(), default=0) < SAME_TITLES * num_items and _are_words(sample[item]):
        return {"title": item, **chosen}, []
    if not different or max(different.values()) < LEAST_TITLES * num_items:
        return {field: name for field, name in chosen.items() if field not in ("price", "year")}, []
    best = (
        chosen.get("description", "")
        if chosen.get("description") in different
        else max(different, key=different.__getitem__)
    )
    said = (
        f"{table.what}: no column is called as titles are; {best!r} is taken, with {different[best]:,} different texts "
    )
    said += f"in the first {num_rows:,} rows (another one: texts={{'title': '...'}}, --texts title=...)"
    return {"title": best, **{field: name for field, name in chosen.items() if name != best}}, [said]


def _are_words(values: list[str]) -> bool:
    """Whether most of them have three letters in a row."""
    return sum(bool(re.search(r"[^\W\d_]{3}", value)) for value in values) > 0.5 * len(values)
