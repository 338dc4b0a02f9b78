"""What companies have in common, before any key is shown: fedecider overlap north.json south.json."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from fedecider.bounds import dataclass
from fedecider.data.overlap import (
    LEAST_KINDS,
    LEAST_SECRET,
    Marks,
    marks_from,
    marks_of,
    overlap_of_marks,
    overlap_sentences,
    own_sentence,
    unlike_marks,
)
from fedecider.data.store import load_domains
from fedecider.federation.record import write_json
from fedecider.running.command import run
from fedecider.running.damage import read_object
from fedecider.running.options import parse, with_leading
from fedecider.running.progress import console, log_line
from fedecider.running.run_folder import check_output

DESCRIPTION = (
    "Say what companies have in common before they join, without showing a key. Each writes its item keys and texts "
    "under a keyed hash, with a secret that the companies agree on: fedecider overlap --data prepared --secret_file "
    "secret.txt --output north.json. Then files are compared: fedecider overlap north.json south.json; with --data and "
    "--secret_file, which stay where they are, own items are compared with the files of others, and the share of own "
    "sales is printed too. The name of a file is the name of its company. Companies in one folder are compared at "
    "once: fedecider overlap --data prepared."
)


@dataclass(frozen=True)
class OverlapConfig:
    """Overlap: whose items, under which secret.

    Args:
        files: The files of companies, before all options or here, separated by commas.
        data: The folder of own prepared data, or of several companies that are compared.
        company: The company in data; may be left out where there is only one.
        secret_file: A file with the secret, 32 bytes or more, which the companies have and nobody else: openssl rand
            -hex 32.
        output: The file to write, which holds hashes and may be shown; without it files are compared.
    """

    files: str = ""
    data: str = ""
    company: str = ""
    secret_file: str = ""
    output: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    words = with_leading(argv, "files")

    def work() -> None:
        (config,) = parse(DESCRIPTION, words, OverlapConfig)
        files = [Path(one.strip()) for one in config.files.split(",") if one.strip()]
        if config.data and not (files or config.output or config.secret_file or config.company):
            secret = secrets.token_bytes(LEAST_SECRET)  # nothing is written: any will do
            tell(_several({name: marks_of(one, secret) for name, one in load_domains(config.data).items()}), "")
            return
        if bool(config.data) != bool(config.secret_file):
            raise ValueError("got one of --data and --secret_file, expected both: own items under the common secret")
        if config.output and (files or not config.data):
            raise ValueError(
                "got --output, expected --data and --secret_file beside it, and no files: it writes own items"
            )
        if config.output:
            _check_file(Path(config.output))
        name, own = own_marks(config) if config.data else ("", None)
        if own is not None and config.output:
            write_marks(own, Path(config.output))
        else:
            tell(_companies(files, name, own), name)

    return run(work)


def own_marks(config: OverlapConfig) -> tuple[str, Marks]:
    """The company in the data, and its items.

    Raises:
        ValueError: no such company, or a secret that protects nothing.
    """
    domains = load_domains(config.data, [config.company] if config.company else None)
    if len(domains) > 1:
        raise ValueError(
            f"got {len(domains)} companies in {config.data}, expected one of them: --company {min(domains)}"
        )
    ((name, domain),) = domains.items()
    return name, marks_of(domain, secret_of(Path(config.secret_file)))


def secret_of(path: Path) -> bytes:
    """The content of a file, without the ends of lines and the mark that editors put around it."""
    secret = path.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    if len(secret) < LEAST_SECRET or len(set(secret)) < LEAST_KINDS:
        raise ValueError(
            f"got a secret of {len(secret)} bytes, {len(set(secret))} of them different, in {path}, expected "
            f"{LEAST_SECRET} or more and {LEAST_KINDS} different ones: another one is found by trying. Make one: "
            "openssl rand -hex 32"
        )
    return secret


def _check_file(path: Path) -> None:
    check_output(path.parent)
    if path.suffix != ".json" or path.is_dir():
        raise ValueError(f"got the output {path}, expected a file that ends in .json, such as {path.stem}.json")
    if path.exists():
        try:
            marks_from(read_object(path), str(path))
        except ValueError as error:
            raise ValueError(
                f"got the output {path}, which holds something else. Choose another name ({error})"
            ) from error


def write_marks(own: Marks, path: Path) -> None:
    """The file that other companies, or whoever compares, may have."""
    write_json(path, own.plain())
    log_line(f"{len(own.by['keys']):,} items under a keyed hash: {path}. The secret stays with the companies.")


def _companies(files: Sequence[Path], name: str, own: Marks | None) -> dict[str, Marks]:
    """Company -> its items, the own one first.

    Raises:
        ValueError: fewer than two, two of one name, or a file of something else.
    """
    found = {} if own is None else {name: own}
    for path in files:
        if path.stem in found:
            raise ValueError(f"got two companies called {path.stem}, expected different names: rename {path}")
        found[path.stem] = marks_from(read_object(path), str(path))
    return _several(found)


def _several(companies: dict[str, Marks]) -> dict[str, Marks]:
    if len(companies) < 2:
        raise ValueError(
            f"got {len(companies)} companies, expected two at least: fedecider overlap north.json south.json, or the "
            "file of another and own --data with --secret_file, or --data with several companies"
        )
    return companies


def tell(companies: Mapping[str, Marks], name: str) -> None:
    """A table of pairs by keys and by texts, and the sentences; ``name`` is the own company, if there is one."""
    ways = [overlap_of_marks(companies, way) for way in ("keys", "texts")]
    table = Table(title="Items in common", show_edge=False)
    for column in ("of", "with", "by keys", "of its items", "of its sales", "by texts", "of its items", "of its sales"):
        table.add_column(column)
    for pairs in zip(*(way.pairs for way in ways), strict=True):
        for side, names in enumerate([(pairs[0].first, pairs[0].second), (pairs[0].second, pairs[0].first)]):
            shares = [(pair.num_items, pair.item_shares[side], pair.event_share[side]) for pair in pairs]
            cells = (f"{num:,} {of:.1%} {'-' if sold is None else f'{sold:.1%}'}".split() for num, of, sold in shares)
            table.add_row(*names, *(cell for way in cells for cell in way))
    console.print(table)
    overlap = overlap_of_marks(companies)
    own = [own_sentence(overlap, name, False, False)] if name else []
    for sentence in own or overlap_sentences(overlap, False, False):
        log_line(sentence)
    if unlike := unlike_marks(companies):
        log_line(unlike)
    if overlap.by == "keys" and not overlap.nothing and ways[1].nothing:
        log_line(
            "Keys are common, and no text is: companies may write their own texts about one barcode. But equal numbers "
            "that each company gave by itself are other items."
        )
