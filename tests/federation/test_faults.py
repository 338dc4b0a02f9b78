"""What goes wrong on purpose, and what a robust mean buys against it and costs without it."""

import sys
from pathlib import Path

import pytest
import torch
from slow import fast_where

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))
from toy_recommender import blocks, run, summarise, toy_recommender

from fedecider.bounds import Diverged
from fedecider.federation import aggregate
from fedecider.federation.aggregate import Arrived, bounded, robust, weighted_mean, with_robust_mean
from fedecider.federation.method import Upload
from fedecider.federation.record import upload_notes
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.federation.wire import joined
from fedecider.methods import METHODS
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole

NAMES = ["crime", "comics", "children"]


def carries(name):
    return name.endswith("lora_b")


def build(name, recommender=None):
    return METHODS[name].build(recommender or toy_recommender(), METHODS[name].config())


def run_with(name, *faults, rounds=3, kind="mean", recommender=None, clients=3):
    plan = faulty_channel(faults)
    method = with_robust_mean(build(name, recommender), kind)
    return run(method, clients, rounds, channel=plan)


def nothing_sent():
    raise AssertionError("no table is held by rows")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_nothing_goes_wrong_without_faults():
    state, records = run_with("fedecider")
    plain, _ = run(build("fedecider"), 3, 3)
    assert same(state.server, plain.server)
    assert all(record["refused_uploads"] == [] for record in records)


def test_a_straggler_has_trained_but_is_not_heard():
    state, records = run_with("fedecider", Fault(1, "late", 2, 2), rounds=2)
    plain, _ = run(build("fedecider"), 3, 2)
    before, _ = run(build("fedecider"), 3, 1)
    assert records[1]["refused_uploads"] == [{"client": 1, "reason": "came after round 2 was closed"}]
    name = next(name for name in state.server if carries(name))
    assert torch.equal(state.server[name][1], before.server[name][1])  # its direction of round 1
    assert same(state.local, plain.local)  # while its own rows are those of a client that trained


def test_what_hostile_uploads_are():
    tensors = {"x.lora_a": torch.ones(2, 3), "x.lora_b": torch.full((2, 4), 2.0), "n": torch.ones(2, dtype=torch.int64)}
    upload = Upload(torch.tensor([4, 7]), torch.ones(2), tensors)

    def sent(kind, round=1, plan=None):
        plan = plan or faulty_channel([Fault(7, kind, factor=10.0)])
        return plan.delivery(upload, nothing_sent, round).upload

    flipped = sent("sign_flip")
    assert flipped.tensors["x.lora_b"].tolist() == [[2.0] * 4, [-2.0] * 4]
    assert torch.equal(flipped.tensors["x.lora_a"], tensors["x.lora_a"])  # both factors turned would change nothing
    assert sent("scale").tensors["x.lora_b"].tolist() == [[2.0] * 4, [20.0] * 4]
    assert sent("nan").tensors["x.lora_a"][1].isnan().all()
    assert sent("nan").tensors["n"].tolist() == [1, 1]
    noise = sent("random").tensors["x.lora_b"]
    assert torch.equal(noise[0], tensors["x.lora_b"][0])
    torch.testing.assert_close(noise[1].norm(), tensors["x.lora_b"][1].norm())
    assert not torch.equal(noise[1], tensors["x.lora_b"][1])
    assert torch.equal(noise, sent("random").tensors["x.lora_b"])  # drawn from the seed
    replays = faulty_channel([Fault(7, "replay", 2)])
    later = upload._replace(tensors={name: tensor * 3 for name, tensor in tensors.items()})
    replays.delivery(upload, nothing_sent, 1)
    assert replays.delivery(later, nothing_sent, 2).upload.tensors["x.lora_b"].tolist() == [[6.0] * 4, [2.0] * 4]


def test_a_replay_of_other_tensors_than_the_round_is_about_is_refused():
    """RoLoRA sends one factor, then the other; what was sent before has other names."""
    state, records = run_with("rolora", Fault(1, "replay", 2), rounds=2)
    away, _ = run_with("rolora", Fault(1, "away", 2), rounds=2)
    (refused,) = records[1]["refused_uploads"]
    assert "which is not what round 2 is about" in refused["reason"]
    assert same(state.server, away.server)


def test_a_direction_does_not_care_how_large_its_upload_is():
    """FeDecider takes the direction alone: a million times an upload is the upload, and nobody else is harmed.

    In the round after, the attacker itself trains on from factors of very different sizes.
    """
    for rounds, harmless in ((1, [0, 1, 2]), (2, [0, 2])):
        plain, _ = run(build("fedecider"), 3, rounds)
        scaled, _ = run_with("fedecider", Fault(1, "scale", factor=1e6), rounds=rounds)
        for name in (name for name in plain.server if carries(name)):
            found, expected = (
                state.server[name] @ state.server[name.replace("lora_b", "lora_a")] for state in (scaled, plain)
            )
            torch.testing.assert_close(found[harmless], expected[harmless], rtol=1e-3, atol=1e-4)
    blown, _ = run_with("fedavg", Fault(1, "scale", factor=1e6), rounds=1)
    calm, _ = run(build("fedavg"), 3, 1)
    name = next(name for name in calm.server if carries(name))
    assert 1.5 * calm.server[name].norm() < blown.server[name].norm() < 3.0 * calm.server[name].norm()


ATTACKS = [
    (kind, attack) for attack in ("scale", "sign_flip", "random") for kind in ("median", "trimmed_mean", "norm_clip")
]


@pytest.mark.parametrize(("kind", "attack"), fast_where(lambda case: case[1] == "scale", ATTACKS))
def test_what_a_robust_mean_buys_and_costs(kind, attack):
    """Distance of FedAvg's tables from those of a round without the attack: less with it than with the plain mean."""
    plain, _ = run(build("fedavg"), 3, 1)

    def distance(kind, *faults):
        state, _ = run_with("fedavg", *faults, rounds=1, kind=kind)
        return float(sum((state.server[name] - plain.server[name]).norm() for name in plain.server))

    attacked = Fault(1, attack, factor=1e6)
    cost = distance(kind)
    assert cost > 0.0  # it is another mean
    if attack == "scale":
        away = distance("mean", Fault(1, "away"))
        assert max(distance(kind, attacked), distance("mean", attacked)) < 10.0 * away
    elif kind != "norm_clip":  # which bounds sizes alone
        assert distance(kind, attacked) < distance("mean", attacked) + cost


def test_medians_and_trimmed_means_by_hand():
    values = torch.tensor([[1.0, -5.0], [2.0, 0.0], [900.0, 7.0], [4.0, 1.0]])
    upload = Upload(torch.arange(4), torch.tensor([1.0, 1.0, 1.0, 5.0]), {"x": values})

    def mean(kind):
        return weighted_mean(robust([upload], kind, {}), {"x": torch.zeros(2)})["x"].tolist()

    assert mean("median") == [3.0, 0.5]
    assert mean("trimmed_mean") == [3.0, 0.5]
    huge = upload._replace(tensors={"x": torch.tensor([[0.1], [0.2], [0.3], [1e17]])})
    trimmed = weighted_mean(robust([huge], "trimmed_mean", {}), {"x": torch.zeros(1)})["x"]
    torch.testing.assert_close(trimmed, torch.tensor([0.25]))  # whom one number drowns is not lost
    marks = torch.tensor([[True, False], [True, False], [True, True], [True, True]])
    rows = Upload(
        torch.arange(4),
        torch.ones(4),
        {"x": torch.where(marks, values, 0.0)[..., None]},
        sent_rows={"x": marks},
    )
    found = weighted_mean(robust([rows], "median", {}), {"x": torch.full((2, 1), 9.0)})["x"]
    assert found.tolist() == [[3.0], [4.0]]  # of the second row two clients know
    bad = upload._replace(tensors={"x": values.index_fill(0, torch.tensor([2]), torch.nan)}, finite=None)
    assert weighted_mean(robust([bad], "median", {}), {"x": torch.zeros(2)})["x"].tolist() == [2.0, 0.0]
    nothing = {"x": torch.ones(2)}
    assert weighted_mean(robust([], "median", {}), nothing) is nothing


def test_norms_are_clipped_to_their_median():
    server = {"x": torch.tensor([1.0, 1.0])}
    change = torch.tensor([[3.0, 4.0], [0.0, 1.0], [600.0, 800.0]])
    upload = Upload(torch.arange(3), torch.ones(3), {"x": server["x"] + change})
    (clipped,) = robust([upload], "norm_clip", server)
    torch.testing.assert_close(clipped.tensors["x"] - server["x"], torch.tensor([[3.0, 4.0], [0.0, 1.0], [3.0, 4.0]]))
    huge = upload._replace(tensors={"x": torch.tensor([[1.1, 1.0], [1.2, 1.0], [1e17, 1.0]])})
    (clipped,) = robust([huge], "norm_clip", server)
    torch.testing.assert_close(clipped.tensors["x"], torch.tensor([[1.1, 1.0], [1.2, 1.0], [1.2, 1.0]]))


def test_a_fault_holds_in_its_rounds():
    assert [Fault(1, "scale", 2, 4).holds(round) for round in (1, 2, 4, 5)] == [False, True, True, False]
    assert [Fault(1, "away", 3).holds(round) for round in (2, 3, 99)] == [False, True, True]


def arrived(tensors, weights=None, received=None, block=1):
    """Uploads of single clients, or of blocks, with what they had received."""
    num = len(next(iter(tensors.values())))
    weight_C = torch.ones(num) if weights is None else torch.tensor(weights)
    for place in torch.arange(num).split(block):
        upload = Upload(place, weight_C[place], {name: tensor[place] for name, tensor in tensors.items()})
        yield Arrived(upload, lambda: received or {})


def after(*args, largest=3.0, **options):
    notes = []
    found = joined(list(bounded(arrived(*args, **options), largest, notes.append)))
    return found, notes


def test_norms_end_at_three_times_the_median_around_what_was_received():
    """Changes of norms 5, 1, 2 and 1000 from (1, 1): the median is 3.5, and so the cap 10.5."""
    start = torch.tensor([1.0, 1.0])
    change = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -2.0], [600.0, -800.0]])
    for block in (1, 4):
        found, notes = after({"x": start + change}, received={"x": start}, block=block)
        assert torch.equal(found.tensors["x"][:3], (start + change)[:3])
        torch.testing.assert_close(found.tensors["x"][3] - start, torch.tensor([6.3, -8.4]))
        assert notes == [{"client": 3, "norm": pytest.approx(1000.0), "cap": pytest.approx(10.5)}]
    loose, notes = after({"x": start + change}, received={"x": start}, largest=None)
    assert torch.equal(loose.tensors["x"], start + change)
    assert notes == []


def test_a_reported_loss_has_no_size_and_stays_as_it_is():
    """Losses near 9 are far above the updates, of norms 0.1, 0.2, 0.1 and 5: the cap is 0.45 all the same."""
    change = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.0, -0.1], [3.0, 4.0]])
    loss = torch.tensor([8.9, 9.1, 9.0, 9.2])
    found, notes = after({"x": 1.0 + change, "loss": loss}, received={"x": torch.ones(2)})
    assert notes == [{"client": 3, "norm": pytest.approx(5.0), "cap": pytest.approx(0.45)}]
    torch.testing.assert_close(found.tensors["x"][3], torch.tensor([1.27, 1.36]))
    assert torch.equal(found.tensors["loss"], loss)


def test_of_two_clients_and_of_those_that_send_nothing_there_is_no_median():
    for change in ([[1.0], [1e6]], [[0.0], [1.0], [1e6]], [[torch.nan], [1.0], [1e6]]):
        found, notes = after({"x": torch.tensor(change)})
        torch.testing.assert_close(found.tensors["x"], torch.tensor(change), equal_nan=True, rtol=0, atol=0)
        assert notes == [{"client": len(change) - 1, "norm": 1e6, "others": 1.0}]
    for change in ([[1.0], [29.0]], [[0.0], [0.0], [1e6]], [[1e6]]):
        assert after({"x": torch.tensor(change)})[1] == []
    found, notes = after({"x": torch.tensor([[0.0], [0.0], [0.0], [1.0], [2.0], [1e6]])})
    assert found.tensors["x"][:, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 2.0, 6.0]
    assert [one["client"] for one in notes] == [5]


def test_claims_end_at_ten_times_the_median_with_any_mean():
    tensors = {"x": torch.tensor([[1.0], [1.0], [1.0], [5.0]])}
    found, notes = after(tensors, weights=[2.0, 4.0, 3.0, 1e6], largest=None)
    assert found.weights.tolist() == [2.0, 4.0, 3.0, 35.0]
    assert notes == [{"client": 3, "weight": 1e6, "cap": 35.0}]


def test_a_robust_mean_does_not_hear_who_claims_examples():
    upload = Upload(torch.arange(3), torch.tensor([1.0, 2.0, 1e6]), {"x": torch.tensor([[1.0], [3.0], [5.0]])})
    for kind in ("norm_clip", "trimmed_mean", "median"):
        mean = weighted_mean(robust([upload], kind, {}), {"x": torch.zeros(1)})["x"]
        torch.testing.assert_close(mean, torch.tensor([(1.0 + 3.0 + 3.0) / 3 if kind == "norm_clip" else 3.0]))


def test_those_after_the_first_peers_stream_within_the_same_bound(monkeypatch):
    monkeypatch.setattr(aggregate, "NUM_PEERS", 3)
    read = []

    def told():
        for one in arrived({"x": torch.tensor([[1.0], [2.0], [3.0], [90.0], [1.0]])}):
            read.append(int(one.upload.clients))
            yield one

    stream = bounded(told(), 3.0, lambda note: None)
    assert float(next(stream).tensors["x"]) == 1.0
    assert read == [0, 1, 2]
    assert [float(upload.tensors["x"]) for upload in stream] == [2.0, 3.0, 6.0, 1.0]


def test_what_leaves_float32_when_squared_is_left_out_and_named():
    for factor, heard in ((1e30, 2), (1e6, 3)):
        state, records = run_with("fedavg", Fault(1, "scale", factor=factor), rounds=1)
        assert [one["client"] for one in records[0]["non_finite_uploads"]] == ([1] if heard == 2 else [])
        assert [one["client"] for one in records[0]["capped_uploads"]] == ([] if heard == 2 else [1])
        assert all(tensor.isfinite().all() for tensor in state.server.values())
    away, _ = run_with("fedavg", Fault(1, "away"), rounds=1)
    state, _ = run_with("fedavg", Fault(1, "scale", factor=1e30), rounds=1)
    assert same(state.server, away.server)


def test_a_round_of_which_nobody_is_left_ends_the_run():
    for faults in (
        [Fault(client, "nan", 2) for client in range(3)],
        [Fault(0, "nan", 2), Fault(1, "late"), Fault(2, "away")],
    ):
        with pytest.raises(Diverged, match=r"no usable upload in round 2 \(of client 0"):
            run_with("fedavg", *faults, rounds=3)
    plan = faulty_channel([Fault(client, "nan", 1) for client in range(3)])
    with pytest.raises(Diverged, match=r"in round 1 \(of crime, comics, children: numbers"):
        run_rounds(build("fedavg"), Clients(blocks(3), summarise, NAMES), RoundSettings(1, 0), plan)
    run_with("fedavg", Fault(0, "nan"), Fault(1, "late"), rounds=1)
    run_with("fedavg", *(Fault(client, "late", 1, 1) for client in range(3)), rounds=2)  # late, and not diverged


def test_bounds_do_not_depend_on_how_clients_are_cut_into_blocks(monkeypatch):
    monkeypatch.setattr(aggregate, "NUM_PEERS", 3)
    tensors = {"x": torch.tensor([[1.0], [2.0], [torch.nan], [4.0], [90.0], [100.0]])}
    assert after(tensors, block=6)[1] == []  # two of the first three have numbers
    tensors["x"][2] = 3.0
    assert [one["client"] for one in after(tensors, block=1)[1]] == [4, 5]
    assert after(tensors, block=1)[1] == after(tensors, block=4)[1] == after(tensors, block=6)[1]


def test_of_two_clients_the_one_whose_upload_is_far_is_named():
    """Nothing is bounded there, but record, notes and a run that ends in no numbers say whose it was."""
    pair = toy_recommender(NAMES[:2])
    _, records = run_with("fedavg", Fault(1, "scale", factor=1000.0), rounds=2, recommender=pair, clients=2)
    assert [[one["client"] for one in record["far_uploads"]] for record in records] == [[1], [1]]
    assert [record["capped_uploads"] for record in records] == [[], []]
    (note,) = upload_notes(records, NAMES)
    assert note.startswith("far from the others and not bounded, as of two clients there is no median: comics (norm ")
    _, honest = run_with("fedavg", rounds=1, recommender=pair, clients=2)
    assert "far_uploads" not in honest[0]

    def ends_in_nan(*given):
        raise ValueError("got NaN scores for 3 of 3 users")

    plan = faulty_channel((Fault(1, "scale", factor=1e6),))
    method = build("fedavg", pair)._replace(positions=ends_in_nan)
    with pytest.raises(Diverged, match=r"got NaN scores for 3 of 3 users\. In round 1, far from .*: client 1 \(norm"):
        run(method, 2, 1, channel=plan)
    with pytest.raises(ValueError, match=r"users$"):
        run(method, 2, 1)
