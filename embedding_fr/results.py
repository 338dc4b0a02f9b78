"""What came of a run of the cross-device track: figures with intervals, canary, groups of users and items, bytes.

Shape legend: R rounds, U users (= clients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from embedding_fr.methods import METHODS
from embedding_fr.page import SIMPLE, run_page
from embedding_fr.setup import EmbeddingSettings, Setup, user_positions
from fedecider.baselines.counts import popularity
from fedecider.data.interactions import Interactions
from fedecider.engine.finish import finish, per_user_records
from fedecider.engine.result import RunResult
from fedecider.evaluation.canary import Draws, memoriser
from fedecider.evaluation.protocols import Protocol, chance_hit, few_candidates, get_protocol, stamp
from fedecider.evaluation.statistics import compare_table
from fedecider.federation.cohort import hidden_share
from fedecider.federation.privacy import privacy_report
from fedecider.federation.record import capped_clients, non_finite_uploads, read_records, sum_notes, upload_notes
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.report import costs, groups
from fedecider.report.tables import CANARY, COMPARED, comparisons_data, result_rows, rows_data, variant_labels
from fedecider.running.launch import Launch
from fedecider.running.run_folder import RunFolder, read_run

MANY_TIES = 0.1
"""Share of neighbouring events at the same time from which on a method that uses order says so."""
LAST = ", last round"
Positions = dict[str, Tensor]
"""Entry -> (U,) positions."""


def write_results(
    settings: EmbeddingSettings,
    setup: Setup,
    interactions: Interactions,
    state: RunState,
    folder: RunFolder,
    launch: Launch,
) -> None:
    """Read the test set once, for the round that the protocol reports, and write every file but the record."""
    methods = {split: method_positions(settings, setup, state, split, launch) for split in ("test", "valid")}
    if not launch.is_main:
        return
    record, records = read_run(folder.root), read_records(folder.rounds)
    result = evaluate(settings, setup, interactions, state, methods, record, records)
    title = f"Test of {setup.method.name} on {interactions.name}"
    finish(result, folder, title, _notes(settings, interactions, result, setup.method.variants[0]), run_page)


def evaluate(
    settings: EmbeddingSettings,
    setup: Setup,
    interactions: Interactions,
    state: RunState,
    methods: Mapping[str, Positions],
    record: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> RunResult:
    """What came of the run; ``methods``: split -> positions under every variant of the method."""
    name, protocol = interactions.name, get_protocol(settings.run.protocol)
    rows = {}
    test: Positions = {}
    for split, positions in methods.items():
        baselines = baseline_positions(settings, setup, interactions, split, protocol)
        rows[split] = result_rows(_of_client(name, positions), _of_client(name, baselines))
        test = {**positions, **baselines} if split == "test" else test
    reported, per_client = rows["test"][0].label, _of_client(name, test)
    canary = rows_data(rows["test"], name)[CANARY]["hit@10"]["mean"]
    tests = compare_table(per_client, COMPARED, [(reported, simple) for simple in SIMPLE])
    metrics: dict[str, Any] = {
        "protocol": protocol.name,
        "stamp": stamp(protocol, canary),
        "method": setup.method.name,
        "dataset": name,
        "num_users": interactions.num_users,
        "num_items": interactions.num_items,
        "chance_hit@10": chance_hit(interactions.sequences, interactions.num_items, "test", protocol),
        "reported": reported,
        "best_round": state.best_round,
        "last_round": state.round,
        "best_valid_ndcg@10": state.best_score,
        "num_eval_users": sum(len(block.clients) for block in setup.validated),
        "privacy": privacy_text(settings, interactions.num_users),
        "test": rows_data(rows["test"], name),
        "activity": groups.activity_table({name: interactions}, per_client)["domains"][name],
        "popularity": groups.popularity_table({name: interactions}, per_client)[name],
        "valid": rows_data(rows["valid"], name),
        "round_seconds": costs.median_seconds(records),
        "bytes": costs.total_bytes(records),
        "non_finite_uploads": non_finite_uploads(records),
        "capped_clients": capped_clients(records),
        "comparisons": comparisons_data(tests),
    }

    def round_of(entry: str) -> int:
        return state.round if entry.endswith(LAST) else state.best_round

    users = list(per_user_records(per_client, {name: interactions.users}, round_of))
    return RunResult(record, metrics, records, records, lambda: users)


def _of_client(name: str, positions: Positions) -> dict[str, dict[str, Tensor]]:
    return {entry: {name: position_U} for entry, position_U in positions.items()}


def method_positions(
    settings: EmbeddingSettings, setup: Setup, state: RunState, split: str, launch: Launch
) -> Positions:
    """Every variant under the round that the protocol reports; where that is the last one, the best round beside it."""
    found: Positions = {}
    for variant, name in variant_labels(setup.method.name, setup.method.variants).items():
        label = name
        if get_protocol(settings.run.protocol).selection == "last":
            last = user_positions(setup, state, variant, split, last=True, processes=launch.processes)
            found[f"{name}{LAST}"] = last
            label = f"{name}, best validation round"
        found[label] = user_positions(setup, state, variant, split, processes=launch.processes)
    return found


def baseline_positions(
    settings: EmbeddingSettings, setup: Setup, interactions: Interactions, split: str, protocol: Protocol
) -> Positions:
    """Popularity and the memoriser, which saw as many rounds and negatives as the method; same candidates."""
    sequences, num_items = interactions.sequences, interactions.num_items
    candidates = {name: tensor.cpu() for name, tensor in setup.population.candidates.items()} or None
    return {
        "popularity": popularity(sequences, num_items, split, protocol, candidates=candidates),
        CANARY: memoriser(
            sequences,
            num_items,
            split,
            protocol,
            generator=stream(settings.run.seed, CANARY),
            draws=Draws(settings.run.num_rounds, settings.training.num_negatives),
            candidates=candidates,
        ),
    }


def privacy_text(settings: EmbeddingSettings, num_clients: int) -> str:
    """What is guaranteed about one client's uploads over the run."""
    if not settings.run.federation:
        return "nothing leaves a client"
    entry = METHODS[settings.run.method]
    if entry.guarantee is not None:
        return entry.guarantee(settings.method)
    seen = entry.chooses_cohort(settings.method) or settings.run.secure_sum
    share = hidden_share(num_clients, settings.run.participation, seen)
    num_rounds = min(settings.run.num_rounds, entry.upload_rounds or settings.run.num_rounds)
    report = privacy_report(settings.privacy, num_rounds, share)
    return f"{report}; the server sees sums of the uploads alone" if settings.run.secure_sum else report


def order_warning(method: str, interactions: Interactions) -> list[str]:
    """What a reader must know where ``method`` uses an order of events that the data do not give."""
    if not METHODS[method].uses_order or interactions.card["order"] == "the source's own order":
        return []
    tied = interactions.card["tied_neighbours_share"]
    if tied is None:
        return [f"warning: the data have no times; events are in the order of the file, and {method} uses order"]
    if tied < MANY_TIES:
        return []
    return [
        f"warning: {tied:.0%} of neighbouring events of a user have the same time; their order is the file's, and "
        f"{method} uses order"
    ]


def _notes(settings: EmbeddingSettings, interactions: Interactions, result: RunResult, selected_by: str) -> list[str]:
    """What must be said under the table; ``selected_by``: the variant by which rounds are chosen."""
    metrics, run = result.metrics, settings.run
    time, size, clients = metrics["round_seconds"], metrics["bytes"], costs.participations(result.rounds)
    federation = [] if run.federation else ["federation is off: every client trained alone"]
    if metrics["num_eval_users"] < metrics["num_users"]:
        federation.append(f"rounds are chosen by {metrics['num_eval_users']:,} users, drawn once; the test takes all")
    if run.eval_every > 1:
        federation.append(f"every {run.eval_every} rounds are validated, and the last one")
    return [
        *order_warning(run.method, interactions),
        *few_candidates({interactions.name: metrics["chance_hit@10"]}),
        *federation,
        *upload_notes(result.rounds),
        *sum_notes(run.secure_sum, settings.privacy.clips),
        f"round {result.best_round} of {metrics['last_round']} has the best validation ndcg@10 "
        f"({metrics['best_valid_ndcg@10']:.4f}) of {selected_by}",
        f"{time['wall_s']:.2f} s a round (median), {time['evaluate_s']:.2f} s for its validation; per client and round "
        f"{size['up'] // clients:,} bytes up, {size['down'] // clients:,} down",
        f"privacy: {metrics['privacy']}",
    ]
