"""Which rows of a table are purchases: what counts, whose they are, and what was sent back.

Works on the temporary table ``rows`` of a `Table`, whose columns ``row``, ``user``, ``item``, ``order``, ``quantity``
and ``micro`` are there as far as they were read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedecider.data.columns import bare
from fedecider.data.tables import Question, Table, literal, quoted

NO_CUSTOMER = "rows without a customer"
NOT_KEPT = "rows that do not count (keep)"
RETURNS = "returns, and the purchases that they take back"
ZERO = "rows of a quantity of 0"
NOBODY = (
    "",
    "null",
    r"\n",
    "nan",
    "none",
    "na",
    "n/a",
    "#n/a",
    "<na>",
    "nil",
    "(not set)",
    "not set",
    "guest",
    "gast",
    "anonymous",
    "unknown",
    "undefined",
    "(none)",
    "invité",
    "invite",
    "invitado",
    "ospite",
    "gasten",
)
"""What exports write in the place of a customer, in small letters."""
PERHAPS_NOBODY = ("0", "-1", "-", "--", "00", "000", "0000", "99999", "999999", "1", "x", "?")
"""What may be one, or a customer's key: one where it has much more events than anybody."""
TIMES_THE_NEXT = {True: 3, False: 10}
"""So many times the events of the next customer are no person's; of a key that may be nobody, and of any other."""
SHARE = 0.05
"""Of all events that a key has at least that is no person."""
MANY = 5
"""Customers from whom on one can be told from the others."""
EVENT_WORDS = {
    "purchase": "purchase purchased buy bought order ordered paid complete completed shipped delivered fulfilled "
    "closed sale sold transaction checkout invoiced bezahlt versendet geliefert abgeschlossen verkauf bestellt paye "
    "livre expedie pagado enviado entregado pagato spedito consegnato betaald verzonden buyproduct erledigt "
    "processing success successful captured authorized",
    "other": "view viewed click clicks pageview cart addtocart carts wishlist fav pv impression search remove "
    "removefromcart canceled cancelled cancel refunded refund returned return pending failed unavailable created "
    "draft voided void declined expired abandoned chargeback partiallyrefunded partiallypaid unpaid storniert storno "
    "retour retoure abgebrochen offen annule rembourse cancelado devuelto reembolsado annullato rimborsato reso "
    "geannuleerd onhold fraud enattente",
}
"""What columns of states and of kinds of events say, without marks; those of ``other`` are no purchases."""
NAMES = re.compile(
    r"(tx|transaction|doc|document|order|sales?|beleg|umsatz|bewegungs|movement|entry|record)(type|art|kind)$|"
    r"status|eventtype|eventname|^event$|^action$|behaviou?r|vorgang|buchungsart|^statut$|^etat$|^zustand$|^estado$|^stato$"
)
FLAGS = re.compile(r"cancel|storn|refunded|return|retour|annul|void|deleted|geloescht|devuelt|rimbors|rembours")
MOST_STATES = 30
"""Different values of a column of states."""


def parsed_keep(text: str) -> dict[str, list[str]]:
    """``status=paid,shipped;cancelled_at=`` -> column -> the values that count.

    Raises:
        ValueError: a part without a name.
    """
    keep = {}
    for part in [one for one in text.split(";") if one.strip()]:
        name, equals, values = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"got keep {part!r}, expected a column and the values that count: status=paid,shipped")
        keep[name.strip()] = [one.strip() for one in values.split(",")]
    return keep


def state_columns(table: Table, used: Collection[str]) -> list[str]:
    """The columns outside ``used`` that may say which rows count, or hold negative numbers."""
    found = []
    for name, values in table.sample().items():
        if name in used:
            continue
        few = len(set(values)) <= MOST_STATES and all(len(value) <= 40 for value in values[:100])
        numbers = bool(values) and all(re.fullmatch(r"-?[\d.,]+", value) for value in values[:100])
        if few or numbers or _searched(FLAGS, name) or _searched(NAMES, name):
            found.append(name)
    return found


def keep_rows(table: Table, keep: Mapping[str, Sequence[str]], column_of: Mapping[str, str]) -> int:
    """Remove the rows that do not count; how many. Returns stay: they take back purchases.

    Args:
        table: Its ``rows`` are changed.
        keep: Column -> the values that count; ``*``: all; an empty one: blank cells.
        column_of: The columns' names -> what they are called in ``rows``.

    Raises:
        ValueError: a value that no row has.
    """
    before = int(table.value("SELECT count(*) FROM rows"))
    no_return = "NOT coalesce(amount < 0, false)" if _has_amounts(table) else "true"
    for name, values in keep.items():
        if "*" in values:
            continue
        column = f"lower(trim(coalesce({quoted(column_of[name])}, '')))"
        known = {value for (value,) in table.query(f"SELECT DISTINCT {column} FROM rows LIMIT 1000")}
        odd = [value for value in values if value.lower() not in known]
        if odd:
            raise ValueError(
                f"got keep {name}={odd[0]!r}, which no row of the {table.what} has, expected some of "
                f"{', '.join(sorted(known))[:300]}"
            )
        listed = ", ".join(literal(value.lower()) for value in values)
        table.query(f"DELETE FROM rows WHERE {column} NOT IN ({listed}) AND {no_return}")
    return before - int(table.value("SELECT count(*) FROM rows"))


def ask_about_states(table: Table, keep: Mapping[str, Sequence[str]], column_of: Mapping[str, str]) -> None:
    """Whether a column that nobody spoke of says that some rows are no purchases, beside returns.

    Raises:
        ValueError: it does: which of its values count has to be said.
    """
    others = set(EVENT_WORDS["other"].split())
    bought = "WHERE amount > 0 " if _has_amounts(table) else ""
    asked, proposal = [], dict[str, list[str]]()
    for name, ours in column_of.items():
        if name in keep:
            continue
        counts = table.query(
            f"SELECT trim(coalesce({quoted(ours)}, '')) AS value, count(*) AS num FROM rows {bought}GROUP BY value "
            f"ORDER BY num DESC, value LIMIT {MOST_STATES + 1}"
        )
        values = [value for value, _ in counts]
        plain = {_state(value) for value in values} - {""}
        is_few = len(values) <= MOST_STATES
        is_state = is_few and len(plain) > 1 and _searched(NAMES, name)
        has_other = is_few and bool(plain & others) and not all(value in ("", "0") for value in plain)
        is_flag = _searched(FLAGS, name) and len(values) > 1 and _is_flag(values)
        if not (is_state or has_other or is_flag):
            continue
        shown = ", ".join(f"{value or 'blank'} ({num:,})" for value, num in counts[:8])
        good = _good(values, is_flag and not has_other)
        proposal[name] = good
        words = f"{name}={','.join(good)}"
        asked.append(f"{name!r} holds {shown}: --keep {repr(words) if ' ' in words else words}")
    if asked:
        raise Question(
            f"got {table.what} with a column that may say which rows are purchases: {'; '.join(asked)}. Expected to be "
            "told which values count (--keep, in Python keep={column: [values]}; column=* counts all)",
            {"keep": {**keep, **proposal}},
        )


def _searched(words: re.Pattern[str], name: str) -> bool:
    return bool(words.search(bare(name)) or words.search(bare(name.rpartition(".")[2])))


def _state(value: str) -> str:
    """A value without marks, and without the ending of a feminine or plural that is not among the words."""
    plain = bare(value)
    known = set(" ".join(EVENT_WORDS.values()).split())
    return next((one for cut in range(3) if (one := plain[: len(plain) - cut]) in known), plain)


def _has_amounts(table: Table) -> bool:
    return "amount" in {name for (name, *_) in table.query("DESCRIBE rows")}


def _is_flag(values: Sequence[str]) -> bool:
    """Dates or truths, blank where nothing happened; no amounts of money."""
    return all(re.fullmatch(r"|0|1|true|false|yes|no|y|n|ja|nein|.*\d{4}.*\d.*", value.lower()) for value in values)


def _good(values: Sequence[str], is_flag: bool) -> list[str]:
    """The values that look like purchases."""
    if is_flag:
        return [value for value in values if value.lower() in ("", "0", "false", "no", "n", "nein")][:1]
    buys, others = (set(EVENT_WORDS[one].split()) for one in ("purchase", "other"))
    good = [value for value in values if _state(value) in buys]
    good = good or [one for one in values if _state(one) not in {*others, ""}] or [one for one in values if not one]
    return good or ["*"]


def leave_out_nobody(table: Table, nobody: Sequence[str] | None) -> tuple[int, str]:
    """Remove the rows of customers that are none; how many, and which keys they had.

    ``nobody``: the keys that are no customers; None: those that exports write so, and any with a share of events that
    no person has.
    """
    if nobody is None:
        counts = table.query(
            'SELECT "user", count(*) AS num FROM rows WHERE "user" IS NOT NULL GROUP BY ALL ORDER BY num DESC LIMIT 5'
        )
        num_users = int(table.value('SELECT count(DISTINCT "user") FROM rows'))
        total = sum(num for _, num in table.query("SELECT 1, count(*) FROM rows"))
        listed = ", ".join(map(literal, NOBODY))
        keys = [
            key for (key,) in table.query(f'SELECT DISTINCT "user" FROM rows WHERE lower(trim("user")) IN ({listed})')
        ]
        people = [(key, num) for key, num in counts if key not in keys]
        if len(people) > 1 and num_users > MANY:
            (first, most), (_, second) = people[:2]
            if most >= TIMES_THE_NEXT[first.lower() in PERHAPS_NOBODY] * second and most >= SHARE * total:
                keys.append(first)
    else:
        keys = list(nobody)
    listed = ", ".join(map(literal, keys)) or "NULL"
    where = f'"user" IS NULL OR "user" IN ({listed})'
    found = table.query(
        f"SELECT coalesce(\"user\", 'blank') AS name, count(*) AS num FROM rows WHERE {where} GROUP BY name "
        "ORDER BY num DESC, name"
    )
    table.query(f"DELETE FROM rows WHERE {where}")
    return sum(num for _, num in found), ", ".join(f"{name!r} {num:,}" for name, num in found[:5])


def take_back(table: Table) -> tuple[int, int, int]:
    """Remove returns with what they return: a row of negative quantity takes back the purchase of the same customer,
    item and order, else the nearest earlier one of this customer and item.

    Returns:
        Returns, purchases that were wholly taken back, and returns of which no purchase is there.
    """
    numbers = "count(*) FILTER (amount < 0) > 0"
    has_order = "order" in {name for (name, *_) in table.query("DESCRIBE rows")}
    order = "coalesce(\"order\", '')" if has_order else "''"
    rows = table.query(
        f'SELECT row, "user", item, {order}, amount FROM rows WHERE ("user", item) IN (SELECT ("user", item) FROM rows '
        f'GROUP BY "user", item HAVING {numbers}) ORDER BY micro, amount < 0, row'
    )
    left: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    gone, unmatched, num_returns = set[int](), 0, 0
    for row, user, item, number, amount in rows:
        bought = left[user, item]
        if amount > 0:
            bought.append([row, number, amount])
            continue
        num_returns += 1
        gone.add(row)
        back = -amount
        same = [one for one in bought if number and one[1] == number]
        candidates = same or bought[::-1]
        unmatched += not candidates
        for one in candidates:
            taken = min(back, one[2])
            one[2], back = one[2] - taken, back - taken
            if one[2] <= 0:
                gone.add(one[0])
                bought.remove(one)
            if back <= 0:
                break
    if gone:
        table.connection.execute(
            "CREATE OR REPLACE TEMP TABLE gone AS SELECT unnest(?::BIGINT[]) AS row", [sorted(gone)]
        )
        table.query("DELETE FROM rows WHERE row IN (SELECT row FROM gone)")
    return num_returns, len(gone) - num_returns, unmatched
