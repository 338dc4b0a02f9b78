"""A run of the cross-device track for the engine: every user of a rating data set is a client."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from embedding_fr.results import privacy_text, write_results
from embedding_fr.server_memory import check_server_memory
from embedding_fr.setup import EmbeddingSettings, hashes_of, rounds_of, set_up
from fedecider.data.interactions import Interactions, load_interactions
from fedecider.data.readers.reading import to_stderr
from fedecider.engine.run import Experiment, Rounds, kept_data
from fedecider.federation.state import RunState
from fedecider.running.launch import Launch
from fedecider.running.run_folder import RunFolder


def data_options(data: Any, cache: Path) -> dict[str, Any]:
    """Options that name data of the Python API: a rating data set by its name, or one prepared domain.

    Raises:
        ValueError: several domains: every user is a client here, of one data set.
    """
    if isinstance(data, str) and not Path(data).is_dir():
        return {"dataset": data}
    names = list(data) if isinstance(data, Mapping) else sorted(path.name for path in Path(data).iterdir())
    if len(names) != 1:
        raise ValueError(
            f"got the domains {', '.join(names)} for the cross-device track, expected one: every user is a client here"
        )
    folder = kept_data(data, cache) if isinstance(data, Mapping) else Path(data)
    return {"dataset": names[0], "source": "prepared", "raw": str(folder)}


def load(settings: EmbeddingSettings, launch: Launch) -> Experiment:
    """The data of a run, and everything checked that can be before the method is built."""
    log = to_stderr if launch.is_main else lambda text: None
    return experiment_on(load_interactions(settings.data, log=log), settings)


def experiment_on(interactions: Interactions, settings: EmbeddingSettings) -> Experiment:
    """A run on these data."""
    prepare = partial(_prepare, settings, interactions)
    return Experiment(
        settings, hashes_of(settings, interactions), [interactions.name], prepare, {"card": interactions.card}
    )


def _prepare(
    settings: EmbeddingSettings,
    interactions: Interactions,
    launch: Launch,
    resumed: RunFolder | None,
) -> Rounds:
    setup = set_up(settings, interactions, launch.device)
    log = to_stderr if launch.is_main else lambda text: None
    privacy = privacy_text(settings, interactions.num_users)  # what cannot be accounted for is told first
    if settings.privacy.noise_without_clip:
        log(f"privacy: {privacy}")
    check_server_memory(settings.run.method, settings.method, interactions.num_items, log)

    def finish(state: RunState, folder: RunFolder) -> None:
        write_results(settings, setup, interactions, state, folder, launch)

    return rounds_of(settings, setup, launch.processes, finish)
