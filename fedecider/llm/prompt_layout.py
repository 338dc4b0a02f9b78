"""What a model card says about prompts, taken from the settings of a run."""

from __future__ import annotations

from typing import Any

from fedecider.llm.setup import Settings
from fedecider.lora.card import PromptLayout
from idgen.backbones.families import family_of
from idgen.prompts import load_templates, split_wording
from idgen.samples import Task


def prompt_layout(task: Task, settings: Settings, model: Any, catalogue: str) -> PromptLayout:
    """The prompt of template 0 for an unknown user, as `idgen.samples.encode_histories` writes it for ``model``."""
    samples, ranking = settings.run.pretrain.samples, settings.ranking
    before, after = split_wording(load_templates(samples.templates)[0].no_user, catalogue)
    family = family_of(model)
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
    )
