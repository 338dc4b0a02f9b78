"""What goes wrong in a federation, on purpose: clients that are away or late, uploads that are damaged or hostile.

Everything random is drawn from a seed. The server does not know of it: it sees what arrives.

Shape legend: C clients of a block, R rows of a table that a client holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from fedecider.federation.channel import Channel, Delivered
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.federation.streams import stream
from fedecider.federation.wire import dense, download_of, take_row

UploadKind = Literal["away", "late", "sign_flip", "scale", "random", "nan", "replay", "weight"]
MessageKind = Literal[
    "wrong_shape", "wrong_dtype", "missing", "extra", "wrong_round", "wrong_client", "oversized", "cut_off", "garbage"
]
Kind = UploadKind | MessageKind
UPLOAD_KINDS, MESSAGE_KINDS = get_args(UploadKind), get_args(MessageKind)
_OF_ANY_NUMBERS = ("away", "late", "random", "replay", "weight")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        client: The client's number.
        kind: away does not take part: a dropout, a late joiner (rounds from 1), one that leaves (rounds without end).
            late has trained, but its upload misses the round. Uploads are replaced by: their opposite (sign_flip),
            ``factor`` times themselves (scale), noise of their size (random; of whole numbers the same ones in another
            order), NaN (nan), what the client sent in the round before (replay; at its first upload, and the first
            after a resumed run, there is none before); weight claims ``factor`` times as many examples. The others
            (`MESSAGE_KINDS`) damage messages, which a deployment alone has: a channel leaves uploads as they are.
        first: The first round.
        last: The last round; None for no end.
        factor: Of scale and weight.
    """

    client: int
    kind: Kind
    first: int = 1
    last: int | None = None
    factor: float = 1e6

    def holds(self, round: int) -> bool:
        return self.first <= round and (self.last is None or round <= self.last)


def faulty_channel(faults: Sequence[Fault], seed: int = 0, channel: Channel = Channel()) -> Channel:
    """``channel`` with these faults on it.

    What a client sends is whole tables, also where the simulation holds changed rows: of a block with a client that
    something happens to they are built, and take the memory of as many tables as the block has clients.
    """
    kept: dict[int, Tree] = {}
    replayed = {fault.client for fault in faults if fault.kind == "replay"}

    def availability(round: int, cohort: set[int]) -> set[int]:
        away = {fault.client for fault in faults if fault.kind == "away" and fault.holds(round)}
        return channel.availability(round, cohort) - away

    def delivery(upload: Upload, sent_to: Callable[[], Download], round: int) -> Delivered:
        now = [fault for fault in faults if fault.holds(round) and fault.kind != "away"]
        touched = {fault.client for fault in now} | replayed
        kept_C = torch.ones(len(upload.clients), dtype=torch.bool)
        refused, changed, weight_C = [], {}, upload.weights.clone()
        for row, client in enumerate(upload.clients.tolist()):
            if client not in touched:
                continue
            fresh = _whole(upload, sent_to, row)
            sent, reason = fresh, ""
            for fault in (fault for fault in now if fault.client == client):
                if fault.kind == "late":
                    reason = f"came after round {round} was closed"
                elif fault.kind == "replay":
                    sent = kept.get(client, sent)
                    if _looks(sent) != _looks(fresh):
                        reason = f"sent {', '.join(sorted(sent)[:3])}, which is not what round {round} is about"
                elif fault.kind == "weight":
                    weight_C[row] *= fault.factor
                else:
                    sent = _damaged(fault, sent, seed, round)
            if client in replayed:
                kept[client] = fresh
            if reason:
                kept_C[row] = False
                refused.append({"client": client, "reason": reason})
            elif sent is not fresh:
                changed[row] = sent
        arrived = upload._replace(weights=weight_C)
        return Delivered(_of(_with(arrived, changed) if changed else arrived, kept_C), refused)

    return channel._replace(availability=availability, delivery=delivery)


@contextmanager
def faulty_runs(faults: Sequence[Fault], seed: int = 0) -> Iterator[None]:
    """Every run that begins within the block has these faults."""

    def with_faults(method: FederatedMethod, clients: Clients, settings: RoundSettings, channel: Channel, *more: Any):
        return run_rounds(method, clients, settings, faulty_channel(faults, seed, channel), *more)

    with patch("fedecider.engine.run.run_rounds", with_faults):
        yield


def _whole(upload: Upload, sent_to: Callable[[], Download], row: int) -> Tree:
    """What the client in ``row`` sends, tables that are held by rows in full."""
    if not upload.rows:
        return {name: tensor.clone() for name, tensor in take_row(upload.tensors, row).items()}
    one = _of(upload, torch.arange(len(upload.clients)) == row)
    return take_row(dense(one, download_of(sent_to(), row)).tensors, 0)


def _looks(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tree.items()}


def _damaged(fault: Fault, tree: Tree, seed: int, round: int) -> Tree:
    if fault.kind not in _OF_ANY_NUMBERS and tree and not any(one.is_floating_point() for one in tree.values()):
        raise ValueError(
            f"got the fault {fault.kind} of client {fault.client}, who sends whole numbers, expected one of "
            f"{', '.join(_OF_ANY_NUMBERS)}"
        )
    return {name: _damaged_tensor(fault, name, tensor, seed, round) for name, tensor in tree.items()}


def _damaged_tensor(fault: Fault, name: str, value: Tensor, seed: int, round: int) -> Tensor:
    if fault.kind == "random":
        return _random(value, stream(seed, "fault", fault.client, round, name))
    if not value.is_floating_point():
        return value
    if fault.kind == "nan":
        return torch.full_like(value, torch.nan)
    if fault.kind in ("sign_flip", "scale") and not name.endswith("lora_a"):  # both factors: the same product
        return value * (-1.0 if fault.kind == "sign_flip" else fault.factor)
    return value


def _random(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        order = torch.randperm(value.numel(), generator=generator).to(value.device)
        return value.reshape(-1)[order].view(value.shape)
    noise = torch.randn(value.shape, generator=generator)
    return (noise * (value.norm().cpu() / noise.norm().clamp(min=1e-12))).to(value)


def _with(upload: Upload, changed: Mapping[int, Tree]) -> Upload:
    """The upload with other tensors of the clients in these rows; rows that they do not send stay empty."""
    tensors, rows = dict(upload.tensors), dict(upload.rows)
    for name, tensor in upload.tensors.items():
        if name in rows:
            tensor, rows[name] = _longer(tensor, rows[name], {row: tree[name] for row, tree in changed.items()})
        else:
            tensor = tensor.clone()
            for row, tree in changed.items():
                tensor[row] = tree[name]
        tensors[name] = tensor
    for name, mark_Cn in upload.sent_rows.items():
        tensors[name] = tensors[name].masked_fill(~mark_Cn.to(tensors[name].device)[..., None], 0.0)
    return upload._replace(tensors=tensors, rows=rows)


def _longer(value: Tensor, row_CR: Tensor, whole: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """A table by rows in which some clients have all of them."""
    num_rows = len(next(iter(whole.values())))
    num_held = max(num_rows, row_CR.shape[1])
    longer = value.new_zeros(len(value), num_held, *value.shape[2:])
    longer_CR = row_CR.new_full((len(value), num_held), -1)
    longer[:, : row_CR.shape[1]], longer_CR[:, : row_CR.shape[1]] = value, row_CR
    for row, table in whole.items():
        longer[row, :num_rows], longer_CR[row] = table, -1
        longer_CR[row, :num_rows] = torch.arange(num_rows)
    return longer, longer_CR


def _of(upload: Upload, kept_C: Tensor) -> Upload:
    """The upload of some of its clients."""
    if kept_C.all():
        return upload

    def rows(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[kept_C.to(tensor.device)] for name, tensor in tree.items()}

    return upload._replace(
        clients=upload.clients[kept_C],
        weights=upload.weights[kept_C],
        tensors=rows(upload.tensors),
        rows=rows(upload.rows),
        payload=rows(upload.payload),
        sent_rows=rows(upload.sent_rows),
    )
