"""The service of a real run: answers are the recommender's, one backbone, the document's commands, the benchmark."""

import concurrent.futures
import json
import re
import runpy
import subprocess
from pathlib import Path

import httpx
import pytest
import torch
from serve_process import SERVE, started

import fedecider
from fedecider.serve.config import Limits, ServeConfig, api_keys
from fedecider.serve.metrics import Metrics
from fedecider.serve.recommenders import load_recommenders
from fedecider.serve.service import Kind, Service

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "serve.md"
SHELL = re.findall(r"^```sh\n(.*?)^```", DOCUMENT.read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def run(decoder_run):
    """A small finished run of a decoder with ensembles."""
    return decoder_run / "runs" / "whole"


@pytest.fixture(scope="module")
def served(run):
    with started(*SERVE, "--run", str(run), "--port", "0", "--window_ms", "200") as service:
        yield service


def histories(recommender):
    """Histories of one to seven items, some of them with one item twice."""
    keys = recommender.items.keys
    return [[keys[(7 * row + 3 * step) % len(keys)] for step in range(1 + row % 7)] for row in range(12)]


@pytest.mark.slow
def test_answers_at_once_are_those_of_single_calls(run, served):
    address = served.address()
    domains = httpx.get(f"{address}domains").json()["domains"]
    assert [one["name"] for one in domains] == ["children", "comics", "crime"]
    assert all(one["ensemble"] for one in domains)
    recommender = fedecider.Recommender.from_pretrained(run, "crime")
    asked = histories(recommender)

    def ask(history):
        body = {"domain": "crime", "history": history, "k": 5}
        return httpx.post(f"{address}recommend", json=body, timeout=60).json()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, asked))
    for history, answer in zip(asked, found, strict=True):
        alone = recommender.recommend(history, k=5)
        assert [item["key"] for item in answer["items"]] == [item.key for item in alone.items]
        assert [item["title"] for item in answer["items"]] == [item.title for item in alone.items]
        for item, own in zip(answer["items"], alone.items, strict=True):
            assert item["score"] == pytest.approx(own.score, abs=1e-4)
            assert item["features"] == pytest.approx(dict(own.features), abs=1e-4)
        assert answer["alpha_shares"] == pytest.approx(dict(alone.alpha))
        assert [item["key"] for item in answer["history"]] == history
    calls = re.search(r"^fedecider_batch_size_count (\S+)$", httpx.get(f"{address}metrics").text, re.M)
    assert 2 <= float(calls[1]) < len(asked)


def test_the_commands_of_the_document_run(served, tmp_path):
    asking, key, container = SHELL
    (tmp_path / "ask.sh").write_text("set -e\n" + asking.replace("http://127.0.0.1:8000/", served.address()))
    done = subprocess.run(["bash", "ask.sh"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    decoder, answers, rest = json.JSONDecoder(), [], done.stdout
    while rest:
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:].strip()
    domains, items, recommended = answers
    assert len(domains["domains"]) == 3
    assert len(items["items"]) == 5
    assert items["items"][0]["title"].startswith("Burning Moon")
    assert [len(recommended["history"]), len(recommended["items"])] == [2, 2]
    subprocess.run(["bash", "-c", key], cwd=tmp_path, check=True, timeout=60)
    file = tmp_path / "api_key.txt"
    assert file.stat().st_mode & 0o077 == 0
    assert len(file.read_text().strip()) == 64
    assert api_keys(ServeConfig(run="x", host="0.0.0.0", api_key_file=str(file)), {}).needed
    assert "--read-only" in container  # that one needs a container engine


def test_domains_share_the_backbone_and_keep_their_own_adapters(run):
    loaded = load_recommenders(ServeConfig(run=str(run)))
    of_crime = dict(loaded["crime"].model.named_parameters())
    of_comics = dict(loaded["comics"].model.named_parameters())
    shared = {name for name, one in of_crime.items() if one.data_ptr() == of_comics[name].data_ptr()}
    assert {name for name in of_crime if "lora_" not in name} == shared
    own = [name for name in of_crime if "lora_B" in name]
    assert own
    assert all(not torch.equal(of_crime[name], of_comics[name]) for name in own)
    for domain in ("crime", "comics"):
        alone = fedecider.Recommender.from_pretrained(run, domain)
        history = histories(alone)[6]
        assert loaded[domain].recommend(history).items == alone.recommend(history).items


def test_without_ensembles(run):
    loaded = load_recommenders(ServeConfig(run=str(run), ensemble=False))
    service = Service(loaded, Limits(), Metrics())
    try:
        asked = [service.submit(Kind("crime", 3), [loaded["crime"].items.keys[place]]) for place in range(5)]
        answers = [one.answer.result(60) for one in asked]
    finally:
        service.close()
    for place, answer in enumerate(answers):
        alone = loaded["crime"].recommend([loaded["crime"].items.keys[place]], k=3)
        assert [item.key for item in answer.items] == [item.key for item in alone.items]
        assert all(not item.features for item in answer.items)


@pytest.mark.slow
def test_the_benchmark_writes_its_table(run, tmp_path, monkeypatch):
    table = tmp_path / "table.md"
    words = ["serve.py", "--run", str(run), "--requests", "40", "--clients", "1,4", "--output", str(table)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPOSITORY / "benchmarks" / "serve.py"), run_name="__main__")
    assert end.value.code == 0
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [[int(row[0]), int(row[1]), int(row[5])] for row in rows] == [[1, 20, 0], [4, 20, 0]]
    assert all(float(row[2]) > 0 and float(row[3]) <= float(row[4]) for row in rows)
