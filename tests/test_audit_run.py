"""scripts/audit.py on finished runs of both tracks, and what it refuses."""

import csv
import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from embedding_fr import audit
from fedecider.audit.attacks import AuditConfig, epsilon_of
from fedecider.federation.streams import stream
from fedecider.running.manifest import write_manifest

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]


def script(name: str, *words) -> int:
    return runpy.run_path(str(REPOSITORY / "scripts" / f"{name}.py"))["main"]([str(word) for word in words])


def rows_of(run: Path) -> dict[str, dict]:
    return {row["sees"]: row for row in json.loads((run / "audit.json").read_text())["rows"]}


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """40 users over 90 items."""
    folder = tmp_path_factory.mktemp("raw")
    generator = stream(1, "csv")
    with (folder / "ratings.dat").open("w") as file:
        writer = csv.writer(file)
        for user in range(40):
            items = torch.randperm(90, generator=generator)[: 6 + user % 5].tolist()
            writer.writerows((f"u{user}", f"i{item:03d}", 5, time) for time, item in enumerate(items))
    return folder


@pytest.fixture
def data(ratings):
    return ["--dataset", "toy", "--source", "amazon_ratings", "--raw", ratings, "--num_threads", 1]


FAST = ["--local_epochs", 2, "--embedding_size", 4]
FIRST = "each client's upload of its first round"


def test_uploads_of_item_tables_show_the_items_and_noise_hides_them(data, tmp_path, capsys):
    found = {}
    for name, words in (("plain", []), ("noised", ["--clip", 0.5, "--noise_scale", 1.0])):
        run = tmp_path / name
        assert script("federate", "--method", "fedmf", *data, *FAST, *words, "--num_rounds", 3, "--output", run) == 0
        assert script("audit", "--run", run, "--num_rounds", 2, "--num_clients", 30, "--seed", 5) == 0
        found[name] = rows_of(run)
    printed = " ".join(capsys.readouterr().out.split())
    assert "which items a client trained on" in printed
    assert "30 of 40 clients attacked; rounds done again: 2" in printed
    plain, noised = found["plain"], found["noised"]
    assert list(plain) == [
        "how often the other clients have an item",
        FIRST,
        "each client's uploads of rounds 1 to 2",
        "the sum over all clients alone, rounds 1 to 2",
    ]
    assert plain[FIRST]["auc"]["low"] > 0.95
    assert plain["each client's uploads of rounds 1 to 2"]["auc"]["mean"] >= plain[FIRST]["auc"]["mean"] - 0.01
    assert plain["the sum over all clients alone, rounds 1 to 2"]["auc"]["mean"] < 0.8
    assert noised[FIRST]["auc"]["mean"] < 0.65
    assert plain[FIRST]["epsilon"] == "none"
    assert noised[FIRST]["epsilon"].startswith("epsilon ")
    assert plain[FIRST]["bytes_up"] > 90 * 4 * 4  # the whole table
    assert plain[FIRST]["auc"]["high"] <= 1.0


def test_lists_are_a_full_leak_and_masks_leave_the_sum(data, tmp_path):
    for name, words in (("plain", []), ("masked", ["--secure", "true"])):
        run = tmp_path / name
        assert script("federate", "--method", "fedease", *data, *words, "--output", run) == 0
        assert script("audit", "--run", run) == 0
    plain, masked = rows_of(tmp_path / "plain"), rows_of(tmp_path / "masked")
    total = "the sum over all clients alone, rounds 1 to 2"
    assert plain[FIRST]["auc"]["mean"] == 1.0
    assert masked[FIRST]["auc"]["mean"] == pytest.approx(0.5, abs=0.06)
    assert masked[total]["auc"] == plain[total]["auc"]  # the same sum, to the last bit


def test_where_few_clients_take_part_all_rows_are_about_those(data, tmp_path, monkeypatch, capsys):
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 1, "--participation", 0.1, "--output", tmp_path / "run"]
    assert script("federate", *words) == 0
    rated, row = [], audit._row

    def rate(config, party, sees, scores, *rest):
        rated.append(set(scores))
        return row(config, party, sees, scores, *rest)

    monkeypatch.setattr(audit, "_row", rate)
    assert script("audit", "--run", tmp_path / "run") == 0
    assert "4 of 40 clients attacked" in " ".join(capsys.readouterr().out.split())
    assert len(rated) == 3
    assert all(clients == rated[0] and len(clients) == 4 for clients in rated)
    seeds = [
        seed
        for seed in range(9)
        if not rated[0] & {*audit.audited_clients(AuditConfig("", num_clients=1, seed=seed), 40)}
    ]
    assert script("audit", "--run", tmp_path / "run", "--num_clients", 1, "--seed", seeds[0]) == 2
    assert "got no upload of the 1 clients drawn here in rounds 1 to 1" in capsys.readouterr().err


def test_a_run_of_other_rounds_than_recorded_is_refused(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert script("federate", "--method", "fedmf", *data, *FAST, "--num_rounds", 2, "--output", run) == 0
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    refused = lines[1].replace('"refused_uploads": []', '"refused_uploads": [{"client": 5, "reason": "away"}]')
    (run / "rounds.jsonl").write_text(lines[0] + refused)
    write_manifest(run)
    assert script("audit", "--run", run) == 2
    assert "in round 2 done again" in capsys.readouterr().err


def test_what_cannot_be_audited_is_told(data, ratings, tmp_path, capsys):
    run = tmp_path / "run"
    assert script("federate", "--method", "fedmf", *data, *FAST, "--num_rounds", 1, "--output", run) == 0
    capsys.readouterr()

    def refused(folder: Path, *words) -> str:
        assert script("audit", "--run", folder, *words) == 2
        return capsys.readouterr().err

    assert "no run in" in refused(tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    lines = (ratings / "ratings.dat").read_text().splitlines()
    (other / "ratings.dat").write_text("\n".join(lines[:-1]) + "\n")
    assert "got other data than those of" in refused(run, "--data", other)
    assert script("audit", "--run", run, "--data", shutil.copytree(ratings, tmp_path / "moved")) == 0
    capsys.readouterr()
    changed = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    changed[0]["clients"][0]["loss"] *= 1.1
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in changed))
    assert "rounds.jsonl was changed" in refused(run)
    write_manifest(run)
    assert "in round 1 done again" in refused(run)
    (run / "results.md").unlink()
    assert "did not finish" in refused(run)
    alone = tmp_path / "alone"
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 1, "--federation", "false", "--output", alone]
    assert script("federate", *words) == 0
    assert "federation off" in refused(alone)
    summed = tmp_path / "summed"
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 1, "--secure_sum", "true", "--output", summed]
    assert script("federate", *words) == 0
    assert "with secure_sum, whose server sees a mean alone" in refused(summed)
    near = tmp_path / "near"
    assert script("federate", "--method", "fednear", *data, "--output", near) == 0
    assert "neither a row nor a count" in refused(near)


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A run of the sample on whose users all clients trained."""
    folder = tmp_path_factory.mktemp("audited")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"domains": "crime,comics", "num_rounds": 1, "local_epochs": 1, "num_eval_users": 20, "lora_rank": 24}
    content |= {
        "learning_rate": 0.01,
        "update_scales": "1",
        "ensemble": {"kind": "logit"},
    }
    content["pretrain"]["backbone"] |= {"d_model": 24}
    content["pretrain"]["train"] |= {"epochs": 2}
    content["distill"] |= {"epochs": 1}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert script("federate", "--config", "toy.yaml", "--output", "runs/audited") == 0
    return folder


def test_a_run_without_others_is_told(playground, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    copy = Path(shutil.copytree("runs/audited", tmp_path / "copy"))
    record = json.loads((copy / "run.json").read_text())
    assert script("audit", "--run", Path("runs/audited")) == 2
    assert "got nobody of the catalogue crime" in capsys.readouterr().err
    record["data"]["crime"] = "other"
    (copy / "run.json").write_text(json.dumps(record))
    write_manifest(copy)
    assert script("audit", "--run", copy) == 2
    assert "got other data than those of" in capsys.readouterr().err


def test_an_epsilon_is_read_as_the_run_states_it():
    assert epsilon_of({}) == "none"
    assert epsilon_of({"privacy": "no guarantee: noise missing"}) == "none"
    assert (
        epsilon_of({"privacy": "epsilon 3.2 at delta 1e-05 over 4 round(s): one client's"})
        == "epsilon 3.2 at delta 1e-05"
    )
    stated = {"uploads": {"text": "no guarantee"}, "users": {"text": "epsilon 8 at delta 0.001 over 4 rounds"}}
    assert epsilon_of({"privacy": stated}) == "users: epsilon 8 at delta 0.001"
