"""Whether the answer is the same everywhere: seeds, orders, texts with a constant word, command line, Python, sites.

    python shared/tools/three_shops.py shops
    python benchmarks/same_answer.py --shops shops --work runs/same_answer [--bases 10] [--server FOLDER]

Three shops that sell partly the same goods, keys of one export without leading zeros, mended by `fedecider.match`. Each
base seed is one `fedecider federate` with settings and the number of training runs as they are chosen; what is in
--work is not run again. --server: the server's run folder of a deployment with seed 0, made as docs/deploy.md says.
Gains are points of hit@10 beyond each company alone, with ensembles.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import provenance
import yaml

import fedecider as fd
from fedecider.cross_silo.conclusion import sites_answer
from fedecider.federation.record import read_json
from fedecider.running.command import run

PAGE = Path(__file__).parent / "results" / "matching.md"
HEADING = "## The same answer everywhere"
TABLES = {
    "nord_bestellungen": ("nord_bestellungen.csv", "nord_artikel.csv", "cp1252", "Warengruppe"),
    "sud_commandes": ("sud_commandes.json", "sud_produits.json", None, "rayon"),
    "west_orders": ("west_orders.parquet", "west_products.parquet", None, "dept"),
}
"""Shop -> events, items, their encoding, the column that says the same of every item."""


def items_of(path: Path, encoding: str | None, left_out: str) -> pd.DataFrame:
    text = partial(pd.read_csv, sep=";", dtype=str, encoding=encoding)
    return {".parquet": pd.read_parquet, ".json": pd.read_json}.get(path.suffix, text)(path).drop(columns=left_out)


def imported(shops: Path, names: list[str], constant: bool) -> fd.FederatedData:
    """The shops in this order, before `fedecider.match`."""
    events = {name: str(shops / TABLES[name][0]) for name in names}
    paths = {name: shops / TABLES[name][1] for name in names}
    items = {name: str(one) if constant else items_of(one, *TABLES[name][2:]) for name, one in paths.items()}
    return fd.from_events(events, items, keep={"status": "shipped"})


def short(verdict: str) -> str:
    return verdict.partition("Gain: ")[2].partition(" points")[0]


def hashes(data: fd.FederatedData) -> str:
    return " ".join(data[name].content_hash()[:8] for name in TABLES)


def trained(work: Path, name: str, *words: str) -> fd.Result:
    """A run of the command line, in this folder of ``work``."""
    folder = work / name
    if not (folder / "report.html").is_file():
        places = {"--data": work / "data", "--cache": work / "cache", "--output": folder}
        given = [str(word) for pair in places.items() for word in pair]
        subprocess.run([sys.executable, "-m", "fedecider.cli.main", "federate", *given, *words], check=True)
    return fd.load(folder)


def rows(work: Path, server: Path | None) -> Iterator[tuple[str, str, str]]:
    """By what, recommendation, gain: one training run with seed 0 each."""
    line = trained(work, "line", "--seeds", "1")
    turned = trained(work, "turned", "--seeds", "1", "--domains", ",".join(reversed(TABLES)))
    config = {**yaml.safe_load((work / "line" / "chosen.yaml").read_text()), "seeds": 1}
    places = {"output": work / "python", "cache": str(work / "cache")}
    compared = fd.compare(["fedavg"], work / "data", seeds=[0], config=config, **places)
    python = fd.load(work / "python" / "fedavg" / "0")
    for label, one in (("command line", line), ("shops in the other order", turned), ("Python", python)):
        yield label, one.recommendation, short(one.verdict)
    yield "fd.compare", compared.recommendation, short(compared.verdict)
    if server:
        metrics, record = read_json(server / "metrics.json"), read_json(server / "run.json")
        answer = sites_answer({name: one["test"] for name, one in metrics["domains"].items()}, metrics, record)
        yield "server and three sites", answer.recommendation, short(answer.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("shops", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--bases", type=int, default=10)
    parser.add_argument("--server", type=Path)
    asked = parser.parse_args()
    head = provenance.heading("same_answer.py", 1)
    names = list(TABLES)
    kinds = {"as they are": (names, True), "other order": (names[::-1], True), "no constant word": (names, False)}
    data = {label: imported(asked.shops, *kind) for label, kind in kinds.items()}
    contents = {label: (hashes(one), hashes(fd.match(one))) for label, one in data.items()}
    if not (asked.work / "data").is_dir():
        fd.match(data["as they are"]).save(asked.work / "data")
    seeds = {base: trained(asked.work, f"seed_{base}", "--seed", str(base)) for base in range(0, 10 * asked.bases, 10)}
    counts = Counter(one.recommendation for one in seeds.values())
    lines = [HEADING, "", __doc__.split("\n\n")[2], ""]
    lines += ["| imported | contents of the three shops | after fedecider.match |", "|---|---|---|"]
    lines += [f"| {label} | {before} | {after} |" for label, (before, after) in contents.items()]
    lines += ["", "One training run, seed 0:", "", "| by | recommendation | gain |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(asked.work, asked.server)]
    lines += ["", f"Several training runs: {dict(counts)}", ""]
    lines += ["| base seed | recommendation | gain | gain of each run |", "|---:|---|---|---|"]
    for base, one in seeds.items():
        each = ", ".join(f"{100 * gain:+.1f}" for gain in one.raw["seed_gains"])
        lines.append(f"| {base} | {one.recommendation} | {short(one.verdict)} | {each} |")
    PAGE.write_text(PAGE.read_text().partition(HEADING)[0].rstrip() + "\n\n" + "\n".join([*lines, "", *head]) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
