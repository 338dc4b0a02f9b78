"""What a recommender has beside its weights: the record of its run, and its inference config.

``inference_config.json`` lies beside an adapter's weights; plain transformers and peft do not read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.data.constant_words import CARD
from fedecider.federation.record import write_json
from fedecider.running.damage import damage_names, damaged, read_object
from fedecider.running.options import from_plain
from fedecider.running.plain import as_plain
from fedecider.running.run_folder import RunFolder, read_run
from idgen.config import Quantize, SampleConfig
from idgen.ranking_config import RankingConfig


def read_llm_run(root: Path) -> dict[str, Any]:
    """``run.json`` with settings of the cross-silo track.

    Raises:
        FileNotFoundError: ``root`` is not an output directory.
        ValueError: it holds a run of the cross-device track, or its record is damaged.
    """
    record = read_run(root)
    if "ranking" not in record["config"]:
        embedding = "training" in record["config"]
        kind = "of the cross-device track" if embedding else "without a language model"
        where = "results.md and report.html" if embedding else "results.md"
        raise ValueError(f"got {root}, a run {kind}, expected one of the cross-silo track: its results are in {where}")
    if not isinstance(record.get("data"), dict):
        raise damaged(RunFolder(root).record, "no block data")
    return record


INFERENCE_FILE = "inference_config.json"
FIELDS = {"domain": str, "samples": dict, "ranking": dict, "ids": str, "titles_as_written": bool}
FIELDS |= {"text_encoder": str, "quantize": str, "drop_seen": bool, "alpha": dict}


class InferenceConfig(NamedTuple):
    """How prompts for one domain's model are built and its answers ranked; ``inference_config.json``."""

    domain: str
    samples: SampleConfig
    ranking: RankingConfig
    ids: str
    """What item IDs are made of (``pretrain.ids``)."""
    titles_as_written: bool
    """Whether IDs of new items keep the words of the title as they are written (`idgen.item_ids.Words`)."""
    text_encoder: str
    quantize: Quantize
    """Format of the backbone's linear layers while the adapter was trained."""
    drop_seen: bool
    """Whether the model alone leaves out items of the history, as the protocol of the run does."""
    alpha: Mapping[str, float]
    """Fusion weight of the client for every domain, the mean over layers; empty for methods without."""
    constant_words: Mapping[str, Sequence[str]] = {}
    """Left out of its items' texts, and so of those of new items (`fedecider.data.constant_words`)."""

    @property
    def words(self) -> Any:
        """How the text of a new item becomes its ID (`idgen.item_ids.Words`)."""
        from idgen.config import TITLE_WORDS, TITLES_AS_WRITTEN

        return TITLES_AS_WRITTEN if self.titles_as_written else TITLE_WORDS

    @property
    def alpha_shares(self) -> dict[str, float]:
        """Each domain's share of the absolute fusion weights; empty for methods without."""
        total = sum(map(abs, self.alpha.values())) or 1.0
        return {name: abs(alpha) / total for name, alpha in self.alpha.items()}


def inference_config_of_run(folder: RunFolder, adapter: Path) -> InferenceConfig:
    """The inference config of one adapter of a run, with a text encoder in a folder as the run has it.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it is one of the cross-device track, or a file is damaged; the message names it.
    """
    record = read_llm_run(folder.root)
    with damage_names(folder.record):
        encoder = str(record["config"]["run"]["pretrain"]["text_encoder"])
    return read_inference_config(adapter)._replace(text_encoder=encoder)


def read_inference_config(folder: Path) -> InferenceConfig:
    """The inference config in an adapter's folder.

    Raises:
        ValueError: there is none, or it is damaged; the message names the file.
    """
    path = folder / INFERENCE_FILE
    if not path.is_file():
        raise ValueError(
            f"got {folder} without {INFERENCE_FILE}, expected an output directory, or a folder that a run or "
            "Result.export wrote: how the adapter is asked stands there. Give the output directory"
        )
    content = read_object(path, FIELDS)
    with damage_names(path):
        if not is_plain_name(content["domain"]):
            raise ValueError(f"domain {content['domain']!r:.60}, which cannot be the name of a folder")
        alpha = {str(name): float(value) for name, value in content["alpha"].items()}
        if not all(map(math.isfinite, alpha.values())):
            raise ValueError("weights that are no finite numbers")
        constant = {str(name): list(map(str, words)) for name, words in content.get(CARD, {}).items()}
    return InferenceConfig(
        content["domain"],
        from_plain(SampleConfig, content["samples"], f"samples in {path}"),
        from_plain(RankingConfig, content["ranking"], f"ranking in {path}"),
        content["ids"],
        content["titles_as_written"],
        content["text_encoder"],
        content["quantize"],
        content["drop_seen"],
        alpha,
        constant,
    )


def is_plain_name(name: str) -> bool:
    """Whether ``name`` can be that of a folder inside another one, and leads nowhere else."""
    return bool(name) and not name.startswith(".") and name.isprintable() and not set(name) & set("/\\:")


def write_inference_config(config: InferenceConfig, folder: Path) -> Path:
    """Write ``inference_config.json`` into ``folder``; of a text encoder in a folder of this machine, the name
    alone."""
    encoder = config.text_encoder
    named = config._replace(text_encoder=Path(encoder).name if Path(encoder).is_dir() else encoder)
    write_json(folder / INFERENCE_FILE, {name: as_plain(value) for name, value in named._asdict().items()})
    return folder / INFERENCE_FILE
