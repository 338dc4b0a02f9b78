"""What a site's auditor sees on one page: every kind of message that left, and which files hold customers' data."""

from __future__ import annotations

from pathlib import Path

from fedecider.federation.record import read_records
from fedecider.running.damage import damage_names
from fedecider.running.manifest import read_manifest

LEFT_FILE = "left.jsonl"
"""In the site's folder, a line a message: round, kind, bytes, SHA-256, shapes of tensors, names of facts."""


def site_in_words(folder: Path) -> list[str]:
    """The page, line by line.

    Raises:
        ValueError: the site did not finish, or a file is damaged.
    """
    customers, path = read_manifest(folder).customers, folder / LEFT_FILE
    records = read_records(path) if path.is_file() else []
    lines = [f"left this site: {len(records)} messages, {path}"]
    with damage_names(path):
        for kind in dict.fromkeys(one["kind"] for one in records):
            mine = [one for one in records if one["kind"] == kind]
            rounds, size = [one["round"] for one in mine], sum(one["bytes"] for one in mine)
            shapes = [f"{name} {'x'.join(map(str, shape))}" for name, shape in mine[-1]["tensors"].items()]
            shown = ", ".join([*shapes, *mine[-1]["facts"]]) or "nothing more"
            lines.append(f"{kind}: {len(mine)} in rounds {min(rounds)} to {max(rounds)}, {size:,} bytes: {shown}")
    lines.append(
        "what a server can infer of uploads: docs/privacy.md, Measured; under secure aggregation of no single one"
    )
    for name in customers:
        readable = (folder / name).parent.stat().st_mode & 0o077 and (folder / name).stat().st_mode & 0o044
        who = "others may read it: chmod 600" if readable else "its owner alone reads it"
        lines.append(f"holds customers' data: {name}, {who}")
    return lines
