"""The model card of an exported adapter: how prompts are written, a snippet that needs no code of ours, and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LOCAL_BACKBONE = "../../backbone"
"""The backbone of a run folder, seen from ``adapters/<domain>/``."""


class PromptLayout(NamedTuple):
    """How a history becomes the input of the model: ``before``, the item IDs, ``after``, the end token if any."""

    before: str
    """Words before the history; may be empty."""
    after: str
    separator: str | None
    """Word between two item IDs, may be empty; None: the end token stands there and behind ``before``, if any."""
    end_token: int | None
    """Closes an item ID that the model writes, and the prompt; None: nothing does."""
    max_history: int
    """Items shown at most, the newest ones."""
    newest_first: bool
    max_tokens: int
    """Tokens of a prompt at most, with the end token; the oldest items are left out first."""
    num_beams: int
    length_penalty: float
    auto_class: str
    """The class of transformers that loads the backbone."""
    continues_prompt: bool
    """Whether ``generate`` returns the prompt with the ID behind it, else the ID behind one start token."""
    prior_weight: float = 0.0


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
    license: str = "apache-2.0"
    details: Mapping[str, Any] = {}
    """More entries for the table of settings."""


def model_card(card: Card, base_name: str, examples: tuple[str, ...]) -> str:
    """Markdown with the front matter that model hubs read; ``examples`` are titles for the snippet's history."""
    parts = [
        _front_matter(card, base_name),
        _introduction(card, base_name),
        f"## From titles to recommendations\n\n{_prompt_text(card.prompt)}\n\n{_how_to_run(base_name)}",
        f"```python\n{snippet(card.prompt, examples)}```",
    ]
    if card.alpha:
        total = sum(map(abs, card.alpha.values())) or 1.0
        weights = [(name, f"{value:.4f}", f"{abs(value) / total:.1%}") for name, value in card.alpha.items()]
        parts += ["## Fusion weights", _table(("domain", "alpha", "share of absolute values"), weights)]
    parts += ["## Evaluation", card.protocol]
    if card.metrics:
        parts.append(_table(("metric", "value"), [(name, f"{value:.4f}") for name, value in card.metrics.items()]))
    if card.details:
        settings = [(name, str(value)) for name, value in card.details.items()]
        parts += ["## Settings", _table(("setting", "value"), settings)]
    return "\n\n".join(parts) + "\n"


def snippet(prompt: PromptLayout, examples: tuple[str, ...]) -> str:
    """A program from a history of titles to the ten best next items, with transformers and peft alone."""
    values = {
        "BEFORE": f"encode({_literal(prompt.before)})"
        + (" + end" if prompt.before and prompt.separator is None else ""),
        "AFTER": _literal(prompt.after),
        "SEPARATOR": "end" if prompt.separator is None else f"encode({_literal(prompt.separator)})",
        "AUTO_CLASS": prompt.auto_class,
        "START": "inputs.shape[1]" if prompt.continues_prompt else "1",
        "MAX_HISTORY": str(prompt.max_history),
        "ORDER": "reversed(shown)" if prompt.newest_first else "shown",
        "MAX_TOKENS": str(prompt.max_tokens),
        "NUM_BEAMS": str(prompt.num_beams),
        "LENGTH_PENALTY": str(prompt.length_penalty),
        "HISTORY": repr(list(examples)),
    }
    text = SNIPPET
    for name, value in values.items():
        text = text.replace(f"<{name}>", value)
    return text


SNIPPET = '''\
"""The ten best next items: python next_items.py ADAPTER_FOLDER "first title | second title"."""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import <AUTO_CLASS>, AutoTokenizer

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
history = sys.argv[2].split("|") if len(sys.argv) > 2 else <HISTORY>

base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
base = folder / base if (folder / base).is_dir() else base  # relative to the adapter's folder, or a hub name
tokenizer = AutoTokenizer.from_pretrained(base)
model = <AUTO_CLASS>.from_pretrained(base, use_safetensors=True)
model = PeftModel.from_pretrained(model, str(folder)).eval()

table = json.loads((folder / "item_ids.json").read_text(encoding="utf-8"))
end = [] if table["eos_token_id"] is None else [table["eos_token_id"]]  # closes an ID
items = list(table["items"].values())
ids = [item["tokens"] for item in items]
titles = [item["title"].lower() for item in items]
follow = {}  # beginning of an item ID -> tokens that may come next
for tokens in ids:
    for place, token in enumerate([*tokens, *end]):
        follow.setdefault(tuple(tokens[:place]), set()).add(token)


def encode(text):
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def prompt(shown):
    middle = []
    for number in <ORDER>:
        middle += (<SEPARATOR> if middle else []) + ids[number]
    return <BEFORE> + middle + encode(<AFTER>) + end


seen = [titles.index(title.strip().lower()) for title in history]  # oldest first
shown = seen[-<MAX_HISTORY>:]
while len(prompt(shown)) > <MAX_TOKENS>:
    shown = shown[1:]
inputs = torch.tensor([prompt(shown)])
start = <START>  # where the ID begins in what is written
num_beams = min(max(<NUM_BEAMS>, 10 + len(set(seen))), len(items))
written = model.generate(
    input_ids=inputs,
    attention_mask=torch.ones_like(inputs),
    do_sample=False,
    num_beams=num_beams,
    num_return_sequences=num_beams,
    length_penalty=<LENGTH_PENALTY>,
    early_stopping="never",
    max_new_tokens=max(map(len, ids)) + len(end),
    eos_token_id=end or None,
    prefix_allowed_tokens_fn=lambda _, tokens: sorted(follow.get(tuple(tokens.tolist()[start:]), end or [0])),
)
number_of = {(*tokens, *end): number for number, tokens in enumerate(ids)}
rows = [row[start:] for row in written.tolist()]
rows = [row[: row.index(end[0]) + 1] if end and end[0] in row else row for row in rows]
found = [number_of.get(tuple(row)) for row in rows]
best = [number for number in dict.fromkeys(found) if number is not None and number not in seen]
for place, number in enumerate(best[:10], 1):
    print(place, items[number]["title"], sep="\\t")
'''


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _front_matter(card: Card, base_name: str) -> str:
    return "\n".join(
        [
            "---",
            "library_name: peft",
            f"base_model: {json.dumps(base_name)}",
            f"license: {card.license}",
            "tags: [recommendation, federated-learning, lora]",
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
    where = (
        "The backbone\nis named relative to this folder: keep `backbone/` and `adapters/` together if you move them.\n"
        "When you publish the backbone, give its hub name to the run (`--backbone_name`), or write it into\n"
        "`adapter_config.json` and into the first lines of this file."
        if base_name == LOCAL_BACKBONE
        else f"The backbone\nis loaded from `{base_name}`; the run folder has a copy of it in `{LOCAL_BACKBONE}`."
    )
    return (
        "The program below needs transformers and peft, nothing else. Save it as `next_items.py` and run it from any\n"
        'folder: `python next_items.py ADAPTER_FOLDER "first title | second title"`, oldest title first; without\n'
        f"arguments it takes the adapter of the folder it is run in and the titles in the program. {where}"
    )


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
