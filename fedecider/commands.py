"""What the scripts of the pipeline share: which options there are, and settings from a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from embedding_fr.config import TrainingConfig as EmbeddingTraining
from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from fedecider.cli import REPOSITORY, build_parser, from_plain, load_yaml, parse, peek
from fedecider.config import RunConfig
from fedecider.data.interactions import InteractionsConfig
from fedecider.embedding import EmbeddingRunConfig, EmbeddingSettings
from fedecider.federate import Settings
from fedecider.federation.privacy import PrivacyConfig
from fedecider.methods import METHODS
from fedecider.methods.recommender import RankingConfig, TrainingConfig
from fedecider.run_folder import read_run

DEMO = REPOSITORY / "configs" / "demo.yaml"


def parse_run(description: str, argv: Sequence[str] | None) -> Settings | EmbeddingSettings:
    """Settings of a federated run; the method decides the line, and with it which options there are."""
    words = sys.argv[1:] if argv is None else list(argv)
    method = peek(words, "method", RunConfig.method)
    if method in EMBEDDING_METHODS:
        return parse_embedding_settings(description, words, method)
    if method in METHODS and peek(words, "dataset"):
        raise ValueError(f"got dataset with the method {method} of the LLM line, expected --domains and --data")
    return parse_settings(description, words)


def parse_settings(description: str, argv: Sequence[str] | None) -> Settings:
    """Settings of the LLM line; the options of the chosen method join the common ones.

    Without ``--config`` and ``--data`` the settings of ``configs/demo.yaml`` hold, which fit the embedded sample. A
    config file may hold settings for one method only, under the method's name; all of them are checked.

    Raises:
        ValueError: the method is not known.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    method = peek(words, "method", RunConfig.method)
    if method not in METHODS:
        raise ValueError(
            f"got method {method!r}, expected one of {', '.join(sorted(METHODS))} (LLM line) or "
            f"{', '.join(sorted(EMBEDDING_METHODS))} (embedding line)"
        )
    prefixed = [word for word in words if word.partition("=")[0].partition(".")[0] in {f"--{name}" for name in METHODS}]
    if prefixed:
        raise ValueError(
            f"got {prefixed[0]}, expected the option of the chosen method without a prefix, such as --alpha_init 0.2: "
            "blocks named after methods belong in a config file"
        )
    demo = not peek(words, "config") and not peek(words, "data")
    classes = (RunConfig, TrainingConfig, RankingConfig, METHODS[method].config)
    parser = build_parser(description, *classes, default_config=DEMO if demo else None)
    blocks = _method_blocks(DEMO if demo else Path(peek(words, "config")))
    for name in METHODS:
        parser.add_argument(f"--{name}", type=dict, default={}, help=f"in a config file: options of {name} only")
    parser.set_defaults(blocks.get(method, {}))
    return Settings(*parse(parser, words, *classes))


def parse_embedding_settings(description: str, words: Sequence[str], method: str) -> EmbeddingSettings:
    """Settings of a run of the embedding line; what is not given is what the method's paper sets.

    Raises:
        ValueError: an option of the LLM line.
    """
    foreign = [name for name in ("domains", "data", "lora_rank") if peek(words, name)]
    if foreign:
        raise ValueError(f"got {foreign[0]} with the method {method} of the embedding line, expected --dataset")
    entry = EMBEDDING_METHODS[method]
    privacy = () if entry.budget else (PrivacyConfig,)
    classes = (EmbeddingRunConfig, InteractionsConfig, EmbeddingTraining, *privacy, entry.config)
    parser = build_parser(description, *classes)
    parser.set_defaults(dict(entry.defaults))
    run, data, training, *common, own = parse(parser, words, *classes)
    return EmbeddingSettings(run, data, training, common[0] if common else PrivacyConfig(), own)


def _method_blocks(config: Path) -> dict[str, dict]:
    """Checked method settings of a config file, by method."""
    content = load_yaml(config) if config.is_file() else None
    blocks = {name: content[name] for name in METHODS if name in content} if isinstance(content, dict) else {}
    for name, block in blocks.items():
        from_plain(METHODS[name].config, block)
    return blocks


def recorded_settings(run: Path, data: str = "") -> Settings:
    """The settings in ``run.json`` of a run folder; ``data`` replaces the place of the prepared domains."""
    config = read_run(run)["config"]
    config["run"] = {**config["run"], "resume": False, **({"data": data} if data else {})}
    classes = {
        "run": RunConfig,
        "training": TrainingConfig,
        "ranking": RankingConfig,
        "method": METHODS[config["run"]["method"]].config,
    }
    return Settings(**{name: from_plain(config_class, config[name]) for name, config_class in classes.items()})
