"""Orders of two companies, from their tables to the page: read, trained and ranked in baskets."""

from __future__ import annotations

import json
import random

import pytest
from small_runs import decoder_settings

from fedecider.api import federate
from fedecider.cli.main import main
from fedecider.data.frames import from_events
from fedecider.data.protocol import under
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import held_out

THINGS = [
    {"sku": f"s{n}", "title": f"{colour} {thing} brand{n}"}
    for n, (colour, thing) in enumerate(
        (c, t) for c in ("red", "blue", "green", "grey", "white", "amber") for t in ("soup", "tea", "bread", "salt")
    )
]


def orders(company, num_customers=24):
    """Customers who mostly buy again what they bought; one of them came twice alone."""
    draw = random.Random(company)
    rows = []
    for customer in range(num_customers):
        usual = draw.sample(range(len(THINGS)), 5)
        for number in range(2 if customer == 3 else 5):
            size = draw.choice([1, 2, 3])
            for item in {draw.choice(usual) if draw.random() < 0.8 else draw.randrange(24) for _ in range(size)}:
                day = f"2024-{1 + number:02d}-{1 + customer:02d}"
                rows.append(
                    {"customer": f"c{customer}", "sku": f"s{item}", "time": day, "order": f"{customer}-{number}"}
                )
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baskets")
    data = from_events({name: orders(name) for name in ("north", "south")}, THINGS, order="order")
    settings = decoder_settings()
    settings["pretrain"]["backbone"]["d_model"] = 16
    settings |= {"ensemble": {"kind": "none"}, "hyperparameter_candidates": []}
    settings = {name: value for name, value in settings.items() if name not in ("domains", "output", "data", "cache")}
    federate(data, config=settings, output=folder / "run", cache=str(folder / "cache"), progress=False)
    return data, folder / "run"


def test_a_run_in_baskets_reports_recall_of_every_entry(run):
    data, root = run
    result = RunResult.read(root)
    assert result.protocol == "next_basket"
    read, lost = under("next_basket", dict(data))
    assert result.users["north"] == read["north"].clients.users
    assert len(result.users["north"]) == 23
    target_UT = held_out(read["north"].clients.sequences, "test")
    for entry, positions in result.positions.items():
        position_UT = positions["north"]
        assert ((~position_UT.isnan()).sum(1) == (target_UT >= 0).sum(1)).all(), entry
        value = result.figures["north"]["test"][entry]["recall@10"]["mean"]
        assert value == pytest.approx(mean_metrics(position_UT)["recall@10"]), entry
    assert {one["metric"] for one in result.metrics["comparisons"]} == {"recall@10", "ndcg@10"}
    first, *losses = result.record["why_protocol"]
    assert first.startswith("protocol next_basket")
    assert "events have order numbers" in first
    assert losses == lost
    assert any("1 of 24 customers have fewer than 3 baskets and are left out" in line for line in losses)
    text = (root / "report.html").read_text()
    assert "items of the next basket" in text
    assert first in text
    assert "customers have fewer than 3 baskets and are left out" in text
    assert "recall@10" in (root / "results.md").read_text()
    shown = json.loads((root / "examples.json").read_text())["north"]
    assert len(shown) == 3


def test_the_page_and_its_analyses_are_made_again_of_the_same_baskets(run, capsys):
    _, root = run
    assert main(["report", "--run", str(root), "--analyses", "true"]) == 0
    assert "written" in capsys.readouterr().out
