"""The cross-device track deployed: a site hosts a block of users, and the figures are those of the simulation."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slow import fast_where

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "embedding_fr"))
from toy_federation import NUM_ITEMS, SEQUENCES

from embedding_fr.commands import parse_settings
from embedding_fr.deployment import counted_out, save_interactions, share_out, shared
from embedding_fr.setup import set_up, train, user_positions
from embedding_fr.track import TRACK
from fedecider.data.interactions import Interactions
from fedecider.deployment.messages import DeploymentConfig, Message, pack, unpack
from fedecider.deployment.project import PartyFile, make_project, read_project
from fedecider.deployment.run import make_site, serve
from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.callbacks import collecting
from fedecider.federation.checksums import write_sums
from fedecider.federation.cohort import sample_cohort
from fedecider.federation.record import read_records
from fedecider.federation.state import load_state
from fedecider.report.tables import variant_labels

pytestmark = pytest.mark.whole

USERS = [f"person-{number}" for number in range(len(SEQUENCES))]
ITEMS = [f"item-{number:02}" for number in range(NUM_ITEMS)]
TOY = Interactions("toy", USERS, ITEMS, [""] * NUM_ITEMS, SEQUENCES, None, {})
SMALL = "--embedding_size 4 --batch_size 5 --local_epochs 2 --num_negatives 2 --init_std 0.3 --num_rounds 3"
CPU = torch.device("cpu")
CONFIG = DeploymentConfig(max_megabytes=16)
MOST = CONFIG.max_bytes
HOSTS = {"north": [1, 4, 6], "south": [0, 3], "west": [2, 5]}


def settings_of(name, words=""):
    data = "--dataset toy --source amazon_ratings --raw raw"
    return parse_settings(["--method", name, *f"{data} {SMALL} {words}".split()])


def simulated(settings):
    setup, records = set_up(settings, TOY, CPU), []
    state = train(settings, setup, [collecting(records)])
    return setup, state, records


def project_of(settings, hosts, folder):
    return make_project(TRACK, shared(settings, ITEMS, hosts), folder / "project", CPU)


def place(folder, project, name, config=CONFIG):
    """Where the site ``name`` finds its things; the server where there is no name."""
    output = str(folder / "out" / (name or "server"))
    return PartyFile(str(project.root), output, str(folder / name) if name else "", name, deployment=config)


def prepared(settings, folder, hosts=HOSTS):
    """A project, and beside it each site's own folder."""
    project = project_of(settings, hosts, folder)
    for name, users in hosts.items():
        save_interactions({USERS[user]: [ITEMS[item] for item in SEQUENCES[user]] for user in users}, folder / name)
    return project


def sites_of(project, folder, device=CPU):
    launch = SimpleNamespace(device=device)
    return [make_site(project, place(folder, project, name), launch) for name in project.names]


def deployed(project, folder, damage=lambda site, asked, blob: blob, resume=False, config=CONFIG, device=CPU):
    sites = sites_of(project, folder, device)

    def exchange(sent, deadline_s):
        answers = {site: damage(site, unpack(blob, MOST), sites[site].answer(blob)) for site, blob in sent.items()}
        return {site: answer for site, answer in answers.items() if answer is not None}

    output = serve(project, place(folder, project, "", config), exchange, CPU, resume=resume)
    return load_state(output / "checkpoints", project.run), read_records(output / "rounds.jsonl"), read(output)


def read(output):
    return json.loads((output / "metrics.json").read_text())


def close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape
        assert torch.allclose(left[name].double(), right[name].double(), rtol=1e-6, atol=1e-6), name


CASES = {
    "fedmf": "",
    "fedmf, few users": "--participation 0.5 --num_eval_users 4 --seed 14 --memory_gb 1e-8",
    "fedmf, every second": "--eval_every 2 --patience 1",
    "fedmf, median": "--robust_mean median",
    "pfedrec": "",
    "fedease": "--top_k 3",
    "colr": "--rank 2 --embedding_size 4",
    "fedcia": "--low_pass server",
    "fedncf": "--patience 1",
    "gpfedrec": "",
    "fedrap": "",
    "pfedclr": "",
    "fedem": "",
    "fedem, mean": "--aggregation mean",
    "fedem, code": "--variant code --mixed_share 0.7",
    "fedrecgel": "--variant code",
    "fedca": "--mixed_share 0.7",
    "pfedgraph": "",
    "feddae": "--embedding_size 4 --num_layers 2",
    "gpfedrec_em": "",
    "fedfast": "--participation 0.5 --num_clusters 2",
    "cofedrec": "--num_categories 3",
    "perfedrec": "--participation 0.5 --num_clusters 2",
}

SLOW = ("fedem, mean", "fedem, code", "gpfedrec_em", "gpfedrec")
STACKED = ("fedem", "fedem, code", "fedrecgel", "gpfedrec_em", "fedfast", "cofedrec", "perfedrec")
STACKED += ("feddae", "fedncf", "gpfedrec", "fedrap", "fedem, mean")
"""Not compiled: users of a block train together, and which they are rounds differently. Adam turns rounding errors of
gradients near zero into steps; double precision leaves only real differences."""
ENCODED = ("fedease", "colr")
"""Counted as numbers of items and as bits, sent as a byte or a number for each item of the catalogue."""


@pytest.fixture
def single():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("case", fast_where(lambda case: case not in SLOW, CASES))
def test_the_figures_are_those_of_the_simulated_run(case, tmp_path):
    name = case.partition(",")[0]
    torch.set_default_dtype(torch.float64 if case in STACKED else torch.float32)
    settings = settings_of(name, CASES[case])
    setup, expected, expected_records = simulated(settings)
    project = prepared(settings, tmp_path)
    state, records, metrics = deployed(project, tmp_path)
    close(state.server, expected.server)
    close(state.best_server, expected.best_server)
    assert (state.round, state.best_round) == (expected.round, expected.best_round)
    assert state.local == {}
    for record, twin in zip(records, expected_records, strict=True):
        assert record["traffic"] == twin["traffic"] or name in ENCODED
        assert record["refused_uploads"] == []
        for variant, (scores,) in twin["valid"].items():
            assert record["valid"][variant][0] == pytest.approx(scores, abs=1e-9)
    for variant, label in variant_labels(setup.method.name, setup.method.variants).items():
        means = mean_metrics(user_positions(setup, expected, variant, "test"))
        assert {name: value["mean"] for name, value in metrics["test"][label].items()} == pytest.approx(means, abs=1e-6)
    for site, users in HOSTS.items():
        kept = load_state(tmp_path / "out" / site / "checkpoints", project.run)
        close(kept.local, {key: tensor[users] for key, tensor in expected.local.items()})


def test_what_is_shared_holds_nobodys_interactions_and_a_site_its_own(tmp_path):
    project = prepared(settings_of("fedmf"), tmp_path)
    _, records, metrics = deployed(project, tmp_path)
    for folder in ("project", "out/server"):
        for path in (tmp_path / folder).rglob("*"):
            assert not path.is_file() or b"person" not in path.read_bytes(), path
    assert metrics["sites"]["south"]["num_users"] == 2
    assert records[0]["clients"] == [{"clients": 7}]  # no logs of sites
    own = read(tmp_path / "out" / "south")
    told = metrics["sites"]["south"]["test"]
    assert own["test"].keys() == told.keys()
    for row, found in own["test"].items():  # an interval over two users would be their own figures
        assert told[row] == {metric: {"mean": value["mean"]} for metric, value in found.items()}
    assert (own["num_users"], own["dataset"]) == (2, "toy")
    assert (tmp_path / "out" / "south" / "per_user.parquet").is_file()
    assert "2 of 7 users" in (tmp_path / "out" / "south" / "results.md").read_text()
    assert read_project(project.root).track is TRACK


def test_only_the_cohort_of_a_round_trains(tmp_path):
    project = prepared(settings_of("fedmf", "--participation 0.4"), tmp_path)
    deployed(project, tmp_path)
    for name, users in HOSTS.items():
        found = {
            record["round"]: record["clients"] for record in read_records(tmp_path / "out" / name / "training.jsonl")
        }
        for round in (1, 2, 3):
            cohort = sorted(sample_cohort(7, 0.4, 0, round) & set(users))
            assert [log["client"] for log in found.get(round, [])] == cohort


def test_shared_tables_travel_once_for_all_users_of_a_site(tmp_path):
    deployed(prepared(settings_of("fedmf"), tmp_path), tmp_path)
    messages = json.loads((tmp_path / "out" / "server" / "wire.json").read_text())["messages"]
    table = 4 * 4 * NUM_ITEMS
    (first,) = [one for one in messages if (one["round"], one["kind"], one.get("site")) == (1, "train", "north")]
    assert table < first["bytes_down"] < 2 * table + 700  # a head
    assert 3 * table < first["bytes_up"] < 3 * table + 700
    (second,) = [one for one in messages if (one["round"], one["kind"], one.get("site")) == (2, "train", "north")]
    assert second["bytes_down"] < 700  # which the validation has brought


def changed(blob, change):
    one = unpack(blob, MOST)
    tensors, facts = dict(one.tensors), dict(one.facts)
    change(tensors, facts)
    return pack(one._replace(tensors=tensors, facts=facts))


HOSTILE = {
    "users of another site": (lambda t, f: f.update(clients=[0, 3, 6]), "expected the upload of clients .1, 4, 6."),
    "a user too few": (lambda t, f: f.update(clients=[1, 4]), "got 'upload' of clients .1, 4. .2 of them"),
    "truth for a number": (lambda t, f: f.update(clients=[True, 4, 6]), "expected the upload of clients"),
    "weights of two": (lambda t, f: f.update(weights=[1.0, 2.0]), "expected one of each client"),
    "a weight beyond all": (lambda t, f: f.update(weights=[1.0, 2.0, 1e300]), "got the weight .1e.300"),
    "a table too few": (lambda t, f: t.update(item_table=t["item_table"][:2]), "expected torch.float32 .3, 14, 4."),
    "another kind of number": (lambda t, f: t.update(item_table=t["item_table"].double()), "got torch.float64"),
    "marks of users": (
        lambda t, f: (f.update(marks={"item_table": [3]}), t.update({"marks:item_table": torch.zeros(1).byte()})),
        "expected those of its rows",
    ),
    "a tensor too many": (lambda t, f: t.update(x=torch.zeros(3)), "nobody asked for"),
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """The records of a run one of whose sites is honest in the first round and the last one, and hostile between."""

    def damage(site, asked, blob):
        if site != 0 or asked.kind != "train" or not 1 < asked.round < len(HOSTILE) + 2:
            return blob
        change, _ = list(HOSTILE.values())[asked.round - 2]
        return changed(blob, change)

    folder = tmp_path_factory.mktemp("attacked")
    project = prepared(settings_of("fedmf", f"--num_rounds {len(HOSTILE) + 2}"), folder)
    return deployed(project, folder, damage)[1]


@pytest.mark.parametrize("what", HOSTILE)
def test_a_message_that_is_not_as_expected_is_refused_as_a_whole(what, attacked):
    _, reason = HOSTILE[what]
    record = attacked[1 + list(HOSTILE).index(what)]
    (refused,) = record["refused_uploads"]
    assert (refused["client"], refused["site"]) == (1, "north")
    assert re.search(reason, refused["reason"])
    assert [attacked[0]["clients"], record["clients"], attacked[-1]["clients"]] == [
        [{"clients": count}] for count in (7, 4, 7)
    ]


def test_a_user_whose_numbers_are_not_finite_is_left_out_alone(tmp_path):
    def damage(site, asked, blob):
        def poison(tensors, facts):
            tensors["item_table"][1] = float("nan")

        return changed(blob, poison) if site == 0 and asked.kind == "train" else blob

    state, records, _ = deployed(prepared(settings_of("fedmf"), tmp_path), tmp_path, damage)
    assert [one["client"] for one in records[0]["non_finite_uploads"]] == [4]
    assert state.server["item_table"].isfinite().all()


def test_scores_over_other_users_are_not_believed(tmp_path):
    def damage(site, asked, blob):
        few = lambda tensors, facts: facts.update(num_clients=1)  # noqa: E731
        return changed(blob, few) if site == 1 and (asked.kind, asked.round) == ("validate", 1) else blob

    _, records, _ = deployed(prepared(settings_of("fedmf"), tmp_path), tmp_path, damage)
    assert "got scores over 1 clients, expected those over 2" in records[1]["refused_uploads"][0]["reason"]


def test_a_site_that_is_lost_at_the_end_leaves_the_others_figures(tmp_path):
    def damage(site, asked, blob):
        return None if site == 2 and asked.kind == "finish" else blob

    _, _, metrics = deployed(prepared(settings_of("fedmf"), tmp_path), tmp_path, damage)
    assert metrics["sites"].keys() == {"north", "south"}
    assert "test" not in metrics
    wire = json.loads((tmp_path / "out" / "server" / "wire.json").read_text())
    (refused,) = wire["refused_after_rounds"]
    assert (refused["site"], refused["reason"]) == ("west", "no answer to finish")


def test_sites_and_server_that_are_killed_go_on(tmp_path):
    settings = settings_of("pfedrec", "--num_rounds 4")
    _, expected, _ = simulated(settings)
    project = prepared(settings, tmp_path)

    def gone(site, asked, blob):
        return None if site > 0 and (asked.kind, asked.round) == ("train", 3) else blob

    with pytest.raises(ValueError, match="round 3"):
        deployed(project, tmp_path, gone, config=DeploymentConfig(min_clients=6))  # the sites have trained round 3
    state, records, _ = deployed(project, tmp_path, resume=True)
    close(state.server, expected.server)
    assert [record["round"] for record in records] == [1, 2, 3, 4]


def test_a_site_answers_for_its_own_users_alone(tmp_path):
    project = prepared(settings_of("fedmf"), tmp_path)
    site = sites_of(project, tmp_path)[0]
    for clients in ([0], [4, 1], [1, 1], [], "1", [True], None):
        asked = {"run": project.run, "best_round": 0, "clients": clients, "marks": {}, "per_client": []}
        answer = unpack(site.answer(pack(Message("train", 1, {}, asked))), MOST)
        assert "expected some of those of this site" in answer.facts["reason"]


def test_means_over_single_users_are_not_told(tmp_path):
    project = prepared(settings_of("fedmf"), tmp_path)
    site = sites_of(project, tmp_path)[0]
    asked = {"run": project.run, "best_round": 0, "clients": [4], "marks": {}, "per_client": []}
    answer = unpack(site.answer(pack(Message("validate", 1, {}, asked))), MOST)
    assert answer.facts["reason"] == "got a validation of 1 clients, expected all 3 that count"


def test_marks_that_one_site_alone_sends_change_its_own_rows(tmp_path):
    def damage(site, asked, blob):
        def mark(tensors, facts):
            marks = torch.ones(3, NUM_ITEMS, dtype=torch.bool)
            marks[:, 5:] = False
            tensors["marks:item_table"] = torch.from_numpy(np.packbits(marks.numpy().reshape(-1)))
            tensors["item_table"] = tensors["item_table"][marks]
            facts["marks"] = {"item_table": [3, NUM_ITEMS]}

        return changed(blob, mark) if site == 0 and asked.kind == "train" else blob

    state, records, _ = deployed(prepared(settings_of("fedmf"), tmp_path), tmp_path, damage)
    assert [record["refused_uploads"] for record in records] == [[], [], []]
    assert state.server["item_table"].isfinite().all()


NOISE = "--clip 0.5 --noise_scale 1"


def test_noise_of_every_user_is_the_sites_own_and_a_round_is_told_once(tmp_path):
    settings, tables, seen = settings_of("fedmf", NOISE), [], {}

    def watch(site, asked, blob):
        seen[site, asked.round, asked.kind] = (pack(asked), blob)
        return blob

    for part in ("a", "b"):
        project = prepared(settings, tmp_path / part)
        state, _, metrics = deployed(project, tmp_path / part, watch)
        tables.append(state.server["item_table"])
    assert not torch.allclose(*tables)
    assert "each upload is protected" in metrics["privacy"]
    again = sites_of(project, tmp_path / "b")[0]
    asked, sent = seen[0, 3, "train"]
    assert again.answer(asked) == sent
    earlier = unpack(again.answer(seen[0, 2, "train"][0]), MOST)
    assert "got round 2 again after round 3" in earlier.facts["reason"]
    noise = unpack(sent, MOST).tensors["item_table"]
    assert not torch.allclose(noise[0] - noise[1], torch.zeros(()), atol=0.1)  # no two users share theirs


REFUSED = {
    ("fedmf", "--federation false"): "got federation false",
    ("fedmf", "--secure_sum true"): "got secure_sum true, expected false in a deployment of the cross-device track",
    ("fedease", "--secure true"): "got secure true, expected false",
    ("fedease", "--noise_scale 1 --clip 3"): "got noise on the sum",
    ("fedmf", NOISE + " --noise_on sum"): "got noise on the sum",
    ("fedmf", "--noise_without_clip true --noise_scale 1"): "got noise_without_clip with noise_scale 1.0",
    ("fedmf", "--protocol strict/sampled99"): "expected one that ranks the whole catalogue",
    ("fedmf", "--tracker tensorboard"): "got tracker tensorboard",
    ("fednear", ""): "expected one whose uploads have one shape",
}


@pytest.mark.parametrize(("name", "words"), REFUSED)
def test_what_cannot_be_deployed_is_told_before_any_work(name, words, tmp_path):
    with pytest.raises(ValueError, match=REFUSED[name, words]):
        project_of(settings_of(name, words), HOSTS, tmp_path)
    assert not list(tmp_path.iterdir())


ONE = {
    "one user": ({"north": [0, 1, 2, 3, 4, 5], "south": [6]}, "", "got one user at the site south, expected two"),
    "one that is scored": (HOSTS, "--num_eval_users 4", "got num_eval_users 4, by which one user of the site north"),
}


@pytest.mark.parametrize("what", ONE)
def test_a_site_whose_means_would_be_one_users_is_refused(what, tmp_path):
    hosts, words, message = ONE[what]
    with pytest.raises(ValueError, match=message):
        project_of(settings_of("fedmf", words), hosts, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_site_reads_no_project_in_which_it_has_one_user(tmp_path):
    root = prepared(settings_of("fedmf"), tmp_path).root
    content = json.loads((root / "project.json").read_text())
    content["hosts"] = {"north": [0, 1, 2, 3, 4, 5], "south": [6]}
    (root / "project.json").write_text(json.dumps(content))
    write_sums(root)
    with pytest.raises(ValueError, match="south"):
        read_project(root)


OWN = {
    "another number of users": ({"a": ["item-01", "item-02", "item-03"]}, "got 1 users in .*, expected the 2 of south"),
    "an unknown item": ({"a": ["item-01", "item-02", "x"], "b": []}, "got the item 'x'"),
    "an item twice": ({"a": ["item-01", "item-01", "item-03"], "b": []}, "expected 3 items at least, each once"),
    "too few": ({"a": ["item-01"], "b": []}, "got user 'a'"),
    "no list": ({"a": "item-01", "b": []}, "got user 'a'"),
}


def test_users_are_shared_out_evenly_or_as_listed(tmp_path):
    shared = share_out(USERS, "3", 0)
    assert sorted(map(len, shared.values())) == [2, 2, 3]
    assert sorted(user for own in shared.values() for user in own) == list(range(7))
    assert shared == share_out(USERS, "3", 0) != share_out(USERS, "3", 1)
    listing = tmp_path / "sites.yaml"
    listing.write_text(json.dumps({name: [USERS[user] for user in own] for name, own in HOSTS.items()}))
    assert share_out(USERS, str(listing), 0) == HOSTS
    listing.write_text("{a: 3, b: 4}")
    assert counted_out(str(listing)) == {"a": [0, 1, 2], "b": [3, 4, 5, 6]}
