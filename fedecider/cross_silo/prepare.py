"""What a run of the cross-silo track starts from: settings, data, the base artifacts, the student with adapters.

``domains`` are those of the clients and, behind them, those of an out-of-domain pool, which have no client users
(`load_data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedecider.cross_silo.base_stages import distill_stage, kept_step, pretrain_stage
from fedecider.cross_silo.item_ids import (
    DomainIds,
    client_tasks,
    load_ids,
)
from fedecider.cross_silo.settings import RunConfig, Settings
from fedecider.data.card import describe, make_card
from fedecider.data.domain import NO_EVENTS, Domain, check_public_disjoint, clients_of
from fedecider.data.drawn import drawn_customers
from fedecider.data.encoders import load_encoder
from fedecider.data.protocol import chosen_protocol, under
from fedecider.data.sample import sample_domains
from fedecider.data.sellers import by_catalogue
from fedecider.data.store import load_domains
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.checksums import file_sha256
from fedecider.methods.client_models import ClientModels, client_models
from fedecider.models.adapters import attach_lora, layer_names
from fedecider.models.client_model import Base
from fedecider.running.launch import Launch
from fedecider.running.progress import detail, log_line, stage
from fedecider.running.run_folder import RunFolder
from fedecider.running.stages import Stage
from idgen.backbone import check_backbone, has_tied_output, linear_layers, load_backbone
from idgen.quantize import check_quantize
from idgen.ranking import RankingContext
from idgen.tasks import Task, catalogue_task
from idgen.tokenizer import load_tokenizer


class BaseArtifacts(NamedTuple):
    """What the rounds start from."""

    domains: Mapping[str, Domain]
    """Of the clients, in client order."""
    ids: Mapping[str, DomainIds]
    pretrained: Stage
    distilled: Stage
    everyone: Mapping[str, Domain]
    """All domains of the run in the order in which stage 1 encodes their texts, those of an out-of-domain pool at the
    end. A deployed site has ``domains`` of its own alone, and here what is public of the others."""


def load_data(config: RunConfig) -> dict[str, Domain]:
    """The data of a run as its protocol reads them; see `read_data`."""
    return decided(config)[1]


def decided(config: RunConfig) -> tuple[RunConfig, dict[str, Domain], list[str]]:
    """The settings with the protocol that suits the data, the data as it reads them, and the reason and what it leaves
    out, in lines."""
    domains = read_data(config)
    name, lines = chosen_protocol(config.protocol, domains)
    read, lost = under(name, domains)
    return replace(config, protocol=name), read, [*lines, *lost]


def read_data(config: RunConfig) -> dict[str, Domain]:
    """Prepared domains, or those of the embedded sample: the clients', in client order, then those of an out-of-domain
    pool.

    A out-of-domain pool (``public_domains``) comes without client users, and the clients' domains beside it without
    public ones, so that nobody can read them.

    Raises:
        ValueError: a domain has no client users; a client is public in another domain; or the out-of-domain pool has a
            catalogue of the clients.
    """

    def load(names: Sequence[str]) -> dict[str, Domain]:
        found = load_domains(config.data, names) if config.data else sample_domains(names)
        return drawn_customers(found, config.customer_share)

    domains = load(config.domain_names)
    empty = [name for name in domains if name not in clients_of(domains)]
    if empty:
        raise ValueError(
            f"got domains {empty} without client users, expected some: they were prepared for an out-of-domain pool. "
            "Name them in --public_domains"
        )
    if not config.public_names:
        return domains
    pool = load(config.public_names)
    own = {domain.catalogue.name for domain in domains.values()}
    both = [name for name, domain in pool.items() if domain.catalogue.name in own]
    if both:
        raise ValueError(
            f"got public_domains {both} with a catalogue of the clients, expected other catalogues: an out-of-domain "
            "pool knows nothing of what the clients' users do"
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
    config, domains, _ = decided(config)
    check_targets(config)
    for name, sellers in by_catalogue(domains).items():
        if launch.is_main and not sellers.catalogue.has_texts:
            log_line(f"no item of {name} has a text: its events alone tell of it. Give titles if there are any")
    with launch.accelerator.main_process_first():
        load_encoder(config.pretrain.text_encoder)  # the table after the rounds needs it: a missing one is told now
        with stage("pretrain"):
            pretrained = _whole(pretrain_stage(config, domains, launch.device, quiet=not launch.is_main))
        with stage("distil"):
            distilled = _whole(distill_stage(config, pretrained, domains, launch.device, quiet=not launch.is_main))
    if launch.is_main:
        stages = (("pre-training", pretrained), ("distillation", distilled))
        told = ", ".join(f"{name} {'reused' if kept.reused else 'built'} ({kept.folder.name})" for name, kept in stages)
        detail(f"{config.cache}: {told}")
        if told := kept_step(pretrained):
            detail(f"backbone: {told}")
    clients = clients_of(domains)
    ids = load_ids(pretrained.folder, clients, config.pretrain)
    if launch.is_main:
        reports = {name: ids[name].items.report for name in by_catalogue(clients)}
        detail("item IDs: " + ", ".join(f"{name} {report['num_items']:,}" for name, report in reports.items()))
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
    return models._replace(rows=hidden, protected=settings.run.privacy.clips, patience=settings.run.patience)


def training_tasks(
    settings: Settings, artifacts: BaseArtifacts, tokenizer: Any, names: Sequence[str] | None = None
) -> list[Task]:
    """The clients' tasks."""
    tasks = client_tasks(artifacts.domains, artifacts.ids, tokenizer, settings.run.pretrain)
    own = {task.name: task for task in tasks}

    def of_catalogue(name: str) -> Task:
        catalogue, samples = artifacts.everyone[name].catalogue.name, settings.run.pretrain.samples
        return catalogue_task(catalogue, artifacts.ids[name].items, tokenizer, samples)._replace(name=name)

    return [own[name] if name in own else of_catalogue(name) for name in names or own]
