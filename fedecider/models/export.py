"""Adapters as plain PEFT folders, with items, card and a check after reloading.

The folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` (PEFT's format), ``item_ids.json`` (item key
to title, ID text and token IDs: all that is needed to rebuild the trie) and ``README.md``, the model card.

Shape legend: K domains, R rank, I in features, O out features.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedecider.federation.method import Tree
from fedecider.models.adapters import FACTORS, module_names
from fedecider.models.directions import compact
from fedecider.models.item_table import (
    CONFIG_FILE,
    LOCAL_BACKBONE,
    WEIGHTS_FILE,
    ItemTable,
    check_items,
    write_items,
)
from fedecider.models.tied_table import HEAD, adapted_embeddings
from fedecider.scratch import aside, remove
from idgen.backbones.families import family_of
from idgen.prompts import SEPARATOR, load_templates, split_template
from idgen.quantize import keep_trainable, loading_options, quantize_of
from idgen.ranking_config import RankingConfig
from idgen.segments import NOTHING
from idgen.tasks import Task


class PromptLayout(NamedTuple):
    """How a history becomes the input of the model: ``before``, the item IDs, ``after``, the end token if any."""

    before: str
    """Words before the history; may be empty."""
    after: str
    separator: str | None
    """Word between two item IDs, may be empty; None: the end token stands there and behind ``before``, if any."""
    end_token: int | None
    """Closes an item ID that the model writes; None: nothing does."""
    max_history: int
    """Items shown at most, the newest ones."""
    max_tokens: int
    """Tokens of a prompt at most, with the end token; the oldest items are left out first."""
    num_beams: int
    prompt_end: int | None = None
    """Closes the prompt; None: nothing does."""
    dense_head: bool = False
    """Whether the last token of every ID of several tokens is its item's own."""


def prompt_layout(task: Task, ranking: RankingConfig, catalogue: str) -> PromptLayout:
    """The prompt of template 0, as `idgen.samples.encode_histories` writes it."""
    samples, segments, after_L = task.config, task.parts.segments, task.parts.after_PL[0]
    before, after = split_template(load_templates(samples.templates)[0], catalogue)
    closing = after_L[after_L != NOTHING][-1:]
    ends = [int(segments.token_F[segments.start_G[segment]]) for segment in closing if segments.length_G[segment]]
    return PromptLayout(
        before=before,
        after=after,
        separator=None if samples.is_row else SEPARATOR,
        end_token=task.trie.eos_token_id,
        max_history=samples.shown_history,
        max_tokens=samples.max_source_tokens,
        num_beams=ranking.num_beams,
        prompt_end=next(iter(ends), None),
        dense_head=samples.dense_head,
    )


MOVED = (
    "The backbone is named relative to this folder: keep `backbone/` and `adapters/` together, wherever they are "
    "moved, and load it first: `AutoPeftModel` would look for it from the working directory. When you publish it, "
    "write its hub name into `adapter_config.json` and into the first lines of this file."
)


class Card(NamedTuple):
    """What the model card says."""

    method: str
    domain: str
    prompt: PromptLayout
    alpha: Mapping[str, float]
    """Size of what every domain's direction adds to this client's model; empty for methods without fusion weights."""
    metrics: Mapping[str, float]
    protocol: str
    """How the metrics were measured, in a sentence or a stamp."""
    details: Mapping[str, Any] = {}
    """More entries for the table of settings."""


def model_card(card: Card, base_name: str, auto_class: str) -> str:
    """Markdown with the front matter that model hubs read.

    ``base_name``: the backbone, a name of the hub or `LOCAL_BACKBONE`; ``auto_class`` of transformers opens it.
    """
    parts = [
        _front_matter(base_name),
        _introduction(card, base_name),
        f"## Prompts\n\n{_prompt_text(card.prompt)}",
        *([MOVED, opened_from_a_folder(auto_class, card.domain)] if base_name == LOCAL_BACKBONE else []),
        "With FeDecider installed, `fedecider.Recommender.from_pretrained(FOLDER)` recommends, and takes titles with "
        "typing errors, many histories at once and new items.",
        DATA.format(card.domain),
    ]
    if card.alpha:
        total = sum(map(abs, card.alpha.values())) or 1.0
        weights = [(name, f"{value:.4f}", f"{abs(value) / total:.1%}") for name, value in card.alpha.items()]
        parts += ["## Whose directions", _table(("domain", "size of what its direction adds", "share"), weights)]
    metrics = [(name, f"{value:.4f}") for name, value in card.metrics.items()]
    settings = [(name, str(value)) for name, value in card.details.items()]
    parts += ["## Evaluation", card.protocol, _table(("metric", "value"), metrics)]
    parts += ["## Settings", _table(("setting", "value"), settings)]
    return "\n\n".join(parts) + "\n"


DATA = (
    "## Data and licence\n\nTrained on purchases of the customers of `{}` and, if the method exchanges any, on updates "
    "of other clients. No purchase is in this folder. The model has no licence yet: before you publish it, write "
    "`license:` into the first lines, as your data and the backbone allow. FeDecider's code is under Apache-2.0."
)


def opened_in_one_line(auto_class: str, name: str, domain: str) -> str:
    """A part of a card: how one adapter of a repository ``name`` of the hub with its base inside is opened."""
    lines = [
        f"from transformers import {auto_class}",
        "",
        f'model = {auto_class}.from_pretrained("{name}", adapter_kwargs={{"subfolder": "adapters/{domain}"}})',
        "",
        "# or, with titles in place of tokens:",
        "import fedecider",
        "",
        f'rec = fedecider.Recommender.from_pretrained("{name}", "{domain}")',
    ]
    return "\n".join(["## In one line", "", "```py", *lines, "```"])


def opened_from_a_folder(auto_class: str, domain: str) -> str:
    """A part of a card: how one adapter is opened with the backbone beside it, from any working directory."""
    return f"""## With peft

```py
from peft import PeftModel
from transformers import {auto_class}

base = {auto_class}.from_pretrained("FOLDER/backbone")  # FOLDER: what has backbone/ and adapters/
model = PeftModel.from_pretrained(base, "FOLDER/adapters/{domain}")
```"""


def _front_matter(base_name: str) -> str:
    return (
        f"---\nlibrary_name: peft\nbase_model: {json.dumps(base_name)}\n"
        "tags: [recommendation, federated-learning, lora, fedecider]\n---"
    )


def _introduction(card: Card, base_name: str) -> str:
    return (
        f"# {card.domain}: personalised recommender ({card.method})\n\n"
        f"This is the LoRA adapter of the client `{card.domain}`, trained by `{card.method}`. It needs the backbone\n"
        f"`{base_name}` and its tokenizer. `item_ids.json` maps each item key to a title, the text of the item\n"
        "ID and its tokens. The model writes the ID of the next item; decoding may only write IDs of this file."
    )


def _prompt_text(prompt: PromptLayout) -> str:
    template = " ".join(part for part in (prompt.before, "{history}", prompt.after) if part)
    separator = f"`{prompt.separator}`" if prompt.separator else "none (a space)"
    if prompt.separator is None:
        separator = "none" if prompt.end_token is None else "the closing token"
    closing = "" if prompt.prompt_end is None else f", then the closing token, {prompt.prompt_end}"
    rows = [
        ("prompt template", f"`{template}`{closing}"),
        ("`{history}`", "ID texts of the items, oldest first"),
        ("separator between two IDs", separator),
        ("`max_history`", f"{prompt.max_history} (the newest items)"),
        ("tokens of a prompt, at most", f"{prompt.max_tokens} (the oldest items are left out first)"),
        ("beams", f"{prompt.num_beams}"),
    ]
    if prompt.dense_head:
        place = "the last place of the prompt (of a T5: the decoder's first place)"
        rows.append(("items at once", f"the logits of the IDs' last tokens, each its item's own, at {place}"))
    return _table(("what", "value"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TOLERANCE = 1e-5
"""By how much logits may differ after a reload, times ``max(1, largest logit)``."""


class SavedBase(NamedTuple):
    """Where the base of an adapter is."""

    folder: Path
    """Where it is saved now."""
    name: str
    """What the adapter's config and card record: a hub name, or a path relative to the adapter."""


def export_adapter(
    model: PeftModel,
    factors: Tree,
    folder: Path,
    base: SavedBase,
    items: ItemTable,
    card: Card,
    prompts: Mapping[str, Tensor],
) -> float:
    """Write adapters as a PEFT folder and return the largest logit difference after a reload.

    ``model`` holds them, ``factors`` are the same as one pair a layer (`fedecider.models.adapters.Adapters.factors`):
    fused directions become one adapter of rank K*r, ``A = [A_1; ...; A_K]``, ``B = [alpha_1 B_1, ..., alpha_K B_K]``
    with ``lora_alpha = K*r``, which is the same update exactly; where K*r is above the shorter side of every layer, in
    the smaller pairs of `fedecider.models.directions.compact`. ``prompts`` is a real training batch. The folder is
    written beside its place and renamed only after the check, so a wrong export never appears under its name.

    Raises:
        ValueError: the reloaded model's logits differ by more than `TOLERANCE`.
    """
    check_items(items)
    with aside(folder) as scratch:
        scratch.mkdir(parents=True)
        tables = adapted_embeddings(model.get_base_model())
        save_peft_folder(compact(factors), scratch, base.name, family_of(model).task_type, tables)
        write_items(scratch, items, card.prompt.end_token)
        (scratch / "README.md").write_text(model_card(card, base.name, family_of(model).auto_class), encoding="utf-8")
        difference = reload_difference(model, scratch, base.folder, prompts)
        if not difference <= TOLERANCE:
            raise ValueError(
                f"got logits that differ by {difference:.2e} after reloading the adapter of {card.domain} onto "
                f"{base.folder}, expected at most {TOLERANCE:.0e}; pass the backbone that the adapters were trained on"
            )
        remove(folder)
    return difference


def save_peft_folder(factors: Tree, folder: Path, base_name: str, task_type: str, tables: Sequence[str] = ()) -> None:
    """Write one LoRA pair per layer (any common rank, scaling 1) in PEFT's own file format; ``task_type`` is PEFT's.

    ``tables``: embeddings that get the pair of the output as well, in PEFT's form of it: ``dE = (B_e A_e)^T`` with
    ``A_e = B^T`` (R, V) and ``B_e = A^T`` (D, R).
    """
    names = module_names(factors)
    rank = factors[f"{names[0]}.lora_a"].shape[0]
    check_pairs(factors, rank)
    state = {}
    for name in names:
        state[f"base_model.model.{name}.lora_A.weight"] = factors[f"{name}.lora_a"].float().contiguous()
        state[f"base_model.model.{name}.lora_B.weight"] = factors[f"{name}.lora_b"].float().contiguous()
    for table in tables:
        state[f"base_model.model.{table}.lora_embedding_A"] = factors[f"{HEAD}.lora_b"].float().t().contiguous()
        state[f"base_model.model.{table}.lora_embedding_B"] = factors[f"{HEAD}.lora_a"].float().t().contiguous()
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted({name.rsplit(".", 1)[-1] for name in (*names, *tables)}),
        task_type=TaskType(task_type),
        base_model_name_or_path=base_name,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    path = folder / CONFIG_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    content["target_modules"] = sorted(content["target_modules"])  # peft keeps a set, of another order in each process
    path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")


def check_pairs(factors: Tree, rank: int) -> None:
    """``ValueError`` for factors that are no pair of matrices of ``rank``, such as the empty ones of ZeRO-3."""
    for name in module_names(factors):
        shape_a, shape_b = (tuple(factors[f"{name}.{factor}"].shape) for factor in FACTORS)
        sound = len(shape_a) == len(shape_b) == 2 and shape_a[0] == shape_b[1] == rank and 0 not in (*shape_a, *shape_b)
        if not sound:
            raise ValueError(
                f"got adapters of shapes {shape_a} and {shape_b} for {name}, expected ({rank}, inputs) and (outputs, "
                f"{rank}); gather partitioned parameters before they are read"
            )


@torch.no_grad()
def reload_difference(model: PeftModel, folder: Path, base_folder: Path, prompts: Mapping[str, Tensor]) -> float:
    """Largest absolute logit difference between ``model`` and what plain transformers + peft load, in fp32.

    Divided by the largest logit where that exceeds 1. Infinite when either side is not finite.
    """
    device = next(model.parameters()).device
    family = family_of(model)
    inputs = {key: tensor.to(device) for key, tensor in family.plain_inputs(dict(prompts)).items()}
    modes = {module: module.training for module in model.modules()}
    expected = model.eval()(**inputs).logits.float()
    for module, training in modes.items():
        module.training = training
    dtype, quantized = next(model.parameters()).dtype, loading_options(quantize_of(model), device)
    auto_class = getattr(transformers, family.auto_class)
    own: dict[str, Any] = {"trust_remote_code": False, "dtype": dtype, **quantized}
    base = auto_class.from_pretrained(str(base_folder), use_safetensors=True, **own)
    keep_trainable(base)
    reloaded = load_adapter(base.to(device), folder).to(device).eval()
    actual = reloaded(**inputs).logits.float()
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def load_adapter(base: Any, folder: Path) -> PeftModel:
    """``base`` with the adapter of a folder, as plain peft loads it, but never from a pickle or from the hub.

    Raises:
        ValueError: a file of the adapter is missing or damaged, or it does not fit ``base``.
    """
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    advice = "expected the adapter and the backbone of one run. Copy both together, or export again"
    for path in (config, weights):
        if not path.is_file():  # else peft looks for a pickle, and then on the hub
            raise ValueError(f"no {path}, {advice}")
    try:
        with safe_open(weights, "pt") as file:
            wanted = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"got a damaged {weights} ({error}), {advice}") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # between two libraries
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # told below
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # see attach_lora
            warnings.filterwarnings("error", message="Unexpected keyword arguments")  # peft would drop them
            model = PeftModel.from_pretrained(base, str(folder))
        found = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError, UserWarning, re.error) as error:
        reason = str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__
        raise ValueError(f"the adapter of {config} does not fit the backbone ({reason}), {advice}") from error
    if found != wanted:
        raise ValueError(f"{config} names other layers than {weights.name} holds ({min(found ^ wanted)}), {advice}")
    return model
