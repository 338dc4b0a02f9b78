"""The program of a model card: from titles to the ten best next items, with transformers and peft alone."""

from __future__ import annotations

from typing import NamedTuple


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
    before_tokens: tuple[int, ...] = ()
    """What is written before the history, with what closes it."""
    separator_tokens: tuple[int, ...] = ()
    """What is written between two item IDs."""
    after_tokens: tuple[int, ...] = ()
    """What is written behind the history, with what closes the prompt."""
    longest_id: int = 1
    """Tokens of the longest item ID, without the end token."""

    @property
    def may_be_long(self) -> bool:
        """Whether the items that are shown may not all fit."""
        items = self.max_history * (self.longest_id + len(self.separator_tokens)) - len(self.separator_tokens)
        return len(self.before_tokens) + items + len(self.after_tokens) > self.max_tokens


def program(prompt: PromptLayout, base: str, is_local: bool, examples: tuple[str, ...]) -> str:
    """The text of the program; it takes the adapter's folder and titles, or ``.`` and ``examples``.

    ``base``: the backbone, a path from the adapter's folder if ``is_local``, else a name of the hub. Where every item
    ID is one token, all items are scored in one step; else ``generate`` searches among the IDs.
    """
    where = f'f"{{folder}}/{base}"' if is_local else f'"{base}"'
    one_token = prompt.end_token is None and prompt.longest_id == 1
    parts = [
        HEAD.format(auto=prompt.auto_class, base=where, examples=", ".join(map(repr, examples))),
        _prompt(prompt),
        ONE_TOKEN if one_token else _search(prompt),
    ]
    return "".join(parts)


HEAD = '''\
"""The ten best next items: python next_items.py FOLDER "first title" "second title", oldest first."""
import json, sys, torch
from peft import PeftModel
from transformers import {auto}

folder, *history = sys.argv[1:] or [".", {examples}]
items = json.load(open(f"{{folder}}/item_ids.json", encoding="utf-8"))["items"].values()
titles = {{tuple(item["tokens"]): item["title"] for item in items}}  # item ID -> title
seen = [next(tokens for tokens, title in titles.items() if title == wanted) for wanted in history]
model = {auto}.from_pretrained({base}, use_safetensors=True, trust_remote_code=False)
model = PeftModel.from_pretrained(model, folder).eval()
'''
ONE_TOKEN = """\
with torch.no_grad():
    scores = model(input_ids=torch.tensor([prompt])).logits[0, -1]
found = sorted(titles, key=lambda tokens: -scores[tokens[0]])
best = [titles[tokens] for tokens in found if tokens not in seen]
print(*(f"{place}\\t{title}" for place, title in enumerate(best[:10], 1)), sep="\\n")
"""
SEARCH = """\
closed = [(*tokens, {end}) for tokens in titles]
num_beams = min(max({num_beams}, 10 + len(set(seen))), len(titles))


def allowed(_, row):  # the tokens with which an item ID goes on
    written = tuple(row.tolist()[{start}:])
    return [*{{tokens[len(written)] for tokens in closed if tokens[: len(written)] == written != tokens}}] or [{end}]


rows = model.generate(
    input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
    num_beams=num_beams, num_return_sequences=num_beams, length_penalty={length_penalty}, early_stopping="never",
    max_new_tokens={longest}, eos_token_id={end}, prefix_allowed_tokens_fn=allowed,
).tolist()
found = dict.fromkeys(tuple(row[{start} : row.index({end}, {start})]) for row in rows)
best = [titles[tokens] for tokens in found if tokens in titles and tokens not in seen]
print(*(f"{{place}}\\t{{title}}" for place, title in enumerate(best[:10], 1)), sep="\\n")
"""


def _prompt(prompt: PromptLayout) -> str:
    """The lines that make the tokens of the prompt."""
    order = "[::-1]" if prompt.newest_first else ""
    separator, after = list(prompt.separator_tokens), list(prompt.after_tokens)
    before = f"{list(prompt.before_tokens)} + " if prompt.before_tokens else ""
    joined = f"[token for tokens in shown{order} for token in {f'(*{separator}, *tokens)' if separator else 'tokens'}]"
    joined += f"[{len(separator)}:]" if separator else ""
    line = f"prompt = {before}{joined}{f' + {after}' if after else ''}\n"
    if not prompt.may_be_long:
        return f"shown = seen[-{prompt.max_history}:]\n{line}"
    return (
        f"for number in range({prompt.max_history}, 0, -1):  # the newest items that fit\n"
        f"    shown = seen[-number:]\n    {line}"
        f"    if len(prompt) <= {prompt.max_tokens}:\n        break\n"
    )


def _search(prompt: PromptLayout) -> str:
    return SEARCH.format(
        end=prompt.end_token,
        num_beams=prompt.num_beams,
        start="len(prompt)" if prompt.continues_prompt else 1,
        length_penalty=prompt.length_penalty,
        longest=prompt.longest_id + 1,
    )
