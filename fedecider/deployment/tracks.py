"""Which of both tracks a project belongs to: everything else of a deployment is the same for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.deployment import embedding_project, embedding_run, project, run
from fedecider.running.run_folder import read_object


class Track(NamedTuple):
    """What the parties of a project do with it."""

    read_project: Callable[[Path], Any]
    """Root -> the project, with ``names`` (of the sites, in order), ``settings`` and ``run``."""
    own_data: Callable[[Any, str, str], Any]
    """Project, a site's data folder and its client or name -> what is there; ``ValueError`` where it does not fit."""
    serve: Callable[..., Path]
    make_site: Callable[..., Any]
    answer_of: Callable[..., Any]


LLM = Track(project.read_project, project.own_domain, run.serve, run.make_site, run.answer_of)
EMBEDDING = Track(
    embedding_project.read_embedding_project,
    embedding_project.own_interactions,
    embedding_run.serve,
    embedding_run.make_site,
    embedding_run.answer_of,
)


def track_of(root: Path) -> Track:
    """The track of the project in ``root``; a folder without a project is left to its reader to refuse."""
    path = root / project.PROJECT_FILE
    of_users = path.is_file() and read_object(path).get("track") == embedding_project.TRACK
    return EMBEDDING if of_users else LLM
