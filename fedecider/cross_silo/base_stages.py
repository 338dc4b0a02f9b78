"""Stages 1 and 2, what all clients share before the first round: tokenizer, item IDs, backbone and its student.

Folder of stage 1: ``backbone/`` (teacher and tokenizer, Hugging Face layout), ``id_generator/``,
``ids/<catalogue>.json``, ``item_vectors.safetensors`` where item texts are read as vectors,
``text_projection.safetensors`` where the backbone starts from them alone, ``codebook.safetensors`` of semantic IDs,
``report.json``. Folder of stage 2: ``backbone/`` (student and tokenizer) and ``report.json``.

Item IDs, item vectors and public tasks are made once per catalogue (`fedecider.data.sellers.by_catalogue`): an item
that several sell has one ID and one vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.train import distill
from fedecider.cross_silo.item_ids import (
    ITEM_VECTORS,
    DomainIds,
    Given,
    assign_ids,
    client_tasks,
    load_ids,
    neighbours_of,
    public_tasks,
    save_ids,
)
from fedecider.cross_silo.settings import PretrainConfig, RunConfig
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain
from fedecider.data.sellers import by_catalogue
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.record import write_json
from fedecider.federation.streams import derive_seed, stream
from fedecider.models.item_texts import (
    CODEBOOK_FILE,
    PROJECTION_FILE,
    encoded_catalogues,
    encoder_digest,
    save_codebook,
    save_projection,
)
from fedecider.running.damage import damage_names, read_object
from fedecider.running.progress import progress
from fedecider.running.stages import Stage, begun_folder, cached_stage, file_digest
from idgen.alternating import Writing, alternate
from idgen.backbone import build_backbone, check_backbone, load_backbone
from idgen.backbone_training import HeldOut, hold_out, train_backbone
from idgen.backbones.families import family_of
from idgen.checkpoints import Checkpoint
from idgen.id_generator import IDGenerator, build_id_generator, train_id_generator
from idgen.item_ids import item_words, unique_phrases
from idgen.prompts import prompt_texts
from idgen.ranking import RankingContext, eval_users, rank_task
from idgen.ranking_config import RankingConfig
from idgen.semantic_ids import Codebook, fit_codebook, semantic_texts, semantic_tokens
from idgen.tasks import Task
from idgen.text_vectors import TextProjection, text_projection
from idgen.tokenizer import load_tokenizer, train_tokenizer
from idgen.training import Execution

Domains = Mapping[str, Domain]
Catalogues = Mapping[str, Catalogue]


NUM_REPORT_USERS = 200
"""Client users per domain on which the distillation report compares teacher and student."""


class Beginning(NamedTuple):
    """Stage 1 before the backbone has been trained."""

    tokenizer: PreTrainedTokenizerBase
    generator: IDGenerator | None
    """None where IDs are the items' own keywords."""
    vectors: dict[str, Tensor]
    """Catalogue -> vectors of its item texts; empty where nothing reads them."""
    projection: TextProjection | None
    """What made them."""
    codebook: Codebook | None
    """What made semantic IDs; None for others."""
    ids: dict[str, DomainIds]
    tasks: list[Task]
    """Without what chooses the step that is kept."""
    validation: list[HeldOut]
    model: Any
    report: dict[str, Any]


def pretrain_stage(config: RunConfig, domains: Domains, device: torch.device, quiet: bool = False) -> Stage:
    """Tokenizer, item IDs and backbone from the public pools; reused when nothing that matters has changed."""
    if config.start_from:
        raise ValueError(f"got start_from {config.start_from}, expected none here: federate alone starts from a run")
    inputs = {
        "pretrain": config.pretrain,
        "seed": config.seed,
        "domains": [(name, domain.content_hash()) for name, domain in domains.items()],
        "models": {  # content of a local folder; of a model of the hub its name
            name: file_digest(Path(name)) if Path(name).is_dir() else name
            for name in sorted(filter(None, {config.pretrain.backbone.name_or_path, config.pretrain.id_generator}))
        },
        "step": "kept by the last items of public users",
        "ids": "by catalogue",
    }
    if config.pretrain.needs_item_vectors:
        inputs["encoder"] = encoder_digest(config.pretrain.text_encoder)
    cache = Path(config.cache)
    begun = begun_folder(cache, "pretrain", inputs)
    return cached_stage(
        cache, "pretrain", inputs, lambda folder: _pretrain(config, domains, device, folder, begun, quiet)
    )


def distill_stage(
    config: RunConfig, pretrained: Stage, domains: Domains, device: torch.device, quiet: bool = False
) -> Stage:
    """The student of half depth, trained on the public pools; reused when nothing that matters has changed."""
    inputs = {
        "distill": config.distill,
        "seed": config.seed,
        "protocol": config.protocol,  # of the report
        "pretrain": pretrained.folder.name,
    }
    cache = Path(config.cache)
    begun = begun_folder(cache, "distill", inputs)
    return cached_stage(
        cache, "distill", inputs, lambda folder: _distill(config, pretrained, domains, device, folder, begun, quiet)
    )


def begin(config: RunConfig, domains: Domains, device: torch.device, quiet: bool = True) -> Beginning:
    """Tokenizer, item IDs, public tasks and the untrained backbone: stage 1 up to the backbone's first step."""
    settings = config.pretrain
    catalogues = {name: sellers.catalogue for name, sellers in by_catalogue(domains).items()}
    _check_public(settings, domains)
    source, source_tokens = settings.backbone.name_or_path, settings.samples.max_source_tokens
    if source is not None:
        check_backbone(source, None, source_tokens)  # else it is missed after the ID generator was trained
    keys = {name: catalogue.keys for name, catalogue in catalogues.items()}
    vectors, projection, id_texts, codebook = {}, None, {}, None
    id_tokens: list[str] = []
    if settings.needs_item_vectors:
        encoded = encoded_catalogues(domains, settings.text_encoder, config.cache)
        fewer = not settings.has_text_start  # no table has to be filled: neighbours are found in fewer dimensions too
        projection = text_projection(encoded, settings.backbone.d_model, zero_fill=fewer)
        vectors = {name: projection.rows(name, text_IE) for name, text_IE in encoded.items()}
        if settings.ids == "semantic":  # one codebook for all: near items of two catalogues share codes
            codebook = fit_codebook(torch.cat(list(encoded.values())), derive_seed(config.seed, "semantic IDs"))
            id_texts = {name: semantic_texts(codebook, keys[name], encoded[name]) for name in encoded}
            id_tokens = semantic_tokens(codebook, [text for texts in id_texts.values() for text in texts])
    if settings.ids == "item":
        texts = {name: catalogue.texts for name, catalogue in catalogues.items()}
        id_texts = unique_phrases(keys, texts, settings.words)
        id_tokens = [text for of_domain in id_texts.values() for text in of_domain]
    own: dict[str, list[str]] = {}
    if settings.samples.dense_head:
        own = item_words(keys, {name: catalogue.texts for name, catalogue in catalogues.items()})
        id_tokens += [word for words in own.values() for word in words]
    tokenizer = _tokenizer(settings, catalogues, id_tokens)
    if source is not None:
        check_backbone(source, tokenizer, source_tokens)
    report: dict[str, Any] = {}
    generator = None
    if settings.ids == "generator":
        generator, report["id_generator"] = _id_generator(config, catalogues, tokenizer, device, quiet)
    near = neighbours_of(vectors, domains) if settings.samples.synthetic_share > 0.0 else {}
    ids = assign_ids(settings, domains, tokenizer, generator, Given(id_texts, own), near, quiet)
    tasks = public_tasks(domains, ids, tokenizer, settings)
    validation: list[HeldOut] = []
    if settings.alternating_phases == 0:  # else tasks change with the IDs
        tasks, validation = hold_out(tasks, settings.train, derive_seed(config.seed, "public validation"))
    seed, freeze_table = derive_seed(config.seed, "backbone"), settings.train.table_lr_multiplier == 0.0
    model = build_backbone(settings.backbone, tokenizer, seed, tasks, vectors, freeze_table)
    begun = (vectors, projection, codebook, ids, tasks, validation, model.to(device), report)
    return Beginning(tokenizer, generator, *begun)


def _check_public(settings: PretrainConfig, domains: Domains) -> None:
    """Refuse settings under which the backbone would have nothing to learn from."""
    if any(domain.public.users for domain in domains.values()):
        return
    who, phases = f"got no public user in {', '.join(by_catalogue(domains))}", settings.alternating_phases
    if phases > 0:
        raise ValueError(
            f"{who}, expected some with alternating_phases {phases}: the ID generator learns from them. Set "
            "pretrain.alternating_phases to 0, or prepare the data with public users (public_share)"
        )
    if settings.samples.synthetic_share == 0.0:
        raise ValueError(
            f"{who}, expected some, or synthetic histories: the backbone has nothing else to learn from. Prepare the "
            "data with public users (public_share), name domains that have some in public_domains, or set "
            "pretrain.samples.synthetic_share above 0, such as 0.2"
        )


def _pretrain(
    config: RunConfig, domains: Domains, device: torch.device, folder: Path, begun: Path, quiet: bool
) -> None:
    settings, made = config.pretrain, begin(config, domains, device, quiet)
    tokenizer, generator, model, ids, report = made.tokenizer, made.generator, made.model, made.ids, made.report
    if settings.alternating_phases > 0:
        ids, report["alternating"] = _alternate(config, domains, made, device, quiet)
    else:
        with progress("backbone", not quiet) as on_step:
            report["backbone"] = train_backbone(
                model,
                made.tasks,
                settings.train,
                Execution(
                    derive_seed(config.seed, "backbone training"),
                    device,
                    on_step,
                    Checkpoint(begun / "backbone.safetensors"),
                    config.recomputes_activations,
                ),
                made.validation,
            )
    report["ids"] = {name: ids[name].items.report for name in by_catalogue(domains)}
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    save_backbone(model, tokenizer, folder / "backbone")
    if generator is not None:
        save_backbone(generator.model, tokenizer, folder / "id_generator")
    save_ids(folder, domains, ids)
    if made.projection is not None and (settings.backbone.starts_from_texts or settings.samples.dense_head):
        save_projection(folder / PROJECTION_FILE, made.projection, encoder_digest(settings.text_encoder))
    if made.codebook is not None:
        save_codebook(folder / CODEBOOK_FILE, made.codebook, encoder_digest(settings.text_encoder))
    if made.vectors:
        vectors = {name: vector_ID.contiguous() for name, vector_ID in made.vectors.items()}
        save_file(vectors, folder / ITEM_VECTORS)
    write_json(folder / "report.json", report)


def kept_step(pretrained: Stage) -> str:
    """Which step of the backbone's training stage 1 kept, and why, in words; empty where there was none to choose."""
    path = pretrained.folder / "report.json"
    logs = read_object(path).get("backbone")
    if not logs:
        return ""
    with damage_names(path):
        total, found = logs[-1]["step"], logs[-1].get("validation")
        if found is None:
            return f"kept the last of {total:,} steps: too few public users or steps to select by validation"
        kept, scores = found["kept"], found["ndcg@10"]
        others = {0: "at the start", total: "at the end"}
        told = [f"{scores[str(step)]:.4f} {words}" for step, words in others.items() if step != kept]
        return (
            f"kept step {kept:,} of {total:,}, public validation ndcg@10 {scores[str(kept)]:.4f} "
            f"({', '.join(told)}; last items of {found['num_users']:,} public users)"
        )


def _distill(
    config: RunConfig,
    pretrained: Stage,
    domains: Domains,
    device: torch.device,
    folder: Path,
    begun: Path,
    quiet: bool,
) -> None:
    tokenizer = load_tokenizer(pretrained.folder / "backbone")
    teacher = load_backbone(pretrained.folder / "backbone", tokenizer)
    ids = load_ids(pretrained.folder, domains, config.pretrain)
    tasks = public_tasks(domains, ids, tokenizer, config.pretrain)
    clients = client_tasks(domains, ids, tokenizer, config.pretrain)
    # A pretrained language model loses more by halving than blocks alone win back.
    tunes = config.pretrain.backbone.name_or_path is not None and family_of(teacher).continues_prompt
    with progress("distillation", not quiet) as on_step:
        student, report = distill(
            teacher,
            tasks,
            config.distill,
            Execution(derive_seed(config.seed, "distill"), device, on_step),
            evaluate=lambda model: _valid_metrics(model, clients, config, device),
            checkpoints=begun,
            finetune_rate=config.pretrain.train.learning_rate if tunes else 0.0,
        )
    save_backbone(student, tokenizer, folder / "backbone")
    write_json(folder / "report.json", report)


def _valid_metrics(
    model: Any, tasks: list[Task], config: RunConfig, device: torch.device
) -> dict[str, dict[str, float]]:
    """hit@10 and ndcg@10 per domain on a sample of the clients' validation items; for the report only."""
    drop_seen = get_protocol(config.protocol).drop_seen
    context, found = RankingContext(RankingConfig(), drop_seen, config.distill.precision, device), {}
    for task in tasks:
        users = eval_users(task, "valid", NUM_REPORT_USERS, stream(config.seed, "eval_users", task.name))
        metrics = mean_metrics(rank_task(model, task, "valid", users, context))
        found[task.name] = {name: metrics[name] for name in ("hit@10", "ndcg@10")}
    return found


def save_backbone(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def _tokenizer(settings: PretrainConfig, catalogues: Catalogues, id_tokens: Sequence[str]) -> PreTrainedTokenizerBase:
    """Item texts are catalogue data, which every client publishes; no interaction is read."""
    if settings.tokenizer_source:
        return load_tokenizer(settings.tokenizer_source)
    texts = [text for catalogue in catalogues.values() for text in catalogue.texts]
    prompts = prompt_texts(settings.samples.templates, list(catalogues))
    return train_tokenizer([*texts, *prompts], settings.vocab_size(len(id_tokens)), id_tokens)


def _id_generator(
    config: RunConfig, catalogues: Catalogues, tokenizer: PreTrainedTokenizerBase, device: torch.device, quiet: bool
) -> tuple[IDGenerator, list[dict]]:
    settings, seed = config.pretrain, derive_seed(config.seed, "id generator")
    bf16 = settings.train.precision == "bf16"
    generator = build_id_generator(settings.id_generator, tokenizer, seed, bf16, settings.words)
    generator.model.to(device)
    if settings.id_generator:  # it writes tags already
        return generator, []
    texts = [text for catalogue in catalogues.values() for text in catalogue.texts]
    with progress("ID generator", not quiet) as on_step:
        logs = train_id_generator(generator, texts, seed, on_step)
    return generator, logs


def _alternate(
    config: RunConfig, domains: Domains, made: Beginning, device: torch.device, quiet: bool
) -> tuple[dict[str, DomainIds], list[dict[str, Any]]]:
    settings, tokenizer, generator = config.pretrain, made.tokenizer, made.generator
    assert generator is not None  # else the settings are refused
    near = {name: ids.neighbours for name, ids in made.ids.items() if ids.neighbours is not None}
    with progress("alternating training", not quiet) as on_step:
        return alternate(
            made.model,
            generator.model,
            made.ids,
            Writing(
                assign_ids=lambda: assign_ids(settings, domains, tokenizer, generator, Given(), near, True),
                make_tasks=lambda new_ids: public_tasks(domains, new_ids, tokenizer, settings),
                item_texts=[sellers.catalogue.texts for sellers in by_catalogue(domains).values()],
                tokenizer=tokenizer,
            ),
            settings.alternating_phases,
            settings.train,
            Execution(derive_seed(config.seed, "alternating"), device, on_step),
        )
