"""The baselines that stand in every run of the LLM track: models without any adapter, counts, and the canary."""

from __future__ import annotations

import torch
from torch import Tensor

from fedecider.baselines.counts import decayed_cooccurrence, last_item_cooccurrence, popularity
from fedecider.evaluation.canary import memoriser
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.streams import stream
from fedecider.llm.loading import load_student
from fedecider.llm.setup import Foundation, Settings
from fedecider.methods.recommender import Recommender
from fedecider.report.rows import CANARY
from idgen.backbone import load_backbone
from idgen.ranking import rank_task

Positions = dict[str, Tensor]
"""domain -> (U,) positions of the held-out items."""
TEACHER, STUDENT = "zero-shot teacher", "zero-shot student"
COUNTS = {
    "popularity": popularity,
    "last-item co-occurrence": last_item_cooccurrence,
    "decayed co-occurrence": decayed_cooccurrence,
}
"""Counting baselines by the name of their row."""


def zero_shot(
    settings: Settings, foundation: Foundation, recommender: Recommender, device: torch.device
) -> dict[str, Positions]:
    """Test positions of the full-depth backbone and of the shared student, both without any adapter."""
    load_student(recommender)
    student = {name: recommender.positions(client, "test") for client, name in enumerate(recommender.names)}
    teacher = load_backbone(foundation.pretrained.folder / "backbone", recommender.tokenizer)
    teacher.to(device)  # type: ignore[arg-type]
    drop_seen, precision = get_protocol(settings.run.protocol).drop_seen, settings.training.precision
    ranking = settings.ranking
    return {
        TEACHER: {
            task.name: rank_task(
                teacher, task, task.trie.to(device), "test", None, ranking, drop_seen, precision, device
            )
            for task in recommender.tasks
        },
        STUDENT: student,
    }


def counting_positions(settings: Settings, foundation: Foundation, split: str = "test") -> dict[str, Positions]:
    """Positions of the counting baselines (public pool and the clients' train parts of the domain) and the canary."""
    protocol = get_protocol(settings.run.protocol)
    found: dict[str, Positions] = {name: {} for name in (*COUNTS, CANARY)}
    for name, domain in foundation.domains.items():
        sequences, num_items = domain.clients.sequences, len(domain.item_keys)
        for label, count in COUNTS.items():
            found[label][name] = count(sequences, num_items, split, protocol, extra=domain.public.sequences)
        generator = stream(settings.run.seed, CANARY, name)
        found[CANARY][name] = memoriser(sequences, num_items, split, protocol, generator=generator)
    return found
