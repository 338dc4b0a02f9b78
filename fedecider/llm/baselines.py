"""The baselines that stand in every run of the LLM track: models without any adapter, counts, item texts, the canary.

Shape legend: U users.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedecider.baselines.counts import decayed_cooccurrence, last_item_cooccurrence, popularity
from fedecider.baselines.text_neighbours import text_and_count_scores, text_neighbour_scores
from fedecider.evaluation.canary import memoriser
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.federation.streams import stream
from fedecider.llm.item_texts import encoded_texts
from fedecider.llm.loading import load_student
from fedecider.llm.setup import Foundation, Settings
from fedecider.methods.recommender import ClientModels
from fedecider.report.rows import CANARY
from idgen.backbone import load_backbone
from idgen.ranking import rank_task
from idgen.samples import Split

Positions = dict[str, Tensor]
"""domain -> (U,) positions of the held-out items."""
TEACHER, STUDENT = "zero-shot teacher", "zero-shot student"
COUNTS = {
    "popularity": popularity,
    "last-item co-occurrence": last_item_cooccurrence,
    "decayed co-occurrence": decayed_cooccurrence,
}
"""Counting baselines by the name of their row."""
TEXT, TEXT_AND_COUNTS = "text neighbours", "text neighbours + counts"
UNTRAINED = (*COUNTS, TEXT, TEXT_AND_COUNTS)
"""Rows that need no training: a model that is not above them has learnt nothing that is worth its training."""


def zero_shot(
    settings: Settings, foundation: Foundation, recommender: ClientModels, device: torch.device, split: Split = "test"
) -> dict[str, Positions]:
    """Positions of the full-depth backbone, where it is asked for, and of the shared student, without adapters."""
    load_student(recommender)
    student = {name: recommender.positions(recommender.names.index(name), split) for name in foundation.domains}
    if not settings.run.teacher_row:
        return {STUDENT: student}
    teacher = load_backbone(foundation.pretrained.folder / "backbone", recommender.tokenizer)
    teacher.to(device)  # type: ignore[arg-type]
    drop_seen, precision = get_protocol(settings.run.protocol).drop_seen, settings.training.precision
    ranking = settings.ranking
    return {
        TEACHER: {
            task.name: rank_task(
                teacher, task, task.trie.to(device), split, None, ranking, drop_seen, precision, device
            )
            for task in recommender.tasks
            if task.name in foundation.domains
        },
        STUDENT: student,
    }


def counting_positions(settings: Settings, foundation: Foundation, split: str = "test") -> dict[str, Positions]:
    """Positions of the rows that need no training and of the canary.

    Counts are those of the public pool and of the clients' train parts of the domain; item texts are vectors of
    ``pretrain.text_encoder``, and texts and counts are added up with one weight for all data.
    """
    protocol = get_protocol(settings.run.protocol)
    found: dict[str, Positions] = {name: {} for name in (*UNTRAINED, CANARY)}
    vectors = encoded_texts(foundation.everyone, settings.run.pretrain.text_encoder, settings.run.cache)
    for name, domain in foundation.domains.items():
        sequences, num_items = domain.clients.sequences, len(domain.item_keys)
        for label, count in COUNTS.items():
            found[label][name] = count(sequences, num_items, split, protocol, extra=domain.public.sequences)
        for label, score in {
            TEXT: text_neighbour_scores(vectors[name], sequences, split),
            TEXT_AND_COUNTS: text_and_count_scores(vectors[name], sequences, split, domain.public.sequences),
        }.items():
            found[label][name] = rank_held_out(score, sequences, num_items, split, protocol)
        generator = stream(settings.run.seed, CANARY, name)
        found[CANARY][name] = memoriser(sequences, num_items, split, protocol, generator=generator)
    return found
