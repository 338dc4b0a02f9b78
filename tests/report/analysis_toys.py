"""An output directory of two domains with everything the analyses read, written by hand."""

import json

import torch

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.federation.record import write_json
from fedecider.running.run_folder import RunFolder

DOMAINS = ["crime", "comics"]
SEQUENCES = {
    "crime": [[0, 1, 3], [0, 1, 2, 1], [1, 0, 2], [0, 1, 2, 3, 1], [0, 0, 1, 2, 3, 0], [0, 1, 3]],
    "comics": [[0, 2, 1], [1, 0, 2], [0, 1, 2, 1], [0, 0, 1, 2]],
}
SIZES = {"decoder.q": (3, 5), "encoder.q": (4, 4)}


def toy_domains():
    """Crime: items a to d, users with 1, 2, 1, 3, 4 and 1 train events. Comics: items u, v, w, four users."""

    def one(name, keys):
        users = [f"{name} user {number}" for number in range(len(SEQUENCES[name]))]
        texts = [f"title: {name} volume {key * 2}" for key in keys]
        titles = [key.upper() for key in keys]
        titles = titles if name == "crime" else [f"Volume {title * 2}" for title in titles]
        return Domain(name, Catalogue(name, keys, titles, texts), Events(users, SEQUENCES[name], None), NO_EVENTS, {})

    return {"crime": one("crime", ["a", "b", "c", "d"]), "comics": one("comics", ["u", "v", "w"])}


def toy_run(root, method="fedecider"):
    """A finished run of two rounds, rank 2; the users of ``per_user.parquet`` stand in reverse order."""
    folder = RunFolder(root)
    variants = ["fused", "local"] if method == "fedecider" else ["global", "local"]
    reported = f"{method} ({variants[0]})"
    folder.root.mkdir(parents=True)
    write_json(folder.record, {"config": {"run": {"method": method, "lora_rank": 2, "seed": 0}}, "data": {}})
    write_json(
        folder.metrics,
        {"method": method, "reported": reported, "best_round": 2, "domains": {name: {} for name in DOMAINS}},
    )
    lines = [_record(round, variants, method) for round in (1, 2)]
    folder.rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if method == "fedecider":
        alpha = [[[2.0, 2.0], [2.0, 2.0]], [[2.5, -0.5], [0.25, 1.5]]]
        write_json(folder.fusion_weights, {"domains": DOMAINS, "rounds": [1, 2], "alpha": alpha})
    write_json(folder.communication, {})
    _write_positions(folder, reported)
    return folder


def _record(round, variants, method):
    up = {}
    for name, (num_in, num_out) in SIZES.items():
        up[f"{name}.lora_a"], up[f"{name}.lora_b"] = 4 * 2 * num_in, 4 * 2 * num_out
    copies = 2 if method == "fedecider" and round == 2 else 1  # K directions come down
    clients = [{"client": client, "seconds": 1.0 + client, "loss": 0.5} for client in range(2)]
    if method == "fedecider" and round == 2:
        clients[0] |= {"norms": [0.5, 1.5], "cosine": [0.9, -0.1]}
        clients[1] |= {"norms": [2.0, 3.0], "cosine": [-0.2, 0.8]}
    return {
        "round": round,
        "score": 0.1 * round,
        "valid": {
            variant: [
                {"ndcg@10": 0.1 * round + 0.01 * client + (0.05 if variant == "fused" else 0.0)} for client in range(2)
            ]
            for variant in variants
        },
        "clients": clients,
        "traffic": [
            {
                "clients": [0, 1],
                "down": {key: copies * size for key, size in up.items()},
                "up": up,
                "header_down": 96,
                "header_up": 88,
            }
        ],
        "train_s": 3.0,
    }


def _write_positions(folder, reported):
    found = {"crime": [0, 11, 4, 2, 30, 7], "comics": [3, 0, 8, 1]}
    rows = []
    for label, shift in ((reported, 0), ("zero-shot student", 2)):
        for name, places in found.items():
            users = [f"{name} user {number}" for number in range(len(places))]
            position_U = torch.tensor([place + shift for place in reversed(places)])
            rows.append(UserPositions(name, users[::-1], "test", label, 2, position_U))
    write_per_user(folder.per_user, rows)
