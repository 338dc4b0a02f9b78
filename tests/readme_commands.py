"""The commands of the documents: found in their ```bash blocks, and the toy world in which those of README.md run."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TINY: dict[str, Any] = {"num_rounds": 1, "local_epochs": 1, "num_eval_users": 10, "num_threads": 1}
TINY_PRETRAIN: dict[str, Any] = {
    "backbone": {"d_model": 16, "num_layers": 2},
    "train": {"max_steps": 5},
}
SHORT: dict[str, list[str]] = {
    "prepare_data": ["--users_per_domain", "40", "--k_core", "0"],
    "leaderboard": ["--methods", "fedmf", "--seeds", "1", "--tune", "1", "--num_rounds", "1"],
    "compare": ["--seeds", "1", "--tune", "1"],
}
"""What makes a command short where the shrunk configs do not."""


def commands(document: Path) -> list[list[str]]:
    """The words of every command, in order; continued lines are joined, comments left out."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(encoding="utf-8"), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(words)
    return found


def script_call(words: list[str]) -> tuple[str, list[str]] | None:
    """(script, its words) of a command that starts one of our scripts, whatever launches it."""
    for place, word in enumerate(words):
        match = re.fullmatch(r"scripts/(\w+)\.py", word)
        if match:
            return match[1], words[place + 1 :]
    return None


def short(script: str, words: list[str]) -> list[str]:
    """The words with options after them that make the call short; later options win."""
    if script == "federate" and "--dataset" in words:
        return [*words, "--num_rounds", "1", "--local_epochs", "1", "--output", "runs/embedding"]
    if script == "federate" and "--config" not in words:
        words = ["--config", "configs/demo.yaml", *words]
    return [*words, *SHORT.get(script, [])]


def toy_world(folder: Path) -> None:
    """The configs, made tiny, and every data set that README.md names, as small files of the real formats."""
    files = [path for place in ("configs", "benchmarks/configs") for path in (REPOSITORY / place).rglob("*.yaml")]
    for path in sorted(files):
        target = folder / path.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(_shrunk(yaml.safe_load(path.read_text())), sort_keys=False))
    domains = list(sample_domains(["crime", "comics", "children"], 0).values())
    renamed = dict(zip(("movies_tv", "cds_vinyl", "video_games"), domains, strict=True))
    save_domains(
        {name: replace(domain, name=name) for name, domain in renamed.items()}, folder / "data/amazon_small_pool"
    )
    for stem, domain in zip(("Beauty", "Clothing_Shoes_and_Jewelry"), domains, strict=False):
        events = [("", domain.clients), ("p", domain.public)]
        reviews = (
            {"reviewerID": mark + user, "asin": domain.item_keys[item], "overall": 5.0, "unixReviewTime": 1 + place}
            for mark, part in events
            for user, sequence in zip(part.users, part.sequences, strict=True)
            for place, item in enumerate(sequence)
        )
        items = ({"asin": key, "title": title} for key, title in zip(domain.item_keys, domain.titles, strict=True))
        _write_lines(folder / "raw/amazon" / f"reviews_{stem}_5.json", map(json.dumps, reviews))
        _write_lines(folder / "raw/amazon" / f"meta_{stem}.json", map(json.dumps, items))
    movies = [f"{item}|Film {item} (1990)|01-Jan-1990||http://x|{'|'.join('0' * 19)}" for item in range(1, 131)]
    ratings = [
        f"{user}\t{1 + (7 * user + 3 * place) % 130}\t4\t{880000000 + place}"
        for user in range(1, 31)
        for place in range(12)
    ]
    _write_lines(folder / "shared/movielens/ml-100k/u.item", iter(movies))
    _write_lines(folder / "shared/movielens/ml-100k/u.data", iter(ratings))


def _shrunk(content: dict[str, Any]) -> dict[str, Any]:
    if "rows" in content:  # a table of methods: few rows
        kept = dict(list(content["rows"].items())[:2])
        return {**content, "rows": kept, "against": list(kept)[:1]}
    pretrain = content["pretrain"]
    for block, values in TINY_PRETRAIN.items():
        pretrain = {**pretrain, block: {**pretrain.get(block, {}), **values}}
    rank = min(content.get("lora_rank", 8), TINY_PRETRAIN["backbone"]["d_model"])
    return {**content, **TINY, "lora_rank": rank, "pretrain": pretrain}


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
