"""The Python API: train in this process, read a run as frames, recommend, compare, save, publish.

>>> import fedecider as fd
>>> data = fd.from_events({"north": orders_north, "south": orders_south}, items=products)
>>> result = fd.federate(data, num_rounds=20, callbacks=[fd.EarlyStopping(3)])
>>> print(result.verdict)
>>> result.recommender("north").recommend(history, k=10)

What is trained, and with which settings, is what ``fedecider federate`` trains with the same settings, bit for bit: a
keyword is an option of the command line.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedecider.baselines.own import lent
from fedecider.data.domain import Domain
from fedecider.engine.command_line import CACHE, METHOD, chosen_settings, data_options
from fedecider.engine.run import Callback, check_same_run, run_track
from fedecider.engine.track import Track, track_of, tracks
from fedecider.result import Result
from fedecider.running.options import nested
from fedecider.running.progress import quiet
from fedecider.running.run_folder import RunFolder
from fedecider.running.settings_files import Chosen, load_config

WATCHED = ("allow_long", "minutes", "callbacks", "baselines", "progress")
"""Arguments of `federate` that are no settings of the run."""


def federate(
    data: Mapping[str, Domain] | str | Path | None = None,
    method: Any = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    allow_long: bool = False,
    minutes: float = 0.0,
    callbacks: Iterable[Callback] = (),
    baselines: Mapping[str, Any] = {},
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Train recommenders together, in this process, and return what came of it.

    Args:
        data: What `from_events`, `open_prepared` or `sample` gave, or the folder of prepared data; for methods of the
            cross-device track also the name of a rating data set, such as ``ml-100k``. None: the embedded sample.
        method: The name of a method, or the entry of one's own (`fedecider.methods.Method` and its like). None: that of
            ``config``, or chosen.
        config: A YAML file of settings, or such settings as a mapping. None: chosen for the data and the machine, with
            a line for each choice and an estimate of the time, or those of the embedded sample.
        output: The output directory. None: a temporary one, gone with the result; `Result.save` keeps it.
        resume: If true, a run that stopped in ``output`` goes on; where there is none yet, it begins.
        allow_long: If true, what was chosen may take over an hour on this machine; it is refused otherwise.
        minutes: Where all would take longer on this machine, customers and rounds are drawn so that the run takes so
            long, and the verdict says so; 0: all are taken.
        callbacks: Called after every round with a `fedecider.engine.run.Round`, in every process; what is true
            ends the run after that round. They are asked in their order.
        baselines: Rows of one's own beside ours, for cross-silo methods: label -> a function of
            `fedecider.baselines.own.TrainData` that gives a function from histories to scores.
        progress: If false, nothing but warnings is printed.
        settings: Options of ``fedecider federate``, blocks as mappings: ``num_rounds=20``, ``seeds=3``,
            ``pretrain={"train": {"epochs": 3}}``.

    Raises:
        ValueError: an unknown setting (the nearest known one is named), a value that cannot be, data that do not suit
            the method, what was chosen takes over an hour, or ``resume`` without ``output``.
    """
    if output is not None and not str(output):
        raise ValueError("got output '', expected the output directory, such as 'runs/x', or None for a temporary one")
    followers = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    if not isinstance(callbacks, Iterable) or not all(map(callable, followers)):
        raise ValueError(f"got callbacks {callbacks!r:.100}, expected a list of functions that take a Round")
    if resume and output is None:
        raise ValueError("got resume without output, expected the folder of the run: output='runs/x'")
    if output is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("got several processes without output, expected an output directory that all of them know")
    temporary = None if output is not None else tempfile.TemporaryDirectory(prefix="fedecider-")
    folder = Path(output) if output is not None else Path(temporary.name) / "run"  # type: ignore[union-attr]
    try:
        goes_on = {"resume": True} if resume and RunFolder(folder).record.is_file() else {}
        plan = planned(data, method, config, folder, {**settings, **goes_on}, allow_long, minutes)
        with quiet(not progress), lent(baselines), plan as (track, parsed, chosen):
            if baselines and track.name != "llm":
                raise ValueError(
                    f"got baselines with {parsed.run.method}, a method of {track.title}, expected one that has "
                    "item texts"
                )
            run_track(track, parsed, followers, chosen, log_results=False)
    except BaseException:
        if temporary is not None:
            temporary.cleanup()
        raise
    return Result(folder, temporary)


@contextmanager
def planned(
    data: Mapping[str, Domain] | str | Path | None,
    method: Any,
    config: str | Path | Mapping[str, Any] | None,
    folder: Path,
    settings: Mapping[str, Any],
    allow_long: bool = True,
    minutes: float = 0.0,
) -> Iterator[tuple[Track, Any, Chosen]]:
    """Track and settings of the run that `federate` makes of these arguments, and what of them was chosen.

    A method of one's own is known while the block lasts.
    """
    given = load_config(config) if isinstance(config, (str, Path)) else config
    asked = (given or {}).get("method") if method is None else method
    with named(asked or METHOD) as (name, track):
        options: dict[str, Any] = {"output": str(folder), **({"method": name} if asked else {})}
        options |= data_options(track, data, Path(settings.get("cache", CACHE)))
        options |= {name: str(value) if isinstance(value, Path) else value for name, value in nested(settings).items()}
        chosen = chosen_settings(track, options, given, allow_long, minutes)
        options = {name: value for name, value in options.items() if not minutes or name != "num_rounds"}
        yield track, track.part("settings")(options, chosen.settings or given), chosen


def load(folder: str | Path) -> Result:
    """The `Result` of a finished run of any track, read from its folder.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run did not finish, or its record is damaged.
    """
    return Result(folder)


def compare(
    methods: Sequence[Any],
    data: Mapping[str, Domain] | str | Path | None = None,
    *,
    seeds: int | Sequence[int] = 3,
    output: str | Path | None = None,
    **settings: Any,
) -> Any:
    """Every method with every seed on the same data, with paired tests over users against the first method.

    Args:
        methods: Names of methods or entries of one's own; the first one is what the others are compared with.
        data: As for `federate`.
        seeds: So many seeds from 0 on, or the seeds themselves.
        output: The folder of the runs, ``METHOD/SEED``; those that are finished there are taken, if their settings and
            data are these. None: a temporary one.
        settings: As for `federate`, the same for all methods.

    Returns:
        `fedecider.comparison.runs.Comparison`, whose ``table`` is a frame.

    Raises:
        ValueError: as `federate`; a method named twice; no seed; or a run in ``output`` has other settings or other
            data, before anything is run.
    """
    from fedecider.comparison.runs import compare_runs

    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    labels = [one if isinstance(one, str) else _name_of(one) for one in methods]
    if not numbers or len(set(labels)) < len(labels) or not labels:
        raise ValueError(
            f"got the methods {labels} and the seeds {numbers}, expected each method once, and some of both"
        )
    with tempfile.TemporaryDirectory(prefix="fedecider-") as scratch:
        root = Path(output) if output is not None else Path(scratch)
        runs = {label: [root / label / str(seed) for seed in numbers] for label in labels}
        cells = [
            (method, *cell)
            for method, label in zip(methods, labels, strict=True)
            for cell in zip(numbers, runs[label], strict=True)
        ]
        missing = [cell for cell in cells if not _is_finished(data, *cell, **settings)]
        for method, seed, place in missing:
            federate(data, method, output=place, resume=True, **_of_seed(method, seed), **settings)
        return compare_runs(runs)


def _of_seed(method: Any, seed: int) -> dict[str, Any]:
    """Settings of one training run with this seed."""
    with named(method) as (_, track):
        return {"seed": seed, **({"seeds": 1} if track.over_runs else {})}


def _is_finished(data: Any, method: Any, seed: int, place: Path, config: Any = None, **settings: Any) -> bool:
    """Whether ``place`` holds this run whole; ``ValueError`` where it holds one of other settings or data."""
    if not RunFolder(place).record.is_file():
        return False
    own = {name: value for name, value in settings.items() if name not in WATCHED}
    with (
        quiet(),
        planned(data, method, config, place, {**_of_seed(method, seed), "resume": True, **own}) as (track, parsed, _),
    ):
        check_same_run(track, parsed)
    return RunFolder(place).results.is_file()


@contextmanager
def named(method: Any) -> Iterator[tuple[str, Track]]:
    """The name under which the method is found while the block lasts, and its track."""
    if isinstance(method, str):
        yield method, track_of(method)
        return
    name = _name_of(method)
    for track in tracks():
        registry = track.methods
        if isinstance(method, registry.kind):
            if name in track.method_names:
                raise ValueError(f"got a method of one's own with the name {name}, expected one that is not taken")
            with registry.with_own(name, method):
                yield name, track
            return
    raise ValueError(
        f"got the method {method!r}, expected a name, or an entry of one's own, such as a fedecider.methods.Method"
    )


def _name_of(entry: Any) -> str:
    config = getattr(entry, "config", None)
    name = getattr(config, "__name__", "")
    if not name:
        raise ValueError(f"got the method {entry!r}, expected a name, or an entry with a dataclass of settings")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Config")).lower()
