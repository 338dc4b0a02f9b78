"""The data of a federation as one object: domains by name, notes on how they were made, folders and data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from fedecider.data.domain import Domain
from fedecider.data.sample import sample_domains
from fedecider.data.store import domain_tables, load_domains, save_domains


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData(Mapping[str, Domain]):
    """Domain name -> domain, in the order of the clients."""

    domains: dict[str, Domain]
    notes: list[str] = field(default_factory=list)
    """Sentences: which columns were taken, what was left out, who is public."""
    report: Any = None
    """What came in and what did not, an `ImportReport`; None where nothing was imported."""

    def __getitem__(self, name: str) -> Domain:
        return self.domains[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.domains)

    def __len__(self) -> int:
        return len(self.domains)

    @property
    def names(self) -> list[str]:
        """The domains."""
        return list(self.domains)

    @property
    def card(self) -> Any:
        """A pandas frame of counts, one row a domain; all there is to know is in ``domain.card``."""
        import pandas as pd  # only where it is asked for: slow to import

        return pd.DataFrame(self._rows()).set_index("domain")

    def save(self, folder: str | Path) -> Path:
        """Write every domain to ``folder/<name>``, for `open_prepared`, ``--data`` and `datasets.load_dataset`.

        Domains of the same names that were prepared before are replaced.

        Raises:
            ValueError: the place holds something else.
        """
        save_domains(self.domains, folder)
        return Path(folder)

    def to_datasets(self) -> Any:
        """A `datasets.DatasetDict`: clients and public (a user a row), and items, each with a column ``domain``.

        ``items`` of a user are numbers of items of the same domain, oldest first.
        """
        import datasets  # only where it is asked for: slow to import
        import pyarrow as pa

        tables = [domain_tables(domain) for domain in self.domains.values()]
        return datasets.DatasetDict(
            {
                name: datasets.Dataset(pa.concat_tables([one[name] for one in tables]))
                for name in ("clients", "public", "items")
            }
        )

    def __repr__(self) -> str:
        rows = [f"{row['domain']}: " + ", ".join(_counts(row)) for row in self._rows()]
        return "\n".join(["FederatedData", *(f"  {line}" for line in [*rows, *self.notes])])

    def _repr_html_(self) -> str:
        rows = self._rows()
        head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in rows[0]) if rows else ""
        body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>{notes}</ul>"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "domain": name,
                "items": len(domain.item_keys),
                "client_users": len(domain.clients.users),
                "client_events": domain.clients.num_events,
                "public_users": len(domain.public.users),
                "public_events": domain.public.num_events,
            }
            for name, domain in self.domains.items()
        ]


def open_prepared(folder: str | Path) -> FederatedData:
    """What `FederatedData.save` or ``fedecider prepare`` wrote to ``folder``.

    Raises:
        ValueError: there is nothing, or it is damaged.
    """
    domains = load_domains(folder)
    notes = dict.fromkeys(note for domain in domains.values() for note in domain.card.get("notes", []))
    return FederatedData(domains, list(notes))


def sample(names: Sequence[str] = ("crime", "comics", "children"), seed: int = 0) -> FederatedData:
    """The embedded sample: three small book domains, planted, with public users.

    Raises:
        ValueError: an unknown name.
    """
    return FederatedData(
        sample_domains(names, seed), ["a planted sample, whose numbers say nothing about real readers"]
    )


def _counts(row: Mapping[str, Any]) -> list[str]:
    return [f"{value:,} {name.replace('_', ' ')}" for name, value in row.items() if name != "domain"]


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
