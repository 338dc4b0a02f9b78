"""Settings of the cross-device track: options by method, and settings from mappings, words and output directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings
from fedecider.data.interactions import InteractionsConfig
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.running.damage import damage_names
from fedecider.running.options import Schema, field_names, from_plain, merged, nested, read_words
from fedecider.running.run_folder import RunFolder, check_output, read_run

COMMON = (
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


def schema_of(method: str) -> Schema:
    """The options of a run with this method; what is not given is what its paper sets.

    Raises:
        ValueError: the method is not known, or cannot be used.
    """
    entry = EMBEDDING_METHODS[method]
    privacy = {} if entry.guarantee else {"privacy": DevicePrivacyConfig}
    return Schema(
        {
            "run": EmbeddingRunConfig,
            "data": InteractionsConfig,
            "training": EmbeddingTraining,
            **privacy,
            "method": entry.config,
        },
        (*COMMON, *field_names(entry.config)[:OWN_SHOWN]),
        dict(entry.defaults),
        {"method": f"The federated method: {', '.join(EMBEDDING_METHODS)}."},
    )


def parse_settings(words: Sequence[str]) -> EmbeddingSettings:
    """Settings from the words of a command. Raises as `make_settings`."""
    given = read_words(words)
    return make_settings(given.options, given.config)


def make_settings(options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> EmbeddingSettings:
    """Settings of a run of the cross-device track from options and from the content of a file, over which they win.

    Raises:
        ValueError: an option of another track, or a setting that cannot be.
    """
    values = merged(config or {}, nested(options))
    blocks = schema_of(str(values.get("method", EmbeddingRunConfig.method))).build(values)
    settings = EmbeddingSettings(**{"privacy": DevicePrivacyConfig(), **blocks})
    if settings.run.output:
        check_output(Path(settings.run.output))  # before a large data set is read
    return settings


def settings_of_run(run: Path, data: str = "") -> EmbeddingSettings:
    """The settings in ``run.json`` of an output directory; ``data`` replaces the place of the raw files."""
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
            "privacy": DevicePrivacyConfig,
            "method": EMBEDDING_METHODS[config["run"]["method"]].config,
        }
        return EmbeddingSettings(
            **{name: from_plain(kind, blocks[name], f"{name} in {source}") for name, kind in classes.items()}
        )
