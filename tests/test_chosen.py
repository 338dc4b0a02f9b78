"""Settings that are chosen for own data: each rule once, what is asked for wins, the file gives the same run."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import fedecider as fd
from fedecider.cli.main import main
from fedecider.cross_silo.auto import Machine, choose, chosen_settings
from fedecider.cross_silo.command_line import make_settings, parse_settings
from fedecider.cross_silo.estimate import LEAST_ROUNDS, ROOM, DataFacts, draw, estimate, facts_of
from fedecider.data.catalogue import Catalogue
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains, save_domains
from fedecider.federation.record import read_json
from fedecider.running.options import read_words

CPU = Machine(2, 16.0, "", 0.0, "minilm", 0.1, 60e9)
COMPANIES = DataFacts(("north", "south", "east"), 1, (1500,) * 3, 34_756, 6.0, 3820, 3820, 3767, 0)
DEPARTMENTS = DataFacts(("movies", "cds", "games"), 3, (500,) * 3, 12_523, 6.0, 2697, 6488, 6235, 0)
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
    assert found["ensemble"] == {"kind": "logit"}
    assert found["domains"] == "north,south,east"
    assert found["pretrain"]["backbone"]["kind"] == "decoder"
    assert "sell the same items" in reason(choice, "method")
    assert "nobody is public" in reason(choice, "pretrain.samples.synthetic_share")


def test_items_without_texts_have_random_rows_and_say_so_first():
    choice = choose(COMPANIES._replace(num_texts=0, num_all_items=150), CPU)
    assert choice.settings["pretrain"]["text_encoder"] == "keys"
    assert choice.settings["pretrain"]["backbone"]["d_model"] == 148  # one less than items, in heads of even size
    assert choice.reasons[1].startswith("pretrain.text_encoder keys: no item has a text")
    assert not any("item texts" in line for line in choice.reasons if line.startswith("pretrain."))
    asked = choose(COMPANIES._replace(num_texts=0), CPU, {"pretrain": {"text_encoder": "tfidf"}})
    assert asked.settings["pretrain"]["text_encoder"] == "tfidf"


@pytest.mark.whole
def test_data_without_texts_train_recommend_and_take_next_month(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    domain = sample_domains(["crime"])["crime"]
    bare = Catalogue("crime", domain.item_keys, [""] * len(domain.item_keys), [""] * len(domain.item_keys))
    save_domains({"crime": replace(domain, catalogue=bare)}, "data")
    assert facts_of(load_domains("data")).num_texts == 0
    assert main(["federate", "--data", "data", *QUICK[:-4], "--distill.epochs", "1", "--output", "run"]) == 0
    assert "no item of crime has a text" in " ".join(capsys.readouterr().out.split())
    key, last = domain.item_keys[5], 1_700_000_000
    month = "".join(f"{user},{item},{last + at}\n" for user in "abc" for at, item in enumerate((key, "new-1")))
    Path("month.csv").write_text(f"customer,sku,time\n{month}")
    Path("new.csv").write_text("key,title,text\nnew-1,,\n")
    words = ["update", "--run", "run", "--events", "month.csv", "--force", "true"]
    assert main([*words, "--new_items", "new.csv"]) == 0
    assert "1 new items have an ID" in " ".join(capsys.readouterr().out.split())
    assert main(["recommend", "--run", "run", "--history", key, "--json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["history"] == [{"key": key, "title": key}]
    assert len(found["items"]) == 10


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
    noised = {"noise_scale": 1.0, "clip": 1.0}
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


def test_large_data_are_seen_once_a_round_in_narrow_tables():
    facts = COMPANIES._replace(num_events=600_000, events_per_user=130.0, num_items=67_000, num_all_items=67_000)
    found = choose(facts._replace(num_texts=17_000), CPU).settings
    assert (found["num_rounds"], found["local_epochs"], found["hyperparameter_candidates"]) == (5, 1, [])
    assert (found["pretrain"]["backbone"]["d_model"], found["distill"]["epochs"]) == (128, 1)
    assert choose(facts._replace(num_public=9), CPU).settings["distill"]["epochs"] == 3


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
    assert base.estimate.expected > 0
    larger = (
        choose(COMPANIES, CPU, {"num_rounds": 40}),
        choose(COMPANIES._replace(num_events=90_000, users=(3700,) * 3), CPU),
        choose(COMPANIES._replace(num_items=14_000, num_all_items=14_000), CPU),
        choose(COMPANIES, CPU._replace(flops=1e9)),
    )
    assert all(one.estimate.expected > base.estimate.expected for one in larger)
    assert larger[2].estimate.gigabytes > base.estimate.gigabytes


CHAINS = DataFacts(("a", "b"), 1, (900, 300), 600_000, 330.0, 67_000, 67_000, 17_000, 0)


def test_a_sampled_softmax_does_not_count_the_whole_catalogue():
    small, large = (CHAINS._replace(num_items=items, num_all_items=items) for items in (15_000, 150_000))
    settings = make_settings({}, choose(CHAINS, CPU).settings)
    assert estimate(large, settings, 60e9).round < estimate(small, settings, 60e9).round


def test_as_many_customers_and_rounds_are_drawn_as_the_time_lets():
    settings = make_settings({}, choose(CHAINS, CPU).settings)
    whole = estimate(CHAINS, settings, 60e9)
    assert draw(CHAINS, settings, 60e9, whole.expected / 60 * ROOM + 0.1) is None
    for minutes in (whole.expected / 60 * part for part in (0.7, 1.0)):
        drawn = draw(CHAINS, settings, 60e9, minutes)
        share, rounds = drawn.settings["customer_share"], drawn.settings["num_rounds"]
        assert (share < 1.0 and rounds == LEAST_ROUNDS) or share == 1.0
        assert minutes / 2 < drawn.estimate.expected * ROOM / 60 <= minutes
        assert drawn.text.startswith(f"drawn: {CHAINS.drawn(share).num_users:,} of 1,200 customers, {rounds} of 5")
    assert CHAINS.drawn(0.5).users == (450, 150)
    assert CHAINS.drawn(0.5).num_events == 300_000
    with pytest.raises(ValueError, match=r"got minutes 1, expected at least \d+ .*200 customers and 3 rounds"):
        draw(CHAINS, settings, 60e9, 1)


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
    assert chosen_settings({"data": "data"}, True, log=said.append)[0]["method"] == "fedecider"
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
    assert chosen_settings({"data": "data", "output": "there", "resume": "true"})[0] == {}


def test_nothing_is_chosen_where_somebody_chose(prepared):
    said = []
    assert chosen_settings({}, log=said.append)[0] == {}
    assert said == []
    assert chosen_settings({"data": "data", "pretrain": {"backbone": {"kind": "t5"}}}, log=said.append)[0] == {}
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


def test_minutes_come_first_and_stand_in_the_settings(prepared, monkeypatch, capsys):
    monkeypatch.setattr("fedecider.cross_silo.auto.this_machine", lambda: CPU._replace(flops=1e9))
    whole, said = chosen_settings({"data": "data"}, True, log=[].append)[0], []
    chosen, _ = chosen_settings({"data": "data", "num_rounds": "7"}, minutes=9.5, log=said.append)
    assert said[0].startswith(chosen["drawn"])
    assert said[0].startswith("drawn: ")
    assert "of 7 rounds; the whole run would take about" in said[0]
    assert chosen["customer_share"] < 1.0
    by_file, _ = chosen_settings({"data": "data"}, minutes=9.5, config={**whole, "num_rounds": 7}, log=[].append)
    assert {name: by_file[name] for name in ("drawn", "customer_share", "num_rounds")} == {
        name: chosen[name] for name in ("drawn", "customer_share", "num_rounds")
    }
    for words, expected in (
        (["--data", "data", "--minutes", "1"], "got minutes 1, expected at least"),
        (["--minutes", "5"], "got minutes without data of one's own"),
        (["--method", "fedmf", "--dataset", "ml-100k", "--minutes", "5"], "got minutes with a method of"),
        (["--data", "data", "--minutes", "5", "--pretrain.backbone.kind", "t5"], "got minutes with pretrain.backbone"),
        (["--data", "data", "--minutes", "-5"], "got minutes -5"),
    ):
        assert main(["federate", *words]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.whole
def test_a_run_of_a_few_minutes_is_over_the_customers_that_were_drawn(prepared, monkeypatch, capsys):
    monkeypatch.setattr("fedecider.cross_silo.auto.this_machine", lambda: CPU._replace(flops=1e9))
    monkeypatch.setattr("fedecider.data.drawn.LEAST", 30)
    words = ["--data", "data", *QUICK[2:], "--num_rounds", "9", "--ensemble.kind", "none"]
    chosen, _ = chosen_settings(read_words(words).options, log=[].append)
    whole = estimate(facts_of(sample_domains(["crime", "comics"])), make_settings({}, chosen), 1e9)
    minutes = (whole.once + 2 * whole.round + whole.results) * ROOM / 60
    assert main(["federate", *words, "--minutes", str(minutes), "--output", "run"]) == 0
    first, said = capsys.readouterr().out.splitlines()[0], read_json(Path("run/run.json"))["config"]["run"]
    assert first.startswith(said["drawn"])
    users = [domain["num_users"] for domain in read_json(Path("run/metrics.json"))["domains"].values()]
    assert f"drawn: {sum(users)} of 480 customers, {said['num_rounds']} of 9 rounds" in first
    assert said["drawn"] in Path("run/report.html").read_text()


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
    assert main(["federate", *tables, *QUICK, "--verbose", "true", "--output", "first"]) == 0
    printed = capsys.readouterr().out
    assert "user is column 'buyer'" in printed
    assert "settings chosen for your data, with the reasons: first/chosen.yaml" in printed
    assert "# method fedavg: " in Path("first/chosen.yaml").read_text()
    assert "estimate: " in printed
    chosen = yaml.safe_load(Path("first/chosen.yaml").read_text())
    assert (chosen["domains"], chosen["num_rounds"]) == ("east,north,south", 1)
    assert main(["federate", "--config", "first/chosen.yaml", "--output", "again"]) == 0
    assert read_json(Path("again/metrics.json"))["domains"] == read_json(Path("first/metrics.json"))["domains"]
    capsys.readouterr()
    assert main(["federate", *tables, *QUICK, "--output", "first", "--resume", "true"]) == 0
    assert "estimate: " not in capsys.readouterr().out


@pytest.mark.whole
def test_the_console_of_tables_as_shops_have_them_fits_a_screen(tmp_path, monkeypatch, capsys):
    """First what changes the answer or was not understood; every other note is in the file that a line names."""
    monkeypatch.chdir(tmp_path)
    domain = sample_domains(["crime"])["crime"]
    rows = list(zip(domain.clients.users, domain.clients.sequences, strict=True))
    columns = {
        "north": ("Kunde", "sku", "Preis"),
        "south": ("buyer", "sku", "shelf"),
        "east": ("client", "sku", "note"),
    }
    for number, (name, header) in enumerate(columns.items()):
        events = [(user, domain.item_keys[item], "ä") for user, items in rows[number::3] for item in items]
        nobody = [("guest", domain.item_keys[at], "") for at in range(len(events) // 5 * (name == "south"))]
        lines = "".join(";".join(row) + "\n" for row in [header, *events, *nobody])
        Path(f"{name}.csv").write_text(lines, encoding="latin-1" if name == "north" else "utf-8")
        Path(f"{name}.yaml").write_text(f"events: {name}.csv\nitems: products.csv\n")
    with Path("products.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["sku", "title"], *zip(domain.item_keys, domain.titles, strict=True)])
    tables = {name: f"{name}.yaml" for name in columns}
    data = fd.from_events(tables)
    assert main(["federate", "--events", ",".join(tables.values()), *QUICK, "--output", "run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) <= 25
    first, rest = data.report.first, data.notes[len(data.report.first) :]
    assert said[: len(first)] == first
    assert any("north.csv is not UTF-8" in line for line in first)
    assert any("rows have no customer ('guest'" in line for line in first)
    assert len(rest) > 5
    assert not {*said} & {*rest}
    assert said[len(first)].startswith(f"{len(data.notes)} notes on how the tables were read: ")
    written = Path(said[len(first)].rpartition(" ")[2]).read_text()
    assert all(f"- {note}\n" in written for note in data.notes)
