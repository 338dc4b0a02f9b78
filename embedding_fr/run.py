"""A run of the embedding track, from its settings to its folder."""

from __future__ import annotations

from pathlib import Path

from embedding_fr.results import privacy_text, write_embedding_results
from embedding_fr.setup import EmbeddingSettings, faults_and_hashes, set_up, train
from fedecider.data.interactions import load_interactions
from fedecider.data.readers.raw import to_stderr
from fedecider.running.launch import Launch, checked_run, opened_together, round_recorder, round_teller, track_results
from fedecider.running.progress import round_progress
from fedecider.running.run_folder import fingerprint, forget_unstarted


def federate_embedding(settings: EmbeddingSettings, launch: Launch) -> Path:
    """Run everything and return the run folder; see ``docs/run_folder.md`` for what it holds."""
    run = settings.run
    interactions = load_interactions(settings.data, tell=to_stderr if launch.is_main else lambda _: None)
    faults, hashes = faults_and_hashes(run, interactions)
    root, record = checked_run(settings.as_record(), hashes, [interactions.name], card=interactions.card)
    setup = set_up(settings, interactions, launch.device)
    privacy_text(settings, interactions.num_users)  # what cannot be accounted for is told before the first round
    with opened_together(root, record, launch) as folder:
        try:
            with round_progress(run.num_rounds, launch.is_main) as on_clients:
                state = train(
                    settings,
                    setup,
                    recorder=round_recorder(folder, launch, run.tracker, record),
                    checkpoints=folder.checkpoints,
                    key=fingerprint(record),
                    processes=launch.processes,
                    on_round=round_teller(launch, run.num_rounds),
                    on_clients=on_clients,
                    faults=faults,
                    tell=to_stderr if launch.is_main else lambda text: None,
                )
        except ValueError:
            if launch.is_main:
                forget_unstarted(folder)
            raise
        write_embedding_results(settings, setup, interactions, state, folder, launch)
        track_results(folder, launch, state.round)
    return root
