"""Evaluate the handed-over adapters of a run again, with plain transformers and peft, and compare with its metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from fedecider.bounds import NotNegative, dataclass
from fedecider.cross_silo.base_stages import pretrain_stage
from fedecider.cross_silo.continued import stage_run
from fedecider.cross_silo.ensembles import ENSEMBLE_ROW, KEPT, with_ensemble
from fedecider.cross_silo.item_ids import client_tasks, load_ids
from fedecider.cross_silo.prepare import data_of_run, load_data
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import clients_of
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, held_out, histories, with_target
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models import ensemble
from fedecider.models.client_model import Base, ClientModel, client_of
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.export import load_adapter
from fedecider.models.folders import read_llm_run
from fedecider.models.item_table import read_item_ids
from fedecider.models.lists import HISTORIES_FILE
from fedecider.running.damage import damage_names
from fedecider.running.manifest import verify as verify_files
from fedecider.running.run_folder import SITE, RunFolder
from fedecider.running.stages import only_stage
from idgen.backbone import load_backbone
from idgen.ranking import RankingContext
from idgen.tasks import Split
from idgen.tokenizer import load_tokenizer


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation: of which run.

    Args:
        run: The output directory that scripts/federate.py printed.
        split: The held-out items: the last (test) or the last but one (valid) of every user.
        tolerance: The largest allowed difference of a test metric.
        data: The folder of prepared domains, when it is not where the run found it.
    """

    run: str
    split: Literal["test", "valid"] = "test"
    tolerance: NotNegative = 1e-6
    data: str = ""


class Verified(NamedTuple):
    """One row of one domain, measured again."""

    domain: str
    row: str
    """Empty for the reported model, else the name of a row with the ensemble."""
    metrics: dict[str, float]
    recorded: dict[str, float]
    """What ``metrics.json`` says of that row; empty for another split than test."""

    @property
    def largest_difference(self) -> float:
        return max((abs(self.metrics[name] - value) for name, value in self.recorded.items()), default=0.0)


def verify(run: Path, settings: Settings, split: Split, device: torch.device) -> list[Verified]:
    """Rank ``split`` for every client of the run with its exported adapter, and with its ensemble where there is one.

    Raises:
        ValueError: a file was changed after the export or is damaged, the data are not those of the run, or an ID map
            does not match its adapter.
    """
    folder, record = RunFolder(run), read_llm_run(run)
    domains, result = data_of_run(settings.run, record, run), RunResult.read(run)
    places = [place for name in clients_of(domains) for place in (folder.adapters / name, folder.private / name)]
    verify_files(run, [folder.backbone, *(place for place in places if place.is_dir())])
    choices = result.metrics.get("joining", {}).get("clients", {})  # nobody had one where nobody trained alone
    if SITE in record:
        pretrained = only_stage(Path(settings.run.cache), "pretrain")
    else:
        first = stage_run(settings.run)
        known = domains if first is settings.run else load_data(first)
        pretrained = pretrain_stage(replace(first, cache=settings.run.cache), known, device)
    tokenizer = load_tokenizer(folder.backbone)
    ids = load_ids(pretrained.folder, domains, settings.run.pretrain, synthetic_of=())
    found = []
    for task in client_tasks(domains, ids, tokenizer, settings.run.pretrain):
        adapter = folder.adapters / task.name
        if [list(tokens) for tokens in read_item_ids(adapter).token_ids] != task.item_ids.token_ids:
            raise ValueError(f"the item IDs beside {adapter} are not those of the data, expected the pair of one run")
        backbone = load_backbone(folder.backbone, tokenizer, settings.run.quantize, device)
        model = load_adapter(backbone, adapter).to(device).eval()
        drop_seen, precision = get_protocol(settings.run.protocol).drop_seen, settings.training.precision
        context = RankingContext(replace(settings.ranking, num_eval_users=0), drop_seen, precision, device)
        base = Base(model, tokenizer, context)
        exported = ClientModel(base, client_of(base, task, settings.run.seed, batch_size=1), None)
        private = folder.private / task.name
        if (private / HISTORIES_FILE).is_file():
            raise ValueError(
                f"got {folder.root}, whose counts of {task.name} were updated and hold its held-out events, expected "
                "the run that it was made of"
            )
        rows = {"": exported.positions(split)}
        if settings.run.ensemble.kind != "none" and private.is_dir():  # it may be shown without what is private in it
            kept = choices.get(task.name, {}).get("keeps", "joined")
            whole = load_ensemble(private, domains[task.name].own_keys)
            assert whole.beside_model is not None
            tested = SequenceArray.of(task.sequences).take(with_target(task.sequences, split))
            asked = (whole.knowledge, histories(tested, split), held_out(tested, split))
            label = with_ensemble(KEPT if kept != "joined" else settings.run.method)
            rows[label] = ensemble.positions(*asked, exported.scores(), [whole.beside_model], drop_seen)[0].whole
            if kept != "local":  # whose counts are its own, as those of no row are
                rows[ENSEMBLE_ROW] = ensemble.positions(*asked, None, [whole.alone], drop_seen)[0].whole
        for row, place_U in rows.items():
            recorded = _recorded(result, run, task.name, row) if split == "test" else {}
            found.append(Verified(task.name, row, mean_metrics(place_U), recorded))
    return found


def _recorded(result: RunResult, run: Path, domain: str, row: str) -> dict[str, float]:
    """Test metrics of a row, or where it is empty of the model that was exported."""
    with damage_names(RunFolder(run).metrics):
        rows = result.figures[domain]["test"]
        values = rows[row] if row else rows.get(KEPT, rows[result.reported])
        metrics = {metric: float(value["mean"]) for metric, value in values.items()}
    if not metrics or not all(map(math.isfinite, metrics.values())):
        raise ValueError(f"got metrics.json of {run} without finite test metrics of {domain}, expected some")
    return metrics
