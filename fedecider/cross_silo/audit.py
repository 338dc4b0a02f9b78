"""The models that parties of the cross-silo track can put together from what they see: uploads, downloads, adapters.

An output directory keeps no uploads: every client's next update, after the selected round, is made from the last
checkpoint by the method's own functions. The attack (`fedecider.audit.attacks`) asks a model that a party can put
together about members, and about users of the same catalogue on whom no adapter was trained.

Shape legend: K clients, M modules, V rows of a table, A attacks (scale of an update x statistic).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.audit.attacks import AuditConfig, AuditRow, Outcome, epsilon_of, finished, utility_of
from fedecider.audit.membership import STATISTICS, Questions, questions_about, user_scores
from fedecider.audit.separation import Scored, auc, chosen_on_others, interval_over_users, true_positives
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.prepare import (
    build_base_artifacts,
    check_same_student,
    data_of_run,
    make_recommender,
)
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain, clients_of
from fedecider.data.protocol import under
from fedecider.data.store import CARD_FILE, load_domains
from fedecider.evaluation.protocols import train_parts
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.method import Block, Download, Tree, Upload
from fedecider.federation.privacy import protector
from fedecider.federation.state import RunState, load_state
from fedecider.federation.streams import stream
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.client_models import ClientModels
from fedecider.models.adapters import module_names, stack_trees
from fedecider.models.client_model import ClientModel
from fedecider.models.directions import normalise, update_norms
from fedecider.models.export import load_adapter
from fedecider.report.costs import mean_bytes
from fedecider.running.launch import Launch
from fedecider.running.run_folder import RunFolder, fingerprint
from idgen.backbone import load_backbone

SCALES = (1.0, 0.25, 0.5, 2.0, 4.0)
"""Times an update that is tried: who sees a direction does not know its size, and a larger step can show more. The
first is taken where no other client says which is best."""


class View(NamedTuple):
    """What one party sees of a client, as a model."""

    party: str
    sees: str
    model_of: Callable[[int], ClientModel]
    """client -> a model with what is seen of that client."""
    scales: Sequence[float] = SCALES
    statistics: Sequence[str] = STATISTICS
    """Those that mean something here."""


class Sent(NamedTuple):
    """One more round of a run: what crossed the wire."""

    round: int
    takes_mean: bool
    """Whether the server takes the plain mean, in which all clients weigh alike."""
    uploads: Sequence[Tree]
    """Of every client."""
    downloads: Sequence[Tree]
    """Client -> what it was sent before the round."""
    marks: Sequence[Tree]
    """Client -> rows of tables that it sent; no name where it sent all."""
    broadcasts: Sequence[Tree]
    """Client -> what it gets after the round: pairs, or stacks of all clients' directions."""


def send_once(settings: Settings, models: ClientModels, state: RunState) -> Sent:
    """Train every client once more from the selected round, bound and noise uploads as the run did, and aggregate."""
    built = METHODS[settings.run.method].build(models, settings.method)
    method = with_robust_mean(built, settings.run.robust_mean)
    protect = protector(method, settings.run.privacy, settings.run.seed)
    round, server, local = state.best_round + 1, state.best_server, state.best_local
    uploads: list[Upload] = []
    downloads = []
    for client in range(models.num_clients):
        block = Block(torch.tensor([client]), None)
        download = method.broadcast(round, server, block.clients)
        own = {name: tensor[block.clients] for name, tensor in local.items() if name not in method.unread}
        upload, _, _ = method.client_update(round, download, own, block)
        uploads.append(protect(upload, download, round, models.num_clients))
        downloads.append(known_of(download))
    after = method.server_aggregate(round, server, iter(uploads))
    next_downloads = [method.broadcast(round + 1, after, torch.tensor([client])) for client in range(len(uploads))]
    alike = len({float(upload.weights[0]) for upload in uploads}) == 1
    return Sent(
        round,
        method.takes_mean and alike and settings.run.robust_mean == "mean",
        [take_row(upload.tensors, 0) for upload in uploads],
        downloads,
        [take_row(upload.sent_rows, 0) for upload in uploads],
        [known_of(download) for download in next_downloads],
    )


def views_of(folder: RunFolder, settings: Settings, models: ClientModels, sent: Sent) -> list[View]:
    """What the server, another client and the holder of an adapter see; parties that see nothing are left out.

    The student, which everybody has and no member has touched, comes first: it must tell nothing.
    """

    def seen(pair_of: Callable[[Sent, Sequence[str], int], Tree]) -> Callable[[int], ClientModel]:
        return lambda client: models.model(client, pair_of(sent, names, client))

    views = [View("nobody", "the shared student alone", partial(_student, models), (1.0,), ("mean log-probability",))]
    names = list(models.start)
    pairs = [is_pair({**down, **up}, names) for down, up in zip(sent.downloads, sent.uploads, strict=True)]
    if all(pairs) and any(sent.uploads) and not settings.run.secure_sum:
        views.append(View("server", "the update that the client sends", seen(_upload)))
    if len(sent.uploads) > 1 and all(set(names) <= set(one) for one in sent.broadcasts):
        shown = next(iter(sent.broadcasts[0].values()))
        if shown.dim() == 3:
            size = "the client's direction, scaled to the size of its own update"
            views.append(View("another client", size, seen(_direction)))
        else:
            views.append(View("another client", "what the server sends it after the round", seen(_broadcast)))
            if sent.takes_mean:
                views.append(View("another client", "the mean without its own share", seen(_rest)))
    if all((folder.adapters / name).is_dir() for name in models.names):
        exported = partial(_exported, folder, settings, models)
        views.append(View("holder of the adapter", "the adapter as exported", exported, (1.0,)))
    return views


def another(client: int, num_clients: int) -> int:
    """The client that looks at ``client``: the one before or behind it, so that two silos of a catalogue look at each
    other where they stand side by side."""
    other = client + 1 if client % 2 == 0 else client - 1
    return other if other < num_clients else client - 1


def without_own(mean: Tree, own: Tree, marks: Sequence[Tree], observer: int) -> Tree:
    """``(n mean - own) / (n - 1)``, row by row where only some clients sent a row; zero where nobody else did.

    What a client of a plain mean over n can work out: with two clients, exactly what the other one sent.
    """
    rest: Tree = {}
    for name, tensor in mean.items():
        if name in marks[observer]:
            count_V = torch.stack([one[name] for one in marks]).sum(0)
            sent_V = marks[observer][name]
            others_V = (count_V - sent_V.to(count_V)).to(tensor)
            mine = torch.where(sent_V[:, None], own[name], torch.zeros_like(tensor))
            left = count_V.to(tensor)[:, None] * tensor - mine
            rest[name] = torch.where(others_V[:, None] > 0, left / others_V.clamp(min=1.0)[:, None], 0.0)
        else:
            rest[name] = (len(marks) * tensor - own[name]) / (len(marks) - 1)
    return rest


def known_of(download: Download) -> Tree:
    """What the only client of a download knows of it."""
    one = received(download, 0)
    return {**one.shared, **take_row(one.per_client, 0)}


def is_pair(tree: Tree, names: Iterable[str]) -> bool:
    """Whether a tree has one pair of factors of every layer."""
    return all(name in tree and tree[name].dim() == 2 for name in names)


def _pair(tree: Tree, names: Sequence[str]) -> Tree:
    return {name: tree[name] for name in names}


def _student(models: ClientModels, client: int) -> ClientModel:
    return models.student(models.names[client])


def _upload(sent: Sent, names: Sequence[str], client: int) -> Tree:
    """The upload; a factor that is not trained was downloaded."""
    return _pair({**sent.downloads[client], **sent.uploads[client]}, names)


def _broadcast(sent: Sent, names: Sequence[str], client: int) -> Tree:
    return _pair(sent.broadcasts[another(client, len(sent.uploads))], names)


def _rest(sent: Sent, names: Sequence[str], client: int) -> Tree:
    observer = another(client, len(sent.uploads))
    mean, own = (
        _pair({**sent.downloads[observer], **tree[observer]}, names) for tree in (sent.broadcasts, sent.uploads)
    )
    return without_own(mean, own, sent.marks, observer)


def _direction(sent: Sent, names: Sequence[str], client: int) -> Tree:
    """The client's direction as the observer got it, in the size that the observer's own update has, per module."""
    observer = another(client, len(sent.uploads))
    own = stack_trees([_upload(sent, names, observer)])
    pair = take_row(normalise({name: sent.broadcasts[observer][name][client][None] for name in names}).tree, 0)
    for name, size in zip(module_names(pair), update_norms(own)[0].tolist(), strict=True):
        pair[f"{name}.lora_b"] = pair[f"{name}.lora_b"] * size
    return pair


def _exported(folder: RunFolder, settings: Settings, models: ClientModels, client: int) -> ClientModel:
    base = models.base
    backbone = load_backbone(folder.backbone, base.tokenizer, settings.run.quantize, base.device)
    model = load_adapter(backbone, folder.adapters / models.names[client]).to(base.device).eval()
    return ClientModel(base._replace(model=model), models.clients[client], None)


class Asked(NamedTuple):
    """Questions about a client's members and, behind them, about others; and what the student says."""

    questions: Questions
    num_members: int
    num_others: int
    student_Q: Tensor


def audit_llm(config: AuditConfig, launch: Launch) -> Outcome:
    """Attack a finished run of the cross-silo track; needs its ``checkpoints/``, ``adapters/`` and ``backbone/``.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, has no checkpoint or nobody who was not trained on, or its data are other ones
            now; or its method federates nothing.
    """
    root = Path(config.run)
    folder, result = finished(root)
    settings = recorded_settings(root, config.data)
    if METHODS[settings.run.method].pooled:
        raise ValueError(f"got a run of {settings.run.method}, expected a method whose clients keep their data")
    domains = data_of_run(settings.run, result.record, root)
    if settings.run.start_from:
        raise ValueError(
            f"got {root}, which started from the adapters of {settings.run.start_from}, expected a run that started "
            "anew: its updates are made again from the first adapters. Audit the run that it started from"
        )
    state = load_state(folder.checkpoints, fingerprint(dict(result.record)))
    if state is None:
        raise ValueError(
            f"no checkpoint in {folder.checkpoints}, expected that of the last round: uploads are made again from it. "
            "Copy the output directory with its checkpoints, which are private"
        )
    groups = {name: members_and_others(config, settings, domains, name) for name in clients_of(domains)}
    artifacts = build_base_artifacts(settings.run, launch)
    check_same_student(folder, artifacts, root)
    models = make_recommender(settings, artifacts, launch.device)
    asked = {name: ask(config, models, groups[name], number) for number, name in enumerate(groups)}
    sent = send_once(settings, models, state)
    views = views_of(folder, settings, models, sent)
    return Outcome(
        run=root.resolve().name,
        method=settings.run.method,
        about="users",
        utility=utility_of(result, root),
        epsilon=epsilon_of(result.metrics),
        bytes_up=mean_bytes(result.rounds[-1], "up"),
        rows=[view_row(config, asked, view) for view in views],
        notes=_notes(settings, asked, sent, views, result.metrics),
    )


def members_and_others(
    config: AuditConfig, settings: Settings, domains: Mapping[str, Any], name: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Train parts of a client's users on whom it trained, and of users on whom no client did.

    The others are the users of domains of the same catalogue that took no part in the run (silos, prepared together),
    Raises:
        ValueError: there are no others.
    """
    domain, run = domains[name], settings.run
    members = list(train_parts(domain.clients.sequences))
    away = away_from_run(run.data, run.protocol, domain, domains)
    others = [part for one in away for part in train_parts(one)]
    if not others:
        raise ValueError(
            f"got nobody of the catalogue {domain.catalogue.name} on whom the run did not train, expected some to "
            "compare with: prepare the data with --silos and leave one silo out of --domains"
        )
    return drawn(config, members, f"{name} in"), drawn(config, others, f"{name} out")


def away_from_run(data: str, protocol: str, domain: Domain, domains: Mapping[str, Domain]) -> list[Sequence[list[int]]]:
    """Client sequences of the silos of the catalogue of ``domain`` beside the run's own ``domains``."""
    name = domain.catalogue.name
    prepared = sorted(path.parent.name for path in Path(data).glob(f"{name}.*/{CARD_FILE}")) if data else []
    away = [silo for silo in prepared if silo not in domains]
    own = [other.name for other in domains.values() if other.catalogue is domain.catalogue]
    silos = under(protocol, load_domains(data, [*own, *away]))[0] if away else {}
    return [silos[silo].clients.sequences for silo in away if silos[silo].items is silos[domain.name].items]


def ask(
    config: AuditConfig,
    models: ClientModels,
    groups: tuple[list[list[int]], list[list[int]]],
    client: int,
) -> Asked:
    """Make the questions about one client and let the student answer them."""
    members, others = groups
    questions = questions_about([*members, *others], config.num_events)
    num_members = questions_about(members, config.num_events).num_users
    student_Q = answers(_student(models, client), questions)
    return Asked(questions, num_members, questions.num_users - num_members, student_Q)


def answers(model: ClientModel, questions: Questions) -> Tensor:
    """(Q,) log-probability of each target among all items of the client's catalogue."""
    return model.scores().log_probs(questions.histories, questions.targets[:, None])[:, 0]


def view_row(config: AuditConfig, asked: Mapping[str, Asked], view: View) -> AuditRow:
    """Attack every client through one view; scale and statistic of each are chosen on the other clients."""
    attacks = [f"{statistic}{_times(scale)}" for scale in view.scales for statistic in view.statistics]
    found: list[list[Scored]] = []
    for client, one in enumerate(asked.values()):
        scores, model = [], view.model_of(client)
        for scale in view.scales:
            answer_Q = answers(model.scaled(scale), one.questions)
            found_U = user_scores(answer_Q, one.student_Q, one.questions.user_Q)
            scores += [found_U[statistic] for statistic in view.statistics]
        found.append([Scored(score_U[: one.num_members], score_U[one.num_members :]) for score_U in scores])
    auc_AC = torch.tensor([[auc(scored) for scored in of_client] for of_client in found], dtype=torch.float64).T
    chosen = chosen_on_others(auc_AC, torch.arange(len(found))).tolist()
    scored = [of_client[attack] for of_client, attack in zip(found, chosen, strict=True)]
    ((often, _),) = Counter(chosen).most_common(1)
    area, rate = (
        interval_over_users(statistic, scored, stream(config.seed, "interval", view.party, view.sees))
        for statistic in (auc, true_positives)
    )
    return AuditRow(view.party, view.sees, attacks[often], area, rate)


def _times(scale: float) -> str:
    return "" if scale == 1.0 else f", update times {scale:g}"


def drawn(config: AuditConfig, sequences: Sequence[list[int]], label: str) -> list[list[int]]:
    order = torch.randperm(len(sequences), generator=stream(config.seed, "audited users", label))
    return [sequences[user] for user in order[: config.num_users or len(sequences)].sort().values.tolist()]


def _unseen(settings: Settings) -> str:
    if settings.run.secure_sum:
        return "the server sees the sum of the updates alone (secure_sum), which is in what it sends"
    return "the server gets no update of this method"


def _notes(
    settings: Settings, asked: Mapping[str, Asked], sent: Sent, views: Sequence[View], metrics: Mapping[str, Any]
) -> list[str]:
    members, others = (sum(getattr(one, name) for one in asked.values()) for name in ("num_members", "num_others"))
    shares = {name: share for name, share in metrics.get("update_scales", {}).items() if share != 1.0}
    return [
        f"{members:,} members and {others:,} others of {len(asked)} client(s); attacked is round {sent.round}",
        *([] if any(view.party == "server" for view in views) else [_unseen(settings)]),
        *(["no other client says which attack does best: the first one is reported"] if len(asked) == 1 else []),
        *([f"adapters hold a share of the update: {shares}"] if shares else []),
    ]
