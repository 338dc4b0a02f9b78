"""The only round loop: cohort -> broadcast -> client_update -> wire -> server_aggregate -> record -> save."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.bounds import Diverged
from fedecider.federation.aggregate import LARGEST_OF_USERS, LARGEST_UPDATE, Arrived, bounded
from fedecider.federation.cohort import choose_cohort
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.processes import Processes, in_client_order
from fedecider.federation.record import Recorder, far_notes, left_out
from fedecider.federation.rows import write_rows
from fedecider.federation.state import RunState, is_mapped, load_state, mapped_like, remove_debris, save_state, snapshot
from fedecider.federation.wire import Traffic, check_upload, download_to, group_traffic, measure, with_finite

Pack = Callable[[Sequence[int]], Sequence[Block]]
"""Client numbers of a cohort, ascending -> the blocks they are trained in."""


Protect = Callable[[Upload, Download, int, int], Upload]
"""(upload, download, round, cohort size) -> the upload that leaves the clients, bounded and noised."""


class Delivered(NamedTuple):
    """The uploads of a block that reached the server."""

    upload: Upload
    """Of the clients that got through, in their order."""
    refused: Sequence[dict] = ()
    """``client`` and ``reason`` of the others, for the record of the round."""


Deliver = Callable[[Upload, Callable[[], Download], int], Delivered]
"""(upload as it left the clients, function that returns their download, round) -> what arrives. Every process calls it
with the same arguments, so that all of them hold the same state."""


class Sent(NamedTuple):
    """The upload of a block as it is sent, and its bytes."""

    upload: Upload
    """What the server receives."""
    traffic: Sequence[Traffic]
    """Bytes of each client that trained."""
    refused: Sequence[dict] = ()
    """``client`` and ``reason`` of the clients whose uploads the backend could not send."""


class AggregationBackend(NamedTuple):
    """How uploads reach the server: one by one, or as a secure sum."""

    send: Callable[[int, Sequence[int], Callable[[], Download], Sent, Upload], Sent]
    """(round, cohort, function that returns the download, plain uploads of all that trained, upload of those that got
    through) -> what is sent. A client that trained and dropped out has still paid for its bytes; so both are passed.
    Every process calls it with the same arguments."""
    read: Callable[[int, Sequence[int], Tree, Iterator[Upload]], Iterator[Upload]]
    """(round, cohort, server tree, uploads as sent) -> uploads that the server aggregates."""
    sees_each: bool = False
    """Whether the server sees single uploads. Then it bounds their norms before it reads them; of a sum it cannot."""


ONE_BY_ONE = AggregationBackend(
    send=lambda round, cohort, sent_to, left, heard: Sent(heard, left.traffic),
    read=lambda round, cohort, server, uploads: uploads,
    sees_each=True,
)
"""The plain backend: the server sees every upload."""


Attend = Callable[[int, set[int]], set[int]]
"""(round, cohort) -> the clients of it that are there."""


OnClients = Callable[[int, str, int, int], None]
"""(round, "training" or "validation", clients done, all clients): called as a round goes on, for progress bars."""


def silent(round: int, what: str, done: int, total: int) -> None:
    """Tell nobody."""


class RoundSettings(NamedTuple):
    """Settings of the loop itself; all others belong to the method."""

    num_rounds: int
    seed: int
    participation: float = 1.0
    select_by: str = "ndcg@10"
    fingerprint: str = ""
    checkpoint_every: int = 1
    """Rounds between checkpoints; the last round is always saved."""
    patience: int = 0
    """Stop after this many rounds without a better validation score; 0 runs all of them."""
    eval_every: int = 1
    """Rounds between validations; the last round is always validated."""

    def validates(self, round: int) -> bool:
        """Whether this round ends with a validation."""
        return round % self.eval_every == 0 or round == self.num_rounds

    def stops(self, round: int, best_round: int) -> bool:
        """Whether patience ends the run after this round. Only a validated round can end it: others have no score."""
        return self.validates(round) and 0 < self.patience <= round - best_round


def run_rounds(
    method: FederatedMethod,
    blocks: Sequence[Block],
    settings: RoundSettings,
    summarise: Callable[[list[Tensor]], list[dict[str, float]]],
    *,
    pack: Pack | None = None,
    protect: Protect = lambda upload, download, round, cohort_size: upload,
    attend: Attend = lambda round, cohort: cohort,
    deliver: Deliver = lambda upload, sent_to, round: Delivered(upload),
    gathering: AggregationBackend = ONE_BY_ONE,
    summarise_logs: Callable[[list[dict]], list[dict]] = lambda logs: logs,
    recorder: Recorder | None = None,
    checkpoints: Path | None = None,
    resume: bool = False,
    processes: Processes | None = None,
    on_round: Callable[[dict], None] = lambda record: None,
    ends: Callable[[dict, RunState], bool] = lambda record, state: False,
    on_clients: OnClients = silent,
    validated: Sequence[Block] | None = None,
    names: Sequence[str] = (),
) -> RunState:
    """Run ``method`` for ``settings.num_rounds`` rounds and return the final state with its best round.

    Every ``eval_every``-th round and the last one are validated, for every variant of the method. The round with the
    best mean ``select_by`` of the first variant is kept, the earliest of equals.

    With several processes, each of them sees the same uploads in the same order, so all hold the same state. Only
    process 0 writes. Local state is updated in place and copied only when its round is the best so far: of a million
    users there is no room for more copies.

    Args:
        method: The algorithm.
        blocks: All clients.
        settings: See `RoundSettings`.
        summarise: Positions of all clients, in client order -> metrics of each reported group: one per domain, or one
            for all users.
        pack: Puts a cohort that is not everybody into blocks; None: the given blocks stay whole.
        protect: Bounds and noises what leaves a client (:mod:`fedecider.federation.privacy`).
        attend: Who of a cohort is there (:mod:`fedecider.federation.faults`). The server goes on without the others.
        deliver: Which uploads arrive (the same module).
        gathering: How uploads reach the server; :mod:`fedecider.federation.secure_rounds` has the secure sums.
        summarise_logs: Logs of all clients -> what the record of the round keeps.
        recorder: Writes one record a round.
        checkpoints: Folder of checkpoints; None: none are written.
        resume: Go on from the newest checkpoint.
        processes: This process among all of them.
        on_round: Called with the record of every round.
        ends: (record, state) -> whether this round is the last; every process asks after every round.
        on_clients: See `OnClients`.
        validated: Blocks that are scored, where not all are: a sample chooses the round as well, in less time.
        names: Names of the clients, where they may be told.

    Raises:
        Diverged: no upload of a round can be used; the round is recorded, and no checkpoint is made of it.
        ValueError: a cohort is empty; a loss is not finite (told by the method, which knows the tensor); checkpoints or
            records of the run to resume are damaged.
    """
    processes, recorder = processes or Processes(), recorder or Recorder(None)

    def warn(text: str) -> None:
        if processes.index == 0:
            print(f"warning: {text}", file=sys.stderr)

    if checkpoints and processes.index == 0:
        remove_debris(checkpoints)
    state = load_state(checkpoints, settings.fingerprint, warn) if resume and checkpoints else None
    server, local = method.init()
    if state is not None:
        state = _on_device(state, server, local)
    else:
        local = {name: tensor if is_mapped(tensor) else tensor.clone() for name, tensor in local.items()}
        state = RunState(0, server, local, 0, -1.0, server, snapshot(local))
    recorder.rewind(state.round, state.records)
    num_clients = sum(len(block.clients) for block in blocks)
    pack = pack or _whole(blocks)
    for round in range(state.round + 1, settings.num_rounds + 1):
        if settings.stops(state.round, state.best_round):
            break  # tested before a round, so that a run that was stopped here does not go on when it is resumed
        started = time.perf_counter()
        asked = choose_cohort(method, state.server, num_clients, settings.participation, settings.seed, round)
        cohort = attend(round, asked)
        if not cohort:
            raise ValueError(f"got nobody of {len(asked)} clients in round {round}, expected one at least")
        present = blocks if len(cohort) == num_clients else pack(sorted(cohort))
        server, local, done = _train(method, round, state, present, protect, deliver, gathering, processes, on_clients)
        trained = time.perf_counter()
        diverged = _nobody_left(round, done, names)
        variants = method.variants if settings.validates(round) and not diverged else ()
        with _named_as_far(round, done, names):
            found = evaluate_variants(
                method, round, variants, "valid", server, local, validated or blocks, processes, on_clients
            )
        scores = {variant: summarise(positions) for variant, positions in found.items()}
        groups = scores.get(method.variants[0], [])
        score = sum(group[settings.select_by] for group in groups) / len(groups) if groups else None
        if score is not None and score > state.best_score:
            best_local = snapshot(local, state.best_local)
            state = state._replace(best_round=round, best_score=score, best_server=server, best_local=best_local)
        state = state._replace(round=round, server=server, local=local)
        seconds = {
            "train_s": done.train_s,  # summed over clients
            "wall_s": trained - started,
            "evaluate_s": time.perf_counter() - trained if groups else 0.0,
        }
        record = {
            "round": round,
            "score": score,
            "valid": scores,
            "clients": summarise_logs(done.logs),
            "traffic": done.traffic,
            "non_finite_uploads": done.non_finite,
            "refused_uploads": [*({"client": c, "reason": "away"} for c in sorted(asked - cohort)), *done.refused],
            "capped_uploads": [one for one in done.capped if "cap" in one],
            **({"far_uploads": done.far} if done.far else {}),
            **seconds,
        }
        if diverged:
            recorder.write(record)
            on_round(record)
            raise Diverged(diverged)
        recorder.write(record)  # before the checkpoint: what a kill in between leaves too much, resuming drops again
        ended = ends(record, state)
        due = round % settings.checkpoint_every == 0 or round == settings.num_rounds or ended
        if checkpoints and (due or settings.stops(round, state.best_round)) and processes.index == 0:
            state = state._replace(records=recorder.digest())
            save_state(state, checkpoints, settings.fingerprint)
        on_round(record)
        if ended:
            break
    return state


def evaluate(
    method: FederatedMethod,
    round: int,
    variant: str,
    split: str,
    server: Tree,
    local: Tree,
    blocks: Sequence[Block],
    processes: Processes | None = None,
    on_clients: OnClients = silent,
) -> list[Tensor]:
    """Positions of every client in client order: one tensor per client."""
    return evaluate_variants(method, round, (variant,), split, server, local, blocks, processes, on_clients)[variant]


def evaluate_variants(
    method: FederatedMethod,
    round: int,
    variants: Sequence[str],
    split: str,
    server: Tree,
    local: Tree,
    blocks: Sequence[Block],
    processes: Processes | None = None,
    on_clients: OnClients = silent,
) -> dict[str, list[Tensor]]:
    """Variant -> :func:`evaluate`; what a client receives and holds is read once for all variants."""
    if not variants:
        return {}

    def work(block: Block) -> list[dict[str, Tensor]]:
        download, own = method.broadcast(round + 1, server, block.clients), _own(local, block)
        found = {variant: method.positions(variant, download, own, block, split) for variant in variants}
        return [{variant: found[variant][place] for variant in variants} for place in range(len(block.clients))]

    positions: list[tuple[int, dict[str, Tensor]]] = []
    total = sum(len(block.clients) for block in blocks)
    on_clients(round, "validation", 0, total)
    for block, clients in in_client_order(blocks, work, processes or Processes()):
        positions += zip(block.clients.tolist(), clients, strict=True)
        on_clients(round, "validation", len(positions), total)
    positions.sort(key=itemgetter(0))
    return {variant: [client[variant] for _, client in positions] for variant in variants}


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
        return [one for one in self.capped if "others" in one]


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
    round: int,
    state: RunState,
    blocks: Sequence[Block],
    protect: Protect,
    deliver: Deliver,
    gathering: AggregationBackend,
    processes: Processes,
    on_clients: OnClients,
) -> tuple[Tree, Tree, _Done]:
    """Local training of the cohort and aggregation -> server, local, what is recorded."""
    local = state.local
    read = {name: tensor for name, tensor in local.items() if name not in method.unread}
    logs: list[dict] = []
    traffic: list[tuple[int, Traffic]] = []
    non_finite: list[dict] = []
    refused: list[dict] = []
    train_s = 0.0
    capped: list[dict] = []
    cohort = sorted(client for block in blocks for client in block.clients.tolist())

    def work(block: Block) -> _Trained:
        download = method.broadcast(round, state.server, block.clients)
        started = time.perf_counter()
        upload, own, client_logs = method.client_update(round, download, _own(read, block), block)
        seconds = time.perf_counter() - started
        check_upload(upload, state.local, block.clients)
        trained = upload.clients
        download = download_to(download, torch.isin(block.clients, trained))
        upload = protect(upload, download, round, len(cohort))
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
            on_clients(round, "training", len(logs), len(cohort))
            sent_to = partial(method.broadcast, round, state.server, trained.clients)
            left = _moved(trained.upload, state.server)
            delivered = deliver(left, sent_to, round)
            heard, bad = with_finite(delivered.upload)
            sent = gathering.send(round, cohort, sent_to, Sent(left, trained.traffic), heard)
            traffic.extend(zip(clients, sent.traffic, strict=True))
            non_finite.extend(bad)
            refused.extend([*delivered.refused, *sent.refused])
            heard_C = torch.isin(trained.clients, sent.upload.clients)
            yield Arrived(sent.upload, partial(_reference, method, round, sent_to, heard_C))

    on_clients(round, "training", 0, len(cohort))
    largest = LARGEST_UPDATE if method.bounds_norms else LARGEST_OF_USERS if method.takes_mean else None
    stream = bounded(arrived(), largest, capped.append) if gathering.sees_each else (one.upload for one in arrived())
    server = method.server_aggregate(round, state.server, gathering.read(round, cohort, state.server, stream))
    for _ in stream:  # what the server did not read is trained too: clients need not know what it does with uploads
        pass
    logs.sort(key=itemgetter("client"))
    non_finite.sort(key=itemgetter("client"))
    refused.sort(key=itemgetter("client"))
    capped.sort(key=itemgetter("client"))
    by_client = group_traffic(sorted(traffic, key=itemgetter(0)))
    return server, local, _Done(logs, by_client, non_finite, refused, capped, train_s)


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


def _whole(blocks: Sequence[Block]) -> Pack:
    """Blocks as they are: those all of whose clients take part."""

    def pack(cohort: Sequence[int]) -> list[Block]:
        present = [block for block in blocks if set(cohort).issuperset(block.clients.tolist())]
        if not present:
            raise ValueError(f"got the cohort {list(cohort)[:10]}, which holds no whole block: raise participation")
        return present

    return pack


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
