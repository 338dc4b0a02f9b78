"""Trackers of accelerate: whether they are there, where they write, what they are told, and how they are closed.

Nothing leaves the machine unless the environment says so: every tracker writes below ``trackers/`` of the run folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers
from accelerate.utils import LoggerType

from fedecider.federation.record import plain, read_json, write_json
from fedecider.running.stages import content_key

PROJECT = "fedecider"
EXTRA = ("mlflow", "tensorboard", "trackio", "wandb")
"""What the extra ``track`` installs, and the tests run."""
KEPT = "runs.json"
"""Which runs of the trackers a run folder has; a resumed run goes on with them."""


def tracker_names(text: str) -> list[str]:
    """Names of trackers, separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_trackers(text: str) -> None:
    """Accelerate leaves out a tracker whose package is missing, and a run would end with nothing logged.

    Raises:
        ValueError: accelerate does not know a tracker, or its package is not installed; empty passes.
    """
    installed = sorted(str(LoggerType(tracker).value) for tracker in get_available_trackers())
    for name in tracker_names(text):
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"got tracker {name!r}, expected one or more of {known}, separated by commas, or none")
        if name not in installed:
            package = "'fedecider[track]'" if name in EXTRA else name.replace("_", "-")
            raise ValueError(
                f"got tracker {name}, whose package is not installed, expected one of those that are: "
                f"{', '.join(installed) or 'none'}. Run: pip install {package}"
            )


def open_trackers(accelerator: Accelerator, text: str, root: Path, settings: Mapping[str, Any]) -> None:
    """Start the trackers of ``text`` for the run in ``root``, or go on with those that it had, in the first process.

    ``settings``: nested plain values that a resumed run has too.

    Raises:
        ValueError: a tracker cannot be started, for instance since its server does not answer.
    """
    if not accelerator.is_main_process:
        return
    folder = root / "trackers"
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    kept = read_json(folder / KEPT) if (folder / KEPT).is_file() else {}
    names = tracker_names(text)
    accelerator.project_configuration.set_directories(str(folder / "tensorboard"))
    accelerator.log_with = filter_trackers(names, accelerator.logging_dir)
    own: dict[str, dict[str, Any]] = {}
    try:
        if "wandb" in names:
            kept.setdefault("wandb", uuid.uuid4().hex[:8])
            own["wandb"] = _wandb(folder, root.name, kept["wandb"])
        if "mlflow" in names:
            own["mlflow"] = _mlflow(folder, root.name, kept)
        if "trackio" in names:
            os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))  # read when trackio is imported
            own["trackio"] = {"name": root.name, "resume": "allow", "embed": False}
        accelerator.init_trackers(PROJECT, config=dict(flat(settings)), init_kwargs=own)
    except Exception as error:  # of whichever library
        accelerator.trackers.clear()  # those that did not start cannot be finished
        if is_new:
            shutil.rmtree(folder)
        raise ValueError(
            f"cannot start the trackers {text} ({type(error).__name__}: {error}), expected them to open a run. Look "
            "at what the environment says of them, or leave out --tracker"
        ) from error
    if "mlflow" in names:
        run = accelerator.get_tracker("mlflow", unwrap=True)
        kept["mlflow"] = {"run": run.info.run_id, "store": _mlflow_store()}
    write_json(folder / KEPT, kept)


def end_trackers(accelerator: Accelerator, failed: bool) -> None:
    """Close what is open and leave the process group; a run that failed is one in MLflow and W&B too."""
    for tracker in accelerator.trackers if failed else ():
        if tracker.name == "mlflow":
            import mlflow

            mlflow.end_run("FAILED")
        if tracker.name == "wandb":
            tracker.tracker.finish(exit_code=1)
    accelerator.end_training()
    accelerator.trackers.clear()


def metric_name(*parts: str) -> str:
    """``test``, ``fedavg (global)``, ``hit@10`` -> ``test/fedavg_global/hit_at_10``: what every tracker takes."""
    cleaned = (re.sub(r"[^\w.-]+", "_", part.replace("@", "_at_")).strip("_") for part in parts)
    return "/".join(part for part in cleaned if part)


def result_metrics(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """``test/ROW/CLIENT/METRIC`` with its mean, from ``metrics.json`` of either track.

    CLIENT is a domain, ``macro`` for their mean, or the data set where its users are scored together.
    """
    groups = {name: found["test"] for name, found in metrics.get("domains", {}).items()}
    groups |= {name: metrics[name]["test"] for name in ("macro",) if name in metrics}
    if not groups:
        groups = {metrics["dataset"]: metrics["test"]}
    for client, rows in groups.items():
        for row, values in rows.items():
            for metric, interval in values.items():
                yield metric_name("test", row, client, metric), interval["mean"]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``block.name`` with its value as a number, a truth value or a text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (int, float, str)) else json.dumps(plain(value))


def _wandb(folder: Path, name: str, run: str) -> dict[str, Any]:
    own: dict[str, Any] = {"name": name, "id": run, "resume": "allow"}
    if "WANDB_MODE" not in os.environ:
        own["mode"] = "offline"
    if "WANDB_DIR" not in os.environ:
        own["dir"] = str(folder)
    return own


def _mlflow(folder: Path, name: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    import mlflow

    own: dict[str, Any] = {"run_name": name}
    given = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(given or f"sqlite:///{(folder / 'mlflow.db').absolute()}")
    if not given:
        os.environ.pop("MLFLOW_TRACKING_URI", None)  # set by the line above, for every later run of this process
        own["logging_dir"] = str((folder / "mlflow").absolute())
    before = kept.get("mlflow", {})
    if before.get("store") == _mlflow_store():
        own["run_id"] = before["run"]
    return own


def _mlflow_store() -> str:
    """``own``, or a digest of where the environment points: an address may hold a password."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return content_key(uri) if uri else "own"
