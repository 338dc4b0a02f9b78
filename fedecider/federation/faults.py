"""What goes wrong in a federation, on purpose: clients that are away or late, uploads that are damaged or hostile.

A scenario is a list of faults, each of one client over some rounds; everything random in it is drawn from the run's
seed. The server does not know of it: it sees what arrives.

Shape legend: C clients of a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedecider.federation.method import Upload
from fedecider.federation.rounds import Attend, Deliver, Delivered
from fedecider.federation.streams import stream

Kind = Literal["away", "late", "sign_flip", "scale", "random", "nan", "replay"]
_KEYS = {"client", "kind", "rounds", "factor"}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        client: The client's number.
        kind: away does not take part: a dropout, a late joiner (rounds from 1), one that leaves (rounds without end).
            late has trained, but its upload misses the round. Uploads are replaced by: their opposite (sign_flip),
            ``factor`` times themselves (scale), noise of their size (random), NaN (nan), what the client sent in the
            round before (replay; at its first upload, and the first after a resumed run, there is none before).
        first: The first round.
        last: The last round; None for no end.
        factor: Of scale.
    """

    client: int
    kind: Kind
    first: int = 1
    last: int | None = None
    factor: float = 1e6

    def holds(self, round: int) -> bool:
        return self.first <= round and (self.last is None or round <= self.last)


class Scenario(NamedTuple):
    """The two places of the round loop at which a scenario steps in."""

    attend: Attend
    deliver: Deliver


def read_faults(content: Any, names: Sequence[str], source: str) -> list[Fault]:
    """The faults in ``content``, ``{"faults": [{"client": name, "kind": ..., "rounds": "2-4", "factor": ...}, ...]}``.

    ``rounds``: "3", "2-4" or "2-" (without end); all rounds when it is left out.

    Raises:
        ValueError: it is not of that form, or names a client that the run does not have.
    """
    listed = content.get("faults") if isinstance(content, dict) and set(content) == {"faults"} else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"got no list of faults in {source}, expected faults: [{{client: NAME, kind: away}}, ...]")
    return [_fault(one, names, f"fault {number} of {source}") for number, one in enumerate(listed, 1)]


def _fault(one: Any, names: Sequence[str], source: str) -> Fault:
    if not isinstance(one, Mapping) or not {"client", "kind"} <= set(one) <= _KEYS:
        raise ValueError(f"got {one!r} as {source}, expected client and kind, and rounds and factor if need be")
    if one["kind"] not in get_args(Kind):
        raise ValueError(f"got kind {one['kind']!r} in {source}, expected one of {', '.join(get_args(Kind))}")
    if str(one["client"]) not in names:
        raise ValueError(f"got client {one['client']!r} in {source}, expected one of {', '.join(names[:10])}")
    span = re.fullmatch(r"(\d+)(-?)(\d*)", str(one.get("rounds", "1-")))
    if span is None or int(span[1]) < 1 or (span[3] and int(span[3]) < int(span[1])):
        raise ValueError(f"got rounds {one.get('rounds')!r} in {source}, expected such as 3, 2-4 or 2-")
    last = int(span[3]) if span[3] else None if span[2] else int(span[1])
    factor = one.get("factor", 1e6)
    if not isinstance(factor, int | float) or factor != factor:
        raise ValueError(f"got factor {factor!r} in {source}, expected a number")
    return Fault(names.index(str(one["client"])), one["kind"], int(span[1]), last, float(factor))


def scenario(faults: Sequence[Fault], seed: int, carries: Callable[[str], bool] = lambda name: True) -> Scenario:
    """How ``faults`` step in. ``carries``: whether a tensor of that name has the sign and size of the update.

    Of a low-rank product one factor has: turned round both, it would be the same update.
    """
    sent_before: dict[int, dict[str, Tensor]] = {}

    def attend(round: int, cohort: set[int]) -> set[int]:
        return cohort - {fault.client for fault in faults if fault.kind == "away" and fault.holds(round)}

    def deliver(upload: Upload, round: int) -> Delivered:
        tensors = dict(upload.tensors)
        kept_C = torch.ones(len(upload.clients), dtype=torch.bool)
        refused = []
        for row, client in enumerate(upload.clients.tolist()):
            fresh = {name: tensor[row].clone() for name, tensor in upload.tensors.items()}
            for fault in faults:
                if fault.client != client or not fault.holds(round):
                    continue
                if fault.kind == "late":
                    kept_C[row] = False
                    refused.append({"client": client, "reason": f"came after round {round} was closed"})
                for name, tensor in tensors.items():
                    if fault.kind == "replay" and client in sent_before:
                        damaged = sent_before[client][name]
                    else:
                        damaged = _damaged(fault, name, tensor[row], carries, seed, round)
                    if damaged is not tensor[row]:
                        tensors[name] = tensor.clone()
                        tensors[name][row] = damaged
            sent_before[client] = fresh
        for name, mark_Cn in upload.sent_rows.items():
            tensors[name] = tensors[name].masked_fill(~mark_Cn.to(tensors[name].device)[..., None], 0.0)
        return Delivered(_of(upload._replace(tensors=tensors), kept_C), refused)

    return Scenario(attend, deliver)


def _damaged(fault: Fault, name: str, value: Tensor, carries: Callable[[str], bool], seed: int, round: int) -> Tensor:
    if not value.is_floating_point():
        return value
    if fault.kind == "nan":
        return torch.full_like(value, torch.nan)
    if fault.kind == "random":
        noise = torch.randn(value.shape, generator=stream(seed, "fault", fault.client, round, name))
        return (noise * (value.norm().cpu() / noise.norm().clamp(min=1e-12))).to(value)
    if fault.kind in ("sign_flip", "scale") and carries(name):
        return value * (-1.0 if fault.kind == "sign_flip" else fault.factor)
    return value


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
