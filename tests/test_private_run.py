"""Privacy from the command line of the cross-silo track: what is promised, where it is printed, and what is refused."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import yaml

from fedecider.cross_silo import privacy
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.privacy import check_privacy, check_shared_noise, privacy_data, privacy_notes
from fedecider.federation.method import FederatedMethod
from fedecider.federation.privacy import PrivacyConfig
from fedecider.methods.config import COUNTS, LOCAL
from fedecider.methods.rows import Rows

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
NOISE = ("--privacy.clip", "2", "--privacy.noise_scale", "1")
USERS = ("--user_privacy.clip", "0.1", "--user_privacy.noise_scale", "1")


def settings(*words):
    return parse_settings(["--ensemble.kind", "none", "--num_rounds", "4", *words])


@pytest.mark.slow
def test_a_run_with_both_says_what_holds_in_every_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {
        "domains": "crime,comics",
        "num_rounds": 1,
        "local_epochs": 1,
        "num_eval_users": 20,
        "lora_rank": 2,
    }
    content |= {"ensemble": {"kind": "none"}, "lora_targets": "attention,table", "update_scales": "1"}
    content["pretrain"]["backbone"] |= {"d_model": 32}
    content["pretrain"]["train"] |= {"max_steps": 5}
    content["distill"] |= {"epochs": 1}
    content |= {"privacy": {"clip": 2.0, "noise_scale": 0.001, "delta": 1e-3}}
    content |= {"user_privacy": {"clip": 0.1, "noise_scale": 2.0}}
    Path("toy.yaml").write_text(yaml.safe_dump(content))
    main = runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"]
    assert main(["--config", "toy.yaml", "--output", "run"]) == 0
    metrics = json.loads(Path("run/metrics.json").read_text())
    assert metrics["privacy"]["users"]["epsilon"] == pytest.approx(0.987, abs=0.001)
    assert metrics["privacy"]["uploads"]["epsilon"] > 1e5  # z = 0.001: next to nothing, and told so
    results, printed = Path("run/results.md").read_text(), " ".join(capsys.readouterr().out.split())
    for text in (results, printed):
        assert "privacy of users: epsilon 0.987 at delta 0.001: one user of one client there or not" in text
        assert "privacy of uploads: epsilon 5.04e+05 at delta 0.001 over 1 round(s)" in text
    rounds = [json.loads(line) for line in Path("run/rounds.jsonl").read_text().splitlines()]
    assert [log["steps"] for record in rounds for log in record["clients"]] == [4] * 2


def test_epsilon_is_told_only_where_bound_and_noise_both_hold():
    assert privacy_data(settings(), 3) == {}
    assert privacy_notes({}) == []
    bound = privacy_data(settings("--method", "fedavg", "--privacy.clip", "2", "--user_privacy.clip", "1"), 3)
    assert bound["uploads"]["epsilon"] is bound["users"]["epsilon"] is None
    assert bound["uploads"]["text"].startswith("no guarantee: noise missing")
    both = privacy_data(settings("--method", "fedavg", *NOISE, *USERS, "--local_epochs", "3"), 3)
    assert both["uploads"]["epsilon"] == pytest.approx(10.72, abs=0.01)  # four rounds, z = 1, delta 1e-5
    assert "over 48 steps" in both["users"]["text"]  # 4 rounds, 3 epochs, 1 / 0.25 steps
    summing = ("--method", "fedavg", *USERS, "--ensemble.kind", "logit", "--ensemble.sources")
    own, summed = (privacy_data(settings(*summing, sources), 3)["users"] for sources in ("own,public", "own,others"))
    assert own["epsilon"] < summed["epsilon"] < own["epsilon"] + 4.73  # that of the sum by itself
    assert "and 1 sum(s) of events of items" in summed["text"]
    local, counts = (
        privacy_data(settings("--method", name, *summing[2:], "own,others"), 3) for name in (LOCAL, COUNTS)
    )
    assert local == {}  # nothing is sent
    assert counts["users"]["epsilon"] == pytest.approx(4.73, abs=0.01)  # one sum, z = 1, delta 1e-5
    some = privacy_data(settings("--method", "fedavg", *NOISE, "--participation", "0.5"), 3)
    assert some["uploads"] == {**both["uploads"], "text": some["uploads"]["text"]}  # the server knows who sends


def test_cohorts_count_as_they_are_drawn_and_not_where_the_server_sees_them(monkeypatch):
    monkeypatch.setattr(privacy, "epsilon", lambda config, num_rounds, share: share)
    monkeypatch.setattr(privacy, "privacy_report", lambda config, num_rounds, share: "")
    words = ("--method", "fedavg", *NOISE, "--privacy.noise_on", "sum", "--participation", "0.1")
    assert privacy_data(settings(*words), 12)["uploads"]["epsilon"] == 2 / 12
    assert privacy_data(settings(*words, "--secure_sum", "true"), 12)["uploads"]["epsilon"] == 1.0


REFUSED = {
    "no upload": (("--method", "local", *NOISE), "privacy.clip with local, expected none: no upload leaves"),
    "numbers of samples": (("--method", "fedavg", "--weighting", "examples", *NOISE), "weighting examples with noise"),
    "numbers of samples of hidden users": (("--method", "fedavg", "--weighting", "examples", *USERS), "weighting exam"),
    "a robust mean of shares": (
        ("--method", "fedavg", "--robust_mean", "median", *NOISE, "--privacy.noise_on", "sum"),
        "robust_mean median",
    ),
    "a loss that is sent": (("--method", "fellrec", *USERS), "fellrec, expected another method: the training loss"),
    "a proximal term": (("--method", "fedprox", *USERS), "expected another method: a proximal term"),
    "pooled data": (("--method", "centralised", *USERS), "expected another method: the data"),
    "a search on samples": (("--method", "fdlora", *USERS), "expected another method: fusion weights"),
    "texts of users": (
        ("--config", str(REPOSITORY / "configs" / "demo.yaml"), "--method", "fedavg", *USERS),
        "a sample has to be of one user alone",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_hold_is_refused_before_anything_is_built(what):
    words, reason = REFUSED[what]
    with pytest.raises(ValueError, match=reason):
        check_privacy(settings(*words))


def test_shares_of_noise_need_one_sum_over_all_clients():
    shares = PrivacyConfig(clip=1.0, noise_scale=1.0, noise_on="sum")
    nothing = lambda *given: None  # noqa: E731
    mean = FederatedMethod("fedavg", *[nothing] * 5, ("global",), takes_mean=True)
    of_one = Rows({"table": torch.tensor([[True, False], [True, False]])})
    of_two = Rows({"table": torch.tensor([[True, False], [True, True]])})
    check_shared_noise(shares, mean, of_one)
    check_shared_noise(PrivacyConfig(clip=1.0, noise_scale=1.0), mean, of_two)
    with pytest.raises(ValueError, match="noise_on"):
        check_shared_noise(shares, mean._replace(name="lora_sim", takes_mean=False), of_one)
    with pytest.raises(ValueError, match="several catalogues"):
        check_shared_noise(shares, mean, of_two)
