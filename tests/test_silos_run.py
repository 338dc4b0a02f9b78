"""Runs over silos and with an out-of-domain pool: what the stages share and what they may not read, and the output."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from slow import slow

from fedecider.api import load
from fedecider.baselines.counts import popularity
from fedecider.cli.main import main as command
from fedecider.cross_silo import base_stages, item_ids, joining, prepare
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.item_ids import load_ids
from fedecider.cross_silo.prepare import load_data
from fedecider.cross_silo.settings import PretrainConfig, RunConfig
from fedecider.cross_silo.without import joint_positions
from fedecider.data.card import make_card
from fedecider.data.domain import NO_EVENTS, Domain, Events, clients_of
from fedecider.data.sample import sample_domains
from fedecider.data.sellers import by_catalogue
from fedecider.data.silos import share_out
from fedecider.data.store import load_domains, save_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.protocols import get_protocol
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import attach_lora
from fedecider.models.client_model import Base
from fedecider.models.config import LoraSettings
from fedecider.models.folders import read_inference_config
from fedecider.models.recommender import Recommender
from fedecider.running.launch import start
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig
from idgen.samples import eval_batches, train_batches
from idgen.synthetic import nearest_items as near

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
NUM_CLIENTS, NUM_PUBLIC = 60, 40


def few(domain: Domain) -> Domain:
    """The first users alone, among them those of two domains."""
    clients, public = (
        Events(*(column[:count] for column in events))  # type: ignore[index]
        for events, count in ((domain.clients, NUM_CLIENTS), (domain.public, NUM_PUBLIC))
    )
    small = dataclasses.replace(domain, clients=clients, public=public, card={})
    small.card.update(make_card(small))
    return small


WHOLE = {name: few(domain) for name, domain in sample_domains(["crime", "comics", "children"]).items()}
SILOS = share_out({name: WHOLE[name] for name in ("crime", "comics")}, 2, None, 0)


def main(script: str, *words: str) -> int:
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with small settings and prepared data: silos of crime and comics, and whole domains."""
    folder = tmp_path_factory.mktemp("silos")
    save_domains({**SILOS, **WHOLE}, folder / "data")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"num_rounds": 2, "local_epochs": 1, "num_eval_users": 20, "lora_rank": 2}
    content["pretrain"]["backbone"] |= {"d_model": 32}
    content["pretrain"]["train"] |= {"max_steps": 5}
    content["distill"] |= {"epochs": 1}
    content |= {"lora_targets": "attention,feed_forward,table", "ensemble": {"kind": "none"}, "data": "data"}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ("--config", "toy.yaml", "--domains", "crime.*,comics.*", "--output", "runs/silos")
        assert main("federate", *words) == 0
        words = ("--config", "toy.yaml", "--domains", "crime.*", "--public_domains", "comics", "--method", "local")
        assert main("federate", *words, "--output", "runs/foreign") == 0
    return folder


def rows(batches) -> list:
    return [{key: tensor.tolist() for key, tensor in batch.items()} for batch in batches]


DECODER = PretrainConfig(
    ids="item",
    samples=SampleConfig(templates="history", max_history=6, max_source_tokens=20, synthetic_share=0.3),
    text_encoder="tfidf",
    backbone=BackboneConfig(kind="decoder", embedding_init="text", d_model=16, num_layers=2),
    train=BackboneTraining(max_steps=3),
)
SENTENCES = PretrainConfig(
    ids="keywords",
    samples=SampleConfig(templates="compact", max_history=3),
    backbone=BackboneConfig(d_model=16, num_layers=1),
)


@pytest.mark.parametrize("settings", [DECODER, slow(SENTENCES)], ids=["decoder", "sentences"])
def test_silos_start_as_their_domain_does(settings, tmp_path):
    """One tokenizer, one ID an item, one set of vectors, and public users that count once: nothing tells of silos."""
    config = RunConfig(cache=str(tmp_path), pretrain=settings)
    domains = {name: WHOLE[name] for name in ("crime", "comics")}
    whole, silos = (base_stages.begin(config, found, CPU) for found in (domains, SILOS))
    assert silos.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    assert silos.vectors.keys() == whole.vectors.keys() == ({"crime", "comics"} if settings is DECODER else set())
    assert all(torch.equal(vector_ID, silos.vectors[name]) for name, vector_ID in whole.vectors.items())
    weights = silos.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.model.state_dict().items())
    assert [task.name for task in silos.tasks] == ["crime", "comics"]
    first, second = (rows(train_batches(made.tasks, 16, torch.Generator().manual_seed(1))) for made in (whole, silos))
    assert first == second
    for name, domain in SILOS.items():
        assert silos.ids[name].items == whole.ids[domain.catalogue.name].items
    # What a user is asked is the same in a silo as in the whole domain: the prompt names the catalogue.
    tasks = {
        task.name: task
        for found, made in ((domains, whole), (SILOS, silos))
        for task in item_ids.client_tasks(found, made.ids, made.tokenizer, settings)
    }
    asked = {name: prompts_by_user(task, {**SILOS, **WHOLE}[name]) for name, task in tasks.items()}
    assert asked["crime"] == {**asked["crime.1"], **asked["crime.2"]}
    assert len(asked["crime"]) == NUM_CLIENTS


def prompts_by_user(task, domain) -> dict[str, tuple]:
    found = {}
    for user_B, input_ids, mask, target_B in eval_batches(task, "test", 32):
        for user, row, length, target in zip(user_B.tolist(), input_ids.tolist(), mask.sum(1), target_B, strict=True):
            found[domain.clients.users[user]] = (row[: int(length)], int(target))
    return found


def test_silos_are_another_stage_than_their_domain_and_read_it_back(tmp_path, monkeypatch):
    config = RunConfig(cache=str(tmp_path), pretrain=DECODER, protocol="strict")
    stage = base_stages.pretrain_stage(config, SILOS, CPU, quiet=True)
    assert base_stages.pretrain_stage(config, SILOS, CPU).reused
    sizes: list[int] = []
    monkeypatch.setattr(
        "fedecider.cross_silo.item_ids.nearest_items", lambda vector_ID: sizes.append(len(vector_ID)) or near(vector_ID)
    )
    ids = load_ids(stage.folder, SILOS, DECODER)
    one, other = ids["crime.1"], ids["crime.2"]
    assert one.items == other.items
    assert one.neighbours is other.neighbours
    assert sizes == [len(WHOLE[name].item_keys) for name in ("crime", "comics")], "once per catalogue"
    vectors = load_file(stage.folder / item_ids.ITEM_VECTORS)
    for name, domain in SILOS.items():
        for found, expected in zip(ids[name].neighbours, near(vectors[domain.catalogue.name]), strict=True):
            assert (found == expected).all()
    sizes.clear()
    of_one = load_ids(stage.folder, SILOS, DECODER, synthetic_of=["comics.2"])
    assert [name for name, found in of_one.items() if found.neighbours is not None] == ["comics", "comics.2"]
    assert all(one.neighbours is None for one in load_ids(stage.folder, SILOS, DECODER, synthetic_of=()).values())
    assert sizes == [len(WHOLE["comics"].item_keys)]
    student = base_stages.distill_stage(config, stage, SILOS, CPU, quiet=True)
    report = json.loads((student.folder / "report.json").read_text())
    assert list(report["metrics"]["student"]) == list(SILOS)


def stage_1(config: RunConfig, cache: Path) -> dict[str, bytes]:
    """Weights, vectors and IDs that stage 1 leaves, built anew."""
    config = dataclasses.replace(config, cache=str(cache))
    stage = base_stages.pretrain_stage(config, load_data(config), CPU, quiet=True)
    assert not stage.reused
    names = (
        "backbone/model.safetensors",
        "item_vectors.safetensors",
        *(f"ids/{name}.json" for name in by_catalogue(load_data(config))),
    )
    return {name: (stage.folder / name).read_bytes() for name in names}


def with_public(data: Path, name: str, num: int) -> None:
    """Write ``name`` anew with every public event moved by ``num`` items."""
    domain = load_domains(data, [name])[name]
    size = len(domain.item_keys)
    moved = [[(item + num) % size for item in sequence] for sequence in domain.public.sequences]
    save_domains({name: dataclasses.replace(domain, public=domain.public._replace(sequences=moved))}, data)


@pytest.mark.parametrize("synthetic_share", [0.3, slow(0.0)])
def test_a_foreign_pool_is_all_that_is_read(synthetic_share, tmp_path):
    data = tmp_path / "data"
    save_domains(WHOLE, data)
    samples = dataclasses.replace(DECODER.samples, synthetic_share=synthetic_share)
    settings = dataclasses.replace(DECODER, samples=samples)
    config = RunConfig(domains="crime,comics", public_domains="children", data=str(data), pretrain=settings)
    domains = load_data(config)
    assert list(domains) == ["crime", "comics", "children"]
    assert list(clients_of(domains)) == ["crime", "comics"]
    assert not domains["crime"].public.users
    before = stage_1(config, tmp_path / "a")
    for name in ("crime", "comics"):
        with_public(data, name, 5)
    assert stage_1(config, tmp_path / "b") == before
    own = stage_1(dataclasses.replace(config, public_domains=""), tmp_path / "c")
    assert own["backbone/model.safetensors"] != before["backbone/model.safetensors"]
    with_public(data, "children", 5)
    after = stage_1(config, tmp_path / "d")
    assert [name for name in before if before[name] != after[name]] == ["backbone/model.safetensors"]


def test_what_can_be_no_foreign_pool(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="expected other names"):
        RunConfig(domains="crime,comics", public_domains="comics")
    with pytest.raises(ValueError, match=r"public_domains \['crime\.2'\] with a catalogue of the clients"):
        load_data(RunConfig(domains="crime.1", public_domains="crime.2", data="data"))
    pool = dataclasses.replace(WHOLE["comics"], clients=NO_EVENTS)
    save_domains({"crime": WHOLE["crime"], "comics": pool}, tmp_path)
    with pytest.raises(ValueError, match=r"domains \['comics'\] without client users"):
        load_data(RunConfig(domains="crime,comics", data=str(tmp_path)))
    assert list(load_data(RunConfig(domains="crime", public_domains="comics", data=str(tmp_path)))) == [
        "crime",
        "comics",
    ]
    public = WHOLE["comics"].public
    mixed = dataclasses.replace(pool, public=public._replace(users=["both-comics-crime-001", *public.users[1:]]))
    save_domains({"comics": mixed}, tmp_path)
    with pytest.raises(ValueError, match="clients of 'crime' and public in 'comics'"):
        load_data(RunConfig(domains="crime", public_domains="comics", data=str(tmp_path)))


def test_a_run_over_silos_leaves_everything_behind(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run = folder / "runs" / "silos"
    metrics = json.loads((run / "metrics.json").read_text())
    assert list(metrics["domains"]) == list(SILOS)
    assert sum(metrics["domains"][f"crime.{number}"]["num_users"] for number in (1, 2)) == NUM_CLIENTS
    assert sorted(path.name for path in (run / "adapters").iterdir()) == sorted(SILOS)
    assert torch.tensor(json.loads((run / "fusion_weights.json").read_text())["alpha"]).shape == (2, 4, 4)
    assert main("evaluate", "--run", "runs/silos") == 0
    assert main("report", "--run", "runs/silos") == 0
    items = json.loads((run / "adapters" / "crime.2" / "item_ids.json").read_text())
    assert items["catalogue"] == "crime"
    loaded = Recommender.from_pretrained(run, "crime.2")
    assert (loaded.task.name, len(loaded.recommend([loaded.items.titles[0]], k=3))) == ("crime", 3)


def test_rows_of_the_own_catalogue_are_all_that_travels(folder):
    run = folder / "runs" / "silos"
    content = json.loads((run / "communication.json").read_text())
    (before, after) = [json.loads(line)["traffic"] for line in (run / "rounds.jsonl").read_text().splitlines()]
    common = content["common_rows"]
    assert common[0][1] == common[0][0] > len(SILOS["crime.1"].item_keys)
    assert common[0][2] == common[0][0] - len(SILOS["crime.1"].item_keys)
    for client, rows in enumerate(common):
        first, second = (next(one for one in record if client in one["clients"]) for record in (before, after))
        for one in (first, second):
            assert one["up"]["lm_head.lora_b"] == 4 * 2 * rows[client]
        assert first["down"]["lm_head.lora_b"] == 4 * 2 * rows[client]
        assert second["down"]["lm_head.lora_b"] == 4 * 2 * sum(rows)


def test_training_over_a_catalogue_changes_its_rows_and_words_alone(tmp_path):
    """Prompts of real tasks, with every token that they hold; else a change would be lost on its way."""
    config = RunConfig(cache=str(tmp_path), pretrain=DECODER, protocol="strict")
    made = base_stages.begin(config, SILOS, CPU)
    tasks = item_ids.client_tasks(SILOS, made.ids, made.tokenizer, DECODER)
    training = LocalTraining(local_epochs=2, batch_size=16, learning_rate=0.01)
    model = attach_lora(made.model, LoraSettings(4, ("table", "attention")))
    models = client_models(Base(model, made.tokenizer), tasks, training, seed=0)
    shapes = models.shapes
    own_KV = models.rows.own["lm_head.lora_b"]
    assert own_KV.shape == (4, shapes["lm_head"].out_features)
    for client, task in enumerate(tasks):
        changed_V = train_locally(models, client, 1, models.start).pair["lm_head.lora_b"].any(1)
        assert not changed_V[~own_KV[client]].any()
        assert changed_V[task.item_tokens()].all()


def test_counts_of_a_silo_are_its_own_and_the_public_pools(folder):
    metrics = json.loads((folder / "runs" / "silos" / "metrics.json").read_text())
    silo, protocol = SILOS["crime.1"], get_protocol("strict")
    size = len(silo.item_keys)
    position_U = popularity(silo.clients.sequences, size, "test", protocol, extra=silo.public.sequences)
    recorded = metrics["domains"]["crime.1"]["test"]["popularity"]["ndcg@10"]["mean"]
    assert recorded == pytest.approx(mean_metrics(position_U)["ndcg@10"])
    everybody = popularity(silo.clients.sequences, size, "test", protocol, extra=WHOLE["crime"].clients.sequences)
    assert recorded != pytest.approx(mean_metrics(everybody)["ndcg@10"])


def test_a_run_with_a_foreign_pool(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run = folder / "runs" / "foreign"
    metrics = json.loads((run / "metrics.json").read_text())
    assert list(metrics["domains"]) == ["crime.1", "crime.2"]
    hashed = json.loads((run / "run.json").read_text())["data"]
    assert list(hashed) == ["crime.1", "crime.2", "comics", "text encoder"]
    silo, protocol = SILOS["crime.1"], get_protocol("strict")
    alone = mean_metrics(popularity(silo.clients.sequences, len(silo.item_keys), "test", protocol))
    assert metrics["domains"]["crime.1"]["test"]["popularity"]["ndcg@10"]["mean"] == pytest.approx(alone["ndcg@10"])
    cards = json.loads((run / "data_cards.json").read_text())
    assert [cards[name]["public"]["users"] for name in cards] == [0, 0, NUM_PUBLIC]
    assert [cards[name]["clients"]["users"] for name in cards] == [30, 30, 0]
    assert "public users is empty" not in (run / "report.html").read_text()
    assert main("evaluate", "--run", "runs/foreign") == 0
    assert main("report", "--run", "runs/foreign") == 0


def test_counts_alone_are_exchanged_and_what_clients_have_without_them_stands_beside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = ("--config", "toy.yaml", "--domains", "crime.*", "--num_rounds", "1", "--ensemble.kind", "logit")
    for method in ("counts", "local"):
        assert main("federate", *words, "--method", method, "--output", f"runs/only_{method}") == 0
    summed, kept = (json.loads(Path(f"runs/only_{name}/metrics.json").read_text()) for name in ("counts", "local"))
    for name, domain in kept["domains"].items():
        for split in ("valid", "test"):
            found, own = summed["domains"][name][split], domain[split]["local + ensemble"]
            assert found["counts"] == found["local"] == domain[split]["local"], "no model is exchanged"
            assert found["counts + own ensemble"] == found["local + ensemble"] == own
            assert found["own ensemble without a model"] == domain[split]["ensemble without a model"]
            assert "own ensemble without a model" not in domain[split], "there is nothing to leave out"
    rows = summed["macro"]["test"]
    assert rows["ensemble without a model"] != rows["own ensemble without a model"]
    assert rows["counts + ensemble"] != rows["local + ensemble"]
    beside = {one["second"] for one in summed["comparisons"]}
    assert {"counts + own ensemble", "ensemble without a model"} <= beside
    sent = json.loads(Path("runs/only_counts/communication.json").read_text())
    assert sent["total"] == {"down": 0, "up": 0}
    assert all(size["up"] > 0 < size["down"] for size in sent["ensemble"].values())
    assert list(sent["ensemble"]) == ["crime.1", "crime.2"]
    assert main("evaluate", "--run", "runs/only_counts") == 0
    assert main("federate", *words[:6], "--method", "counts", "--output", "runs/nothing") == 2


def test_clients_without_a_common_item_train_alone_and_everything_says_so(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = ("--config", "toy.yaml", "--domains", "crime,comics", "--lora_targets", "table", "--num_rounds", "1")
    assert main("federate", *words, "--ensemble.kind", "logit", "--output", "runs/apart") == 0
    said = capsys.readouterr().out
    run = folder / "runs" / "apart"
    sentence = "crime and comics have no common items: joining rarely helps, and only through public users."
    assert said.index(sentence) < said.index("every client is trained alone") < said.index("round 1/1")
    record, metrics = (json.loads((run / f"{name}.json").read_text()) for name in ("run", "metrics"))
    assert (record["config"]["run"]["method"], record["overlap"]["nothing"]) == ("fedecider", True)
    assert (metrics["method"], metrics["reported"], "joining" in metrics) == ("local", "local", False)
    assert json.loads((run / "communication.json").read_text())["total"] == {"down": 0, "up": 0}
    assert not (run / "fusion_weights.json").exists()
    page = (run / "report.html").read_text()
    assert sentence in page
    assert "Do not join: " in page
    assert sentence in load(run).verdict
    assert main("evaluate", "--run", "runs/apart") == 0
    assert main("report", "--run", "runs/apart") == 0
    assert main("federate", *words, "--ensemble.kind", "logit", "--output", "runs/apart", "--resume", "true") == 0


def test_who_keeps_another_model_hands_that_over(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(joining, "leaving", lambda joined, local: ["crime.1", "crime.2"])
    words = ("--config", "toy.yaml", "--domains", "crime.*,comics.*", "--ensemble.kind", "logit", "--num_rounds", "1")
    assert main("federate", *words, "--output", "runs/left") == 0
    said = capsys.readouterr().out
    metrics = json.loads((folder / "runs" / "left" / "metrics.json").read_text())
    found = {name: one["keeps"] for name, one in metrics["joining"]["clients"].items()}
    assert {found[name] for name in ("crime.1", "crime.2")} <= {"half", "local"}
    assert {found[name] for name in ("comics.1", "comics.2")} == {"joined"}
    kept, joined = "joined or local + ensemble", "fedecider + ensemble"
    tests = {name: one["test"] for name, one in metrics["domains"].items()}
    for name, one in found.items():
        row = {"joined": joined, "local": "local + ensemble"}.get(one)
        assert row is None or tests[name][kept] == tests[name][row]
    assert metrics["domains"]["comics.1"]["test"]["local"] != metrics["domains"]["comics.1"]["test"][joined]
    assert {one["first"] for one in metrics["comparisons"] if one["second"] != "local + ensemble"} == {kept}
    gain = next(
        one["difference"]["mean"]
        for one in metrics["comparisons"]
        if (one["domain"], one["metric"], one["first"]) == ("macro", "hit@10", kept)
        and one["second"].startswith("local")
    )
    assert f"hit@10 {100 * gain:+.1f} [" in said, "the answer is about what every company keeps"
    assert "A company uses another model" in (folder / "runs" / "left" / "report.html").read_text()
    assert main("evaluate", "--run", "runs/left") == 0
    loaded = Recommender.from_pretrained("runs/left", "crime.1")
    assert len(loaded.recommend([loaded.items.titles[0]], k=3)) == 3


def test_local_is_local_as_a_method_as_a_row_and_in_a_folder_of_its_own(folder, monkeypatch, capsys):
    """By itself one company stops before the joint rounds do, and the other goes on after them."""
    monkeypatch.chdir(folder)
    own = load_domains(folder / "data", ["crime.1"])["crime.1"]
    own.card["constant_words"] = {"categories": ["books"]}
    save_domains({"crime.1": own}, folder / "own")
    words = ("--config", "toy.yaml", "--num_rounds", "9", "--patience", "2", "--ensemble.kind", "logit")
    words += ("--lora_targets", "table", "--lora_rank", "16", "--learning_rate", "0.03")
    both = (*words, "--domains", "crime.*")
    assert main("federate", *both, "--method", "fedavg", "--output", "runs/joined") == 0
    logs = [log["clients"] for log in map(json.loads, Path("runs/joined/rounds.jsonl").read_text().splitlines())]
    assert logs[-1][1]["local"]["loss"] is None, "crime.2 has stopped"
    assert len(logs) < 9
    assert "crime.1 goes on with its training alone, for comparison, up to round 9" in capsys.readouterr().out
    alone = {
        "together": (*both, "--participation", "0.5"),
        "named": (*words, "--domains", "crime.1"),
        "at_home": (*words, "--domains", "crime.1", "--data", "own"),
    }
    for name, of_run in alone.items():
        assert main("federate", *of_run, "--method", "local", "--output", f"runs/{name}") == 0
    joined, together, named, at_home = (
        json.loads(Path(f"runs/{name}/metrics.json").read_text())["domains"] for name in ("joined", *alone)
    )
    for split in ("valid", "test"):
        for row in ("local", "local + ensemble"):
            assert joined["crime.2"][split][row] == together["crime.2"][split][row]
            found = [one["crime.1"][split][row] for one in (joined, together, named, at_home)]
            assert found == [found[0]] * 4
    weights = [load_file(f"runs/{name}/adapters/crime.1/adapter_model.safetensors") for name in alone]
    assert all(torch.equal(tensor, weights[0][key]) for other in weights for key, tensor in other.items())
    assert read_inference_config(Path("runs/at_home/adapters/crime.1")).constant_words == {"categories": ["books"]}
    for name in alone:
        sent = json.loads(Path(f"runs/{name}/communication.json").read_text())
        assert sent["total"] == {"down": 0, "up": 0}
        assert sent["ensemble"] == {}
    assert "joining" not in json.loads(Path("runs/together/metrics.json").read_text())


@pytest.fixture(scope="module")
def trained(folder):
    """A run whose rounds change what is recommended."""
    words = ("--config", "toy.yaml", "--domains", "crime.*,comics.*", "--method", "fedavg", "--update_scales", "1")
    words += ("--local_epochs", "4", "--learning_rate", "1e-2", "--ensemble.kind", "logit", "--local_row", "off")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main("federate", *words, "--output", "runs/trained") == 0
    return folder / "runs" / "trained"


def test_the_rounds_again_without_a_company(folder, trained, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run = trained
    metrics = json.loads((run / "metrics.json").read_text())
    with start(1) as launch:
        settings = recorded_settings(run)
        again = joint_positions(settings, prepare.build_base_artifacts(settings.run, launch), launch)
    kept = {
        one.domain: one.position_U
        for one in read_per_user(run / "per_user.parquet")
        if (one.split, one.variant) == ("test", "fedavg + ensemble")
    }
    assert list(again) == list(kept) == list(SILOS)
    assert all(torch.equal(position_U, kept[name]) for name, position_U in again.items()), "nobody left out: the run"
    words = ("without", "--run", "runs/trained", "--company", "crime.1")
    assert command(list(words)) == 0
    told = capsys.readouterr().out
    assert "without crime.1 (1 of 1): 3 companies" in told
    assert "crime.1 gives the others" in told
    found = json.loads((run / "metrics.json").read_text())
    tests = found.pop("without")["crime.1"]["tests"]
    assert found == metrics
    assert {one["domain"] for one in tests} == {*SILOS, "macro"} - {"crime.1"}
    assert any(one["difference"]["mean"] != 0.0 for one in tests)
    assert "Who gains from whom" in (run / "report.html").read_text()
    assert command(list(words)) == 0
    assert "(1 of" not in capsys.readouterr().out, "what is done is not done again"
    for options, message in (
        (("--run", "runs/trained", "--company", "west"), "got the company west, expected some of crime.1"),
        (("--run", "runs/foreign"), "got a run of local"),
        (("--run", "runs/nowhere"), "no run in runs/nowhere"),
    ):
        assert command(["without", *options]) == 2
        assert message in capsys.readouterr().err


def test_what_is_done_again_needs_the_student_of_the_run(folder, trained, monkeypatch, capsys):
    """Stages that another version made under the same settings are another student's."""
    monkeypatch.chdir(folder)
    shutil.copytree(trained, folder / "runs" / "older", dirs_exist_ok=True)
    weights = folder / "runs" / "older" / "backbone" / "model.safetensors"
    changed = {name: tensor + 1.0 for name, tensor in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    assert command(["without", "--run", "runs/older"]) == 2
    assert "got another student in" in capsys.readouterr().err
