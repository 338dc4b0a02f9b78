"""The round loop on a toy method: federated least squares with a private offset per client.

Client c holds points y_c; it uploads one gradient step from the common mean and keeps a count of its rounds.
"""

import json

import pytest
import torch

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.callbacks import Checkpoints, RoundCallback, recording
from fedecider.federation.channel import Channel
from fedecider.federation.method import Block, Download, FederatedMethod, Upload
from fedecider.federation.record import Recorder, non_finite_uploads, read_records, upload_notes
from fedecider.federation.rounds import Clients, RoundSettings, evaluate, evaluate_variants, run_rounds
from fedecider.federation.state import Parameters, load_state
from fedecider.federation.streams import stream
from fedecider.scratch import scratch_name
from fedecider.testing.rounds import recorded_rounds

POINTS = [torch.tensor([1.0, 5.0]), torch.tensor([-4.0]), torch.tensor([2.0, 2.0, -7.0])]


def toy(noise: float = 0.0) -> FederatedMethod:
    def init():
        return {"mean": torch.zeros(())}, {"seen": torch.zeros(3, dtype=torch.int64)}

    def client_update(round, download, own, block):
        new_C = torch.stack([download.shared["mean"] + 0.5 * (y.mean() - download.shared["mean"]) for y in block.data])
        for row, client in enumerate(block.clients.tolist()):
            new_C[row] += noise * torch.randn((), generator=stream(3, "noise", round, client))
        weight_C = torch.tensor([float(len(y)) for y in block.data])
        logs = [{"points": len(y)} for y in block.data]
        return Upload(block.clients, weight_C, {"mean": new_C}), {"seen": own["seen"] + 1}, logs

    def positions(variant, download, own, block, split):
        assert variant == "global"
        return [(y - download.shared["mean"]).abs().round().long() for y in block.data]

    return FederatedMethod(
        name="toy",
        init=init,
        broadcast=lambda round, server, clients: Download(server),
        client_update=client_update,
        server_aggregate=lambda round, server, uploads: weighted_mean(uploads, server),
        positions=positions,
        variants=("global",),
    )


def blocks(*groups: tuple[int, ...]) -> list[Block]:
    return [Block(torch.tensor(group), [POINTS[client] for client in group]) for group in groups]


def summarise(positions):
    return [{"ndcg@10": float((1 / (position_U + 1.0)).mean())} for position_U in positions]


def played(method, groups, settings, summarise=summarise, channel=Channel(), **clients):
    return run_rounds(method, Clients(groups, summarise, **clients), settings, channel)


def run(groups=((0,), (1,), (2,)), rounds=4, noise=0.3, **options):
    clients, settings = Clients(blocks(*groups), summarise), RoundSettings(rounds, seed=3)
    return recorded_rounds(toy(noise), clients, settings, **options)[0]


def test_hand_numbers():
    state = run(rounds=1, noise=0.0)
    # steps: 1.5, -2.0, -0.5 with weights 2, 1, 3
    assert state.server["mean"].item() == pytest.approx((2 * 1.5 - 2.0 - 3 * 0.5) / 6)
    assert state.local["seen"].tolist() == [1, 1, 1]


def test_kill_and_resume_reproduces_the_uninterrupted_run(tmp_path):
    whole = run(rounds=5, recorder=Recorder(tmp_path / "whole.jsonl"))
    first = run(rounds=2, checkpoints=tmp_path / "checkpoints", recorder=Recorder(tmp_path / "parts.jsonl"))
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"round": 3, "scor')  # what a kill leaves behind
    scratch_name(tmp_path / "checkpoints" / "round_00003").mkdir()  # and while it saved
    scratch_name(tmp_path / "checkpoints" / "round_00009").mkdir()  # and while it removed
    second = run(
        rounds=5, checkpoints=tmp_path / "checkpoints", recorder=Recorder(tmp_path / "parts.jsonl"), resume=True
    )
    assert first.round == 2
    assert torch.equal(whole.server["mean"], second.server["mean"])
    assert (whole.best_round, whole.best_score) == (second.best_round, second.best_score)
    scores = [[record["score"] for record in read_records(tmp_path / f"{n}.jsonl")] for n in ("whole", "parts")]
    assert len(scores[0]) == 5
    assert scores[0] == scores[1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["round_00004", "round_00005"]


def test_records_after_the_checkpoint_are_dropped_and_no_other(tmp_path):
    common = {"checkpoints": tmp_path, "recorder": Recorder(tmp_path / "rounds.jsonl")}
    run(rounds=2, **common)
    before = read_records(tmp_path / "rounds.jsonl")
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({**before[1], "round": 3, "score": 9.0}) + "\n")  # killed before its checkpoint
    run(rounds=5, resume=True, **common)
    after = read_records(tmp_path / "rounds.jsonl")
    assert [record["round"] for record in after] == [1, 2, 3, 4, 5]
    assert after[:2] == before
    assert after[2]["score"] < 9.0


def test_the_best_round_s_local_state_is_resumed_as_it_was(tmp_path):
    def summarise(positions):
        return [{"ndcg@10": next(given)}]

    given = iter([0.1, 0.3, 0.2, 0.2, 0.2])
    groups, settings = blocks((0,), (1,), (2,)), RoundSettings(3, seed=0)
    clients = Clients(groups, summarise)
    recorded_rounds(toy(), clients, settings, checkpoints=tmp_path)
    longer = settings._replace(num_rounds=5)
    resumed, _ = recorded_rounds(toy(), clients, longer, checkpoints=tmp_path, resume=True)
    assert (resumed.round, resumed.best_round) == (5, 2)
    assert resumed.local["seen"].tolist() == [5] * 3
    assert resumed.best_local["seen"].tolist() == [2] * 3


def test_clients_train_also_when_the_server_reads_no_or_few_uploads():
    def nothing(round, server, uploads):
        return server

    def one(round, server, uploads):
        return weighted_mean([next(uploads)], server)

    for aggregate in (nothing, one):
        method = toy()._replace(server_aggregate=aggregate)
        clients = Clients(blocks((0,), (1,), (2,)), summarise)
        state, records = recorded_rounds(method, clients, RoundSettings(2, seed=3))
        assert state.local["seen"].tolist() == [2, 2, 2]
        for record in records:
            assert [client["points"] for client in record["clients"]] == [2, 1, 3]
            assert record["traffic"][0]["clients"] == [0, 1, 2]


def test_an_upload_that_is_not_finite_is_recorded_with_client_round_and_tensor():
    inner = toy()

    def client_update(round, download, own, block):
        upload, new, logs = inner.client_update(round, download, own, block)
        other_C = torch.where(upload.clients == (1 if round == 2 else -1), torch.nan, 1.0)
        tensors = {**upload.tensors, "other": other_C, "count": upload.clients}
        return upload._replace(tensors=tensors), new, logs

    def run_in(*groups):
        method = inner._replace(
            init=lambda: (
                {"mean": torch.zeros(()), "other": torch.zeros(()), "count": torch.zeros(())},
                inner.init()[1],
            ),
            client_update=client_update,
        )
        return recorded_rounds(method, Clients(blocks(*groups), summarise), RoundSettings(3, seed=3))[1]

    single, together = run_in((0,), (1,), (2,)), run_in((0, 2), (1,))
    for records in (single, together):
        assert [record["non_finite_uploads"] for record in records] == [
            [],
            [{"client": 1, "tensors": ["other"]}],
            [],
        ]
        assert non_finite_uploads(records) == [{"round": 2, "client": 1, "tensors": ["other"]}]
        (line,) = upload_notes(records, ["crime", "comics", "children"])
        assert "comics in round 2 (other)" in line
    assert upload_notes([{"round": 1}]) == []


def test_resume_refuses_another_configuration(tmp_path):
    run(rounds=1, checkpoints=tmp_path)
    with pytest.raises(ValueError, match="another configuration"):
        load_state(tmp_path, "something else")


def test_nothing_local_may_be_uploaded():
    method = toy()

    def leaking(round, download, own, block):
        upload, own, logs = method.client_update(round, download, own, block)
        return upload._replace(tensors={"seen": own["seen"]}), own, logs

    with pytest.raises(AssertionError, match="local state in an upload"):
        played(method._replace(client_update=leaking), blocks((0,)), RoundSettings(1, seed=0), summarise)


def test_best_round_is_the_earliest_maximum():
    state = played(toy(), blocks((0,), (1,), (2,)), RoundSettings(3, seed=0), lambda positions: [{"ndcg@10": 0.25}])
    assert (state.best_round, state.best_score) == (1, 0.25)


def test_records_are_strict_json_with_traffic(tmp_path):
    run(rounds=1, recorder=Recorder(tmp_path / "rounds.jsonl"))
    record = json.loads((tmp_path / "rounds.jsonl").read_text())
    (group,) = record["traffic"]
    assert group["clients"] == [0, 1, 2]
    assert group["up"] == {"mean": 4}
    assert {"train_s", "wall_s", "evaluate_s"} <= set(record)
    assert [client["points"] for client in record["clients"]] == [2, 1, 3]


def test_weighted_mean_leaves_out_non_finite_clients():
    upload = Upload(
        torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0, 3.0]), {"x": torch.tensor([[1.0], [float("nan")], [5.0]])}
    )
    assert weighted_mean([upload], {})["x"].item() == pytest.approx((1 + 3 * 5) / 4)
    assert weighted_mean([upload], {}, uniform=True)["x"].item() == pytest.approx(3.0)
    broken = upload._replace(tensors={"x": torch.full((3, 1), float("inf"))})
    assert weighted_mean([broken], {"x": torch.tensor([9.0])})["x"].item() == 9.0


def test_patience_stops_and_a_resumed_run_stays_stopped(tmp_path):
    method, groups = toy(), blocks((0,), (1,), (2,))
    scores = iter([0.1, 0.3, 0.2, 0.3, 0.9, 0.9])
    settings = RoundSettings(6, seed=0, patience=2)

    def falling(positions):
        return [{"ndcg@10": next(scores)}]

    clients, checkpoints = Clients(groups, falling), Checkpoints(tmp_path, "", every=5)
    state = run_rounds(method, clients, settings, callbacks=[checkpoints.callback()])
    assert (state.round, state.best_round) == (4, 2)
    again = run_rounds(method, clients, settings, state=checkpoints.start(resume=True))
    assert (again.round, again.best_round) == (4, 2)
    assert torch.equal(again.best_server["mean"], state.best_server["mean"])
    assert not torch.equal(state.best_server["mean"], state.server["mean"])


def test_every_nth_round_and_the_last_one_are_validated_and_the_best_of_these_is_kept():
    scores = {2: 0.1, 4: 0.3, 5: 0.2}
    given = iter(scores.values())
    settings = RoundSettings(5, seed=0, eval_every=2)
    groups = blocks((0,), (1,), (2,))
    state, records = recorded_rounds(toy(), Clients(groups, lambda _: [{"ndcg@10": next(given)}]), settings)
    assert [record["score"] for record in records] == [None, 0.1, None, 0.3, 0.2]
    assert [list(record["valid"]) for record in records] == [[], ["global"], [], ["global"], ["global"]]
    assert [record["evaluate_s"] > 0.0 for record in records] == [False, True, False, True, True]
    assert (state.best_round, state.best_score, state.best_local["seen"].tolist()) == (4, 0.3, [4, 4, 4])
    every = run(rounds=5)
    sparse = played(toy(0.3), groups, RoundSettings(5, seed=3, eval_every=9), summarise)
    assert torch.equal(every.server["mean"], sparse.server["mean"])  # training does not know of it
    assert sparse.best_round == 5


def test_patience_counts_rounds_and_ends_a_run_at_a_validation():
    def rounds_with(patience, *scores):
        given = iter(scores)
        settings = RoundSettings(20, seed=0, patience=patience, eval_every=3)
        state = played(toy(), blocks((0,), (1,), (2,)), settings, lambda _: [{"ndcg@10": next(given)}])
        return state.round, state.best_round

    assert rounds_with(1, 0.3, 0.2) == (6, 3)
    assert rounds_with(3, 0.3, 0.2) == (6, 3)
    assert rounds_with(4, 0.3, 0.2, 0.2) == (9, 3)
    assert rounds_with(4, 0.3, 0.2, 0.4, 0.1, 0.1) == (15, 9)


def test_patience_counts_turns_of_a_client():
    """The first round is the best one: 2 turns of a third of the clients are 6 more rounds, 3 of a tenth 30 more."""
    for patience, participation, last in ((2, 1.0, 3), (2, 1 / 3, 7), (2, 0.4, 6), (3, 0.1, 31)):
        falling = iter(range(0, -40, -1))
        settings = RoundSettings(39, seed=0, participation=participation, patience=patience)
        state = played(toy(), blocks((0,), (1,), (2,)), settings, lambda _, given=falling: [{"ndcg@10": next(given)}])
        assert (state.round, state.best_round) == (last, 1)


@pytest.mark.parametrize("killed", [1, 2, 4])
def test_a_run_resumed_between_two_validations_is_the_uninterrupted_one(killed, tmp_path):
    settings = RoundSettings(7, seed=3, patience=6, eval_every=3)

    def play(folder, resume=False, killed=None):
        def kill(round):
            if round.number == killed:
                raise KeyboardInterrupt

        folder.mkdir(exist_ok=True)
        recorder = Recorder(folder / "rounds.jsonl")
        checkpoints = Checkpoints(folder, "", recorder)
        callbacks = [recording(recorder), checkpoints.callback(), RoundCallback(kill)]
        clients = Clients(blocks((0,), (1,), (2,)), summarise)
        return run_rounds(toy(0.3), clients, settings, callbacks=callbacks, state=checkpoints.start(resume))

    whole = play(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "stopped", killed=killed)
    resumed = play(tmp_path / "stopped", resume=True)
    assert (resumed.round, resumed.best_round, resumed.best_score) == (whole.round, whole.best_round, whole.best_score)
    for name in ("server", "local", "best_server", "best_local"):
        for key, tensor in getattr(whole, name).items():
            assert torch.equal(getattr(resumed, name)[key], tensor)
    records = [read_records(tmp_path / name / "rounds.jsonl") for name in ("whole", "stopped")]
    assert [[r["score"], r["valid"]] for r in records[0]] == [[r["score"], r["valid"]] for r in records[1]]
    assert [r["score"] is None for r in records[1]] == [True, True, False, True, True, False, False]


def test_a_cohort_is_packed_anew_and_positions_come_in_client_order():
    packed = []

    def pack(cohort):
        packed.append(list(cohort))
        return [Block(torch.tensor([client]), [POINTS[client]]) for client in reversed(cohort)]

    settings = RoundSettings(3, seed=3, participation=0.6)
    turned = [Block(torch.tensor([2, 0]), [POINTS[2], POINTS[0]]), Block(torch.tensor([1]), [POINTS[1]])]
    sizes = []

    def sizes_of(positions):
        sizes.append([len(position_U) for position_U in positions])
        return summarise(positions)

    state = played(toy(), turned, settings, sizes_of, pack=pack)
    assert all(len(cohort) == 2 for cohort in packed)
    assert sum(state.local["seen"].tolist()) == 6
    assert sizes == [[2, 1, 3]] * 3  # clients 0, 1, 2 have 2, 1 and 3 points


def test_all_variants_of_a_client_are_read_from_one_download():
    """As many downloads for two variants as for one, and the places of each are those of asking for it alone."""
    asked, inner = [], toy()

    def broadcast(round, server, clients):
        asked.append(clients.tolist())
        return inner.broadcast(round, server, clients)

    def positions(variant, download, own, block, split):
        found = inner.positions("global", download, own, block, split)
        return [place + 7 for place in found] if variant == "later" else found

    method = inner._replace(broadcast=broadcast, positions=positions, variants=("global", "later"))
    parameters = Parameters(1, *inner.init())
    groups = blocks((0, 2), (1,))
    both = evaluate_variants(method, parameters, ("later", "global"), "valid", groups)
    assert asked == [[0, 2], [1]]
    assert list(both) == ["later", "global"]
    for variant, found in both.items():
        alone = evaluate(method, parameters, variant, "valid", groups)
        assert [place.tolist() for place in found] == [place.tolist() for place in alone]
    assert [place.tolist() for place in both["later"]] == [(place + 7).tolist() for place in both["global"]]
    assert evaluate_variants(method, parameters, (), "valid", groups) == {}
