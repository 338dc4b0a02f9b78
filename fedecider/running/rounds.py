"""What every track does around its rounds: open the output directory, log to trackers, tell how a round went."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedecider.federation.record import Recorder, read_json, upload_notes
from fedecider.federation.state import keep_newest
from fedecider.running import trackers
from fedecider.running.launch import Launch
from fedecider.running.progress import log_line
from fedecider.running.run_folder import (
    RunFolder,
    check_run,
    default_name,
    identity,
    opened_run,
    provenance,
)


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
    folder: RunFolder, launch: Launch, tracker: str, record: dict[str, Any], names: Sequence[str] = ()
) -> Recorder:
    """Records go to ``rounds.jsonl``, and validation metrics to the trackers, where some are named.

    ``record`` is that of the run: its settings and the hashes of its data are what trackers file it under. ``names``:
    of the clients that are scored apart; empty where all are scored together.
    """
    if tracker:
        settings = {**identity(record["config"]), "data_hash": record["data"]}
        trackers.open_all(launch.accelerator, tracker, folder.root, settings)

    def track(record: dict, step: int) -> None:
        launch.accelerator.log(dict(trackers.valid_metrics(record, names)), step=step)

    return Recorder(folder.rounds if launch.is_main else None, track if tracker else None)


def track_results(folder: RunFolder, launch: Launch, step: int) -> None:
    """Log every row of ``metrics.json`` to the open trackers, at ``step``, the number of the last round."""
    if launch.is_main and launch.accelerator.trackers:
        launch.accelerator.log(dict(trackers.result_metrics(read_json(folder.metrics))), step=step)


QUIET_S = 600.0


def round_logger(launch: Launch, num_rounds: int, names: Sequence[str] = ()) -> Callable[[dict], None]:
    """Print rounds as they end, once however many processes there are: the first and the last one, so that the answer
    stays on the screen, and any after ten quiet minutes. ``names`` of the clients, if they have."""
    last = -math.inf

    def log(record: dict) -> None:
        nonlocal last
        number, now = record["round"], time.monotonic()
        due = number in (1, num_rounds) or now - last >= QUIET_S
        texts = [round_text(record, num_rounds)] if due else []
        last = now if texts else last
        for text in [*texts, *upload_notes([record], names)] if launch.is_main else []:
            log_line(text)

    return log


def round_text(record: dict, num_rounds: int) -> str:
    """Validation ndcg@10 of the first variant, of 100, if the round was validated, mean training loss and seconds."""
    first = next(iter(record["valid"].values()), None)
    valid = "not validated" if first is None else f"validation ndcg@10 {100 * _mean(first):.2f}"
    losses = [client["loss"] for client in record["clients"] if client.get("loss") is not None]
    loss = f"; training loss {sum(losses) / len(losses):.4g}" if losses else ""
    return (
        f"round {record['round']}/{num_rounds}: {valid}{loss}; training {record['wall_s']:.1f} s, validation "
        f"{record['evaluate_s']:.1f} s"
    )


def _mean(groups: Sequence[dict[str, float]]) -> float:
    return sum(group["ndcg@10"] for group in groups) / len(groups)
