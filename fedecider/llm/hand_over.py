"""What a finished run hands over: the backbone and an adapter for every domain, reloaded and compared."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.method import FederatedMethod, Tree
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.llm.examples import decode_examples
from fedecider.llm.item_texts import PROJECTION_FILE
from fedecider.llm.loading import Shares, load_reported
from fedecider.llm.manifest import write_manifest
from fedecider.llm.new_items import TEXT_FOLDER
from fedecider.llm.prompt_layout import prompt_layout
from fedecider.llm.recipe import Recipe, write_recipe
from fedecider.llm.run_facts import run_facts
from fedecider.llm.setup import Foundation, Settings
from fedecider.lora.card import LOCAL_BACKBONE, Card
from fedecider.lora.export import export_adapter
from fedecider.lora.item_table import ItemTable
from fedecider.lora.truncation import Truncated, truncate_loaded
from fedecider.methods import METHODS, Method
from fedecider.methods.recommender import ClientModels
from fedecider.report.rows import ResultRow
from fedecider.running.progress import say
from fedecider.running.run_folder import RunFolder
from idgen.samples import train_batches

BASES = {"none": "full precision", "nf4": "4 bits (nf4)", "int8": "8 bits (int8)"}
"""Format of the frozen layers -> the card's words for it."""


def hand_over(
    settings: Settings,
    method: FederatedMethod,
    recommender: ClientModels,
    foundation: Foundation,
    state: RunState,
    folder: RunFolder,
    rows: Sequence[ResultRow],
    shares: Shares,
    promised: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Hand over backbone and adapters in Hugging Face layout; every adapter is reloaded and compared.

    ``rows``, the reported one first, and what was ``promised`` to users are told beside the adapters.
    Adapters that ``export_rank`` cuts down are evaluated again, since they are other models than the reported ones.

    Returns domain -> examples of the report page, decoded while the domain's model is loaded; and domain -> what
    cutting down lost and the test metrics of what is left.
    """
    examples: dict[str, Any] = {}
    truncated: dict[str, dict[str, Any]] = {}
    shutil.rmtree(folder.backbone, ignore_errors=True)  # of an earlier export, perhaps with files of other origin
    shutil.copytree(foundation.distilled.folder / "backbone", folder.backbone)
    projection = foundation.pretrained.folder / PROJECTION_FILE
    if projection.is_file():
        (folder.backbone / TEXT_FOLDER).mkdir()
        shutil.copy(projection, folder.backbone / TEXT_FOLDER)
    folder.adapters.mkdir(exist_ok=True)
    entry = METHODS[settings.run.method]
    for name, domain in foundation.domains.items():
        client = recommender.names.index(name)
        own = load_reported(settings, method, recommender, state, client, shares[name])
        metrics = {metric: value.mean for metric, value in rows[0].values[name].items()}
        details: dict[str, Any] = {
            "round": state.best_round,
            "lora_rank": settings.run.lora_rank,
            "seed": settings.run.seed,
            "base while training and measuring": BASES[settings.run.quantize],
        }
        if shares[name] != 1.0:
            details["share of the trained update"] = f"{shares[name]:g}"
        if "table" in settings.run.lora_settings.targets:
            details["merging"] = "only into a base whose output was given a table of its own: peft would merge it twice"
        items, catalogue = foundation.ids[name].items, "" if domain.catalogue == name else domain.catalogue
        examples[name] = decode_examples(recommender, client, domain, settings.run.protocol)
        facts = run_facts(settings, method.name, recommender.names, domain, state.best_round, rows, promised)
        cut = truncate_loaded(recommender.model, settings.run.export_rank) if settings.run.export_rank else None
        if cut is not None:
            metrics = mean_metrics(recommender.positions(client, "test"))
            truncated[name] = {**cut.summary(), "test": metrics}
            facts["export"] = metrics
            details |= {f"truncation, {field}": f"{value:.4g}" for field, value in cut.summary().items()}
            _print_truncation(name, cut)
        alpha, pretrain = _weights(entry, recommender, own), settings.run.pretrain
        export_adapter(
            recommender.model,
            folder.adapters / name,
            base_folder=folder.backbone,
            base_name=settings.run.backbone_name or LOCAL_BACKBONE,
            items=ItemTable(domain.item_keys, domain.titles, items.texts, items.token_ids, catalogue),
            card=Card(
                method=method.name,
                domain=name,
                prompt=prompt_layout(recommender.tasks[client], settings.ranking, recommender.model, domain.catalogue),
                alpha=alpha,
                metrics=metrics,
                protocol=stamp(get_protocol(settings.run.protocol)),
                details=details,
            ),
            prompts=next(train_batches(recommender.tasks[client], 8, stream(0, "export prompts", name))),
            factors=cut.tree if cut else None,
        )
        asked = (pretrain.samples, settings.ranking, pretrain.keywords, pretrain.text_encoder, settings.run.quantize)
        write_recipe(Recipe(name, *asked, alpha, facts), folder.adapters / name)
    write_manifest(folder.root, [folder.backbone, *(folder.adapters / name for name in foundation.domains)])
    return examples, truncated


def _weights(entry: Method, recommender: ClientModels, own: Tree) -> dict[str, float]:
    """Domain -> weight of its direction, mean over layers; empty for a method without fusion weights."""
    if entry.fusion_weights is None:
        return {}
    weight_K = entry.fusion_weights.read(own).view(-1, len(recommender.names)).mean(0)
    return dict(zip(recommender.names, weight_K.tolist(), strict=True))


def _print_truncation(name: str, cut: Truncated) -> None:
    say(
        f"adapter of {name} cut down to rank {cut.rank}: relative error at most {float(cut.error_M.max()):.2%}, "
        f"mean {float(cut.error_M.mean()):.2%} over {len(cut.error_M)} layers"
    )
