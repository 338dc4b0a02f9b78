"""Two companies without a customer or an item in common, whose item texts are of one kind: what PFCR gives them.

    python benchmarks/shared_texts.py --data data/beauty --work runs/shared_texts

The case is the best that there is for texts in common: the goods of one catalogue are dealt at random to two companies,
and each customer to one of them (a third of the customers is left out). Items have 3 events and more, customers 5. All
rows have the same small sizes and no other setting is tried. A stopped command goes on: runs are kept in --work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired_rows import table
from provenance import heading
from speed import put_section
from torch import Tensor
from torch.nn import functional

from fedecider.baselines.counts import TEXT, TEXT_AND_COUNTS, heuristic_positions, text_votes
from fedecider.comparison.cells import KeptCell, kept_cell
from fedecider.comparison.compare import Shared
from fedecider.cross_silo.sasrec_entries import SASREC, SASREC_TEXT, sasrec
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.filtering import k_core
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.data.store import load_domains
from fedecider.id_based import pfcr
from fedecider.id_based.run import IdRunConfig, IdSettings, train_rounds
from fedecider.models.item_texts import encoded_texts
from fedecider.running.command import run
from fedecider.running.plain import as_plain

PAGE = Path(__file__).with_name("results") / "id_methods.md"
TITLE = "Texts in common"
NUM_SIDES, MIN_ITEM, MIN_USER = 3, 3, 5
NUM_ROUNDS, FEDERATED_ROUNDS = 20, 14
SIZES = {"max_length": 10, "embedding_size": 32, "num_layers": 1}
ALONE, CODES, ALL = "PFCR alone", "PFCR codes shared", "PFCR codes and layers shared"
SHARES = {ALONE: "nothing", CODES: "codes", ALL: "all"}
TRAINED = (ALONE, CODES, SASREC, ALL, SASREC_TEXT)
SEEDS = 3
OPENING = """In this small case, averaging vectors of text codes (PFCR) between two companies with other goods did
harm: even with texts of one kind, lists were significantly worse than those of PFCR at each company
alone. SASRec at each company alone and text neighbours + counts, which need no federation, were
significantly better than PFCR with codes shared. No setting was searched, and training was short
(below), so this says little of other sizes."""
LIMITS = """PFCR is small here (width 32, one block), no setting was searched, and headroom was not measured. With codes
shared the last round was the best on validation for every seed: longer training may close a part of the gap."""
FFMSR = """FFMSR (arXiv 2503.23026) is not built: in its public code a company sends, for each item, the
attention-weighted mean of three layers' vectors of its text. With one vector per text that mean is the text vector
itself, whatever was bought, so the server's clusters would carry nothing of purchases."""
TASTE = """A text bi-encoder like TASTE is not built: two training steps of one of MiniLM's size (22.7 million
parameters; 8 histories of at most 512 tokens, the other targets of the batch as negatives) took 12.2 and 11.4 CPU
seconds on one core of a busy machine, about 1.5 s a history, so one epoch of Beauty would take about 9 CPU hours with
one target a customer (22,363) and 54 with all (131,413). The cheap variants are rows above: both `PFCR alone` and
`sasrec + text start` read frozen MiniLM vectors."""
Positions = dict[str, Tensor]
"""Company -> (S, U) places of the test items."""


def company(domain: Domain, name: str, user_N: np.ndarray, sold_I: np.ndarray) -> Domain:
    """What some customers of a domain bought of some of its items, to the k-core."""
    events = domain.clients.take(user_N).arrays().sequences
    events = events.keep(sold_I[events.value_E])
    events = events.keep(k_core(events.row_E, events.value_E, MIN_USER, MIN_ITEM))
    kept_I = np.unique(events.value_E)
    clients = Events([domain.clients.users[user] for user in user_N], events, None).renumbered(numbers(domain, kept_I))
    return Domain(name, domain.items.part(name, kept_I.tolist()), clients, NO_EVENTS, {})


def numbers(domain: Domain, kept_I: np.ndarray) -> np.ndarray:
    """(I,) int64: the new numbers of the items of a domain of which some are kept, -1 of all others."""
    number_I = np.full(len(domain.item_keys), -1)
    number_I[kept_I] = np.arange(len(kept_I))
    return number_I


def halves(domain: Domain) -> dict[str, Domain]:
    """Two companies with one half each of the goods and of the customers."""
    draw = np.random.default_rng(0)
    side_I, side_U = (
        draw.permutation(len(domain.item_keys)) % 2,
        draw.integers(NUM_SIDES, size=len(domain.clients.users)),
    )
    names = [f"{domain.name}_{side}" for side in (0, 1)]
    return {
        name: company(domain, name, np.flatnonzero(side_U == side), side_I == side) for side, name in enumerate(names)
    }


def pfcr_cell(domains: Mapping[str, Domain], cache: Path, setting: Mapping[str, Any], seed: int) -> KeptCell:
    """A run, kept."""
    settings = IdSettings(
        IdRunConfig(method="pfcr", protocol="strict", num_rounds=NUM_ROUNDS, seed=seed), pfcr.PfcrConfig(**setting)
    )
    hashes = [domain.content_hash() for domain in domains.values()]

    def trained(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        done = train_rounds(settings, domains, torch.device("cpu"))
        info = {"valid": done.state.best_score, "best_round": done.state.best_round}
        return info, next(iter(done.positions("test").values()))

    inputs = {"settings": as_plain(settings.as_record()), "data": hashes}
    return kept_cell(cache, "pfcr", inputs, trained, f"pfcr {dict(setting)}, seed {seed}")


def rows_of(domains: Mapping[str, Domain], cache: Path, names: Sequence[str]) -> tuple[dict[str, Positions], list[str]]:
    """The rows that are named, both rows of texts, and a line for each one that is trained."""
    pfcr.encoded = lambda encoder, texts: kept_vectors(domains, cache)  # type: ignore[assignment]
    shared, rows, lines = Shared(domains, "strict", 1, cache, "cpu"), {}, []
    for row in names:
        places, valid = [], []
        for seed in range(SEEDS):
            if row in SHARES:
                setting = {**SIZES, "federated_rounds": FEDERATED_ROUNDS, "share": SHARES[row]}
                kept = pfcr_cell(domains, cache, setting, seed)
                places.append(kept.positions())
                valid.append(f"{kept.info['valid']:.4f} in round {kept.info['best_round']}")
            else:
                cell = sasrec(shared, "auto" if row == SASREC_TEXT else None).run(dict(SIZES), seed)
                places.append(cell.positions()["strict"][row])
                valid.append(f"{cell.valid[row]:.4f}")
        rows[row] = {name: torch.stack([one[name] for one in places]) for name in domains}
        lines.append(f"- {row}: validation ndcg@10 of the seeds {', '.join(valid)}.")
    return {**rows, **text_rows(domains, cache)}, lines


def kept_vectors(domains: Mapping[str, Domain], cache: Path) -> Tensor:
    """(R, E): the vectors that rows of texts read as well, encoded once for all runs."""
    return functional.normalize(torch.cat(list(encoded_texts(domains, "auto", str(cache)).values())).double(), dim=1)


def text_rows(domains: Mapping[str, Domain], cache: Path) -> dict[str, Positions]:
    """Both rows of text neighbours, which have no seed."""
    encoded, rows = encoded_texts(domains, "auto", str(cache)), {TEXT: {}, TEXT_AND_COUNTS: {}}
    for name, domain in domains.items():
        votes = text_votes(nearest_texts(unit_vectors(encoded[name].numpy())))
        places = heuristic_positions(domain.clients.sequences, len(domain.item_keys), ["test"], votes)["test"]
        for row in rows:
            rows[row][name] = places[row].expand(SEEDS, -1)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/beauty"), help="prepared data of one domain")
    parser.add_argument("--work", type=Path, default=Path("runs/shared_texts"), help="runs and vectors are kept there")
    parser.add_argument("--rows", default=",".join(TRAINED), help="rows that are trained, separated by commas")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page whose section is replaced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    first_lines = heading("shared_texts.py", 1)
    (domain,) = load_domains(args.data).values()
    domains = halves(domain)
    rows, chosen = rows_of(domains, args.work, args.rows.split(","))
    sizes = "; ".join(
        f"{name} {len(one.clients.users):,} customers, {len(one.item_keys):,} items, {one.clients.num_events:,} events"
        for name, one in domains.items()
    )
    users = {name: one.clients.users for name, one in domains.items()}
    body = [OPENING, "", f"{sizes}. Test items, leave last out, {SEEDS} seeds, no setting searched.", ""]
    body += [
        *table(rows, users, [row for row in (CODES, ALL) if row in rows]),
        "",
        *chosen,
        "",
        LIMITS,
        "",
        TASTE,
        "",
        *first_lines,
    ]
    put_section(args.output, TITLE, "\n".join(body).strip())
    print("\n".join(body))


if __name__ == "__main__":
    sys.exit(run(main))
