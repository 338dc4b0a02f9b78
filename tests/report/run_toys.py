"""An output directory of the cross-silo track made of hand-written files."""

import json

from fedecider.running.run_folder import RunFolder

REPORTED = "fedecider (fused)"
HOSTILE = "<script>alert('a title')</script>"


def intervals(mean, low=None, high=None):
    names = [f"{kind}@{k}" for kind in ("hit", "ndcg", "mrr") for k in (5, 10, 20)]
    return {
        name: {"mean": mean, "low": mean - 0.02 if low is None else low, "high": high or mean + 0.03} for name in names
    }


def domain(model, popularity, canary=0.04):
    test = {REPORTED: intervals(model), "popularity": intervals(popularity), "memoriser": intervals(canary)}
    return {"num_users": 9, "num_items": 7, "chance_hit@10": 0.05, "test": test}


METRICS = {
    "protocol": "strict",
    "method": "fedecider",
    "reported": REPORTED,
    "best_round": 2,
    "best_valid_ndcg@10": 0.25,
    "num_beams": 20,
    "domains": {"crime": domain(0.3125, 0.11), "comics": domain(0.07, 0.0625)},
    "macro": {"test": {REPORTED: intervals(0.19125), "popularity": intervals(0.08625)}},
}
CONFIG = {
    "run": {
        "domains": "crime,comics",
        "data": "/home/someone/prepared",
        "output": "",
        "cache": ".cache",
        "participation": 0.5,
        "lora_rank": 4,
        "lora_targets": "attention",
        "seed": 11,
        "pretrain": {"vocab_size": 77},
    },
    "training": {"local_epochs": 2, "learning_rate": 0.003},
    "ranking": {"num_beams": 20},
    "method": {"alpha_init": 2.0},
}
RECORD = {
    "config": CONFIG,
    "protocol": "strict",
    "data": {"crime": "aa11", "comics": "bb22"},
    "python": "3.11.0",
    "versions": {"torch": "2.9.0"},
    "machine": {"system": "Linux"},
    "commit": "c0ffee",
    "command": "federate.py --data /home/someone/prepared",
}


def round_record(number, finite=True, num_untrained=0):
    valid = {"fused": [{"ndcg@10": 0.1 * number}, {"ndcg@10": 0.4 - 0.1 * number}]}
    clients = [{"client": 0, "finite": finite}, {"client": 1, "finite": True, "num_untrained": num_untrained}]
    return {
        "round": number,
        "valid": valid,
        "clients": clients,
        "train_s": 2.0 * number,
        "wall_s": 3.0,
        "evaluate_s": 1.0,
    }


ROUNDS = [round_record(1, num_untrained=3), round_record(2, finite=False), round_record(3, num_untrained=1)]


def card(**clients):
    events = {"users": 9, "events": 1234, "length": {"mean": 5.25}, "timestamps": "known", "tied_last_two_share": 0.0}
    return {"items": {"count": 7}, "clients": {**events, **clients}, "public": {"users": 40}}


def write_run(root):
    """A finished run of two domains and three rounds, in the new folder ``root``."""
    root.mkdir()
    sizes = [{"crime": {"down": 100, "up": 10}, "comics": {"down": 200, "up": 20}}, {"crime": {"down": 3000, "up": 10}}]
    example = {
        "history": ["Old", HOSTILE],
        "num_history": 6,
        "held_out": "Wanted",
        "position": 1,
        "recommended": [{"title": "Other", "held_out": False}, {"title": "Wanted", "held_out": True}],
    }
    content = {
        "run.json": RECORD,
        "metrics.json": METRICS,
        "communication.json": {
            "unit": "bytes",
            "adapter_scalars": 5,
            "rounds": [{"round": n, "clients": clients} for n, clients in enumerate(sizes, 1)],
        },
        "fusion_weights.json": {
            "domains": ["crime", "comics"],
            "rounds": [1, 2, 3],
            "alpha": [[[2.0, 2.0], [2.0, 2.0]], [[1.5, -0.25], [0.75, None]], [[1.0, 1.0], [1.0, 1.0]]],
        },
        "data_cards.json": {"crime": card(tied_last_two_share=0.125), "comics": card()},
        "examples.json": {"crime": [example, {**example, "position": None, "recommended": []}]},
    }
    for name, value in content.items():
        (root / name).write_text(json.dumps(value))
    (root / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ROUNDS))
    return RunFolder(root)
