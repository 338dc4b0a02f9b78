"""Small raw files in the publishers' own layouts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(name, lines, encoding) -> path under tmp_path; gzip when the name ends in .gz; dicts become JSON."""

    def write_lines(name: str, lines: Iterable[Any], encoding: str = "utf-8") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        content = "".join(text + "\n" for text in texts).encode(encoding)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write_lines


@pytest.fixture
def packed(write: Write) -> Callable[..., Path]:
    """packed({domain: {user: [(item, time), ...]}}, skip_items) -> folder in the packed format."""

    def write_packed(
        domains: dict[str, dict[str, list[tuple[int, int | None]]]], skip_items: tuple[int, ...] = ()
    ) -> Path:
        rows = ["domain,user,pos,item,rating,timestamp"]
        items = []
        for domain, users in domains.items():
            for user, events in users.items():
                for pos, (item, time) in enumerate(events):
                    rows.append(f"{domain},{user},{pos},{item},,{'' if time is None else time}")
            numbers = sorted({item for events in users.values() for item, _ in events} - set(skip_items))
            items += [{"domain": domain, "item": number, "title": f"Title {domain} {number}"} for number in numbers]
        write("items.jsonl.gz", items)
        return write("interactions.csv.gz", rows).parent

    return write_packed
