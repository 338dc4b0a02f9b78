"""One JSON line per round: what happened, measured; readable while the run goes on. And reading JSON files safely."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.scratch import aside


def plain(value: Any) -> Any:
    """``value`` as strict JSON: non-finite floats become null, tensors become lists."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path`` and rename: a reader never sees half a file."""
    with aside(path) as scratch:
        scratch.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as :func:`write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as :func:`write_text` does."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file; ``ValueError`` with the file's name when it is none."""
    return _parsed(path.read_bytes(), str(path))


def read_object(path: Path, fields: Mapping[str, type]) -> dict[str, Any]:
    """The JSON object in ``path``, which must have these fields of these types; else ``ValueError`` with its name.

    ``float`` takes whole numbers too.
    """
    return _with_fields(read_json(path), fields, str(path))


class CannotResume(ValueError):
    """Checkpoints or records are not those of the run that would go on from them."""


class Recorder(NamedTuple):
    """Appends records to ``path`` (None: a process that does not write) and hands them to ``tracker``."""

    path: Path | None
    tracker: Callable[[dict, int], None] | None = None

    def write(self, record: dict) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        if self.tracker is not None:
            self.tracker(record, record["round"])

    def digest(self) -> str:
        """SHA-256 of the records so far, for the checkpoint; empty where none are written."""
        return "" if self.path is None else hashlib.sha256(self.path.read_bytes()).hexdigest()

    def rewind(self, round: int, digest: str = "") -> None:
        """Drop records after ``round``: they belong to work that a resumed run does again.

        ``digest`` is what :meth:`digest` said at the checkpoint; empty for one whose records were not written.

        Raises:
            CannotResume: the records before are not exactly those of the rounds 1 to ``round``: every total over the
                rounds would be wrong.
        """
        if self.path is None or (round > 0 and not digest):
            return
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = lines[:round]
        found = [_round_of(line) for line in kept]
        if found != list(range(1, round + 1)) or (round and hashlib.sha256(b"".join(kept)).hexdigest() != digest):
            wrong = next((n for n, one in enumerate(found, 1) if n != one), len(found) + 1)
            what = f"at line {wrong}" if found != list(range(1, round + 1)) else "in some line"
            raise CannotResume(
                f"got {self.path} damaged {what}, expected the records of the rounds 1 to {round} as they were "
                "written: sums over rounds, such as bytes, would be wrong. Restore it from a copy, or start again with "
                "another --output"
            )
        if len(kept) < len(lines):
            write_bytes(self.path, b"".join(kept))


def read_records(path: Path) -> list[dict]:
    """All records; ``ValueError`` with file and line when one is damaged."""
    lines = path.read_bytes().splitlines()
    places = [f"{path}:{number}" for number in range(1, len(lines) + 1)]
    return [
        _with_fields(_parsed(line, place), {"round": int}, place) for line, place in zip(lines, places, strict=True)
    ]


def non_finite_uploads(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``round``, ``client`` and ``tensors`` of every upload of a run that was not finite."""
    return [
        {"round": record["round"], **upload} for record in records for upload in record.get("non_finite_uploads", [])
    ]


def left_out(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``round``, ``client`` and ``tensors`` of whoever could not take part for its numbers: uploads that are not finite
    or too large, and, where none is sent, training that ended so (no tensors). ``diverged``: what its training told."""
    found = {(one["round"], one["client"]): one for one in non_finite_uploads(records)}
    for record in records:
        for log in record.get("clients", []):
            if log.get("finite") is False:
                key = record["round"], log["client"]
                one = found.setdefault(key, {"round": record["round"], "client": log["client"], "tensors": []})
                if "diverged" in log:
                    found[key] = {**one, "diverged": log["diverged"]}
    return [found[key] for key in sorted(found)]


def capped_clients(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whose uploads were bounded: ``client``, ``what`` (norm or weight), ``rounds`` (how many), and ``largest`` with
    the ``cap`` of its round."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for record in records:
        for one in record.get("capped_uploads", []):
            what = "norm" if "norm" in one else "weight"
            new = {"client": one["client"], "what": what, "rounds": 0, "largest": one[what], "cap": one["cap"]}
            known = found.setdefault((one["client"], what), new)
            known["rounds"] += 1
            if one[what] > known["largest"]:
                known.update(largest=one[what], cap=one["cap"])
    return [found[key] for key in sorted(found)]


def upload_notes(records: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[str]:
    """What to say under the results about uploads that were left out or bounded; nothing when all were taken as they
    came. ``names`` of the clients, where they may be told."""
    lines, broken, capped = [], left_out(records), capped_clients(records)
    if broken:
        some = [f"{_who(one, names)} in round {one['round']}{_why(one)}" for one in broken]
        lines.append(f"left out, with numbers that are not finite or too large: {_first(some)}")
    if capped:
        some = [
            f"{_who(one, names)} in {one['rounds']} round(s) ({one['what']} {one['largest']:.3g} to {one['cap']:.3g})"
            for one in capped
        ]
        lines.append(f"bounded by what the others sent: {_first(some)}")
    return lines + far_notes(records, names)


def far_notes(records: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[str]:
    """Whose uploads were far larger than the others' where too few sent any to bound them; nothing where nobody's."""
    largest: dict[int, dict[str, Any]] = {}
    for record in records:
        for one in record.get("far_uploads", []):
            if one["norm"] >= largest.get(one["client"], one)["norm"]:
                largest[one["client"]] = {**one, "round": record["round"]}
    some = [
        f"{_who(one, names)} (norm {one['norm']:.3g} in round {one['round']}, that of the others {one['others']:.3g})"
        for one in largest.values()
    ]
    return (
        [f"far from the others and not bounded, as of two clients there is no median: {_first(some)}"] if some else []
    )


def sum_notes(secure_sum: bool, clips: bool) -> list[str]:
    """What nobody bounds where uploads are summed unseen."""
    if not secure_sum:
        return []
    told = (
        "every client holds itself to the clip"
        if clips
        else "no client is bounded: set clip, to which each holds itself"
    )
    return [
        f"secure aggregation: the server cannot compare updates, and {told}; one that lies about its update or weight "
        "is not seen"
    ]


def _who(one: Mapping[str, Any], names: Sequence[str]) -> str:
    return names[one["client"]] if names else f"client {one['client']}"


def _why(one: Mapping[str, Any]) -> str:
    """What its training told, else the tensors."""
    tensors = one["tensors"]
    listed = f"{', '.join(tensors[:3])}{', ...' if len(tensors) > 3 else ''}"
    text = one.get("diverged", listed)
    return f" ({text})" if text else ""


def _first(some: Sequence[str]) -> str:
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more, see rounds.jsonl" if len(some) > 3 else "")


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ValueError(f"got a damaged {place} ({error}), expected JSON. Restore it from a copy") from error


def _with_fields(value: Any, fields: Mapping[str, type], place: str) -> dict[str, Any]:
    """``value`` when it is an object with these fields; else ``ValueError`` with its place."""
    if not isinstance(value, dict):
        raise ValueError(f"got a damaged {place} ({type(value).__name__}), expected an object. Restore it from a copy")
    for name, kind in fields.items():
        one = value.get(name)
        fits = isinstance(one, (int, float) if kind is float else kind) and (kind is bool) == isinstance(one, bool)
        if not fits or (kind is float and isinstance(one, int) and one.bit_length() > 1023):  # no float is so large
            found = f"{name} is {str(one)[:40]!r}" if name in value else f"no {name}"
            raise ValueError(
                f"got a damaged {place} ({found}), expected {name} as {kind.__name__}. Restore it from a copy"
            )
    return value


def _round_of(line: bytes) -> int | None:
    """None for what is no record, such as the half line of a killed process."""
    try:
        return _with_fields(_parsed(line, ""), {"round": int}, "")["round"]
    except ValueError:
        return None
