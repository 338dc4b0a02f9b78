"""What is told and tracked about a round, for clients that are scored apart and for those scored together."""

from fedecider.running.trackers import valid_metrics

DOMAINS = {
    "round": 2,
    "valid": {"global": [{"hit@10": 0.5, "ndcg@10": 0.25}, {"hit@10": 0.1, "ndcg@10": 0.05}]},
    "clients": [{"client": 0, "loss": 3.25}, {"client": 1, "loss": 0.0000123}],
    "wall_s": 1.5,
    "evaluate_s": 0.25,
}
USERS = {**DOMAINS, "valid": {"fedmf": [{"ndcg@10": 0.3}]}, "clients": [{"clients": 900}]}


def test_tracked_names_tell_the_client_where_clients_are_scored_apart():
    assert list(valid_metrics(DOMAINS, ["crime", "comics"])) == [
        ("valid/global/crime/hit_at_10", 0.5),
        ("valid/global/crime/ndcg_at_10", 0.25),
        ("valid/global/comics/hit_at_10", 0.1),
        ("valid/global/comics/ndcg_at_10", 0.05),
    ]
    assert list(valid_metrics(USERS)) == [("valid/fedmf/ndcg_at_10", 0.3)]
