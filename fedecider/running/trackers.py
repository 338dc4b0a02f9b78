"""Trackers of accelerate, such as tensorboard, MLflow or W&B: what a run tells them, and where they write.

Nothing leaves the machine unless the environment says so: every tracker writes below ``trackers/`` of the output
directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedecider.federation.record import plain

PROJECT = "fedecider"


def names_in(text: str) -> list[str]:
    """Names of trackers, separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check(text: str) -> None:
    """Accelerate leaves out a tracker whose package is missing, and a run would end with nothing logged.

    Raises:
        ValueError: accelerate does not know a tracker, or its package is not installed; empty passes.
    """
    if not text:
        return
    from accelerate.tracking import get_available_trackers  # it takes a second to import
    from accelerate.utils import LoggerType

    installed = sorted(str(LoggerType(tracker).value) for tracker in get_available_trackers())
    for name in names_in(text):
        if name not in installed:
            raise ValueError(
                f"got tracker {name!r}, expected one or more of those that are installed, separated by commas: "
                f"{', '.join(installed) or 'none'}. Run: pip install 'fedecider[track]'"
            )


def open_all(accelerator: Any, text: str, root: Path, settings: Mapping[str, Any]) -> None:
    """Start the trackers of ``text`` for the run in ``root``, in the first process; ``settings`` are nested values.

    Raises:
        ValueError: a tracker cannot be started, for instance since its server does not answer.
    """
    if not accelerator.is_main_process:
        return
    from accelerate.tracking import filter_trackers

    folder = (root / "trackers").absolute()
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    accelerator.project_configuration.set_directories(str(folder / "tensorboard"))
    try:
        accelerator.log_with = filter_trackers(names_in(text), accelerator.logging_dir)
        own = {name: _options(name, folder, root.name) for name in names_in(text)}
        accelerator.init_trackers(PROJECT, dict(flat(settings)), own)
    except Exception as error:  # of whichever library
        accelerator.trackers.clear()  # those that did not start cannot be finished
        if is_new:
            shutil.rmtree(folder)
        raise ValueError(
            f"cannot start the trackers {text} ({type(error).__name__}: {error}), expected them to open a run. Look "
            "at what the environment says of them, or leave out --tracker"
        ) from error


def _options(name: str, folder: Path, run: str) -> dict[str, Any]:
    """What a tracker is opened with; where the environment says where it writes, that holds."""
    if name == "wandb":
        places = {"WANDB_MODE": ("mode", "offline"), "WANDB_DIR": ("dir", str(folder))}
        return {"name": run, **dict(option for variable, option in places.items() if variable not in os.environ)}
    if name == "trackio":
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
        return {"name": run, "embed": False}
    if name == "mlflow":
        import mlflow

        given = os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(given or f"sqlite:///{folder / 'mlflow.db'}")
        if given:
            return {"run_name": run}
        os.environ.pop("MLFLOW_TRACKING_URI", None)  # set above, for every later run of this process
        return {"run_name": run, "logging_dir": str(folder / "mlflow")}
    return {}


def end(accelerator: Any) -> None:
    """Close what is open and leave the process group."""
    accelerator.end_training()
    accelerator.trackers.clear()


def metric_name(*parts: str) -> str:
    """``test``, ``fedavg (global)``, ``hit@10`` -> ``test/fedavg_global/hit_at_10``: what every tracker takes."""
    cleaned = (re.sub(r"[^\w.-]+", "_", part.replace("@", "_at_")).strip("_") for part in parts)
    return "/".join(part for part in cleaned if part)


def valid_metrics(record: dict, names: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """``valid/VARIANT/CLIENT/METRIC`` and its value; without the client where all are scored together."""
    for variant, groups in record["valid"].items():
        for name, metrics in zip(names or [""], groups, strict=True):
            for metric, value in metrics.items():
                yield metric_name("valid", variant, name, metric), value


def result_metrics(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """``test/ENTRY/CLIENT/METRIC`` with its mean, from ``metrics.json`` of any track.

    CLIENT is a domain, ``macro`` for their mean, or the data set where its users are scored together.
    """
    groups = {name: values["test"] for name, values in metrics.get("domains", {}).items()}
    groups |= {name: metrics[name]["test"] for name in ("macro",) if name in metrics}
    for client, entries in (groups or {metrics["dataset"]: metrics["test"]}).items():
        for entry, values in entries.items():
            for metric, interval in values.items():
                yield metric_name("test", entry, client, metric), interval["mean"]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``block.name`` with its value as a number, a truth value or a text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (int, float, str)) else json.dumps(plain(value))
