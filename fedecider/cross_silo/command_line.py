"""What the scripts of the pipeline share: which options there are, and settings from a command line."""

from __future__ import annotations

import functools
import os
import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedecider.cross_silo.settings import IDS_RENAMED, RunConfig, Settings
from fedecider.federation.registry import LLM_METHODS, may_be_name, outside_methods
from fedecider.methods import METHODS
from fedecider.methods.config import METHOD_CONFIGS, TAKES_NO_MEAN, LocalTraining
from fedecider.models.config import ROLES
from fedecider.running.options import (
    CONFIGS,
    build_parser,
    field_names,
    from_plain,
    load_yaml,
    parse,
    peek,
    settings_file,
)
from idgen.ranking_config import RankingConfig

COMMON = (
    "help",
    "config",
    "method",
    "domains",
    "data",
    "output",
    "resume",
    "seed",
    "num_rounds",
    "local_epochs",
    "learning_rate",
    "batch_size",
    "precision",
    "lora_rank",
    "lora_targets",
    "hybrid.kind",
    "pretrain.text_encoder",
    "num_eval_users",
)
"""What ``--help`` shows, with the first option of the method."""
OWN_SHOWN = 1
WITHOUT_A_MEAN = ("robust_mean", "secure_sum", "privacy.noise_on")
"""Options that are refused where the server of the method takes no mean over clients."""
DEMO = CONFIGS / "demo.yaml"


def parse_settings(description: str, argv: Sequence[str] | None) -> Settings:
    """Settings of the cross-silo track; the options of the chosen method join the common ones.

    Without ``--config`` and ``--data`` the settings of ``configs/demo.yaml`` hold, which fit the embedded
    sample. A config file may hold settings for one method only, under the method's name; all of them are checked.

    Raises:
        ValueError: the method is not known, or a setting cannot be.
    """
    return parse_settings_and(description, argv)[0]


def parse_settings_and(description: str, argv: Sequence[str] | None, *beside: type) -> tuple[Settings, list[Any]]:
    """The same, with what the same command line says of the dataclasses ``beside``."""
    words = sys.argv[1:] if argv is None else list(argv)
    method = peek(words, "method", RunConfig.method)
    methods = list(METHODS)
    if method not in methods:
        raise ValueError(f"got method {method!r}, expected one of the cross-silo track: {', '.join(sorted(methods))}")
    config, takes_mean = _of_method(method)
    classes = (*beside, RunConfig, LocalTraining, RankingConfig, config)
    options = {field.name for one in classes for field in fields(one)}
    if method in options:
        raise ValueError(f"got a method with the name {method}, expected another name: an option is called so")
    # who has another name is refused when asked for
    blocks_of = [name for name in methods if may_be_name(name) and name not in options]
    starts = {f"--{name}" for name in blocks_of}
    prefixed = [word for word in words if word.partition("=")[0].partition(".")[0] in starts]
    if prefixed:
        raise ValueError(
            f"got {prefixed[0]}, expected the option of the chosen method without a prefix, such as --alpha_init 0.2: "
            "blocks named after methods belong in a config file"
        )
    demo = not peek(words, "config") and not peek(words, "data")
    texts = {"method": f"The federated method: {', '.join(methods)}."}
    default = DEMO if demo else None
    own = field_names(config)[:OWN_SHOWN]
    common = (*COMMON, *own, *(name for one in beside for name in field_names(one)))
    refused = () if takes_mean else WITHOUT_A_MEAN
    parser = build_parser(description, *classes, default_config=default, common=common, texts=texts, refused=refused)
    blocks = _method_blocks(DEMO if demo else Path(peek(words, "config")), blocks_of)
    for name in blocks_of:
        parser.add_argument(f"--{name}", type=dict, default={}, help=SUPPRESS)
    parser.set_defaults(blocks.get(method, {}))
    try:
        found = parse(parser, words, *classes)
    except ValueError as error:
        if "pretrain.ids" in str(error) and "phrases" in str(error):
            raise ValueError(IDS_RENAMED) from error
        raise
    from fedecider.cross_silo.hyperparameter_selection import choices  # the models, which --help does without

    settings, others = _with_precision(Settings(*found[len(beside) :])), found[: len(beside)]
    for one in choices(settings):
        _check_output_rate(one)
    if settings.run.method != method:
        raise ValueError(
            f"got method {settings.run.method} from a file after --method {method}, expected --config before --method: "
            "the later one wins"
        )
    return settings, others


def _of_method(name: str) -> tuple[type, bool]:
    """Settings of a method, and whether its server takes a mean; of built-in methods without importing a model.

    Raises:
        ValueError: a method from outside that cannot be used.
    """
    if name in METHOD_CONFIGS and name not in outside_methods(LLM_METHODS):
        return METHOD_CONFIGS[name], name not in TAKES_NO_MEAN
    return METHODS[name].config, METHODS[name].takes_mean


def _with_precision(settings: Settings) -> Settings:
    """``auto`` as what it means on this machine, so that stages and runs are kept under it; and a word about bf16."""
    import torch

    from idgen.precision import bf16_speedup, fastest, in_words

    training, run = settings.training, settings.run
    asked = {training.precision, run.distill.precision, run.pretrain.train.precision}
    if asked == {"fp32"}:
        return settings
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    chosen, speedup = fastest(device_type), bf16_speedup(device_type)
    words = in_words(speedup)
    if "auto" in asked:
        _log(f"precision auto is {chosen}: products of matrices are {words} in bf16 than in fp32 here")
    if "bf16" in asked and speedup < 1:
        _log(f"warning: precision bf16 is {words} than fp32 on this machine; set it to fp32 or auto")

    def with_precision(config: Any) -> Any:
        return replace(config, precision=chosen) if config.precision == "auto" else config

    pretrain = replace(run.pretrain, train=with_precision(run.pretrain.train))
    run = replace(run, pretrain=pretrain, distill=with_precision(run.distill))
    return settings._replace(training=with_precision(training), run=run)


@functools.cache
def _log(text: str) -> None:
    """On stderr, by the first process, once."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def _check_output_rate(settings: Settings) -> None:
    targets, output = settings.run.lora_settings.targets, ROLES["output"]
    if settings.training.output_lr_multiplier != 1.0 and not {"output", "table", *output} & set(targets):
        raise ValueError(
            f"got output_lr_multiplier {settings.training.output_lr_multiplier} with lora_targets "
            f"{','.join(targets)}, expected output "
            "or table among them: no other adapter has that rate. Add one to lora_targets"
        )


def _method_blocks(config: Path, methods: Sequence[str]) -> dict[str, dict]:
    """Checked settings of these methods in a config file, by method."""
    content = load_yaml(config) if settings_file(config).is_file() else None
    blocks = {name: content[name] for name in methods if name in content} if isinstance(content, dict) else {}
    for name, block in blocks.items():
        try:
            settings, _ = _of_method(name)
        except ValueError:
            continue  # a package that is out of order is told to those who ask for its method
        from_plain(settings, block, f"{name} in {config}")
    return blocks


def recorded_settings(run: Path, data: str = "") -> Settings:
    """The settings in ``run.json`` of a run folder, with what it took of several; ``data`` replaces the place of the
    prepared domains."""
    from fedecider.cross_silo.hyperparameter_selection import as_taken
    from fedecider.cross_silo.joining import as_trained
    from fedecider.models.folders import read_llm_run
    from fedecider.running.run_folder import RunFolder, damage_names

    path, record = RunFolder(run).record, read_llm_run(run)
    config = record["config"]
    METHODS.check_recorded(config, str(path))
    with damage_names(path):
        config["run"] = {**config["run"], "resume": False, **({"data": data} if data else {})}
        settings = settings_from_plain(config, str(path))
    taken = RunFolder(run).selection
    with damage_names(taken):
        taken_settings = as_taken(settings, RunFolder(run))
    with damage_names(path):
        return as_trained(taken_settings, record.get("overlap", {}).get("nothing", False))


def settings_from_plain(config: Mapping[str, Any], source: str) -> Settings:
    """Checked settings from what `Settings.as_record` gave; ``source`` is named where they are wrong."""
    classes = {
        "run": RunConfig,
        "training": LocalTraining,
        "ranking": RankingConfig,
        "method": _of_method(config["run"]["method"])[0],
    }
    blocks = {name: config[name] for name in classes}
    return Settings(**{name: from_plain(classes[name], block, f"{name} in {source}") for name, block in blocks.items()})
