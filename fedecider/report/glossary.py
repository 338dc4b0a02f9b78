"""The words of all pages with their meanings; a text shows them on hover, on focus, and in a list at the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import NamedTuple


class Term(NamedTuple):
    """A technical word."""

    name: str
    """As the list shows it; the README's ten words have the README's names."""
    meaning: str
    forms: tuple[str, ...] = ()
    """How it stands in texts; a plural s may follow. Without any: the parts of ``name`` between commas."""

    @property
    def key(self) -> str:
        """Its part of an HTML id."""
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")


README_TERMS = (
    Term("client", "a party with private data: a domain such as crime, or in the embedding track a single user"),
    Term(
        "public pool",
        "users whose events are disclosed; the backbone is trained on them, and none of them is a client's user",
        ("public pool", "public user"),
    ),
    Term("item ID", "the short unique text that stands for an item; the model writes it word by word"),
    Term(
        "backbone, student",
        "the model trained on the public pool (a decoder or a T5); its copy of half depth, which stays frozen in the "
        "rounds",
    ),
    Term(
        "adapter",
        "small low-rank matrices (LoRA) beside frozen layers: all that a client trains",
        ("adapter", "LoRA", "LoRA rank"),
    ),
    Term("round", "the server sends, clients train, clients send their updates, the server combines them"),
    Term("direction", "a client's update divided by its size"),
    Term(
        "fusion weights",
        "how much of each client's direction a client takes; each client learns its own",
        ("fusion weight", "alpha"),
    ),
    Term("track", "one of two families of methods: the LLM track and the embedding track"),
    Term(
        "canary",
        "a scorer that learns nothing; where it scores well, the way of measuring leaks",
        ("canary", "memoriser"),
    ),
)
"""The README's ten words, word for word but for links and for what points at places of that page."""

TERMS = (
    *README_TERMS,
    Term("domain", "a catalogue with its users and events, such as crime novels; in the LLM track it is a client"),
    Term("catalogue", "all items that can be recommended in a domain"),
    Term("event", "one user taking one item at one time: bought, read, rated", ("event", "train event")),
    Term(
        "held-out item",
        "the item that a user took last; it is in no training data and has to be found",
        ("held-out item", "held out"),
    ),
    Term(
        "validation",
        "the last item but one of every user, by which rounds and settings are chosen",
        ("validation", "validation item"),
    ),
    Term("test items", "the last item of every user, which is read once, at the end", ("test item",)),
    Term(
        "hit@k",
        "share of users whose held-out item is among the first k recommendations: with k = 10, 0.16 is 16 of 100 users",
        ("hit@5", "hit@10", "hit@20"),
    ),
    Term(
        "ndcg@k",
        "as hit@k, but a place further down counts less: 1 for the first, 0.29 for the tenth, 0 beyond k",
        ("ndcg@5", "ndcg@10", "ndcg@20"),
    ),
    Term(
        "95 % interval",
        "where the mean would lie for other users like these (and other seeds, where there are several), found by "
        "drawing users again and again (cluster bootstrap); overlapping intervals settle nothing",
        ("95 % interval", "95 % cluster bootstrap", "95 % bootstrap", "cluster bootstrap", "interval"),
    ),
    Term(
        "paired permutation test",
        "how often a difference at least this large comes out when every user's two results are exchanged by the toss "
        "of a coin; p is that share, and below 0.05 counts as more than chance",
        ("paired permutation test", "paired test", "p-value", "distinguishable", "distinguishably", "more than chance"),
    ),
    Term(
        "Holm's correction",
        "who makes many tests finds something by luck; the correction raises each p so that all of them together are "
        "wrong in 5 % of cases at most",
        ("Holm's correction", "Holm-corrected", "Holm p", "Holm"),
    ),
    Term(
        "simple rule",
        "a row that needs no training: counts of what is often taken, alone or together, or items with near texts",
    ),
    Term("baseline", "a row that is not federated and stands there to be compared with"),
    Term("popularity", "the same items for everybody: those taken most often"),
    Term(
        "co-occurrence",
        "what other users took beside a user's last item, or with decay beside the last few",
        (
            "last-item co-occurrence",
            "decayed co-occurrence",
            "co-occurrence",
            "last_item_cooccurrence",
            "decayed_cooccurrence",
        ),
    ),
    Term(
        "text neighbours",
        "items whose texts are near those of the history; + counts: added to decayed co-occurrence",
        ("text neighbours", "text neighbours + counts"),
    ),
    Term("zero-shot", "the shared model as it is before any client has trained"),
    Term("SASRec", "a small sequence model that a client trains on item numbers, without texts, unless it says so"),
    Term(
        "memory",
        "counts and texts that stay with a client and are added to what the model finds likely",
        ("memory", "memories"),
    ),
    Term("expert", "one part of a memory: counts, texts, where both agree, the model, all items alike"),
    Term("seed", "the number that decides all random draws of a run; other seeds give other results"),
    Term("protocol", "the way of measuring: which items are candidates, and what training may see"),
    Term("strict", "the protocol that ranks the whole catalogue without the items that the user already had"),
    Term(
        "sampled candidates",
        "a few items drawn at random, among which the held-out one is ranked instead of the catalogue; shares are then "
        "far higher",
        ("sampled candidate", "strict/sampled99"),
    ),
    Term("leak", "the way of measuring tells a method which item is held out", ("leak",)),
    Term(
        "planted data",
        "users and items made by a program, with a pattern put in on purpose; they show that the code runs",
        ("planted data", "planted"),
    ),
    Term("mean over domains", "every domain counts once, whatever its size", ("mean over domains", "macro")),
    Term("pre_upload", "a client's model as it was trained in the round, before anything is exchanged"),
    Term("post_broadcast", "a client's model with the directions of all clients after the round"),
    Term(
        "local",
        "a client trains on its own data alone; as a row without any exchange, which a method must beat to be worth it",
        ("local", "local training", "local epoch"),
    ),
    Term(
        "centralised",
        "one model trained on the data of all clients in one place, which nobody would hand over",
        ("centralised", "central"),
    ),
    Term("federated", "trained by clients together, in rounds, while each keeps its data", ("federated", "federation")),
    Term("EASE", "one weight for every pair of items, solved for at once from who took both"),
    Term(
        "item-kNN",
        "items that the same users took are near; the nearest ones are recommended",
        ("item-kNN", "item_knn"),
    ),
    Term("secure sum", "the server learns the sum of what clients send, and no single summand"),
    Term("epsilon", "bound on what one client or user can change in what is sent; small is private"),
    Term("beam search", "the model writes the IDs of several items at once and keeps the likeliest", ("beam",)),
    Term("norm", "the size of an update: the square root of the sum of its squares", ("norm", "Frobenius norm")),
    Term("cosine", "how alike two directions are: 1 the same, 0 unrelated, -1 opposite"),
    Term("Spearman correlation", "how far two orders agree: 1 the same, 0 unrelated, -1 reversed"),
    Term("TF-IDF", "texts as counts of words, rare words counting more; SVD makes them shorter"),
    Term("payload", "the bytes of the numbers in a message, without its header"),
)


class Words:
    """Marks the words of :data:`TERMS` in the texts of one page, each once a part, and keeps which ones it met."""

    def __init__(self) -> None:
        self._by_form = {form.lower(): term for term in TERMS for form in term.forms or term.name.split(", ")}
        longest = sorted(self._by_form, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w@/-])({'|'.join(map(re.escape, longest))})s?(?![\w@/-])", re.IGNORECASE)
        self._met: set[Term] = set()
        self._here: set[Term] = set()

    def new_part(self) -> None:
        """From here on every word is explained again."""
        self._here = set()

    def mark(self, text: str, plain: Callable[[str], str] = escape) -> str:
        """``text`` as HTML; ``plain`` makes HTML of what is no technical word."""
        parts, end = [], 0
        for match in self._pattern.finditer(text):
            term = self._by_form[match[1].lower()]
            if term not in self._here:
                parts += [plain(text[end : match.start()]), _marked(match[0], term)]
                end = match.end()
                self._here.add(term)
        self._met |= self._here
        return "".join([*parts, plain(text[end:])])

    def met(self) -> list[Term]:
        """The words that were marked anywhere on the page, by the alphabet."""
        return sorted(self._met, key=lambda term: term.name.lower())


def term_list(terms: list[Term]) -> str:
    """The list of meanings, to which the marked words point."""
    entries = "".join(
        f'<dt>{escape(term.name)}</dt>\n<dd id="meaning-{term.key}">{escape(term.meaning)}</dd>\n' for term in terms
    )
    return f'<dl class="terms">\n{entries}</dl>'


def _marked(text: str, term: Term) -> str:
    """Can be reached by keyboard and touch; a screen reader reads the entry of the list, the eye sees the tip."""
    tip = f'<span class="tip" aria-hidden="true">{escape(term.meaning)}</span>'
    return f'<dfn tabindex="0" aria-describedby="meaning-{term.key}">{escape(text)}{tip}</dfn>'
