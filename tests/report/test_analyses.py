"""The numbers of the analyses, by hand; and all of them together from a small run folder."""

import math

import pytest
import torch
from analysis_toys import toy_domains, toy_run

from fedecider.cross_silo.analyses import run_analysis
from fedecider.data.encoders import Encoder
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.federation.streams import stream
from fedecider.report.analyses import (
    activity_table,
    boundary_shock,
    distance_correlation,
    domain_distances,
    newest_titles,
    popularity_table,
    timing,
    traffic_table,
    train_counts,
)

VECTORS = {"p": [3.0, 0.0], "q": [1.0, 0.0], "r": [0.0, 2.0], "s": [4.0, 4.0]}


def test_distances_are_between_mean_vectors():
    calls = []

    def encode(texts):
        calls.append(list(texts))
        return torch.tensor([VECTORS[text] for text in texts], dtype=torch.float64)

    distance_KK = domain_distances({"a": ["p", "q"], "b": ["r"], "c": ["p", "r", "s"]}, Encoder("toy", encode))
    assert calls == [["p", "q", "r", "s"]]  # one call: TF-IDF would be fitted anew in a second one
    # means (2, 0), (0, 2), (7/3, 2): cosines 0, 7 / sqrt(85), 6 / sqrt(85)
    ac, bc = 1 - 7 / math.sqrt(85), 1 - 6 / math.sqrt(85)
    expected = torch.tensor([[0, 1, ac], [1, 0, bc], [ac, bc, 0]], dtype=torch.float64)
    assert torch.allclose(distance_KK, expected)
    assert torch.equal(distance_KK, distance_KK.T)
    with pytest.raises(ValueError, match=r"no text for \['b'\]"):
        domain_distances({"a": ["p"], "b": []}, Encoder("toy", encode))


def test_correlations_per_row_and_pooled():
    distance_KK = torch.tensor([[0.0, 0.1, 0.4], [0.1, 0.0, 0.3], [0.4, 0.3, 0.0]])
    alpha_KK = torch.tensor([[9.0, 2.0, 1.0], [1.5, 9.0, 0.5], [-1.0, 0.7, 9.0]])
    found = distance_correlation(alpha_KK, distance_KK)
    assert found["rows"] == pytest.approx([-1.0, -1.0, -1.0])  # the nearer domain has the larger weight in each row
    # ranks of alpha (2, 1, 1.5, .5, -1, .7): 6 4 5 2 1 3; of distance, ties shared: 1.5 5.5 1.5 3.5 5.5 3.5
    # deviations from 3.5: alpha 2.5 .5 1.5 -1.5 -2.5 -.5, distance -2 2 -2 0 2 0; -12 / sqrt(17.5 * 16)
    assert found["pooled"] == pytest.approx(-12 / math.sqrt(17.5 * 16))
    # the other five renamings: numerators -6 (distances 1 2), 0, ... of products over the same root; by enumeration
    assert found["p_value"] == pytest.approx(_enumerated(alpha_KK, distance_KK))
    assert found["num_entries"] == 6


def _enumerated(alpha_KK, distance_KK):
    """Renaming by relabelling three named entries, without permuting ranks."""
    ranks = {"01": -2.0, "02": 2.0, "12": 0.0}  # deviations of the distances between the old names
    alpha = {(0, 1): 2.5, (0, 2): 0.5, (1, 0): 1.5, (1, 2): -1.5, (2, 0): -2.5, (2, 1): -0.5}
    sums = []
    for names in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        sums.append(
            sum(value * ranks["".join(map(str, sorted((names[i], names[j]))))] for (i, j), value in alpha.items())
        )
    assert sums[0] == -12
    return sum(abs(value) >= 12 - 1e-9 for value in sums) / 6


def test_undefined_correlations_are_none():
    flat = distance_correlation(torch.full((3, 3), 2.0), torch.tensor([[0.0, 1, 2], [1, 0, 3], [2, 3, 0]]))
    assert flat == {"rows": [None] * 3, "pooled": None, "p_value": None, "num_entries": 6}
    two = distance_correlation(torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[0.0, 1], [1, 0]]))
    assert two["rows"] == [None, None]
    assert two["pooled"] is None
    draw_KK = torch.rand(8, 8, generator=stream(0, "correlation"))
    assert distance_correlation(draw_KK, draw_KK + draw_KK.T)["p_value"] is None  # too many orders to try


def test_titles_of_a_user_never_hold_held_out_items():
    domain = toy_domains()["crime"]
    assert newest_titles(domain)[4] == "C; B; A; A"  # events a a b c | d a
    assert newest_titles(domain, num=2)[4] == "C; B"


def positions(crime, comics):
    return {"crime": torch.tensor(crime), "comics": torch.tensor(comics)}


def test_buckets_hold_users_by_train_events_then_key():
    rows = {
        "model": positions([0, 7, 1, 2, 30, NOT_RANKED], [0, 0, 0, 0]),
        "other": positions([0, 0, 9, 9, 9, 9], [0, 9, 9, 0]),
    }
    found = activity_table(toy_domains(), rows)
    crime = found["domains"]["crime"]  # events u0 1, u1 2, u2 1, u3 3, u4 4, u5 1 -> u0 u2 | u5 | u1 | u3 | u4
    assert [bucket["num_users"] for bucket in crime] == [2, 1, 1, 1, 1]
    assert [bucket["train_events"] for bucket in crime] == [[1, 1], [1, 1], [2, 2], [3, 3], [4, 4]]
    hits = [bucket["lines"]["model"]["hit@5"]["mean"] for bucket in crime]
    assert hits == [1.0, 0.0, 0.0, 1.0, 0.0]
    ndcg = crime[0]["lines"]["model"]["ndcg@5"]
    assert ndcg["mean"] == pytest.approx((1 + 1 / math.log2(3)) / 2)  # positions 0 and 1
    assert (ndcg["low"], ndcg["high"]) == pytest.approx((1 / math.log2(3), 1.0))
    assert len(found["domains"]["comics"]) == 4  # no more groups than users
    # crime: model above in buckets 0 and 3, other in 2, two ties; comics: model in users 1 and 2, two ties
    assert found["wins"] == {"model": 4, "other": 1}
    assert found["ties"] == 4


def test_popularity_groups_follow_the_train_counts_of_the_clients():
    domains = toy_domains()
    assert train_counts(domains["crime"]).tolist() == [6, 4, 2, 0]
    found = popularity_table(domains, {"model": positions([0, 9, 0, 9, 0, 9], [0, 0, 0, 0])})
    # targets of u0..u5: d(0) b(4) c(2) b(4) a(6) d(0); sorted: u0 u5 | u2 | u1 | u3 | u4
    shares = found["shares"]["crime"]
    assert [group["num_cases"] for group in shares.values()] == [2, 3, 1]
    assert [group["train_count"] for group in shares.values()] == [[0, 0], [2, 4], [6, 6]]
    means = [group["lines"]["model"]["hit@5"]["mean"] for group in shares.values()]
    assert means == pytest.approx([0.5, 1 / 3, 1.0])
    # distinct targets with their counts: crime d 0, c 2, b 4, a 6; comics w 1, v 2: 2 % of 6 is one item, d
    paper = found["paper"]
    assert [group["num_cases"] for group in paper["crime"].values()] == [2, 4]
    assert [group["num_cases"] for group in paper["comics"].values()] == [0, 4]
    assert paper["comics"]["inactive (bottom 2 % of items)"]["train_count"] is None
    assert paper["comics"]["inactive (bottom 2 % of items)"]["lines"]["model"] == {"hit@5": None, "ndcg@5": None}
    assert "comics has no test case in the group inactive (bottom 2 % of items)" in found["warnings"]
    assert "comics has no test case in the group bottom 20 %" in found["warnings"]  # four users have no fifths
    assert len(found["warnings"]) == 4


def records():
    def one(round, score, seconds, before, after):
        up = {"x.lora_a": 24, "x.lora_b": 16}
        down = {key: size * (1 if round == 1 else 2) for key, size in up.items()}
        return {
            "round": round,
            "score": score,
            "train_s": sum(seconds),
            "valid": {
                "post_broadcast": [{"ndcg@10": value} for value in after],
                "pre_upload": [{"ndcg@10": value} for value in before],
            },
            "clients": [{"client": client, "seconds": value} for client, value in enumerate(seconds)],
            "traffic": [{"clients": [0, 1], "down": down, "up": up, "header_down": 80, "header_up": 72}],
        }

    return [one(1, 0.30, [2.0, 4.0], [0.2, 0.5], [0.1, 0.6]), one(2, 0.40, [3.0, 5.0], [0.3, 0.5], [0.3, 0.4])]


def test_traffic_against_the_formula():
    table = traffic_table(records(), ["crime", "comics"], lambda client, round: (10 * round, 10))
    assert [entry["down"] for entry in table] == [40, 80]
    assert [entry["formula_down"] for entry in table] == [40, 80]
    assert [entry["header_up"] for entry in table] == [72, 72]
    assert all(entry["equal"] for entry in table)
    wrong = traffic_table(records(), ["crime", "comics"], lambda client, round: (10, 10))
    assert [entry["equal"] for entry in wrong] == [True, False]
    assert wrong[0]["clients"] == ["crime", "comics"]


def test_seconds_and_the_first_round_near_the_best():
    rounds = [{**records()[0], "round": number, "score": score} for number, score in ((1, 0.3), (2, 0.397), (3, 0.4))]
    rounds[2]["clients"] = [{"client": 1, "seconds": 10.0}, {"client": 0}]
    found = timing(rounds, ["crime", "comics"])
    assert found["client_s"] == pytest.approx({"crime": 2.0, "comics": 6.0})
    assert found["train_s"] == pytest.approx(6.0)
    assert (found["near_round"], found["best_round"]) == (2, 3)  # 0.397 is above 0.99 * 0.4 = 0.396
    assert timing(rounds, ["crime", "comics"], tolerance=0.001)["near_round"] == 3


def test_boundary_shock_is_after_minus_before():
    found = boundary_shock(records(), ["crime", "comics"])
    assert found["change"]["crime"] == pytest.approx([-0.1, 0.0])
    assert found["change"]["comics"] == pytest.approx([0.1, -0.1])
    assert found["scores"]["pre_upload"]["comics"] == [0.5, 0.5]
    other = [{**record, "valid": {"global": record["valid"]["pre_upload"]}} for record in records()]
    assert boundary_shock(other, ["crime", "comics"]) is None


def test_all_numbers_of_a_run(tmp_path):
    folder = toy_run(tmp_path / "run")
    found = run_analysis(folder.root, toy_domains(), "tfidf")
    assert found["lines"] == ["fedecider (post_broadcast)", "zero-shot student"]
    assert found["best_round"] == 2
    assert found["modules"] == ["decoder.q", "encoder.q"]
    assert found["norms"] == [[0.5, 1.5], [2.0, 3.0]]
    assert found["cosine"] == [[0.9, -0.1], [-0.2, 0.8]]
    assert all(entry["equal"] for entry in found["traffic"])
    assert found["distances"]["alpha"].tolist() == [[2.5, -0.5], [0.25, 1.5]]
    assert found["distances"]["encoder"] == "TF-IDF + SVD"
    assert found["distances"]["num_texts"] == {"item": {"crime": 4, "comics": 3}, "user": {"crime": 6, "comics": 4}}
    # the file holds users in another order than the domain: u0 (position 0) and u2 (4) make the first bucket
    first = found["activity"]["domains"]["crime"][0]["lines"]["fedecider (post_broadcast)"]
    assert first["ndcg@5"]["mean"] == pytest.approx((1 + 1 / math.log2(6)) / 2)


def test_a_run_without_fusion_weights_beside_another_run(tmp_path):
    folder, other = toy_run(tmp_path / "plain", method="fedavg"), toy_run(tmp_path / "run")
    found = run_analysis(folder.root, toy_domains(), "tfidf", compare=other.root)
    assert found["lines"] == ["fedavg (global)", "fedecider (post_broadcast)"]
    assert found["alpha"] is found["norms"] is found["cosine"] is found["shock"] is None
    assert found["distances"] is None
    assert all(entry["equal"] for entry in found["traffic"])
    same = run_analysis(other.root, toy_domains(), "tfidf", compare=toy_run(tmp_path / "again").root)
    assert same["lines"] == ["fedecider (post_broadcast)", "fedecider (post_broadcast) of again"]
