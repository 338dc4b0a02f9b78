"""A site that plays faults: what a faulty channel does to uploads, and damage that only messages have."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fedecider.deployment.messages import MARKS, Message, pack, unpack
from fedecider.deployment.site import Answer
from fedecider.federation.channel import Channel
from fedecider.federation.method import Download, Upload
from fedecider.federation.streams import stream
from fedecider.testing.faults import MESSAGE_KINDS, Fault, faulty_channel


def faulty(
    answer: Answer,
    client: int,
    faults: Sequence[Fault],
    seed: int,
    most_bytes: int,
    deadline_s: float = 0.0,
) -> Answer:
    """``answer`` of the site of ``client``, whose uploads are those of a site with these faults.

    wrong_shape, wrong_dtype, missing and extra change one tensor; wrong_round and wrong_client what the head says;
    oversized is more than ``most_bytes``; cut_off is half of the message; garbage as many random bytes. An away site
    does not train, a late one has; both answer with an error. Where there is a deadline, the late one's upload comes
    when it is over instead.
    """
    own = [fault for fault in faults if fault.client == client]
    hostile = [fault for fault in own if fault.kind not in MESSAGE_KINDS]
    channel = faulty_channel(hostile, seed)

    def played(blob: bytes) -> bytes:
        asked = unpack(blob, most_bytes)
        if asked.kind != "train":
            return answer(blob)
        if not channel.availability(asked.round, {client}):
            return _error(asked.round, "away")
        sent = unpack(answer(blob), most_bytes)
        if sent.kind != "upload":
            return pack(sent)
        if deadline_s and any(fault.kind == "late" and fault.holds(asked.round) for fault in own):
            time.sleep(deadline_s)
            return pack(sent)
        sent, reason = _delivered(sent, channel)
        if reason:
            return _error(asked.round, reason)
        damage = [fault.kind for fault in own if fault.kind in MESSAGE_KINDS and fault.holds(asked.round)]
        whole = pack(_damaged(sent, damage, client))
        if "oversized" in damage:
            return whole + bytes(max(0, most_bytes + 1 - len(whole)))
        if "garbage" in damage:
            drawn = torch.randint(256, (len(whole),), generator=stream(seed, "fault", client, asked.round, "garbage"))
            return bytes(drawn.tolist())
        return whole[: len(whole) // 2] if "cut_off" in damage else whole

    return played


def _error(round: int, reason: str) -> bytes:
    return pack(Message("error", round, {}, {"reason": reason}))


def _delivered(sent: Message, channel: Channel) -> tuple[Message, str]:
    """The message with the upload that the scenario makes of it, and why there is none."""
    facts = sent.facts
    plain = {name: tensor for name, tensor in sent.tensors.items() if not name.startswith(MARKS)}
    tensors = {name: tensor[None] if name in facts["marks"] else tensor for name, tensor in plain.items()}
    upload = Upload(torch.tensor(facts["clients"]), torch.tensor(facts["weights"], dtype=torch.float64), tensors)
    arrived = channel.delivery(upload, lambda: Download({}), sent.round)
    if arrived.refused:
        return sent, arrived.refused[0]["reason"]
    arrived_tensors = arrived.upload.tensors
    changed = {name: tensor[0] if name in facts["marks"] else tensor for name, tensor in arrived_tensors.items()}
    weights = arrived.upload.weights.tolist()
    return sent._replace(tensors={**sent.tensors, **changed}, facts={**facts, "weights": weights}), ""


def _damaged(sent: Message, kinds: Sequence[str], client: int) -> Message:
    tensors, facts = dict(sent.tensors), dict(sent.facts)
    first = min((name for name in tensors if not name.startswith(MARKS)), default="")
    if "wrong_shape" in kinds:
        tensors[first] = tensors[first][None]
    if "wrong_dtype" in kinds:
        tensors[first] = tensors[first].to(torch.float64)
    if "missing" in kinds:
        del tensors[first]
    if "extra" in kinds:
        tensors["extra"] = torch.zeros(3)
    if "wrong_client" in kinds:
        facts["clients"] = [client + 1]
    return Message(sent.kind, sent.round - 1 if "wrong_round" in kinds else sent.round, tensors, facts)
