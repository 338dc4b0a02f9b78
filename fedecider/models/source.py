"""Where a recommender is loaded from, and what is popular there. No model is loaded, and no library of models imported.

Nothing of a folder is trusted: only JSON and safetensors are read, and files that have checksums are compared first.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedecider.models import folders
from fedecider.models.answers import Answer, Scored, check_k, recommendations
from fedecider.models.counts import popularity_probs
from fedecider.models.ensemble import Ensemble
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.item_table import CONFIG_FILE, ITEM_FILE, LOCAL_BACKBONE, WEIGHTS_FILE, read_item_ids
from fedecider.models.versions import in_force
from fedecider.running import manifest
from fedecider.running.damage import read_object
from fedecider.running.run_folder import RunFolder

BACKBONE_FOLDER = "backbone"
LATER_ROWS = "later_rows.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, ITEM_FILE, folders.INFERENCE_FILE)
READ_FILES = ("*.json", "*.safetensors", "*.md", "*.model", "*.txt")
"""What is fetched from the hub: no code and no pickle."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SOURCES = (
    "Give the folder that scripts/federate.py printed at its end, one that Result.export wrote, or a name of the hub"
)


class Place(NamedTuple):
    """The parts of one domain's recommender."""

    domain: str
    adapter: Path
    backbone: Path
    ensemble: Path | None
    """The folder of the private part of the client's ensemble; None where there is none."""
    inference: folders.InferenceConfig


class Source(NamedTuple):
    """Folders with recommenders of one or more domains."""

    name: str
    """As it was asked for."""
    adapters: Mapping[str, Path]
    """Domain -> folder of its adapter, in the order of their names."""
    run: RunFolder | None
    """The run that they are part of; None for a folder that stands for itself."""

    @property
    def domains(self) -> list[str]:
        return list(self.adapters)

    def choose(self, domain: str | None) -> str:
        """``domain``, or the only one for None.

        Raises:
            ValueError: there are several and none was named.
            FileNotFoundError: there is no such one.
        """
        if domain is None:
            if len(self.adapters) == 1:
                return self.domains[0]
            raise ValueError(f"got no domain for {self.name}, expected one of {self.domains}. Name it")
        if domain not in self.adapters:
            raise FileNotFoundError(
                f"no adapter for domain {domain!r} in {self.name}; found {self.domains}. Give one of these"
            )
        return domain

    def place(self, domain: str, private: bool = True) -> Place:
        """The parts of a domain's recommender, after their checksums were compared; without ``private`` its private
        part may have been taken away.

        Raises:
            FileNotFoundError: there is no such domain, or no backbone.
            ValueError: a file was changed since it was exported, is missing or damaged; the message names it.
        """
        adapter = self.adapters[self.choose(domain)]
        if self.run is not None:
            ensemble = _ensemble(self.run.private / domain)
            parts = [self.run.record, self.run.backbone, adapter, self.run.private / domain]
            manifest.verify(self.run.root, parts if private or ensemble else parts[:3])
            place = Place(
                domain, adapter, self.run.backbone, ensemble, folders.inference_config_of_run(self.run, adapter)
            )
        else:
            inference, backbone, root = folders.read_inference_config(adapter), _backbone(adapter), _root(adapter)
            ensemble = None if root == adapter else _ensemble(RunFolder(root).private / domain)
            place = Place(domain, adapter, backbone, ensemble, inference)
            _verify_copy(place, root)
        return place


def find_source(source: str | Path, revision: str | None = None) -> Source:
    """What ``source`` is: an output directory, one adapter in it, a folder that stands for itself, or a name of the
    hub.

    Of a run that was updated the version in force is taken (`fedecider.models.versions`).

    ``revision``: branch, tag or commit of a hub name. Under HF_HUB_OFFLINE=1 the local cache of the hub is asked alone.

    Raises:
        FileNotFoundError: there is no such folder or name.
        ValueError: a folder that holds no recommender, or ``revision`` with a folder.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"got {source!r}, expected the path of an output directory, or the name of a recommender on the hub"
        )
    path, name = Path(source), str(source)
    if not path.is_dir():
        return _of_folder(_from_hub(name, revision).resolve(), name)
    if revision is not None:
        raise ValueError(f"got revision {revision!r} with the folder {name}, expected it with a hub name only")
    return _of_folder(path.resolve(), name)


def _verify_copy(place: Place, root: Path) -> None:
    """Compare what was exported without its run with its checksums, where there are some: in the adapter's own
    folder, or beside ``adapters/`` and ``backbone/``."""
    if (root / manifest.MANIFEST_FILE).is_file():
        own = [place.adapter] if root != place.adapter else [root / name for name in (*ADAPTER_FILES, LATER_ROWS)]
        manifest.verify(root, own + ([place.backbone] if place.backbone.is_relative_to(root) else []))


def _of_folder(folder: Path, name: str) -> Source:
    if RunFolder(folder).record.is_file():
        folders.read_llm_run(folder)
        if not _adapters(folder):
            raise ValueError(
                f"got no adapter in {folder}, expected those of a finished run: it did not finish. Go on with it: "
                f"scripts/federate.py --resume true --output {folder} and the settings of the run"
            )
        folder = in_force(folder)
        return Source(name, _adapters(folder), RunFolder(folder))
    if (folder / CONFIG_FILE).is_file():
        run = RunFolder(_root(folder))
        if run.root != folder and run.record.is_file():
            run = RunFolder(in_force(run.root))
            return Source(name, {folder.name: run.adapters / folder.name}, run)
        manifest.refuse_lost(run.root)
        return Source(name, {folders.read_inference_config(folder).domain: folder}, None)
    if found := _adapters(folder):
        manifest.refuse_lost(folder)
        return Source(name, found, None)
    raise FileNotFoundError(f"{_no_run(name)}. {SOURCES}")


def _adapters(folder: Path) -> dict[str, Path]:
    """Domain -> its folder, but hidden ones: an export that was broken off leaves its scratch."""
    found = sorted(RunFolder(folder).adapters.glob("*"))
    return {path.name: path for path in found if path.is_dir() and not path.name.startswith(".")}


def _root(adapter: Path) -> Path:
    """The folder that an adapter may name parts of: of the run, or of the copy of one, in whose ``adapters/`` it lies.

    An adapter that lies elsewhere, or has checksums of its own, stands for itself.
    """
    run = RunFolder(adapter.parent.parent)
    return run.root if adapter.parent == run.adapters and not (adapter / manifest.MANIFEST_FILE).is_file() else adapter


def _from_hub(name: str, revision: str | None) -> Path:
    """The local copy of a model of the hub; fetched where it is not there and the network may be used."""
    if not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"{_no_run(name)}. {SOURCES}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(READ_FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{_no_run(name)}, and no model of that name from the hub ({reason}). {SOURCES}"
        ) from error


def _no_run(name: str) -> str:
    return f"no run in {name} (expected {RunFolder(Path(name)).record})"


def _backbone(adapter: Path) -> Path:
    """The folder of the backbone that an adapter names: in its own folder, in that of its run, or on the hub.

    What an adapter names is not trusted: it leads nowhere else on this machine.
    """
    config = adapter / CONFIG_FILE
    named = read_object(config, {"base_model_name_or_path": str})["base_model_name_or_path"]
    missing = f"no backbone {named!r:.100} for the adapter in {adapter}, expected "
    if HUB_NAME.fullmatch(named):  # a repository that has its base inside is read from where it lies
        inside = (one for one in (BACKBONE_FOLDER, LOCAL_BACKBONE) if (adapter / one).is_dir())
        named = next((one for one in inside if (adapter / one).resolve().is_relative_to(_root(adapter))), named)
    if named in (BACKBONE_FOLDER, LOCAL_BACKBONE):
        root, found = _root(adapter), (adapter / named).resolve()
        if not found.is_dir():
            raise FileNotFoundError(f"{missing}a folder of that name. Copy the backbone with it")
        if not found.is_relative_to(root):
            raise ValueError(f"got a backbone outside of {root} in {config}, expected it inside. Copy it into place")
        return found
    if not HUB_NAME.fullmatch(named):
        raise ValueError(
            f"got base_model_name_or_path {named!r:.100} in {config}, expected {BACKBONE_FOLDER}, {LOCAL_BACKBONE} or "
            "a name of the hub. Write one there"
        )
    try:
        return _from_hub(named, None)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{missing}a name of the hub. Copy the backbone with it ({error})") from error


def _ensemble(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


POPULARITY = "popularity"
NO_HISTORY_ENSEMBLE = "no history was given: the items with most events in the counts of the ensemble"


def most_popular(ensemble: Ensemble, k: int, number_A: Sequence[int] | None = None) -> list[Scored]:
    """The k items with most events in the counts of an ensemble; of ``number_A`` alone where it is given."""
    prob_I = popularity_probs(ensemble.knowledge.counts)
    asked = np.arange(len(prob_I)) if number_A is None else np.array(number_A)
    asked = asked[asked < len(prob_I)]
    best = asked[np.argsort(-prob_I[asked], kind="stable")[:k]]
    return [Scored(int(item), math.log(prob_I[item]), {POPULARITY: math.log(prob_I[item])}) for item in best]


def popular_items(source: str | Path, domain: str | None, k: int) -> tuple[str, Answer] | None:
    """The domain, and what ``Recommender.from_pretrained(source, domain).recommend([], k)`` answers.

    None where the source has no ensemble: then a model is needed.

    Raises:
        FileNotFoundError: there is no such source or domain.
        ValueError: as `fedecider.models.recommender.Recommender.from_pretrained`, or k below 1.
    """
    check_k(k)
    found = find_source(source)
    place = found.place(found.choose(domain))
    table = read_item_ids(place.adapter)
    if place.ensemble is None:
        return None
    scored = most_popular(load_ensemble(place.ensemble, table.keys), k)
    items = recommendations(scored, table.keys, table.titles)
    return place.domain, Answer(items, (), place.inference.alpha_shares, (NO_HISTORY_ENSEMBLE,))
