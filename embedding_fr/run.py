"""A run of the embedding track, from its settings to its folder."""

from __future__ import annotations

from pathlib import Path

from embedding_fr.results import privacy_line, write_embedding_results
from embedding_fr.setup import EmbeddingSettings, Setup, set_up, train
from fedecider.data.interactions import Interactions, load_interactions
from fedecider.data.readers.files import to_stderr
from fedecider.federation.record import Recorder
from fedecider.running.launch import Launch
from fedecider.running.progress import console, round_progress
from fedecider.running.run_folder import (
    RunFolder,
    check_run,
    default_name,
    fingerprint,
    forget_unstarted,
    opened_run,
    provenance,
)


def federate_embedding(settings: EmbeddingSettings, launch: Launch) -> Path:
    """Run everything and return the run folder; see ``docs/run_folder.md`` for what it holds."""
    run = settings.run
    interactions = load_interactions(settings.data, tell=to_stderr if launch.is_main else lambda _: None)
    record = {
        "config": settings.as_record(),
        "protocol": run.protocol,
        "data": {interactions.name: interactions.content_hash()},
        "card": interactions.card,
        **provenance(),
    }
    root = Path(run.output) if run.output else Path("runs") / default_name(run.method, [interactions.name])
    check_run(root, record, run.resume)
    setup = set_up(settings, interactions, launch.device)
    privacy_line(settings)  # what cannot be accounted for is told before the first round
    launch.accelerator.wait_for_everyone()  # else a slow process would find the folder that the first one opens
    with opened_run(root, record, run.resume, writes=launch.is_main) as folder:
        launch.accelerator.wait_for_everyone()
        _run(settings, setup, interactions, folder, launch, fingerprint(record))
        launch.accelerator.wait_for_everyone()
    return root


def _run(
    settings: EmbeddingSettings,
    setup: Setup,
    interactions: Interactions,
    folder: RunFolder,
    launch: Launch,
    key: str,
) -> None:
    """Rounds and results."""
    run = settings.run
    if run.tracker:
        launch.accelerator.init_trackers("fedecider", config={"method": run.method, "seed": run.seed})

    def track(record: dict, step: int) -> None:
        views = record["valid"].items()
        launch.accelerator.log({f"valid/{v}/{name}": x for v, (m,) in views for name, x in m.items()}, step=step)

    def show(record: dict) -> None:
        if launch.is_main:
            scores = ", ".join(f"{view} {metrics['ndcg@10']:.4f}" for view, (metrics,) in record["valid"].items())
            seconds = f"train {record['wall_s']:.2f} s, evaluate {record['evaluate_s']:.2f} s"
            loss = record["clients"][0].get("loss")
            losses = "" if loss is None else f" | loss {loss:.4g}"
            line = f"round {record['round']}/{run.num_rounds}: valid ndcg@10 {scores}{losses} | {seconds}"
            console.print(line, highlight=False, soft_wrap=True)

    try:
        with round_progress(run.num_rounds, launch.is_main) as on_clients:
            state = train(
                settings,
                setup,
                recorder=Recorder(folder.rounds if launch.is_main else None, track if run.tracker else None),
                checkpoints=folder.checkpoints,
                key=key,
                processes=launch.processes,
                on_round=show,
                on_clients=on_clients,
            )
    except ValueError:
        if launch.is_main:
            forget_unstarted(folder)
        raise
    write_embedding_results(settings, setup, interactions, state, folder, launch)
