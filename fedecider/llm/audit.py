"""What each party can tell of the users on whom a client trained, from a run of this track.

A run folder keeps no uploads: every client's next update, after the selected round, is made from the last checkpoint by
the method's own functions. The attack (`fedecider.audit.losses`) asks a model that a party can put together about
members, and about users of the same catalogue on whom no adapter was trained.

Shape legend: K clients, M modules, A attacks (scale of an update x statistic).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.audit.config import AuditConfig
from fedecider.audit.losses import Questions, joined, questions_about, user_scores
from fedecider.audit.outcome import AuditRow, Outcome, epsilon_of, finished
from fedecider.audit.scores import Scored, auc, chosen_on_others, interval_over_users, true_positives
from fedecider.data.domain import clients_of
from fedecider.data.store import CARD_FILE, load_domains
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.statistics import Interval
from fedecider.federation.record import read_records
from fedecider.federation.state import load_state
from fedecider.federation.streams import stream
from fedecider.llm.audit_views import Sent, View, send_once, views_of
from fedecider.llm.commands import recorded_settings
from fedecider.llm.loading import load_student
from fedecider.llm.model_scores import model_scores
from fedecider.llm.setup import Settings, build_foundation, calibration, load_data, make_recommender
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels
from fedecider.report.costs import mean_bytes
from fedecider.running.damage import damage_names
from fedecider.running.launch import Launch
from fedecider.running.run_folder import fingerprint


class Asked(NamedTuple):
    """Questions about a client's members and, behind them, about others; and what the student says."""

    questions: Questions
    num_members: int
    num_others: int
    student_Q: Tensor


def audit_llm(config: AuditConfig, launch: Launch) -> Outcome:
    """Attack a finished run of the LLM track; needs its ``checkpoints/``, ``adapters/`` and ``backbone/``.

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
    domains = load_data(settings.run)
    changed = [name for name, domain in domains.items() if domain.content_hash() != record["data"].get(name)]
    if changed:
        raise ValueError(f"got other data than those of {root} for {changed}, expected the same. Give the run's --data")
    groups = {name: members_and_others(config, settings, domains, name) for name in clients_of(domains)}
    state = load_state(folder.checkpoints, fingerprint(record))
    if state is None:
        raise ValueError(
            f"no checkpoint in {folder.checkpoints}, expected that of the last round: uploads are made again from it. "
            "Copy the run folder with its checkpoints, which are private"
        )
    foundation = build_foundation(settings.run, launch)
    recommender = make_recommender(settings, foundation, launch.device)
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
    else those whom the client's memory kept for its weights.

    Raises:
        ValueError: there are no others.
    """
    domain, run = domains[name], settings.run
    sequences = domain.clients.sequences
    kept = set(calibration(domain, run.memory, run.seed)) if run.memory.kind != "none" else set()
    members = [sequence for user, sequence in enumerate(sequences) if user not in kept]
    others = [sequence for one in away_from_run(run.data, domain.catalogue, domains) for sequence in one]
    others = others or [sequences[user] for user in sorted(kept)]
    if not others:
        raise ValueError(
            f"got nobody of the catalogue {domain.catalogue} on whom the run did not train, expected some to compare "
            "with: prepare the data with --silos and leave one silo out of --domains, or run with --memory.kind "
            "mixture, which keeps users out of the training"
        )
    return _drawn(config, members, f"{name} in"), _drawn(config, others, f"{name} out")


def away_from_run(data: str, catalogue: str, domains: Mapping[str, Any]) -> list[list[list[int]]]:
    """Client sequences of the silos of a catalogue beside the run's own."""
    found = sorted(path.parent.name for path in Path(data).glob(f"{catalogue}.*/{CARD_FILE}")) if data else []
    silos = [name for name in found if name not in domains]
    away = load_domains(data, silos) if silos else {}
    return [domain.clients.sequences for domain in away.values() if domain.catalogue == catalogue]


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
    return scores.log_probs(questions.histories, questions.targets[:, None], 1.0)[:, 0]


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
    shares = {name: share for name, share in metrics.get("update_shares", {}).items() if share != 1.0}
    return [
        f"{members:,} members and {others:,} others of {len(asked)} client(s); attacked is round {sent.round}",
        *([] if any(view.party == "server" for view in views) else [_unseen(settings)]),
        *(["no other client says which attack does best: the first one is reported"] if len(asked) == 1 else []),
        *([f"adapters hold a share of the update: {shares}"] if shares else []),
    ]
