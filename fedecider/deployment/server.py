"""The server's side of a deployment: the method's own functions, with clients that are somewhere else.

`remote` turns a method into one whose ``client_update`` and ``positions`` ask the sites, so that the round loop
(`fedecider.federation.rounds.run_rounds`) runs a deployment as it runs a simulation. The server has no local state and
sees no position of any item: sites answer a validation with their mean scores, and keep everything else.

Shape legend: C clients of a cohort, V views, S scores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.bounds import NotNegative, OneOrMore, check
from fedecider.deployment.messages import RESEND, Message, of_download, pack, to_upload, unpack
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.record import Recorder
from fedecider.federation.rounds import ONE_BY_ONE, Deliver, Delivered, Gathering, RoundSettings, run_rounds
from fedecider.federation.state import RunState, load_state

Exchange = Callable[[Mapping[int, bytes], float], Mapping[int, bytes]]
"""client -> message, seconds to wait -> the answers of those who answered in time."""


MAX_ROWS = 100
MOST_REASON = 500
"""Characters of a reason that are kept."""


@dataclass(frozen=True)
class DeploymentConfig:
    """What a server waits for and takes.

    Args:
        deadline_s: The number of seconds that sites have for an answer; 0 waits for all of them, however long.
        min_clients: The smallest number of uploads that a round goes on with.
        max_megabytes: The size of the largest message that is looked at.
    """

    deadline_s: NotNegative = 0.0
    min_clients: OneOrMore = 1
    max_megabytes: OneOrMore = 2048

    def __post_init__(self) -> None:
        check(self)

    @property
    def max_bytes(self) -> int:
        return self.max_megabytes << 20


@dataclass
class Line:
    """The line to the sites: what it told of the present round, and what it has carried so far."""

    exchange: Exchange
    config: DeploymentConfig
    run: str
    """Fingerprint of the configuration: sites of another run refuse."""
    names: Sequence[str]
    refused: list[dict] = field(default_factory=list)
    """Of the present round: ``client`` and ``reason``."""
    carried: list[dict[str, Any]] = field(default_factory=list)
    """``round``, ``kind``, ``client``, ``bytes_down``, ``bytes_up`` of every message, in the order of the answers."""
    holds: dict[int, str] = field(default_factory=dict)
    """client -> digest of the download that it says it has."""

    def ask(self, round: int, requests: Mapping[int, Message]) -> dict[int, Message]:
        """The readable answers, by client in ascending order; all others are refused."""
        sent = {client: pack(request) for client, request in sorted(requests.items())}
        answers = self.exchange(sent, self.config.deadline_s)
        found = {}
        for client, blob in sent.items():
            kind, answer = requests[client].kind, answers.get(client)
            size = len(answer) if answer is not None else 0
            self.carried.append(
                {"round": round, "kind": kind, "client": client, "bytes_down": len(blob), "bytes_up": size}
            )
            if answer is None:
                self.refuse(client, f"no answer to {kind}" + self._in_time())
                continue
            try:
                one = unpack(answer, self.config.max_bytes)
                if one.kind == "error":
                    raise ValueError(f"the site says: {str(one.facts.get('reason'))[:300]}")
                found[client] = one
            except ValueError as error:
                self.refuse(client, str(error))
        return found

    def refuse(self, client: int, reason: str) -> None:
        self.refused.append({"client": client, "reason": reason[:MOST_REASON]})  # a site may have written parts of it
        self.holds.pop(client, None)  # who knows what it has now

    def _in_time(self) -> str:
        return f" within {self.config.deadline_s:g} s" if self.config.deadline_s else ""


class Masking(NamedTuple):
    """What changes in a round whose uploads are masked (`fedecider.deployment.secure`)."""

    begin: Callable[[int, Sequence[int]], Mapping[int, Mapping[str, Any]]]
    """round, clients -> facts of the message that asks each of them to train; who is not there is not asked."""
    like: Callable[[Tree], Tree]
    """An upload as it must look -> as it must look masked."""
    gathering: Gathering


def remote(
    method: FederatedMethod,
    line: Line,
    scores: Sequence[str],
    best_round: Callable[[], int],
    masking: Masking | None = None,
) -> FederatedMethod:
    """``method`` over ``line``: all of a cohort train at once, in one block.

    ``positions`` are each client's mean validation ``scores`` (S,) float64, which `scored` reads; a site that does not
    answer has those of its last answer. ``best_round`` says which round has the best score so far: sites keep their own
    part of it. A download travels once, also when a validation and the next training need it.

    Raises:
        ValueError: the method does not say what its uploads look like; or a round has fewer than ``min_clients``.
    """
    like = method.upload_like
    if like is None:
        raise ValueError(f"got the method {method.name}, expected one that can be deployed: it has no upload_like")
    last: dict[int, dict[str, list[float]]] = {}
    answered: dict[str, Any] = {"round": 0, "scores": {}, "server": {}}

    def init() -> tuple[Tree, Tree]:
        server, _ = method.init()
        answered["server"] = server
        return server, {}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        answered["server"] = server
        return method.broadcast(round, server, clients)

    def ask(
        kind: str, round: int, download: Download, clients: Sequence[int], more: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Message]:
        """Answers, by client; a download is sent to those who do not hold it already, or no longer do."""
        short, whole = {}, {}
        for row, client in enumerate(clients):
            if client not in more:
                continue
            facts = {"run": line.run, "best_round": best_round(), **more[client]}
            one = of_download(kind, round, download, row, facts)
            digest = download_digest(one)
            whole[client] = one._replace(facts={**one.facts, "digest": digest})
            held = line.holds.get(client) == digest
            short[client] = Message(kind, round, {}, {**whole[client].facts, "held": True}) if held else whole[client]
            line.holds[client] = digest
        answers = line.ask(round, short)
        again = {client: whole[client] for client, answer in answers.items() if answer.kind == RESEND}
        return dict(sorted({**answers, **line.ask(round, again)}.items())) if again else answers

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        clients = block.clients.tolist()
        answered["round"] = round
        heard: dict[int, Upload] = {}
        expected = like(round, answered["server"])
        more: Mapping[int, Mapping[str, Any]] = {client: {} for client in clients}
        if masking is not None:
            expected, more = masking.like(expected), masking.begin(round, clients)
        for client, answer in ask("train", round, download, clients, more).items():
            try:
                heard[client] = to_upload(answer, client, round, expected)
            except ValueError as error:
                line.refuse(client, str(error))
        if len(heard) < line.config.min_clients:
            reasons = "; ".join(f"{line.names[one['client']]}: {one['reason']}" for one in line.refused)
            raise ValueError(
                f"got {len(heard)} of {len(clients)} uploads in round {round}, expected {line.config.min_clients} at "
                f"least ({reasons}). Start the run again with --resume true when the sites are back"
            )
        return _joined(heard), {}, [{"examples": None} for _ in heard]

    def positions(view: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        assert split == "valid", "sites read their test items themselves"
        round = answered["round"]
        if answered["scores"].get("round") != round:
            clients = block.clients.tolist()
            for client, answer in ask("validate", round, download, clients, {client: {} for client in clients}).items():
                try:
                    last[client] = _read_scores(answer, round, method.views, scores)
                except ValueError as error:
                    line.refuse(client, str(error))
            answered["scores"] = {"round": round}
        nothing = {one: [0.0] * len(scores) for one in method.views}
        return [torch.tensor(last.get(client, nothing)[view], dtype=torch.float64) for client in block.clients.tolist()]

    return method._replace(init=init, broadcast=broadcast, client_update=client_update, positions=positions)


def scored(names: Sequence[str]) -> Callable[[list[Tensor]], list[dict[str, float]]]:
    """How the loop reads what :func:`remote` gives for positions: one group a client."""
    return lambda found: [dict(zip(names, score_S.tolist(), strict=True)) for score_S in found]


def told(line: Line) -> Deliver:
    """What the loop records of those who were not heard: each is told once."""

    def deliver(upload: Upload, sent_to: Callable[[], Download], round: int) -> Delivered:
        refused, line.refused = line.refused, []
        return Delivered(upload, refused)

    return deliver


def download_digest(one: Message) -> str:
    """SHA-256 over the tensors of a message, and how they are laid out: what a site keeps between two tasks."""
    parts = {name: one.facts[name] for name in ("marks", "per_client")}
    return hashlib.sha256(pack(Message("download", 0, one.tensors, parts))).hexdigest()


def _joined(heard: Mapping[int, Upload]) -> Upload:
    """Uploads of one client each as that of their block."""
    uploads = list(heard.values())
    if not uploads:
        return Upload(torch.zeros(0, dtype=torch.long), torch.zeros(0), {})
    return Upload(
        torch.cat([one.clients for one in uploads]),
        torch.cat([one.weights for one in uploads]),
        {name: torch.cat([one.tensors[name] for one in uploads]) for name in uploads[0].tensors},
        sent_rows={name: torch.cat([one.sent_rows[name] for one in uploads]) for name in uploads[0].sent_rows},
    )


def _read_results(answer: Message) -> dict[str, dict[str, dict[str, float]]]:
    """row -> metric -> mean and interval, as a site tells them of its test items."""
    rows = answer.facts.get("results")
    if answer.kind != "results" or not isinstance(rows, dict) or len(rows) > MAX_ROWS:
        raise ValueError(f"got {answer.kind!r}, expected the results of the test in at most {MAX_ROWS} rows")
    for row, metrics in rows.items():
        good = isinstance(metrics, dict) and all(
            isinstance(value, dict) and all(map(_is_figure, value.values())) and "mean" in value
            for value in metrics.values()
        )
        if not good:
            raise ValueError(f"got no figures in the row {row!r}, expected mean, low and high of every metric")
    return rows


def _read_scores(answer: Message, round: int, views: Sequence[str], scores: Sequence[str]) -> dict[str, list[float]]:
    if (answer.kind, answer.round) != ("scores", round):
        raise ValueError(f"got {answer.kind!r} of round {answer.round}, expected the scores of round {round}")
    found, told = {}, answer.facts.get("scores")
    for view in views:
        given = told.get(view) if isinstance(told, dict) else None
        values: list[Any] = [given.get(name) if isinstance(given, dict) else None for name in scores]
        if not all(_is_figure(value) and 0.0 <= value <= 1.0 for value in values):
            raise ValueError(f"got the scores {str(values)[:200]} of {view}, expected numbers from 0 to 1")
        found[view] = [float(value) for value in values]
    return found


def _is_figure(value: Any) -> bool:
    """Whether a value of a message is a number that can be reckoned with."""
    return type(value) in (int, float) and abs(value) <= 1e9  # neither NaN nor infinite


def run_deployed(
    method: FederatedMethod,
    line: Line,
    settings: RoundSettings,
    scores: Sequence[str],
    *,
    recorder: Recorder | None = None,
    checkpoints: Path | None = None,
    resume: bool = False,
    on_round: Callable[[dict], None] = lambda record: None,
    masking: Masking | None = None,
    after_rounds: Callable[[int], None] = lambda round: None,
) -> tuple[RunState, dict[int, Mapping[str, Any]]]:
    """All rounds over ``line``, then every site's part of the end: the final state, and what sites tell of the test.

    The same loop as a simulation's, and the same figures; see :func:`remote`. ``after_rounds``: what else sites are
    asked between the two, given the last round.
    """
    num_clients = len(line.names)
    state = load_state(checkpoints, settings.fingerprint) if resume and checkpoints else None
    best = {"round": state.best_round, "score": state.best_score} if state else {"round": 0, "score": -1.0}

    def note(record: dict) -> None:
        if record["score"] > best["score"]:  # as the loop compares
            best.update(round=record["round"], score=record["score"])
        on_round(record)

    asked = remote(method, line, scores, lambda: int(best["round"]), masking)
    everyone = Block(torch.arange(num_clients), None)
    state = run_rounds(
        asked,
        [everyone],
        settings,
        scored(scores),
        pack=lambda cohort: [Block(torch.tensor(sorted(cohort)), None)],
        deliver=told(line),
        gathering=ONE_BY_ONE if masking is None else masking.gathering,
        recorder=recorder,
        checkpoints=checkpoints,
        resume=resume,
        on_round=note,
    )
    after_rounds(state.round)
    download = method.broadcast(state.best_round + 1, state.best_server, everyone.clients)
    facts = {"run": line.run, "best_round": state.best_round}
    requests = {
        client: of_download("finish", state.round, download, row, facts)
        for row, client in enumerate(everyone.clients.tolist())
    }
    results: dict[int, Mapping[str, Any]] = {}
    for client, answer in line.ask(state.round, requests).items():
        try:
            results[client] = _read_results(answer)
        except ValueError as error:
            line.refuse(client, str(error))
    return state, results
