"""Commands of the cross-device track on a small csv: what a run leaves behind, resuming, bad input, the leaderboard."""

import csv
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from slow import fast_where
from toy_ratings import FAST, REPOSITORY, options_of, script, write_ratings

from embedding_fr import averaged
from embedding_fr import leaderboard as board
from embedding_fr.commands import settings_of_run
from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingRunConfig, eval_users
from embedding_fr.stacked import check_finite
from fedecider.evaluation.per_user import read_per_user
from fedecider.federation.record import Recorder, read_json, read_records
from fedecider.federation.streams import stream

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    return write_ratings(tmp_path_factory.mktemp("raw"))


@pytest.fixture
def data(ratings):
    return options_of(ratings)


def federate(*words) -> int:
    return script("federate").main([str(word) for word in words])


def test_a_run_leaves_metrics_canary_curve_bytes_and_seconds(data, tmp_path, capsys):
    assert federate("--method", "fedmf", *data, *FAST, "--num_rounds", 3, "--output", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "round 3/3: validation ndcg@10" in printed
    assert "memoriser" in printed
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert set(metrics["test"]) == {"fedmf", "popularity", "memoriser"}
    assert metrics["protocol"] == "strict"
    assert sum(group["num_users"] for group in metrics["activity"]) == metrics["num_users"]
    assert len({group["num_users"] for group in metrics["activity"]}) <= 2
    assert sum(group["num_cases"] for group in metrics["popularity"].values()) == metrics["num_users"]
    parts = [(group["num_users"], group["lines"]["fedmf"]["hit@5"]["mean"]) for group in metrics["activity"]]
    whole = sum(count * mean for count, mean in parts) / metrics["num_users"]
    assert whole == pytest.approx(metrics["test"]["fedmf"]["hit@5"]["mean"])
    assert 0.0 < metrics["chance_hit@10"] < 0.12
    assert metrics["round_seconds"]["wall_s"] > 0
    assert set(metrics["seconds"]) == {"load", "prepare", "rounds", "results", "report"}
    assert all(spent["wall_s"] >= 0 and spent["cpu_s"] >= 0 for spent in metrics["seconds"].values())
    assert "Seconds by stage" in (tmp_path / "run" / "report.html").read_text()
    assert metrics["privacy"].startswith("no guarantee")
    num_items, clients = metrics["num_items"], metrics["num_users"]
    assert metrics["bytes"]["up"] > 3 * clients * num_items * 4 * 4  # whole tables, rounds x clients x items x D x 4
    records = read_records(tmp_path / "run" / "rounds.jsonl")
    assert [record["round"] for record in records] == [1, 2, 3]
    assert records[0]["clients"][0]["clients"] == clients
    assert {record.variant for record in read_per_user(tmp_path / "run" / "per_user.parquet")} == set(metrics["test"])
    assert {(one["first"], one["second"]) for one in metrics["comparisons"]} == {("fedmf", "popularity")}
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Recommendation</h2>" in page
    assert str(data[5]) not in page  # where the data lie stays in run.json
    assert script("report").main(["--run", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8") == page
    assert "3 rounds" not in (tmp_path / "run" / "results.md").read_text()


def test_secure_sums_give_the_same_scores_and_count_their_bytes(data, tmp_path, capsys):
    common = ["--method", "fedmf", *data, *FAST, "--num_rounds", 2]
    secure = ["--secure_sum", "true", "--secure_neighbours", 4, "--secure_threshold", 0.8]
    assert federate(*common, "--output", tmp_path / "plain") == 0
    assert federate(*common, *secure, "--output", tmp_path / "secure") == 0
    plain, masked = (read_json(tmp_path / name / "metrics.json") for name in ("plain", "secure"))
    assert masked["test"]["fedmf"]["ndcg@10"]["mean"] == pytest.approx(plain["test"]["fedmf"]["ndcg@10"]["mean"])
    assert masked["bytes"]["up"] > 2 * plain["bytes"]["up"]
    assert "the server sees sums of the uploads alone" in masked["privacy"]
    capsys.readouterr()
    for words, message in (
        (["--secure_threshold", 0.5], "secure_threshold 0.5"),
        (["--secure_sum", "true", "--federation", "false"], "nothing leaves a client"),
        (["--secure_neighbours", 3], "expected an even number"),
    ):
        assert federate(*common, *words, "--output", tmp_path / "bad") == 2
        assert message in capsys.readouterr().err
    assert federate("--method", "gpfedrec", *data, *FAST, "--secure_sum", "true", "--output", tmp_path / "bad") == 2
    assert "got secure_sum with gpfedrec, whose server takes no mean" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("words", [["fedmf"], ["pfedclr", "--participation", 0.6, "--memory_gb", 0.00002]])
def test_resuming_gives_the_uninterrupted_run(words, data, tmp_path):
    common = ["--method", *words, *data, *FAST, "--checkpoint_every", 1]
    assert federate(*common, "--num_rounds", 4, "--output", tmp_path / "whole") == 0
    folder = tmp_path / "parts"

    class Killed(BaseException):
        pass

    write = Recorder.write

    def dies(self, record):
        if record["round"] == 3:
            raise Killed
        write(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "write", dies)
        with pytest.raises(Killed):
            federate(*common, "--num_rounds", 4, "--output", folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["round_00001", "round_00002"]
    assert federate(*common, "--num_rounds", 4, "--output", folder, "--resume", "true") == 0
    again, whole = (read_json(tmp_path / name / "metrics.json") for name in ("parts", "whole"))
    assert again["test"] == whole["test"]
    assert again["last_round"] == 4


def test_a_run_that_diverges_at_once_leaves_nothing_and_a_later_one_keeps_its_rounds(data, tmp_path, capsys):
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 3, "--output", tmp_path / "run"]
    assert federate(*words, "--learning_rate", "1e30", "--init_std", "1e10") == 1
    assert re.search(r"got a non-finite (user|item_table|loss) for client \d+ in round 1,", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()

    def late(params, loss_C, clients, round):
        check_finite(params, loss_C * float("nan") if round == 2 else loss_C, clients, round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaged, "check_finite", late)
        assert federate(*words, "--checkpoint_every", 1) == 1
    assert "non-finite loss for client" in capsys.readouterr().err
    assert [record["round"] for record in read_records(tmp_path / "run" / "rounds.jsonl")] == [1]
    assert federate(*words, "--checkpoint_every", 1, "--resume", "true") == 0


def test_an_upload_that_is_left_out_because_it_is_not_finite_is_told(data, tmp_path, monkeypatch):
    whole = METHODS["fedmf"]

    def build(*given):
        method = whole.build(*given)

        def client_update(round, download, own, block):
            upload, new, logs = method.client_update(round, download, own, block)
            if round == 2:
                upload.tensors["item_table"][upload.clients == 7] = torch.nan
            return upload, new, logs

        return method._replace(client_update=client_update)

    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 3, "--output", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setitem(METHODS.own, "fedmf", whole._replace(build=build))
        assert federate(*words) == 0
    found = [{"client": 7, "tensors": ["item_table"]}]
    records = read_records(tmp_path / "run" / "rounds.jsonl")
    assert [record["non_finite_uploads"] for record in records] == [[], found, []]
    assert read_json(tmp_path / "run" / "metrics.json")["non_finite_uploads"] == [{"round": 2, **found[0]}]
    assert "too large: client 7 in round 2 (item_table)" in (tmp_path / "run" / "results.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedmf", "pfedclr"])
def test_two_processes_give_what_one_gives(method, data, tmp_path):
    words = ["--method", method, *data, *FAST, "--num_rounds", "2", "--memory_gb", "0.00002"]
    words += ["--tracker", "tensorboard"]  # it ends after the last evaluation, which both processes take part in
    assert federate(*words, "--output", tmp_path / "one") == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command = [*launch, str(REPOSITORY / "scripts" / "federate.py"), *words, "--output", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    one, two = (read_json(tmp_path / name / "metrics.json") for name in ("one", "two"))
    for metrics in (one, two):
        del metrics["seconds"], metrics["round_seconds"]
    assert one == two


def test_memory_and_privacy_options_are_used(data, tmp_path):
    common = ["--method", "fedmf", *data, *FAST, "--num_rounds", 2]
    assert federate(*common, "--output", tmp_path / "plain") == 0
    assert federate(*common, "--memory_gb", 0.00002, "--output", tmp_path / "small") == 0
    results = [read_json(tmp_path / name / "metrics.json") for name in ("plain", "small")]
    assert results[0]["valid"]["fedmf"] == results[1]["valid"]["fedmf"]
    private = ["--clip", 0.5, "--noise_scale", 1.0, "--delta", 1e-3]
    assert federate(*common, *private, "--output", tmp_path / "private") == 0
    assert read_json(tmp_path / "private" / "metrics.json")["privacy"].startswith("epsilon")
    uploads = [read_records(tmp_path / n / "rounds.jsonl")[0]["valid"] for n in ("plain", "private")]
    assert uploads[0] != uploads[1]


@pytest.mark.parametrize("method", fast_where(("fedrap", "pfedrec_em"), ("fedrap", "fedem", "fedrecgel", "pfedrec_em")))
def test_uploads_of_any_method_can_be_bounded_and_noised(method, data, tmp_path):
    words = ["--method", method, *data, *FAST, "--num_rounds", 2, "--clip", 0.5, "--delta", 1e-3]
    for scale in (0.0, 1.0):
        assert federate(*words, "--noise_scale", scale, "--output", tmp_path / str(scale)) == 0
    bounded, noised = (read_json(tmp_path / str(scale) / "metrics.json") for scale in (0.0, 1.0))
    assert noised["privacy"].startswith("epsilon")
    assert not bounded["privacy"].startswith("epsilon")
    assert bounded["valid"] != noised["valid"]


def test_rounds_are_validated_on_a_sample_that_is_drawn_once_and_the_test_takes_all(data, tmp_path):
    words = ["--method", "fedncf", *data, *FAST, "--num_rounds", 3]
    for name, sample in (("all", []), ("some", ["--num_eval_users", 12]), ("too many", ["--num_eval_users", 999])):
        assert federate(*words, *sample, "--output", tmp_path / name) == 0
    whole, some, many = (read_json(tmp_path / name / "metrics.json") for name in ("all", "some", "too many"))
    assert many["test"] == whole["test"]
    assert (whole["num_eval_users"], some["num_eval_users"]) == (whole["num_users"], 12)
    scores = [[r["score"] for r in read_records(tmp_path / name / "rounds.jsonl")] for name in ("all", "some")]
    assert scores[0] != scores[1]
    per_user = read_per_user(tmp_path / "some" / "per_user.parquet")
    assert all(len(record.users) == whole["num_users"] for record in per_user)
    assert "12 users, drawn once" in (tmp_path / "some" / "results.md").read_text()
    assert "drawn once" not in (tmp_path / "all" / "results.md").read_text()
    assert eval_users(EmbeddingRunConfig(num_eval_users=12), 70) == eval_users(
        EmbeddingRunConfig(num_eval_users=12), 70
    )
    assert eval_users(EmbeddingRunConfig(num_eval_users=12, seed=1), 70) != eval_users(
        EmbeddingRunConfig(num_eval_users=12), 70
    )
    assert federate(*words, "--num_eval_users", -1, "--output", tmp_path / "bad") == 2


def test_some_rounds_are_validated_and_the_same_is_trained(data, tmp_path):
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 5]
    for name, every in (("each", 1), ("second", 2)):
        assert federate(*words, "--eval_every", every, "--output", tmp_path / name) == 0
    each, second = (read_records(tmp_path / name / "rounds.jsonl") for name in ("each", "second"))
    assert [record["score"] for record in second] == [
        record["score"] if record["round"] in (2, 4, 5) else None for record in each
    ]
    assert [record["clients"] for record in each] == [record["clients"] for record in second]
    metrics = read_json(tmp_path / "second" / "metrics.json")
    assert metrics["best_round"] == max((2, 4, 5), key=lambda number: each[number - 1]["score"])
    assert metrics["round_seconds"]["evaluate_s"] > 0.0
    assert "every 2 rounds are validated" in (tmp_path / "second" / "results.md").read_text()
    assert "rounds are validated" not in (tmp_path / "each" / "results.md").read_text()
    assert "Convergence" in (tmp_path / "second" / "report.html").read_text()
    assert federate(*words, "--eval_every", 0, "--output", tmp_path / "bad") == 2


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (lambda place: place // 4, "warning: 86% of neighbouring events of a user have the same time"),
        (lambda place: place, ""),
        (None, "warning: the data have no times; events are in the order of the file"),
    ],
)
def test_a_method_that_uses_order_warns_of_data_without_one(times, expected, tmp_path):
    with (tmp_path / "ratings.dat").open("w") as file:
        for user in range(12):
            items = torch.randperm(30, generator=stream(user, "items"))[:8].tolist()
            rows = [(user, item, 5, times(place)) if times else (user, item, 5) for place, item in enumerate(items)]
            csv.writer(file, delimiter="," if times else " ").writerows(rows)
    words = ["--dataset", "toy", "--source", "amazon_ratings" if times else "filmtrust", "--raw", tmp_path]
    for method in ("fednear", "fedease"):
        assert federate("--method", method, *words, "--output", tmp_path / method) == 0
        notes = (tmp_path / method / "results.md").read_text()
        assert (expected in notes and "fednear uses order" in notes) == (method == "fednear" and bool(expected))


def test_federation_off_uploads_nothing(data, tmp_path):
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 2, "--federation", "false"]
    assert federate(*words, "--output", tmp_path / "run") == 0
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert metrics["bytes"]["up"] == 0
    assert metrics["privacy"] == "nothing leaves a client"


def test_noise_without_a_bound_runs_with_a_warning_and_can_be_read_again(data, tmp_path, capsys):
    words = ["--method", "fedmf", *data, *FAST, "--num_rounds", 1, "--mechanism", "laplace", "--noise_scale", 0.5]
    assert federate(*words, "--noise_without_clip", "true", "--output", tmp_path / "run") == 0
    warning = "WARNING, laplace noise of size 0.5 without a bound guarantees nothing"
    assert warning in capsys.readouterr().err  # before the first round
    assert warning in (tmp_path / "run" / "results.md").read_text()
    assert read_json(tmp_path / "run" / "metrics.json")["privacy"].startswith("no guarantee: WARNING")
    assert settings_of_run(tmp_path / "run").privacy.noise_without_clip


SHARED_NOISE = ("--clip", 1, "--noise_scale", 4, "--noise_on", "sum")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "gpfedrec"), "got noise_on sum with gpfedrec, expected upload: its server reads every single"),
        (("--method", "fedfast"), "got noise_on sum with fedfast, expected upload"),
        (("--method", "fedmf"), "the noise would be scaled with a client's weight"),
        (("--method", "fedncf"), "the noise would be scaled with a client's weight"),
        (("--method", "fedrecgel"), "the noise would be scaled with a client's weight"),
        (("--method", "pfedrec", "--robust_mean", "median"), "robust_mean"),
    ],
)
def test_noise_on_the_sum_is_refused_where_shares_do_not_add_up(data, words, message, tmp_path, capsys):
    assert federate(*words, *data, *FAST, *SHARED_NOISE, "--output", tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [("--method", "fedmf", "--weighting", "uniform"), ("--method", "pfedrec")])
def test_noise_on_the_sum_of_clients_that_weigh_alike(data, words, tmp_path):
    assert federate(*words, *data, *FAST, *SHARED_NOISE, "--num_rounds", 1, "--output", tmp_path / "run") == 0
    assert "only the sum" in read_json(tmp_path / "run" / "metrics.json")["privacy"]


BY_KIND = ("fedease", "fednear", "colr", "fedmf", "pfedrec", "gpfedrec", "fedem", "fedrap", "perfedrec")
"""Sums, factors, shared and personal tables, networks and clusters; every method's rounds are in its contract."""


@pytest.mark.parametrize("method", fast_where(BY_KIND, METHODS))
def test_every_method_runs_from_the_command_line(method, data, tmp_path):
    assert federate("--method", method, *data, *FAST, "--num_rounds", 2, "--output", tmp_path / "run") == 0
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert 0.0 <= metrics["test"][metrics["reported"]]["hit@10"]["mean"] <= 1.0
    assert metrics["test"]["memoriser"]["hit@10"]["mean"] < 0.35  # 50 users: chance is 0.08
    assert metrics["bytes"]["up"] > 0


def test_a_method_with_a_bound_of_its_own_says_what_it_guarantees(data, tmp_path):
    words = ["--method", "fedease", *data, "--clip", 5, "--noise_scale", 2, "--output", tmp_path / "run"]
    assert federate(*words) == 0
    assert read_json(tmp_path / "run" / "metrics.json")["privacy"].startswith("epsilon")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "fedxy"], "got method 'fedxy', expected one of"),
        (["--method", "fedmf", "--dataset", "ml-7"], "got dataset 'ml-7'"),
        (["--method", "fedmf", "--domains", "crime"], "domains"),
        (["--method", "local", "--dataset", "ml-100k"], "dataset"),
        (["--method", "fedmf", "--participation", "0"], "participation"),
        (["--method", "fedmf", "--clip", "0", "--noise_scale", "1"], "got clip 0"),
        (["--method", "fedmf", "--noise_scale", "1"], "without a clip"),
        (["--method", "fedmf", "--protocol", "loose"], "got protocol 'loose'"),
        (["--method", "pfedclr", "--lora_rank", "4"], "lora_rank"),
        (["--method", "pfedclr", "--rank", "0"], "got rank 0"),
    ],
)
def test_bad_settings_end_with_one_line_and_code_2(words, message, tmp_path, capsys):
    try:
        code = federate(*words, "--output", tmp_path / "run")
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr().err
    assert code == 2
    assert message in " ".join(printed.split())
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_bad_files_and_too_many_negatives_end_with_code_2(data, ratings, tmp_path, capsys):
    assert federate("--method", "fedmf", *data, *FAST, "--num_negatives", 130, "--output", tmp_path / "run") == 2
    assert "got num_negatives 130, expected at most" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    broken = tmp_path / "raw"
    broken.mkdir()
    (broken / "ratings.csv").write_text("customer,item\n1,2\n")
    words = ["--dataset", "toy", "--source", "movielens", "--raw", broken]
    assert federate("--method", "fedmf", *words, "--output", tmp_path / "other") == 2
    assert "'userId'" in capsys.readouterr().err
    lens = tmp_path / "ml-100k"
    lens.mkdir()
    (lens / "u.data").write_text("1\t10\t5\t100\n" + "1\tten\t5\t101\n" * 2000)
    words = ["--dataset", "ml-100k", "--raw", lens]
    assert federate("--method", "fedmf", *words, "--output", tmp_path / "other") == 2
    printed = capsys.readouterr().err
    assert re.search(r"more than \d+ bad lines, the last one at u.data:\d+: .*ten", printed)
    (broken / "ratings.dat").write_text("u1,a,5,1\nu1,b,5,2\nu2,a,5,1\n")  # nothing is left to train on
    words = ["--dataset", "toy", "--source", "amazon_ratings", "--raw", broken, "--min_user_events", 1]
    assert federate("--method", "fedmf", *words, "--output", tmp_path / "other") == 2
    assert "0 user(s) and 0 item(s) are left; expected at least 2 of each" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def leaderboard(*words) -> int:
    return script("leaderboard").main([str(word) for word in words])


@pytest.mark.slow
def test_the_leaderboard_goes_on_where_it_was_and_says_what_it_compared(data, tmp_path, capsys):
    words = ["--methods", "popularity,memoriser,ease,fedmf,fedmf/local", *data, "--num_rounds", 2, "--tune", 2]
    words += ["--protocol", "strict,strict/sampled99,paper", "--seeds", 2, "--output", tmp_path / "board"]
    assert leaderboard(*words, "--only_cells", "true") == 0
    assert not (tmp_path / "board" / "leaderboard.md").exists()
    assert capsys.readouterr().out.count("validation ndcg@10") > 10
    assert leaderboard(*words) == 0
    text = (tmp_path / "board" / "leaderboard.md").read_text()
    for expected in ("Protocol paper", "LEAKS the held-out item; the memoriser scores", "| fedmf/local | local |"):
        assert expected in text
    rows = read_json(tmp_path / "board" / "leaderboard.json")["rows"]
    assert len(rows) == 15
    tests = read_json(tmp_path / "board" / "leaderboard.json")["comparisons"]
    pairs = Counter(one["protocol"] for one in tests)
    assert pairs == dict.fromkeys(("strict", "strict/sampled99", "paper"), 2 * 6)  # 4 rows, 2 metrics
    assert all(0.0 < one["p_value"] <= one["p_holm"] <= 1.0 for one in tests)
    assert {row["against_best"] for row in rows} <= {"best", "not distinguishable", "below", "canary"}
    page = (tmp_path / "board" / "leaderboard.html").read_text(encoding="utf-8")
    assert "▶ fedmf" in page  # the only federated row
    names = [f"{kind}-{name}.csv" for name in ("strict", "strict-sampled99", "paper") for kind in ("results", "tests")]
    names += ["validation.csv", "costs.csv"]
    assert re.findall(r'<a download="([^"]*)"', page) == names
    assert str(tmp_path) not in page
    lines = (tmp_path / "board" / "leaderboard.csv").read_text().splitlines()
    assert len(lines) == 16
    assert "validation ndcg@10" not in capsys.readouterr().out  # every cell was there
    assert str(tmp_path) not in text  # the command is printed without places
    records = read_per_user(tmp_path / "board" / "per_user.parquet")
    assert len(records) == 5 * 3 * 2
    # a cell made with other defaults is another cell
    with pytest.MonkeyPatch.context() as patch:
        other = METHODS["fedmf"]._replace(defaults={"learning_rate": 0.05})
        patch.setitem(METHODS.own, "fedmf", other)
        assert leaderboard(*words) == 0
    made_again = [line for line in capsys.readouterr().out.splitlines() if "validation ndcg@10" in line]
    assert made_again
    assert all(line.startswith("fedmf") for line in made_again)


def test_the_leaderboard_says_which_rows_failed_and_makes_none_bold_that_leaks(data, tmp_path, monkeypatch, capsys):
    central = board._central

    def failing(asked, line, *rest):
        if line.method == "ease":
            raise ValueError("it diverged")
        return central(asked, line, *rest)

    monkeypatch.setattr(board, "_central", failing)
    words = ["--methods", "popularity,memoriser,ease,fedmf/local", *data, "--num_rounds", 3, "--tune", 1, "--seeds", 1]
    words += ["--protocol", "strict,paper", "--patience", 0, "--output", tmp_path / "board"]
    assert leaderboard(*words) == 0
    out = capsys.readouterr().out
    assert "seed 0: failed: it diverged" in out
    assert "left out: ease (paper)" in out
    text = (tmp_path / "board" / "leaderboard.md").read_text()
    assert text.count("Left out, since a run failed: ease.") == 2
    assert "at most 3 rounds; under paper the settings of the papers or public codes, and all rounds\n" in text
    assert "the last of which is the test item: time, ties in file order" in text
    assert "**" not in text.partition("Protocol paper")[2]
    content = read_json(tmp_path / "board" / "leaderboard.json")
    assert {name: one["missing"] for name, one in content["protocols"].items()} == {
        "strict": ["ease"],
        "paper": ["ease"],
    }
    valid = {(row["row"], row["protocol"]): row["valid_ndcg@10"] for row in content["rows"]}
    test = {(row["row"], row["protocol"]): row["values"]["macro"]["ndcg@10"]["mean"] for row in content["rows"]}
    for method in ("memoriser", "fedmf/local"):
        assert valid[method, "paper"] > 2 * valid[method, "strict"], "among the candidates of the protocol, as on test"
        assert valid[method, "paper"] == pytest.approx(test[method, "paper"], abs=0.2)


def test_rows_under_a_protocol_of_papers_run_all_their_rounds():
    config = board.LeaderboardConfig(num_rounds=7, patience=3)
    table = board.Board(config, None, None, Path("x"))
    patience = {
        protocol: board.Line("fedmf", [protocol]).settings(table, protocol, {}, 0).run.patience
        for protocol in ("paper", "isolated99", "strict")
    }
    assert patience == {"paper": 0, "isolated99": 0, "strict": 3}


def test_the_best_test_round_stands_beside_the_last_one(ratings, tmp_path):
    more = [f"y{user},i{(17 * user + 31 * place) % 400:03d},5,{place}" for user in range(40) for place in range(10)]
    large = tmp_path / "large"
    large.mkdir()
    (large / "ratings.dat").write_text((ratings / "ratings.dat").read_text() + "\n".join([*more, ""]))
    words = ["--methods", "memoriser,fedmf,mf", *options_of(large), "--num_rounds", 20, "--tune", 1, "--seeds", 1]
    words += ["--protocol", "paper,isolated99", "--output", tmp_path / "board"]
    assert leaderboard(*words) == 0
    content = read_json(tmp_path / "board" / "leaderboard.json")
    rows = {(row["row"], row["protocol"]): row for row in content["rows"]}
    for protocol in ("paper", "isolated99"):
        row = rows["fedmf", protocol]
        last = row["values"]["macro"]["ndcg@10"]["mean"]
        assert row["ndcg@10, best test round"] >= max(last, row["ndcg@10, best round"]) - 1e-9
        assert "ndcg@10, best test round" not in rows["mf", protocol], "no rounds"
    with (tmp_path / "board" / "leaderboard.csv").open() as file:
        lines = {(line["row"], line["protocol"]): line for line in csv.DictReader(file)}
    for (label, protocol), line in lines.items():
        best = rows[label, protocol].get("hit@10, best test round")
        assert line["hit@10, best test round"] == ("" if best is None else str(best))
    hit = {protocol: rows["memoriser", protocol]["values"]["macro"]["hit@10"]["mean"] for _, protocol in rows}
    assert hit["isolated99"] < 0.3 < hit["paper"], "remembering negatives finds nothing where no candidate is one"


def test_the_public_codes_settings_are_the_first_of_a_search(data, tmp_path, capsys):
    words = ["--methods", "fedem/code", *data, "--num_rounds", 2, "--seeds", 1, "--tune", 3, "--only_cells", "true"]
    assert leaderboard(*words, "--protocol", "strict,paper", "--output", tmp_path / "board") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation ndcg@10" in line]
    assert sum("strict" in line for line in lines) == 3, "tuned like every other row"
    assert sum("first setting" in line for line in lines if "strict" in line) == 1
    assert sum("paper" in line for line in lines) == 1, "as published"
    cells = [read_json(path)["setting"] for path in (tmp_path / "board" / "cells").glob("fedem-code-*/inputs.json")]
    assert {cell["method"]["variant"] for cell in cells} == {"code"}
    assert len({cell["learning_rate"] for cell in cells}) == 3


def test_a_leaderboard_that_the_data_do_not_allow_or_whose_rows_all_fail_ends_with_code_2(data, tmp_path, capsys):
    seen = "".join(f"all,i{item:03d},5,{item}\n" for item in range(60))  # of 130 items
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "ratings.dat").write_text((Path(data[5]) / "ratings.dat").read_text() + seen)
    words = ["--num_rounds", 1, "--seeds", 1, "--tune", 1, "--output", tmp_path / "board"]
    assert leaderboard("--methods", "fedmf,popularity", *data[:5], raw, *data[6:], *words) == 2
    printed = capsys.readouterr()
    assert "never touched, expected at least 99" in printed.err
    assert "use the protocol strict" in printed.err
    assert "validation ndcg@10" not in printed.out, "nothing was trained"
    diverging = METHODS["fedmf"]._replace(defaults={"learning_rate": 1e30, "init_std": 1e10})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS.own, "fedmf", diverging)
        assert leaderboard("--methods", "fedmf", *data, *words) == 2
    assert "got no row from fedmf, expected one at least" in capsys.readouterr().err
    assert not (tmp_path / "board" / "leaderboard.md").exists()


def test_where_nothing_is_tuned_the_leaderboard_needs_no_optuna(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    words = ["--methods", "fedmf,ease", *data, "--num_rounds", 1, "--seeds", 1, "--tune", 30, "--only_cells", "true"]
    assert leaderboard(*words, "--output", tmp_path / "board", "--protocol", "paper") == 0
    assert leaderboard(*words, "--output", tmp_path / "board", "--protocol", "paper,strict") == 2
    assert "pip install 'fedecider[tune]'" in capsys.readouterr().err
