"""The words of the pages: one source, marked where they stand, explained once a part, those of docs/concepts.md."""

import re
from pathlib import Path

from fedecider.report.page import TEN_TERMS, TERMS, Words, term_list

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"


def test_the_ten_words_are_those_of_the_documents():
    table = PAGE.read_text(encoding="utf-8").partition("## Ten words")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    plain = [(name, re.sub(r"`|\[([^\]]*)\]\([^)]*\)| \((?:above|below)\)", r"\1", text)) for name, text in rows[2:]]
    assert plain == [(term.name, term.meaning) for term in TEN_TERMS]


def test_every_word_has_its_own_key_and_forms():
    assert len({term.key for term in TERMS}) == len(TERMS)
    forms = [form.lower() for term in TERMS for form in term.forms or term.name.split(", ")]
    assert len(set(forms)) == len(forms)
    for form in forms:
        words = Words()
        assert words.mark(form.upper()).startswith("<dfn"), form  # none is hidden by a longer one, or by its own marks
        assert len(words.met()) == 1


def test_a_word_is_marked_once_a_part_and_keeps_its_spelling():
    words = Words()
    words.new_part()
    text = words.mark("Clients & clients: <hit@10>, num_rounds, hit@100")
    assert text.startswith(
        '<dfn tabindex="0" aria-describedby="meaning-client">Clients<span class="tip" aria-hidden="true">'
    )
    assert text.count("<dfn") == 2
    assert "</dfn> &amp; clients: &lt;<dfn" in text
    assert text.endswith("</dfn>&gt;, num_rounds, hit@100")  # parts of names are no words
    assert words.mark("a client") == "a client"
    words.new_part()
    assert words.mark("a client").startswith("a <dfn")
    assert [term.name for term in words.met()] == ["client", "hit@k"]


def test_the_longest_word_wins_and_other_texts_are_made_by_the_caller():
    words = Words()
    assert "text neighbours + counts<span" in words.mark("text neighbours + counts")
    assert Words().mark("x_y client", lambda text: text.replace("_", "-")).startswith("x-y <dfn")
    assert words.mark("no such thing") == "no such thing"


def test_the_list_has_the_entries_that_marks_point_to():
    words = Words()
    marked = words.mark("seed, LoRA, Holm-corrected")
    pointed = re.findall(r'aria-describedby="([^"]*)"', marked)
    assert sorted(pointed) == sorted(re.findall(r'<dd id="([^"]*)"', term_list(words.met())))
    assert pointed == ["meaning-seed", "meaning-adapter", "meaning-holm-s-correction"]
