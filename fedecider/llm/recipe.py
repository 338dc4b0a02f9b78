"""What a recommender has to know beside its weights: how it is asked, and what its card says of the run it is from.

It is written once, when a run hands over, into ``recommender.json`` beside the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.record import write_json
from fedecider.llm.run_record import read_llm_run
from fedecider.running.cli import from_plain
from fedecider.running.damage import damage_names, read_object
from fedecider.running.run_folder import RunFolder
from fedecider.running.stages import as_plain
from idgen.draws import SampleConfig
from idgen.keywords import KeywordConfig
from idgen.quantized import Quantize
from idgen.ranking_config import RankingConfig

RECIPE_FILE = "recommender.json"
FIELDS = {"domain": str, "samples": dict, "ranking": dict, "keywords": dict, "text_encoder": str}
FIELDS |= {"quantize": str, "alpha": dict, "facts": dict}


class Recipe(NamedTuple):
    """How one domain's model is asked."""

    domain: str
    samples: SampleConfig
    ranking: RankingConfig
    keywords: KeywordConfig
    """How the ID of an item that comes later is made of its text."""
    text_encoder: str
    quantize: Quantize
    """Format of the backbone's linear layers while the adapter was trained."""
    alpha: Mapping[str, float]
    """Fusion weight of the client for every domain, the mean over layers; empty for methods without."""
    facts: Mapping[str, Any] = {}
    """What the card says of the run (`fedecider.llm.run_facts`); empty where nothing is known."""

    @property
    def alpha_shares(self) -> dict[str, float]:
        """Each domain's share of the absolute fusion weights; empty for methods without."""
        total = sum(map(abs, self.alpha.values())) or 1.0
        return {name: abs(alpha) / total for name, alpha in self.alpha.items()}


def recipe_of_run(folder: RunFolder, adapter: Path) -> Recipe:
    """The recipe of one adapter of a run, with a text encoder in a folder as the run has it.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it is one of the embedding track, or a file is damaged; the message names it.
    """
    record = read_llm_run(folder.root)
    with damage_names(folder.record):
        encoder = str(record["config"]["run"]["pretrain"]["text_encoder"])
    return read_recipe(adapter)._replace(text_encoder=encoder)


def read_recipe(folder: Path) -> Recipe:
    """The recipe in an adapter's folder.

    Raises:
        ValueError: there is none, or it is damaged; the message names the file.
    """
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise ValueError(
            f"got {folder} without {RECIPE_FILE}, expected a run folder, or a folder that a run or save_pretrained "
            "wrote: how the adapter is asked stands there. Give the run folder"
        )
    content = read_object(path, FIELDS)
    with damage_names(path):
        if not is_plain_name(content["domain"]):
            raise ValueError(f"domain {content['domain']!r:.60}, which cannot be the name of a folder")
        alpha = {str(name): float(value) for name, value in content["alpha"].items()}
        if not all(map(math.isfinite, alpha.values())):
            raise ValueError("weights that are no finite numbers")
    return Recipe(
        content["domain"],
        from_plain(SampleConfig, content["samples"], f"samples in {path}"),
        from_plain(RankingConfig, content["ranking"], f"ranking in {path}"),
        from_plain(KeywordConfig, content["keywords"], f"keywords in {path}"),
        content["text_encoder"],
        content["quantize"],
        alpha,
        content["facts"],
    )


def is_plain_name(name: str) -> bool:
    """Whether ``name`` can be that of a folder inside another one, and leads nowhere else."""
    return bool(name) and not name.startswith(".") and name.isprintable() and not set(name) & set("/\\:")


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    """Write ``recommender.json`` into ``folder``; of a text encoder in a folder of this machine, the name alone."""
    encoder = recipe.text_encoder
    named = recipe._replace(text_encoder=Path(encoder).name if Path(encoder).is_dir() else encoder)
    write_json(folder / RECIPE_FILE, {name: as_plain(value) for name, value in named._asdict().items()})
    return folder / RECIPE_FILE
