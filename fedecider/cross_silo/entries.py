"""The entries of a table beside the trained model: heuristic baselines, teacher, student and canary.

Shape legend: U users of a client, K returned items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecider.baselines.counts import ALL, NEW, REPEATED, heuristic_lists, heuristic_positions, text_votes
from fedecider.baselines.own import own_positions
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.cross_silo.settings import Settings
from fedecider.data.near_texts import NearTexts, nearest_texts, unit_vectors
from fedecider.evaluation.canary import memoriser_positions
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.streams import stream
from fedecider.methods.client_models import ClientModels
from fedecider.models.client_model import ClientModel
from fedecider.models.item_texts import encoded_texts
from fedecider.report.tables import CANARY
from idgen.backbone import load_backbone
from idgen.tasks import Split

Positions = dict[str, Tensor]
"""domain -> (U,) positions of the held-out items."""
ModelOf = Callable[[str], ClientModel]
"""The model of a client, by its name."""
OnRanked = Callable[[str], None]
"""Called after every client's share of a row, with the row's name."""


def silent(row: str) -> None:
    """Tells nobody."""


TEACHER, STUDENT = "zero-shot teacher", "zero-shot student"


def zero_shot(
    settings: Settings,
    artifacts: BaseArtifacts,
    models: ClientModels,
    split: Split = "test",
    on_ranked: OnRanked = silent,
) -> dict[str, Positions]:
    """Positions of the full-depth backbone, where it is asked for, and of the shared student, without adapters."""
    student = {}
    for name in artifacts.domains:
        student[name] = models.student(name).positions(split)
        on_ranked(STUDENT)
    if not settings.run.teacher_row:
        return {STUDENT: student}
    teacher: Any = load_backbone(artifacts.pretrained.folder / "backbone", models.base.tokenizer)
    base = models.base._replace(model=teacher.to(models.base.device))
    whole = {client.name: ClientModel(base, client, None) for client in models.clients}
    return {TEACHER: {name: whole[name].positions(split) for name in artifacts.domains}, STUDENT: student}


class ItemTexts(NamedTuple):
    """What rules and ensembles read of the item texts of a catalogue."""

    unit_ID: np.ndarray
    near: NearTexts


def item_texts_of(
    settings: Settings, artifacts: BaseArtifacts, device: torch.device | str = "cpu"
) -> dict[str, ItemTexts]:
    """Domain -> its item texts as vectors of ``pretrain.text_encoder``, worked out once for silos of a catalogue."""
    vectors = encoded_texts(artifacts.everyone, settings.run.pretrain.text_encoder, settings.run.cache)
    once: dict[str, ItemTexts] = {}
    found: dict[str, ItemTexts] = {}
    for name, domain in artifacts.domains.items():
        same = domain.items.name
        if same not in once:
            unit_ID = unit_vectors(vectors[name].numpy())
            once[same] = ItemTexts(unit_ID, nearest_texts(unit_ID, device=device))
        found[name] = once[same]
    return found


class Rules(NamedTuple):
    """How entries that need no training rank."""

    whole: dict[str, dict[str, Positions]]
    """Split -> entry -> client -> positions."""
    lists: dict[str, dict[str, Positions]]
    """`fedecider.cross_silo.lists.Lists`; nothing where seen items are dropped."""
    ten: dict[str, dict[str, Tensor]]
    """Entry -> client -> the first items of its test lists (`fedecider.evaluation.beyond`)."""


def counting_positions(
    settings: Settings,
    artifacts: BaseArtifacts,
    texts: Mapping[str, ItemTexts],
    splits: Sequence[str] = ("test",),
    on_ranked: OnRanked = silent,
) -> Rules:
    """How the rows that need no training, the user's own baselines and the canary rank.

    Counts are those of the public pool and of the clients' train parts of the domain; texts and counts are added up
    with one weight for all data.

    Raises:
        ValueError: a protocol that samples candidates.
    """
    protocol = get_protocol(settings.run.protocol)
    if protocol.num_sampled is not None:
        raise ValueError(f"got protocol {protocol.name}, expected one whose candidates are the whole catalogue")
    found: dict[str, dict[str, Positions]] = {split: {} for split in splits}
    apart: dict[str, dict[str, Positions]] = {REPEATED: {}, NEW: {}}
    ten_of: dict[str, dict[str, Tensor]] = {}
    for name, domain in artifacts.domains.items():
        sequences, num_items = domain.clients.sequences, len(domain.item_keys)
        text, extra = text_votes(texts[name].near), domain.public.sequences
        asked, ten = (sequences, num_items, splits), dict[str, Tensor]()
        if protocol.drop_seen:
            rules = heuristic_positions(*asked, text, extra=extra, ten=ten)
        else:
            lists = heuristic_lists(*asked, text, extra=extra, ten=ten)
            rules = lists[ALL]
            for part, of_part in apart.items() if "test" in splits else ():
                for label, position_U in lists[part]["test"].items():
                    of_part.setdefault(label, {})[name] = position_U
        canary = memoriser_positions(*asked, protocol, generator=stream(settings.run.seed, CANARY, name))
        own = own_positions(domain, splits, protocol)
        for split in splits:
            for label, position_U in {**rules[split], **own[split], CANARY: canary[split]}.items():
                found[split].setdefault(label, {})[name] = position_U
        for label, item_UK in ten.items():
            ten_of.setdefault(label, {})[name] = item_UK
        on_ranked("heuristic baselines")
    for of_rows in (*found.values(), *apart.values()):  # a row stands where every client has it
        for label in [label for label, of_clients in of_rows.items() if len(of_clients) < len(artifacts.domains)]:
            del of_rows[label]
    return Rules(found, apart, ten_of)
