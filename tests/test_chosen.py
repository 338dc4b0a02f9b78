"""Settings that are chosen for own data: each rule once, what is asked for wins, the file gives the same run."""

import csv
from pathlib import Path

import pytest
import yaml

from fedecider.cli.main import main
from fedecider.cross_silo.auto import DataFacts, Machine, choose, chosen_settings, facts_of
from fedecider.cross_silo.command_line import parse_settings
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.federation.record import read_json

CPU = Machine(2, 16.0, "", 0.0, "minilm", 0.1, 60e9)
COMPANIES = DataFacts(("north", "south", "east"), 1, 4500, 34_756, 6.0, 3820, 3820, 3767, 0)
DEPARTMENTS = DataFacts(("movies", "cds", "games"), 3, 1500, 12_523, 6.0, 2697, 6488, 6235, 0)
QUICK = (
    *("--num_rounds", "1", "--local_epochs", "1", "--num_eval_users", "20", "--pretrain.train.max_steps", "5"),
    *("--pretrain.text_encoder", "tfidf", "--distill.epochs", "1"),
)


def reason(choice, name):
    return next(line for line in choice.reasons if line.startswith(f"{name} "))


def test_companies_with_one_catalogue_take_the_mean_of_whole_rows_in_half_the_rounds():
    choice = choose(COMPANIES, CPU)
    found = choice.settings
    assert (found["method"], found["lora_targets"], found["lora_rank"]) == (
        "fedavg",
        "table",
        256,
    )
    assert (found["num_rounds"], found["output_lr_multiplier"], found["lr_decay_per_round"], found["patience"]) == (
        10,
        60.0,
        0.9,
        3,
    )
    assert found["hyperparameter_candidates"] == []
    assert found["hybrid"] == {"kind": "mixture"}
    assert found["domains"] == "north,south,east"
    assert found["pretrain"]["backbone"]["kind"] == "decoder"
    assert "sell the same items" in reason(choice, "method")
    assert "nobody is public" in reason(choice, "pretrain.samples.synthetic_share")


def test_unequal_companies_weigh_by_examples_unless_noise_hides_how_many(tmp_path):
    unequal = COMPANIES._replace(spread=33.0)
    choice = choose(unequal, CPU)
    assert choice.settings["fedavg"] == {"weighting": "examples"}
    assert "33 times the events" in reason(choice, "fedavg.weighting")
    path = tmp_path / "chosen.yaml"
    path.write_text(yaml.safe_dump(choice.settings))
    words = ("--config", str(path), "--data", "x")
    assert parse_settings(words).method.weighting == "examples"
    assert parse_settings([*words, "--weighting", "uniform"]).method.weighting == "uniform"
    noised = {"noise_scale": 1.0}
    for facts, asked in (
        (COMPANIES, {}),
        (DEPARTMENTS._replace(spread=33.0), {}),
        (unequal, {"weighting": "uniform"}),
        (unequal, {"method": "flora"}),
        (unequal, {"user_privacy": noised}),
        (unequal, {"privacy": noised}),
    ):
        assert "fedavg" not in choose(facts, CPU, asked).settings, asked


def test_clients_with_different_catalogues_set_weights_of_their_own():
    found = choose(DEPARTMENTS, CPU).settings
    assert (found["method"], found["lora_targets"], found["num_rounds"]) == ("fedecider", "table", 8)
    assert "fedecider" not in found  # as it is by default


def test_a_client_alone_trains_alone():
    assert choose(DEPARTMENTS._replace(names=("movies",), num_catalogues=1), CPU).settings["method"] == "local"


def test_many_events_a_user_let_layers_be_tried():
    for facts in (COMPANIES, DEPARTMENTS):
        choice = choose(facts._replace(events_per_user=100.0, num_events=450_000), CPU)
        assert "attention" in choice.settings["hyperparameter_candidates"][0]["lora_targets"]
        assert "100 events a user" in reason(choice, "lora_targets")
    assert choose(COMPANIES._replace(events_per_user=100.0), CPU).settings["num_rounds"] == 20


def test_tiny_data_without_common_items_share_layers():
    found = choose(DEPARTMENTS._replace(num_events=3_500), CPU).settings
    assert (found["lora_targets"], found["pretrain"]["backbone"]["d_model"]) == ("attention,feed_forward", 48)
    assert "text_encoder" not in found["pretrain"]
    assert choose(COMPANIES._replace(num_events=3_500), CPU).settings["lora_targets"] == "table"


def test_the_width_is_what_the_texts_span():
    for facts, machine, width in (
        (COMPANIES, CPU._replace(encoder="tfidf"), 128),
        (COMPANIES._replace(num_texts=100), CPU, 96),
    ):
        found = choose(facts, machine).settings
        assert (found["pretrain"]["backbone"]["d_model"], found["lora_rank"]) == (width, width)
    asked = choose(COMPANIES, CPU, {"pretrain": {"text_encoder": "tfidf"}}).settings["pretrain"]
    assert (asked["backbone"]["d_model"], asked["text_encoder"]) == (128, "tfidf")
    few = choose(COMPANIES._replace(num_texts=300), CPU)
    assert "give titles" in reason(few, "pretrain.backbone.d_model")


def test_public_users_are_named():
    assert "300 public users" in reason(
        choose(COMPANIES._replace(num_public=300), CPU), "pretrain.samples.synthetic_share"
    )


def test_a_gpu_gets_a_deeper_model_and_half_precision():
    found = choose(COMPANIES, CPU._replace(gpu="H200", gpu_gb=139.0, bf16_speedup=8.0, cores=16)).settings
    assert (found["pretrain"]["backbone"]["num_layers"], found["precision"], found["num_threads"]) == (4, "bf16", 4)
    assert choose(COMPANIES, CPU).settings["precision"] == "fp32"


def test_what_is_asked_for_wins():
    asked = {"num_rounds": 2, "method": "fedprox", "pretrain": {"backbone": {"d_model": 64}, "train": {"max_steps": 5}}}
    choice = choose(COMPANIES, CPU, asked)
    found = choice.settings
    assert (found["num_rounds"], found["method"], found["lora_rank"]) == (2, "fedprox", 64)
    assert found["pretrain"]["backbone"]["kind"] == "decoder"
    assert found["pretrain"]["train"]["max_steps"] == 5
    assert reason(choice, "num_rounds") == "num_rounds 2: as you ask"
    assert "pretrain.train.max_steps: as you ask" in choice.reasons


@pytest.mark.parametrize(
    "facts",
    [
        COMPANIES,
        DEPARTMENTS,
        DEPARTMENTS._replace(num_events=3_500),
        DEPARTMENTS._replace(names=("movies",), num_catalogues=1),
        COMPANIES._replace(events_per_user=100.0),
    ],
)
def test_what_is_chosen_is_a_configuration(facts, tmp_path):
    file = tmp_path / "chosen.yaml"
    file.write_text(yaml.safe_dump(choose(facts, CPU).settings))
    settings = parse_settings(["--config", str(file)])
    assert settings.run.num_rounds == choose(facts, CPU).settings["num_rounds"]


def test_the_estimate_grows_with_the_work():
    base = choose(COMPANIES, CPU)
    assert base.seconds.low < base.seconds.expected < base.seconds.high
    larger = (
        choose(COMPANIES, CPU, {"num_rounds": 40}),
        choose(COMPANIES._replace(num_events=90_000, num_users=11_000), CPU),
        choose(COMPANIES._replace(num_items=40_000, num_all_items=40_000), CPU),
        choose(COMPANIES, CPU._replace(flops=1e9)),
    )
    assert all(one.seconds.expected > base.seconds.expected for one in larger)
    assert larger[2].gigabytes > base.gigabytes


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_domains(sample_domains(["crime", "comics"]), Path("data"))


def test_facts_of_the_sample():
    facts = facts_of(sample_domains(["crime", "comics"]))
    assert (facts.names, facts.num_catalogues, facts.num_users, facts.num_public) == (("crime", "comics"), 2, 480, 320)
    assert (facts.num_events, facts.num_items, facts.num_all_items) == (1163 + 1186, 299, 598)
    assert not facts.is_shared
    assert facts.spread == 1186 / 1163


def test_over_an_hour_is_refused_until_it_is_allowed(prepared, monkeypatch, capsys):
    monkeypatch.setattr("fedecider.cross_silo.auto.this_machine", lambda: CPU._replace(flops=1e6))
    said = []
    with pytest.raises(ValueError, match=r"got data that take about .* hours.*--yes true"):
        chosen_settings({"data": "data"}, log=said.append)
    assert chosen_settings({"data": "data"}, True, log=said.append)["method"] == "fedecider"
    assert said[-1].startswith("estimate: ")
    assert main(["federate", "--data", "data"]) == 2
    assert "expected at most an hour" in capsys.readouterr().err


def test_an_output_that_holds_a_run_is_refused_before_anything_is_measured(prepared, monkeypatch, capsys):
    monkeypatch.setattr("fedecider.cross_silo.auto.load_domains", None)
    Path("there").mkdir()
    Path("there/run.json").write_text("{}")
    assert main(["federate", "--data", "data", "--output", "there"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: there holds a run already. Choose another --output")
    assert printed.out == ""
    assert chosen_settings({"data": "data", "output": "there", "resume": "true"}) == {}


def test_nothing_is_chosen_where_somebody_chose(prepared):
    said = []
    assert chosen_settings({}, log=said.append) == {}
    assert said == []
    assert chosen_settings({"data": "data", "pretrain": {"backbone": {"kind": "t5"}}}, log=said.append) == {}
    assert "pretrain.backbone.kind is t5" in said[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--items", "x.csv"], "got --items without --events"),
        (["--events", "a.csv", "--data", "data"], "got --events beside --data"),
        (["--events", "a/x.csv,b/x.csv"], "expected files of different names"),
    ],
)
def test_tables_that_cannot_be(prepared, capsys, words, expected):
    assert main(["federate", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.whole
def test_three_tables_on_the_command_line_and_the_same_run_by_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    domain = sample_domains(["crime"])["crime"]
    rows = list(zip(domain.clients.users, domain.clients.sequences, strict=True))
    for number, name in enumerate(("north", "south", "east")):
        with Path(f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["buyer", "sku"])
            writer.writerows((user, domain.item_keys[item]) for user, items in rows[number::3] for item in items)
    with Path("products.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["sku", "title"], *zip(domain.item_keys, domain.titles, strict=True)])
    tables = ["--events", "north.csv,south.csv,east.csv", "--items", "products.csv"]
    assert main(["federate", *tables, *QUICK, "--output", "first"]) == 0
    printed = capsys.readouterr().out
    assert "user is column 'buyer'" in printed
    assert "chosen: method fedavg: " in printed
    assert "estimate: " in printed
    chosen = yaml.safe_load(Path("first/chosen.yaml").read_text())
    assert (chosen["domains"], chosen["num_rounds"]) == ("east,north,south", 1)
    assert main(["federate", "--config", "first/chosen.yaml", "--output", "again"]) == 0
    assert read_json(Path("again/metrics.json"))["domains"] == read_json(Path("first/metrics.json"))["domains"]
    capsys.readouterr()
    assert main(["federate", *tables, *QUICK, "--output", "first", "--resume", "true"]) == 0
    assert "chosen: " not in capsys.readouterr().out
