"""What a run of the LLM track starts from: settings, data, stages 1 and 2, the student with adapters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from fedecider.data.card import describe, make_card
from fedecider.data.domain import NO_EVENTS, Domain, check_public_disjoint, clients_of
from fedecider.data.encoders import load_encoder, stand_in_warning
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.parties import Processes
from fedecider.federation.streams import stream
from fedecider.llm.config import RunConfig
from fedecider.llm.domain_ids import DomainIds, load_ids
from fedecider.llm.foundation import client_tasks, distill_stage, pretrain_stage
from fedecider.lora.adapters import attach_lora, layer_names
from fedecider.memory.config import MemoryConfig
from fedecider.memory.contexts import calibration_users
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels, LocalTraining, build_recommender
from fedecider.running.launch import Launch
from fedecider.running.progress import console
from fedecider.running.stages import Stage, as_plain, content_key
from idgen.backbone import check_backbone, has_tied_output, linear_layers, load_backbone
from idgen.candidates import with_prior
from idgen.quantized import check_quantize
from idgen.ranking_config import RankingConfig
from idgen.samples import Task, catalogue_task
from idgen.tokenizer import load_tokenizer


class Settings(NamedTuple):
    """All settings of one run, as the command line gives them."""

    run: RunConfig
    training: LocalTraining
    ranking: RankingConfig
    method: Any
    """The method's own frozen dataclass."""

    def as_record(self) -> dict[str, Any]:
        """By block, and ``package`` where an installed package brings the method."""
        blocks = {name: as_plain(value) for name, value in self._asdict().items()}
        return {**blocks, **METHODS.as_record(self.run.method)}


class Foundation(NamedTuple):
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
    own = {domain.catalogue for domain in domains.values()}
    both = [name for name, domain in pool.items() if domain.catalogue in own]
    if both:
        raise ValueError(
            f"got public_domains {both} with a catalogue of the clients, expected other catalogues: a foreign pool "
            "knows nothing of what the clients' users do"
        )
    check_public_disjoint({**domains, **pool})
    without_public = {name: _without_public(domain) for name, domain in domains.items()}
    return {**without_public, **{name: without_users(domain) for name, domain in pool.items()}}


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


def build_foundation(config: RunConfig, launch: Launch) -> Foundation:
    """Data, and stages 1 and 2 where they are not there yet; with several processes the first one builds them.

    Raises:
        ValueError: settings that could not be used afterwards, told before anything is built; or a damaged stage.
    """
    check_quantize(config.quantize)
    domains = load_data(config)
    check_targets(config)
    if launch.is_main and (sentence := stand_in_warning(config.pretrain.text_encoder)):
        print(f"warning: {sentence}", file=sys.stderr)
    with launch.accelerator.main_process_first():
        load_encoder(config.pretrain.text_encoder)  # the table after the rounds needs it: a missing one is told now
        pretrained = _whole(pretrain_stage(config, domains, launch.device, quiet=not launch.is_main))
        distilled = _whole(distill_stage(config, pretrained, domains, launch.device, quiet=not launch.is_main))
    if launch.is_main:
        for name, stage in (("pre-training", pretrained), ("distillation", distilled)):
            console.print(f"{name}: {'reused' if stage.reused else 'built'} {stage.folder}", highlight=False)
    clients = clients_of(domains)
    ids = load_ids(pretrained.folder, clients, config.pretrain)
    return Foundation(clients, ids, pretrained, distilled, {**clients, **domains})


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
    foundation: Foundation,
    device: torch.device,
    deepspeed: Accelerator | None = None,
    names: Sequence[str] | None = None,
    processes: Processes | None = None,
) -> ClientModels:
    """The student with adapters attached, and the clients' tasks.

    ``processes``: of the run. ``names``: all clients of the run, where ``foundation.domains`` are not all of them: a
    catalogue stands for the others' tasks.
    """
    tokenizer = load_tokenizer(foundation.distilled.folder / "backbone")
    student = load_backbone(foundation.distilled.folder / "backbone", tokenizer, settings.run.quantize, device)
    tasks = training_tasks(settings, foundation, tokenizer, names)
    if settings.ranking.prior_weight > 0.0:
        tasks = with_priors(tasks, student, settings, device)
    return build_recommender(
        attach_lora(student, settings.run.lora_settings),
        tokenizer,
        tasks,
        seed=settings.run.seed,
        training=settings.training,
        ranking=settings.ranking,
        drop_seen=get_protocol(settings.run.protocol).drop_seen,
        device=device,
        deepspeed=deepspeed,
        processes=processes,
    )._replace(protected=settings.run.privacy.clips)


def with_priors(tasks: Sequence[Task], student: Any, settings: Settings, device: torch.device) -> list[Task]:
    """The tasks as they are ranked (`idgen.candidates.with_prior`); silos of one catalogue share what is worked out."""
    weight, precision, found = settings.ranking.prior_weight, settings.training.precision, []
    of_ids: dict[str, Task] = {}
    for task in tasks:
        ids = content_key(task.item_ids.token_ids)
        if ids not in of_ids:
            of_ids[ids] = with_prior(task, student.to(device), weight, device, precision)
        found.append(task._replace(trie=of_ids[ids].trie))
    return found


def training_tasks(
    settings: Settings, foundation: Foundation, tokenizer: Any, names: Sequence[str] | None = None
) -> list[Task]:
    """The clients' tasks; with a memory without the users on whom its weights are fitted (`calibration`)."""
    tasks = client_tasks(foundation.domains, foundation.ids, tokenizer, settings.run.pretrain)
    if settings.run.memory.kind != "none":
        asked = settings.run.memory, settings.run.seed
        tasks = [task.without_users(calibration(foundation.domains[task.name], *asked)) for task in tasks]
    own = {task.name: task for task in tasks}

    def of_catalogue(name: str) -> Task:
        catalogue, samples = foundation.everyone[name].catalogue, settings.run.pretrain.samples
        return catalogue_task(catalogue, foundation.ids[name].items, tokenizer, samples)._replace(name=name)

    return [own[name] if name in own else of_catalogue(name) for name in names or own]


def calibration(domain: Domain, config: MemoryConfig, seed: int) -> list[int]:
    """Rows of the client's users that are kept for the weights of its memory, alike in every call."""
    return calibration_users(
        domain.clients.sequences, config.calibration_share, stream(seed, "calibration", domain.name)
    )
