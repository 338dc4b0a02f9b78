"""A deployed run is the simulated run: the same bits, and nothing leaves a site that the simulation does not count."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from slow import fast_where

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))
from toy_recommender import SILOS, catalogue_recommender, run, summarise, toy_data, toy_recommender

from fedecider.bounds import Diverged
from fedecider.deployment.messages import Channel, DeploymentConfig, Message, pack, unpack
from fedecider.deployment.secure import SiteSums
from fedecider.deployment.server import Plan, run_deployed
from fedecider.deployment.site import Site, one_client
from fedecider.federation.callbacks import Checkpoints
from fedecider.federation.record import Recorder
from fedecider.federation.rounds import RoundSettings
from fedecider.methods import METHODS
from fedecider.report.joining import DIFFERENCE

pytestmark = pytest.mark.whole

NAMES = ("crime", "comics", "children")
SETTINGS: dict[str, dict] = {"fdlora": {"sync_every": 2, "num_evaluations": 5}}
FEDERATED = [name for name, method in METHODS.items() if not method.pooled]
MOST = 1 << 24


def build(name, recommender):
    return METHODS[name].build(recommender, METHODS[name].config(**SETTINGS.get(name, {})))


def own_recommender(client):
    """What a site has: its own data, and of the others nothing but their names."""
    data = [toy_data(name) if other == client else {"labels": torch.zeros(0, 2)} for other, name in enumerate(NAMES)]
    return toy_recommender(NAMES, data=data)


def site_of(name, client, folder, recommender=None, finish=lambda state, download: {}, sums=None):
    (folder / f"site{client}").mkdir(parents=True, exist_ok=True)
    return Site(
        method=build(name, recommender or own_recommender(client)),
        hosted=one_client(client),
        run="abc",
        folder=folder / f"site{client}",
        scores=lambda position_U: summarise([position_U])[0],
        finish=finish,
        most_bytes=MOST,
        sums=None if sums is None else SiteSums(sums, client),
    )


def exchange_with(sites, away=lambda client, asked: False, damage=lambda client, asked, blob: blob):
    def exchange(sent, deadline_s):
        answers = {}
        for client, blob in sent.items():
            asked = unpack(blob, MOST)
            if not away(client, asked):
                answers[client] = damage(client, asked, sites[client].answer(blob))
        return answers

    return exchange


def deployed(
    name,
    sites,
    rounds,
    folder=None,
    resume=False,
    names=NAMES,
    recommender=None,
    config=None,
    sums=None,
    started="",
    run="abc",
    **faults,
):
    line = Channel(exchange_with(sites, **faults), config or DeploymentConfig(), run, names, started=started)
    records = []
    nobody = recommender or toy_recommender(names, data=[{"labels": torch.zeros(0, 2)}] * len(names))
    plan = Plan(build(name, nobody), RoundSettings(num_rounds=rounds, seed=0), ("ndcg@10",), sums)
    state, results = run_deployed(
        plan,
        line,
        checkpoints=None if folder is None else Checkpoints(folder, run, Recorder(folder.with_suffix(".jsonl"))),
        resume=resume,
        on_round=records.append,
    )
    return state, records, line, results


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", fast_where(("fedecider", "fedavg"), FEDERATED))
def test_same_bits_as_the_simulated_run(name, tmp_path):
    simulated, expected = run(build(name, toy_recommender()), 3, 3)
    ended = {}
    sites = [
        site_of(name, client, tmp_path, finish=lambda state, _, client=client: ended.update({client: state}) or {})
        for client in range(3)
    ]
    state, records, _, _ = deployed(name, sites, 3)
    assert same(state.server, simulated.server)
    assert same(state.best_server, simulated.best_server)
    assert (state.best_round, state.best_score) == (simulated.best_round, simulated.best_score)
    assert [record["valid"] for record in records] == [record["valid"] for record in expected]
    assert [record["traffic"] for record in records] == [record["traffic"] for record in expected]
    for client in range(3):
        own = {key: tensor[client : client + 1] for key, tensor in simulated.local.items()}
        assert same(ended[client].local, own)
        assert same(ended[client].best_local, {k: t[client : client + 1] for k, t in simulated.best_local.items()})
    assert state.local == {}  # the server has nobody's own rows
    assert all(set(record["clients"][0]) == {"client", "examples"} for record in records)  # no logs of sites


@pytest.mark.parametrize("name", fast_where(("fedavg",), ("fedecider", "fedavg", "lora_sim")))
def test_silos_whose_own_rows_alone_travel(name, tmp_path):
    simulated, expected = run(build(name, catalogue_recommender()), 4, 2)
    sites = [site_of(name, client, tmp_path, catalogue_recommender()) for client in range(4)]
    state, records, line, _ = deployed(name, sites, 2, names=SILOS, recommender=catalogue_recommender())
    assert same(state.server, simulated.server)
    assert [record["valid"] for record in records] == [record["valid"] for record in expected]
    assert [record["traffic"] for record in records] == [record["traffic"] for record in expected]
    counted = [
        group["header_up"] + sum(group["up"].values())
        for client in range(4)
        for group in records[1]["traffic"]
        if client in group["clients"]
    ]
    sent = [one["bytes_up"] for one in line.carried if (one["round"], one["kind"]) == (2, "train")]
    heads = [carried - payload for carried, payload in zip(sent, counted, strict=True)]
    assert all(0 < head < 700 for head in heads)  # kind, round, weight, marks


def test_a_site_that_lost_its_download_is_sent_it_again(tmp_path):
    def away(client, asked):
        if client == 1 and (asked.kind, asked.round) == ("train", 2):
            (tmp_path / "site1" / "download.safetensors").unlink(missing_ok=True)
        return False

    sites = [site_of("fedavg", client, tmp_path) for client in range(3)]
    state, records, line, _ = deployed("fedavg", sites, 3, away=away)
    assert all(record["refused_uploads"] == [] for record in records)
    asked = [(one["client"], one["bytes_down"]) for one in line.carried if (one["round"], one["kind"]) == (2, "train")]
    assert [client for client, _ in asked] == [0, 1, 2, 1]
    assert asked[1][1] < 1000 < asked[3][1]
    simulated, _ = run(build("fedavg", toy_recommender()), 3, 3)
    assert same(state.server, simulated.server)


def test_absent_sites_are_named_and_the_run_goes_on_as_a_simulation_without_them(tmp_path):
    sites = [site_of("fedecider", client, tmp_path) for client in range(3)]
    gone = lambda client, asked: client == 2 and asked.round == 2  # noqa: E731
    state, records, _, _ = deployed("fedecider", sites, 3, away=gone, config=DeploymentConfig(deadline_s=7.5))
    assert records[1]["refused_uploads"] == [{"client": 2, "reason": "no answer to train within 7.5 s"}]
    assert [log["client"] for log in records[1]["clients"]] == [0, 1]
    assert records[1]["valid"]["fused"][2] == records[0]["valid"]["fused"][2]  # its last scores
    assert len(records[2]["clients"]) == 3
    assert all(tensor.isfinite().all() for tensor in state.server.values())


def test_a_silent_site_has_its_last_scores_after_a_restart_of_the_server_too(tmp_path):
    gone = lambda client, asked: client == 2 and asked.round == 3  # noqa: E731
    found = {}
    for name, stops in (("straight", (3,)), ("restarted", (2, 3))):
        sites = [site_of("fedavg", client, tmp_path / name) for client in range(3)]
        for rounds in stops:
            _, records, _, _ = deployed(
                "fedavg", sites, rounds, tmp_path / name / "server", rounds != stops[0], away=gone
            )
        found[name] = records[-1]
    assert found["restarted"]["round"] == 3
    assert found["restarted"]["valid"] == found["straight"]["valid"]
    assert found["restarted"]["valid"]["global"][2]["ndcg@10"] > 0.0


def test_a_run_that_is_started_anew_takes_nothing_of_the_one_before(tmp_path):
    """Not even from a site that is away when it begins, and would go on with the state of a later round."""
    late = lambda client, asked: client == 2 and asked.round == 1  # noqa: E731
    ended = {}

    def ends(name, client, state, _):
        ended[name, client] = state
        return {}

    for name, starts in (("once", ("b",)), ("anew", ("a", "b"))):
        for started in starts:
            sites = [
                site_of("fedecider", client, tmp_path / name, finish=partial(ends, name, client)) for client in range(3)
            ]
            away = late if started == "b" else lambda client, asked: False
            state, records, line, _ = deployed("fedecider", sites, 4, away=away, started=started)
        ended[name] = (state.server, [record["refused_uploads"] for record in records])
        assert line.refused == []
    assert same(ended["anew"][0], ended["once"][0])
    assert ended["anew"][1] == ended["once"][1]
    for client in range(3):
        assert same(ended["anew", client].best_local, ended["once", client].best_local)
    assert len((tmp_path / "anew" / "site2" / "training.jsonl").read_text().splitlines()) == 3  # rounds 2 to 4


@pytest.mark.slow
def test_too_few_uploads_stop_the_run_which_can_go_on(tmp_path):
    straight, _, _, _ = deployed("fedecider", [site_of("fedecider", c, tmp_path / "a") for c in range(3)], 3)
    sites = [site_of("fedecider", client, tmp_path / "b") for client in range(3)]
    config, folder = DeploymentConfig(min_clients=2), tmp_path / "server"
    gone = lambda client, asked: client > 0 and (asked.kind, asked.round) == ("train", 3)  # noqa: E731
    with pytest.raises(ValueError, match="round 3"):
        deployed("fedecider", sites, 3, folder, away=gone, config=config)
    sites = [site_of("fedecider", client, tmp_path / "b") for client in range(3)]  # all of them start again
    state, _, _, _ = deployed("fedecider", sites, 3, folder, resume=True, config=config)
    assert same(state.server, straight.server)
    assert state.best_round == straight.best_round


@pytest.mark.slow
def test_a_site_killed_in_its_training_answers_again_as_if_nothing_had_been(tmp_path, monkeypatch):
    straight, _, _, _ = deployed("fdlora", [site_of("fdlora", c, tmp_path / "a") for c in range(3)], 3)
    sites = [site_of("fdlora", client, tmp_path / "b") for client in range(3)]

    def killed(client, asked, blob):
        if client == 1 and (asked.kind, asked.round) == ("train", 2):
            sites[1] = site_of("fdlora", 1, tmp_path / "b")  # a new process, asked again
            return sites[1].answer(sent[1])
        return blob

    sent = {}

    def exchange(requests, deadline_s):
        sent.update(requests)
        return {c: killed(c, unpack(blob, MOST), sites[c].answer(blob)) for c, blob in requests.items()}

    line = Channel(exchange, DeploymentConfig(), "abc", NAMES)
    method = build("fdlora", toy_recommender(NAMES, data=[{"labels": torch.zeros(0, 2)}] * 3))
    state, _ = run_deployed(Plan(method, RoundSettings(num_rounds=3, seed=0), ("ndcg@10",)), line)
    assert same(state.server, straight.server)


def changed(blob, **values):
    one = unpack(blob, MOST)
    facts = {**one.facts, **values.pop("facts", {})}
    return pack(one._replace(facts=facts, **values))


def _tensors(blob, change):
    return {name: change(name, tensor) for name, tensor in unpack(blob, MOST).tensors.items()}


HOSTILE = {
    "no message": (lambda blob: b"hello", "no message"),
    "nothing": (lambda blob: b"", "no message"),
    "cut off": (lambda blob: blob[:-7], "no message"),
    "a header of two gigabytes": (lambda blob: (1 << 31).to_bytes(8, "little") + blob[8:], "cut off"),
    "too large": (lambda blob: blob + bytes(1 << 21), "expected at most"),
    "another client": (lambda blob: changed(blob, facts={"clients": [0]}), "expected the upload of client 1"),
    "another round": (lambda blob: changed(blob, round=1), "for round 1, expected the upload"),
    "scores": (lambda blob: changed(blob, kind="scores"), "got 'scores'"),
    "a tensor too many": (
        lambda blob: changed(blob, tensors={**unpack(blob, MOST).tensors, "x": torch.zeros(2)}),
        r"nobody asked for \['x'\]",
    ),
    "a tensor too few": (
        lambda blob: changed(blob, tensors=dict(list(unpack(blob, MOST).tensors.items())[1:])),
        "and none for",
    ),
    "another shape": (lambda blob: changed(blob, tensors=_tensors(blob, lambda n, t: t[..., :1])), "expected torch"),
    "another kind of number": (
        lambda blob: changed(blob, tensors=_tensors(blob, lambda n, t: t.double())),
        "torch.float64",
    ),
    "a weight that is none": (lambda blob: changed(blob, facts={"weights": [-1]}), "got the weight .-1"),
    "marks of nothing": (lambda blob: changed(blob, facts={"marks": {"x": [2]}}), "without its rows"),
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A run whose client 1 is honest in the first round, and after it sends one hostile upload of each kind."""

    def hostile(client, asked, blob):
        if client != 1 or asked.kind != "train" or asked.round == 1:
            return blob
        damage, _ = list(HOSTILE.values())[asked.round - 2]
        return damage(blob)

    folder = tmp_path_factory.mktemp("attacked")
    sites = [site_of("fedecider", client, folder) for client in range(3)]
    config = DeploymentConfig(max_megabytes=1)
    state, records, _, _ = deployed("fedecider", sites, 1 + len(HOSTILE), damage=hostile, config=config)
    return state, records


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_upload_is_refused_with_a_reason(what, attacked):
    _, reason = HOSTILE[what]
    (refused,) = attacked[1][1 + list(HOSTILE).index(what)]["refused_uploads"]
    assert refused["client"] == 1
    assert re.search(reason, refused["reason"])


def test_hostile_uploads_move_nothing(attacked):
    state, _ = attacked
    before, _ = run(build("fedecider", toy_recommender()), 3, 1)
    direction = next(name for name in state.server if name.endswith("lora_b"))
    assert torch.equal(state.server[direction][1], before.server[direction][1])  # its last good one
    assert not torch.equal(state.server[direction][0], before.server[direction][0])


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Message("train", 1, {}, {"run": "other", "best_round": 0}), "run 'other', expected 'abc'"),
        (Message("recommend", 1, {}, {"run": "abc", "best_round": 0}), "expected one of train, validate, finish"),
        (Message("train", 1, {}, {"run": "abc", "best_round": -1}), "got the best round -1"),
    ],
)
def test_a_site_refuses_what_it_does_not_know(asked, reason, tmp_path):
    answer = unpack(site_of("fedavg", 0, tmp_path).answer(pack(asked)), MOST)
    assert answer.kind == "error"
    assert reason in answer.facts["reason"]


LIES = [
    {"row": {"hit@10": {"mean": "many"}}},
    {"row": {"hit@10": {"mean": 1000.0}}},
    {"row": {"hit@10": {"mean": 0.5, "low": -0.5}}},
    {DIFFERENCE: {"hit@10": {"mean": -1.5}}},
    {"row": {"hit@10": {"mean": float("nan")}}},
    {"row\n| fake | 1.0 |": {"hit@10": {"mean": 0.5}}},
    {"row": {"\x1b[2J": {"mean": 0.5}}},
    None,
    [],
    {"row": 3},
    {"row": {"hit@10": {}}},
]


@pytest.mark.parametrize("lie", fast_where(LIES[:7], LIES))
def test_results_that_are_no_figures_are_left_out(lie, tmp_path):
    def lies(client, asked, blob):
        return changed(blob, facts={"results": lie}) if client == 1 and asked.kind == "finish" else blob

    honest = {"row": {"hit@10": {"mean": 0.25, "low": 0.0, "high": 0.5}}, DIFFERENCE: {"hit@10": {"mean": -0.25}}}
    sites = [site_of("fedavg", client, tmp_path, finish=lambda state, download: honest) for client in range(3)]
    _, _, line, results = deployed("fedavg", sites, 1, damage=lies)
    assert results == {0: honest, 2: honest}
    assert [one["client"] for one in line.refused] == [1]


def test_a_reason_of_a_site_is_one_line_of_characters_that_can_be_seen():
    line = Channel(lambda sent, deadline: {}, DeploymentConfig(), "abc", ["crime"])
    line.refuse(0, "no\n\nanswer\x1b[31m\u202e to\ttrain")
    assert line.refused[0]["reason"] == "no answer [31m to train"


def test_a_site_of_numbers_that_are_none_is_named_and_the_run_goes_on(tmp_path):
    def broken(client, asked, blob):
        if asked.kind != "train" or client not in hostile:
            return blob
        one = unpack(blob, MOST)
        bad = {name: tensor * (float("nan") if client else 1e30) for name, tensor in one.tensors.items()}
        return pack(one._replace(tensors=bad))

    for hostile in ([0], [1], [0, 1]):
        sites = [site_of("fedavg", client, tmp_path / str(hostile)) for client in range(3)]
        _, records, _, _ = deployed("fedavg", sites, 1, damage=broken)
        assert [one["client"] for one in records[0]["non_finite_uploads"]] == hostile
    hostile = [0, 1, 2]
    sites = [site_of("fedavg", client, tmp_path / "all") for client in range(3)]
    with pytest.raises(Diverged, match="round 1"):
        deployed("fedavg", sites, 1, damage=broken)


def test_rows_without_any_row_cannot_make_a_site_allocate(tmp_path):
    wide = Message(
        "train",
        1,
        {"x": torch.zeros(0, 1 << 40), "marks:x": torch.zeros(1, dtype=torch.uint8)},
        {"run": "abc", "best_round": 0, "clients": [0], "marks": {"x": [8]}, "per_client": []},
    )
    answer = unpack(site_of("fedavg", 0, tmp_path).answer(pack(wide)), MOST)
    assert "expected at most" in answer.facts["reason"]
