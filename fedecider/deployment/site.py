"""A site's side of a deployment: the method's own functions on the data of its clients, answered message by message.

A site hosts clients: a single domain, or a block of users. It keeps their rows of the local state, also of the best
round, and the download it was last sent, in checkpoints (`fedecider.federation.state`): killed at any moment it goes on
where it was, and a server that went back a round finds the state before it. What leaves it are uploads and mean
validation scores; logs, positions and fusion weights stay.

Shape legend: N clients of the run, H clients of the site, C clients of a block, U users.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.deployment import messages
from fedecider.deployment.counts import COUNTS, EVENTS, SiteCounts
from fedecider.deployment.messages import pack
from fedecider.deployment.secure import KEYS, SHARES, UNMASK, SiteSums
from fedecider.deployment.weights import WEIGHTS, SiteWeights
from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.channel import Protect
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree
from fedecider.federation.record import Recorder, write_bytes, write_json
from fedecider.federation.rounds import Pack
from fedecider.federation.rows import write_rows
from fedecider.federation.state import RunState, load_state, save_state
from fedecider.federation.wire import check_upload, dense, download_at, joined
from fedecider.models.ensemble import Weights
from fedecider.running.damage import read_object
from fedecider.running.run_folder import SENT_FILE, SITE_LOGS

logger = logging.getLogger(__name__)

LEFT_FILE = "left.jsonl"
"""In the site's folder, a line a message: round, kind, bytes, SHA-256, shapes of tensors, names of facts."""
HELD_FILE = "download.safetensors"

Finish = Callable[[RunState, Download], Mapping[str, Any]]
"""state at the end, download of the selected round -> what is told of the test."""


class Part(NamedTuple):
    """One block of those that a message asks."""

    block: Block
    download: Download
    """Of its clients, in their order."""
    row_C: Tensor
    """Their places among the clients of the site, by which it holds its local state."""


class Hosted(NamedTuple):
    """Clients of a site by their numbers in the run, ascending, and how some of them are put into blocks."""

    clients: Sequence[int]
    pack: Pack
    scored: Sequence[int]
    """Those that a validation is over: means over fewer would tell of single ones."""

    def check(self, clients: object) -> list[int]:
        """The clients that a message asks, if they are some of these.

        Raises:
            ValueError: they are not, or not each once and in ascending order.
        """
        own = set(self.clients)
        good = isinstance(clients, list) and bool(clients) and all(type(one) is int and one in own for one in clients)
        if not isinstance(clients, list) or not good or clients != sorted(set(clients)):
            raise ValueError(f"got the clients {str(clients)[:60]}, expected some of those of this site, ascending")
        return clients

    def parts(self, clients: Sequence[int], download: Download) -> Iterator[Part]:
        """The blocks of these clients, each with its own of what they were sent together."""
        asked, hosted = torch.tensor(list(clients)), torch.tensor(list(self.clients))
        for block in self.pack(clients):
            place_C = torch.searchsorted(asked, block.clients)
            yield Part(block, download_at(download, place_C), torch.searchsorted(hosted, block.clients))

    def start(self, method: FederatedMethod) -> Tree:
        """(H, ...) the local state before the first round."""
        _, local = method.init()
        host_H = torch.tensor(list(self.clients))
        return {name: tensor[host_H.to(tensor.device)] for name, tensor in local.items()}

    def positions(
        self, method: FederatedMethod, variant: str, download: Download, local: Tree, clients: Sequence[int], split: str
    ) -> Tensor:
        """(U,) positions of these clients' held-out items, in client order."""
        found: dict[int, Tensor] = {}
        for block, own, row_C in self.parts(clients, download):
            positions = method.positions(variant, own, rows_of(local, row_C), block, split)
            found |= zip(block.clients.tolist(), positions, strict=True)
        return torch.cat([found[client] for client in sorted(found)])


def one_client(client: int) -> Hosted:
    """A site that is one client: a domain."""
    return Hosted([client], lambda clients: [Block(torch.tensor(list(clients)), None)], [client])


def rows_of(local: Tree, row_C: Tensor) -> Tree:
    """What clients own of a site's local state."""
    return {name: tensor[row_C.to(tensor.device)] for name, tensor in local.items()}


def write_own(local: Tree, row_C: Tensor, new_own: NewRows) -> None:
    """Put the rows that clients have changed into a site's local state, in place."""
    for name, update in new_own.items():
        if isinstance(update, RowUpdate):
            write_rows(local[name], row_C, update)
        else:
            local[name][row_C] = update.to(local[name])


class NotHeld(ValueError):
    """The download that a message speaks of is not here."""


Answer = Callable[[bytes], bytes]
"""message -> the site's answer."""


class Site(NamedTuple):
    """One party of a deployed run, with the clients that it hosts."""

    method: FederatedMethod
    hosted: Hosted
    run: str
    folder: Path
    """Of this site alone: ``checkpoints/``, ``training.jsonl`` and the download it holds."""
    finish: Finish
    most_bytes: int
    protect: Protect = lambda upload, download, round, cohort_size: upload
    spends: int = 0
    """Rounds for which a guarantee was counted: the site trains that often, and each round once. 0: no guarantee, and a
    round may be asked again."""

    scores: Callable[[Tensor], Mapping[str, float]] = mean_metrics
    """(U,) positions of the own validation items -> what is told of them."""

    sums: SiteSums | None = None
    """Its part in secure sums, where uploads are masked."""
    counts: SiteCounts | None = None
    """Its part in the sum over the sites with its catalogue, where ensembles ask for that."""
    weights: SiteWeights | None = None
    """The same of the weights of all sites' ensembles."""
    fit: Callable[[RunState, Download], Weights] | None = None
    """state at the end, download of the selected round -> weights of the own ensemble, without those of all."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def sent(self) -> Path:
        """The last upload: kept under a guarantee, which allows no second one; and of one client, for its auditor."""
        return self.folder / SENT_FILE

    @property
    def held(self) -> Path:
        """The last download."""
        return self.folder / HELD_FILE

    @property
    def logs(self) -> Path:
        return self.folder / SITE_LOGS

    @property
    def started(self) -> Path:
        """To which start of which run the rest of the folder belongs."""
        return self.folder / "started.json"

    def answer(self, blob: bytes) -> bytes:
        """The answer to one message; what goes wrong is told in a sentence, and the site stays as it was."""
        round = 0
        try:
            asked = messages.unpack(blob, self.most_bytes)
            round = asked.round
            return self._leaving(_answered(self, asked))
        except NotHeld:
            return self._leaving(messages.Message(messages.RESEND, round))
        except ValueError as error:
            return self._leaving(messages.Message("error", round, {}, {"reason": str(error)}))
        except Exception as error:  # whatever a server sends, the site lives on; the text may name what is private
            logger.exception("could not answer")
            reason = f"the site failed: {type(error).__name__}, see its log"
            return self._leaving(messages.Message("error", round, {}, {"reason": reason}))

    def _leaving(self, one: messages.Message) -> bytes:
        """The blob that travels, noted down for who audits the site."""
        blob = pack(one)
        shapes = {name: list(tensor.shape) for name, tensor in one.tensors.items()}
        told = {"round": one.round, "kind": one.kind, "bytes": len(blob), "sha256": sha256(blob).hexdigest()}
        self.folder.mkdir(parents=True, exist_ok=True)
        Recorder(self.folder / LEFT_FILE).write({**told, "tensors": shapes, "facts": sorted(one.facts)})
        return blob


def _answered(site: Site, asked: messages.Message) -> messages.Message:
    if asked.facts.get("run") != site.run:
        raise ValueError(
            f"got a message of run {asked.facts.get('run')!r}, expected {site.run!r}: server and site have other "
            "settings or other public data"
        )
    if asked.kind not in _ANSWERS:
        raise ValueError(f"got {asked.kind!r}, expected one of {', '.join(_ANSWERS)}")
    _begin(site, {"run": site.run, messages.STARTED: asked.facts.get(messages.STARTED, "")})
    return _ANSWERS[asked.kind](site, asked)


def _begin(site: Site, now: dict[str, Any]) -> None:
    """Forget what the folder holds of an earlier start of the run.

    Raises:
        ValueError: it is another project's, or rounds of the earlier start have spent a guarantee.
    """
    if not site.started.is_file():
        write_json(site.started, {"run": site.run, messages.STARTED: ""})
    known = read_object(site.started, {"run": str})
    if known == now:
        return
    if known["run"] != site.run:
        raise ValueError(
            f"got a message of run {site.run}, expected one of run {known['run']}, to which the folder of this site "
            "belongs. Start the site with another output"
        )
    if site.spends and site.sent.is_file():
        raise ValueError(
            "got a run that was started anew, expected it to go on: this site has spent rounds of its guarantee on it. "
            "Resume it on the server, or start the site with another output"
        )
    shutil.rmtree(site.checkpoints, ignore_errors=True)
    for file in (site.held, site.logs, site.sent):
        file.unlink(missing_ok=True)
    write_json(site.started, now)


def _train(site: Site, asked: messages.Message) -> messages.Message:
    if site.sums is None:
        return _sent_before(site, asked.round) or _trained(site, asked)
    site.sums.check(asked)
    upload = messages.own_upload(_sent_before(site, asked.round) or _trained(site, asked), site.most_bytes)
    return messages.of_upload(asked.round, site.sums.mask(asked, upload, Download({})), {})


def _trained(site: Site, asked: messages.Message) -> messages.Message:
    """The upload of this round, bounded and noised, as it leaves the site where no sum hides it."""
    state = _with_best(_state(site, asked.round - 1), asked)
    clients, download = _clients(site, asked), _download(site, asked)
    local = {name: tensor.clone() for name, tensor in state.local.items()}
    read = {name: tensor for name, tensor in local.items() if name not in site.method.unread}
    uploads, logs = [], []
    for block, sent, row_C in site.hosted.parts(clients, download):
        upload, new_own, told = site.method.client_update(asked.round, sent, rows_of(read, row_C), block)
        check_upload(upload, local, block.clients)
        uploads.append(dense(site.protect(upload, sent, asked.round, 1), sent))
        write_own(local, row_C, new_own)
        logs += [{"client": client, **log} for client, log in zip(block.clients.tolist(), told, strict=True)]
    save_state(state._replace(round=asked.round, local=local), site.checkpoints, site.run)
    logs.sort(key=itemgetter("client"))
    Recorder(site.logs).write({"round": asked.round, "clients": logs})
    answer = messages.of_upload(asked.round, joined(uploads), {})
    if site.spends or (site.sums is None and len(site.hosted.clients) == 1):
        write_bytes(site.sent, pack(answer))  # behind the state: what was not kept here has not left either
    return answer


def _sent_before(site: Site, round: int) -> messages.Message | None:
    """The upload of this round, if there was one: a second one, with other noise, would be told for nothing.

    Raises:
        ValueError: a round that the guarantee does not count, or one before the last.
    """
    if not site.spends:
        return None
    if round > site.spends:
        raise ValueError(f"got round {round}, expected at most {site.spends}: its guarantee counts no more rounds")
    last = messages.unpack(site.sent.read_bytes(), site.most_bytes) if site.sent.is_file() else None
    if last is None or round > last.round:
        return None
    if round < last.round:
        raise ValueError(
            f"got round {round} again after round {last.round}, expected a later one: a guarantee counts every round "
            "once. Start the run again with another output"
        )
    return last


def _validate(site: Site, asked: messages.Message) -> messages.Message:
    state = _with_best(_state(site, asked.round), asked)
    clients = _clients(site, asked)
    if clients != list(site.hosted.scored):
        raise ValueError(
            f"got a validation of {len(clients)} clients, expected all {len(site.hosted.scored)} that count"
        )
    download = _download(site, asked)
    found = {
        variant: dict(site.scores(site.hosted.positions(site.method, variant, download, state.local, clients, "valid")))
        for variant in site.method.variants
    }
    return messages.Message("scores", asked.round, {}, {"scores": found, "num_clients": len(clients)})


def _finish(site: Site, asked: messages.Message) -> messages.Message:
    state = _with_best(_state(site, asked.round), asked)
    return messages.Message("results", asked.round, {}, {"results": dict(site.finish(state, _download(site, asked)))})


def _sums(site: Site) -> SiteSums:
    if site.sums is None:
        raise ValueError("got a step of secure aggregation, expected none: this run has secure_sum false")
    return site.sums


def _counted(site: Site, asked: messages.Message) -> messages.Message:
    if site.counts is None:
        raise ValueError(
            "got a step of a sum of counts, expected none: the ensemble of this site has no others of its catalogue"
        )
    return site.counts.answer(asked)


def _weighed(site: Site, asked: messages.Message) -> messages.Message:
    def fit() -> Weights:
        assert site.fit is not None
        return site.fit(_with_best(_state(site, asked.round), asked), _download(site, asked))

    if site.weights is None:
        raise ValueError(
            "got a step of a sum of weights, expected none: the ensemble of this site goes without those of others"
        )
    return site.weights.answer(asked, fit)


_ANSWERS: dict[str, Callable[[Site, messages.Message], messages.Message]] = {
    "train": _train,
    "validate": _validate,
    "finish": _finish,
    KEYS: lambda site, asked: _sums(site).announce(asked),
    SHARES: lambda site, asked: _sums(site).share(asked),
    UNMASK: lambda site, asked: _sums(site).reveal(asked),
    **dict.fromkeys((*EVENTS, *COUNTS), _counted),
    **dict.fromkeys(WEIGHTS, _weighed),
}


def _state(site: Site, round: int) -> RunState:
    """The newest state of this site that is not past ``round``.

    Raises:
        ValueError: it has only later ones: the server went back further than a site can.
    """
    state = load_state(site.checkpoints, site.run, not_past=round)
    if state is not None:
        return state
    if round > 0 and any(site.checkpoints.glob("round_*")):
        raise ValueError(
            f"got a question about round {round + 1}, expected a later one: this site keeps its last two rounds. Start "
            "the run again with another output"
        )
    own = site.hosted.start(site.method)
    return RunState(0, {}, own, 0, -1.0, {}, own)


def _with_best(state: RunState, asked: messages.Message) -> RunState:
    """Keep the own part of the round that the server says is the best so far."""
    best = asked.facts.get("best_round")
    if type(best) is not int or best < 0:
        raise ValueError(f"got the best round {best!r}, expected a number from 0 on")
    if best <= state.best_round:
        return state
    return state._replace(round=max(best, state.round), best_round=best, best_local=state.local)


def _clients(site: Site, asked: messages.Message) -> list[int]:
    """Whom the message asks: a cohort need not have all clients of a site."""
    return site.hosted.check(asked.facts.get("clients"))


def _download(site: Site, asked: messages.Message) -> Download:
    """What came with the message, or what the site was sent before and holds."""
    path, digest = site.held, asked.facts.get("digest")
    if not asked.facts.get("held"):
        write_bytes(path, pack(asked))
        return messages.to_download(asked, site.most_bytes)
    held = messages.unpack(path.read_bytes(), site.most_bytes) if path.is_file() else None
    if held is None or messages.download_digest(held) != digest:
        raise NotHeld("got no download, and none or another one is held here, expected it to be sent again")
    return messages.to_download(held, site.most_bytes)
