"""A month held out of two companies, from their tables to the page: who bought nothing in it trains alone."""

from __future__ import annotations

import json
import random

import pytest
from small_runs import decoder_settings
from toy_ratings import options_of, write_ratings

from fedecider.api import federate
from fedecider.cli.main import main
from fedecider.data.frames import from_events
from fedecider.data.protocol import customers_tested, under
from fedecider.data.store import load_domains, save_domains
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import held_out, with_target

COLOURS, KINDS = ("red", "blue", "green", "grey", "white", "amber"), ("soup", "tea", "bread", "salt")
THINGS = [
    {"sku": f"s{number}", "title": f"{COLOURS[number // 4]} {KINDS[number % 4]} brand{number}"} for number in range(24)
]
FIRST_DAY = 1_388_534_400


def events(company):
    """Forty customers in 120 days, every third of whom stays away in the last month; one buys on the last day."""
    draw = random.Random(company)
    rows = []
    for customer in range(40):
        usual = draw.sample(range(24), 5)
        last = 80 if customer % 3 == 0 else 119
        days = [*sorted(draw.sample(range(last), 12)), *([119] if customer == 1 else [])]
        rows += [
            {"customer": f"{company[0]}{customer}", "sku": f"s{draw.choice(usual)}", "time": FIRST_DAY + 86_400 * day}
            for day in days
        ]
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("month")
    save_domains(dict(from_events({name: events(name) for name in ("north", "south")}, THINGS)), folder / "data")
    settings = decoder_settings() | {"protocol": "last_month", "num_eval_users": 12, "hyperparameter_candidates": []}
    settings["pretrain"]["backbone"]["d_model"] = 16
    settings |= {"data": str(folder / "data"), "domains": "north,south", "cache": str(folder / "cache")}
    result = federate(config={**settings, "output": ""}, output=folder / "run", progress=False)
    return result, folder


def test_every_entry_is_about_those_who_bought_in_the_month(run):
    _, folder = run
    result = RunResult.read(folder / "run")
    assert result.protocol == "last_month/2014-04-01"
    read, lines = under(result.protocol, load_domains(folder / "data", ["north", "south"]))
    for name, domain in read.items():
        rows, customers = domain.clients.sequences, customers_tested(domain)
        assert 20 <= len(customers) < len(domain.clients.users) == 40
        assert result.users[name] == customers
        assert not {f"{name[0]}{number}" for number in range(0, 40, 3)} & set(customers)
        assert result.metrics["domains"][name]["num_users"] == len(customers)
        target_UT = held_out(rows, "test")[with_target(rows, "test")]
        for entry, positions in result.positions.items():
            place_UT = positions[name]
            assert ((~place_UT.isnan()).sum(1) == (target_UT >= 0).sum(1)).all(), entry
            value = result.figures[name]["test"][entry]["recall@10"]["mean"]
            assert value == pytest.approx(mean_metrics(place_UT)["recall@10"]), entry
    assert {"item-kNN", "EASE", "fedecider + ensemble", "local + ensemble", "TIFU-KNN"} <= set(result.positions)
    why, *tested = result.record["why_protocol"]
    assert why.startswith("protocol last_month/2014-04-01: ")
    assert tested == lines
    text = (folder / "run" / "report.html").read_text()
    assert f"north: {len(result.users['north'])} of 40 customers bought from 2014-04-01 to 2014-04-30 and" in text
    assert len(json.loads((folder / "run" / "examples.json").read_text())["south"]) == 3


def test_the_run_answers_and_its_models_recommend(run, capsys):
    result, folder = run
    assert result.recommendation in ("join", "do not join", "not clear")
    root = str(folder / "run")
    assert main(["report", "--run", root, "--analyses", "true"]) == 0
    assert main(["evaluate", "--run", root]) == 0
    assert (
        main(["recommend", "--run", root, "--domain", "north", "--all", "true", "--output", str(folder / "lists.csv")])
        == 0
    )
    capsys.readouterr()
    lists = (folder / "lists.csv").read_text()
    assert all(f"n{number}," in lists for number in (0, 1, 39))  # also of who was not tested
    assert main(["update", "--run", root, "--company", "north", "--events", str(folder / "lists.csv")]) == 2
    assert "whose protocol last_month held out what was bought last" in capsys.readouterr().err


def test_other_tracks_refuse_it(run, tmp_path, capsys):
    _, folder = run
    asked = ["federate", "--protocol", "last_month", "--output", str(tmp_path / "run")]
    own = ["--method", "fedsasrec", "--data", str(folder / "data"), "--domains", "north"]
    for words in (own, ["--method", "fedmf", *map(str, options_of(write_ratings(tmp_path)))]):
        assert main([*asked, *words]) == 2
        assert "last_month" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
