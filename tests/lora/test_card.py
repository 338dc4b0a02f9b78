"""The model card: what it says of prompts and of the run."""

import pytest

from fedecider.models.export import Card, PromptLayout, model_card, prompt_layout
from fedecider.models.item_table import LOCAL_BACKBONE
from idgen.config import TITLE_WORDS, SampleConfig
from idgen.item_ids import keyword_item_ids, phrase_item_ids, unique_phrases
from idgen.ranking_config import RankingConfig
from idgen.samples import encode_histories
from idgen.tasks import catalogue_task
from idgen.tokenizer import train_tokenizer

CARD = Card(
    method="fedecider",
    domain="crime",
    prompt=PromptLayout("so far the user has picked", "and next", ";", 1, 7, 512, 20, prompt_end=1),
    alpha={"crime": 1.5, "comics": -0.5, "children": 2.0},
    metrics={"ndcg@10": 0.123456},
    protocol="leave-last-out, full catalogue",
    details={"round": 5},
)
KEYS = [f"k{number:02d}" for number in range(20)]
TEXTS = [f"title: The {number} Lanterns" for number in range(20)]


@pytest.mark.parametrize("one_token", [False, True])
def test_the_layout_is_that_of_our_prompts(one_token):
    if one_token:
        phrases = unique_phrases({"crime": KEYS}, {"crime": TEXTS}, TITLE_WORDS)["crime"]
        tokenizer = train_tokenizer(TEXTS, 300, phrases)
        ids, samples = phrase_item_ids(KEYS, phrases, tokenizer), SampleConfig(templates="history", max_history=4)
    else:
        tokenizer = train_tokenizer(TEXTS, 300)
        ids, samples = keyword_item_ids(KEYS, TEXTS, tokenizer), SampleConfig(templates="natural", max_history=4)
    task = catalogue_task("crime", ids, tokenizer, samples)
    layout = prompt_layout(task, RankingConfig(num_beams=20), "crime")
    input_ids, _ = encode_histories(task, [[3, 19, 12, 3, 0, 11]])
    written = " ".join(tokenizer.decode(input_ids[0]).split())
    if one_token:
        assert (layout.before, layout.after, layout.separator, layout.end_token) == ("", "", None, None)
        assert len(input_ids[0]) - (layout.prompt_end is not None) == layout.max_history == 4
    else:
        assert written.startswith(layout.before)
        assert written.count(layout.separator) == layout.max_history - 1
        assert int(input_ids[0, -1]) == layout.prompt_end == tokenizer.eos_token_id
        assert layout.after in written


def test_the_card_says_prompt_weights_shares_and_metrics():
    text = model_card(CARD, LOCAL_BACKBONE, "AutoModelForCausalLM")
    assert text.startswith('---\nlibrary_name: peft\nbase_model: "../../backbone"\n')
    assert "| prompt template | `so far the user has picked {history} and next`, then the closing token, 1 |" in text
    assert "| separator between two IDs | `;` |" in text
    assert "| `max_history` | 7 (the newest items) |" in text
    assert "| comics | -0.5000 | 12.5% |" in text
    assert "| ndcg@10 | 0.1235 |" in text
    assert "| round | 5 |" in text
    assert "leave-last-out, full catalogue" in text


def test_the_card_names_data_and_licence():
    text = model_card(CARD, LOCAL_BACKBONE, "AutoModelForCausalLM")
    assert "customers of `crime`" in text
    assert "`license:`" in text


def test_a_published_backbone_is_named_by_its_hub_name():
    assert 'base_model: "someone/books"' in model_card(CARD, "someone/books", "AutoModelForCausalLM")
