"""The same goods under other names: how many pairs `fedecider match` finds, and what that leaves of joining.

    python benchmarks/matching.py --shared ../shared --work runs/matching [--seeds 3]

Abt and Buy (1,081 and 1,092 products, 1,097 true pairs; Köpcke, Thor and Rahm, VLDB 2010) by titles alone. Abt's
products fall into halves by a hash of their keys: the least score is tuned on one (most recall at a precision of .97
when three in ten products of each shop are taken away, since shops do not sell the same), the other is shown.

Four companies of 500 customers of video games that renamed and renumbered their items (tools/renamed.py of --shared):
without matching, with `fedecider match`, with true keys; settings as chosen, a run a cell, kept in --work.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import provenance

import fedecider as fd
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain
from fedecider.data.encoders import load_encoder
from fedecider.data.matching import MIN_SCORE, agree, goods_of, match_pairs, read_pairs, weighted, wilson, write_pairs
from fedecider.federation.record import read_json
from fedecider.running.command import run

PAGE = Path(__file__).resolve().parent / "results" / "matching.md"
SAME = "## The same answer everywhere"
"""Section of benchmarks/same_answer.py."""
SCORES = (0.2, 0.3, 0.4, 0.5, 0.6)
VECTORS = {"n-grams": 0.0, "n-grams and sentence vectors, 7 to 3": 0.3, "sentence vectors": 1.0}
GONE, DRAWS, PRECISION = 0.3, 5, 0.97
COMPANIES = [f"c{number}" for number in range(4)]
HANDED = ("joined or local + ensemble", "fedavg + ensemble", "local + ensemble")


def shop(name: str, table: pd.DataFrame) -> Domain:
    rows = table.sort_values("id")
    titles = rows["name"].tolist()
    return Domain(name, Catalogue(name, rows["id"].tolist(), titles, titles), NO_EVENTS, NO_EVENTS, {})


def pairs_part(shared: Path) -> list[str]:
    folder = shared / "data" / "abt-buy"
    one, other = (pd.read_csv(folder / f"{name}.csv.gz", encoding="latin-1", dtype=str) for name in ("Abt", "Buy"))
    abt, buy = shop("abt", one), shop("buy", other)
    links = pd.read_csv(folder / "abt_buy_perfectMapping.csv.gz", dtype=str)
    truth = {(abt.items.number_of[a], buy.items.number_of[b]) for a, b in links.itertuples(index=False)}
    shown_I = np.array([int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2 == 1 for key in abt.item_keys])
    goods = goods_of(abt), goods_of(buy)
    grams_IJ = (lambda both: (both[0] @ both[1].T).toarray())(weighted(*goods))
    vector = load_encoder("minilm").encode([*abt.titles, *buy.titles]).numpy()
    vector /= np.linalg.norm(vector, axis=1, keepdims=True)
    vectors_IJ = vector[: len(abt.titles)] @ vector[len(abt.titles) :].T
    agree_IJ = np.array([[agree(a, b) for b in goods[1].numbers] for a in goods[0].numbers])

    def counts(score_IJ: np.ndarray, least: float, half: bool, gone: float) -> tuple[int, int, int]:
        right = told = true = 0
        for draw in range(DRAWS if gone else 1):
            rng = np.random.default_rng(draw)
            i, j = (np.flatnonzero(rng.random(size) >= gone) for size in score_IJ.shape)
            here_IJ = score_IJ[np.ix_(i, j)]
            best_I = here_IJ.argmax(1)
            near = (here_IJ.argmax(0)[best_I] == np.arange(len(i))) & (here_IJ.max(1) >= least)
            found = {(int(i[row]), int(j[best_I[row]])) for row in np.flatnonzero(near) if shown_I[i[row]] == half}
            kept = set(i.tolist()), set(j.tolist())
            of_half = {(a, b) for a, b in truth if shown_I[a] == half and a in kept[0] and b in kept[1]}
            right, told, true = right + len(found & of_half), told + len(found), true + len(of_half)
        return right, told, true

    lines = [
        "## Abt and Buy",
        "",
        "| titles by | numbers must agree | least score | precision | recall | precision, 3 in 10 gone | recall |",
        "|---|---|---:|---|---|---|---|",
    ]
    for name, weight in VECTORS.items():
        for rule in (True, False):
            score_IJ = (1 - weight) * grams_IJ + weight * vectors_IJ
            score_IJ = np.where(agree_IJ, score_IJ, -1.0) if rule else score_IJ
            tuned = {least: counts(score_IJ, least, False, GONE) for least in SCORES}
            good = [one for one, (right, told, _) in tuned.items() if right >= PRECISION * told]
            least = (
                max(good, key=lambda one: tuned[one][0])
                if good
                else max(SCORES, key=lambda one: tuned[one][0] / tuned[one][1])
            )
            cells = []
            for gone in (0.0, GONE):
                right, told, true = counts(score_IJ, least, True, gone)
                cells += [share(right, told, not gone), share(right, true, not gone)]
            lines.append(f"| {name} | {'yes' if rule else 'no'} | {least} | {' | '.join(cells)} |")
    for rule in (True, False):
        rows = match_pairs({"abt": goods[0], "buy": goods[1]}, rule)
        right = sum((abt.items.number_of[p.key], buy.items.number_of[p.other_key]) in truth for p in rows)
        lines.append(
            f"| `fedecider match`, both halves | {'yes' if rule else 'no'} | {MIN_SCORE} | {share(right, len(rows))} | "
            f"{share(right, len(truth))} | | |"
        )
    return [*lines, "", "Brackets: Wilson's 95 % intervals.", ""]


def share(right: int, num: int, interval: bool = True) -> str:
    low, high = wilson(right, num)
    return f"{right / num:.3f}" + (f" [{low:.3f}, {high:.3f}]" if interval else "")


def data_of(kind: str, seed: int, shared: Path, work: Path) -> Path:
    """The prepared data of a cell; without matching each company has a catalogue of its own."""
    folder, raw = work / f"{kind}-{seed}-data", work / f"renamed-{seed}"
    if folder.is_dir():
        return folder
    if not (raw / "truth.csv").is_file():
        subprocess.run([sys.executable, str(shared / "tools" / "renamed.py"), str(raw), str(seed)], check=True)
    if kind == "match":
        data = fd.open_prepared(data_of("none", seed, shared, work))
        write_pairs(match_pairs({name: goods_of(one) for name, one in data.items()}), work / f"pairs-{seed}.csv")
        return fd.match(data, work / f"pairs-{seed}.csv").save(folder)
    truth = pd.read_csv(raw / "truth.csv", dtype=str)
    item_of = dict(zip(truth["key"], truth["item"], strict=True))
    tables = [
        {name: pd.read_csv(raw / f"{name}{end}.csv", dtype=str) for name in COMPANIES} for end in ("", "_products")
    ]
    if kind == "true":
        tables = [{name: one.assign(item=one["item"].map(item_of)) for name, one in group.items()} for group in tables]
    return fd.from_events(*tables, **({"catalogue": "ean"} if kind == "true" else {})).save(folder)


def joining_part(shared: Path, work: Path, seeds: int) -> list[str]:
    rows: dict[str, list[tuple[float, float]]] = {"none": [], "match": [], "true": []}
    quality = []
    for seed in range(seeds):
        for kind, found in rows.items():
            data, place = data_of(kind, seed, shared, work), work / f"{kind}-{seed}"
            options = {"different_goods": True} if kind == "none" else {}
            if not (place / "metrics.json").is_file():
                fd.federate(str(data), output=place, resume=True, seed=seed, allow_long=True, **options)
            macro = read_json(place / "metrics.json")["macro"]["test"]
            handed = next(macro[label] for label in HANDED if label in macro)
            found.append((handed["ndcg@10"]["mean"], macro["local + ensemble"]["ndcg@10"]["mean"]))
        truth = pd.read_csv(work / f"renamed-{seed}" / "truth.csv", dtype=str)
        item_of = dict(zip(truth["key"], truth["item"], strict=True))
        pairs = read_pairs(work / f"pairs-{seed}.csv")
        right = sum(item_of[pair.key] == item_of[pair.other_key] for pair in pairs)
        quality.append((right / len(pairs), right / (6 * truth["item"].nunique())))
    lines = [
        "## Four companies that renamed and renumbered their items",
        "",
        f"ndcg@10 of what is handed over, mean over companies, seeds 0 to {seeds - 1}. Of the pairs that were found "
        f"{fmean(one[0] for one in quality):.1%} are right, and {fmean(one[1] for one in quality):.1%} of the true "
        "pairs were found.",
        "",
        "| items are matched | alone | handed over | gain | gain by seed |",
        "|---|---:|---:|---:|---|",
    ]
    names = {"none": "not", "match": "`fedecider match`, not corrected", "true": "by true keys"}
    for kind, found in rows.items():
        gains = [joined - alone for joined, alone in found]
        alone, joined = (fmean(one[side] for one in found) for side in (1, 0))
        by_seed = ", ".join(f"{gain:+.4f}" for gain in gains)
        lines.append(f"| {names[kind]} | {alone:.4f} | {joined:.4f} | {fmean(gains):+.4f} | {by_seed} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--work", type=Path, default=Path("runs/matching"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    lines = ["# The same goods under other names", "", *__doc__.split("\n\n")[2].splitlines(), ""]
    lines += pairs_part(args.shared) + joining_part(args.shared, args.work, args.seeds)
    kept = args.output.read_text(encoding="utf-8").partition(SAME) if args.output.is_file() else ("", "", "")
    lines += [*provenance.heading("matching.py", 1), "", "".join(kept[1:])]
    args.output.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main))
