"""The models that parties of the cross-silo track can put together from what they see: uploads, downloads, adapters.

A run folder keeps no uploads: every client's next update, after the selected round, is made from the last checkpoint by
the method's own functions. The attack (`fedecider.audit.attacks`) asks a model that a party can put together about
members, and about users of the same catalogue on whom no adapter was trained.

Shape legend: K clients, M modules, V rows of a table, A attacks (scale of an update x statistic).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.audit.attacks import (
    STATISTICS,
    AuditConfig,
    AuditRow,
    Outcome,
    Questions,
    Scored,
    auc,
    chosen_on_others,
    epsilon_of,
    finished,
    interval_over_users,
    joined,
    questions_about,
    true_positives,
    user_scores,
)
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.prepare import (
    Settings,
    build_base_artifacts,
    calibration,
    check_same_student,
    data_of_run,
    load_student,
    make_recommender,
)
from fedecider.data.domain import Domain, clients_of
from fedecider.data.store import CARD_FILE, load_domains
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.statistics import Interval
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.method import Block, Download, Tree, Upload
from fedecider.federation.privacy import protector
from fedecider.federation.record import read_records
from fedecider.federation.state import RunState, load_state
from fedecider.federation.streams import stream
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels
from fedecider.models.adapters import adapter_shapes, initial_adapters, load_plain, module_names, stack_trees
from fedecider.models.directions import normalise, update_norms
from fedecider.models.export import load_adapter
from fedecider.models.loaded import model_scores
from fedecider.report.analyses import mean_bytes
from fedecider.running.launch import Launch
from fedecider.running.run_folder import RunFolder, damage_names, fingerprint
from idgen.backbone import load_backbone

# The models that parties of the cross-silo track can put together from what they see: uploads, downloads, exported
# adapters.

SCALES = (1.0, 0.25, 0.5, 2.0, 4.0)
"""Times an update that is tried: who sees a direction does not know its size, and a larger step can show more. The
first is taken where no other client says which is best."""


class View(NamedTuple):
    """What one party sees of a client, as a model."""

    party: str
    sees: str
    load: Callable[[int, float], Any]
    """client, scale -> a model with what is seen of that client; it may be the recommender's own."""
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


def send_once(settings: Settings, recommender: ClientModels, state: RunState) -> Sent:
    """Train every client once more from the selected round, bound and noise uploads as the run did, and aggregate."""
    built = METHODS[settings.run.method].build(recommender, settings.method)
    method = with_robust_mean(built, settings.run.robust_mean)
    protect = protector(method, settings.run.privacy, settings.run.seed)
    round, server, local = state.best_round + 1, state.best_server, state.best_local
    uploads: list[Upload] = []
    downloads = []
    for client in range(recommender.num_clients):
        block = Block(torch.tensor([client]), None)
        download = method.broadcast(round, server, block.clients)
        own = {name: tensor[block.clients] for name, tensor in local.items() if name not in method.unread}
        upload, _, _ = method.client_update(round, download, own, block)
        uploads.append(protect(upload, download, round, recommender.num_clients))
        downloads.append(_known(download))
    after = method.server_aggregate(round, server, iter(uploads))
    next_downloads = [method.broadcast(round + 1, after, torch.tensor([client])) for client in range(len(uploads))]
    alike = len({float(upload.weights[0]) for upload in uploads}) == 1
    return Sent(
        round,
        method.takes_mean and alike and settings.run.robust_mean == "mean",
        [take_row(upload.tensors, 0) for upload in uploads],
        downloads,
        [take_row(upload.sent_rows, 0) for upload in uploads],
        [_known(download) for download in next_downloads],
    )


def views_of(folder: RunFolder, settings: Settings, recommender: ClientModels, sent: Sent) -> list[View]:
    """What the server, another client and the holder of an adapter see; parties that see nothing are left out.

    The student, which everybody has and no member has touched, comes first: it must tell nothing.
    """
    alone = partial(_load_student, recommender)
    views = [View("nobody", "the shared student alone", alone, (1.0,), ("mean log-probability",))]
    names = list(initial_adapters(adapter_shapes(recommender.model), recommender.seed))
    pairs = [_is_pair({**down, **up}, names) for down, up in zip(sent.downloads, sent.uploads, strict=True)]
    if all(pairs) and any(sent.uploads) and not settings.run.secure_sum:
        load = partial(_load_upload, recommender, sent, names)
        views.append(View("server", "the update that the client sends", load))
    if len(sent.uploads) > 1 and all(set(names) <= set(one) for one in sent.broadcasts):
        shown = next(iter(sent.broadcasts[0].values()))
        if shown.dim() == 3:
            load = partial(_load_direction, recommender, sent, names)
            views.append(View("another client", "the client's direction, scaled to the size of its own update", load))
        else:
            load = partial(_load_broadcast, recommender, sent, names)
            views.append(View("another client", "what the server sends it after the round", load))
            if sent.takes_mean:
                load = partial(_load_rest, recommender, sent, names)
                views.append(View("another client", "the mean without its own share", load))
    if all((folder.adapters / name).is_dir() for name in recommender.names):
        load = partial(_load_exported, folder, settings, recommender)
        views.append(View("holder of the adapter", "the adapter as handed over", load, (1.0,)))
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


def scaled(pair: Tree, scale_M: Sequence[float]) -> Tree:
    """The pair whose update ``B A`` of each module is that many times as large."""
    found = dict(pair)
    for name, scale in zip(module_names(pair), scale_M, strict=True):
        found[f"{name}.lora_b"] = pair[f"{name}.lora_b"] * scale
    return found


def _known(download: Download) -> Tree:
    """What the only client of a download knows of it."""
    one = received(download, 0)
    return {**one.shared, **take_row(one.per_client, 0)}


def _is_pair(tree: Tree, names: Sequence[str]) -> bool:
    return all(name in tree and tree[name].dim() == 2 for name in names)


def _pair(tree: Tree, names: Sequence[str]) -> Tree:
    return {name: tree[name] for name in names}


def _load(recommender: ClientModels, pair: Tree, scale: float) -> Any:
    load_plain(recommender.model, scaled(pair, [scale] * len(module_names(pair))))
    return recommender.model


def _load_student(recommender: ClientModels, client: int, scale: float) -> Any:
    load_student(recommender)
    return recommender.model


def _load_upload(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    """The upload; a factor that is not trained was downloaded."""
    pair = _pair({**sent.downloads[client], **sent.uploads[client]}, names)
    return _load(recommender, pair, scale)


def _load_broadcast(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    observer = another(client, len(sent.uploads))
    return _load(recommender, _pair(sent.broadcasts[observer], names), scale)


def _load_rest(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    observer = another(client, len(sent.uploads))
    mean, own = (
        _pair({**sent.downloads[observer], **tree[observer]}, names) for tree in (sent.broadcasts, sent.uploads)
    )
    return _load(recommender, without_own(mean, own, sent.marks, observer), scale)


def _load_direction(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    """The client's direction as the observer got it, in the size that the observer's own update has, per module."""
    observer = another(client, len(sent.uploads))
    own = stack_trees([_pair({**sent.downloads[observer], **sent.uploads[observer]}, names)])
    direction = normalise({name: sent.broadcasts[observer][name][client][None] for name in names})
    size_M = update_norms(own)[0] * scale
    load_plain(recommender.model, scaled(take_row(direction.tree, 0), size_M.tolist()))
    return recommender.model


def _load_exported(folder: RunFolder, settings: Settings, recommender: ClientModels, client: int, scale: float) -> Any:
    base = load_backbone(folder.backbone, recommender.tokenizer, settings.run.quantize, recommender.device)
    return load_adapter(base, folder.adapters / recommender.names[client]).to(recommender.device).eval()


# What each party can tell of the users on whom a client trained, from a run of this track.


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
    folder, record, metrics = finished(root)
    settings = recorded_settings(root, config.data)
    if METHODS[settings.run.method].pooled:
        raise ValueError(f"got a run of {settings.run.method}, expected a method whose clients keep their data")
    domains = data_of_run(settings.run, record, root)
    groups = {name: members_and_others(config, settings, domains, name) for name in clients_of(domains)}
    if settings.run.start_from:
        raise ValueError(
            f"got {root}, which started from the adapters of {settings.run.start_from}, expected a run that started "
            "anew: its updates are made again from the first adapters. Audit the run that it started from"
        )
    state = load_state(folder.checkpoints, fingerprint(record))
    if state is None:
        raise ValueError(
            f"no checkpoint in {folder.checkpoints}, expected that of the last round: uploads are made again from it. "
            "Copy the run folder with its checkpoints, which are private"
        )
    artifacts = build_base_artifacts(settings.run, launch)
    check_same_student(folder, artifacts, root)
    recommender = make_recommender(settings, artifacts, launch.device)
    asked = {name: ask(config, settings, recommender, groups[name], number) for number, name in enumerate(groups)}
    sent = send_once(settings, recommender, state)
    views = views_of(folder, settings, recommender, sent)
    with damage_names(folder.metrics):
        rows = metrics[MACRO] if MACRO in metrics else next(iter(metrics["domains"].values()))
        best = rows["test"][metrics["reported"]]["ndcg@10"]
        utility = Interval(*(float(best[name]) for name in Interval._fields))
    return Outcome(
        run=root.resolve().name,
        method=settings.run.method,
        about="users",
        utility=utility,
        epsilon=epsilon_of(metrics),
        bytes_up=mean_bytes(read_records(folder.rounds)[-1], "up"),
        rows=[view_row(config, settings, recommender, asked, view) for view in views],
        notes=_notes(settings, asked, sent, views, metrics),
    )


def members_and_others(
    config: AuditConfig, settings: Settings, domains: Mapping[str, Any], name: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Sequences of a client's users on whom it trained, and of users on whom no client did.

    The others are the users of domains of the same catalogue that took no part in the run (silos, prepared together),
    else those whom the client's hybrid kept for its weights.

    Raises:
        ValueError: there are no others.
    """
    domain, run = domains[name], settings.run
    sequences = domain.clients.sequences
    kept = set(calibration(domain, run.seed)) if run.hybrid.kind != "none" else set()
    members = [sequence for user, sequence in enumerate(sequences) if user not in kept]
    others = [sequence for one in away_from_run(run.data, domain, domains) for sequence in one]
    others = others or [sequences[user] for user in sorted(kept)]
    if not others:
        raise ValueError(
            f"got nobody of the catalogue {domain.catalogue.name} on whom the run did not train, expected some to "
            "compare with: prepare the data with --silos and leave one silo out of --domains, or run with "
            "--hybrid.kind mixture, which keeps users out of the training"
        )
    return _drawn(config, members, f"{name} in"), _drawn(config, others, f"{name} out")


def away_from_run(data: str, domain: Domain, domains: Mapping[str, Domain]) -> list[Sequence[list[int]]]:
    """Client sequences of the silos of the catalogue of ``domain`` beside the run's own ``domains``."""
    name = domain.catalogue.name
    prepared = sorted(path.parent.name for path in Path(data).glob(f"{name}.*/{CARD_FILE}")) if data else []
    away = [silo for silo in prepared if silo not in domains]
    own = [other.name for other in domains.values() if other.catalogue is domain.catalogue]
    silos = load_domains(data, [*own, *away]) if away else {}
    return [silos[silo].clients.sequences for silo in away if silos[silo].items is silos[domain.name].items]


def ask(
    config: AuditConfig,
    settings: Settings,
    recommender: ClientModels,
    groups: tuple[list[list[int]], list[list[int]]],
    client: int,
) -> Asked:
    """Make the questions about one client and let the student answer them."""
    inside, outside = (questions_about(part, config.num_events) for part in groups)
    questions, num_members = joined(inside, outside)
    load_student(recommender)
    student_Q = answers(recommender.model, settings, recommender, client, questions)
    return Asked(questions, num_members, int(questions.user_Q.max()) + 1 - num_members, student_Q)


def answers(model: Any, settings: Settings, recommender: ClientModels, client: int, questions: Questions) -> Tensor:
    """(Q,) log-probability of each target among all items of the client's catalogue."""
    task, device = recommender.tasks[client], recommender.device
    scores = model_scores(model, task, settings.ranking, settings.training.precision, device)
    return scores.log_probs(questions.histories, questions.targets[:, None])[:, 0]


def view_row(
    config: AuditConfig, settings: Settings, recommender: ClientModels, asked: Mapping[str, Asked], view: View
) -> AuditRow:
    """Attack every client through one view; scale and statistic of each are chosen on the other clients."""
    attacks = [f"{statistic}{_times(scale)}" for scale in view.scales for statistic in view.statistics]
    found: list[list[Scored]] = []
    for client, one in enumerate(asked.values()):
        scores = []
        for scale in view.scales:
            model = view.load(client, scale)
            answer_Q = answers(model, settings, recommender, client, one.questions)
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


def _drawn(config: AuditConfig, sequences: Sequence[list[int]], label: str) -> list[list[int]]:
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
