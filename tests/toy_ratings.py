"""Small ratings for the cross-device track, and its command."""

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
    (folder / "ratings.dat").write_text("".join(f"{user},{item},5,{time}\n" for user, item, time in rows))
    return folder


def options_of(ratings: Path) -> list[str]:
    return ["--dataset", "toy", "--source", "amazon_ratings", "--raw", str(ratings)]


def script(name: str):
    path = REPOSITORY / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    first = sys.path[0]
    spec.loader.exec_module(module)
    sys.path[0] = first
    return module
