"""What a finished run leaves behind: metrics with intervals, reference lines, figures, adapters, bytes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedecider.baselines.counts import decayed_cooccurrence, last_item_cooccurrence, popularity
from fedecider.evaluation.canary import memoriser
from fedecider.evaluation.metrics import mean_metrics, ranked_share
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import chance_hit, get_protocol, stamp
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.record import read_records, write_json, write_text
from fedecider.federation.rounds import evaluate
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.llm.examples import decode_examples
from fedecider.llm.handover import write_manifest
from fedecider.llm.prompt_layout import prompt_layout
from fedecider.llm.run_report import finish_report
from fedecider.llm.setup import Foundation, Settings
from fedecider.lora.adapters import adapter_shapes, initial_adapters, num_scalars
from fedecider.lora.card import LOCAL_BACKBONE, Card
from fedecider.lora.export import ItemTable, export_adapter
from fedecider.lora.fusion import load_plain
from fedecider.lora.truncation import Truncated, truncate_loaded
from fedecider.methods import METHODS
from fedecider.methods.recommender import Recommender
from fedecider.report.figures import alpha_curves, alpha_heat_map, save_figure, validation_curves
from fedecider.report.tables import ResultRow, ResultTable, markdown_table, result_row, rich_table
from fedecider.running.launch import Launch
from fedecider.running.progress import console
from fedecider.running.run_folder import RunFolder
from idgen.backbone import load_backbone
from idgen.ranking import rank_task
from idgen.samples import train_batches

Positions = dict[str, Tensor]
"""domain -> (U,) positions of the held-out items."""

TEACHER, STUDENT = "zero-shot teacher", "zero-shot student"


def write_results(
    settings: Settings,
    method: FederatedMethod,
    blocks: Sequence[Block],
    recommender: Recommender,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    launch: Launch,
) -> None:
    """Read the test set once, for the selected round, and write every file of the run folder but the record."""
    lines, valid_lines = (
        {
            label: dict(zip(recommender.names, _evaluate(method, blocks, state, view, split, launch), strict=True))
            for view, label in view_labels(method).items()
        }
        for split in ("test", "valid")
    )
    if not launch.is_main:
        return
    lines[TEACHER], lines[STUDENT] = zero_shot(settings, foundation, recommender, launch.device)
    references = reference_lines(settings, foundation)
    rows = _rows(lines, references)
    valid_rows = _rows(valid_lines, reference_lines(settings, foundation, "valid"))
    examples, truncated = _export(settings, method, recommender, foundation, state, folder, rows[0])
    _write_metrics(settings, method, foundation, state, folder, rows, valid_rows, lines, truncated)
    users = {name: domain.clients.users for name, domain in foundation.domains.items()}
    records = (
        UserPositions(name, users[name], "test", label, state.best_round, position_U)
        for label, positions in {**lines, **references}.items()
        for name, position_U in positions.items()
    )
    write_per_user(folder.per_user, records)
    _write_rounds(method, recommender, state, folder)
    table = ResultTable(rows, get_protocol(settings.run.protocol), _notes(settings, method, state))
    console.print(rich_table(table, title=f"Test results of {folder.root.name}, round {state.best_round}"))
    for name in recommender.names:
        console.print(f"adapter: {folder.adapters / name}", highlight=False, soft_wrap=True)
    texts = {name: ids.clients.texts for name, ids in foundation.ids.items() if ids.clients is not None}
    page = finish_report(folder, foundation.domains, texts, examples, settings.run.encoder)
    if page is not None:
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    text = markdown_table(table, title=f"Test, round {state.best_round}")
    write_text(folder.results, text)  # last: a run whose table stands there is finished


def view_labels(method: FederatedMethod) -> dict[str, str]:
    """View -> how its line is called."""
    return {view: f"{method.name} ({view})" if len(method.views) > 1 else method.name for view in method.views}


def _evaluate(
    method: FederatedMethod, blocks: Sequence[Block], state: RunState, view: str, split: str, launch: Launch
) -> list[Tensor]:
    server, local = state.best_server, state.best_local
    return evaluate(method, state.best_round, view, split, server, local, blocks, launch.processes)


def _rows(lines: Mapping[str, Positions], references: Mapping[str, Positions]) -> list[ResultRow]:
    rows = [result_row(label, positions, stream(0, "bootstrap")) for label, positions in lines.items()]
    for label, positions in references.items():
        kind = "canary" if label == "memoriser" else "baseline"
        rows.append(result_row(label, positions, stream(0, "bootstrap"), kind))
    return rows


def zero_shot(
    settings: Settings, foundation: Foundation, recommender: Recommender, device: torch.device
) -> tuple[Positions, Positions]:
    """Test positions of the full-depth backbone and of the shared student, both without any adapter."""
    load_plain(recommender.model, initial_adapters(adapter_shapes(recommender.model), recommender.seed))
    student = {name: recommender.positions(client, "test") for client, name in enumerate(recommender.names)}
    teacher = load_backbone(foundation.pretrained.folder / "backbone", recommender.tokenizer)
    teacher.to(device)  # type: ignore[arg-type]
    drop_seen, precision = get_protocol(settings.run.protocol).drop_seen, settings.training.precision
    ranking = settings.ranking
    return {
        task.name: rank_task(teacher, task, task.trie.to(device), "test", None, ranking, drop_seen, precision, device)
        for task in recommender.tasks
    }, student


def reference_lines(settings: Settings, foundation: Foundation, split: str = "test") -> dict[str, Positions]:
    """Popularity, co-occurrence (both from public pool and the clients' train parts of the domain) and the canary."""
    protocol = get_protocol(settings.run.protocol)
    lines: dict[str, Positions] = {
        "popularity": {},
        "last-item co-occurrence": {},
        "decayed co-occurrence": {},
        "memoriser": {},
    }
    for name, domain in foundation.domains.items():
        sequences, num_items, extra = domain.clients.sequences, len(domain.item_keys), domain.public.sequences
        lines["popularity"][name] = popularity(sequences, num_items, split, protocol, extra=extra)
        lines["last-item co-occurrence"][name] = last_item_cooccurrence(
            sequences, num_items, split, protocol, extra=extra
        )
        lines["decayed co-occurrence"][name] = decayed_cooccurrence(sequences, num_items, split, protocol, extra=extra)
        generator = stream(settings.run.seed, "memoriser", name)
        lines["memoriser"][name] = memoriser(sequences, num_items, split, protocol, generator=generator)
    return lines


def _write_metrics(
    settings: Settings,
    method: FederatedMethod,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    rows: Sequence[ResultRow],
    valid_rows: Sequence[ResultRow],
    lines: Mapping[str, Positions],
    truncated: Mapping[str, dict[str, Any]],
) -> None:
    protocol = get_protocol(settings.run.protocol)
    content: dict[str, Any] = {
        "protocol": protocol.name,
        "stamp": stamp(protocol),
        "method": method.name,
        "reported": rows[0].label,
        "best_round": state.best_round,
        "best_valid_ndcg@10": state.best_score,
        "num_beams": settings.ranking.num_beams,
        "length_penalty": settings.ranking.length_penalty,
        "domains": {},
    }
    for name, domain in foundation.domains.items():
        sequences = domain.clients.sequences
        content["domains"][name] = {
            "num_users": len(sequences),
            "num_items": len(domain.item_keys),
            "chance_hit@10": chance_hit(sequences, len(domain.item_keys), "test", protocol),
            "returned_share": {label: ranked_share(positions[name]) for label, positions in lines.items()},
            "valid": {row.label: _plain_row(row, name) for row in valid_rows},
            "test": {row.label: _plain_row(row, name) for row in rows},
        }
        if name in truncated:
            content["domains"][name]["export"] = truncated[name]
    if len(foundation.domains) > 1:
        content["macro"] = {"test": {row.label: _plain_row(row, "macro") for row in rows}}
    write_json(folder.metrics, content)


def _plain_row(row: ResultRow, domain: str) -> dict[str, dict[str, float]]:
    return {metric: interval._asdict() for metric, interval in row.values[domain].items()}


def _write_rounds(method: FederatedMethod, recommender: Recommender, state: RunState, folder: RunFolder) -> None:
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
    start = method.init()[1].get("alpha")
    if start is not None:
        per_module = start.dim() == 3
        alpha_RKK = weights_over_rounds(records, start.mean(1) if per_module else start)
        save_figure(alpha_heat_map(alpha_RKK, rounds, names, state.best_round), figures / "alpha_heat_map")
        save_figure(alpha_curves(alpha_RKK, rounds, names, state.best_round), figures / "alpha_curves")
        content: dict[str, Any] = {"domains": names, "rounds": rounds, "alpha": alpha_RKK}
        if per_module:
            content["modules"] = list(adapter_shapes(recommender.model))
            content["alpha_modules"] = weights_over_rounds(records, start, "alpha_modules")
        write_json(folder.fusion_weights, content)
    write_json(folder.communication, communication(records, names, recommender))


def weights_over_rounds(records: Sequence[dict], start_KK: Tensor, field: str = "alpha") -> Tensor:
    """(R, K, K) fusion weights after every round, or (R, K, M, K) of a log field that has one for each module.

    A client that was absent keeps what it had.
    """
    current_KK, over_rounds = start_KK.clone(), []
    for record in records:
        for client in record["clients"]:
            current_KK[client["client"]] = torch.tensor(client[field])
        over_rounds.append(current_KK.clone())
    return torch.stack(over_rounds)


def communication(records: Sequence[dict], names: Sequence[str], recommender: Recommender) -> dict[str, Any]:
    """Bytes per round, client and direction, with the payload of every tensor; P scalars make one adapter."""
    per_round = []
    for record in records:
        clients = {}
        for group in record["traffic"]:
            sizes = {way: sum(group[way].values()) + group[f"header_{way}"] for way in ("down", "up")}
            clients.update({names[client]: sizes for client in group["clients"]})
        per_round.append({"round": record["round"], "clients": clients})
    total = {way: sum(sum(c[way] for c in entry["clients"].values()) for entry in per_round) for way in ("down", "up")}
    return {
        "unit": "bytes of one safetensors message per client, round and direction",
        "adapter_scalars": num_scalars(initial_adapters(adapter_shapes(recommender.model), 0)),
        "total": total,
        "rounds": per_round,
        "tensors": {str(record["round"]): record["traffic"] for record in (records[0], records[-1])},
    }


def _export(
    settings: Settings,
    method: FederatedMethod,
    recommender: Recommender,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    reported: ResultRow,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Hand over backbone and adapters in Hugging Face layout; every adapter is reloaded and compared.

    Adapters that ``export_rank`` cuts down are evaluated again, since they are other models than the reported ones.

    Returns domain -> examples of the report page, decoded while the domain's model is loaded; and domain -> what
    cutting down lost and the test metrics of what is left.
    """
    examples: dict[str, Any] = {}
    truncated: dict[str, dict[str, Any]] = {}
    shutil.rmtree(folder.backbone, ignore_errors=True)  # of an earlier export, perhaps with files of other origin
    shutil.copytree(foundation.distilled.folder / "backbone", folder.backbone)
    folder.adapters.mkdir(exist_ok=True)
    view = method.views[0]
    for client, (name, domain) in enumerate(foundation.domains.items()):
        download = method.broadcast(state.best_round + 1, state.best_server, torch.tensor([client]))
        own = take_row(state.best_local, client)
        METHODS[settings.run.method].load_view(recommender, settings.method, view, download, own, client)
        weight_K = own["alpha"].view(-1, len(recommender.names)).mean(0) if "alpha" in own else torch.zeros(0)
        if "away" in own:
            weight_K = weight_K.masked_fill(own["away"], 0.0)  # these slots are empty
        metrics = {metric: value.mean for metric, value in reported.values[name].items()}
        details: dict[str, Any] = {
            "round": state.best_round,
            "lora_rank": settings.run.lora_rank,
            "seed": settings.run.seed,
        }
        items = foundation.ids[name].items
        examples[name] = decode_examples(recommender, client, domain, settings.run.protocol)
        cut = truncate_loaded(recommender.model, settings.run.export_rank) if settings.run.export_rank else None
        if cut is not None:
            metrics = mean_metrics(recommender.positions(client, "test"))
            truncated[name] = {**cut.summary(), "test": metrics}
            details |= {f"truncation, {field}": f"{value:.4g}" for field, value in cut.summary().items()}
            _print_truncation(name, cut)
        export_adapter(
            recommender.model,
            folder.adapters / name,
            base_folder=folder.backbone,
            base_name=settings.run.backbone_name or LOCAL_BACKBONE,
            items=ItemTable(domain.item_keys, domain.titles, items.texts, items.token_ids),
            card=Card(
                method=method.name,
                domain=name,
                prompt=prompt_layout(name, settings),
                alpha=dict(zip(recommender.names, weight_K.tolist(), strict=False)),
                metrics=metrics,
                protocol=stamp(get_protocol(settings.run.protocol)),
                details=details,
            ),
            prompts=next(train_batches(recommender.tasks[client], 8, stream(0, "export prompts", name))),
            factors=cut.tree if cut else None,
        )
    write_manifest(folder.root, [folder.backbone, *(folder.adapters / name for name in recommender.names)])
    return examples, truncated


def _print_truncation(name: str, cut: Truncated) -> None:
    console.print(
        f"adapter of {name} cut down to rank {cut.rank}: relative error at most {float(cut.error_M.max()):.2%}, "
        f"mean {float(cut.error_M.mean()):.2%} over {len(cut.error_M)} layers",
        highlight=False,
        soft_wrap=True,
    )


def _notes(settings: Settings, method: FederatedMethod, state: RunState) -> list[str]:
    return [
        f"round {state.best_round} of {settings.run.num_rounds} has the best validation ndcg@10 "
        f"({state.best_score:.4f}) of {method.views[0]}",
        f"beam search with {settings.ranking.num_beams} beams, length penalty {settings.ranking.length_penalty}",
    ]
