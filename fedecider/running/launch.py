"""Processes, threads, devices and trackers of a run.

Nothing leaves the machine unless the environment says so: every tracker writes below ``trackers/`` of the run folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from fedecider.federation.processes import Placement, Processes
from fedecider.federation.record import Recorder, plain, read_json, upload_notes, write_json
from fedecider.federation.state import keep_newest
from fedecider.running.progress import log_line
from fedecider.running.run_folder import (
    RunFolder,
    check_run,
    content_key,
    default_name,
    identity,
    opened_run,
    provenance,
)

# Trackers of accelerate: whether they are there, where they write, what they are told, and how they are closed.

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
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers  # it takes a second to import
    from accelerate.utils import LoggerType

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


def open_trackers(accelerator: Any, text: str, root: Path, settings: Mapping[str, Any]) -> None:
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
    from accelerate.tracking import filter_trackers

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


def end_trackers(accelerator: Any, failed: bool) -> None:
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


# Processes, threads and devices of a run, as ``accelerate launch`` or ``torchrun`` set them up.

Kept = TypeVar("Kept")


class Launch(NamedTuple):
    """Where this process runs; as a context it finishes trackers and leaves the process group at the end.

    A process that ends inside its group may be aborted by the group's threads.
    """

    accelerator: Any
    """An `accelerate.Accelerator`, which a command imports when it has read its options."""
    processes: Processes
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.processes.index == 0

    @property
    def deepspeed(self) -> Any:
        """The accelerator, or None unless it was launched with a DeepSpeed config."""
        return self.accelerator if self.accelerator.state.deepspeed_plugin is not None else None

    def placed(self, placement: Placement) -> Launch:
        """The same processes, which share out ``placement``."""
        return self._replace(processes=replace(self.processes, placement=placement))

    def from_main(self, value: Kept) -> Kept:
        """What the first process gives, in every process; Python objects of a moderate size."""
        if self.processes.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        box = [value]
        broadcast_object_list(box)
        return box[0]

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        end_trackers(self.accelerator, failed=kind is not None)


def start(num_threads: int = 0, trackers: str = "") -> Launch:
    """Join the process group, if there is one, and say when fewer processes run than were asked for.

    Args:
        num_threads: CPU threads per process; 0 leaves torch's choice. Sums are split over threads, so bit-equal
            results need equal thread counts.
        trackers: names of accelerate trackers such as ``tensorboard``, separated by commas; empty for none. They are
            opened when the run folder is (`fedecider.running.launch`).

    Raises:
        ValueError: accelerate does not know a tracker, or its package is not installed; DeepSpeed is asked for and
            not installed, in more than one process, or would train in another format than fp32.
    """
    check_trackers(trackers)
    sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if sharded:
        check_deepspeed(int(os.environ.get("WORLD_SIZE", "1")))
    if num_threads > 0:
        torch.set_num_threads(num_threads)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available() and not sharded,  # accelerate drops DeepSpeed where the CPU is asked for
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],  # other processes wait for pre-training
    )
    if sharded:
        plugin, precision = accelerator.state.deepspeed_plugin, accelerator.mixed_precision
        plugin.zero3_init_flag, plugin.dschf = False, None  # else transformers would load every model in parts
        if precision != "no":
            raise ValueError(
                f"got mixed_precision {precision} with DeepSpeed, expected no: adapters stay in fp32. Set "
                "--mixed_precision no for the launcher, and --precision bf16 for autocast of the frozen base"
            )
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    asked = requested_processes(_ancestor_command_lines())
    if processes.index == 0 and asked is not None and asked != processes.count:
        print(
            f"warning: --num_processes {asked} was asked for, but {processes.count} process runs: `accelerate launch "
            f"--cpu` starts only one. For {asked} CPU processes use: torchrun --nproc_per_node {asked} "
            f"scripts/federate.py ... (results are the same, only slower)",
            file=sys.stderr,
        )
    device = accelerator.device if torch.cuda.is_available() else torch.device("cpu")
    return Launch(accelerator, processes, device)


def check_deepspeed(num_processes: int) -> None:
    """``ValueError`` when DeepSpeed is not installed, or for more processes than the one that a client trains in."""
    if find_spec("deepspeed") is None:
        raise ValueError(
            "got --use_deepspeed, but deepspeed is not installed, expected it to be there. Run: pip install '.[gpu]'"
        )
    if num_processes != 1:
        raise ValueError(
            f"got {num_processes} processes with DeepSpeed, expected 1: processes share out clients, not the training "
            "of one, and on CPUs accelerate would stop at DeepSpeed's check of the batch size. Set --num_processes 1, "
            "or leave out --use_deepspeed"
        )


def requested_processes(command_lines: list[list[str]]) -> int | None:
    """The number after ``--num_processes`` / ``--num-processes`` in the first ``accelerate launch`` line, or None."""
    for words in command_lines:
        if not any("accelerate" in word for word in words[:3]) or "launch" not in words:
            continue
        for position, word in enumerate(words):
            name, _, value = word.replace("-", "_").partition("=")
            if name == "__num_processes":
                value = value or (words[position + 1] if position + 1 < len(words) else "")
                return int(value) if value.isdigit() else None
    return None


def _ancestor_command_lines() -> list[list[str]]:
    try:
        return [parent.cmdline() for parent in psutil.Process().parents()[:3]]
    except psutil.Error:  # another user's process, or it ended meanwhile
        return []


# What both tracks do around their rounds: open the run folder together, log to trackers, tell how a round went.


def checked_run(
    config: dict[str, Any], data: dict[str, str], names: Sequence[str], **facts: Any
) -> tuple[Path, dict[str, Any]]:
    """Folder and record of a run with these settings on these data (name -> hash); refused when they cannot be.

    ``names`` are for the folder's name, where the settings give none; ``facts`` are added to the record. Nothing is
    written. Raises as :func:`check_run`.
    """
    run = config["run"]
    record = {"config": config, "protocol": run["protocol"], "data": data, **facts, **provenance()}
    root = Path(run["output"]) if run["output"] else Path("runs") / default_name(run["method"], list(names))
    check_run(root, record, run["resume"])
    return root, record


@contextmanager
def opened_together(root: Path, record: dict[str, Any], launch: Launch) -> Iterator[RunFolder]:
    """:func:`opened_run` by the main process for all: nobody goes on before the folder is there, or leaves first.

    Every process must have checked the folder before, or a slow one would find what the first one opens. A run that
    comes to its end keeps its newest checkpoint.
    """
    launch.accelerator.wait_for_everyone()
    with opened_run(root, record, record["config"]["run"]["resume"], writes=launch.is_main) as folder:
        launch.accelerator.wait_for_everyone()
        yield folder
        launch.accelerator.wait_for_everyone()
        if launch.is_main:
            keep_newest(folder.checkpoints)


def round_recorder(
    folder: RunFolder, launch: Launch, trackers: str, record: dict[str, Any], names: Sequence[str] = ()
) -> Recorder:
    """Records go to ``rounds.jsonl``, and validation metrics to the ``trackers``, where some are named.

    ``record`` is that of the run: its settings and the hashes of its data are what trackers file it under. ``names``:
    of the clients that are scored apart; empty where all are scored together.
    """
    if trackers:
        settings = {**identity(record["config"]), "data_hash": record["data"]}
        open_trackers(launch.accelerator, trackers, folder.root, settings)

    def track(record: dict, step: int) -> None:
        launch.accelerator.log(dict(valid_metrics(record, names)), step=step)

    return Recorder(folder.rounds if launch.is_main else None, track if trackers else None)


def track_results(folder: RunFolder, launch: Launch, step: int) -> None:
    """Log every row of ``metrics.json`` to the open trackers, at ``step``, the number of the last round."""
    if launch.is_main and launch.accelerator.trackers:
        launch.accelerator.log(dict(result_metrics(read_json(folder.metrics))), step=step)


def valid_metrics(record: dict, names: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """``valid/VARIANT/CLIENT/METRIC`` and its value; without the client where all are scored together."""
    for variant, groups in record["valid"].items():
        for name, metrics in zip(names or [""], groups, strict=True):
            for metric, value in metrics.items():
                yield metric_name("valid", variant, name, metric), value


SHOWN_ROUNDS, QUIET_S = 5, 600.0
"""So many rounds of a run are printed, that its answer stays on the screen; all of them are in ``rounds.jsonl``."""


def round_logger(launch: Launch, num_rounds: int, names: Sequence[str] = ()) -> Callable[[dict], None]:
    """Print rounds as they end, once however many processes there are: about `SHOWN_ROUNDS` of a run, the first and the
    last one among them, and any after ten quiet minutes. ``names`` of the clients, if they have."""
    last = -math.inf

    def log(record: dict) -> None:
        nonlocal last
        number, now = record["round"], time.monotonic()
        due = number in (1, num_rounds) or number % math.ceil(num_rounds / SHOWN_ROUNDS) == 0
        texts = [round_text(record, num_rounds)] if due or now - last >= QUIET_S else []
        last = now if texts else last
        for text in [*texts, *upload_notes([record], names)] if launch.is_main else []:
            log_line(text)

    return log


def round_text(record: dict, num_rounds: int) -> str:
    """Validation ndcg@10 of every variant, if the round was validated, losses and seconds."""
    scores = ", ".join(f"{variant} {_mean(groups):.4f}" for variant, groups in record["valid"].items())
    valid = f"valid ndcg@10 {scores}" if scores else "not validated"
    losses = [f"{client['loss']:.4g}" for client in record["clients"] if client.get("loss") is not None]
    parts = [
        f"round {record['round']}/{num_rounds}: {valid}",
        *([f"loss {' '.join(losses)}"] if losses else []),
        f"train {record['wall_s']:.2f} s, evaluate {record['evaluate_s']:.2f} s",
    ]
    return " | ".join(parts)


def _mean(groups: Sequence[dict[str, float]]) -> float:
    return sum(group["ndcg@10"] for group in groups) / len(groups)
