"""The model card of an exported adapter: how prompts are written, a program that needs no code of ours, and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedecider.lora.program import PromptLayout, program

LOCAL_BACKBONE = "../../backbone"
"""The backbone of a run folder, seen from ``adapters/<domain>/``."""
INNER_BACKBONE = "backbone"
"""The backbone in a folder that stands for itself, seen from there."""
INTERVALS_SHOWN = ("hit@10", "ndcg@10", "mrr@10")

Intervals = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Row of a result table -> metric -> ``mean``, ``low``, ``high``."""


class Card(NamedTuple):
    """What the model card says."""

    method: str
    domain: str
    prompt: PromptLayout
    alpha: Mapping[str, float]
    """Fusion weight of this client for every domain; empty for methods without."""
    metrics: Mapping[str, float]
    protocol: str
    """How the metrics were measured, in a sentence or a stamp."""
    license: str = ""
    """Empty where nobody has said it."""
    details: Mapping[str, Any] = {}
    """More entries for the table of settings."""
    intervals: Intervals = {}  # noqa: RUF012 (never written to)
    """Metrics with 95 % intervals, of the adapter and of what it is compared with."""
    data: Sequence[tuple[str, str]] = ()
    """What it was trained on."""
    privacy: Sequence[str] = ()
    """Sentences: what the adapter has seen, and what the folder holds of users."""


def model_card(card: Card, base_name: str, examples: tuple[str, ...], published_base: str = "") -> str:
    """Markdown with the front matter that model hubs read; ``examples`` are titles for the program's history.

    ``base_name``: the backbone, a name of the hub or one of the two paths above; ``published_base`` is named in its
    place where hubs read it, since they know no paths.
    """
    is_local = base_name in (LOCAL_BACKBONE, INNER_BACKBONE)
    parts = [
        _front_matter(card, published_base or base_name),
        _introduction(card, base_name),
        f"## From titles to recommendations\n\n{_prompt_text(card.prompt)}\n\n{_how_to_run(base_name)}",
        f"```python\n{program(card.prompt, base_name, is_local, examples)}```",
    ]
    if card.alpha:
        total = sum(map(abs, card.alpha.values())) or 1.0
        weights = [(name, f"{value:.4f}", f"{abs(value) / total:.1%}") for name, value in card.alpha.items()]
        parts += ["## Fusion weights", _table(("domain", "alpha", "share of absolute values"), weights)]
    parts += ["## Evaluation", card.protocol]
    if card.intervals:
        rows = [
            (row, *map(_interval, (found[name] for name in INTERVALS_SHOWN))) for row, found in card.intervals.items()
        ]
        parts.append(_table(("test items, 95 % intervals", *INTERVALS_SHOWN), rows))
    if card.metrics:
        parts.append(_table(("metric", "value"), [(name, f"{value:.4f}") for name, value in card.metrics.items()]))
    if card.data:
        parts += ["## Data", _table(("what", "value"), card.data)]
    if card.privacy:
        parts += ["## Privacy", "\n".join(f"- {sentence}" for sentence in card.privacy)]
    if card.details:
        settings = [(name, str(value)) for name, value in card.details.items()]
        parts += ["## Settings", _table(("setting", "value"), settings)]
    return "\n\n".join(parts) + "\n"


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"


def _front_matter(card: Card, base_name: str) -> str:
    return "\n".join(
        [
            "---",
            "library_name: peft",
            f"base_model: {json.dumps(base_name)}",
            *([f"license: {json.dumps(card.license)}"] if card.license else []),
            "tags: [recommendation, federated-learning, lora, fedecider]",
            "---",
        ]
    )


def _introduction(card: Card, base_name: str) -> str:
    return (
        f"# {card.domain}: personalised recommender ({card.method})\n\n"
        f"This is the LoRA adapter of the client `{card.domain}`, trained by `{card.method}`. It needs the backbone\n"
        f"`{base_name}` and its tokenizer. `item_ids.json` maps each item key to a title, the text of the item\n"
        "ID and its tokens. The model writes the ID of the next item; decoding may only write IDs of this file."
    )


def _prompt_text(prompt: PromptLayout) -> str:
    order = "newest" if prompt.newest_first else "oldest"
    template = " ".join(part for part in (prompt.before, "{history}", prompt.after) if part)
    separator = f"`{prompt.separator}`" if prompt.separator else "none (a space)"
    if prompt.separator is None:
        separator = "none" if prompt.end_token is None else "the closing token"
    closing = "" if prompt.end_token is None else f", then the closing token, {prompt.end_token}"
    rows = [
        ("prompt template", f"`{template}`{closing}"),
        ("`{history}`", f"ID texts of the items, {order} first"),
        ("separator between two IDs", separator),
        ("`max_history`", f"{prompt.max_history} (the newest items)"),
        ("tokens of a prompt, at most", f"{prompt.max_tokens} (the oldest items are left out first)"),
        ("beams, length penalty", f"{prompt.num_beams}, {prompt.length_penalty}"),
    ]
    if prompt.prior_weight:
        said = (
            "the share of log p(ID | no history) that the figures take off; the program does not, and ranks otherwise"
        )
        rows.append(("prior weight", f"{prompt.prior_weight}: {said}"))
    return _table(("what", "value"), rows)


def _how_to_run(base_name: str) -> str:
    places = {
        LOCAL_BACKBONE: (
            "The backbone is named\nrelative to this folder: keep `backbone/` and `adapters/` together, wherever they "
            "are moved. When you\npublish it, give its hub name to the run (`--backbone_name`), or write it into\n"
            "`adapter_config.json` and into the first lines of this file."
        ),
        INNER_BACKBONE: "The backbone is in\nthis folder, below `backbone/`.",
    }
    where = places.get(base_name, f"The backbone is\nloaded from `{base_name}`.")
    return (
        "The program below needs transformers and peft, nothing else. Save it as `next_items.py` and run it from any\n"
        'folder: `python next_items.py FOLDER "first title" "second title"`, titles as in `item_ids.json`, the oldest\n'
        f"first; without arguments it takes the folder it is run in and the titles in the program. {where}\n\n"
        "With FeDecider installed, `fedecider.Recommender.from_pretrained(FOLDER)` recommends too, and takes titles\n"
        "with typing errors, many histories at once and new items."
    )


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
