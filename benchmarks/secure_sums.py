"""What a secure sum costs a client and the server: CPU seconds and bytes, with and without dropouts.

Run: python benchmarks/secure_sums.py
First a sum with the most dropouts has to be that of the survivors, bit for bit. Then every step is timed as CPU time of
this process, that of single clients on ``--timed`` of them (a busy machine slows nothing that is counted).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from fedecider.running.command import run

os.environ.setdefault("OMP_NUM_THREADS", "1")

import provenance
import torch

from fedecider.federation.secure_rounds import Simulated, protocol_bytes, simulated
from fedecider.federation.secure_sum import Bits, recovered, reveal, unmask


class Case(NamedTuple):
    """One sum."""

    name: str
    num_clients: int
    length: int
    num_neighbours: int | None = None
    bits: Bits = 64


CASES = [
    Case("adapters, K = 3", 3, 100_000),
    Case("adapters, K = 12", 12, 100_000),
    Case("large adapters, K = 12", 12, 5_000_000),
    Case("FedMF, ML-100K", 943, 1682 * 16 + 1, 16),
    Case("FedEASE, ML-100K", 943, 1682 * 1683 // 2, 16, 32),
]


COLUMNS = [
    "sum",
    "clients",
    "numbers",
    "bytes up, in the clear",
    "bytes up",
    "protocol alone, up",
    "protocol alone, down",
    "keys and shares, s",
    "masks, s",
    "server, s",
    "server with dropouts, s (how many)",
]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    found = work()
    return time.process_time() - started, found


def check(cohort: tuple[int, ...]) -> None:
    """With the most dropouts that a threshold of 0.6 bears."""
    parties = simulated(cohort, 0, "check", 1, num_neighbours=None)
    survivors = cohort[len(cohort) - parties.rules.least :]
    value_CL = torch.randint(-(2**40), 2**40, (len(cohort), 1000))
    total_L = sum(parties.send(client, value_CL[client]) for client in survivors)
    assert isinstance(total_L, torch.Tensor)
    assert torch.equal(parties.open(total_L, survivors), value_CL[list(survivors)].sum(0))


def measured(case: Case, num_timed: int) -> dict[str, Any]:
    cohort = tuple(range(case.num_clients))
    options = {"num_neighbours": case.num_neighbours, "bits": case.bits}
    ready_s, parties = timed(lambda: simulated(cohort, 0, case.name, 1, **options))
    asked = cohort[:num_timed]
    value_L = torch.randint(-1000, 1000, (case.length,))
    mask_s, _ = timed(lambda: [parties.send(client, value_L) for client in asked])
    away = len(cohort) // 10 or 1
    down, up = (sum(sizes.values()) for sizes in protocol_bytes(parties.rules, 0))
    return {
        "keys_s": ready_s / len(cohort),
        "mask_s": mask_s / len(asked),
        "open_s": opening(parties, cohort, value_L, num_timed),
        "open_away_s": opening(parties, cohort[away:], value_L, num_timed),
        "away": away,
        "plain": case.length * 4,
        "up": case.length * case.bits // 8 + up,
        "protocol": (down, up),
    }


def opening(parties: Simulated, survivors: tuple[int, ...], value_L: torch.Tensor, num_timed: int) -> float:
    """Seconds of the server: putting all secrets together, and taking off all masks.

    Of masks so many are timed as there are timed clients: they cost alike.
    """
    rules = parties.rules
    answers = [reveal(rules, parties.members[client], survivors)[0] for client in survivors]
    together_s, secrets = timed(lambda: recovered(rules, parties.keys, survivors, answers))
    total_L = value_L.to(torch.int32 if rules.bits == 32 else torch.int64)
    seeds = dict(list(secrets.seeds.items())[:num_timed])
    own_s, _ = timed(lambda: unmask(rules, parties.keys, secrets._replace(seeds=seeds, keys={}), total_L))
    seconds = together_s + own_s * len(secrets.seeds) / len(seeds)
    if secrets.keys:
        lost = dict(list(secrets.keys.items())[:1])
        none_s, _ = timed(lambda: unmask(rules, parties.keys, secrets._replace(keys={}), total_L[:0]))
        full_s, _ = timed(lambda: unmask(rules, parties.keys, secrets._replace(keys=lost), total_L[:0]))
        pairs = sum(other in secrets.seeds for client in lost for other in rules.neighbours[client])
        drawn_s = own_s / len(seeds)
        seconds += len(secrets.keys) * (full_s - none_s + pairs * drawn_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timed", type=int, default=5)
    num_timed = parser.parse_args().timed
    torch.set_num_threads(1)
    for count in (3, 12, 30):
        check(tuple(range(count)))
    print("\n".join(provenance.heading("secure_sums.py", 1)), f"\n- cryptography {version('cryptography')}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|---|{'---:|' * (len(COLUMNS) - 1)}")
    for case in CASES:
        one = measured(case, min(num_timed, case.num_clients))
        print(
            f"| {case.name} | {case.num_clients} | {case.length:,} | {one['plain']:,} | {one['up']:,} | "
            f"{one['protocol'][1]:,} | {one['protocol'][0]:,} | {one['keys_s']:.2g} | {one['mask_s']:.2g} | "
            f"{one['open_s']:.2g} | {one['open_away_s']:.2g} ({one['away']}) |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run(main))
