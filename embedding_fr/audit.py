"""What the server can tell of a client's train items from a run of this track, measured on the run itself.

An output directory keeps no uploads. The first rounds of the run are done again from its settings and data, by the
method's own functions in the one loop, and watched where the server stands: behind bound, noise and masks.

Shape legend: C audited clients, I items, D numbers of a row, A attacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedding_fr.commands import recorded_settings
from embedding_fr.methods import METHODS
from embedding_fr.methods.fednear import MASKED, parties
from embedding_fr.setup import EmbeddingSettings, Setup, hashes_of, set_up, train
from fedecider.audit.attacks import AuditConfig, AuditRow, Outcome, epsilon_of, finished, utility_of
from fedecider.audit.item_attack import ATTACKS, move_scores
from fedecider.audit.separation import Scored, auc, chosen_on_others
from fedecider.data.interactions import Interactions, load_interactions
from fedecider.evaluation.protocols import train_part
from fedecider.evaluation.statistics import mean_interval
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.callbacks import collecting
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.federation.wire import dense, download_to, upload_at
from fedecider.report.costs import mean_bytes
from fedecider.running.launch import Launch

TOLERANCE = 0.01
"""Relative difference of a round's mean loss from the recorded one up to which it is the same round."""
COUNTS = "how often"


class Watched(NamedTuple):
    """Scores of all items, higher for likelier train items."""

    first: dict[int, Tensor]
    """Client -> (A, I) from its upload of round 1 alone."""
    all: dict[int, Tensor]
    """Client -> (A, I) from all its uploads, added up."""
    total_AI: Tensor | None
    """From the sum over all clients alone; None where the server makes no sum of tables or counts."""
    sum_seen_by: str
    """A mean of tables is sent to everybody; a sum of counts stays with the server."""


def audit_embedding(config: AuditConfig, launch: Launch) -> Outcome:
    """Attack a finished run of the cross-device track.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, it summed uploads unseen, its data are other ones now, its rounds come out
            differently here, or no upload has a row or a count for every item.
    """
    root = Path(config.run)
    folder, result = finished(root)
    settings = recorded_settings(result.record["config"], str(folder.record), config.data)
    if not settings.run.federation:
        raise ValueError(f"got {root} with federation off, expected a run whose clients upload: nothing left them")
    if settings.run.secure_sum:
        raise ValueError(
            f"got {root} with secure_sum, whose server sees a mean alone, expected a run without: there the row of the "
            "sum alone says what is seen of that mean"
        )
    interactions = load_interactions(settings.data)
    if result.record["data"] != hashes_of(settings, interactions):
        raise ValueError(f"got other data than those of {root}, expected the same. Give the run's folder with --data")
    records = result.rounds
    setup = set_up(settings, interactions, launch.device)
    clients = audited_clients(config, interactions.num_users)
    num_rounds = min(config.num_rounds, len(records))
    seen = watch_rounds(settings, setup, clients, num_rounds, records[:num_rounds])
    return Outcome(
        run=root.resolve().name,
        method=settings.run.method,
        about="items",
        utility=utility_of(result, root),
        epsilon=epsilon_of(result.metrics),
        bytes_up=mean_bytes(records[0], "up"),
        rows=item_rows(config, interactions, seen, num_rounds),
        notes=[f"{len(seen.all):,} of {interactions.num_users:,} clients attacked; rounds done again: {num_rounds}"],
    )


def audited_clients(config: AuditConfig, num_clients: int) -> list[int]:
    """Those that are attacked where an upload of theirs arrives, drawn once, ascending."""
    order = torch.randperm(num_clients, generator=stream(config.seed, "audited clients"))
    return order[: config.num_clients or num_clients].sort().values.tolist()


def watch_rounds(
    settings: EmbeddingSettings,
    setup: Setup,
    clients: Sequence[int],
    num_rounds: int,
    records: Sequence[Mapping[str, Any]],
) -> Watched:
    """Do the first rounds again, and score every item from what reaches the server.

    Raises:
        ValueError: a round is not the recorded one; no upload of ``clients`` arrived, or none has a row or a count for
            every item.
    """
    num_items = setup.population.num_items
    again: list[dict] = []
    tables = METHODS[settings.run.method].item_tables
    first: dict[int, Tensor] = {}
    score_of: dict[int, Tensor] = {}
    move_of: dict[int, Tensor] = {}
    arrived: set[int] = set()
    counts: list[Tensor] = []
    masked: list[Tensor] = []
    totals: list[Tensor] = []
    seen_by = ["server, every client"]

    def see(round: int, download: Download, upload: Upload) -> None:
        counted_CI = counts_of(upload, num_items)
        if counted_CI is not None:
            seen_by[:] = ["server"]
            counts.append(counted_CI.sum(0, dtype=counted_CI.dtype))
        if MASKED in upload.tensors:
            part_L = upload.tensors[MASKED].sum(0, dtype=upload.tensors[MASKED].dtype)
            masked[:] = [masked[0] + part_L] if masked else [part_L]  # modulo the size of the numbers
        kept_C = torch.isin(upload.clients, torch.tensor(clients)) & finite_clients(upload)
        if kept_C.any():
            mine = upload_at(upload, kept_C)
            arrived.update(mine.clients.tolist())
            move_CID = moves_of(mine, download_to(download, kept_C), num_items, tables)
            if move_CID is not None:
                move_of.update(zip(mine.clients.tolist(), move_CID, strict=True))

    def after(round: int, before: Tree, now: Tree) -> None:
        if move_of:
            score_ACI = move_scores(torch.stack(list(move_of.values())))
            for client, score_AI in zip(move_of, score_ACI.unbind(1), strict=True):
                first.setdefault(client, score_AI)
                score_of[client] = score_of[client] + score_AI if client in score_of else score_AI
        total_ID = moved_sum(before, now, tables) if not counts else _column(counts)
        if masked:  # what the server opens: the sum over all clients, and nothing else
            sums = parties(setup.federation, settings.method, round)
            opened_L = sums.open(masked[0].cpu(), range(setup.federation.num_clients))
            total_ID = opened_L[diagonal(num_items)].double()[:, None]
        if total_ID is not None and (move_of or counts):
            totals.append(move_scores(total_ID[None])[:, 0])
        for seen in (move_of, counts, masked):
            seen.clear()

    run = replace(settings.run, num_rounds=num_rounds, patience=0, num_eval_users=0)
    watching = setup._replace(method=watched(setup.method, see, after), validated=setup.validated[:1])
    train(settings._replace(run=run), watching, [collecting(again)])
    _check_again(again, records)
    if not arrived:
        raise ValueError(
            f"got no upload of the {len(clients)} clients drawn here in rounds 1 to {num_rounds}, expected one at "
            "least: raise num_clients or num_rounds"
        )
    if not score_of:
        raise ValueError(
            f"got uploads of {settings.run.method} with neither a row nor a count for each of {num_items} items, "
            "expected some: this audit reads item tables (Method.item_tables) and count matrices"
        )
    return Watched(first, score_of, torch.stack(totals).sum(0) if totals else None, seen_by[-1])


def watched(
    method: FederatedMethod,
    see: Callable[[int, Download, Upload], None],
    after: Callable[[int, Tree, Tree], None],
) -> FederatedMethod:
    """``method`` whose server shows every upload that it reads, with what its clients had got, and what it makes."""

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        def passing() -> Iterator[Upload]:
            for upload in uploads:
                see(round, method.broadcast(round, server, upload.clients), upload)
                yield upload

        now = method.server_aggregate(round, server, passing())
        after(round, server, now)
        return now

    return method._replace(server_aggregate=server_aggregate)


def moves_of(upload: Upload, download: Download, num_items: int, tables: Sequence[str]) -> Tensor | None:
    """(C, I, D): uploaded less downloaded rows of ``tables`` beside each other, or counts (C, I, 1); else None."""
    counted_CI = counts_of(upload, num_items)
    if counted_CI is not None:
        return counted_CI.double()[:, :, None]
    whole, parts = dense(upload, download), []
    known = {**download.shared, **download.per_client}
    for name in [name for name in tables if name in whole.tensors]:
        base = None if name in upload.num_rows else known.get(name)
        parts.append((whole.tensors[name] if base is None else whole.tensors[name] - base).cpu())
    return torch.cat(parts, 2) if parts else None


def counts_of(upload: Upload, num_items: int) -> Tensor | None:
    """(C, I) integers: item lists, or the diagonals of masked count matrices; None for other uploads."""
    if MASKED in upload.tensors:
        return upload.tensors[MASKED][:, diagonal(num_items)].cpu()
    listed = upload.tensors.get("items")
    if listed is not None and listed.dtype == torch.bool and listed.shape[1:] == (num_items,):
        return listed.to(torch.int32).cpu()
    return None


def moved_sum(before: Tree, now: Tree, tables: Sequence[str]) -> Tensor | None:
    """(I, D) how the server's ``tables`` moved, those that are one for all clients; None where it has none."""
    names = [name for name in tables if name in before and before[name].dim() == 2]
    return torch.cat([(now[name] - before[name]).cpu() for name in names], 1) if names else None


def item_rows(config: AuditConfig, interactions: Interactions, seen: Watched, num_rounds: int) -> list[AuditRow]:
    """One row for each thing that can be seen, over the clients of whom something was; what everybody may know comes
    first."""
    trained = [sorted(set(train_part(sequence))) for sequence in interactions.sequences]
    count_I = torch.zeros(interactions.num_items)
    for items in trained:
        count_I[items] += 1.0
    others = {client: _without(count_I, trained[client])[None] for client in sorted(seen.all)}
    rows: list[tuple[str, str, Mapping[int, Tensor], Sequence[str]]] = [
        ("nobody", f"{COUNTS} the other clients have an item", others, (COUNTS,)),
        ("server", "each client's upload of its first round", seen.first, ATTACKS),
    ]
    if any(not torch.equal(seen.all[client], seen.first[client]) for client in seen.all):
        both = {client: torch.cat([score_AI, seen.first[client]]) for client, score_AI in seen.all.items()}
        attacks = (*ATTACKS, *(f"{attack}, of the first round alone" for attack in ATTACKS))
        rows += [("server", f"each client's uploads of rounds 1 to {num_rounds}", both, attacks)]
    if seen.total_AI is not None:
        total = dict.fromkeys(seen.all, seen.total_AI)
        rows += [(seen.sum_seen_by, f"the sum over all clients alone, rounds 1 to {num_rounds}", total, ATTACKS)]
    return [_row(config, party, sees, scores, trained, names) for party, sees, scores, names in rows]


def _row(
    config: AuditConfig,
    party: str,
    sees: str,
    scores: Mapping[int, Tensor],
    trained: Sequence[Sequence[int]],
    attacks: Sequence[str],
) -> AuditRow:
    aucs = [[auc(_scored(score_I, trained[client])) for score_I in score_AI] for client, score_AI in scores.items()]
    auc_AC = torch.tensor(aucs, dtype=torch.float64).T
    fold_C = torch.randperm(len(scores), generator=stream(config.seed, "halves")) % 2
    chosen_C = chosen_on_others(auc_AC, fold_C)
    value_C = auc_AC.gather(0, chosen_C[None])[0]
    ((often, _),) = Counter(chosen_C.tolist()).most_common(1)
    return AuditRow(party, sees, attacks[often], mean_interval(value_C), None)


def _scored(score_I: Tensor, items: Sequence[int]) -> Scored:
    member_I = torch.zeros(len(score_I), dtype=torch.bool)
    member_I[list(items)] = True
    return Scored(score_I[member_I], score_I[~member_I])


def _without(count_I: Tensor, items: Sequence[int]) -> Tensor:
    left_I = count_I.clone()
    left_I[list(items)] -= 1.0
    return left_I


def diagonal(num_items: int) -> Tensor:
    """(I,) places of the items' own counts in a triangle of counts."""
    item_I = torch.arange(num_items)
    return item_I * num_items - item_I * (item_I - 1) // 2


def _column(counts: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(counts))
    return stacked.sum(0, dtype=stacked.dtype).double()[:, None]


def _check_again(again: Sequence[dict], records: Sequence[Mapping[str, Any]]) -> None:
    """``ValueError`` unless every round has the clients, the refusals and the mean loss that the run recorded."""
    for now, then in zip(again, records, strict=True):
        if _attendance(now) != _attendance(then):
            (num_now, refused_now), (num_then, refused_then) = _attendance(now), _attendance(then)
            raise ValueError(
                f"got {num_now} clients in round {then['round']} done again and refused uploads {refused_now}, "
                f"expected the recorded {num_then} and {refused_then}: another version of the code made the run"
            )
        got, expected = now["clients"][0].get("loss"), then["clients"][0].get("loss")
        if got is not None and expected is not None and abs(got - expected) > TOLERANCE * abs(expected):
            raise ValueError(
                f"got a mean loss of {got:.6g} in round {then['round']} done again, expected the recorded "
                f"{expected:.6g}: another version of the code, or of its libraries, made the run"
            )


def _attendance(record: Mapping[str, Any]) -> tuple[int, list[dict]]:
    """How many clients trained in a round, and whose uploads did not arrive."""
    return record["clients"][0]["clients"], record.get("refused_uploads", [])
