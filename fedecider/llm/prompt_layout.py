"""What a model card says about prompts, taken from a task and the settings of decoding."""

from __future__ import annotations

from typing import Any

from fedecider.lora.program import PromptLayout
from idgen.backbones.families import family_of
from idgen.prompts import load_templates, split_wording
from idgen.ranking_config import RankingConfig
from idgen.samples import Task

WITHOUT_USER = 1
"""The wording of template 0 for an unknown user, in the tables of `idgen.segments.PromptParts`."""


def prompt_layout(task: Task, ranking: RankingConfig, model: Any, catalogue: str) -> PromptLayout:
    """The prompt of template 0 for an unknown user, as `idgen.samples.encode_histories` writes it for ``model``."""
    samples, parts, family = task.config, task.parts, family_of(model)
    before, after = split_wording(load_templates(samples.templates)[0].no_user, catalogue)

    def tokens(segments: Any) -> tuple[int, ...]:
        starts = [(int(parts.segments.start_G[one]), int(parts.segments.length_G[one])) for one in segments]
        return tuple(int(token) for start, length in starts for token in parts.segments.token_F[start : start + length])

    return PromptLayout(
        before=" ".join(before),
        after=" ".join(after),
        separator=None if samples.is_row else samples.separator,
        end_token=task.trie.eos_token_id,
        max_history=samples.shown_history,
        newest_first=samples.newest_first,
        max_tokens=samples.max_source_tokens,
        num_beams=ranking.num_beams,
        length_penalty=ranking.length_penalty,
        prior_weight=ranking.prior_weight,
        auto_class=family.auto_class,
        continues_prompt=family.continues_prompt,
        before_tokens=tokens(parts.before_PL[WITHOUT_USER]),
        separator_tokens=tokens(parts.separator_K[:1]),
        after_tokens=tokens(parts.after_PL[WITHOUT_USER]),
        longest_id=max(map(len, task.item_ids.token_ids)),
    )
