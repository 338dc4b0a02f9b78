"""Prompt templates: natural sentences, very short ones, lists, or the history alone; each with and without a user.

A template is words and placeholders separated by spaces; a placeholder stands alone as a word. Prompts are put
together from parts (item IDs, words of the template) that were tokenised once. Tokenizers of the T5 family cut at
spaces first, so these are the tokens of the full text too; where a tokenizer has pieces of several words, the parts
decide, and an item ID has the same tokens in every prompt and as a target.

Shapes: N samples, E events of all users, H history length.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from fedecider.bounds import OneOrMore, Share, ShareAbove0, ShareBelow1, ZeroOrMore, at_least, check
from fedecider.evaluation.protocols import NUM_HELD_OUT

# Prompt templates: natural sentences, very short ones, lists, or the history alone; each with and without a user.

TemplateSet = Literal["natural", "compact", "history", "list"]
ROW_SETS = ("history", "list")
"""Prompts that a decoder-only model goes on writing: every item is closed, and the next one follows."""

USER, HISTORY, DOMAIN = "{user}", "{history}", "{domain}"
PLACEHOLDERS = (USER, HISTORY, DOMAIN)


class Template(NamedTuple):
    """The two wordings of one prompt; the target text is the item ID alone."""

    user: str
    """Holds ``{user}`` and ``{history}`` once, ``{domain}`` at most once."""
    no_user: str
    """The same for an unknown user: no ``{user}``."""


@cache
def load_templates(name: TemplateSet) -> tuple[Template, ...]:
    """The templates of a set; number 0 is the one used for validation and test.

    Ten natural sentences, as many as IDGenRec (SIGIR 2024) uses, worded anew; or one ``compact`` prompt of a few
    words, for small models on CPUs; or the ``history`` alone, or a ``list`` with a heading, which a decoder goes on
    writing. Errors: ``ValueError`` for an unknown set.
    """
    sets = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    if name not in sets:
        raise ValueError(f"got templates {name!r}; expected one of {sorted(sets)}")
    templates = tuple(Template(**entry) for entry in sets[name])
    for template in templates:
        check_wording(template.user, with_user=True)
        check_wording(template.no_user, with_user=False)
    return templates


def check_wording(wording: str, with_user: bool) -> None:
    """Raise ``ValueError`` unless each placeholder is a word of its own and occurs as often as it must."""
    words = wording.split(" ")
    counts = {placeholder: words.count(placeholder) for placeholder in PLACEHOLDERS}
    rest = [word for word in words if word not in PLACEHOLDERS]
    wanted = f"{HISTORY} once, {USER} {'once' if with_user else 'not at all'}, {DOMAIN} at most once"
    if counts[HISTORY] != 1 or counts[USER] != int(with_user) or counts[DOMAIN] > 1:
        raise ValueError(f"prompt {wording!r}: expected {wanted}")
    if any(not word or "{" in word or "}" in word for word in rest):
        raise ValueError(
            f"prompt {wording!r}: expected words separated by single spaces, with each of {', '.join(PLACEHOLDERS)} "
            "as a word of its own. Put a space before the punctuation"
        )


def domain_words(name: str) -> str:
    """A domain name as it stands in a prompt: ``movies_tv`` -> ``movies tv``."""
    return " ".join(name.replace("_", " ").replace("-", " ").split()) or "items"


def split_wording(wording: str, domain: str) -> tuple[list[str], list[str]]:
    """Parts before and after the history: plain texts and ``{user}``, with the domain's words filled in."""
    before, after = wording.replace(DOMAIN, domain_words(domain)).split(HISTORY)
    return _parts(before), _parts(after)


def render(wording: str, domain: str, history: Sequence[str], separator: str, user: str | None = None) -> str:
    """The prompt as text: item ID texts joined by the separator, in the given order."""
    joined = f" {separator} ".join(history) if separator else " ".join(history)
    before, after = split_wording(wording, domain)
    parts = [*before, joined, *after]
    return " ".join((user or "") if part == USER else part for part in parts)


def prompt_texts(templates: TemplateSet, separator: str, domains: Iterable[str]) -> list[str]:
    """Every text that prompts add to the item IDs: give it to a tokenizer that is trained from scratch."""
    texts = [separator] if separator else []
    for domain in domains:
        for template in load_templates(templates):
            for wording in template:
                before, after = split_wording(wording, domain)
                texts += [part for part in (*before, *after) if part != USER]
    return sorted(set(texts))


def _parts(text: str) -> list[str]:
    """``the list of {user} today`` -> ``["the list of", "{user}", "today"]``."""
    parts: list[str] = []
    for word in text.split():
        if word == USER or not parts or parts[-1] == USER:
            parts.append(word)
        else:
            parts[-1] += " " + word
    return parts


# Which samples there are: settings, the table of events, and random draws of targets, histories and templates.

MAX_PREFIX_ITEMS = 3
"""First items of a history from which a user text is written."""


@dataclass(frozen=True)
class SampleConfig:
    """How users' histories become prompts and targets. The defaults follow IDGenRec (SIGIR 2024).

    Args:
        templates: The wording of prompts: "natural" (ten sentences), "compact" (one prompt of a few words, fast on
            CPUs), or what a decoder-only model goes on writing: "history" (the item IDs and nothing else) or "list"
            (the same below a heading that names the domain).
        targets: What is predicted of a training sample. "last": the item after the history; "every": all items of it
            but the first one, each from those before it, in one pass of a decoder-only model (templates history, list).
        separator: The word between two item IDs of the history; it may be empty. Under the templates history and list
            IDs are parted by what closes them, and IDs of one token by nothing.
        closed_by: What closes an item ID that is written: the tokenizer's end token, or a newline, which a pretrained
            decoder expects between the entries of a list.
        user_wording: What prompts say about the user. "none": nothing. "prefix": an ID text written from the first
            few items; samples whose target lies among these items use the wording without a user. "train": an ID
            text written from the whole training part, which also holds the targets of training samples.
        max_history: The largest number of items of a history; the newest ones are taken.
        eval_history: The largest number of items of a history in validation, test and use; 0 takes max_history.
        max_source_tokens: The largest number of input tokens; the oldest items are left out first.
        packed_tokens: The length of rows into which samples are put one behind the other, each of which sees itself
            alone; 0 gives every sample a row of its own. It saves padding where samples differ much in length (targets
            every).
        samples_per_position: The number of samples that an epoch draws of every target position, each with a template
            of its own.
        newest_first: If true, the newest item of the history is written first.
        history_crop: The length of a training history. "none": all of it; "uniform": 1 to all; "geometric": geometric
            with rate `crop_rate`.
        crop_rate: The stopping probability of the geometric history length.
        item_dropout: The probability that an item of a training history is left out (one always stays).
        pair_share: The share of training samples that are replaced by item pairs: a history of a single item near the
            target in the same training part, and no user.
        pair_window: The largest distance of the two items of a pair; distance d is drawn with weight 1 / d.
        pair_directions: Which items make a pair with the target. "forward": the item before the target; "both": also
            items after it.
        walk_share: The share of all training samples that are catalogue walks, which come on top of the others: a
            history of items whose texts stand near the target's, drawn from the published catalogue alone. Where nobody
            is public, an epoch is one walk for each item, whatever the share.
    """

    templates: TemplateSet = "natural"
    targets: Literal["last", "every"] = "last"
    separator: str = ";"
    closed_by: Literal["end_token", "newline"] = "end_token"
    user_wording: Literal["none", "prefix", "train"] = "prefix"
    max_history: OneOrMore = 20
    eval_history: ZeroOrMore = 0
    max_source_tokens: OneOrMore = 512
    packed_tokens: ZeroOrMore = 0
    samples_per_position: Annotated[int, at_least(1, most=1000)] = 1
    newest_first: bool = False
    history_crop: Literal["none", "uniform", "geometric"] = "none"
    crop_rate: ShareAbove0 = 0.3
    item_dropout: ShareBelow1 = 0.0
    pair_share: Share = 0.0
    pair_window: OneOrMore = 5
    pair_directions: Literal["forward", "both"] = "both"
    walk_share: ShareBelow1 = 0.0

    def __post_init__(self) -> None:
        check(self)
        if self.eval_history > self.max_history:
            raise ValueError(f"got eval_history {self.eval_history}, expected 0 to max_history {self.max_history}")
        if len(self.separator.split()) > 1 or self.separator != self.separator.strip():
            raise ValueError(f"got separator {self.separator!r}, expected one word without spaces, or nothing")
        if self.is_row and (self.newest_first or self.user_wording != "none"):
            raise ValueError(
                f"got templates {self.templates} with newest_first {self.newest_first} and user_wording "
                f"{self.user_wording}, expected newest_first false and user_wording none: the target continues the "
                "items as they came"
            )
        if self.targets == "every" and (not self.is_row or self.pair_share > 0.0):
            raise ValueError(
                f"got targets every with templates {self.templates} and pair_share {self.pair_share}, expected "
                "templates history or list and pair_share 0: every item of a row is a target"
            )

        if self.packed_tokens and (self.targets != "every" or self.packed_tokens < self.max_source_tokens):
            raise ValueError(
                f"got packed_tokens {self.packed_tokens} with targets {self.targets} and max_source_tokens "
                f"{self.max_source_tokens}, expected targets every and at least max_source_tokens, or 0"
            )

    @property
    def is_row(self) -> bool:
        """Whether prompt and target are one row of closed IDs."""
        return self.templates in ROW_SETS

    @property
    def shown_history(self) -> int:
        """Items of a history outside training, at most."""
        return self.eval_history or self.max_history


class EventTable(NamedTuple):
    """All events of all users, user after user, oldest first. Samples name an event: their target."""

    item_E: np.ndarray
    task_E: np.ndarray
    user_E: np.ndarray
    first_E: np.ndarray
    """Number of the user's first event."""
    train_end_E: np.ndarray
    """One past the user's last event of the training part."""
    end_E: np.ndarray
    """One past the user's last event."""
    named_E: np.ndarray
    """Bool: a sample with this target may use the wording with a user."""


class Draw(NamedTuple):
    """Samples before they become tokens; histories are numbers of events, newest first, -1 behind the oldest."""

    target_N: np.ndarray
    history_NH: np.ndarray
    template_N: np.ndarray
    named_N: np.ndarray


def event_table(
    sequences: Sequence[Sequence[int]], hold_out: bool, has_text_U: np.ndarray, user_wording: str
) -> EventTable:
    """Lay the users' events out. ``hold_out``: the last two of each user are no part of the training part.

    ``has_text_U`` (users,): whether there is an ID text of the user. Under "prefix" only targets behind the items
    that the text was written from are named.
    """
    length_U = np.fromiter(map(len, sequences), np.int64, len(sequences))
    first_U = np.cumsum(length_U) - length_U
    train_U = np.maximum(length_U - NUM_HELD_OUT, 0) if hold_out else length_U
    # As `num_wording_items` for every user at once.
    written_U = np.clip(train_U - 1, 1, MAX_PREFIX_ITEMS) if user_wording == "prefix" else np.zeros_like(length_U)
    user_E = np.repeat(np.arange(len(length_U)), length_U)
    first_E = first_U[user_E]
    place_E = np.arange(len(user_E)) - first_E
    return EventTable(
        item_E=np.fromiter((item for sequence in sequences for item in sequence), np.int64, len(user_E)),
        task_E=np.zeros_like(user_E),
        user_E=user_E,
        first_E=first_E,
        train_end_E=first_E + train_U[user_E],
        end_E=first_E + length_U[user_E],
        named_E=has_text_U[user_E] & (place_E >= written_U[user_E]),
    )


def without_targets(events: EventTable, users: Collection[int]) -> EventTable:
    """The table with nothing of ``users`` to train on: their training parts are empty."""
    gone_E = np.isin(events.user_E, np.fromiter(users, np.int64, len(users)))
    return events._replace(train_end_E=np.where(gone_E, events.first_E, events.train_end_E))


def merge_events(tables: Sequence[EventTable]) -> EventTable:
    """One table of several tasks: tasks and events are renumbered, users and items keep their numbers."""
    shifts = np.cumsum([0, *(len(table.item_E) for table in tables)])[:-1]
    shifted = [
        table._replace(
            task_E=table.task_E + number,
            first_E=table.first_E + shift,
            train_end_E=table.train_end_E + shift,
            end_E=table.end_E + shift,
        )
        for number, (table, shift) in enumerate(zip(tables, shifts, strict=True))
    ]
    return EventTable(*(np.concatenate(columns) for columns in zip(*shifted, strict=True)))


def is_target(events: EventTable) -> np.ndarray:
    """Bool (E,): events of the training part with a history."""
    event_E = np.arange(len(events.item_E))
    return (event_E > events.first_E) & (event_E < events.train_end_E)


def window_ends(events: EventTable, longest: int, cost_E: np.ndarray, room: int) -> np.ndarray:
    """Last targets of windows that cover every training part, the newest events first; in ascending order.

    A window has at most ``longest`` + 1 events, which cost at most ``room`` tokens together; two always fit. Two
    windows of a user share one event, the last target of the one being the first item of the other: behind a first
    item every event with a history is a target once.
    """
    total_E1 = np.concatenate([[0], np.cumsum(cost_E)])
    ends = []
    for first, last in zip(*_training_parts(events), strict=True):
        end = last
        while end > first:
            ends.append(end)
            fits = int(np.searchsorted(total_E1, total_E1[end + 1] - room))  # the earliest start within the room
            end = min(max(first, end - longest, fits), end - 1)
    return np.array(sorted(ends), dtype=np.int64)


def _training_parts(events: EventTable) -> tuple[list[int], list[int]]:
    """First and last event of every training part that is not empty."""
    event_E = np.arange(len(events.item_E))
    starts = event_E[(event_E == events.first_E) & (events.train_end_E > events.first_E)]
    return starts.tolist(), (events.train_end_E[starts] - 1).tolist()


def histories(events: EventTable, target_N: np.ndarray, longest: int) -> np.ndarray:
    """Events before each target, newest first, -1 behind the oldest one, (N, H)."""
    history_NH = target_N[:, None] - 1 - np.arange(longest)
    return np.where(history_NH >= events.first_E[target_N][:, None], history_NH, -1)


def draw_samples(
    events: EventTable, target_N: np.ndarray, num_templates: int, config: SampleConfig, rng: np.random.Generator
) -> Draw:
    """Templates and augmentations of training samples."""
    history_NH = histories(events, target_N, config.max_history)
    history_NH = _cropped(history_NH, config, rng)
    if config.item_dropout > 0:
        history_NH = _thinned(history_NH, config.item_dropout, rng)
    named_N = events.named_E[target_N]
    if config.pair_share > 0:
        target_N, history_NH, named_N = _with_pairs(events, target_N, history_NH, named_N, config, rng)
    return Draw(target_N, history_NH, rng.integers(num_templates, size=len(target_N)), named_N)


def _cropped(history_NH: np.ndarray, config: SampleConfig, rng: np.random.Generator) -> np.ndarray:
    if config.history_crop == "none":
        return history_NH
    length_N = (history_NH >= 0).sum(1)
    if config.history_crop == "uniform":
        kept_N = 1 + rng.integers(np.maximum(length_N, 1))  # the places of walks have no history yet
    else:
        kept_N = rng.geometric(config.crop_rate, len(length_N))
    return np.where(np.arange(history_NH.shape[1]) < kept_N[:, None], history_NH, -1)


def _thinned(history_NH: np.ndarray, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Leave out items at random; a history that would lose all keeps all. The rest moves up."""
    kept_NH = (history_NH >= 0) & (rng.random(history_NH.shape) >= probability)
    kept_NH = np.where(kept_NH.any(1, keepdims=True), kept_NH, history_NH >= 0)
    thinned_NH = np.where(kept_NH, history_NH, -1)
    return np.take_along_axis(thinned_NH, np.argsort(~kept_NH, axis=1, kind="stable"), 1)


def _with_pairs(
    events: EventTable,
    target_N: np.ndarray,
    history_NH: np.ndarray,
    named_N: np.ndarray,
    config: SampleConfig,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replace some samples by pairs of near events of one training part: any of its events is the target.

    A drawn pair that would leave the training part is not used; its sample stays as it was.
    """
    distance = np.arange(1, config.pair_window + 1)
    offset_N = rng.choice(distance, len(target_N), p=(1 / distance) / (1 / distance).sum())
    sign_N = np.where(rng.random(len(target_N)) < 0.5, 1, -1) if config.pair_directions == "both" else -1
    trainable = np.flatnonzero(np.arange(len(events.item_E)) < events.train_end_E)
    centre_N = trainable[rng.integers(len(trainable), size=len(target_N))]
    near_N = centre_N + sign_N * offset_N
    chosen_N = rng.random(len(target_N)) < config.pair_share
    chosen_N &= (near_N >= events.first_E[centre_N]) & (near_N < events.train_end_E[centre_N])
    pair_NH = np.full_like(history_NH, -1)
    pair_NH[:, 0] = near_N
    return (
        np.where(chosen_N, centre_N, target_N),
        np.where(chosen_N[:, None], pair_NH, history_NH),
        named_N & ~chosen_N,
    )
