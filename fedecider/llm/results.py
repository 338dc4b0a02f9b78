"""What a finished run leaves behind: metrics with intervals, baselines, figures, bytes, and what is handed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.data.encoders import encoder_label
from fedecider.evaluation.metrics import MACRO, ranked_share
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.persons import shared_persons
from fedecider.evaluation.protocols import chance_hit, get_protocol, stamp
from fedecider.evaluation.statistics import Comparison, compare_table
from fedecider.federation.method import Block, FederatedMethod, Tree
from fedecider.federation.record import read_records, write_json, write_text
from fedecider.federation.rounds import evaluate
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.llm.alternatives import alternatives_notes
from fedecider.llm.baselines import COUNTS, TEACHER, UNTRAINED, Positions, counting_positions, zero_shot
from fedecider.llm.hand_over import hand_over
from fedecider.llm.loading import Shares, chosen_shares, load_reported
from fedecider.llm.memories import MEMORY_ROW, Memories, every_memory, memories_data, memory_rows, save_memories
from fedecider.llm.privacy import privacy_data, privacy_notes
from fedecider.llm.run_report import finish_report
from fedecider.llm.run_words import beside, switched_on
from fedecider.llm.setup import Foundation, Settings
from fedecider.lora.adapters import adapter_shapes, initial_adapters, num_scalars
from fedecider.memory.counts import Counts
from fedecider.methods import METHODS
from fedecider.methods.fusion_weights import FusionWeights
from fedecider.methods.own_rows import common_rows
from fedecider.methods.recommender import ClientModels
from fedecider.report.costs import WAYS, message_bytes, total_bytes
from fedecider.report.figures import alpha_curves, alpha_heat_map, save_figure, validation_curves
from fedecider.report.rows import COMPARED, ResultRow, comparisons_data, result_rows, rows_data, view_labels
from fedecider.report.tables import ResultTable, markdown_table, rich_table, shown_domains
from fedecider.running.launch import Launch
from fedecider.running.progress import console, say
from fedecider.running.run_folder import RunFolder
from idgen.ranking import ranks_all


def write_results(
    settings: Settings,
    method: FederatedMethod,
    blocks: Sequence[Block],
    recommender: ClientModels,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    launch: Launch,
) -> None:
    """Read the test set once, for the selected round, and write every file of the run folder but the record."""
    models = write_models(settings, method, blocks, recommender, foundation, state, folder, launch)
    if models is None:
        return
    _write_rounds(settings, method, recommender, state, folder, models.memories)
    say_results(settings, method, foundation, state, folder, models)
    texts = {name: ids.clients.texts for name, ids in foundation.ids.items() if ids.clients is not None}
    page = finish_report(folder, foundation.everyone, texts, models.examples, settings.run.encoder)
    if page is not None:
        say(f"report: {page}")
    write_table(settings, method, state, folder, models)  # last: a run whose table stands there is finished


class Models(NamedTuple):
    """What came of the models of a run's clients."""

    rows: list[ResultRow]
    """Of the test items, the reported row first."""
    examples: dict[str, Any]
    """Domain -> examples for the report page."""
    memories: Memories | None
    shares: Shares
    num_beams: int | None
    """None where every item was scored."""
    privacy: dict[str, Any]
    """What the run promises, see `privacy_data`."""


def write_models(
    settings: Settings,
    method: FederatedMethod,
    blocks: Sequence[Block],
    recommender: ClientModels,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    launch: Launch,
    others: Mapping[str, Counts] | None = None,
) -> Models | None:
    """Rank the test items of the clients in ``blocks``, which ``foundation.domains`` are, and hand their models over.

    None in a process that does not write. ``others``: see `fedecider.llm.memories.client_counts`.
    """
    names = [recommender.names[client] for client in sorted(torch.cat([block.clients for block in blocks]).tolist())]
    methods, valid_methods = (
        {
            label: dict(zip(names, _evaluate(method, blocks, state, view, split, launch), strict=True))
            for view, label in view_labels(method.name, method.views).items()
        }
        for split in ("test", "valid")
    )
    if not launch.is_main:
        return None
    recommender = recommender.by_itself()
    shares = chosen_shares(settings, method, recommender, state, foundation.domains)
    reported = view_labels(method.name, method.views)[method.views[0]]
    for split, found in (("test", methods), ("valid", valid_methods)):
        for name in names:
            client = recommender.names.index(name)
            if shares[name] != 1.0:
                load_reported(settings, method, recommender, state, client, shares[name])
                found[reported][name] = recommender.positions(client, split)
    memories = None
    if settings.run.memory.kind != "none":
        every = every_memory(settings, method, foundation, recommender, state, shares, others)
        memories = every[MEMORY_ROW]
        save_memories(memories, foundation.domains, folder)
        for row, one in every.items():
            asked = (settings, method, recommender, state, one, shares)
            methods |= memory_rows(*asked, "test", row)
            valid_methods |= memory_rows(*asked, "valid", row)
    models = {**methods, **zero_shot(settings, foundation, recommender, launch.device)}
    counts = counting_positions(settings, foundation)
    users = {name: domain.clients.users for name, domain in foundation.domains.items()}
    rows = result_rows(models, counts, shared_persons(users))
    valid_rows = result_rows(valid_methods, counting_positions(settings, foundation, "valid"))
    promised = privacy_data(settings, recommender.num_clients)
    handed = (settings, method, recommender, foundation, state, folder, rows, shares, promised)
    examples, truncated = hand_over(*handed)
    tests = paired_tests(method.name, reported, {**models, **counts}, users)
    num_beams = None if all(ranks_all(task.trie) for task in recommender.tasks) else settings.ranking.num_beams
    made = Models(rows, examples, memories, shares, num_beams, promised)
    _write_metrics(settings, method, foundation, state, folder, made, valid_rows, models, truncated, tests)
    records = (
        UserPositions(name, users[name], "test", label, state.best_round, position_U)
        for label, positions in {**models, **counts}.items()
        for name, position_U in positions.items()
    )
    write_per_user(folder.per_user, records)
    return made


def paired_tests(
    method: str, reported: str, positions: Mapping[str, Positions], users: Mapping[str, Sequence[str]]
) -> list[Comparison]:
    """The recommender that is handed over against every simple rule and what stands beside it, mean over domains.

    ``positions``: row -> domain -> (U,) test positions. Holm's correction is over all of them.
    """
    subject = switched_on(method, reported, positions)
    others = [label for label in (*UNTRAINED, *beside(reported)) if label in positions and label != subject]
    pairs = [(subject, other) for other in others]
    persons = shared_persons(users)
    return compare_table(positions, stream(0, "comparisons"), COMPARED, pairs, persons=persons, each_domain=False)


def say_results(
    settings: Settings,
    method: FederatedMethod,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    models: Models,
) -> None:
    """Print the table, and where the adapters lie."""
    table, rows = _table(settings, method, state, folder, models), models.rows
    shown = table._replace(
        rows=printed_rows(rows), notes=[*table.notes, f"all rows, and every domain: {folder.results}"]
    )
    console.print(rich_table(shown, title=f"Test results of {folder.root.name}, round {state.best_round}"))
    for name in foundation.domains:
        say(f"adapter: {folder.adapters / name}")


def write_table(
    settings: Settings, method: FederatedMethod, state: RunState, folder: RunFolder, models: Models
) -> None:
    """``results.md``, all rows and domains."""
    table = _table(settings, method, state, folder, models)
    write_text(folder.results, markdown_table(table, title=f"Test, round {state.best_round}"))


def _table(
    settings: Settings, method: FederatedMethod, state: RunState, folder: RunFolder, models: Models
) -> ResultTable:
    notes = _notes(settings, method, state, folder, models)
    return ResultTable(models.rows, get_protocol(settings.run.protocol), notes)


def printed_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """At most eight rows for a terminal, in their order, with the macro mean alone where there are several domains.

    Of the counting rows the one with the best ndcg@10 stands for all; the method's other views and the teacher are
    left out.
    """
    scope = shown_domains(rows)[-1]
    counts = [row for row in rows if row.label in COUNTS]
    best = max(counts, key=lambda row: row.values[scope]["ndcg@10"].mean)
    views = f"{rows[0].label.partition(' (')[0]} ("
    others = {row.label for row in rows[1:] if row.label.startswith(views)} | {*COUNTS, TEACHER} - {best.label}
    kept = {scope, MACRO}
    return [
        row._replace(values={domain: values for domain, values in row.values.items() if domain in kept})
        for row in rows
        if row.label not in others
    ]


def _evaluate(
    method: FederatedMethod, blocks: Sequence[Block], state: RunState, view: str, split: str, launch: Launch
) -> list[Tensor]:
    server, local = state.best_server, state.best_local
    return evaluate(method, state.best_round, view, split, server, local, blocks, launch.processes)


def _write_metrics(
    settings: Settings,
    method: FederatedMethod,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    made: Models,
    valid_rows: Sequence[ResultRow],
    models: Mapping[str, Positions],
    truncated: Mapping[str, dict[str, Any]],
    tests: Sequence[Comparison],
) -> None:
    protocol = get_protocol(settings.run.protocol)
    content: dict[str, Any] = {
        "protocol": protocol.name,
        "stamp": stamp(protocol),
        "method": method.name,
        "reported": made.rows[0].label,
        "best_round": state.best_round,
        "best_valid_ndcg@10": state.best_score,
        "num_beams": made.num_beams,
        "length_penalty": settings.ranking.length_penalty,
        "text_encoder": encoder_label(settings.run.pretrain.text_encoder),
        "domains": {},
    }
    for name, domain in foundation.domains.items():
        sequences = domain.clients.sequences
        content["domains"][name] = {
            "num_users": len(sequences),
            "num_items": len(domain.item_keys),
            "chance_hit@10": chance_hit(sequences, len(domain.item_keys), "test", protocol),
            "returned_share": {label: ranked_share(positions[name]) for label, positions in models.items()},
            "valid": rows_data(valid_rows, name),
            "test": rows_data(made.rows, name),
        }
        if name in truncated:
            content["domains"][name]["export"] = truncated[name]
    if settings.run.share_grid != [1.0]:
        content["update_shares"] = dict(made.shares)
    if made.privacy:
        content["privacy"] = made.privacy
    if made.memories is not None:
        content["memory"] = memories_data(made.memories)
    if len(foundation.domains) > 1:
        content[MACRO] = {"test": rows_data(made.rows, MACRO)}
    content["comparisons"] = comparisons_data(tests)
    write_json(folder.metrics, content)


def _write_rounds(
    settings: Settings,
    method: FederatedMethod,
    recommender: ClientModels,
    state: RunState,
    folder: RunFolder,
    memories: Memories | None,
) -> None:
    """Fusion weights (where the method has them), traffic and the figures over all rounds."""
    records, names = read_records(folder.rounds), list(recommender.names)
    rounds = [record["round"] for record in records]
    figures = folder.root / "figures"
    figures.mkdir(exist_ok=True)
    scores = {
        view: {
            name: [record["valid"][view][client]["ndcg@10"] for record in records] for client, name in enumerate(names)
        }
        for view in method.views
    }
    save_figure(validation_curves(scores, rounds, selected_round=state.best_round), figures / "validation")
    fusion = METHODS[settings.run.method].fusion_weights
    if fusion is not None:
        weights = fusion_over_rounds(fusion, method.init()[1], records)
        shown = (weights["alpha"], rounds, names, state.best_round)
        save_figure(alpha_heat_map(*shown), figures / "alpha_heat_map")
        save_figure(alpha_curves(*shown), figures / "alpha_curves")
        content: dict[str, Any] = {"domains": names, "rounds": rounds, "alpha": weights.pop("alpha")}
        if weights:
            content["modules"] = list(adapter_shapes(recommender.model))
        write_json(folder.fusion_weights, {**content, **weights})
    traffic = communication(records, names, recommender)
    if memories is not None:
        traffic["memory"] = memories.traffic
    write_json(folder.communication, traffic)


def fusion_over_rounds(fusion: FusionWeights, local: Tree, records: Sequence[dict]) -> dict[str, Tensor]:
    """``alpha`` (R, K, K) after every round, from the local state at the start on; per layer ``alpha_modules`` too.

    The latter are (R, K, M, K), ``alpha`` then their means.
    """
    start = fusion.read(local)
    if start.dim() == 2:
        return {"alpha": weights_over_rounds(records, start, fusion.log)}
    return {
        "alpha": weights_over_rounds(records, start.mean(1), fusion.log),
        "alpha_modules": weights_over_rounds(records, start, fusion.log_per_layer),
    }


def weights_over_rounds(records: Sequence[dict], start_KK: Tensor, field: str) -> Tensor:
    """What clients logged under ``field`` after every round, (R, K, K), or (R, K, M, K) with weights per layer.

    A client that was absent keeps what it had.
    """
    current_KK, over_rounds = start_KK.clone(), []
    for record in records:
        for client in record["clients"]:
            current_KK[client["client"]] = torch.tensor(client[field])
        over_rounds.append(current_KK.clone())
    return torch.stack(over_rounds)


def communication(records: Sequence[dict], names: Sequence[str], recommender: ClientModels) -> dict[str, Any]:
    """Bytes per round, client and direction, with the payload of every tensor; P scalars make one adapter."""
    per_round = []
    for record in records:
        clients = {}
        for group in record["traffic"]:
            sizes = {way: message_bytes(group, way) for way in WAYS}
            clients.update({names[client]: sizes for client in group["clients"]})
        per_round.append({"round": record["round"], "clients": clients})
    return {
        "unit": "bytes of one safetensors message per client, round and direction",
        "adapter_scalars": num_scalars(initial_adapters(adapter_shapes(recommender.model), 0)),
        "common_rows": common_rows(recommender.own_rows),
        "total": total_bytes(records),
        "rounds": per_round,
        "tensors": {str(record["round"]): record["traffic"] for record in (records[0], records[-1])},
    }


def _notes(
    settings: Settings, method: FederatedMethod, state: RunState, folder: RunFolder, models: Models
) -> list[str]:
    taken = ", ".join(f"{name} {share:g}" for name, share in models.shares.items())
    choices = {} if models.memories is None else models.memories.choices
    sides = ", ".join(f"{name} {one.weights}" for name, one in choices.items())
    return [
        f"round {state.best_round} of {state.round} has the best validation ndcg@10 "
        f"({state.best_score:.4f}) of {method.views[0]}",
        *alternatives_notes(folder),
        "every item is scored, as its ID is one token"
        if models.num_beams is None
        else f"beam search with {models.num_beams} beams, length penalty {settings.ranking.length_penalty}",
        *([f"share of the trained update, by validation items: {taken}"] if settings.run.share_grid != [1.0] else []),
        *([f"with memory, by validation items: {sides}"] if sides else []),
        f"text neighbours: item texts as vectors of {encoder_label(settings.run.pretrain.text_encoder)}",
        *privacy_notes(models.privacy),
    ]
