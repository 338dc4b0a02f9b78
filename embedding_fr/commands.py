"""Settings of the cross-device track from a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings
from fedecider.data.interactions import InteractionsConfig
from fedecider.federation.privacy import PrivacyConfig
from fedecider.running.options import build_parser, field_names, from_plain, parse, peek
from fedecider.running.run_folder import RunFolder, check_output, damage_names, read_run

COMMON = (
    "help",
    "config",
    "method",
    "dataset",
    "source",
    "raw",
    "output",
    "num_rounds",
    "seed",
    "protocol",
    "learning_rate",
    "num_threads",
    "resume",
)
"""What ``--help`` shows, with the first options of the method."""
OWN_SHOWN = 10


def parse_embedding_settings(description: str, words: Sequence[str], method: str) -> EmbeddingSettings:
    """Settings of a run of the cross-device track; what is not given is what the method's paper sets.

    Raises:
        ValueError: an option of the cross-silo track, or a setting that cannot be.
    """
    return parse_settings_and(description, [*words, "--method", method])[0]


def parse_settings_and(description: str, words: Sequence[str], *beside: type) -> tuple[EmbeddingSettings, list[Any]]:
    """The same for the method that ``words`` name, with what they say of the dataclasses ``beside``."""
    method = peek(words, "method", EmbeddingRunConfig.method)
    foreign = [name for name in ("domains", "data", "lora_rank") if peek(words, name)]
    if foreign:
        raise ValueError(f"got {foreign[0]} with the method {method} of the cross-device track, expected --dataset")
    entry = EMBEDDING_METHODS[method]
    privacy = () if entry.guarantee else (PrivacyConfig,)
    classes = (*beside, EmbeddingRunConfig, InteractionsConfig, EmbeddingTraining, *privacy, entry.config)
    texts = {"method": f"The federated method: {', '.join(EMBEDDING_METHODS)}."}
    common = (*COMMON, *field_names(entry.config)[:OWN_SHOWN], *(name for one in beside for name in field_names(one)))
    parser = build_parser(description, *classes, common=common, texts=texts)
    parser.set_defaults(dict(entry.defaults))
    found = parse(parser, words, *classes)
    others, (run, data, training, *hidden, own) = found[: len(beside)], found[len(beside) :]
    if run.output:
        check_output(Path(run.output))  # before a large data set is read
    return EmbeddingSettings(run, data, training, hidden[0] if hidden else PrivacyConfig(), own), others


def settings_of_run(run: Path, data: str = "") -> EmbeddingSettings:
    """The settings in ``run.json`` of a run folder; ``data`` replaces the place of the raw files."""
    return recorded_settings(read_run(run)["config"], str(RunFolder(run).record), data)


def recorded_settings(config: Mapping[str, Any], source: str, data: str = "") -> EmbeddingSettings:
    """The settings in ``run.json``; ``data`` replaces the place of the raw files."""
    EMBEDDING_METHODS.check_recorded(config, source)
    with damage_names(Path(source)):
        blocks = {**config, "run": {**config["run"], "resume": False, "output": "", "tracker": ""}}
        blocks["data"] = {**config["data"], **({"raw": data} if data else {})}
        classes = {
            "run": EmbeddingRunConfig,
            "data": InteractionsConfig,
            "training": EmbeddingTraining,
            "privacy": PrivacyConfig,
            "method": EMBEDDING_METHODS[config["run"]["method"]].config,
        }
        return EmbeddingSettings(
            **{name: from_plain(kind, blocks[name], f"{name} in {source}") for name, kind in classes.items()}
        )
