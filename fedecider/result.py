"""A finished run in Python: its figures as frames, its conclusion, its recommenders, its files."""

from __future__ import annotations

import shutil
import weakref
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

from fedecider.engine.result import RunResult
from fedecider.engine.track import track_of_config
from fedecider.models.versions import in_force
from fedecider.report.tables import compared
from fedecider.running.damage import read_object
from fedecider.running.manifest import verify, write_manifest
from fedecider.running.run_folder import RunFolder, check_file


class Result:
    """A finished run: figures as frames, verdict, recommenders, page, files.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run did not finish, or diverged; or its record is damaged.
    """

    def __init__(self, folder: str | Path, temporary: Any = None):
        self.run = RunResult.read(folder)
        """All that is known of the run."""
        self.folder = RunFolder(Path(folder))
        self._track = track_of_config(self.record["config"])
        if temporary is not None:
            self._end = weakref.finalize(self, temporary.cleanup)

    @property
    def record(self) -> dict[str, Any]:
        """What ``run.json`` holds: settings by block, hashes of the data, versions."""
        return dict(self.run.record)

    @property
    def raw(self) -> dict[str, Any]:
        """``metrics.json`` as it is."""
        return dict(self.run.metrics)

    @property
    def method(self) -> str:
        """The name of the federated method, such as ``fedavg``."""
        return str(self.settings["run"]["method"])

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, by block."""
        return dict(self.run.settings)

    @property
    def clients(self) -> list[str]:
        """Domains or companies; of the cross-device track the data set, whose users are scored together."""
        return self.run.clients

    @property
    def best_round(self) -> int:
        """The reported round, chosen on validation items."""
        return self.run.best_round

    @property
    def metrics(self) -> Any:
        """A frame: client (``macro`` for the mean over clients), split, entry, metric, mean, low, high.

        ``low`` and ``high`` bound the mean over users at 95 %. An entry is the method's reported model, another variant
        of it, or what it is compared with.
        """
        return self.run.frame

    @property
    def table(self) -> Any:
        """A frame of test means, a row an entry, the mean over clients where there are several."""
        import pandas as pd  # --help does without

        means = {
            entry: {name: values[name]["mean"] for name in compared(values)} for entry, values in self.run.test.items()
        }
        return pd.DataFrame.from_dict(means, orient="index").rename_axis(index="entry", columns="metric")

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
        for record in self.run.rounds:
            losses = {log.get("client", 0): log.get("loss") for log in record["clients"]}
            for variant, scores in record["valid"].items():
                for number, (client, values) in enumerate(zip(self.clients, scores, strict=True)):
                    cell = {"round": record["round"], "client": client, "variant": variant}
                    rows.append({**cell, **values, "loss": losses.get(number)})
        return pd.DataFrame(rows)

    @cached_property
    def fusion_weights(self) -> Any:
        """A frame of the reported round: a row is a client, a column whose direction it takes, mean over layers.

        Empty for a method without fusion weights.
        """
        import pandas as pd

        weights = self.run.fusion_weights
        if not weights:
            return pd.DataFrame()
        place = weights["rounds"].index(self.best_round)
        return pd.DataFrame(weights["alpha"][place], index=weights["domains"], columns=weights["domains"])

    @cached_property
    def verdict(self) -> str:
        """What to do, what it brings, what it costs: a line each, then what speaks against believing it."""
        if not self._track.conclusion:
            return f"{self.method} on {', '.join(self.clients)}:\n{self.table.round(4).to_string()}"
        return str(self._track.part("conclusion")(self.run).answer.text)

    @property
    def recommendation(self) -> str:
        """``join``, ``do not join``, ``not clear`` or ``no answer``; ``use`` or ``do not use`` of a recommender
        beside which nothing was trained alone. The words of `verdict`, empty where a track has none."""
        return str(self._track.part("conclusion")(self.run).answer.recommendation) if self._track.conclusion else ""

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
        """The page of the run in one HTML file; returns ``path``, or where it lies in the output directory.

        Raises:
            ValueError: ``path`` is there and no such page.
        """
        page = self.folder.root / "report.html"
        if not page.is_file():
            from fedecider.engine.page import ReportConfig

            page = self._track.part("page")(ReportConfig(run=str(self.folder.root)))
        if path is None:
            return page
        from fedecider.report.page import POLICY  # and figures with it

        check_file(Path(path), lambda one: POLICY in one.read_text(encoding="utf-8"))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(page, path))

    def save(self, folder: str | Path) -> Path:
        """Copy the output directory, what is private in it included; `load` reads it again.

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
        verify(source.root, [source.backbone, source.adapters])
        for part in (source.backbone, source.adapters):
            shutil.copytree(part, target / part.name)
        if published_name:
            from fedecider.models.publish import name_base, put_in_front

            name_base(target, published_name)
            put_in_front(target)
        write_manifest(target)
        self._card(published_name).save(target / "README.md")
        return target

    def push_to_hub(self, repo_id: str, *, private: bool = True, api: Any = None) -> Any:
        """Upload what `export` writes to one repository of the hub; returns the commit.

        ``api``: an ``HfApi`` of huggingface_hub, for another endpoint or token.

        Raises:
            ValueError: no name of a hub, or ``private`` and the repository is there and public.
            OSError: the hub refuses or cannot be reached.
        """
        from huggingface_hub import HfApi

        from fedecider.models.publish import push_folder

        message = f"Add recommenders of {', '.join(self.clients)}"
        save = partial(self.export, published_name=repo_id)
        return push_folder(save, HfApi() if api is None else api, repo_id, private, message)

    def __repr__(self) -> str:
        return f"Result of {self.method} on {', '.join(self.clients)}, round {self.best_round}\n{self.table.round(4)}"

    def _repr_html_(self) -> str:
        paragraphs = "".join(f"<p>{escape(text)}</p>" for text in self.verdict.splitlines()[:3])
        about = f"{escape(self.method)} on {escape(', '.join(self.clients))}, round {self.best_round}"
        return f"<p><b>{about}</b></p>{paragraphs}{self.table.round(4).to_html()}"

    def _card(self, published_name: str) -> Any:
        from huggingface_hub import ModelCard, ModelCardData

        from fedecider.models.export import DATA, opened_from_a_folder, opened_in_one_line

        config = read_object(self.folder.adapters / self.clients[0] / "adapter_config.json", {"task_type": str})
        auto_class = "AutoModelForSeq2SeqLM" if config["task_type"] == "SEQ_2_SEQ_LM" else "AutoModelForCausalLM"
        tags = ["recommendation", "federated-learning", "lora", "fedecider"]
        data = ModelCardData(base_model=published_name or None, library_name="peft", tags=tags)
        parts = [
            f"---\n{data.to_yaml()}\n---",
            f"# Recommenders of {', '.join(self.clients)}",
            f"Trained together by {self.method} with FeDecider. `adapters/NAME` are PEFT adapters of `backbone/`, "
            "whose files a repository of the hub has in front too.",
            opened_in_one_line(auto_class, published_name, self.clients[0])
            if published_name
            else opened_from_a_folder(auto_class, self.clients[0]),
            DATA.format("`, `".join(self.clients)),
            f"```text\n{self.table.round(4).to_string()}\n```",
        ]
        return ModelCard("\n\n".join(parts) + "\n")


def _new(folder: str | Path) -> Path:
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"got the folder {folder}, which is there and not empty, expected a new one")
    return target
