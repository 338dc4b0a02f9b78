"""Settings of the cross-silo track: its options by method, and settings from mappings, words and output directories."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedecider.cross_silo.settings import RunConfig, Settings
from fedecider.engine.command_line import read_command
from fedecider.federation.registry import LLM_METHODS, may_be_name, outside_methods
from fedecider.methods import METHODS
from fedecider.methods.config import METHOD_CONFIGS, TAKES_NO_MEAN, LocalTraining
from fedecider.models.config import ROLES
from fedecider.running.options import Schema, field_names, from_plain, merged, nested
from fedecider.running.settings_files import CONFIGS, load_config
from idgen.config import TrainConfig
from idgen.ranking_config import RankingConfig

COMMON = (
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
    "ensemble.kind",
    "pretrain.text_encoder",
    "num_eval_users",
)
"""What ``--help`` shows, with the first option of the method."""
OWN_SHOWN = 1
WITHOUT_A_MEAN = ("robust_mean", "secure_sum", "privacy.noise_on")
"""Options that are refused where the server of the method takes no mean over clients."""
DEMO = CONFIGS / "demo.yaml"
DRAWN = ("customer_share", "drawn")
"""What follows from --minutes."""
PRECISIONS = ("pretrain.train.precision", "distill.precision")
"""Those of the stages follow ``precision``: no configuration of ours had two formats."""


def schema_of(method: str) -> Schema:
    """The options of a run with this method.

    Raises:
        ValueError: the method is not known, or cannot be used.
    """
    methods = list(METHODS)
    if method not in methods:
        raise ValueError(f"got method {method!r}, expected one of the cross-silo track: {', '.join(sorted(methods))}")
    config, takes_mean = _of_method(method)
    if method in {name for one in (RunConfig, LocalTraining, RankingConfig, config) for name in field_names(one)}:
        raise ValueError(f"got a method with the name {method}, expected another name: an option is called so")
    return Schema(
        {"run": RunConfig, "training": LocalTraining, "ranking": RankingConfig, "method": config},
        (*COMMON, *field_names(config)[:OWN_SHOWN]),
        texts={"method": f"The federated method: {', '.join(methods)}."},
        hidden=(*DRAWN, *PRECISIONS, *(() if takes_mean else WITHOUT_A_MEAN)),
    )


def parse_settings(words: Sequence[str], description: str = "") -> Settings:
    """Settings from the words of a command, those of ``configs/demo.yaml`` below them where neither a configuration nor
    data are named.

    ``SystemExit`` where they ask for help. Raises as `make_settings`.
    """
    return read_command(words, description).settings(words)


def make_settings(options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Settings:
    """Settings of the cross-silo track from options and from the content of a file, over which they win.

    Without ``config`` and ``data`` the settings of ``configs/demo.yaml`` hold, which fit the embedded sample. A file
    may hold settings for single methods, under the methods' names; all of them are checked.

    Raises:
        ValueError: the method is not known, or a setting cannot be.
    """
    options = nested(options)
    start = load_config(DEMO) if config is None and not options.get("data") else dict(config or {})
    schema = schema_of(str(options.get("method", start.get("method", RunConfig.method))))
    names = {name for one in schema.classes.values() for name in field_names(one)}
    blocks = [name for name in METHODS if may_be_name(name) and name not in names]
    if prefixed := [name for name in options if name in blocks]:
        raise ValueError(
            f"got {prefixed[0]} as an option, expected those of the method without a prefix, such as alpha_init: "
            "blocks named after methods belong in a configuration file"
        )
    own = {name: _method_block(name, start.pop(name)) for name in blocks if name in start}
    method = str(options.get("method", start.get("method", RunConfig.method)))
    values = merged(own.get(method, {}), start, options)
    settings = _with_precision(Settings(**schema.build(values)))
    from fedecider.cross_silo.hyperparameter_selection import choices  # the models, which --help does without

    for choice in choices(settings):
        _check_output_rate(choice)
    return settings


def _of_method(name: str) -> tuple[type, bool]:
    """Settings of a method, and whether its server takes a mean; of built-in methods without importing a model.

    Raises:
        ValueError: a method from outside that cannot be used.
    """
    if name in METHOD_CONFIGS and name not in outside_methods(LLM_METHODS):
        return METHOD_CONFIGS[name], name not in TAKES_NO_MEAN
    return METHODS[name].config, METHODS[name].takes_mean


def _with_precision(settings: Settings) -> Settings:
    """The stages with the precision of the rounds, and ``auto`` as what it means on this machine, so that stages and
    runs are kept under it; and a word about bf16."""
    run, precision = settings.run, settings.training.precision
    given = zip(PRECISIONS, (run.pretrain.train.precision, run.distill.precision), strict=True)
    if others := [name for name, value in given if value != TrainConfig.precision]:
        raise ValueError(f"got {others[0]}, expected precision alone: it holds for all stages")
    if precision == "fp32":
        return settings
    import torch

    from idgen.precision import bf16_speedup, fastest, in_words

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    speedup = bf16_speedup(device_type)
    if precision == "auto":
        precision = fastest(device_type)
        _log(f"precision auto is {precision}: products of matrices are {in_words(speedup)} in bf16 than in fp32 here")
    elif speedup < 1:
        _log(f"warning: precision bf16 is {in_words(speedup)} than fp32 on this machine; set it to fp32 or auto")
    pretrain = replace(run.pretrain, train=replace(run.pretrain.train, precision=precision))
    run = replace(run, pretrain=pretrain, distill=replace(run.distill, precision=precision))
    return settings._replace(training=replace(settings.training, precision=precision), run=run)


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


def _method_block(name: str, block: Any) -> Any:
    """Checked settings of a method in a configuration file."""
    try:
        config, _ = _of_method(name)
    except ValueError:
        return block  # a package that is out of order is a matter of those who use its method
    from_plain(config, block, name)
    return block


def recorded_settings(run: Path, data: str = "") -> Settings:
    """The settings in ``run.json`` of an output directory, with what it took of several; ``data`` replaces the place of
    the prepared domains."""
    from fedecider.cross_silo.hyperparameter_selection import as_taken
    from fedecider.cross_silo.joining import as_trained
    from fedecider.models.folders import read_llm_run
    from fedecider.running.damage import damage_names
    from fedecider.running.run_folder import RunFolder

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
