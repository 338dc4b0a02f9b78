"""Tables and figures of the papers of the cross-device track, made again: the printed figure beside ours.

    python benchmarks/paper_tables.py --paper fedem --table 2 [--dataset ml-1m] [--rounds 100]
    python benchmarks/paper_tables.py --paper pfedclr --figure 7 --rows 1,2

Under the protocol ``paper``, which leaks: the figures say whether an implementation does what its paper's does, not how
well a method recommends. The last round, seed 0, settings of the papers. `--list` names what there is; the rows are
those of :mod:`paper_rows`. A row is made once, whichever tables it stands in; a table's section holds of each row what
was made with the most rounds, of others the minutes that
they would take, where a row of the method was tried (2 rounds).

Shape legend: N clients, C clients of a block, I items, D dims, V drawn clients.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from leak import ByProtocol, Found, kept
from paper_rows import LEFT_OUT, TABLES, Line, Subset, Table
from provenance import heading
from speed import put_section
from torch import Tensor

from embedding_fr.leaderboard import LeaderboardConfig, run_settings
from embedding_fr.merging import ADAPTER, LAST, Merging, features, weights_of
from embedding_fr.methods.fedrap import COMMON, share_above
from embedding_fr.mixing import squared_distances
from embedding_fr.setup import EmbeddingSettings, Setup, set_up, train, user_positions
from embedding_fr.similarity import similarity_weights
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.federation.callbacks import RoundCallback
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.federation.record import read_json
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.running.command import run
from fedecider.running.plain import content_key

PAGE = Path(__file__).with_name("results") / "paper_tables.md"
PROTOCOL = "paper"
LARGE = 0.1
"""Gaps of the first figure beyond this share of the printed one need a cause."""
TRIED = 2
"""Rounds of a row that is only tried, for its cost."""
NAMES = {"fedem": "FedEM", "pfedclr": "PFedCLR", "fedrap": "FedRAP", "fedrecgel": "FedRecGEL"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", default="")
    parser.add_argument("--table", default="", help="its number, such as 2")
    parser.add_argument("--figure", default="", help="its number, in place of a table's")
    parser.add_argument("--dataset", default="", help="ml-100k where it is not given, ml-1m for FedRAP's Table 7")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rows", default="", help="numbers from 1, separated by commas; the others are not made now")
    parser.add_argument("--finished", action="store_true", help="make no row, write what there is")
    parser.add_argument("--work", type=Path, default=Path("runs/paper_tables"), help="finished rows are kept there")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page whose section is replaced")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join([*known_tables(args.rounds, args.work), LEFT_OUT]))
        return
    name = f"figure {args.figure}" if args.figure and not args.table else f"table {args.table}"
    if (args.paper, name) not in TABLES:
        known = ", ".join(" ".join(key) for key in TABLES)
        raise ValueError(f"got paper {args.paper!r} with {name!r}, expected one of {known}")
    if args.rounds < 1:
        raise ValueError(f"got rounds {args.rounds}, expected 1 or more")
    table = TABLES[args.paper, name]
    chosen = chosen_rows(args.rows, table)
    data = data_of(table, args.dataset)
    torch.set_num_threads(1)
    first_lines = heading("paper_tables.py", 1)
    interactions = load_interactions(data)
    for line in [] if args.finished else chosen:
        found = made_row(interactions, data, line, args.rounds, args.work)
        print(line.label, found.metrics, f"{found.seconds:.0f} CPU s", file=sys.stderr, flush=True)
    rows = [best_row(interactions, data, line, args.rounds, args.work) for line in table.lines]
    again = f"python benchmarks/paper_tables.py --paper {args.paper} --{name} --dataset {data.dataset}"
    foot = [*first_lines[:-1], f"- Command: `{again} --rounds {args.rounds}`"]
    body = [*page(table, rows, args.rounds, data.dataset), "", "; ".join(line.removeprefix("- ") for line in foot)]
    put_section(args.output, f"{NAMES[args.paper]}, {name}, {data.dataset}", "\n".join(body))
    print("\n".join(body))


def known_tables(rounds: int, work: Path) -> list[str]:
    """The command of each table; where rows are kept, how many of them, and what the others take."""
    commands = {key: f"--paper {key[0]} --{key[1]}" for key in TABLES}
    if not work.is_dir():
        return list(commands.values())
    usual = InteractionsConfig()
    interactions = load_interactions(usual)
    for key, table in TABLES.items():
        if table.default == usual.dataset:
            rows = [best_row(interactions, usual, line, rounds, work) for line in table.lines]
            missing = [row for row in rows if row.rounds <= TRIED]
            commands[key] += f": {len(rows) - len(missing)} of {len(rows)} rows are kept"
            costs = [row.round_s for row in missing if row.round_s is not None]
            if costs and len(costs) == len(missing):
                commands[key] += f", the others take at most about {math.ceil(sum(costs) * rounds / 60)} CPU minutes"
    return list(commands.values())


def chosen_rows(text: str, table: Table) -> Sequence[Line]:
    """The lines with these numbers, all where the text is empty."""
    numbers = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 1 <= int(word) <= len(table.lines) for word in numbers):
        raise ValueError(f"got rows {text!r}, expected numbers from 1 to {len(table.lines)}, separated by commas")
    return [table.lines[int(word) - 1] for word in numbers] or table.lines


def data_of(table: Table, dataset: str) -> InteractionsConfig:
    """What is read for a table; ``dataset`` empty is its own."""
    name = dataset or table.default
    if table.lines[0].subset and name != table.default:
        raise ValueError(f"got dataset {name!r}, expected {table.default}: the subsets are of it")
    return InteractionsConfig(name, min_user_events=table.min_events.get(name))


# Rows.


def settings_of(data: InteractionsConfig, line: Line, rounds: int) -> EmbeddingSettings:
    """Seed 0, one validation at the end."""
    settings = run_settings(LeaderboardConfig(num_rounds=rounds), data, line.method, PROTOCOL, line.setting, 0, 0)
    every = dataclasses.replace(settings.run, eval_every=rounds)
    return settings._replace(run=every, privacy=DevicePrivacyConfig(**line.privacy))


class Row(NamedTuple):
    """A line and what is kept of it."""

    line: Line
    found: Found | None = None
    rounds: int = 0
    round_s: float | None = None
    """CPU seconds; where this row was never made those of the method's dearest, with noise or without as this one."""


def place_of(
    interactions: Interactions, data: InteractionsConfig, line: Line, work: Path
) -> tuple[Path, dict[str, Any]]:
    """Where a row is kept but for its rounds, and what decides it: everything but its label."""
    record = settings_of(data, line, 1).as_record()
    record.pop("data")
    inputs = {**record, "data": interactions.content_hash(), "subset": line.subset and line.subset._asdict()}
    key = content_key(inputs)
    name = f"{data.dataset}.{line.method.replace('/', '-')}.{key}"
    return work / name, {"key": key, "setting": dict(line.setting), "privacy": dict(line.privacy)}


def made_row(interactions: Interactions, data: InteractionsConfig, line: Line, rounds: int, work: Path) -> Found:
    """The row with so many rounds, from ``work`` where it is there."""
    place, inputs = place_of(interactions, data, line, work)

    def made() -> ByProtocol:
        part = part_of(interactions, line.subset) if line.subset else interactions
        return trained(part, settings_of(data, line, rounds))

    return kept(Path(f"{place}.{rounds}.json"), {**inputs, "rounds": rounds}, made)


def best_row(interactions: Interactions, data: InteractionsConfig, line: Line, rounds: int, work: Path) -> Row:
    """What is kept of a line with the most rounds up to ``rounds``."""
    place, _ = place_of(interactions, data, line, work)
    files = {int(file.suffixes[-2][1:]): file for file in work.glob(f"{place.name}.*.json")}
    most = max((one for one in files if one <= rounds), default=0)
    if most:
        before = read_json(files[most])
        return Row(line, Found(before["metrics"], before["seconds"]), most, before["metrics"]["cost"].get("round_s"))
    alike = [] if line.subset else work.glob(f"{place.name.rsplit('.', 1)[0]}.*.json")
    ones = [one for one in map(read_json, alike) if bool(one["inputs"]["privacy"]) == bool(line.privacy)]
    costs = [one["metrics"]["cost"].get("round_s", 0.0) for one in ones]
    return Row(line, round_s=max(costs, default=None))


def trained(interactions: Interactions, settings: EmbeddingSettings) -> ByProtocol:
    """The last round's figures under the protocol, those behind pictures, and CPU seconds a round."""
    setup, times = set_up(settings, interactions, torch.device("cpu")), []
    state = train(settings, setup, [RoundCallback(lambda round: times.append(time.process_time()))])
    position_U = user_positions(setup, state, setup.method.variants[0], "test", last=True)
    figures = {**mean_metrics(position_U, (10,)), **behind(settings, setup, state)}
    cost = {"round_s": (times[-1] - times[0]) / (len(times) - 1)} if len(times) > 1 else {}
    return {PROTOCOL: figures, "cost": cost}


def part_of(interactions: Interactions, subset: Subset) -> Interactions:
    """``count`` users or items that are neighbours in the order of their events, falling, from where the sparsity is
    nearest to the wanted one: of users over the whole catalogue, of items over all users. Users who are then left with
    too few events to be split are dropped."""
    of_users = subset.axis == "users"
    events = [len(sequence) for sequence in interactions.sequences]
    if not of_users:
        counts = torch.bincount(torch.cat([torch.as_tensor(list(sequence)) for sequence in interactions.sequences]))
        events = counts.tolist()
    event_N = torch.tensor(events, dtype=torch.float64)
    order_N = event_N.sort(descending=True, stable=True).indices
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), event_N[order_N].cumsum(0)])
    if subset.count > len(events):
        raise ValueError(f"got a part of {subset.count} {subset.axis}, expected at most the {len(events)} there are")
    window = sums[subset.count :] - sums[: -subset.count]
    others = interactions.num_items if of_users else interactions.num_users
    start = int(((1.0 - subset.sparsity) * subset.count * others - window).abs().argmin())
    taken = set(order_N[start : start + subset.count].tolist())
    if of_users:
        kept_users = [user for user in range(interactions.num_users) if user in taken]
        sequences = [list(interactions.sequences[user]) for user in kept_users]
        keys, titles = interactions.item_keys, interactions.titles
    else:
        number = {item: new for new, item in enumerate(sorted(taken))}
        shorter = [[number[item] for item in sequence if item in number] for sequence in interactions.sequences]
        kept_users = [user for user, sequence in enumerate(shorter) if len(sequence) >= MIN_EVENTS]
        sequences = [shorter[user] for user in kept_users]
        keys, titles = ([texts[item] for item in number] for texts in (interactions.item_keys, interactions.titles))
    users = [interactions.users[user] for user in kept_users]
    return Interactions(interactions.name, users, keys, titles, sequences, None, interactions.card)


# The numbers behind pictures.


def behind(settings: EmbeddingSettings, setup: Setup, state: RunState) -> dict[str, float]:
    """What Figures 5, 8 and 9 of FedEM and 7 of FedRAP show as pictures, of the last round."""
    local = state.local
    if settings.run.method == "fedrap" and COMMON in state.server:
        table_1ID = state.server[COMMON][None]
        return {f"share above {limit}": float(share_above(table_1ID, limit)) for limit in (0.1, 0.01)}
    if LAST not in local or ADAPTER not in local or "/" in settings.run.method:
        return {}
    if settings.run.method == "fedmf_em":
        return concentration(settings.method, setup, state)
    if settings.run.method == "fedem" and settings.method.variant == "paper" and settings.method.merging == "EM":
        return {**spread_of_rho(settings, setup, state), **spread_of_weights(settings, setup, state)}
    return {}


def rho_of(merging: Merging, setup: Setup, state: RunState, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C, I, D) own last and received tables of clients, and (C, I, 1) rho."""
    sent = setup.method.broadcast(state.round + 1, state.server, clients)
    received_CID = sent.per_client["item_table"] if sent.per_client else sent.shared["item_table"][None]
    last_CID = state.local[LAST][clients]
    received_CID = received_CID.expand_as(last_CID)
    feature_CIF = features(merging, last_CID, received_CID)
    return last_CID, received_CID, weights_of(merging, state.local[ADAPTER][clients], feature_CIF)


def concentration(merging: Merging, setup: Setup, state: RunState) -> dict[str, float]:
    """Spread of a user's train items over that of all items, mean over users, in the three tables."""
    ratios: dict[str, list[float]] = {"local table": [], "global table": [], "merged table": []}
    for block in setup.blocks:
        last_CID, received_CID, rho = rho_of(merging, setup, state, block.clients)
        tables = (last_CID, received_CID, torch.lerp(last_CID, received_CID, rho))
        for row, num in enumerate(block.data.num_train_C.tolist()):
            own = block.data.train_CT[row, :num]
            for name, table_CID in zip(ratios, tables, strict=True):
                ratios[name].append(float(spread(table_CID[row, own]) / spread(table_CID[row])))
    return {name: sum(values) / len(values) for name, values in ratios.items()}


def spread(row_ID: Tensor) -> Tensor:
    """Mean distance from the mean row."""
    return (row_ID - row_ID.mean(0)).norm(dim=1).mean()


def spread_of_rho(settings: EmbeddingSettings, setup: Setup, state: RunState) -> dict[str, float]:
    """Mean of rho over clients and items, and its standard deviations."""
    merging = settings.method.local_merging
    parts = [rho_of(merging, setup, state, block.clients)[2][:, :, 0] for block in setup.blocks]
    rho_NI = torch.cat(parts)
    return {
        "mean rho": float(rho_NI.mean()),
        "deviation between clients": float(rho_NI.mean(1).std()),
        "deviation between a client's items": float(rho_NI.std(1).mean()),
    }


def spread_of_weights(settings: EmbeddingSettings, setup: Setup, state: RunState) -> dict[str, float]:
    """Equation 13's weights of ten drawn clients for one another, from the tables that all uploaded last."""
    if settings.method.aggregation != "similarity":
        return {}
    table_NF = state.local[LAST].flatten(1)
    share_N = setup.population.num_train_N.double()
    distance_NN = squared_distances(table_NF - table_NF.mean(0))
    weight_NN = similarity_weights(share_N / share_N.sum(), distance_NN, settings.method.similarity_weight)
    drawn_V = torch.randperm(len(share_N), generator=stream(0, "clients of a picture"))[:10]
    weight_VV = weight_NN[drawn_V][:, drawn_V]
    own_V, others = weight_VV.diagonal(), ~torch.eye(len(drawn_V), dtype=torch.bool)
    between = torch.stack([weight_VV[others[:, v], v] for v in range(len(drawn_V))])
    return {
        "spread over receivers": float((between.std(1) / between.mean(1)).mean()),
        "own weight over others'": float((own_V / between.mean(1)).mean()),
    }


# The page.


def page(table: Table, rows: Sequence[Row], rounds: int, dataset: str = "ml-100k") -> list[str]:
    """The section without its heading and foot."""
    column = table.data.index(dataset) if dataset in table.data else None
    printed_says = "" if table.data else " Read off the figure: no value is given."
    body = [
        f"{' / '.join(table.shows)} on {dataset} under `{PROTOCOL}`, which leaks; the last round, seed 0.",
        *([f"{table.says}{printed_says}"] if table.says else []),
        "",
        f"| row | printed | here | rounds | gap of {table.shows[0]} | cause of a gap over 10 % |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        line, printed = row.line, row.line.printed[column] if column is not None and row.line.printed else ()
        cells = [line.label, numbers(printed) or "-"]
        if row.found is None or row.rounds <= TRIED < rounds:
            cost = "" if row.round_s is None else f", at most about {math.ceil(row.round_s * rounds / 60)} CPU minutes"
            body.append(f"| {' | '.join([*cells, f'not run{cost}', str(rounds), '', ''])} |")
            continue
        figures = [row.found.metrics[PROTOCOL][name] for name in table.shows]
        gap = figures[0] / printed[0] - 1.0 if printed else 0.0
        cause = cause_of(line, dataset, row.rounds) if abs(gap) > LARGE else ""
        cells += [numbers(figures), str(row.rounds), f"{gap:+.0%}" if printed else "", cause]
        body.append(f"| {' | '.join(cells)} |")
    return body


def numbers(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


def cause_of(line: Line, dataset: str, rounds: int) -> str:
    """What is known of a gap."""
    known = line.cause if dataset == "ml-100k" else ""
    short = "" if rounds >= 100 else f"{rounds} rounds in place of 100"
    return "; ".join(text for text in (known, short) if text) or "not known"


if __name__ == "__main__":
    sys.exit(run(main))
