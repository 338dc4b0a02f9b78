"""Stages 1 and 2: what all clients share before the first round - tokenizer, item IDs, backbone and its student.

Folder of stage 1: ``backbone/`` (teacher and tokenizer, Hugging Face layout), ``id_generator/``, ``ids/<domain>.json``
(item and user IDs), ``item_vectors.safetensors`` where item texts are read as vectors, ``text_projection.safetensors``
where the backbone starts from them alone, ``report.json``. Folder of stage 2: ``backbone/`` (student and tokenizer) and
``report.json``.

Item IDs, item vectors and public tasks are made once per catalogue, which silos share. ``domains`` are those of the
clients and, behind them, those of a foreign pool, which have no client users (`fedecider.llm.setup.load_data`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.train import distill
from fedecider.data.domain import Domain, by_catalogue
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.record import write_json
from fedecider.federation.streams import derive_seed, stream
from fedecider.llm.config import PretrainConfig, RunConfig
from fedecider.llm.domain_ids import ITEM_VECTORS, DomainIds, assign_ids, load_ids, save_ids
from fedecider.llm.item_texts import PROJECTION_FILE, encoded_texts, encoder_digest, save_projection
from fedecider.running.progress import progress
from fedecider.running.stages import Stage, begun_folder, cached_stage, file_digest
from idgen.alternating import alternate
from idgen.backbone import build_backbone, check_backbone, load_backbone, train_backbone
from idgen.checkpoints import Checkpoint
from idgen.id_generator import IDGenerator, build_id_generator, train_id_generator
from idgen.phrases import unique_phrases
from idgen.prompts import prompt_texts
from idgen.ranking import eval_users, rank_task
from idgen.ranking_config import RankingConfig
from idgen.samples import Task, build_task
from idgen.text_vectors import TextProjection, text_projection
from idgen.tokenizer import load_tokenizer, train_tokenizer
from idgen.walks import nearest_items

Domains = Mapping[str, Domain]


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
    ids: dict[str, DomainIds]
    tasks: list[Task]
    model: Any
    report: dict[str, Any]


def pretrain_stage(config: RunConfig, domains: Domains, device: torch.device, quiet: bool = False) -> Stage:
    """Tokenizer, item IDs and backbone from the public pools; reused when nothing that matters has changed."""
    inputs = {
        "pretrain": config.pretrain,
        "seed": config.seed,
        "domains": [(name, domain.content_hash()) for name, domain in domains.items()],
        "models": {name: _model_digest(name) for name in _model_names(config.pretrain)},
    }
    if config.pretrain.needs_item_vectors:
        inputs["encoder"] = encoder_digest(config.pretrain.text_encoder)
    cache = Path(config.cache)
    begun = begun_folder(cache, "pretrain", inputs)
    return cached_stage(
        cache, "pretrain", inputs, lambda folder: _pretrain(config, domains, device, folder, begun, quiet)
    )


def distill_stage(
    config: RunConfig, foundation: Stage, domains: Domains, device: torch.device, quiet: bool = False
) -> Stage:
    """The student of half depth, trained on the public pools; reused when nothing that matters has changed."""
    inputs = {
        "distill": config.distill,
        "seed": config.seed,
        "protocol": config.protocol,  # of the report
        "pretrain": foundation.folder.name,
    }
    cache = Path(config.cache)
    begun = begun_folder(cache, "distill", inputs)
    return cached_stage(
        cache, "distill", inputs, lambda folder: _distill(config, foundation, domains, device, folder, begun, quiet)
    )


def public_tasks(
    domains: Domains, ids: Mapping[str, DomainIds], tokenizer: PreTrainedTokenizerBase, config: PretrainConfig
) -> list[Task]:
    """Training tasks of the public pools, one per catalogue; every event of a public user may be a target.

    Catalogues without public users have catalogue walks alone.
    """
    _check_tokens(ids, tokenizer)
    return [
        build_task(
            domain,
            domain.public,
            ids[domain.name].items,
            tokenizer,
            config.samples,
            False,
            ids[domain.name].public,
            ids[domain.name].neighbours,
        )
        for domain in by_catalogue(domains).values()
    ]


def client_tasks(
    domains: Domains, ids: Mapping[str, DomainIds], tokenizer: PreTrainedTokenizerBase, config: PretrainConfig
) -> list[Task]:
    """Tasks of the clients, in client order; the last two events of every user are held out.

    Domains without client users, which are those of a foreign pool, are no clients.
    """
    _check_tokens(ids, tokenizer)
    return [
        build_task(
            domain,
            domain.clients,
            ids[name].items,
            tokenizer,
            config.samples,
            True,
            ids[name].clients,
            ids[name].neighbours,
        )
        for name, domain in domains.items()
        if domain.clients.users
    ]


def _check_tokens(ids: Mapping[str, DomainIds], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse IDs of another tokenizer: their tokens would be looked up beyond the embedding table."""
    for name, one in ids.items():
        groups = [group for group in (one.items, one.clients, one.public) if group is not None]
        largest = max((max(tokens, default=0) for group in groups for tokens in group.token_ids), default=0)
        if largest >= len(tokenizer):
            raise ValueError(
                f"got token {largest} in ids/{name}.json of the pre-training stage, expected at most "
                f"{len(tokenizer) - 1}: the file is damaged, or of another tokenizer. Delete the stage in --cache"
            )


def begin(config: RunConfig, domains: Domains, device: torch.device, quiet: bool = True) -> Beginning:
    """Tokenizer, item IDs, public tasks and the untrained backbone: stage 1 up to the backbone's first step."""
    settings, catalogues = config.pretrain, by_catalogue(domains)
    _check_public(settings, catalogues)
    source, source_tokens = settings.backbone.name_or_path, settings.samples.max_source_tokens
    if source is not None:
        check_backbone(source, None, source_tokens)  # else it is missed after the ID generator was trained
    phrases: dict[str, list[str]] = {}
    if settings.tokenizer_kind == "phrase":
        keys = {name: domain.item_keys for name, domain in catalogues.items()}
        texts = {name: domain.item_texts for name, domain in catalogues.items()}
        phrases = unique_phrases(keys, texts, settings.keywords)
    tokenizer = _tokenizer(settings, catalogues, phrases)
    if source is not None:
        check_backbone(source, tokenizer, source_tokens)
    report: dict[str, Any] = {}
    generator = None
    if settings.id_source == "generator":
        generator, report["id_generator"] = _id_generator(config, catalogues, tokenizer, device, quiet)
    vectors, projection = {}, None
    if settings.needs_item_vectors:
        encoded = encoded_texts(catalogues, settings.text_encoder, config.cache)
        fewer = not settings.has_text_start  # no table has to be filled: neighbours are found in fewer dimensions too
        projection = text_projection(encoded, settings.backbone.d_model, zero_fill=fewer)
        vectors = {name: projection.rows(name, text_IE) for name, text_IE in encoded.items()}
    walks = settings.samples.walk_share > 0.0
    near = {name: nearest_items(vector_ID) for name, vector_ID in vectors.items() if walks}
    ids = assign_ids(settings, domains, tokenizer, generator, phrases, near, quiet)
    tasks = public_tasks(domains, ids, tokenizer, settings)
    model = build_backbone(settings.backbone, tokenizer, derive_seed(config.seed, "backbone"), tasks, vectors)
    return Beginning(tokenizer, generator, vectors, projection, ids, tasks, model.to(device), report)


def _check_public(settings: PretrainConfig, catalogues: Domains) -> None:
    """Refuse settings under which the backbone would have nothing to learn from."""
    if any(domain.public.users for domain in catalogues.values()):
        return
    who, phases = f"got no public user in {', '.join(catalogues)}", settings.alternating.num_phases
    if phases > 0:
        raise ValueError(
            f"{who}, expected some with alternating.num_phases {phases}: the ID generator learns from them. Set "
            "pretrain.alternating.num_phases to 0, or prepare the data with public users (public_share)"
        )
    if settings.samples.walk_share == 0.0:
        raise ValueError(
            f"{who}, expected some, or synthetic histories: the backbone has nothing else to learn from. Prepare the "
            "data with public users (public_share), name domains that have some in public_domains, or set "
            "pretrain.samples.walk_share above 0, such as 0.2"
        )


def _pretrain(
    config: RunConfig, domains: Domains, device: torch.device, folder: Path, begun: Path, quiet: bool
) -> None:
    settings, made = config.pretrain, begin(config, domains, device, quiet)
    tokenizer, generator, model, ids, report = made.tokenizer, made.generator, made.model, made.ids, made.report
    if settings.alternating.num_phases > 0:
        ids, report["alternating"] = _alternate(config, domains, tokenizer, model, generator, ids, device, quiet)
    else:
        with progress("backbone", not quiet) as on_step:
            seed = derive_seed(config.seed, "backbone training")
            report["backbone"] = train_backbone(
                model,
                made.tasks,
                settings.train,
                seed,
                device,
                on_step,
                checkpoint=Checkpoint(begun / "backbone.safetensors"),
            )
    report["ids"] = {name: ids[domain.name].items.report for name, domain in by_catalogue(domains).items()}
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    save_backbone(model, tokenizer, folder / "backbone")
    if generator is not None:
        save_backbone(generator.model, tokenizer, folder / "id_generator")
    save_ids(folder, domains, ids)
    if made.projection is not None and settings.backbone.starts_from_texts:
        save_projection(folder / PROJECTION_FILE, made.projection, encoder_digest(settings.text_encoder))
    if made.vectors:
        vectors = {name: vector_ID.contiguous() for name, vector_ID in made.vectors.items()}
        save_file(vectors, folder / ITEM_VECTORS)
    write_json(folder / "report.json", report)


def _distill(
    config: RunConfig,
    foundation: Stage,
    domains: Domains,
    device: torch.device,
    folder: Path,
    begun: Path,
    quiet: bool,
) -> None:
    tokenizer = load_tokenizer(foundation.folder / "backbone")
    teacher = load_backbone(foundation.folder / "backbone", tokenizer)
    ids = load_ids(foundation.folder, domains, config.pretrain)
    tasks = public_tasks(domains, ids, tokenizer, config.pretrain)
    clients = client_tasks(domains, ids, tokenizer, config.pretrain)
    with progress("distillation", not quiet) as on_step:
        student, report = distill(
            teacher,
            tasks,
            config.distill,
            seed=derive_seed(config.seed, "distill"),
            device=device,
            on_step=on_step,
            evaluate=lambda model: _valid_metrics(model, clients, config, device),
            checkpoints=begun,
        )
    save_backbone(student, tokenizer, folder / "backbone")
    write_json(folder / "report.json", report)


def _valid_metrics(
    model: Any, tasks: list[Task], config: RunConfig, device: torch.device
) -> dict[str, dict[str, float]]:
    """hit@10 and ndcg@10 per domain on a sample of the clients' validation items; for the report only."""
    drop_seen = get_protocol(config.protocol).drop_seen
    found = {}
    for task in tasks:
        users = eval_users(task, "valid", NUM_REPORT_USERS, stream(config.seed, "eval_users", task.name))
        position_U = rank_task(
            model,
            task,
            task.trie.to(device),
            "valid",
            users,
            RankingConfig(),
            drop_seen,
            config.distill.precision,
            device,
        )
        metrics = mean_metrics(position_U)
        found[task.name] = {name: metrics[name] for name in ("hit@10", "ndcg@10")}
    return found


def save_backbone(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def _tokenizer(
    settings: PretrainConfig, catalogues: Domains, phrases: Mapping[str, list[str]]
) -> PreTrainedTokenizerBase:
    """Item texts are catalogue data, which every client publishes; no interaction is read."""
    if settings.tokenizer_source:
        return load_tokenizer(settings.tokenizer_source)
    texts = [text for domain in catalogues.values() for text in domain.item_texts]
    prompts = prompt_texts(settings.samples.templates, settings.samples.separator, list(catalogues))
    kind = "word" if settings.tokenizer_kind == "phrase" else settings.tokenizer_kind
    all_phrases = [phrase for of_domain in phrases.values() for phrase in of_domain]
    return train_tokenizer([*texts, *prompts], settings.vocab_size, kind, all_phrases)


def _id_generator(
    config: RunConfig, catalogues: Domains, tokenizer: PreTrainedTokenizerBase, device: torch.device, quiet: bool
) -> tuple[IDGenerator, list[dict]]:
    settings, seed = config.pretrain, derive_seed(config.seed, "id generator")
    generator = build_id_generator(settings.id_generator, tokenizer, seed)
    generator.model.to(device)
    texts = [text for domain in catalogues.values() for text in domain.item_texts]
    with progress("ID generator", not quiet) as on_step:
        logs = train_id_generator(generator, texts, settings.keywords, seed, on_step)
    return generator, logs


def _alternate(
    config: RunConfig,
    domains: Domains,
    tokenizer: PreTrainedTokenizerBase,
    model: Any,
    generator: IDGenerator | None,
    ids: dict[str, DomainIds],
    device: torch.device,
    quiet: bool,
) -> tuple[dict[str, DomainIds], list[dict[str, Any]]]:
    assert generator is not None  # else the settings are refused
    settings = config.pretrain
    near = {domain.catalogue: found for name, domain in domains.items() if (found := ids[name].neighbours) is not None}
    with progress("alternating training", not quiet) as on_step:
        return alternate(
            model,
            generator.model,
            ids,
            assign_ids=lambda: assign_ids(settings, domains, tokenizer, generator, {}, near, True),
            make_tasks=lambda new_ids: public_tasks(domains, new_ids, tokenizer, settings),
            item_texts=[domain.item_texts for domain in by_catalogue(domains).values()],
            tokenizer=tokenizer,
            config=settings.alternating,
            train=settings.train,
            seed=derive_seed(config.seed, "alternating"),
            device=device,
            on_step=on_step,
        )


def _model_names(settings: PretrainConfig) -> list[str]:
    names = (settings.tokenizer, settings.backbone.name_or_path, settings.id_generator.source)
    return sorted({name for name in names if name})


def _model_digest(name: str) -> str:
    """Content of a local model folder; the name itself for a model of the hub."""
    return file_digest(Path(name)) if Path(name).is_dir() else name
