"""The leak in one table: what published figures become when the sampler no longer gives the answer away.

    python benchmarks/leak.py --rounds 25

ML-100K, seed 0, one process. Each method is trained twice, under `paper` and under `isolated99`, with the settings of
its paper or of its public code, and the last round counts. `strict` and `strict/sampled99` of a trained method are
those of the leaderboard's section on the same page: searched settings, several seeds. Candidates of `paper`,
`isolated99` and `strict/sampled99` are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import heading
from speed import put_section

from embedding_fr.blocks import build_population
from embedding_fr.leaderboard import LeaderboardConfig, run_settings
from embedding_fr.setup import set_up, train, user_positions
from fedecider.baselines import BASELINES
from fedecider.baselines.fitting import Pooled
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.federation.record import read_json, write_json
from fedecider.running.command import run
from fedecider.running.options import from_plain

PAGE = Path(__file__).with_name("results") / "leaderboard.md"
TITLE = "The leak in one table"
PROTOCOLS = ("paper", "isolated99", "strict/sampled99", "strict")
TRAINED, FROM_PAGE = PROTOCOLS[:2], PROTOCOLS[2:]


class Row(NamedTuple):
    """A method as it is published, and as validation chose it."""

    title: str
    method: str
    """As the leaderboard calls it, with the settings of the paper or of the public code."""
    published: str = "-"
    """hit@10 / ndcg@10 on ML-100K: FedEM's Table 1, but for PFedCLR's own."""
    strict: str = ""
    """The variant whose strict figures stand beside it: the better one on validation items; empty: ``method``."""


ROWS = (
    Row("memoriser, learns nothing", "memoriser"),
    Row("popularity", "popularity"),
    Row("PFedCLR", "pfedclr", "0.999 / 0.923"),
    Row("FedEM, public code's", "fedem/code", "0.996 / 0.943", "fedem"),
    Row("FedRAP", "fedrap", "0.890 / 0.795", "fedrap/code"),
    Row("PFedRec, public code's", "pfedrec/code", "0.688 / 0.391"),
    Row("FedMF", "fedmf", "0.489 / 0.272"),
    Row("FedNCF", "fedncf", "0.425 / 0.229"),
    Row("FedRecGEL, public code's", "fedrecgel/code"),
    Row("GPFedRec", "gpfedrec", "0.701 / 0.407"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--work", type=Path, default=Path("runs/leak"), help="finished rows are kept there")
    parser.add_argument("--finished", action="store_true", help="write those rows alone, and name the others")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page whose section is replaced")
    args = parser.parse_args()
    if args.rounds < 1:
        raise ValueError(f"got rounds {args.rounds}, expected 1 or more")
    torch.set_num_threads(1)
    first_lines = heading("leak.py", 1)
    ready = [row for row in ROWS if not args.finished or file_of(args.work, row).is_file()]
    strict = strict_figures(args.output)
    found = table(load_interactions(InteractionsConfig()), ready, args.rounds, args.work)
    spent = sum(one.seconds for _, one in found) / 60
    body = [*page(found, strict, args.rounds), "", *first_lines, f"- CPU time of all rows: {spent:.1f} minutes"]
    put_section(args.output, TITLE, "\n".join(body))
    print("\n".join(body))


ByProtocol = dict[str, dict[str, float]]
"""Protocol -> hit@10 and ndcg@10."""


class Found(NamedTuple):
    """What a row has."""

    metrics: ByProtocol
    seconds: float
    """Of CPU."""


def table(
    interactions: Interactions, rows: Sequence[Row], rounds: int, work: Path | None = None
) -> list[tuple[Row, Found]]:
    """Each row under all protocols; rows that a stopped command had finished in ``work`` are not made again."""
    found = []
    for row in rows:
        inputs = {"row": row._asdict(), "rounds": rounds, "data": interactions.content_hash()}
        made = partial(central if row.method in BASELINES else federated, interactions, row, rounds)
        found.append((row, kept(work and file_of(work, row), inputs, made)))
        print(row.title, found[-1][1], file=sys.stderr, flush=True)
    return found


def file_of(work: Path, row: Row) -> Path:
    """Where a row is kept."""
    return work / f"{row.method.replace('/', '-')}.json"


def kept(file: Path | None, inputs: dict[str, Any], made: Callable[[], ByProtocol]) -> Found:
    """What ``file`` has of these inputs; else it is made, and written there."""
    before = read_json(file) if file and file.is_file() else {}
    if before.get("inputs") != inputs:
        started = time.process_time()
        metrics = made()
        before = {"inputs": inputs, "metrics": metrics, "seconds": time.process_time() - started}
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, before)
    return Found(before["metrics"], before["seconds"])


def federated(interactions: Interactions, row: Row, rounds: int) -> ByProtocol:
    """One run with seed 0 under each protocol of the papers; the last round."""
    found: ByProtocol = {}
    for protocol in TRAINED:
        config = LeaderboardConfig(num_rounds=rounds)
        settings = run_settings(config, InteractionsConfig(), row.method, protocol, {}, 0, 0)
        settings = settings._replace(run=dataclasses.replace(settings.run, eval_every=settings.run.num_rounds))
        setup = set_up(settings, interactions, torch.device("cpu"))
        position_U = user_positions(setup, train(settings, setup), setup.method.variants[0], "test", last=True)
        found[protocol] = mean_metrics(position_U, (10,))
    return found


def strict_figures(page: Path) -> dict[str, tuple[str, str]]:
    """Row of the leaderboard -> its strict/sampled99 and strict figures, as the section of ML-100K has them.

    Raises:
        ValueError: the page has no such section.
    """
    text = page.read_text() if page.is_file() else ""
    found = re.search(r"^## ml-100k: .*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise ValueError(
            f"got {page} without a section of ml-100k, expected the leaderboard there. Run "
            "python benchmarks/leaderboard.py --dataset ml-100k"
        )
    lines = [line.strip("| ").split(" | ") for line in found[0].splitlines() if line.startswith("| ")]
    place = {name: lines[0].index(name) for name in ("strict hit@10", "strict ndcg@10", "`strict/sampled99`")}
    figures = {}
    for cells in lines[1:]:
        hit, ndcg = (cells[place[name]].split(" ")[0] for name in ("strict hit@10", "strict ndcg@10"))
        figures[cells[0]] = (cells[place["`strict/sampled99`"]], f"{hit} / {ndcg}")
    return figures


def central(interactions: Interactions, row: Row, rounds: int) -> ByProtocol:
    """A row without training; the memoriser sees as many rounds of negatives as the methods."""
    entry, sequences, num_items = BASELINES[row.method], interactions.sequences, interactions.num_items
    config = from_plain(entry.config, {"num_rounds": rounds} if row.method == "memoriser" else {})
    found = {}
    for name in PROTOCOLS:
        protocol = get_protocol(name)
        score = entry.fit(Pooled(sequences, num_items, protocol), config)
        candidates = build_population(sequences, num_items, protocol, 0).candidates or None
        position_U = rank_held_out(score, sequences, num_items, "test", protocol, candidates=candidates)
        found[name] = mean_metrics(position_U, (10,))
    return found


def page(found: Sequence[tuple[Row, Found]], strict: Mapping[str, tuple[str, str]], rounds: int) -> list[str]:
    """The section without its heading."""
    lines = [
        f"hit@10 / ndcg@10 on MovieLens-100K. `paper` and `isolated99`: the last of {rounds} rounds, seed 0, settings "
        "of the papers or of the public codes. `paper` keeps a user's held-out item out of the training negatives and "
        "no other candidate: the answer is what was never wrong. `isolated99` keeps all 100 candidates out and changes "
        "nothing else. `strict`: from the leaderboard below, searched settings, all its seeds. More rounds fill the "
        "memory: with the papers' 100 see [paper tables](paper_tables.md).",
        "",
        f"| method | published | {' | '.join(f'`{name}`' for name in PROTOCOLS)} |",
        f"|---|---:|{'---:|' * len(PROTOCOLS)}",
    ]
    for row, found_row in found:
        own = {name: f"{one['hit@10']:.3f} / {one['ndcg@10']:.3f}" for name, one in found_row.metrics.items()}
        name = row.strict or row.method
        beside = dict(zip(FROM_PAGE, strict.get(name, ("-", "-")), strict=True))
        cells = [{**beside, **own}[protocol] for protocol in PROTOCOLS]
        cells[-1] += f" ({name})" if row.strict else ""
        lines.append(f"| {row.title} | {row.published} | {' | '.join(cells)} |")
    missing = [row.title for row in ROWS if row not in [one for one, _ in found]]
    return [*lines, "", f"Not run: {', '.join(missing)}."] if missing else lines


if __name__ == "__main__":
    sys.exit(run(main))
