"""Six months of a recommender: does an update keep up with training anew, and what does it cost?

    python benchmarks/months.py --work WORK [--config FILE] [--seed 0] [--epochs 1]   # $FEDECIDER_DATA/amazon2018-d3

Office products of Amazon (2018): three companies with one catalogue, whose customers are dealt to them by a hash of
their keys; a fifth of all customers agreed to be public. What was bought before February 2018 is prepared and
federated. Then every month, before its events are known, four recommenders give ten items to every private customer
who will buy in it, and are judged by what the customer buys first:

- the run as it was trained;
- the run with `fedecider update`, month after month: counts alone;
- the same with ``--epochs``: counts, and each company's adapter trained on, taken where held-out events like it better;
- a federation anew over all events before the month, with the split kept.

All four know the customer's history up to the month. It is checked that no private customer is public in any month.
The page benchmarks/results/months.md is written again after every month. What was trained in WORK is not
trained again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from provenance import heading

import fedecider
from fedecider.data.frames import from_events
from fedecider.lifecycle.update import update
from fedecider.models.recommender import Recommender
from fedecider.running.command import run

PAGE = Path(__file__).parent / "results" / "months.md"
CONFIG = Path(__file__).parents[1] / "configs" / "companies.yaml"
SMALL = {
    "num_rounds": 6,
    "lora_rank": 64,
    "hyperparameter_candidates": "[]",
    "local_row": "off",
    "pretrain": {"text_encoder": "tfidf", "backbone": {"d_model": 64}},
}
"""Of the configuration: a third of its width, one encoder less to install, and what is read here alone."""
REST = "# Items that nobody has bought yet"
"""What follows on the page is of other commands, and stays."""
COMPANIES = ("north", "middle", "south")
MONTHS = tuple(pd.period_range("2018-02", "2018-07", freq="M"))
PUBLIC_SHARE = 5
"""One customer of so many."""
OLD, COUNTS, WARM, ANEW = ROWS = ("as trained", "counts updated", "counts and adapters updated", "trained anew")
FIRST = "first"


def drawn(user: str, parts: int, what: str) -> int:
    """One of so many parts for each customer, whatever table they stand in."""
    return zlib.crc32(f"{what}:{user}".encode()) % parts


def read(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Events with company and consent, oldest first, and the products."""
    events = pd.read_csv(folder / "interactions.csv.gz", dtype={"user": str, "item": str})
    events = events[events["domain"] == "office"].sort_values(["timestamp", "user", "pos"], kind="stable")
    with gzip.open(folder / "items.jsonl.gz", "rt", encoding="utf-8") as file:
        items = pd.DataFrame([one for one in map(json.loads, file) if one["domain"] == "office"])
    items["item"] = items["item"].astype(str)
    users = {user: drawn(user, len(COMPANIES), "company") for user in events["user"].unique()}
    events["company"] = [COMPANIES[users[user]] for user in events["user"]]
    events["public"] = [drawn(user, PUBLIC_SHARE, "public") == 0 for user in events["user"]]
    events["month"] = pd.to_datetime(events["timestamp"], unit="s").dt.to_period("M")
    return events, items[["item", "title", "brand", "description"]]


def timed(cpu_s: dict[str, float], what: str, work: Callable[[], Any]) -> Any:
    begun = time.process_time()
    done = work()
    cpu_s[what] = cpu_s.get(what, 0.0) + time.process_time() - begun
    return done


def trained(
    events: pd.DataFrame, items: pd.DataFrame, place: Path, before: Path | None, args: Any, cpu_s: dict[str, float]
) -> set[str]:
    """Prepare what was bought so far and federate, unless that was done; returns who is public."""
    if not (place / "done.json").is_file():
        begun = time.process_time()
        public = _trained(events, items, place, before, args)
        done = {"public": sorted(public), "cpu_s": time.process_time() - begun}
        (place / "done.json").write_text(json.dumps(done))
    done = json.loads((place / "done.json").read_text())
    what = ANEW if before else FIRST
    cpu_s[what] = cpu_s.get(what, 0.0) + done["cpu_s"]
    return set(done["public"])


def _trained(events: pd.DataFrame, items: pd.DataFrame, place: Path, before: Path | None, args: Any) -> set[str]:
    shutil.rmtree(place, ignore_errors=True)
    kept = {"keep_split": str(before / "data")} if before else {}
    columns = events[["user", "item", "timestamp", "company", "public"]]
    names = {"user": "user", "item": "item", "time": "timestamp", "company": "company"}
    data = from_events(columns, items, name="office", public="public", quantity="", seed=args.seed, **names, **kept)
    data.save(place / "data")
    fedecider.federate(
        place / "data",
        config=str(args.config),
        output=place / "run",
        progress=False,
        seed=args.seed,
        cache=str(place / "cache"),
        **SMALL,
    )
    private = {user.partition(":")[2] for one in data.values() for user in one.clients.users}
    public = {user.partition(":")[2] for one in data.values() for user in one.public.users}
    assert not private & public
    assert not private & set(columns.loc[columns["public"], "user"]), "a private customer who agreed"
    return public


def hits(folder: Path, asked: Mapping[str, Mapping[str, tuple[list[str], str]]]) -> np.ndarray:
    """Of all customers of all companies whether their next item is among ten."""
    found = []
    for company, customers in asked.items():
        recommender = Recommender.from_pretrained(folder, company)
        histories = {user: history for user, (history, _) in customers.items()}
        for one in recommender.recommend_many(histories, 10, unknown="skip"):
            listed = [] if one.answer is None else [item.key for item in one.answer]
            found.append(customers[one.customer][1] in listed)
    return np.array(found, float)


def next_items(events: pd.DataFrame, month: pd.Period) -> dict[str, dict[str, tuple[list[str], str]]]:
    """Company -> private customer who buys in the month -> what they had before, and what they buy first."""
    found: dict[str, dict[str, tuple[list[str], str]]] = {one: {} for one in COMPANIES}
    private = events[~events["public"] & (events["month"] <= month)]
    for (company, user), own in private.groupby(["company", "user"], sort=True):
        before = own.loc[own["month"] < month, "item"].tolist()
        new = [item for item in own.loc[own["month"] == month, "item"] if item not in before]
        if before and new:
            found[company][user] = (before, new[0])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDECIDER_DATA", "data"), "amazon2018-d3"))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args(argv)
    foot, cpu_s, rows = heading("months.py", 1), dict.fromkeys(ROWS, 0.0), []
    events, items = read(args.data)
    first = events["month"] < MONTHS[0]
    known = set(events.loc[first, "item"])
    public = trained(events[first], items, args.work / "first", None, args, cpu_s)
    for row in (COUNTS, WARM):
        shutil.rmtree(args.work / row, ignore_errors=True)
        shutil.copytree(args.work / "first" / "run", args.work / row)
    places = {OLD: args.work / "first" / "run", COUNTS: args.work / COUNTS, WARM: args.work / WARM}
    places[ANEW], before = places[OLD], args.work / "first"
    for number, month in enumerate(MONTHS):
        if number:
            so_far = events[events["month"] < month]
            place = args.work / f"before-{month}"
            public |= trained(so_far, items, place, before, args, cpu_s)
            places[ANEW], before = place / "run", place
            for company, own in so_far[~so_far["public"]].groupby("company"):
                table = args.work / f"{company}.parquet"
                own[["user", "item", "timestamp"]].to_parquet(table)
                for row, epochs in ((COUNTS, 0), (WARM, args.epochs)):
                    work = partial(update, places[row], company, table, force=True, epochs=epochs)
                    done = timed(cpu_s, row, work)
                    print(month, company, row, done.test, done.trained, flush=True)
        asked = next_items(events, month)
        assert not public & {user for customers in asked.values() for user in customers}
        targets = [target for customers in asked.values() for _, target in customers.values()]
        judged = {place: hits(place, asked) for place in (places.values() if number else [places[OLD]])}
        found = {row: judged[place if number else places[OLD]] for row, place in places.items()}
        rows.append((month, sum(target not in known for target in targets), found))
        kept = PAGE.read_text(encoding="utf-8").partition(REST) if PAGE.is_file() else ("", "", "")
        mine = "\n".join(page(rows, cpu_s, events, foot)) + "\n"
        PAGE.write_text(mine + "".join(("\n", *kept[1:]) if kept[1] else ()), encoding="utf-8")


def page(rows: list[Any], cpu_s: Mapping[str, float], events: pd.DataFrame, foot: list[str]) -> list[str]:
    """The table, what all months say together, and what it cost."""
    whole = {row: np.concatenate([found[row] for _, _, found in rows]) for row in ROWS}

    def against(row: str, other: str) -> str:
        difference = whole[row] - whole[other]
        return f"{difference.mean():+.4f} (standard error {difference.std(ddof=1) / len(difference) ** 0.5:.4f})"

    updates = max(len(rows) - 1, 1)
    first = (events["month"] < MONTHS[0]).sum()
    lines = [
        "# Next month: six months of updates",
        "",
        f"Office products of Amazon (2018), three companies with one catalogue, {first:,} events before February 2018 "
        "and the six months after. The data have only customers with an event in the last fifth of the time, and of "
        "each at most ten before it: months fade out, and early customers are those who came back. hit@10 of the first "
        "thing that a private customer bought in a month, ten items given before it. No private customer is public in "
        "any month.",
        "",
        f"| month | customers | never seen before February | {' | '.join(ROWS)} |",
        f"|---|---:|---:|{'---:|' * len(ROWS)}",
    ]
    for month, num_unknown, found in rows:
        values = " | ".join(f"{found[row].mean():.4f}" for row in ROWS)
        lines.append(f"| {month} | {len(found[OLD]):,} | {num_unknown / len(found[OLD]):.0%} | {values} |")
    total = " | ".join(f"{whole[row].mean():.4f}" for row in ROWS)
    share = sum(number for _, number, _ in rows) / len(whole[OLD])
    lines.append(f"| all | {len(whole[OLD]):,} | {share:.0%} | {total} |")
    seconds = " | ".join(["0", *(f"{cpu_s[row] / updates:.1f}" for row in ROWS[1:])])
    lines += [
        f"| CPU seconds a month, three companies | | | {seconds} |",
        "",
        f"The first training took {cpu_s['first']:.0f} CPU seconds. Over all months, customers paired:",
        "",
        f"- {COUNTS} against {OLD}: {against(COUNTS, OLD)};",
        f"- {WARM} against {COUNTS}: {against(WARM, COUNTS)};",
        f"- {ANEW} against {WARM}: {against(ANEW, WARM)}.",
        "",
        "In the first month all four are the first run. An update counts every event; a federation, the first one and "
        "the one anew, holds out the last two of each customer, from training and from counts. Only training anew "
        "knows items that came later; the others can recommend them by their texts (`--new_items`), which was not done "
        "here. MovieLens (latest small) has no months to judge: of 671 users 13 to 20 come back in a year.",
        "",
        "---",
        "",
        *foot,
    ]
    return lines


if __name__ == "__main__":
    sys.exit(run(main))
