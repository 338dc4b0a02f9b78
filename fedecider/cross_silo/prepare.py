"""Everything before the first round: item IDs, backbone, student, the clients' tasks.

Folder of stage 1: ``backbone/`` (teacher and tokenizer, Hugging Face layout), ``id_generator/``,
``ids/<catalogue>.json``, ``item_vectors.safetensors`` where item texts are read as vectors,
``text_projection.safetensors`` where the backbone starts from them alone, ``codebook.safetensors`` of semantic IDs,
``report.json``. Folder of stage 2: ``backbone/`` (student and tokenizer) and ``report.json``.

Item IDs, item vectors and public tasks are made once per catalogue (`fedecider.data.sellers.by_catalogue`): an item
that several sell has one ID and one vector. ``domains`` are those of the clients and, behind them, those of a foreign
pool, which have no client users (`load_data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    assign_ids,
    client_tasks,
    load_ids,
    neighbours_of,
    public_tasks,
    save_ids,
)
from fedecider.cross_silo.settings import PretrainConfig, RunConfig, Settings
from fedecider.data.card import describe, make_card
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, check_public_disjoint, clients_of
from fedecider.data.encoders import load_encoder
from fedecider.data.sample import sample_domains
from fedecider.data.sellers import by_catalogue
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.checksums import file_sha256
from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.federation.record import write_json
from fedecider.federation.state import RunState
from fedecider.federation.streams import derive_seed, stream
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.client_models import ClientModels, client_models
from fedecider.methods.rows import as_known, travelling_rows
from fedecider.models.adapters import attach_lora, layer_names
from fedecider.models.client_model import Base, ClientModel
from fedecider.models.counts import CALIBRATION_SHARE, calibration_users
from fedecider.models.item_texts import (
    CODEBOOK_FILE,
    PROJECTION_FILE,
    encoded_catalogues,
    encoder_digest,
    save_codebook,
    save_projection,
)
from fedecider.running.launch import Launch
from fedecider.running.progress import log_line, progress, stage
from fedecider.running.run_folder import (
    RunFolder,
    Stage,
    begun_folder,
    cached_stage,
    damage_names,
    file_digest,
    read_object,
)
from idgen.alternating import Writing, alternate
from idgen.backbone import build_backbone, check_backbone, has_tied_output, linear_layers, load_backbone
from idgen.backbone_training import HeldOut, hold_out, train_backbone
from idgen.backbones.families import family_of
from idgen.checkpoints import Checkpoint
from idgen.id_generator import IDGenerator, build_id_generator, train_id_generator
from idgen.item_ids import unique_phrases
from idgen.prompts import prompt_texts
from idgen.quantize import check_quantize
from idgen.ranking import RankingContext, eval_users, rank_task
from idgen.ranking_config import RankingConfig
from idgen.semantic_ids import Codebook, fit_codebook, semantic_texts, semantic_tokens
from idgen.tasks import Task, catalogue_task
from idgen.text_vectors import TextProjection, text_projection
from idgen.tokenizer import load_tokenizer, train_tokenizer
from idgen.training import Execution

# Stages 1 and 2: what all clients share before the first round - tokenizer, item IDs, backbone and its student.

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
    tokenizer = _tokenizer(settings, catalogues, id_tokens)
    if source is not None:
        check_backbone(source, tokenizer, source_tokens)
    report: dict[str, Any] = {}
    generator = None
    if settings.ids == "generator":
        generator, report["id_generator"] = _id_generator(config, catalogues, tokenizer, device, quiet)
    near = neighbours_of(vectors, domains) if settings.samples.synthetic_share > 0.0 else {}
    ids = assign_ids(settings, domains, tokenizer, generator, id_texts, near, quiet)
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
    if made.projection is not None and settings.backbone.starts_from_texts:
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
            return f"kept the last of {total:,} steps: too few public users, or steps, to choose one by validation"
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
                assign_ids=lambda: assign_ids(settings, domains, tokenizer, generator, {}, near, True),
                make_tasks=lambda new_ids: public_tasks(domains, new_ids, tokenizer, settings),
                item_texts=[sellers.catalogue.texts for sellers in by_catalogue(domains).values()],
                tokenizer=tokenizer,
            ),
            settings.alternating_phases,
            settings.train,
            Execution(derive_seed(config.seed, "alternating"), device, on_step),
        )


# What a run of the cross-silo track starts from: settings, data, stages 1 and 2, the student with adapters.


class BaseArtifacts(NamedTuple):
    """What the rounds start from."""

    domains: Mapping[str, Domain]
    """Of the clients, in client order."""
    ids: Mapping[str, DomainIds]
    pretrained: Stage
    distilled: Stage
    everyone: Mapping[str, Domain]
    """All domains of the run in the order in which stage 1 encodes their texts, those of a foreign pool at the end. A
    deployed site has ``domains`` of its own alone, and here what is public of the others."""


def load_data(config: RunConfig) -> dict[str, Domain]:
    """Prepared domains, or those of the embedded sample: the clients', in client order, then those of a foreign pool.

    A foreign pool (``public_domains``) comes without client users, and the clients' domains beside it without public
    ones, so that nobody can read them.

    Raises:
        ValueError: a domain has no client users; a client is public in another domain; or the foreign pool has a
            catalogue of the clients.
    """

    def load(names: Sequence[str]) -> dict[str, Domain]:
        return load_domains(config.data, names) if config.data else sample_domains(names, config.seed)

    domains = load(config.domain_names)
    empty = [name for name in domains if name not in clients_of(domains)]
    if empty:
        raise ValueError(
            f"got domains {empty} without client users, expected some: they were prepared for a foreign pool. Name "
            "them in --public_domains"
        )
    if not config.public_names:
        return domains
    pool = load(config.public_names)
    own = {domain.catalogue.name for domain in domains.values()}
    both = [name for name, domain in pool.items() if domain.catalogue.name in own]
    if both:
        raise ValueError(
            f"got public_domains {both} with a catalogue of the clients, expected other catalogues: a foreign pool "
            "knows nothing of what the clients' users do"
        )
    check_public_disjoint({**domains, **pool})
    without_public = {name: _without_public(domain) for name, domain in domains.items()}
    return {**without_public, **{name: without_users(domain) for name, domain in pool.items()}}


def data_of_run(config: RunConfig, record: Mapping[str, Any], root: str | Path) -> dict[str, Domain]:
    """The data of a finished run, as `load_data`; ``record``: its ``run.json``.

    Raises:
        ValueError: they are other ones now.
    """
    domains = load_data(config)
    changed = [name for name, domain in domains.items() if domain.content_hash() != record["data"].get(name)]
    if changed:
        raise ValueError(f"got other data than those of {root} for {changed}, expected the same. Give the run's --data")
    return domains


def without_users(domain: Domain) -> Domain:
    """What is public of a domain: its catalogue and its public users, with a card that is counted over these alone.

    Of the card of the whole domain, which counts client users in many places, the source stays.
    """
    source = {name: value for name, value in domain.card.get("settings", {}).items() if name == "source"}
    public = replace(domain, clients=NO_EVENTS, card={})
    public.card.update(make_card(public, settings=source or None))
    return public


def _without_public(domain: Domain) -> Domain:
    return replace(domain, public=NO_EVENTS, card={**domain.card, "public": describe(NO_EVENTS)})


def build_base_artifacts(config: RunConfig, launch: Launch) -> BaseArtifacts:
    """Data, and stages 1 and 2 where they are not there yet; with several processes the first one builds them.

    Raises:
        ValueError: settings that could not be used afterwards, told before anything is built; or a damaged stage.
    """
    check_quantize(config.quantize)
    domains = load_data(config)
    check_targets(config)
    with launch.accelerator.main_process_first():
        load_encoder(config.pretrain.text_encoder)  # the table after the rounds needs it: a missing one is told now
        with stage("pretrain"):
            pretrained = _whole(pretrain_stage(config, domains, launch.device, quiet=not launch.is_main))
        with stage("distil"):
            distilled = _whole(distill_stage(config, pretrained, domains, launch.device, quiet=not launch.is_main))
    if launch.is_main:
        stages = (("pre-training", pretrained), ("distillation", distilled))
        told = ", ".join(f"{name} {'reused' if kept.reused else 'built'} ({kept.folder.name})" for name, kept in stages)
        log_line(f"{config.cache}: {told}")
        if told := kept_step(pretrained):
            log_line(f"backbone: {told}")
    clients = clients_of(domains)
    ids = load_ids(pretrained.folder, clients, config.pretrain)
    if launch.is_main:
        reports = {name: ids[name].items.report for name in by_catalogue(clients)}
        log_line("item IDs: " + ", ".join(f"{name} {report['num_items']:,}" for name, report in reports.items()))
    return BaseArtifacts(clients, ids, pretrained, distilled, {**clients, **domains})


def check_same_student(folder: RunFolder, artifacts: BaseArtifacts, root: Path) -> None:
    """``ValueError`` where the stages of a finished run, found or built again, are not those that it was trained on."""
    made = artifacts.distilled.folder / "backbone"
    for path in sorted(made.glob("*.safetensors")):
        kept = folder.backbone / path.name
        if not kept.is_file() or file_sha256(kept) != file_sha256(path):
            raise ValueError(
                f"got another student in {made} than {root} was trained on, expected the one in {folder.backbone}: its "
                "stages were made by another version or on another machine. Give the cache of the run a place where it "
                "is found (--cache of the run), or run it again"
            )


def check_targets(config: RunConfig) -> None:
    """``ValueError`` where the backbone will not have the layers that are to get adapters."""
    for lora in config.all_lora_settings:
        layer_names(lora, linear_layers(config.pretrain.backbone))
    tables = any("table" in lora.targets for lora in config.all_lora_settings)
    if tables and not has_tied_output(config.pretrain.backbone):
        raise ValueError(
            "got the target table for a backbone whose output has a table of its own, expected one that is tied to the "
            "embeddings. Write output instead of table in lora_targets"
        )


def _whole(stage: Stage) -> Stage:
    """The teacher is read again after the last round: a stage that lost it is refused before the first one."""
    try:
        check_backbone(stage.folder / "backbone")
    except ValueError as error:
        raise ValueError(f"{error}. Delete {stage.folder}, and it is built again") from error
    return stage


def make_recommender(
    settings: Settings,
    artifacts: BaseArtifacts,
    device: torch.device,
    launch: Launch | None = None,
    names: Sequence[str] | None = None,
) -> ClientModels:
    """The student with adapters attached, and the clients' tasks.

    ``launch``: of the processes that train together; without it one process by itself. ``names``: all clients of the
    run, where ``artifacts.domains`` are not all of them: a catalogue stands for the others' tasks.
    """
    tokenizer = load_tokenizer(artifacts.distilled.folder / "backbone")
    student = load_backbone(artifacts.distilled.folder / "backbone", tokenizer, settings.run.quantize, device)
    tasks = training_tasks(settings, artifacts, tokenizer, names)
    base = Base(
        attach_lora(student, settings.run.lora_settings),
        tokenizer,
        RankingContext(settings.ranking, get_protocol(settings.run.protocol).drop_seen, device=device),
        checkpointing=settings.run.recomputes_activations,
    )
    if launch is not None:
        base = base._replace(processes=launch.processes, deepspeed=launch.deepspeed)
    models = client_models(base, tasks, settings.training, settings.run.seed)
    hidden = models.rows._replace(hidden=settings.run.secure_sum)
    return models._replace(rows=hidden, protected=settings.run.privacy.clips)


def training_tasks(
    settings: Settings, artifacts: BaseArtifacts, tokenizer: Any, names: Sequence[str] | None = None
) -> list[Task]:
    """The clients' tasks; with a hybrid without the users on whom its weights are fitted (`calibration`)."""
    tasks = client_tasks(artifacts.domains, artifacts.ids, tokenizer, settings.run.pretrain)
    if settings.run.hybrid.kind != "none":
        tasks = [task.without_users(calibration(artifacts.domains[task.name], settings.run.seed)) for task in tasks]
    own = {task.name: task for task in tasks}

    def of_catalogue(name: str) -> Task:
        catalogue, samples = artifacts.everyone[name].catalogue.name, settings.run.pretrain.samples
        return catalogue_task(catalogue, artifacts.ids[name].items, tokenizer, samples)._replace(name=name)

    return [own[name] if name in own else of_catalogue(name) for name in names or own]


def calibration(domain: Domain, seed: int) -> list[int]:
    """Rows of the client's users that are kept for the weights of its hybrid, alike in every call."""
    return calibration_users(domain.clients.sequences, CALIBRATION_SHARE, stream(seed, "calibration", domain.name))


# The models that clients report, as values.


Scales = Mapping[str, float]
"""Client's name -> the scale of its update in the model that it reports."""


def reported_model(
    settings: Settings, method: FederatedMethod, models: ClientModels, state: RunState, client: int
) -> ClientModel:
    """The reported model of ``client`` at the selected round."""
    download = received(method.broadcast(state.best_round + 1, state.best_server, torch.tensor([client])), 0)
    return model_from(settings, method, models, download, take_row(state.best_local, client), client)


def model_from(
    settings: Settings, method: FederatedMethod, models: ClientModels, download: Download, own: Tree, client: int
) -> ClientModel:
    """The reported model of ``client``, from what it alone was sent and its own row."""
    download = as_known(download, own, travelling_rows(models.rows, method.takes_mean).sent, client)
    return METHODS[settings.run.method].client_model(models, settings.method, method.variants[0], download, own, client)


def chosen_scale(settings: Settings, model: ClientModel, known: Mapping[float, float] = {}) -> float:
    """The scale of its update at which ``model`` ranks the client's validation items best; the largest on ties.

    An update that overfits is scaled down, or left out. It is the client's own choice, made after the last round;
    nobody is told of it. ``known``: scales whose ndcg@10 has been worked out.
    """
    scales, scores = settings.run.share_grid, dict(known)
    if len(scales) == 1:
        return scales[0]
    for scale in set(scales) - set(known):
        scores[scale] = mean_metrics(model.scaled(scale).positions("valid"))["ndcg@10"]
    return max(scales, key=lambda scale: (scores[scale], scale))
