"""Items by what people type."""

import csv
import gzip
import random

import pytest

from fedecider.models.item_search import Items

TITLES = [
    "Burning Moon Investigations, Book 1: The Frozen Alibi",
    "Burning Moon Investigations, Book 2: The Bitter Suspect",
    "Dune (Dune Chronicles, #1)",
    "Dune Messiah (Dune Chronicles, #2)",
    "Matrix, The (1999)",
    "Aliens",
    "Émile's Café & Bar",
    "The Hitchhiker's Guide to the Galaxy",
    "The Same",
    "the same",
    "Silver Blaze (The Memoirs of Sherlock Holmes, #1)",
    "Volume 7 of the Collected Letters",
]
KEYS = [f"k{number}" for number in range(len(TITLES))]
ITEMS = Items(KEYS, TITLES)

EXACT = {"k3": 3, " k3 ": 3, "aliens": 5, "ALIENS ": 5, TITLES[0].lower(): 0}


@pytest.mark.parametrize("entry", EXACT)
def test_keys_and_titles_are_taken_without_a_note(entry):
    assert ITEMS.resolve(entry) == (EXACT[entry], "")


TAKEN = {
    "no accents, no punctuation": ("emiles cafe and bar", 6),
    "without what stands in brackets": ("Dune", 2),
    "words in another order": ("The Matrix", 4),
    "a whole part": ("The Frozen Alibi", 0),
    "parts that follow each other": ("Book 2: The Bitter Suspect", 1),
    "a typing error": ("The Hichhiker's Guide to the Galxy", 7),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_title_that_can_only_be_one_is_taken_with_a_note(case):
    entry, number = TAKEN[case]
    found = ITEMS.resolve(entry)
    assert found.number == number
    assert found.note == f"{entry!r} was taken for {TITLES[number]!r}"


def test_of_items_with_one_title_the_first_is_taken_with_a_note():
    found = ITEMS.resolve("The Same")
    assert found.number == 8
    assert found.note == "2 items have the title 'The Same'; k8 was taken"


REFUSED = {
    "a series": ("Burning Moon Investigations", ["fits 2 titles", TITLES[0], TITLES[1], "(k0)"]),
    "a series in brackets": ("The Memoirs of Sherlock Holmes", ["closest are", "(k10)"]),
    "short": ("Alien", ["closest are", "Aliens"]),
    "one letter of many, a plural": ("The Hitchhikers Guides to the Galaxy", ["closest are", TITLES[7]]),
    "another number": ("Volume 8 of the Collected Letters", ["closest are", TITLES[11]]),
    "another book": ("A History of Time", ["closest are", "expected one of the 12 titles or item keys"]),
    "nothing": (" ", ["got an empty title"]),
    "a number": (3, ["got 3 in a history"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_mean_several_or_none_is_refused_with_suggestions(case):
    entry, expected = REFUSED[case]
    with pytest.raises(ValueError, match="got ") as caught:
        ITEMS.resolve(entry)
    assert all(words in str(caught.value) for words in expected)


def test_a_search_finds_beginnings_then_words_then_what_is_like_it():
    def titles(query, limit=3):
        return [match.title for match in ITEMS.search(query, limit)]

    assert titles("dune") == [TITLES[2], TITLES[3], *titles("dune")[2:]]
    assert [match.score for match in ITEMS.search("dune", 2)] == [1.0, 1.0]
    assert titles("frozen", 1) == [TITLES[0]]
    assert ITEMS.search("frozen", 1)[0].score == pytest.approx(0.95)
    assert ITEMS.search("rozen", 1)[0].score == pytest.approx(0.9)
    assert titles("emile", 1) == [TITLES[6]]
    assert titles("hichhiker galaxy", 1) == [TITLES[7]]
    assert ITEMS.search("hichhiker galaxy", 1)[0].score < 0.8
    assert ITEMS.search("k11", 1)[0] == ("k11", TITLES[11], 1.0)
    assert ITEMS.search(" ?! ") == []
    assert len(ITEMS.search("the", 4)) == 4
    with pytest.raises(ValueError, match="got limit 0"):
        ITEMS.search("dune", 0)


def test_an_item_whose_key_is_a_title_of_others_is_taken_with_a_note():
    items = Items(["1984", "b", "c"], ["Animal Farm", "1984", "Brazil"])
    number, note = items.resolve("1984")
    assert number == 0
    assert note == "'1984' is a key and the title of b; the item of that key, 'Animal Farm', was taken"
    assert Items(["1984", "b"], ["1984", "Brazil"]).resolve("1984") == (0, "")


@pytest.mark.slow
@pytest.mark.data
def test_real_titles_with_typing_errors_are_never_taken_for_others(data_root):
    """Goodbooks: one wrong letter is understood mostly, and never as another book; absent books are nearly never."""
    with gzip.open(data_root / "goodbooks-10k" / "books.csv.gz", "rt", encoding="utf-8") as file:
        titles = list(dict.fromkeys(row["title"] for row in csv.DictReader(file)))
    rng = random.Random(0)
    absent = set(rng.sample(range(len(titles)), 1000))
    there = [title for number, title in enumerate(titles) if number not in absent]
    items, right = Items([f"k{number}" for number in range(len(there))], there), 0
    for number in rng.sample(range(len(there)), 200):
        place = rng.randrange(1, len(there[number]))
        typed = there[number][:place] + rng.choice("abcdefgh") + there[number][place + 1 :]
        try:
            found = items.resolve(typed)
        except ValueError:
            continue
        assert there[found.number].casefold() == there[number].casefold(), typed
        right += 1
    assert right > 150
    wrong = 0
    for number in sorted(absent)[:300]:
        try:
            wrong += bool(items.resolve(titles[number]).note)
        except ValueError:
            continue
    assert wrong <= 9  # other editions, mostly
