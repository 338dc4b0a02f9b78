import pytest
from tiny_tasks import make_domain, make_tokenizer

from idgen.prompts import check_wording, domain_words, load_templates, prompt_texts, render, split_wording
from idgen.tokenizer import encode


def test_there_are_ten_distinct_natural_templates_and_a_short_one():
    natural, compact = load_templates("natural"), load_templates("compact")
    assert len({wording for template in natural for wording in template}) == 20
    assert len(compact) >= 1
    longest = max(len(wording.split()) for template in compact for wording in template)
    assert longest < min(len(wording.split()) for template in natural for wording in template)


def test_unknown_set_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        load_templates("poetic")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wording", "with_user"),
    [
        ("after {history}, what?", False),  # punctuation sticks to the placeholder
        ("{user} took {history}", False),
        ("the user took {history}", True),
        ("{history} and {history}", False),
        ("{history}  next", False),
        ("{history} of {shop}", False),
        ("{domain} {domain} {history}", False),
    ],
)
def test_bad_wordings_are_refused(wording, with_user):
    with pytest.raises(ValueError, match="expected"):
        check_wording(wording, with_user)


def test_render_by_hand():
    wording = "{domain} {user} : {history} then"
    assert render(wording, "movies_tv", ["red fox", "owl"], "old hat") == "movies tv old hat : red fox ; owl then"
    assert split_wording(wording, "movies_tv") == (["movies tv", "{user}", ":"], ["then"])
    assert domain_words("cds-and_vinyl") == "cds and vinyl"


def test_a_trained_tokenizer_knows_every_prompt_word():
    domain = make_domain()
    tokenizer = make_tokenizer([domain])
    for kind in ("natural", "compact"):
        for tokens in encode(tokenizer, prompt_texts(kind, [domain.name])):
            assert tokens
            assert tokenizer.unk_token_id not in tokens
