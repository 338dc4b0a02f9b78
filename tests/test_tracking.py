"""What is told and tracked about a round, for clients that are scored apart and for those scored together."""

from fedecider.running.launch import round_text, valid_metrics

DOMAINS = {
    "round": 2,
    "valid": {"global": [{"hit@10": 0.5, "ndcg@10": 0.25}, {"hit@10": 0.1, "ndcg@10": 0.05}]},
    "clients": [{"client": 0, "loss": 3.25}, {"client": 1, "loss": 0.0000123}],
    "wall_s": 1.5,
    "evaluate_s": 0.25,
}
USERS = {**DOMAINS, "valid": {"fedmf": [{"ndcg@10": 0.3}]}, "clients": [{"clients": 900}]}


def test_a_round_in_one_line():
    assert round_text(DOMAINS, 5) == (
        "round 2/5: valid ndcg@10 global 0.1500 | loss 3.25 1.23e-05 | train 1.50 s, evaluate 0.25 s"
    )
    assert round_text(USERS, 5) == "round 2/5: valid ndcg@10 fedmf 0.3000 | train 1.50 s, evaluate 0.25 s"


def test_tracked_names_tell_the_client_where_clients_are_scored_apart():
    assert list(valid_metrics(DOMAINS, ["crime", "comics"])) == [
        ("valid/global/crime/hit_at_10", 0.5),
        ("valid/global/crime/ndcg_at_10", 0.25),
        ("valid/global/comics/hit_at_10", 0.1),
        ("valid/global/comics/ndcg_at_10", 0.05),
    ]
    assert list(valid_metrics(USERS)) == [("valid/fedmf/ndcg_at_10", 0.3)]
