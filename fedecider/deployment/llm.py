"""What the cross-silo track gives a deployment: every domain is a client, and a site of its own.

A project then has ``public/<domain>/`` (prepared domains without client users) and ``cache/`` (stages 1 and 2, and
vectors of the published item texts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedecider.cross_silo import base_stages, prepare, reported
from fedecider.cross_silo.command_line import settings_from_plain
from fedecider.cross_silo.ended import Ended
from fedecider.cross_silo.ensembles import KEPT
from fedecider.cross_silo.entries import Positions
from fedecider.cross_silo.feasibility import check_sizes, check_uploads
from fedecider.cross_silo.item_ids import load_ids
from fedecider.cross_silo.joining import (
    AT_HOME,
    check_common,
    checked_events,
    has_local_row,
    overlap_data,
    trains_alone,
)
from fedecider.cross_silo.privacy import check_privacy, privacy_data
from fedecider.cross_silo.results import evaluate, variant_entries, weights_by_itself, write_outcome
from fedecider.data.domain import NO_EVENTS, Domain
from fedecider.data.encoders import chosen_encoder
from fedecider.data.near_texts import unit_vectors
from fedecider.data.protocol import chosen_protocol, under
from fedecider.data.store import load_domains, save_domains
from fedecider.deployment.counts import SiteCounts, share_counts, site_counts, what_sites_learn
from fedecider.deployment.messages import Channel, Message
from fedecider.deployment.project import Parts, PartyFile, Project, Shared, check_run
from fedecider.deployment.secure import SiteSums
from fedecider.deployment.server import Plan
from fedecider.deployment.site import Site, one_client
from fedecider.deployment.weights import SiteWeights, share_weights, site_weights, what_all_learn
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import NEXT_BASKET
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.checksums import SUMS_FILE, file_sha256
from fedecider.federation.method import Block, Download, FederatedMethod
from fedecider.federation.privacy import protector
from fedecider.federation.record import read_records, write_json
from fedecider.federation.rounds import RoundSettings
from fedecider.federation.secure_rounds import SecureSums, check_takes_mean
from fedecider.federation.state import RunState
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.beside import beside
from fedecider.methods.client_models import ClientModels
from fedecider.methods.config import LOCAL
from fedecider.methods.rows import secure_sums
from fedecider.models.client_model import ClientModel
from fedecider.models.ensemble import Weights
from fedecider.models.item_texts import encoded_texts
from fedecider.models.versions import drop_versions
from fedecider.report.joining import difference_row, odd_sentences
from fedecider.running.launch import Launch
from fedecider.running.manifest import write_manifest
from fedecider.running.progress import log_line
from fedecider.running.run_folder import SITE, SITE_LOGS, RunFolder, provenance, recorded
from fedecider.running.stages import only_stage

_TELLING = ("report.json", "inputs.json", SUMS_FILE)


class Party(NamedTuple):
    """A server or a site, ready for the first round."""

    recommender: ClientModels
    method: FederatedMethod
    artifacts: prepare.BaseArtifacts
    """``domains`` are those whose users this party has: none at the server."""


def public(settings: prepare.Settings, sites: str = "") -> Shared:
    """A project of the public users and items of prepared domains; client users in them are left out.

    Raises:
        ValueError: these settings cannot be deployed, or the data are missing or damaged.
    """
    _check_sites(sites)
    check_deployable(settings)
    config = settings.run
    if not config.data:
        raise ValueError("got no data, expected the folder of prepared domains whose public users all parties may see")
    return _shared(settings, load_domains(config.data, config.domain_names))


def simulated(settings: prepare.Settings, sites: str = "") -> Shared:
    """A project, and the domains of all sites."""
    _check_sites(sites)
    check_deployable(settings)
    domains = prepare.read_data(settings.run)

    def write_own(name: str, folder: Path) -> None:
        save_domains({name: domains[name]}, folder)

    return _shared(settings, domains)._replace(write_own=write_own)


def _check_sites(sites: str) -> None:
    if sites:
        raise ValueError(f"got sites {sites}, expected none: every domain of the cross-silo track is a site")


def _shared(settings: prepare.Settings, domains: Mapping[str, Domain]) -> Shared:
    """The same with and without client users in ``domains``."""
    known = {name: prepare.without_users(domain) for name, domain in domains.items()}
    settings, why = _decided(settings, known)
    read, lost = under(settings.run.protocol, known)
    prepare.check_targets(settings.run)
    check_sizes(settings, known)
    check_uploads(settings, len(known))
    overlap = overlap_data(settings, known, known)
    check_common(settings, overlap)

    def build(folder: Path, device: torch.device, quiet: bool) -> Mapping[str, Any]:
        save_domains(known, folder / "public")
        run = _placed(settings, folder).run
        base_stages.distill_stage(run, base_stages.pretrain_stage(run, read, device, quiet), read, device, quiet)
        encoded_texts(known, run.pretrain.text_encoder, run.cache)
        cache = folder / "cache"  # of the stages all but reports, which tell seconds, and places
        files = sorted(path for path in cache.rglob("*") if path.is_file() and path.name not in _TELLING)
        return {
            "data": {name: domain.content_hash() for name, domain in known.items()},
            "files": [[list(path.relative_to(cache).parts[1:]), file_sha256(path)] for path in files],
        }

    hosts, hides = {name: [client] for client, name in enumerate(known)}, settings.training.user_privacy.on
    notes = [*why, *lost, *overlap["sentences"], *what_sites_learn(known, settings.run.ensemble, hides)]
    notes += [] if hides else what_all_learn(settings.run.ensemble, list(known))
    return Shared(_placed(settings, Path()), hosts, build=build, notes=notes)


def _decided(settings: prepare.Settings, known: Mapping[str, Domain]) -> tuple[prepare.Settings, list[str]]:
    """Settings with a protocol that all sites have from the start: what is public of the data decides, and why."""
    public = {
        name: replace(domain, clients=domain.public, public=NO_EVENTS)
        for name, domain in known.items()
        if len(domain.public.users) > 1
    }
    protocol, why = chosen_protocol(settings.run.protocol, public)
    if why and not public:
        why = [f"protocol {protocol}: nobody is public; where customers buy again, give --protocol {NEXT_BASKET.name}"]
    return settings._replace(run=replace(settings.run, protocol=protocol)), why


def _placed(settings: prepare.Settings, root: Path) -> prepare.Settings:
    """The settings with the places of a project, and the encoder by its name, so that sites need not have it."""
    config = settings.run
    places: dict[str, Any] = {"data": str(root / "public"), "cache": str(root / "cache"), "output": "", "resume": False}
    places["seeds"] = 1  # a deployment trains once
    encoder = chosen_encoder(config.pretrain.text_encoder)
    pretrain = replace(config.pretrain, text_encoder=encoder)
    return settings._replace(run=replace(config, pretrain=pretrain, **places))


def check_deployable(settings: prepare.Settings) -> None:
    """``ValueError`` where a deployed run would not be the simulated one, or would need what sites do not have."""
    check_run(settings.run)
    config, privacy = settings.run, settings.run.privacy
    pooled = METHODS[config.method].pooled
    in_the_sum = privacy.noise_on == "sum" and privacy.noise_scale > 0.0
    for holds, got, expected in (
        (pooled, f"method {config.method}", "one that federates: pooling is what silos cannot do"),
        (config.method == LOCAL, f"method {LOCAL}", f"one that exchanges something: {AT_HOME}"),
        (
            config.hyperparameter_candidates,
            "hyperparameter_candidates",
            "none in a deployment, whose adapters have one shape from the start: give "
            "--hyperparameter_candidates '[]' and, where the data are dense, what one of them has "
            "(--lora_targets, --learning_rate)",
        ),
        (in_the_sum, "privacy.noise_on sum", "upload in a deployment: its server sees every single upload"),
        (config.public_names, "public_domains", "none in a deployment: prepare public users of the own domains"),
    ):
        if holds:
            raise ValueError(f"got {got}, expected {expected}")
    check_privacy(settings)


def party(project: Project, own: Mapping[str, Domain], device: torch.device) -> Party:
    """A server (``own`` empty) or the site whose domain is in ``own`` (`own_domain`)."""
    settings = project.settings
    known = under(settings.run.protocol, load_domains(settings.run.data, project.names))[0]
    everyone = known | {name: with_clients(known[name], domain) for name, domain in own.items()}
    pretrained, distilled = (only_stage(project.root / "cache", name) for name in ("pretrain", "distill"))
    ids = load_ids(pretrained.folder, known, settings.run.pretrain, synthetic_of=own)
    artifacts = prepare.BaseArtifacts({name: everyone[name] for name in own}, ids, pretrained, distilled, everyone)
    recommender = prepare.make_recommender(settings, artifacts, device, names=project.names)._replace(secret=True)
    method = METHODS[settings.run.method].build(recommender, settings.method)
    return Party(recommender, with_robust_mean(method, settings.run.robust_mean), artifacts)


def with_clients(public: Domain, own: Domain) -> Domain:
    """``public``, which sites share, with the client users of the site that has the same items (`own_domain`)."""
    return replace(public, clients=own.clients, card=own.card)


def own_domain(project: Project, data: str, name: str) -> Domain:
    """The site's prepared domain.

    Raises:
        ValueError: the project has other public data than the site, or there are no client users.
    """
    domain = load_domains(data, [name])[name]
    if not domain.clients.users:
        raise ValueError(f"got no client users of {name} in {data}, expected the site's own ones")
    folder = project.settings.run.data
    if prepare.without_users(domain).content_hash() != load_domains(folder, [name])[name].content_hash():
        raise ValueError(
            f"got another catalogue or other public users of {name} than the project has, expected the same: prepare "
            f"the site's data with the items and public users in {folder}"
        )
    read, lost = under(project.settings.run.protocol, {name: domain})
    for line in lost:
        log_line(line)
    return read[name]


def server(project: Project, output: Path, device: torch.device) -> Plan:
    """All rounds, then the sums of counts and of weights."""
    run, served = project.settings.run, party(project, {}, device)
    everyone, promised = served.artifacts.everyone, privacy_data(project.settings, len(project.names))
    overlap, hides = overlap_data(project.settings, everyone, everyone), project.settings.training.user_privacy.on
    for sentence in overlap["sentences"]:
        log_line(sentence)

    def after_rounds(channel: Channel, round: int, requests: Mapping[int, Message]) -> None:
        share_counts(channel, run.ensemble, run.seed, everyone, round, output, hides)
        if not hides:
            share_weights(channel, run.ensemble, run.seed, requests, output)

    return Plan(
        served.method,
        RoundSettings(run.num_rounds, run.seed, run.participation, patience=run.patience),
        sums=sums_of(project, served) if run.secure_sum else None,
        after_rounds=after_rounds,
        facts=lambda state, records: {"privacy": promised} if promised else {},
        about={"overlap": overlap},
    )


def sums_of(project: Project, own: Party) -> SecureSums:
    """How a project's uploads are summed.

    Raises:
        ValueError: its method needs single uploads.
    """
    run = project.settings.run
    check_takes_mean(own.method)
    return secure_sums(own.recommender.rows, own.method.takes_mean, run.participation, run.seed)


def site(project: Project, place: PartyFile, launch: Launch) -> Site:
    """The site of one domain.

    Raises:
        ValueError: what `own_domain` refuses.
    """
    name, output, run = place.client, Path(place.output), project.settings.run
    own = party(project, {name: own_domain(project, place.data, name)}, launch.device)
    if trains_alone(project.settings, len(project.names)):
        own = own._replace(method=beside(own.method, own.recommender))
    everyone = own.artifacts.everyone
    unit_ID = unit_vectors(encoded_texts(everyone, run.pretrain.text_encoder, run.cache)[name].numpy())
    odd = odd_sentences(checked_events(own.artifacts.domains, {name: unit_ID}))
    for sentence in overlap_data(project.settings, everyone, everyone, name)["sentences"] + odd:
        log_line(sentence)
    client = project.names.index(name)
    users, names, of_run = project.settings.training.user_privacy, project.names, (output, project.run)
    counts = site_counts(run.ensemble, run.seed, own.artifacts, names, client, of_run, users)
    weights = None if users.on else site_weights(run.ensemble, run.seed, names, client, *of_run)
    end = _End(project, own, client, RunFolder(output), launch, counts, weights, place.data)
    return Site(
        method=own.method,
        hosted=one_client(client),
        run=project.run,
        folder=output,
        finish=end.write,
        most_bytes=place.deployment.max_bytes,
        protect=protector(own.method, run.privacy, seed=None),
        spends=run.num_rounds if privacy_data(project.settings, len(project.names)) else 0,
        sums=SiteSums(sums_of(project, own), client) if run.secure_sum else None,
        counts=counts,
        weights=weights,
        fit=end.weights_by_itself,
    )


class _End(NamedTuple):
    """What a site writes when the rounds are over."""

    project: Project
    own: Party
    client: int
    folder: RunFolder
    launch: Launch
    counts: SiteCounts | None
    weights: SiteWeights | None
    data: str
    """The folder of its prepared domain."""

    def write(self, state: RunState, download: Download) -> Mapping[str, Any]:
        """Test, tables, ensemble and adapter of one site, as a simulated run writes them; the figures that it tells."""
        name, logged = self.project.names[self.client], self.folder.root / SITE_LOGS
        run = self._ended(name, state, download)
        if self.weights is not None:
            run = run._replace(prior=self.weights.prior)
            if run.prior is None:
                log_line(f"the ensemble of {name} is fitted without the weights of all: no sum of theirs has come")
        logs = read_records(logged) if logged.is_file() else []
        outcome = evaluate(run, variant_entries(run), RunResult(self._record(name), {}, [], logs))
        result = outcome.result
        drop_versions(self.folder.root)  # of an earlier training
        write_json(self.folder.record, result.record)
        write_outcome(run, outcome, self.folder)
        write_manifest(self.folder.root)
        test = result.figures[name]["test"]  # what a site keeps is its own affair
        known = {entry: values for entry, values in test.items() if not entry.startswith(KEPT)}
        joining = result.metrics.get("joining", {})
        joined, alone = joining.get("joined", ""), joining.get("alone", "")
        return {**known, **difference_row(result.metrics["comparisons"], joined, alone)}

    def weights_by_itself(self, state: RunState, download: Download) -> Weights:
        """The weights of the ensemble, before those of all are known."""
        name = self.project.names[self.client]
        return weights_by_itself(self._ended(name, state, download), name)

    def _ended(self, name: str, state: RunState, download: Download) -> Ended:
        """The models of one domain, from what its site was sent and its own row of the state."""
        settings, (models, method, artifacts) = self.project.settings, self.own
        block, own = Block(torch.tensor([self.client]), None), take_row(state.best_local, 0)

        def joined(name: str) -> ClientModel:
            return reported.model_from(settings, method, models, received(download, 0), own, self.client)

        def alone(name: str) -> tuple[ClientModel, float]:
            return reported.trained_alone(models, settings.run.num_rounds, take_row(state.local, 0), self.client)

        def variant(variant: str, split: str) -> Positions:
            return {name: method.positions(variant, download, state.best_local, block, split)[0]}

        score = mean_metrics(variant(method.variants[0], "valid")[name])["ndcg@10"]
        counts = self.counts.found() if self.counts else {}
        rounds, has_alone = state._replace(best_score=score), has_local_row(settings, state.local)
        return Ended(settings, method, models, artifacts, rounds, joined, alone if has_alone else None, variant, counts)

    def _record(self, name: str) -> dict[str, Any]:
        """What makes the folder that of a run of one client, for every command that reads runs."""
        settings, everyone = self.project.settings, self.own.artifacts.everyone
        places = {
            "domains": name,
            "data": str(Path(self.data).absolute()),
            "cache": str((self.project.root / "cache").absolute()),
            "output": str(self.folder.root),
        }
        return {
            "config": recorded(settings._replace(run=replace(settings.run, **places)).as_record()),
            "protocol": settings.run.protocol,
            "data": {name: self.own.artifacts.domains[name].content_hash()},
            "overlap": overlap_data(settings, everyone, everyone, name),
            SITE: {"project": self.project.run, "clients": self.project.names},
            **provenance(),
        }


PARTS = Parts(
    public=public,
    simulated=simulated,
    settings=lambda plain, source, root: _placed(settings_from_plain(plain, source), root),
    check=lambda project: check_deployable(project.settings),
    own_data=own_domain,
    server=server,
    site=site,
)
