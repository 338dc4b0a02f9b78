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

import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

from fedecider.baselines.own import lent
from fedecider.data.domain import Domain
from fedecider.engine.page import groups
from fedecider.engine.run import Callback, check_same_run, kept_data, run_track
from fedecider.engine.track import Track, track_of, track_of_config, tracks
from fedecider.evaluation.metrics import MACRO
from fedecider.federation.record import read_records
from fedecider.models.versions import in_force
from fedecider.running.options import peek
from fedecider.running.progress import quiet
from fedecider.running.run_folder import RunFolder, read_metrics, read_object, read_run

DESCRIPTION = "fedecider.federate"
METHOD = "fedecider"
"""Where none is named."""
CACHE = ".cache"
"""Where prepared data that were in memory are kept, beside the stages of runs: ``cache`` of a run, if it is given."""
WATCHED = ("allow_long", "callbacks", "baselines", "progress")
"""Arguments of `federate` that are no settings of the run."""
REPORTED = ("hit@10", "ndcg@10")


def federate(
    data: Mapping[str, Domain] | str | Path | None = None,
    method: Any = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    allow_long: bool = False,
    callbacks: Sequence[Callback] = (),
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
        output: The run folder. None: a temporary one, gone with the result; `Result.save` keeps it.
        resume: If true, a run that stopped in ``output`` goes on; where there is none yet, it begins.
        allow_long: If true, what was chosen may take over an hour on this machine; it is refused otherwise.
        callbacks: Called after every round with a `fedecider.engine.run.Round`, in every process; what is true
            ends the run after that round. They are asked in their order.
        baselines: Rows of one's own beside ours, for cross-silo methods: label -> a function of
            `fedecider.baselines.own.TrainData` that gives a function from histories to scores.
        progress: If false, nothing but warnings is printed.
        settings: Options of ``fedecider federate``, blocks as mappings: ``num_rounds=20``,
            ``pretrain={"train": {"epochs": 3}}``.

    Raises:
        ValueError: an unknown setting (the nearest known one is named), a value that cannot be, data that do not suit
            the method, what was chosen takes over an hour, or ``resume`` without ``output``.
    """
    if resume and output is None:
        raise ValueError("got resume without output, expected the folder of the run: output='runs/x'")
    if output is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("got several processes without output, expected a run folder that all of them know")
    temporary = None if output is not None else tempfile.TemporaryDirectory(prefix="fedecider-")
    folder = Path(output) if output is not None else Path(temporary.name) / "run"  # type: ignore[union-attr]
    try:
        with quiet(not progress), lent(baselines):
            with planned(data, method, config, folder, resume, settings, allow_long) as (track, parsed, chosen):
                if baselines and track.name != "llm":
                    raise ValueError(
                        f"got baselines with {parsed.run.method}, a method of {track.title}, expected one that has "
                        "item texts"
                    )
                run_track(track, parsed, callbacks, chosen, log_results=False)
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
    resume: bool,
    settings: Mapping[str, Any],
    allow_long: bool = True,
) -> Iterator[tuple[Track, Any, Mapping[str, Any]]]:
    """Track and settings of the run that `federate` makes of these arguments, and what of them was chosen.

    A method of one's own is known while the block lasts.
    """
    with config_file(config) as file:
        asked = peek([f"--config={file}"] if file else [], "method") if method is None else method
    with named(asked or METHOD) as (name, track):
        words = [f"--output={folder}", *([f"--method={name}"] if asked else [])]
        if resume and RunFolder(folder).record.is_file():
            words.append("--resume=true")
        words += data_words(track, name, data, Path(str(settings.get("cache", CACHE))))
        words += option_words(settings)
        chosen = track.part("choose")(words, allow_long) if track.choose and config is None else {}
        with config_file(chosen or config) as file:
            parsed, _ = track.part("parse")(DESCRIPTION, [*([f"--config={file}"] if file else []), *words])
        yield track, parsed, chosen


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
        `fedecider.comparison.compare.Comparison`, whose ``table`` is a frame.

    Raises:
        ValueError: as `federate`; a method named twice; no seed; or a run in ``output`` has other settings or other
            data, before anything is run.
    """
    from fedecider.comparison.compare import compare_runs

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
            federate(data, method, output=place, resume=True, seed=seed, **settings)
        return compare_runs(runs)


def _is_finished(data: Any, method: Any, seed: int, place: Path, config: Any = None, **settings: Any) -> bool:
    """Whether ``place`` holds this run whole; ``ValueError`` where it holds one of other settings or data."""
    if not RunFolder(place).record.is_file():
        return False
    own = {name: value for name, value in settings.items() if name not in WATCHED}
    with quiet(), planned(data, method, config, place, True, {"seed": seed, **own}) as (track, parsed, _):
        check_same_run(track, parsed)
    return RunFolder(place).results.is_file()


class Result:
    """A finished run: figures as frames, verdict, recommenders, page, files.

    Frames are read from the run folder when they are first asked for.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run did not finish, or diverged; or its record is damaged.
    """

    def __init__(self, folder: str | Path, temporary: Any = None):
        self.folder = RunFolder(Path(folder))
        self.record = read_run(self.folder.root)
        """What ``run.json`` holds: settings by block, hashes of the data, versions."""
        if not self.folder.metrics.is_file():
            raise ValueError(
                f"no metrics.json in {folder}: the run did not finish. Go on with it: "
                f"fedecider.federate(..., output={str(folder)!r}, resume=True)"
            )
        self.raw = read_metrics(self.folder)
        """``metrics.json`` as it is."""
        self._track = track_of_config(self.record["config"])
        if temporary is not None:
            self._end = weakref.finalize(self, temporary.cleanup)

    @property
    def method(self) -> str:
        """The name of the federated method, such as ``fedavg``."""
        return str(self.record["config"]["run"]["method"])

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, by block."""
        return self.record["config"]

    @property
    def clients(self) -> list[str]:
        """Domains or companies; of the cross-device track the data set, whose users are scored together."""
        return [name for name in groups(self.raw) if name != MACRO]

    @property
    def best_round(self) -> int:
        """The reported round, chosen on validation items."""
        return int(self.raw["best_round"])

    @cached_property
    def metrics(self) -> Any:
        """A frame: client (``macro`` for the mean over clients), split, entry, metric, mean, low, high.

        ``low`` and ``high`` bound the mean over users at 95 %. An entry is the method's reported model, another variant
        of it, or what it is compared with.
        """
        import pandas as pd

        rows = [
            (client, split, entry, metric, *(value.get(name) for name in ("mean", "low", "high")))
            for client, splits in groups(self.raw).items()
            for split, entries in splits.items()
            for entry, found in entries.items()
            for metric, value in found.items()
        ]
        return pd.DataFrame(rows, columns=["client", "split", "entry", "metric", "mean", "low", "high"])

    @property
    def table(self) -> Any:
        """A frame of test means, a row an entry, the mean over clients where there are several."""
        client = MACRO if MACRO in groups(self.raw) else self.clients[0]
        found = self.metrics[(self.metrics["client"] == client) & (self.metrics["split"] == "test")]
        order = found["entry"].drop_duplicates()
        return found.pivot(index="entry", columns="metric", values="mean").loc[order, list(REPORTED)]

    @cached_property
    def per_user(self) -> Any:
        """A frame: domain, user, split, variant, round, position of the held-out item (0 is first), metrics."""
        import pandas as pd

        return pd.read_parquet(self.folder.per_user)

    @cached_property
    def rounds(self) -> Any:
        """A frame: round, client, variant and validation metrics, with the client's training loss where it has one."""
        import pandas as pd

        rows = []
        for record in read_records(self.folder.rounds):
            losses = {log.get("client", 0): log.get("loss") for log in record["clients"]}
            for variant, scores in record["valid"].items():
                for number, (client, found) in enumerate(zip(self.clients, scores, strict=True)):
                    rows.append({"round": record["round"], "client": client, "variant": variant, **found})
                    rows[-1]["loss"] = losses.get(number)
        return pd.DataFrame(rows)

    @cached_property
    def fusion_weights(self) -> Any:
        """A frame of the reported round: a row is a client, a column whose direction it takes, mean over layers.

        Empty for a method without fusion weights.
        """
        import pandas as pd

        if not self.folder.fusion_weights.is_file():
            return pd.DataFrame()
        found = read_object(self.folder.fusion_weights)
        place = found["rounds"].index(self.best_round)
        return pd.DataFrame(found["alpha"][place], index=found["domains"], columns=found["domains"])

    @cached_property
    def verdict(self) -> str:
        """Would one switch it on, what was measured, and what speaks against it: a paragraph each."""
        if not self._track.conclusion:
            return f"{self.method} on {', '.join(self.clients)}:\n{self.table.round(4).to_string()}"
        first = self._track.part("conclusion")(self.folder)
        return "\n".join([first.question, first.answer, *first.paragraphs, *first.reservations])

    def recommender(self, client: str | None = None, **options: Any) -> Any:
        """What recommends for a client's customers; ``options`` are those of `fedecider.Recommender.from_pretrained`.

        Raises:
            FileNotFoundError: the run has no recommender of that name.
            ValueError: no client is named where there are several.
        """
        from fedecider.models.recommender import Recommender

        if not self.folder.adapters.is_dir():
            raise ValueError(f"got a run of {self._track.title}, expected one that hands recommenders over")
        return Recommender.from_pretrained(self.folder.root, client, **options)

    def report(self, path: str | Path | None = None) -> Path:
        """The page of the run in one HTML file; returns ``path``, or where it lies in the run folder."""
        page = self.folder.root / "report.html"
        if not page.is_file():
            from fedecider.engine.page import ReportConfig

            page = self._track.part("page")(ReportConfig(run=str(self.folder.root)))
        if path is None:
            return page
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(page, path))

    def save(self, folder: str | Path) -> Path:
        """Copy the run folder, what is private in it included; `load` reads it again.

        Raises:
            ValueError: ``folder`` is there and not empty.
        """
        target = _new(folder)
        shutil.copytree(self.folder.root, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))
        return target

    def export(self, folder: str | Path, *, published_name: str = "") -> Path:
        """Write what may be published of the version in force: backbone, adapters with item IDs and cards, checksums.
        No history, no counts.

        ``Recommender.from_pretrained(folder, client)`` reads it, and `peft` does. ``published_name``: the name of the
        hub that the folder will have, which its adapters then name as their base.

        Raises:
            ValueError: ``folder`` is there and not empty, or the run hands nothing over.
        """
        if not self.folder.adapters.is_dir():
            raise ValueError(f"got a run of {self._track.title}, expected one that hands adapters over")
        target = _new(folder)
        target.mkdir(parents=True, exist_ok=True)
        source = RunFolder(in_force(self.folder.root))
        for part in (source.backbone, source.adapters):
            shutil.copytree(part, target / part.name)
        shutil.copyfile(source.root / "handover.json", target / "handover.json")
        if published_name:
            from fedecider.models.recommender import name_base, put_in_front

            name_base(target, published_name)
            put_in_front(target)
        (target / "README.md").write_text(self._card(published_name), encoding="utf-8")
        return target

    def push_to_hub(self, repo_id: str, *, private: bool = True, api: Any = None) -> Any:
        """Upload what `export` writes to one repository of the hub; returns the commit.

        ``api``: an ``HfApi`` of huggingface_hub, for another endpoint or token.

        Raises:
            ValueError: no name of a hub, or ``private`` and the repository is there and public.
            OSError: the hub refuses or cannot be reached.
        """
        from huggingface_hub import HfApi

        from fedecider.models.recommender import push_folder

        message = f"Add recommenders of {', '.join(self.clients)}"
        save = partial(self.export, published_name=repo_id)
        return push_folder(save, HfApi() if api is None else api, repo_id, private, False, message)

    def __repr__(self) -> str:
        return f"Result of {self.method} on {', '.join(self.clients)}, round {self.best_round}\n{self.table.round(4)}"

    def _repr_html_(self) -> str:
        paragraphs = "".join(f"<p>{escape(text)}</p>" for text in self.verdict.splitlines()[:3])
        about = f"{escape(self.method)} on {escape(', '.join(self.clients))}, round {self.best_round}"
        return f"<p><b>{about}</b></p>{paragraphs}{self.table.round(4).to_html()}"

    def _card(self, published_name: str) -> str:
        from fedecider.models.export import opened_in_one_line

        config = read_object(self.folder.adapters / self.clients[0] / "adapter_config.json", {"task_type": str})
        auto_class = "AutoModelForSeq2SeqLM" if config["task_type"] == "SEQ_2_SEQ_LM" else "AutoModelForCausalLM"
        lines = [
            "---",
            "library_name: peft",
            *([f"base_model: {published_name}"] if published_name else []),
            "tags: [recommender, federated-learning]",
            "---",
            f"# Recommenders of {', '.join(self.clients)}",
            "",
            f"Trained together by {self.method} with FeDecider. `adapters/NAME` are PEFT adapters of `backbone/`, "
            "whose files a repository of the hub has in front too.",
            "",
            opened_in_one_line(auto_class, published_name or "THIS REPOSITORY", self.clients[0]),
            "",
            "```text",
            self.table.round(4).to_string(),
            "```",
        ]
        return "\n".join(lines) + "\n"


def option_words(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings as words of a command line: ``{"a": {"b": [1, True]}}`` -> ``--a.b=[1, true]``."""
    words: list[str] = []
    for name, value in settings.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping):
            words += option_words(value, f"{full}.")
        else:
            text = str(value) if isinstance(value, (str, Path)) else json.dumps(value, default=str)
            words.append(f"--{full}={text}")
    return words


@contextmanager
def config_file(config: str | Path | Mapping[str, Any] | None) -> Iterator[str]:
    """The path of a YAML file that says ``config``; empty for none."""
    if not isinstance(config, Mapping):
        yield "" if config is None else os.fspath(config)
        return
    import yaml

    with tempfile.TemporaryDirectory(prefix="fedecider-") as scratch:
        path = Path(scratch) / "config.yaml"
        path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        yield str(path)


@contextmanager
def named(method: Any) -> Iterator[tuple[str, Track]]:
    """The name under which the method is found while the block lasts, and its track."""
    if isinstance(method, str):
        yield method, track_of(method)
        return
    name = _name_of(method)
    for track in tracks():
        registry = track.part("methods")
        if isinstance(method, type(next(iter(registry.built_in.values())))):
            if name in track.method_names:
                raise ValueError(f"got a method of one's own with the name {name}, expected one that is not taken")
            with registry.lent(name, method):
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


def data_words(track: Track, method: str, data: Any, cache: Path) -> list[str]:
    """Options that name the data, for methods of a track; none for the embedded sample."""
    if data is None:
        return []
    if track.data_words:
        return track.part("data_words")(data, cache)
    return prepared_words(data, cache)


def prepared_words(data: Mapping[str, Domain] | str | Path, cache: Path) -> list[str]:
    """Options that name prepared domains; those in memory are written to the cache under their content's hash."""
    if isinstance(data, (str, Path)):
        return [f"--data={data}"]
    folder = kept_data(data, cache)
    return [f"--data={folder}", f"--domains={','.join(data)}"]


def _new(folder: str | Path) -> Path:
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"got the folder {folder}, which is there and not empty, expected a new one")
    return target
