"""The commands of scripts/deploy.py that turn tables into prepared data: publish at one party, prepare at each site."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from fedecider.data.card import summary
from fedecider.data.domain import Domain, Dropped
from fedecider.data.sites import own_users
from fedecider.data.sites import publish as publish_tables
from fedecider.deployment.options import parser_of
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.running.progress import say


def publish(words: Sequence[str]) -> None:
    """Prepared domains of all companies from the catalogue and the events that everybody may see."""
    parser = parser_of("publish", "Prepare what companies of one catalogue share: items and public users, no clients.")
    parser.add_argument("--items", required=True, help="table of all items: .parquet, .csv or .tsv")
    parser.add_argument("--companies", required=True, help="names of the companies, separated by commas")
    parser.add_argument("--name", default="shop", help="name of the catalogue; domains are called NAME.COMPANY")
    parser.add_argument("--texts", default="", help="columns of texts: title=label,brand=maker; else by their names")
    parser.add_argument("--missing_text", choices=("error", "drop"), default="error", help="items without any text")
    _add_events(parser, "users whose events everybody may see; without it nobody is public", required=False)
    own = parser.parse_args(words)
    domains = publish_tables(
        own.events or None,
        own.items,
        own.output,
        companies=[name.strip() for name in own.companies.split(",") if name.strip()],
        name=own.name,
        texts=_texts(own.texts),
        missing_text=own.missing_text,
        **_columns(own),
    )
    _tell(domains, own.output)


def prepare(words: Sequence[str]) -> None:
    """A site's own users, with the catalogue and the public users of the project."""
    parser = parser_of("prepare", "Prepare a company's own users with the items and public users of the project.")
    parser.add_argument("--project", required=True, help="project folder")
    parser.add_argument("--client", required=True, help="name of this company in the project")
    _add_events(parser, "this company's users")
    own = parser.parse_args(words)
    domain = own_users(own.events, f"{own.project}/public", own.client, own.output, **_columns(own))
    _tell({own.client: domain}, own.output)


def _add_events(parser: ArgumentParser, whose: str, required: bool = True) -> None:
    table = "table (.parquet, .csv or .tsv)"
    parser.add_argument("--events", required=required, default="", help=f"{table} of the events of {whose}")
    parser.add_argument("--output", required=True, help="folder for the prepared domains")
    parser.add_argument("--user", default="user", help="column of users' keys")
    parser.add_argument("--item", default="item", help="column of items' keys")
    parser.add_argument("--time", default="", help="column of times; without it rows are in order, oldest first")
    parser.add_argument("--min_length", type=int, default=MIN_EVENTS, help="users with fewer events are left out")
    parser.add_argument("--max_length", type=int, default=None, help="so many newest events of a user are kept; all")


def _columns(own: Any) -> dict[str, Any]:
    same = {name: getattr(own, name) for name in ("user", "item", "min_length", "max_length")}
    return {**same, "time": own.time or None}


def _texts(words: str) -> dict[str, str] | None:
    pairs = [word.partition("=") for word in words.split(",") if word.strip()]
    odd = [field for field, mark, column in pairs if not (field.strip() and mark and column.strip())]
    if odd:
        raise ValueError(f"got texts {words!r}, expected field=column, such as title=label,brand=maker")
    return {field.strip(): column.strip() for field, _, column in pairs} or None


def _tell(domains: dict[str, Domain], output: str) -> None:
    say(summary(domains))
    first = next(iter(domains.values()))
    say(f"{first.catalogue}: {Dropped(first.card['dropped'])}")
    say(f"written to {output}")
