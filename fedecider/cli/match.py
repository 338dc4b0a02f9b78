"""Which items of companies are the same goods under other names: fedecider match north south --output pairs.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedecider.bounds import Share, dataclass
from fedecider.cli.overlap import secret_of
from fedecider.data.domain import Domain
from fedecider.data.matching import (
    CATALOGUE,
    MIN_SCORE,
    Goods,
    check_pairs_file,
    goods_from,
    goods_of,
    match,
    match_pairs,
    match_sentences,
    read_pairs,
    shown,
    write_pairs,
)
from fedecider.data.store import CARD_FILE, load_domains
from fedecider.federation.record import write_json
from fedecider.running.command import run
from fedecider.running.damage import read_object
from fedecider.running.options import parse, with_leading
from fedecider.running.progress import log_line
from fedecider.running.run_folder import check_output

DESCRIPTION = (
    "Find the same goods that companies sell under other names: equal keys where they are of one kind, else titles "
    "that are each other's nearest and whose sizes, numbers and model numbers agree. fedecider match north south "
    "--output pairs.csv (folders of prepared data) writes a table to be looked through; fedecider match north south "
    "--pairs pairs.csv --output matched writes the data in which the pairs count as one item, for federate --data "
    "matched: every company keeps its own keys. Without showing titles: --secret_file and --output north.json, then "
    "fedecider match north.json south.json."
)


@dataclass(frozen=True)
class MatchConfig:
    """Match: whose items, by what.

    Args:
        data: Folders of prepared data, or files of companies that show no title, before all options or here, separated
            by commas.
        output: A table of pairs (.csv), a folder of prepared data in which they count as one item, or with secret_file
            what the company shows of its items (.json).
        pairs: A table of pairs, as it was corrected.
        pack_sizes: If true, sizes, numbers and model numbers must agree: 500 ml is not 250 ml, 12 is not 6.
        min_score: The least cosine of two titles, from 0 to 1.
        secret_file: A file with the secret of the companies, as for overlap.
    """

    data: str = ""
    output: str = ""
    pairs: str = ""
    pack_sizes: bool = True
    min_score: Share = MIN_SCORE
    secret_file: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    words = with_leading(argv, "data")

    def work() -> None:
        (config,) = parse(DESCRIPTION, words, MatchConfig)
        places = [Path(one.strip()) for one in config.data.split(",") if one.strip()]
        output = Path(config.output) if config.output else None
        if not places:
            raise ValueError("got no data, expected prepared folders: fedecider match north south --output pairs.csv")
        if output is not None:
            check_output(output.parent)
        secret = secret_of(Path(config.secret_file)) if config.secret_file else b""
        if output is None or output.suffix == ".csv":
            _table(_companies(places, secret), config, output)
        elif output.suffix == ".json":
            _show(places, secret, output)
        else:
            _write(_domains(places), config, secret, output)

    return run(work)


def _domains(places: Sequence[Path]) -> dict[str, Domain]:
    found: dict[str, Domain] = {}
    for place in places:
        domains = load_domains(place)
        if both := found.keys() & domains.keys():
            raise ValueError(f"got two companies called {min(both)}, expected different names: import one as another")
        found |= domains
    return found


def _companies(places: Sequence[Path], secret: bytes) -> dict[str, Goods]:
    files = [place for place in places if place.suffix == ".json"]
    found = {place.stem: goods_from(read_object(place), str(place)) for place in files}
    folders = [place for place in places if place not in files]
    found |= {name: goods_of(domain, secret) for name, domain in _domains(folders).items()}
    if len(found) < 2 or (files and folders and not secret):
        raise ValueError(
            f"got {', '.join(found)}, expected two companies at least, and --secret_file where files are beside folders"
        )
    return found


def _table(companies: Mapping[str, Goods], config: MatchConfig, output: Path | None) -> None:
    """What is said of the pairs, and their table."""
    if output is not None:
        check_pairs_file(output)
    pairs = (
        read_pairs(Path(config.pairs)) if config.pairs else match_pairs(companies, config.pack_sizes, config.min_score)
    )
    for sentence in match_sentences(pairs, {name: len(goods.keys) for name, goods in companies.items()}):
        log_line(sentence)
    if output is not None:
        write_pairs(pairs, output)
        log_line(f"{output}: correct it (no under right; rows out or in), then --pairs {output} --output matched")


def _show(places: Sequence[Path], secret: bytes, output: Path) -> None:
    """What a company shows of its items."""
    domains = _domains(places)
    if len(domains) != 1 or not secret:
        raise ValueError(f"got {len(domains)} companies, expected one and --secret_file: {output} is what it shows")
    if output.exists():
        goods_from(read_object(output), str(output))  # nothing else is overwritten
    (domain,) = domains.values()
    write_json(output, shown(goods_of(domain, secret)))
    log_line(f"{len(domain.item_keys):,} items under a keyed hash: {output}. Who has the secret can read titles in it")


def _write(domains: Mapping[str, Domain], config: MatchConfig, secret: bytes, output: Path) -> None:
    """Prepared data in which pairs count as one item."""
    for name in domains:
        card = output / name / CARD_FILE
        if card.exists() and read_object(card).get("catalogue") != CATALOGUE:
            raise ValueError(f"got the output {output}, which holds other data of {name}, expected another folder")
    data = match(domains, config.pairs, secret, config.pack_sizes, config.min_score)
    data.save(output)
    for sentence in data.notes:
        log_line(sentence)
    log_line(f"matched data: {output}. fedecider federate --data {output}")


if __name__ == "__main__":
    raise SystemExit(main())
