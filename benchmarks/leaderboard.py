"""The leaderboard of the cross-device track, one section of its page for each data set.

    python benchmarks/leaderboard.py --dataset ml-100k
    python benchmarks/leaderboard.py --dataset filmtrust --settings benchmarks/configs/leaderboard/ml-100k.yaml

Two tables of `fedecider leaderboard` make a section: `strict` and `strict/sampled99` with settings that are searched
on validation items, `paper` and `isolated99` with the settings of the papers or of the public codes. Finished runs are
kept below `--work`, so that a stopped command goes on where it was. The settings that were chosen are written into
`benchmarks/configs/leaderboard/`: with them a table needs no search, on the same data or on others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from provenance import heading
from speed import put_section

from embedding_fr.leaderboard import LeaderboardConfig, kind_of, plan
from fedecider.bounds import OneOrMore, ZeroOrMore, dataclass
from fedecider.comparison.compare import Plan, compare
from fedecider.comparison.page import write_table
from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.federation.record import read_json, write_text
from fedecider.report.tables import CANARY
from fedecider.running.command import run
from fedecider.running.options import parse

HERE = Path(__file__).parent
ROWS = (
    "popularity,memoriser,decayed_cooccurrence,ease,mf,sasrec,fedmf,fedncf,pfedrec,pfedrec/code,gpfedrec,fedrap,"
    "fedrap/code,fedem,fedem/code,pfedclr,fedrecgel,fedrecgel/code,fednear"
)
SEARCHED = ("strict", "strict/sampled99")
PUBLISHED = ("paper", "isolated99")
"""Protocols of the papers, with their settings and the last round."""
HEADER = ("row", "kind", "strict hit@10", "strict ndcg@10", "against the best", *(f"`{name}`" for name in SEARCHED[1:]))


@dataclass(frozen=True)
class PageConfig:
    """Rows, budgets, and places.

    Args:
        methods: The rows, separated by commas, as `fedecider leaderboard` names them.
        seeds: The number of runs of every row under strict.
        tune: The number of settings of every row that are tried on validation items.
        num_rounds: The largest number of rounds of a run under strict.
        patience: A run under strict stops after so many turns of a client without a better validation score.
        settings: A file with settings by row; the rows that it names are not searched.
        published_seeds: The number of runs of every row under paper and isolated99; 0 leaves these out.
        published_rounds: The number of rounds of these.
        work: The folder of the runs.
        output: The page whose section is replaced.
        chosen: The folder that the chosen settings are written into, if there was a search.
    """

    methods: str = ROWS
    seeds: OneOrMore = 3
    tune: OneOrMore = 20
    num_rounds: OneOrMore = 80
    patience: ZeroOrMore = 15
    settings: str = ""
    published_seeds: ZeroOrMore = 1
    published_rounds: OneOrMore = 60
    work: Path = Path("runs/leaderboard")
    output: Path = HERE / "results" / "leaderboard.md"
    chosen: Path = HERE / "configs" / "leaderboard"

    def table(self, published: bool, output: Path) -> LeaderboardConfig:
        """One of the two tables of a section."""
        if not published:
            budget = {name: getattr(self, name) for name in ("tune", "num_rounds", "patience", "settings")}
            return LeaderboardConfig(
                self.methods, ",".join(SEARCHED), self.seeds, **budget, output=str(output), num_threads=1
            )
        kept = [
            name for name in self.methods.split(",") if kind_of(name) != "central" or name in (CANARY, "popularity")
        ]
        protocol, rounds = ",".join(PUBLISHED), self.published_rounds
        return LeaderboardConfig(
            ",".join(kept), protocol, self.published_seeds, tune=1, num_rounds=rounds, output=str(output), num_threads=1
        )


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    classes = (PageConfig, InteractionsConfig)
    page, data = parse(__doc__ or "", words, *classes)
    provenance = heading("leaderboard.py", 1)
    interactions = load_interactions(data)
    own = plan(page.table(False, page.work / data.dataset), data)
    published = page.published_seeds and plan(page.table(True, page.work / f"{data.dataset}-published"), data)
    found = made(own)
    keep_settings(page, data.dataset, own.root / "settings.yaml")
    beside = made(published) if published else {}
    title = f"{data.dataset}: {interactions.num_users:,} users, {interactions.num_items:,} items"
    body = "\n".join([*section(page, found, beside), "", *provenance])
    put_section(page.output, title, body)
    print(body)


def made(planned: Plan) -> dict[str, Any]:
    """A table with its files, and what its JSON says."""
    write_table(compare(planned))
    return read_json(planned.root / "leaderboard.json")


def keep_settings(page: PageConfig, dataset: str, found: Path) -> None:
    """Write the settings that a search chose to where the next table can take them from."""
    if page.settings or not found.is_file():
        return
    page.chosen.mkdir(parents=True, exist_ok=True)
    line = f"# Chosen on validation items of {dataset}, the best of {page.tune} each, by benchmarks/leaderboard.py"
    write_text(page.chosen / f"{dataset}.yaml", f"{line}\n{found.read_text()}")


def section(page: PageConfig, found: Mapping[str, Any], beside: Mapping[str, Any]) -> list[str]:
    """The section without its heading."""
    lines = [_said(page), ""]
    by_protocol = {name: {} for name in (*SEARCHED, *PUBLISHED)}
    for row in [*found["rows"], *(beside["rows"] if beside else [])]:
        by_protocol[row["protocol"]][row["row"]] = row
    further = [*PUBLISHED, "`paper`, best test round"] if beside else []
    header = [*HEADER, *(name if "`" in name else f"`{name}`" for name in further)]
    lines += [f"| {' | '.join(header)} |", f"|---|---|---:|---:|---|{'---:|' * (len(header) - 5)}"]
    for name, row in by_protocol["strict"].items():
        values = _values(row)
        cells = [
            name,
            row["kind"],
            *(_interval(values[metric]) for metric in ("hit@10", "ndcg@10")),
            row["against_best"],
        ]
        cells += [
            _pair(by_protocol[protocol].get(name)) for protocol in (*SEARCHED[1:], *(PUBLISHED if beside else ()))
        ]
        cells += [_best_test_round(by_protocol["paper"].get(name))] if beside else []
        lines.append(f"| {' | '.join(cells)} |")
    missing = sorted(
        {name for one in (found, beside) if one for part in one["protocols"].values() for name in part["missing"]}
    )
    lines += ["", f"Left out, since a run failed: {', '.join(missing)}."] if missing else []
    if page.settings:
        return lines
    settings = [
        f"`{one['row']}` {one['setting']}"
        for one in found["settings"]
        if "strict" in one["protocols"] and one["options"]
    ]
    return [*lines, "", f"Chosen under `strict`: {'; '.join(settings)}. All others: the first setting."]


def _said(page: PageConfig) -> str:
    if page.settings:
        chosen = f"settings of {Path(page.settings).name}"
    else:
        chosen = f"the best of at most {page.tune} settings on validation items"
    text = (
        f"`strict` and `strict/sampled99`: {page.seeds} seeds, {chosen}, at most {page.num_rounds} rounds, stopped "
        f"after {page.patience} turns of a client without a better validation score."
    )
    if not page.published_seeds:
        return text
    seeds = "one seed" if page.published_seeds == 1 else f"{page.published_seeds} seeds"
    return (
        f"{text} `paper` and `isolated99`, hit@10 / ndcg@10: {seeds}, settings of the papers or public codes, the last "
        f"of {page.published_rounds} rounds; beside it the round that is best on test items, as public codes report."
    )


def _values(row: Mapping[str, Any]) -> Mapping[str, Mapping[str, float]]:
    return next(iter(row["values"].values()))


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _pair(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else " / ".join(f"{_values(row)[name]['mean']:.3f}" for name in ("hit@10", "ndcg@10"))


def _best_test_round(row: Mapping[str, Any] | None) -> str:
    names = [f"{metric}, best test round" for metric in ("hit@10", "ndcg@10")]
    return "-" if row is None or names[0] not in row else " / ".join(f"{row[name]:.3f}" for name in names)


if __name__ == "__main__":
    sys.exit(run(main))
