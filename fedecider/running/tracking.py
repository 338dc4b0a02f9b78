"""What both tracks do around their rounds: open the run folder together, log to trackers, tell how a round went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedecider.federation.record import Recorder, read_json
from fedecider.federation.state import keep_newest
from fedecider.running.launch import Launch
from fedecider.running.progress import say
from fedecider.running.run_folder import RunFolder, check_run, default_name, identity, opened_run, provenance
from fedecider.running.trackers import metric_name, open_trackers, result_metrics


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
    """Tell the open trackers every row of ``metrics.json``; ``step`` is that of the last round, after which it is."""
    if launch.is_main and launch.accelerator.trackers:
        launch.accelerator.log(dict(result_metrics(read_json(folder.metrics))), step=step)


def valid_metrics(record: dict, names: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """``valid/VIEW/CLIENT/METRIC`` with its value, without the client where all are scored together."""
    for view, groups in record["valid"].items():
        for name, metrics in zip(names or [""], groups, strict=True):
            for metric, value in metrics.items():
                yield metric_name("valid", view, name, metric), value


def round_teller(launch: Launch, num_rounds: int) -> Callable[[dict], None]:
    """Print each round as it ends, once however many processes there are."""
    return lambda record: say(round_text(record, num_rounds)) if launch.is_main else None


def round_text(record: dict, num_rounds: int) -> str:
    """Validation ndcg@10 of every view, if the round was validated, losses and seconds."""
    scores = ", ".join(f"{view} {_mean(groups):.4f}" for view, groups in record["valid"].items())
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
