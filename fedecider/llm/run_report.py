"""From a run folder to its page: at the end of a run, and later by scripts/report.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedecider.data.domain import Domain, clients_of
from fedecider.federation.record import read_json, write_json
from fedecider.llm.config import RunConfig
from fedecider.llm.examples import EXAMPLES_FILE
from fedecider.llm.item_texts import TEXT_ENCODER
from fedecider.llm.run_analysis import run_analysis
from fedecider.llm.run_page import CARDS_FILE, damage_is_bad_input, page_colours, read_files, run_page
from fedecider.llm.setup import load_data
from fedecider.report.analysis_sections import sections_of
from fedecider.report.page import Section
from fedecider.running.damage import damage_names
from fedecider.running.progress import say
from fedecider.running.run_folder import RunFolder

ANALYSIS_FILE = "analysis.json"
UserTexts = Mapping[str, Sequence[str]]
"""Domain -> textual ID of every client user; domains without any are left out."""


@dataclass(frozen=True)
class ReportConfig:
    """Report: on which run.

    Args:
        run: The run folder that scripts/federate.py printed.
        data: The folder of prepared domains, when it is not where the run found it.
        encoder: The encoder behind the distances between domains: auto, tfidf, minilm, or a sentence-transformers
            folder or hub name.
    """

    run: str
    data: str = ""
    encoder: str = "auto"


def finish_report(
    folder: RunFolder, domains: Mapping[str, Domain], user_texts: UserTexts, examples: Mapping[str, Any], encoder: str
) -> Path | None:
    """Write examples, data cards, analyses and the page at the end of a run; -> the page.

    ``domains``: of the clients, and of a foreign pool, of which the data cards are shown.
    Analyses that fail are left out, and None is returned when there is no page either: hours of training must not end
    in an error of their report. scripts/report.py says what was wrong.
    """
    write_json(folder.root / EXAMPLES_FILE, examples)
    write_json(folder.root / CARDS_FILE, {name: domain.card for name, domain in domains.items()})
    sections: list[Section] = []
    warnings: list[str] = []
    try:
        sections = _analyse(folder, domains, user_texts, encoder)
    except Exception as error:  # see above: any error
        say(f"report without analyses: {error}")
        warnings = ["the analyses could not be made; see scripts/report.py"]
    try:
        return run_page(folder, sections, warnings)
    except Exception as error:
        say(f"no report: {error}")
        return None


def report(config: ReportConfig) -> Path:
    """Make the page of a finished run again, from its files and the data; no model of the run is loaded.

    Where the data are gone, the analyses that the run saved are shown as they are.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: the run is not finished or of the embedding track, or the data are not those of the run.
    """
    folder = RunFolder(Path(config.run))
    record = read_files(folder).record
    with damage_names(folder.record):
        run = record["config"]["run"]
        place, pool = config.data or run["data"], run.get("public_domains", "")  # older runs do not name it
        settings = RunConfig(domains=run["domains"], public_domains=pool, data=place, seed=int(run["seed"]))
    if place and not config.data and not Path(place).is_dir():
        return _without_data(folder)
    domains = load_data(settings)
    changed = [name for name, domain in domains.items() if domain.content_hash() != record["data"].get(name)]
    if changed:
        raise ValueError(
            f"got other data than those of {config.run} for {changed}, expected the same. Give the run's --data"
        )
    write_json(folder.root / CARDS_FILE, {name: domain.card for name, domain in domains.items()})
    return run_page(folder, _analyse(folder, domains, cached_user_texts(record), config.encoder))


def cached_user_texts(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Textual user IDs from the stage in the cache that the run was built on; empty where it is not there any more."""
    run = record["config"]["run"]
    others = {TEXT_ENCODER, *(["faults"] if run.get("faults") else [])}  # their hashes stand among those of the domains
    domains = {name: digest for name, digest in record["data"].items() if name not in others}
    wanted = (run["pretrain"], run["seed"], [list(pair) for pair in domains.items()])
    for path in sorted(Path(run["cache"]).glob("pretrain-*/inputs.json")):
        inputs = read_json(path)
        if (inputs["pretrain"], inputs["seed"], inputs["domains"]) == wanted:
            ids = {name: read_json(path.parent / "ids" / f"{name}.json")["clients"] for name in domains}
            return {name: clients["texts"] for name, clients in ids.items() if clients}
    return {}


def _analyse(folder: RunFolder, domains: Mapping[str, Domain], user_texts: UserTexts, encoder: str) -> list[Section]:
    with damage_is_bad_input(folder):
        analysis = run_analysis(folder, clients_of(domains), user_texts, encoder)
        write_json(folder.root / ANALYSIS_FILE, analysis)
        return sections_of(analysis, page_colours(read_files(folder)))


def _without_data(folder: RunFolder) -> Path:
    saved = folder.root / ANALYSIS_FILE
    if saved.is_file():
        with damage_is_bad_input(folder):
            sections = sections_of(read_json(saved), page_colours(read_files(folder)))
        return run_page(folder, sections)
    return run_page(folder, warnings=["no analyses: the data of the run are not where they were; see --data"])
