"""What a model card says about prompts, taken from the settings of a run."""

from __future__ import annotations

from fedecider.llm.setup import Settings
from fedecider.lora.card import PromptLayout
from idgen.prompts import load_templates, split_wording


def prompt_layout(domain: str, settings: Settings) -> PromptLayout:
    """The prompt of template 0 for an unknown user of ``domain``, as `idgen.samples.encode_histories` writes it."""
    samples, ranking = settings.run.pretrain.samples, settings.ranking
    before, after = split_wording(load_templates(samples.templates)[0].no_user, domain)
    return PromptLayout(
        before=" ".join(before),
        after=" ".join(after),
        separator=samples.separator,
        max_history=samples.shown_history,
        newest_first=samples.newest_first,
        max_tokens=samples.max_source_tokens,
        num_beams=ranking.num_beams,
        length_penalty=ranking.length_penalty,
    )
