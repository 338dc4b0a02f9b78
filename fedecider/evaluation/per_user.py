"""Per-user results in one Parquet file, from which every table can be computed again.

One row per user, split, variant and round. ``variant`` is the evaluated model (a variant of the method) or a baseline's
name. ``position`` is null for a held-out item that was not ranked; of baskets it is a list, with a place for each item.

Shape legend: U users, T items of the largest held-out basket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedecider.evaluation.metrics import CUTOFFS, MACRO, NOT_RANKED, macro_mean, mean_metrics, user_metrics
from fedecider.scratch import aside


class UserPositions(NamedTuple):
    """Positions of the users of one domain, for one split, variant and round."""

    domain: str
    users: Sequence[str]
    split: str
    variant: str
    round: int
    position_U: Tensor


def write_per_user(path: Path, records: Iterable[UserPositions], cutoffs: Sequence[int] = CUTOFFS) -> None:
    """Write domain, user, split, variant, round, position and the metrics of each user; beside ``path``, then rename.

    Takes the records as a stream. ``ValueError`` when users and positions differ in number or a record comes twice.
    """
    import pyarrow.parquet as pq  # --help does without

    path = Path(path)
    seen: set[tuple] = set()
    stream = iter(records)
    first = list(islice(stream, 1))
    schema = _schema(cutoffs, any(one.position_U.ndim == 2 for one in first))
    with aside(path) as scratch, pq.ParquetWriter(scratch, schema, compression="zstd") as writer:
        for record in chain(first, stream):
            key = (record.domain, record.split, record.variant, record.round)
            if len(record.users) != len(record.position_U) or len(set(record.users)) != len(record.users):
                raise ValueError(
                    f"got {len(set(record.users))} users and {len(record.position_U)} positions for {key}, "
                    "expected one position for each user"
                )
            if key in seen:
                raise ValueError(f"got {key} twice, expected one record per domain, split, variant and round")
            seen.add(key)
            writer.write_table(_table(record, schema, cutoffs))


def read_per_user(path: Path) -> list[UserPositions]:
    """The records of a file of :func:`write_per_user`, in the order of writing, users in their order."""
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"got no file {path}, expected per_user.parquet of a finished run")
    groups: dict[tuple, tuple[list[str], list[Any]]] = {}
    columns = pq.read_table(path, columns=["domain", "split", "variant", "round", "user", "position"]).to_pydict()
    for domain, split, variant, round, user, position in zip(*columns.values(), strict=True):
        users, places = groups.setdefault((domain, split, variant, round), ([], []))
        users.append(user)
        places.append(position)
    return [
        UserPositions(domain, users, split, variant, round, _positions(places))
        for (domain, split, variant, round), (users, places) in groups.items()
    ]


def _positions(places: Sequence[Any]) -> Tensor:
    """(U,) or, of lists, (U, T) with NaN behind their ends; None: not ranked."""
    if not any(isinstance(one, list) for one in places):
        places = [NOT_RANKED if one is None else one for one in places]
        return torch.tensor(places, dtype=torch.float64)
    rows = [torch.tensor([NOT_RANKED if one is None else one for one in row], dtype=torch.float64) for row in places]
    return pad_sequence(rows, batch_first=True, padding_value=math.nan)


def mean_table(records: Iterable[UserPositions], cutoffs: Sequence[int] = CUTOFFS) -> list[dict]:
    """Means of every record and, for each (split, variant, round), the macro mean over its domains.

    Rows: ``domain`` ("macro" for the mean over domains), ``split``, ``variant``, ``round``, ``num_users`` and the
        metrics.
    """
    rows: list[dict] = []
    groups: dict[tuple, dict[str, dict[str, float]]] = {}
    sizes: dict[tuple, int] = {}
    for record in records:
        key = (record.split, record.variant, record.round)
        metrics = mean_metrics(record.position_U, cutoffs)
        groups.setdefault(key, {})[record.domain] = metrics
        sizes[key] = sizes.get(key, 0) + len(record.users)
        rows.append(_row(record.domain, key, len(record.users), metrics))
    return rows + [_row(MACRO, key, sizes[key], macro_mean(domains)) for key, domains in groups.items()]


def _row(domain: str, key: tuple, num_users: int, metrics: dict[str, float]) -> dict:
    return {"domain": domain, "split": key[0], "variant": key[1], "round": key[2], "num_users": num_users, **metrics}


def _schema(cutoffs: Sequence[int], of_baskets: bool) -> Any:
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    names = list(user_metrics(torch.zeros(1, 1) if of_baskets else torch.zeros(1), cutoffs))
    place = pa.list_(pa.float64()) if of_baskets else pa.float64()
    fields = [("domain", word), ("user", pa.string()), ("split", word), ("variant", word), ("round", pa.int32())]
    return pa.schema([*fields, ("position", place), *((name, pa.float64()) for name in names)])


def _table(record: UserPositions, schema: Any, cutoffs: Sequence[int]) -> Any:
    import pyarrow as pa

    place_U = torch.as_tensor(record.position_U).to(torch.float64)
    num = len(place_U)
    columns: dict[str, list] = {
        "domain": [record.domain] * num,
        "user": list(record.users),
        "split": [record.split] * num,
        "variant": [record.variant] * num,
        "round": [record.round] * num,
        "position": [_plain(place) for place in place_U.tolist()],
    }
    columns |= {name: value_U.tolist() for name, value_U in user_metrics(place_U, cutoffs).items()}
    return pa.table({field.name: pa.array(columns[field.name], type=field.type) for field in schema}, schema=schema)


def _plain(place: float | list[float]) -> Any:
    """None for what was not ranked; of a basket without its padding."""
    if isinstance(place, list):
        return [_plain(one) for one in place if not math.isnan(one)]
    return place if place < NOT_RANKED else None
