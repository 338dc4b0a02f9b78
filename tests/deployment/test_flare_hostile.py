"""A hostile site in a FLARE job, by the functions that handle its messages: refused by name, it ends nobody's run.

The controller and the executors are those of a job; what lies between them in FLARE is played here.
"""

import copy
import itertools
import json
import re
import threading
import time

import pytest
import torch

pytest.importorskip("nvflare", reason="needs nvflare: pip install '.[deploy]'")

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from test_deployed import MOST, NAMES, build, changed, same, site_of
from toy_recommender import run, toy_recommender

from fedecider.deployment.flare import RoundsController, SiteExecutor, of_blob, to_blob
from fedecider.deployment.messages import Channel, DeploymentConfig, unpack
from fedecider.deployment.server import Plan, run_deployed
from fedecider.federation.rounds import RoundSettings
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole

PARTIES = [f"site-{name}" for name in NAMES]


def job(executors, hostile=lambda party, asked, reply: (party, reply)):
    """What carries the messages of a job between its server and the executors of its sites."""
    controller = RoundsController(dict(zip(NAMES, PARTIES, strict=True)))
    controller.abort_signal, controller.fl_ctx = Signal(), FLContext()

    def broadcast(task, targets, **more):
        (party,) = targets
        asked = unpack(to_blob(task.data), MOST)
        reply = executors[party].execute(task.name, task.data, FLContext(), Signal())
        sender, reply = hostile(party, asked, reply)
        heard = ClientTask(Client(sender, "token"), task)
        heard.result = reply
        task.result_received_cb(heard, FLContext())

    controller.broadcast = broadcast
    return lambda sent, deadline_s: controller._exchange(
        {PARTIES[site]: (site, blob) for site, blob in sent.items()}, deadline_s
    )


def executors_of(folder, **more):
    found = {}
    for client, party in enumerate(PARTIES):
        found[party] = SiteExecutor()
        found[party]._answer = site_of("fedavg", client, folder, **more).answer
    return found


def with_blob(change):
    return lambda reply, first: FLModelUtils.to_shareable(of_blob(change(to_blob(reply))))


def with_data(data):
    return lambda reply, first: DXO(DataKind.WEIGHTS, data=data).to_shareable()


def header(text):
    return len(text).to_bytes(8, "little") + text.encode()


def with_tensors(change):
    return with_blob(
        lambda blob: changed(blob, tensors={name: change(one) for name, one in unpack(blob, MOST).tensors.items()})
    )


HOSTILE = {
    "says that it has failed": (lambda reply, first: make_reply(ReturnCode.EXECUTION_EXCEPTION), "no message"),
    "sends nothing": (lambda reply, first: Shareable(), "no message"),
    "sends text": (with_data({"message": "text"}), "no message"),
    "sends no dictionary": (lambda reply, first: Shareable({**reply, "DXO": [1, 2]}), "no message"),
    "sends other numbers": (with_data({"message": torch.zeros(3).numpy()}), "no message"),
    "sends a header of 2^60 bytes": (with_blob(lambda blob: (1 << 60).to_bytes(8, "little") + blob[8:]), "cut off"),
    "sends a huge header": (with_blob(lambda blob: header(json.dumps(["y" * (5 << 20)]))), "larger than 4,194,304"),
    "sends a deep header": (with_blob(lambda blob: header("[" * 100_000)), "no message"),
    "sends its first update again": (lambda reply, first: first, "of client 1 for round 1, expected the upload of"),
    "sends as another client": (with_blob(lambda blob: changed(blob, facts={"clients": [2]})), "'upload' of client 2"),
    "sends a wrong shape": (with_tensors(lambda one: one[..., :1]), "expected torch.float32"),
    "sends another round": (with_blob(lambda blob: changed(blob, round=99)), "for round 99, expected"),
    "weighs more than anybody": (
        with_blob(lambda blob: changed(blob, facts={"weights": [2**31 + 1]})),
        "got the weight '2147483649', expected a number from 0 to 2,147,483,648",
    ),
}


def test_a_hostile_site_is_refused_by_name_and_the_others_end_with_a_result(tmp_path):
    kinds, first = list(HOSTILE.values()), {}

    def hostile(party, asked, reply):
        if party == PARTIES[1] and asked.kind == "train":
            first.setdefault(party, copy.deepcopy(reply))
            if asked.round > 1:
                reply = kinds[asked.round - 2][0](reply, first[party])
        return party, reply

    figures = {"row": {"hit@10": {"mean": 0.25, "low": 0.0, "high": 0.5}}}
    carried = job(executors_of(tmp_path, finish=lambda state, download: figures), hostile)
    state, records, results = ended(carried, 1 + len(kinds))
    for (what, (_, reason)), record in zip(HOSTILE.items(), records[1:], strict=True):
        (refused,) = record["refused_uploads"]
        assert refused["client"] == 1, what
        assert re.search(re.escape(reason), refused["reason"]), what
    assert results == dict.fromkeys(range(3), figures)
    plan = faulty_channel([Fault(1, "late", 2)])
    simulated, _ = run(build("fedavg", toy_recommender()), 3, 1 + len(kinds), channel=plan)
    assert same(state.server, simulated.server)


def ended(carried, rounds, **config):
    channel = Channel(carried, DeploymentConfig(**config), "abc", NAMES)
    method = build("fedavg", toy_recommender(NAMES, data=[{"labels": torch.zeros(0, 2)}] * 3))
    records = []
    plan = Plan(method, RoundSettings(num_rounds=rounds, seed=0), ("ndcg@10",))
    state, results = run_deployed(plan, channel, on_round=records.append)
    return state, records, results


def test_numbers_that_are_none_and_the_largest_weight_move_nobody(tmp_path):
    """NaN with a weight of 2^31: named, and the mean is that of the others."""

    def hostile(party, asked, reply):
        if party == PARTIES[1] and asked.kind == "train":
            blob = to_blob(with_tensors(lambda one: one * float("nan"))(reply, None))
            reply = FLModelUtils.to_shareable(of_blob(changed(blob, facts={"weights": [2**31]})))
        return party, reply

    state, records, _ = ended(job(executors_of(tmp_path), hostile), 2)
    assert [[one["client"] for one in record["non_finite_uploads"]] for record in records] == [[1], [1]]
    simulated, _ = run(build("fedavg", toy_recommender()), 3, 2, channel=faulty_channel([Fault(1, "nan")]))
    assert same(state.server, simulated.server)


def test_nobody_answers_for_another_site(tmp_path):
    """FLARE knows by its certificate who has sent an answer."""

    def hostile(party, asked, reply):
        as_other = party == PARTIES[2] and (asked.kind, asked.round) == ("train", 2)
        return PARTIES[1] if as_other else party, reply

    _, records, _ = ended(job(executors_of(tmp_path), hostile), 2, deadline_s=0.2)
    assert records[1]["refused_uploads"] == [{"client": 2, "reason": "no answer to train within 0.2 s"}]


def test_a_site_that_cannot_be_made_ready_says_so(tmp_path, monkeypatch):
    def memory(name):
        raise MemoryError(f"4 GB for {name}")

    monkeypatch.setattr("fedecider.deployment.flare._made_ready", memory)
    executors = executors_of(tmp_path)
    executors[PARTIES[1]]._answer = None
    _, records, _ = ended(job(executors), 1)
    reason = "the site says: the site could not be made ready, see its log"
    assert records[0]["refused_uploads"] == [{"client": 1, "reason": reason}]


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
def test_a_deadline_does_not_follow_the_clock_of_the_day(step, monkeypatch):
    """Neither where it goes forward, and every answer would be late, nor where it goes back."""
    clock = itertools.count(2e9, step)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    controller = RoundsController(dict(zip(NAMES, PARTIES, strict=True)))
    controller.abort_signal, controller.fl_ctx = Signal(), FLContext()

    def broadcast(task, targets, **more):
        heard = ClientTask(Client(targets[0], "token"), task)
        heard.result = FLModelUtils.to_shareable(of_blob(b"here"))
        if targets == [PARTIES[0]]:
            threading.Timer(0.2, task.result_received_cb, (heard, FLContext())).start()

    controller.broadcast = broadcast
    sent = {PARTIES[site]: (site, b"asked") for site in range(2)}
    begun = time.monotonic()
    assert controller._exchange(sent, 0.6) == {0: b"here"}
    assert 0.5 < time.monotonic() - begun < 5.0
