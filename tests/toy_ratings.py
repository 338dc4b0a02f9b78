"""A small csv of the cross-device track, and its command."""

import csv
import importlib.util
import sys
from pathlib import Path

import torch

from fedecider.federation.streams import stream

REPOSITORY = Path(__file__).resolve().parents[1]
FAST = ["--local_epochs", "1", "--embedding_size", "4", "--num_threads", "1"]


def write_ratings(folder: Path) -> Path:
    """30 users over 130 items in two tastes: enough for 99 sampled candidates."""
    generator = stream(1, "csv")
    rows = []
    for user in range(30):
        taste = torch.randperm(65, generator=generator)[:8] * 2 + user % 2
        rows += [(f"u{user}", f"i{int(item):03d}", time) for time, item in enumerate(taste)]
    rows += [(f"x{item}", f"i{other:03d}", 0) for item in range(40) for other in range(item * 3, item * 3 + 10)]
    with (folder / "toy.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "time"])
        writer.writerows(rows)
    return folder


def options_of(ratings: Path) -> list[str]:
    return ["--dataset", "toy", "--source", "csv", "--raw", str(ratings), "--time_column", "time"]


def script(name: str):
    path = REPOSITORY / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    first = sys.path[0]
    spec.loader.exec_module(module)
    sys.path[0] = first
    return module
