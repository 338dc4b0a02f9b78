import pytest
from tiny_tasks import make_domain, make_tokenizer

from idgen.prompts import DOMAIN, HISTORY, domain_words, load_templates, prompt_texts, split_template
from idgen.tokenizer import encode

SETS = ("natural", "compact", "history", "list")


def test_there_are_ten_distinct_natural_templates_and_a_short_one():
    natural, compact = load_templates("natural"), load_templates("compact")
    assert len(set(natural)) == 10
    longest = max(len(template.split()) for template in compact)
    assert longest < min(len(template.split()) for template in natural)


def test_unknown_set_is_refused():
    with pytest.raises(ValueError, match="poetic"):
        load_templates("poetic")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SETS)
def test_placeholders_are_words_of_their_own(name):
    for template in load_templates(name):
        words = template.split(" ")
        assert words.count(HISTORY) == 1
        assert words.count(DOMAIN) <= 1
        assert all(word and (word in (HISTORY, DOMAIN) or "{" not in word) for word in words)


def test_split_by_hand():
    assert split_template("{domain} : {history} then", "movies_tv") == ("movies tv :", "then")
    assert domain_words("cds-and_vinyl") == "cds and vinyl"


def test_a_trained_tokenizer_knows_every_prompt_word():
    domain = make_domain()
    tokenizer = make_tokenizer([domain])
    for kind in ("natural", "compact"):
        for tokens in encode(tokenizer, prompt_texts(kind, [domain.name])):
            assert tokens
            assert tokenizer.unk_token_id not in tokens
