"""The ID generator: a T5 model that writes an item's ID text from its item text.

Shapes: B items, S input tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from fedecider.bounds import is_out_of_memory
from idgen.backbone import cut_table
from idgen.backbones.families import check_weights, unwrap
from idgen.diverse import diverse_beam_search
from idgen.item_ids import (
    TITLE_WORDS,
    Attempt,
    ItemIds,
    Words,
    assign_item_ids,
    keyword_candidates,
    keyword_item_ids,
)

Progress = Callable[[int, int, str], None]  # done, total, note
MAX_TEXT_TOKENS = 256  # of an item text that are read, as in IDGenRec
MAX_LENGTH_OVER_MIN = 10  # an ID text may be this many tokens longer than the least asked for


# Of a generator from scratch, and of its training on keyword targets.
D_MODEL, D_FF, NUM_LAYERS, NUM_HEADS, DROPOUT = 64, 128, 2, 4, 0.1
EPOCHS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 10, 64, 3e-3, 0.01
NUM_GROUPS = 10
"""Candidates of an item, from diverse beam search, as in IDGenRec."""


class IDGenerator(NamedTuple):
    """A T5 model with its tokenizer, ready to write candidates."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    bf16: bool = False
    """Whether training and generation use bfloat16 autocast."""

    def candidates(self, texts: Sequence[str], attempt: Attempt, progress: Progress | None = None) -> list[list[str]]:
        """Candidate ID texts of each item (or user) text, best first; special tokens are left out."""
        found: list[list[str]] = []
        device = next(self.model.parameters()).device
        for start in range(0, len(texts), BATCH_SIZE):
            batch = _encode(self.tokenizer, texts[start : start + BATCH_SIZE], device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16):
                beams = diverse_beam_search(
                    self.model,
                    batch["input_ids"],
                    batch["attention_mask"],
                    NUM_GROUPS,
                    attempt.diversity_penalty,
                    attempt.min_length,
                    attempt.min_length + MAX_LENGTH_OVER_MIN,
                )
            flat = self.tokenizer.batch_decode(beams.token_BGT.flatten(0, 1), skip_special_tokens=True)
            found += [flat[row : row + NUM_GROUPS] for row in range(0, len(flat), NUM_GROUPS)]
            if progress is not None:
                progress(min(start + BATCH_SIZE, len(texts)), len(texts), f"attempt {attempt.number + 1}")
        return found


def build_id_generator(
    source: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0, bf16: bool = False, model: Any | None = None
) -> IDGenerator:
    """The generator before training on keywords: loaded from ``source``, the given model, or from scratch.

    A loaded model must know the tokenizer's vocabulary, which the backbone shares; its embeddings are cut to it.
    """
    if model is None:
        model = _load(source, tokenizer) if source else _from_scratch(tokenizer, seed)
    return IDGenerator(unwrap(model), tokenizer, bf16)


def train_id_generator(
    generator: IDGenerator,
    item_texts: Sequence[str],
    words: Words = TITLE_WORDS,
    seed: int = 0,
    progress: Progress | None = None,
    epochs: int = EPOCHS,
) -> list[dict[str, float]]:
    """Teach the generator (in place) to write each item's keywords; one log entry per epoch (loss: nats a token).

    Targets are the longest first-choice keywords of `keyword_candidates`; items without words are left out.
    The result depends on ``seed`` and the texts only.
    """
    wanted = words._replace(least=words.most)
    pairs = [
        (text, targets[0])
        for text, targets in zip(item_texts, keyword_candidates(item_texts, wanted), strict=True)
        if targets
    ]
    if not pairs:
        raise ValueError("no item text has a word to learn from; expected item texts. Check the prepared data")
    model = generator.model
    num_steps = epochs * -(-len(pairs) // BATCH_SIZE)
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_then_fall(step, num_steps))
    logs, step = [], 0
    with torch.random.fork_rng():  # dropout draws from the global stream
        torch.manual_seed(seed)
        order = torch.Generator().manual_seed(seed)
        model.train()
        for epoch in range(epochs):
            total, num_tokens = 0.0, 0
            for batch in _batches(generator, pairs, order):
                loss = _step(model, batch, optimizer, generator.bf16)
                scheduler.step()
                count = int((batch["labels"] >= 0).sum())
                total, num_tokens, step = total + loss * count, num_tokens + count, step + 1
                if progress is not None:
                    progress(step, num_steps, f"loss {loss:.3f}")
            logs.append({"epoch": epoch, "loss": total / num_tokens})
    model.eval()
    return logs


def make_item_ids(
    item_keys: Sequence[str],
    item_texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None = None,
    words: Words = TITLE_WORDS,
    progress: Progress | None = None,
) -> ItemIds:
    """Unique IDs for a catalogue, written by the generator, or without one from the items' own words."""
    if generator is None:
        return keyword_item_ids(item_keys, item_texts, tokenizer, words)

    def write(items: Sequence[int], attempt: Attempt) -> list[list[str]]:
        return generator.candidates([item_texts[item] for item in items], attempt, progress)

    return assign_item_ids(item_keys, write, tokenizer)


def _from_scratch(tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "d_model": D_MODEL,
        "d_kv": D_MODEL // NUM_HEADS,
        "d_ff": D_FF,
        "num_layers": NUM_LAYERS,
        "num_heads": NUM_HEADS,
        "dropout_rate": DROPOUT,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(T5Config(**settings))


def _load(source: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    try:
        if Path(source).is_dir():
            check_weights(Path(source))
        model = T5ForConditionalGeneration.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # transformers lets errors of json, its configs, torch and safetensors through
        if is_out_of_memory(error):  # the folder is not to blame
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no T5 model could be loaded from {source!r} ({reason}); expected a folder written by save_pretrained or "
            "a hub name. Check the path, or leave it empty to train an ID generator from scratch"
        ) from error
    if model.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the ID generator {source!r} knows {model.config.vocab_size} tokens, the tokenizer {len(tokenizer)}; "
            "expected one shared tokenizer. Use the tokenizer of the ID generator for the backbone too"
        )
    cut_table(model, len(tokenizer))
    return model


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    batch = tokenizer(list(texts), max_length=MAX_TEXT_TOKENS, truncation=True, padding=True, return_tensors="pt")
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def _batches(
    generator: IDGenerator, pairs: Sequence[tuple[str, str]], order: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """One epoch in random order; padding of the targets is -100."""
    tokenizer = generator.tokenizer
    device = next(generator.model.parameters()).device
    for chosen in torch.randperm(len(pairs), generator=order).split(BATCH_SIZE):
        texts, targets = zip(*(pairs[index] for index in chosen.tolist()), strict=True)
        batch = _encode(tokenizer, texts, device)
        target = tokenizer(list(targets), padding=True, return_tensors="pt").to(device)
        batch["labels"] = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        yield batch


def _step(model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, bf16: bool) -> float:
    device = batch["labels"].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(**batch).logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _optimizer(model: Any) -> torch.optim.Optimizer:
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def _warm_up_then_fall(step: int, num_steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then linear to zero."""
    warm_up = max(1, num_steps // 20)
    return min((step + 1) / warm_up, max(0.0, (num_steps - step) / max(1, num_steps - warm_up)))
