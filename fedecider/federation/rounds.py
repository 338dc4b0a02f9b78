"""The only round loop: cohort -> broadcast -> client_update -> channel -> server_aggregate -> record -> callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.bounds import Diverged
from fedecider.federation.aggregate import LARGEST_OF_USERS, LARGEST_UPDATE, Arrived, bounded
from fedecider.federation.callbacks import Round, RoundCallback
from fedecider.federation.channel import Channel, Sent
from fedecider.federation.cohort import choose_cohort
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.processes import Processes, in_client_order
from fedecider.federation.record import far_notes, left_out
from fedecider.federation.rows import write_rows
from fedecider.federation.state import Parameters, RunState, is_mapped, mapped_like, snapshot
from fedecider.federation.wire import Traffic, check_upload, download_to, group_traffic, measure, with_finite

Pack = Callable[[Sequence[int]], Sequence[Block]]
"""Client numbers of a cohort, ascending -> the blocks they are trained in."""


class Clients(NamedTuple):
    """Who can take part, and how they are scored."""

    blocks: Sequence[Block]
    """All clients."""
    summarise: Callable[[list[Tensor]], list[dict[str, float]]]
    """Positions of all clients, in client order -> metrics of each reported group: one per domain, or one for all
    users."""
    names: Sequence[str] = ()
    """In client order; empty where clients are single users."""
    pack: Pack | None = None
    """Puts a cohort that is not everybody into blocks; None: the given blocks stay whole."""
    validated: Sequence[Block] | None = None
    """Blocks that are scored, where not all are: a sample chooses the round as well, in less time."""
    summarise_logs: Callable[[list[dict]], list[dict]] = lambda logs: logs
    """Logs of all clients -> what the record of the round keeps."""

    @property
    def num_clients(self) -> int:
        return sum(len(block.clients) for block in self.blocks)

    def of_cohort(self, cohort: set[int]) -> Sequence[Block]:
        """The blocks in which a cohort is trained.

        Raises:
            ValueError: no block is whole, where they are not packed anew.
        """
        if len(cohort) == self.num_clients:
            return self.blocks
        if self.pack is not None:
            return self.pack(sorted(cohort))
        present = [block for block in self.blocks if cohort.issuperset(block.clients.tolist())]
        if not present:
            raise ValueError(f"got the cohort {sorted(cohort)[:10]}, which holds no whole block: raise participation")
        return present


class RoundSettings(NamedTuple):
    """Settings of the loop itself; all others belong to the method."""

    num_rounds: int
    seed: int
    participation: float = 1.0
    select_by: str = "ndcg@10"
    patience: int = 0
    """Stop after this many turns, 1 / participation rounds each, without a better validation score; 0 runs all."""
    eval_every: int = 1
    """Rounds between validations; the last round is always validated."""

    def validates(self, round: int) -> bool:
        """Whether this round ends with a validation."""
        return round % self.eval_every == 0 or round == self.num_rounds

    def stops(self, round: int, best_round: int) -> bool:
        """Whether patience ends the run after this round. Only a validated round can end it: others have no score."""
        return self.validates(round) and 0 < self.patience <= (round - best_round) * self.participation + 1e-9


def run_rounds(
    method: FederatedMethod,
    clients: Clients,
    settings: RoundSettings,
    channel: Channel = Channel(),
    callbacks: Sequence[RoundCallback] = (),
    processes: Processes = Processes(),
    state: RunState | None = None,
) -> RunState:
    """Run ``method`` for ``settings.num_rounds`` rounds and return the final state with its best round.

    Every ``eval_every``-th round and the last one are validated, for every variant of the method. The round with the
    best mean ``select_by`` of the first variant is kept, the earliest of equals.

    With several processes, each of them sees the same uploads in the same order, so all hold the same state. Local
    state is updated in place and copied only when its round is the best so far: of a million users there is no room
    for more copies.

    ``state``: where a stopped run goes on.

    Raises:
        Diverged: no upload of a round can be used; callbacks have seen the round before.
        ValueError: a cohort is empty; a loss is not finite (the method, which knows the tensor, says so).
    """
    state = _first_state(method, state)
    for round in range(state.round + 1, settings.num_rounds + 1):
        if settings.stops(state.round, state.best_round):
            break  # tested before a round, so that a run that was stopped here does not go on when it is resumed
        started = time.perf_counter()
        chosen = choose_cohort(method, state.server, clients.num_clients, settings.participation, settings.seed, round)
        cohort = channel.availability(round, chosen)
        if not cohort:
            raise ValueError(f"got nobody of {len(chosen)} clients in round {round}, expected one at least")
        clients_done = partial(_clients_done, callbacks, round)
        last, done = _train(method, state.last, clients.of_cohort(cohort), channel, processes, clients_done)
        trained = time.perf_counter()
        diverged = _nobody_left(round, done, clients.names)
        variants = method.variants if settings.validates(round) and not diverged else ()
        validated = clients.validated or clients.blocks
        with _named_as_far(round, done, clients.names):
            positions = evaluate_variants(method, last, variants, "valid", validated, processes, clients_done)
        scores = {variant: clients.summarise(found) for variant, found in positions.items()}
        state, score = _scored(state, last, scores.get(method.variants[0], []), settings.select_by)
        record = {
            "round": round,
            "score": score,
            "valid": scores,
            "clients": clients.summarise_logs(done.logs),
            "traffic": done.traffic,
            "non_finite_uploads": done.non_finite,
            "refused_uploads": [*({"client": c, "reason": "away"} for c in sorted(chosen - cohort)), *done.refused],
            "capped_uploads": [upload for upload in done.capped if "cap" in upload],
            **({"far_uploads": done.far} if done.far else {}),
            "train_s": done.train_s,  # summed over clients
            "wall_s": trained - started,
            "evaluate_s": time.perf_counter() - trained if variants else 0.0,
        }
        is_last = round == settings.num_rounds or settings.stops(round, state.best_round)
        ended = False
        for callback in callbacks:
            event = Round(round, record, state, method, clients.names, is_last or ended, diverged)
            ended |= bool(callback.round_ended(event))
        if diverged:
            raise Diverged(diverged)
        if ended:
            break
    return state


def evaluate(
    method: FederatedMethod,
    parameters: Parameters,
    variant: str,
    split: str,
    blocks: Sequence[Block],
    processes: Processes = Processes(),
) -> list[Tensor]:
    """Positions of every client in client order: one tensor per client."""
    return evaluate_variants(method, parameters, (variant,), split, blocks, processes)[variant]


def evaluate_variants(
    method: FederatedMethod,
    parameters: Parameters,
    variants: Sequence[str],
    split: str,
    blocks: Sequence[Block],
    processes: Processes = Processes(),
    clients_done: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, list[Tensor]]:
    """Variant -> :func:`evaluate`; what a client receives and holds is read once for all variants."""
    if not variants:
        return {}
    round, server, local = parameters

    def work(block: Block) -> list[dict[str, Tensor]]:
        download, own = method.broadcast(round + 1, server, block.clients), _own(local, block)
        found = {variant: method.positions(variant, download, own, block, split) for variant in variants}
        return [{variant: found[variant][place] for variant in variants} for place in range(len(block.clients))]

    positions: list[tuple[int, dict[str, Tensor]]] = []
    total = sum(len(block.clients) for block in blocks)
    clients_done("validation", 0, total)
    for block, clients in in_client_order(blocks, work, processes):
        positions += zip(block.clients.tolist(), clients, strict=True)
        clients_done("validation", len(positions), total)
    positions.sort(key=itemgetter(0))
    return {variant: [client[variant] for _, client in positions] for variant in variants}


def _first_state(method: FederatedMethod, resumed: RunState | None) -> RunState:
    """The state before the first round, or the one that was read from files where the method keeps its tensors."""
    server, local = method.init()
    if resumed is not None:
        return _on_device(resumed, server, local)
    local = {name: tensor if is_mapped(tensor) else tensor.clone() for name, tensor in local.items()}
    return RunState(0, server, local, 0, -1.0, server, snapshot(local))


def _scored(
    state: RunState, last: Parameters, groups: Sequence[dict[str, float]], select_by: str
) -> tuple[RunState, float | None]:
    """The state after a round with these validation metrics, and its score; None where it was not validated."""
    score = sum(group[select_by] for group in groups) / len(groups) if groups else None
    if score is not None and score > state.best_score:
        best_local = snapshot(last.local, state.best_local)
        state = state._replace(best_round=last.round, best_score=score, best_server=last.server, best_local=best_local)
    return state._replace(round=last.round, server=last.server, local=last.local), score


def _clients_done(callbacks: Sequence[RoundCallback], round: int, what: str, done: int, total: int) -> None:
    for callback in callbacks:
        callback.clients_done(round, what, done, total)


class _Done(NamedTuple):
    """What the record of a round says of its training, in client order."""

    logs: list[dict]
    traffic: list[dict]
    non_finite: list[dict]
    refused: list[dict]
    capped: list[dict]
    """Bounded, or far from the others where nothing is bounded (`bounded`)."""
    train_s: float

    @property
    def far(self) -> list[dict]:
        return [upload for upload in self.capped if "others" in upload]


class _Trained(NamedTuple):
    """The result of training one block."""

    clients: Tensor
    """The clients that trained; fewer than the block holds where some were away."""
    upload: Upload
    own: NewRows
    logs: list[dict]
    traffic: list[Traffic]
    seconds: float


def _train(
    method: FederatedMethod,
    before: Parameters,
    blocks: Sequence[Block],
    channel: Channel,
    processes: Processes,
    clients_done: Callable[[str, int, int], None],
) -> tuple[Parameters, _Done]:
    """Local training of the cohort and aggregation -> the parameters after the round, and what is recorded."""
    round, local = before.round + 1, before.local
    read = {name: tensor for name, tensor in local.items() if name not in method.unread}
    logs: list[dict] = []
    traffic: list[tuple[int, Traffic]] = []
    non_finite: list[dict] = []
    refused: list[dict] = []
    train_s = 0.0
    capped: list[dict] = []
    cohort = sorted(client for block in blocks for client in block.clients.tolist())

    def work(block: Block) -> _Trained:
        download = method.broadcast(round, before.server, block.clients)
        started = time.perf_counter()
        upload, own, client_logs = method.client_update(round, download, _own(read, block), block)
        seconds = time.perf_counter() - started
        check_upload(upload, before.local, block.clients)
        trained = upload.clients
        download = download_to(download, torch.isin(block.clients, trained))
        upload = channel.protect(upload, download, round, len(cohort))
        return _Trained(trained, upload, own, client_logs, measure(download, upload), seconds)

    def arrived() -> Iterator[Arrived]:
        nonlocal train_s
        for _, trained in in_client_order(blocks, work, processes):
            for name, update in trained.own.items():
                if isinstance(update, RowUpdate):
                    write_rows(local[name], trained.clients, update)
                else:
                    local[name][trained.clients] = update.to(local[name])
            clients = trained.clients.tolist()
            logs.extend({"client": client, **log} for client, log in zip(clients, trained.logs, strict=True))
            train_s += trained.seconds
            clients_done("training", len(logs), len(cohort))
            sent_to = partial(method.broadcast, round, before.server, trained.clients)
            left = _moved(trained.upload, before.server)
            delivered = channel.delivery(left, sent_to, round)
            heard, bad = with_finite(delivered.upload)
            sent = channel.aggregation.send(round, cohort, sent_to, Sent(left, trained.traffic), heard)
            traffic.extend(zip(clients, sent.traffic, strict=True))
            non_finite.extend(bad)
            refused.extend([*delivered.refused, *sent.refused])
            heard_C = torch.isin(trained.clients, sent.upload.clients)
            yield Arrived(sent.upload, partial(_reference, method, round, sent_to, heard_C))

    clients_done("training", 0, len(cohort))
    largest = LARGEST_UPDATE if method.bounds_norms else LARGEST_OF_USERS if method.takes_mean else None
    backend = channel.aggregation
    stream = bounded(arrived(), largest, capped.append) if backend.sees_each else (one.upload for one in arrived())
    server = method.server_aggregate(round, before.server, backend.read(round, cohort, before.server, stream))
    for _ in stream:  # what the server did not read is trained too: clients need not know what it does with uploads
        pass
    logs.sort(key=itemgetter("client"))
    non_finite.sort(key=itemgetter("client"))
    refused.sort(key=itemgetter("client"))
    capped.sort(key=itemgetter("client"))
    by_client = group_traffic(sorted(traffic, key=itemgetter(0)))
    return Parameters(round, server, local), _Done(logs, by_client, non_finite, refused, capped, train_s)


@contextmanager
def _named_as_far(round: int, done: _Done, names: Sequence[str]) -> Iterator[None]:
    """A model without finite scores is told with whose upload was far from the others."""
    try:
        yield
    except ValueError as error:
        notes = far_notes([{"round": round, "far_uploads": done.far}], names)
        if notes:
            raise Diverged(f"{error}. In round {round}, {notes[0]}") from error
        raise


def _nobody_left(round: int, done: _Done, names: Sequence[str]) -> str:
    """What to say where numbers that are no good have left nobody of a round; empty where somebody is left."""
    broken = left_out([{"round": round, "clients": done.logs, "non_finite_uploads": done.non_finite}])
    useless = {one["client"] for one in broken}
    if not useless or {log["client"] for log in done.logs} - useless - {one["client"] for one in done.refused}:
        return ""
    some = sorted(useless)[:5]
    who = ", ".join(names[one] for one in some) if names else f"client {', '.join(map(str, some))}"
    who += ", ..." if len(useless) > 5 else ""
    why = next(
        (one["diverged"] for one in broken if "diverged" in one),
        "numbers that are not finite, or beyond float32 once squared",
    )
    return (
        f"got no usable upload in round {round} (of {who}: {why}), expected one at least: the training has "
        "diverged, and there is no result. Lower the learning rate"
    )


def _reference(
    method: FederatedMethod, round: int, sent_to: Callable[[], Download], heard_C: Tensor
) -> dict[str, Tensor]:
    """With what the uploads of a block's clients ``heard_C`` are compared."""
    if method.bounded_from is not None:
        return method.bounded_from(round)
    download = download_to(sent_to(), heard_C)
    return {**download.shared, **download.per_client}


def _on_device(state: RunState, server: Tree, local: Tree) -> RunState:
    """A state that was read from files, where the method keeps its tensors; mapped tables are mapped again."""
    homes = {**server, **local}
    anywhere = next((tensor.device for tensor in homes.values() if not is_mapped(tensor)), torch.device("cpu"))

    def home(tree: Tree) -> Tree:
        return {
            name: mapped_like(tensor).copy_(tensor)
            if name in homes and is_mapped(homes[name])
            else tensor.to(homes[name].device if name in homes else anywhere)
            for name, tensor in tree.items()
        }

    return state._replace(
        server=home(state.server),
        local=home(state.local),
        best_server=home(state.best_server),
        best_local=home(state.best_local),
    )


def _moved(upload: Upload, server: Tree) -> Upload:
    """The upload on the device of the server's tensors: what another process sends may lie on that one's own."""
    for tensor in server.values():
        return upload._replace(
            tensors={name: sent.to(tensor.device) for name, sent in upload.tensors.items()},
            rows={name: row_CR.to(tensor.device) for name, row_CR in upload.rows.items()},
        )
    return upload


def _own(local: Tree, block: Block) -> Tree:
    return {name: tensor[block.clients] for name, tensor in local.items()}
