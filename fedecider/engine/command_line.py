"""From the words of a command to the settings of a run, whatever its track."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.engine.track import Track, track_of
from fedecider.running import options
from fedecider.running.settings_files import NOTHING_CHOSEN, Chosen

METHOD = "fedecider"
"""Where none is named."""
CACHE = ".cache"
"""Where data that were in memory are kept, beside the stages of runs: ``cache`` of a run, if it is given."""


class RunOptions(NamedTuple):
    """What is asked of a run, before data are read."""

    track: Track
    method: str
    options: dict[str, Any]
    config: Mapping[str, Any] | None
    """The settings of a file; None where none is named."""
    own: Any = None
    """Options of the command itself."""

    def settings(self, words: Sequence[str] = ()) -> Any:
        """The checked settings of the run; ``SystemExit`` where ``words`` want nothing but to see them."""
        found = self.track.part("settings")(self.options, self.config)
        if options.PRINT_CONFIG in words:
            options.show_config(found)
        return found


def data_options(track: Track, data: Any, cache: Path) -> dict[str, Any]:
    """Options that name data of the Python API, for methods of a track; none for the embedded sample.

    Prepared domains that are in memory are written to the cache, under the hash of their content.
    """
    from fedecider.engine.run import kept_data  # torch, which help does without

    if data is None:
        return {}
    if track.data_options:
        return dict(track.part("data_options")(data, cache))
    if isinstance(data, (str, Path)):
        return {"data": str(data)}
    return {"data": str(kept_data(data, cache)), "domains": ",".join(data)}


def chosen_settings(
    track: Track, options: Mapping[str, Any], config: Mapping[str, Any] | None, allow_long: bool, minutes: float
) -> Chosen:
    """What a track chooses for data where no configuration is named, or for a time; empty where there is no choice.

    Raises:
        ValueError: data that take too long, or ``minutes`` that are too few or with methods whose time is not known.
    """
    if minutes and not track.choose:
        raise ValueError(f"got minutes with a method of {track.title}, expected one of the cross-silo track")
    if not track.choose or (config is not None and not minutes):
        return NOTHING_CHOSEN
    return Chosen(*track.part("choose")(options, allow_long, minutes=minutes, config=config))


def read_command(
    words: Sequence[str], description: str | Callable[[Track], str], own: type | None = None
) -> RunOptions:
    """What the words of a command ask of a run; ``own`` is a dataclass of the command's own options.

    ``SystemExit`` where help is wanted.

    Raises:
        ValueError: the method is not known, or one of the command's own options cannot be.
    """
    asks_for_help = options.asks_for_help(words)
    given = options.read_words(words)
    method = given.get("method", METHOD)
    track = track_of(method)
    if asks_for_help:
        schema = track.part("schema")(method)
        beside = {} if own is None else {"own": own}
        schema = schema._replace(classes={**schema.classes, **beside})
        options.show_help(description if isinstance(description, str) else description(track), schema, words)
    if own is None:
        return RunOptions(track, method, given.options, given.config)
    names = options.field_names(own)
    mine = {name: value for name, value in given.values.items() if name in names}
    values, config = (
        {name: value for name, value in one.items() if name not in names} for one in (given.options, given.config or {})
    )
    return RunOptions(
        track, method, values, config if given.config is not None else None, options.from_plain(own, mine)
    )
