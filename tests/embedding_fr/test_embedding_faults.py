"""Faults and robust means where every user is a client, and where tables are held by the rows that changed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from toy_federation import run, toy_method

from fedecider.federation import aggregate
from fedecider.federation.aggregate import robust, weighted_mean, with_robust_mean
from fedecider.federation.method import Upload
from fedecider.federation.wire import dense
from fedecider.testing.faults import Fault, faulty_channel

MEANS = ["median", "trimmed_mean", "norm_clip"]
BY_ROWS = [
    ("fedmf", {}),
    ("pfedclr", {}),
    pytest.param("fedrecgel", {"variant": "code"}, marks=pytest.mark.whole),  # half a minute to compile
]


def whole(method):
    """The same method, whose uploads hold whole tables."""

    def client_update(round, download, own, block):
        upload, new, logs = method.client_update(round, download, own, block)
        return dense(upload, download), new, logs

    return method._replace(client_update=client_update)


def run_with(method, *faults, rounds=2, **options):
    plan = faulty_channel(faults)
    return run(method, rounds=rounds, channel=plan, **options)


def close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize(("name", "variant"), BY_ROWS)
@pytest.mark.usefixtures("double")
def test_a_robust_mean_by_rows_is_that_of_whole_tables(name, variant, kind, monkeypatch):
    by_rows = with_robust_mean(toy_method(name, **variant), kind)
    state, _ = run(by_rows, rounds=2)
    expected, _ = run(with_robust_mean(whole(toy_method(name, **variant)), kind), rounds=2)
    close(state.server, expected.server)
    monkeypatch.setattr(aggregate, "PART_NUMBERS", 60)  # two rows at a time
    in_parts, _ = run(by_rows, rounds=2)
    close(state.server, in_parts.server)
    plain, _ = run(toy_method(name, **variant), rounds=2)
    assert any(not torch.equal(state.server[key], plain.server[key]) for key in plain.server)


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "random", "nan", "replay", "late", "weight"])
@pytest.mark.parametrize(("name", "variant"), BY_ROWS)
@pytest.mark.usefixtures("double")
def test_a_fault_reaches_the_whole_table_also_where_rows_are_held(name, variant, kind):
    fault = Fault(2, kind, factor=7.0)
    state, records = run_with(toy_method(name, **variant), fault, block_clients=3)
    expected, dense_records = run_with(whole(toy_method(name, **variant)), fault, block_clients=1)
    close(state.server, expected.server)
    close(state.local, expected.local)
    for one, other in zip(records, dense_records, strict=True):
        for told in ("refused_uploads", "non_finite_uploads", "traffic"):
            assert one[told] == other[told]
    plain, _ = run(toy_method(name, **variant), rounds=2)
    uniform = kind == "weight" and name == "fedrecgel"  # whose server does not look at weights
    assert uniform == all(torch.equal(state.server[key], plain.server[key]) for key in plain.server)


class Twin(NamedTuple):
    """One of two processes that are threads."""

    index: int
    shared: list
    barrier: threading.Barrier
    count: int = 2
    within_a_client: bool = False

    def gather(self, value):
        self.shared[self.index] = value
        self.barrier.wait(60)
        both = list(self.shared)
        self.barrier.wait(60)
        return both


def test_two_processes_play_the_scenario_of_one():
    """The absence of the first client moves the second one's block, and what it sent before, to the other process."""
    faults = (Fault(0, "away", 2), Fault(1, "replay", 2))
    one, _ = run_with(toy_method("fedmf"), *faults, rounds=3, block_clients=1)
    shared, barrier = [None, None], threading.Barrier(2)

    def work(index):
        twin = Twin(index, shared, barrier)
        return run_with(toy_method("fedmf"), *faults, rounds=3, block_clients=1, processes=twin)[0]

    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(work, range(2)))
    for state in states:
        assert all(torch.equal(state.server[key], one.server[key]) for key in one.server)


def test_medians_of_rows_by_hand():
    """Five clients, of whom three move row 1, two move row 2, and none row 0; the attacker holds all."""
    server = {"table": torch.tensor([[10.0], [20.0], [30.0]])}
    rows = torch.tensor([[1, -1, -1], [1, 2, -1], [0, 1, 2], [-1, -1, -1], [-1, -1, -1]])
    values = torch.tensor([[21.0, 0, 0], [24.0, 33.0, 0], [9e9, 9e9, 9e9], [0, 0, 0], [0, 0, 0]])[..., None]
    upload = Upload(torch.arange(5), torch.arange(1.0, 6.0), {"table": values}, rows={"table": rows})

    def mean(kind):
        return weighted_mean(robust([upload], kind, server), server)["table"][:, 0].tolist()

    assert mean("median") == [10.0, 21.0, 30.0]  # of row 1: 20, 20, 21, 24 and the attacker's
    assert mean("trimmed_mean") == pytest.approx([10.0, (20.0 + 21.0 + 24.0) / 3, 31.0])
    (clipped,) = robust([upload], "norm_clip", server)
    assert clipped.tensors["table"][0, 0] == 21.0  # the median of the norms 1, 5, 1.6e10, 0, 0
    assert (clipped.tensors["table"][2, :, 0] - torch.tensor([10.0, 20.0, 30.0])).norm() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["fedmf", "gpfedrec", "fedem", "fedfast", "cofedrec", "perfedrec"])
def test_who_is_not_heard_is_not_in_what_the_server_has(name):
    """The server after a round with a refused client is that of a round in which the client was away."""
    states = [run_with(toy_method(name), Fault(1, kind), rounds=1)[0] for kind in ("away", "late", "nan")]
    for state in states[1:]:
        assert all(torch.equal(state.server[key], states[0].server[key]) for key in state.server)


def test_a_sum_under_masks_goes_on_without_some_and_stops_without_many():
    for kind in ("away", "late"):
        run_with(toy_method("fedease", secure=True), Fault(1, kind))
        with pytest.raises(
            ValueError, match="got 4 of 7 uploads for the secure aggregation of pairs 1, expected 5 at least"
        ):
            run_with(toy_method("fedease", secure=True), *(Fault(client, kind) for client in (1, 2, 4)))
