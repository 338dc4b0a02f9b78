"""What came of a run: one frozen object, made when the rounds are over or read from an output directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.per_user import UserPositions, read_per_user
from fedecider.federation.record import read_records
from fedecider.running import damage, manifest, run_folder

CARDS_FILE, EXAMPLES_FILE = "data_cards.json", "examples.json"

Values = Mapping[str, Mapping[str, Any]]
"""Metric -> ``mean``, ``low``, ``high``."""
Figures = Mapping[str, Mapping[str, Mapping[str, Values]]]
"""Client (``macro`` for the mean over clients) -> split -> entry -> its values."""


@dataclass(frozen=True)
class RunResult:
    """All that is known of a finished run of any track. What a run does not have is empty."""

    record: Mapping[str, Any]
    """``run.json``: settings by block under ``config``, hashes of the data, versions, commit."""
    metrics: Mapping[str, Any]
    """``metrics.json``: facts of the method, figures with intervals, paired tests, what clients chose."""
    rounds: Sequence[Mapping[str, Any]]
    """``rounds.jsonl``; empty for a site of a deployment, whose server has them."""
    logs: Sequence[Mapping[str, Any]]
    """What clients logged in each round: of a site its own, else ``rounds``."""
    per_user: Callable[[], Sequence[UserPositions]] = field(default=lambda: (), repr=False)
    """``per_user.parquet``: every user's position under every entry, on the test items."""
    communication: Mapping[str, Any] = field(default_factory=dict)
    """``communication.json``: bytes by round, client and direction."""
    fusion_weights: Mapping[str, Any] = field(default_factory=dict)
    """``fusion_weights.json``, for methods that have them."""
    cards: Mapping[str, Any] = field(default_factory=dict)
    """``data_cards.json``: what the data of each domain are like."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    """``examples.json``: a few histories of each domain with recommendations."""
    audit: Mapping[str, Any] = field(default_factory=dict)
    """``audit.json``, where attacks were tried."""
    selection: Mapping[str, Any] = field(default_factory=dict)
    """``hyperparameter_selection.json``, where settings were tried before the rounds."""

    @classmethod
    def read(cls, root: str | Path) -> RunResult:
        """The result of the run in the folder ``root``; positions are read when they are first used.

        Raises:
            FileNotFoundError: the folder holds no run.
            ValueError: the run did not finish, or diverged; or one of its files is damaged.
        """
        if not isinstance(root, str | os.PathLike):
            raise ValueError(f"got {root!r:.100}, expected the path of an output directory")
        folder = run_folder.RunFolder(Path(root))
        record = run_folder.read_run(folder.root)
        if not folder.metrics.is_file():
            raise ValueError(
                f"no metrics.json in {root}: the run did not finish. Go on with it: --resume true --output {root} and "
                "the settings of the run"
            )
        metrics = run_folder.read_metrics(folder)
        is_site = run_folder.SITE in record and not folder.rounds.is_file()
        with damage.damage_names(logged := folder.root / run_folder.SITE_LOGS if is_site else folder.rounds):
            logs = read_records(logged)
        further = {
            "communication": folder.communication,
            "fusion_weights": folder.fusion_weights,
            "cards": folder.root / CARDS_FILE,
            "examples": folder.root / EXAMPLES_FILE,
            "audit": folder.audit,
            "selection": folder.selection,
        }
        if (folder.root / manifest.MANIFEST_FILE).is_file():
            read = [folder.record, folder.metrics, logged, folder.per_user, *further.values()]
            manifest.verify(
                folder.root, [one for one in read if one.is_file() or one.name not in manifest.MAY_BE_TAKEN]
            )
        found = {name: damage.read_object(path) for name, path in further.items() if path.is_file()}
        return cls(record, metrics, [] if is_site else logs, logs, lambda: read_per_user(folder.per_user), **found)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the run, by block."""
        return self.record["config"]

    @property
    def method(self) -> str:
        """The method that trained; that of the settings may be another one, where it would have changed nothing."""
        return str(self.metrics["method"])

    @property
    def reported(self) -> str:
        """The entry by which rounds were chosen."""
        return str(self.metrics["reported"])

    @property
    def protocol(self) -> str:
        """The evaluation protocol, by name."""
        return str(self.metrics["protocol"])

    @property
    def best_round(self) -> int:
        """The reported round, chosen on validation items."""
        return int(self.metrics["best_round"])

    @cached_property
    def figures(self) -> Figures:
        """Every figure with its interval. In the cross-device track, whose users are scored together, the only client
        is the data set."""
        splits, metrics = ("test", "valid"), self.metrics
        if "domains" in metrics:
            found = {
                name: {split: of_client[split] for split in splits if split in of_client}
                for name, of_client in metrics["domains"].items()
            }
            return {**found, **({MACRO: {"test": metrics[MACRO]["test"]}} if MACRO in metrics else {})}
        if "dataset" in metrics:
            return {metrics["dataset"]: {split: metrics[split] for split in splits if split in metrics}}
        return {name: {split: metrics[split][name] for split in splits} for name in metrics["test"]}

    @property
    def clients(self) -> list[str]:
        """Domains or companies; of the cross-device track the data set."""
        return [name for name in self.figures if name != MACRO]

    @property
    def test(self) -> Mapping[str, Values]:
        """Entry -> values on the test items, mean over clients where there are several."""
        return self.figures[MACRO if MACRO in self.figures else self.clients[0]]["test"]

    def valid_means(self, metric: str) -> dict[str, float]:
        """Entry -> ``metric`` on validation items, mean over clients, where every client has a number."""
        every = [self.figures[client].get("valid", {}) for client in self.clients]
        found = {}
        for entry in every[0]:
            means = [of_client[entry][metric]["mean"] for of_client in every if metric in of_client.get(entry, {})]
            if len(means) == len(every) and None not in means:
                found[entry] = fmean(means)
        return found

    @cached_property
    def frame(self) -> Any:
        """`figures` as a frame: client, split, entry, metric, mean, low, high."""
        import pandas as pd  # --help does without

        rows = [
            (client, split, entry, metric, *(value.get(name) for name in ("mean", "low", "high")))
            for client, splits in self.figures.items()
            for split, entries in splits.items()
            for entry, values in entries.items()
            for metric, value in values.items()
        ]
        return pd.DataFrame(rows, columns=["client", "split", "entry", "metric", "mean", "low", "high"])

    @cached_property
    def positions(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Entry -> client -> (U,) 0-based places of the test items, users in the order of `users`."""
        found: dict[str, dict[str, Tensor]] = {}
        for of_users in self._test_positions:
            found.setdefault(of_users.variant, {})[of_users.domain] = of_users.position_U
        return found

    @cached_property
    def users(self) -> Mapping[str, Sequence[str]]:
        """Client -> keys of its users."""
        return {of_users.domain: of_users.users for of_users in self._test_positions}

    @cached_property
    def _test_positions(self) -> list[UserPositions]:
        return [of_users for of_users in self.per_user() if of_users.split == "test"]


@contextmanager
def damage_is_bad_input(root: Path) -> Iterator[None]:
    """Turn what missing or changed fields of a run's files lead to into a ``ValueError`` that says so."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"got an output directory {root} whose files do not fit together ({error!r}), expected those of one "
            "finished run as docs/run_folder.md describes them. Copy the folder again"
        ) from error
