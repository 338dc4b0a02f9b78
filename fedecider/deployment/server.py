"""The server's side of a deployment: the method's own functions, with clients that are somewhere else.

`remote` turns a method into one whose ``client_update`` and ``positions`` ask the sites, so that the round loop
(`fedecider.federation.rounds.run_rounds`) runs a deployment as it runs a simulation. The server has no local state and
sees no position of any item: sites answer a validation with their mean scores, and keep everything else. A site hosts
one client or many; it is known by its number here, which is the client's where each site is one.

Shape legend: C clients of a cohort, V variants, S scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.deployment.messages import Channel, Message, of_download, to_upload
from fedecider.deployment.secure import ServerSums
from fedecider.evaluation.metrics import user_metrics
from fedecider.federation import channel as channels
from fedecider.federation.callbacks import Checkpoints, Round, RoundCallback, recording
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.record import read_records
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.federation.secure_rounds import SecureSums
from fedecider.federation.state import RunState
from fedecider.federation.wire import joined
from fedecider.report.joining import DIFFERENCE

SCORES = tuple(user_metrics(torch.zeros(1)))
"""Means over the own validation users that a site tells after every round."""
MAX_ROWS = 100
"""Rows of results that a site may tell; a run has about twenty, and a stranger must not fill the server's disk."""
MOST_NAME = 100
"""Characters in the name of a row, for the same reason."""


def remote(
    method: FederatedMethod,
    channel: Channel,
    scores: Sequence[str],
    best_round: Callable[[], int],
    sums: ServerSums | None = None,
    answered_before: Mapping[int, dict[str, list[float]]] = {},
) -> FederatedMethod:
    """``method`` with its clients at the other end of ``channel``. A cohort is one block: all of it trains at once.

    Positions of single users stay at a site. In their place ``positions`` returns each client's mean validation
    ``scores`` (S,) float64, for `summary_of`; clients of one site share the site's mean. A site that does not answer
    keeps the scores of its last answer, or of ``answered_before`` (site -> variant -> (S,)) after a restart of the
    server. ``best_round`` returns the best round so far, so that sites keep their own part of it. A download travels
    once, even if a validation and the next training both need it.

    Raises:
        ValueError: the method does not say what its uploads look like; or a round has fewer than ``min_clients``.
    """
    like = method.upload_like
    if like is None:
        raise ValueError(f"got the method {method.name}, expected one that can be deployed: it has no upload_like")
    last = dict(answered_before)
    answered: dict[str, Any] = {"round": 0, "scores": {}, "server": {}}

    def init() -> tuple[Tree, Tree]:
        server, _ = method.init()
        answered["server"] = server
        return server, {}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        answered["server"] = server
        return method.broadcast(round, server, clients)._replace(payload={})  # nothing is encoded on its way

    def ask(
        kind: str, round: int, download: Download, clients: Sequence[int], more: Mapping[int, Mapping[str, Any]] | None
    ) -> dict[int, Message]:
        """Answers, by site."""
        requests = {}
        for site, rows in channel.rows_by_site(clients).items():
            if more is not None and site not in more:
                continue
            asked = {"run": channel.run, "best_round": best_round(), "clients": [clients[row] for row in rows]}
            requests[site] = of_download(kind, round, download, rows, {**asked, **(more[site] if more else {})})
        return channel.ask_with_download(round, requests)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        clients = block.clients.tolist()
        answered["round"] = round
        rows, expected, more = channel.rows_by_site(clients), like(round, answered["server"]), None
        if sums is not None:
            expected, more = sums.like(expected), sums.begin(round, list(rows))
        heard = channel.read(
            ask("train", round, download, clients, more),
            lambda site, answer: to_upload(answer, [clients[row] for row in rows[site]], round, expected),
        )
        upload = joined(list(heard.values()))
        if len(upload.clients) < channel.config.min_clients:
            names = [channel.names[channel.site_of[one["client"]]] for one in channel.refused]
            reasons = "; ".join(f"{name}: {one['reason']}" for name, one in zip(names, channel.refused, strict=True))
            raise ValueError(
                f"got {len(upload.clients)} of {len(clients)} uploads in round {round}, expected "
                f"{channel.config.min_clients} at least ({reasons}). Start the run again with --resume true when the "
                "sites are back"
            )
        return upload, {}, [{"examples": None} for _ in upload.clients]

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        assert split == "valid", "sites read their test items themselves"
        round, clients = answered["round"], block.clients.tolist()
        if answered["scores"].get("round") != round:
            rows = channel.rows_by_site(clients)
            last.update(
                channel.read(
                    ask("validate", round, download, clients, None),
                    lambda site, answer: _read_scores(answer, round, method.variants, scores, len(rows[site])),
                )
            )
            answered["scores"] = {"round": round}
        nothing = {one: [0.0] * len(scores) for one in method.variants}
        found = [last.get(channel.site_of[client], nothing)[variant] for client in clients]
        return [torch.tensor(score_S, dtype=torch.float64) for score_S in found]

    return method._replace(init=init, broadcast=broadcast, client_update=client_update, positions=positions)


def summary_of(channel: Channel, scores: Sequence[str]) -> Callable[[list[Tensor]], list[dict[str, float]]]:
    """How the loop reads what :func:`remote` gives for positions: one group a client where sites are clients; else one
    over all: the means of the sites, weighted by their clients."""

    def summarise(found: list[Tensor]) -> list[dict[str, float]]:
        if not channel.hosts_several:
            return [dict(zip(scores, score_S.tolist(), strict=True)) for score_S in found]
        columns = zip(*(score_S.tolist() for score_S in found), strict=True)
        return [{name: math.fsum(column) / len(found) for name, column in zip(scores, columns, strict=True)}]

    return summarise


def recorded_scores(
    records: Sequence[Mapping[str, Any]],
    channel: Channel,
    scores: Sequence[str],
    validated: Sequence[int] | None = None,
) -> dict[int, dict[str, list[float]]]:
    """site -> variant -> (S,) of the last record with a validation, for a server that goes on.

    Where clients were scored together (:func:`summary_of`) every site has the mean of all: its own is not kept. A score
    that an earlier version did not record is 0.
    """
    validations = (record["valid"] for record in reversed(records) if record["valid"])
    valid: Mapping[str, list[dict[str, float]]] = next(validations, {})
    clients = range(len(channel.site_of)) if validated is None else validated
    found: dict[int, dict[str, list[float]]] = {}
    for variant, groups in valid.items():
        each = groups if len(groups) == len(clients) else groups * len(clients)
        for client, group in zip(clients, each, strict=True):
            found.setdefault(channel.site_of[client], {})[variant] = [group.get(name, 0.0) for name in scores]
    return found


def without_refused(channel: Channel) -> channels.Delivery:
    """What the loop records of those who were not heard: each is told once."""

    def delivery(upload: Upload, sent_to: Callable[[], Download], round: int) -> channels.Delivered:
        refused, channel.refused = channel.refused, []
        return channels.Delivered(upload, refused)

    return delivery


def _read_results(answer: Message) -> dict[str, dict[str, dict[str, float]]]:
    """row -> metric -> mean, and interval if it is told, of a site's test items."""
    rows = answer.facts.get("results")
    if answer.kind != "results" or not isinstance(rows, dict) or len(rows) > MAX_ROWS:
        raise ValueError(f"got {answer.kind!r}, expected the results of the test in at most {MAX_ROWS} rows")
    for row, metrics in rows.items():
        figure = _is_difference if row == DIFFERENCE else _is_figure
        good = isinstance(metrics, dict) and all(
            _is_name(metric) and isinstance(value, dict) and all(map(figure, value.values())) and "mean" in value
            for metric, value in metrics.items()
        )
        if not (good and _is_name(row)):
            raise ValueError(f"got no figures in the row {row[:MOST_NAME]!r}, expected means of metrics, from 0 to 1")
    return rows


def _read_scores(
    answer: Message, round: int, variants: Sequence[str], scores: Sequence[str], num_clients: int
) -> dict[str, list[float]]:
    if (answer.kind, answer.round) != ("scores", round):
        raise ValueError(f"got {answer.kind!r} of round {answer.round}, expected the scores of round {round}")
    if answer.facts.get("num_clients") != num_clients:
        count = str(answer.facts.get("num_clients"))[:40]
        raise ValueError(f"got scores over {count} clients, expected those over {num_clients}")
    found, told = {}, answer.facts.get("scores")
    for variant in variants:
        given = told.get(variant) if isinstance(told, dict) else None
        values: list[Any] = [given.get(name) if isinstance(given, dict) else None for name in scores]
        if not all(map(_is_figure, values)):
            raise ValueError(f"got the scores {str(values)[:200]} of {variant}, expected numbers from 0 to 1")
        found[variant] = [float(value) for value in values]
    return found


def _is_figure(value: Any) -> bool:
    """Whether a value of a message can be a mean of hit@k, ndcg@k or mrr@k, or an end of its interval."""
    return type(value) in (int, float) and -1e-9 <= value <= 1.0 + 1e-9  # which NaN is not


def _is_difference(value: Any) -> bool:
    """Whether it can be a difference of two such means."""
    return type(value) in (int, float) and -1.0 - 1e-9 <= value <= 1.0 + 1e-9


def _is_name(name: str) -> bool:
    """Whether the name of a row or metric, which goes into tables, is one line of characters that can be seen."""
    return name.isprintable() and len(name) <= MOST_NAME


class Plan(NamedTuple):
    """What a server runs with the sites of a channel."""

    method: FederatedMethod
    settings: RoundSettings
    scores: Sequence[str] = SCORES
    sums: SecureSums | None = None
    """Where uploads are summed under masks."""
    validated: Sequence[int] | None = None
    """The clients that are scored after each round, where those are not all."""
    after_rounds: Callable[[Channel, int, Mapping[int, Message]], None] = lambda channel, round, requests: None
    """What else sites are asked before the test, given the last round and what asks them for the test."""
    facts: Callable[[RunState, list[dict]], Mapping[str, Any]] = lambda state, records: {}
    """End, lines of ``rounds.jsonl`` -> what the track adds to ``metrics.json``."""
    about: Mapping[str, Any] = {}
    """What the track adds to ``run.json``."""


def run_deployed(
    plan: Plan,
    channel: Channel,
    *,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    on_round: Callable[[dict], None] = lambda record: None,
    names: Sequence[str] = (),
) -> tuple[RunState, dict[int, Mapping[str, Any]]]:
    """All rounds over ``channel``, then every site's part of the end: the final state, and what sites tell of the test.

    The same loop as a simulation's, and the same figures; see :func:`remote`. ``names`` of the clients, if they have.
    """
    method, num_clients = plan.method, len(channel.site_of)
    state = checkpoints.start(resume) if checkpoints else None
    best = {"round": state.best_round, "score": state.best_score} if state else {"round": 0, "score": -1.0}

    def note(round: Round) -> None:
        score = round.record["score"]
        if score is not None and score > best["score"]:  # as the loop compares
            best.update(round=round.number, score=score)
        on_round(round.record)

    before: dict[int, dict[str, list[float]]] = {}
    if state and state.records and checkpoints and checkpoints.recorder.path:
        before = recorded_scores(read_records(checkpoints.recorder.path), channel, plan.scores, plan.validated)
    sums = ServerSums(plan.sums, channel) if plan.sums else None
    asked = remote(method, channel, plan.scores, lambda: int(best["round"]), sums, before)
    everyone = Block(torch.arange(num_clients), None)
    clients = Clients(
        [everyone],
        summary_of(channel, plan.scores),
        names,
        pack=lambda cohort: [Block(torch.tensor(sorted(cohort)), None)],
        validated=None if plan.validated is None else [Block(torch.tensor(plan.validated), None)],
        summarise_logs=lambda logs: [{"clients": len(logs)}] if channel.hosts_several else logs,
    )
    aggregation = sums.aggregation() if sums else channels.ONE_BY_ONE
    between = channels.Channel(delivery=without_refused(channel), aggregation=aggregation)
    kept = [recording(checkpoints.recorder), checkpoints.callback()] if checkpoints else []
    state = run_rounds(asked, clients, plan.settings, between, [*kept, RoundCallback(note)], state=state)
    download = method.broadcast(state.best_round + 1, state.best_server, everyone.clients)
    facts = {"run": channel.run, "best_round": state.best_round}
    requests = {
        site: of_download("finish", state.round, download, hosted, {**facts, "clients": list(hosted)})
        for site, hosted in enumerate(channel.hosts)
    }
    plan.after_rounds(channel, state.round, requests)
    return state, channel.read(
        channel.ask_with_download(state.round, requests), lambda site, answer: _read_results(answer)
    )
