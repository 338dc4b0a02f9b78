"""Checksums of everything that a run hands over, so that a changed file is refused instead of used.

``handover.json`` in the run folder: path below that folder -> SHA-256, for every file in ``backbone/`` and
``adapters/``. Plain transformers and peft do not read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedecider.data.store import file_sha256
from fedecider.federation.record import read_json, write_json

MANIFEST_FILE = "handover.json"
ADVICE = (
    "Copy backbone/ and adapters/ of the run again, or write them anew: scripts/federate.py --resume true with the "
    "settings of the run"
)


def write_manifest(root: Path, parts: Sequence[Path]) -> Path:
    """Hash every file in ``parts``, files or folders below ``root``, into ``root/handover.json``."""
    hashes = {name: file_sha256(root / name) for part in parts for name in _names(root, part)}
    write_json(root / MANIFEST_FILE, hashes)
    return root / MANIFEST_FILE


def verify_manifest(root: Path, parts: Sequence[Path], advice: str = ADVICE) -> None:
    """See that ``parts``, files or folders below ``root``, are exactly what was handed over.

    Raises:
        ValueError: a file was changed, is missing or was added, or there are no checksums; the message names it.
    """
    path = root / MANIFEST_FILE
    try:
        expected = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"got no checksums in {path} ({error}), expected those of the hand-over. {advice}") from error
    if not isinstance(expected, dict) or not all(isinstance(value, str) for value in expected.values()):
        raise ValueError(f"got a damaged {path}, expected a checksum for every file. {advice}")
    for part in parts:
        own = part.relative_to(root).as_posix()
        wanted = {name for name in expected if name == own or name.startswith(f"{own}/")}
        found = set(_names(root, part))
        if not wanted:
            raise ValueError(f"got no checksums of {part} in {path}, expected those of the hand-over. {advice}")
        for name in sorted(wanted | found):
            if name not in found:
                raise ValueError(f"{root / name} is missing, expected it as it was handed over. {advice}")
            if name not in wanted:
                raise ValueError(f"{root / name} was not handed over with the run; remove it. {advice}")
            if file_sha256(root / name) != expected[name]:
                raise ValueError(f"{root / name} was changed after the export, expected it unchanged. {advice}")


def _names(root: Path, part: Path) -> Iterator[str]:
    """A file, or the files below a folder, as paths below ``root``, without hidden ones, which nobody reads."""
    for path in [part] if part.is_file() else sorted(part.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(word.startswith(".") for word in name.parts):
            yield name.as_posix()
