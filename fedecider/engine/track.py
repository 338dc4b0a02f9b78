"""What a track says of itself: a family of methods with one kind of client, data and result.

The engine, the command line, deployment, comparison and tests know tracks by this object alone. Tracks come in by the
entry point group ``fedecider.tracks``, as methods come in by theirs. A part is named, ``module:function``, and imported
when it is first asked for, so that a command pays for the libraries of its own track only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, NamedTuple

from fedecider.federation.registry import Registry, of_fedecider, outside_methods

GROUP = "fedecider.tracks"


class Track(NamedTuple):
    """One family of methods. Every part but the first five is a name as `pkgutil.resolve_name` takes it; empty where
    the track has none."""

    name: str
    title: str
    """In sentences: ``the cross-silo track``."""
    description: str
    """What ``federate --help`` says of its clients, in one sentence."""
    methods: Registry[Any]
    """Method name -> entry; a method is imported when its entry is read."""
    is_config: Callable[[Mapping[str, Any]], bool]
    """``config`` of a ``run.json`` -> whether this track wrote it."""
    schema: str
    """Method name -> `fedecider.running.options.Schema` of its settings."""
    settings: str
    """(options, settings of a file or None) -> checked settings of a run; both are mappings."""
    recorded: str
    """(output directory, place of the data or empty) -> settings of a finished run."""
    load: str
    """(settings, launch) -> `fedecider.engine.run.Experiment`."""
    page: str
    """`fedecider.engine.page.ReportConfig` -> path of the page, made again."""
    choose: str = ""
    """(options, whether hours are allowed) -> settings for the data that they name, as a file would have them; empty
    where there is nothing to choose."""
    conclusion: str = ""
    """`fedecider.engine.result.RunResult` -> `fedecider.report.page.Conclusion`: the verdict in sentences."""
    over_runs: str = ""
    """Results of training runs with several seeds -> `fedecider.engine.result.RunResult` with the test figures of
    all; of the first one the rest. Empty where a run has one seed."""
    merge_runs: str = ""
    """(output directory, folders of the other seeds) -> nothing; writes `over_runs` into the first folder and says the
    answer."""
    data_options: str = ""
    """(data, cache folder) -> options that name data of the Python API; empty where they are prepared domains."""
    comparison: str = ""
    """`fedecider.comparison.compare.TrackRows`: the rows that the track adds to tables, and how one cell is run."""
    audit: str = ""
    """(AuditConfig, launch) -> `fedecider.audit.attacks.Outcome`."""
    contract: str = ""
    """(entry, config) -> bench, contract: what `fedecider.testing.check_method` asks of a method."""
    deployment: str = ""
    """`fedecider.deployment` parts of the track."""

    @property
    def method_names(self) -> list[str]:
        """Built-in ones first; nothing is imported."""
        return list(self.methods)

    def part(self, name: str) -> Any:
        """The function that stands behind a part.

        Raises:
            ValueError: the track has no such part.
        """
        where = getattr(self, name)
        if not where:
            having = [track.title for track in tracks() if getattr(track, name)]
            raise ValueError(f"got {self.title}, which has no {name}, expected {' or '.join(having)}")
        return resolve_name(where)


@cache
def tracks() -> tuple[Track, ...]:
    """All installed tracks, in the order of their entry points' names.

    Raises:
        ValueError: none is installed: the package runs from a folder that was never installed.
    """
    found = tuple(point.load() for point in sorted(entry_points(group=GROUP), key=lambda one: one.name))
    if not found:
        raise ValueError(f"got no entry point of {GROUP}, expected this package's own. Run: pip install -e .")
    return found


def track_of(method: str) -> Track:
    """The track of a method, by its name; nothing of the track is imported.

    Raises:
        ValueError: no track has it, or two have.
    """
    having = [track for track in tracks() if method in track.method_names]
    if not having:
        known = "; ".join(f"{', '.join(track.method_names)} ({track.title})" for track in tracks())
        raise ValueError(f"got method {method!r}, expected one of {known}")
    if len(having) > 1 and (reason := taken_name(method)):
        raise ValueError(reason)
    return having[0]


def taken_name(method: str) -> str:
    """Why a method of an installed package cannot have its name, where a built-in one has it; empty where none has."""
    for track in tracks():
        if method in track.methods.built_in:
            for group in _groups():
                if points := outside_methods(group).get(method):
                    return of_fedecider(method, points[0])
    return ""


def track_named(name: str) -> Track:
    """A track by its own name.

    Raises:
        ValueError: it is not installed.
    """
    for track in tracks():
        if track.name == name:
            return track
    raise ValueError(f"got the track {name!r}, expected one of {', '.join(track.name for track in tracks())}")


def track_of_config(config: Mapping[str, Any]) -> Track:
    """The track that wrote ``config`` of a ``run.json``.

    Raises:
        ValueError: none of those installed did.
    """
    for track in tracks():
        if track.is_config(config):
            return track
    names = ", ".join(track.title for track in tracks())
    raise ValueError(f"got settings of no known track, expected those of {names}. Install the package of the run")


def all_method_names() -> Iterator[str]:
    """Of all tracks."""
    for track in tracks():
        yield from track.method_names


def _groups() -> Sequence[str]:
    return [track.methods.group for track in tracks()]
