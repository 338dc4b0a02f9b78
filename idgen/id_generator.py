"""The ID generator: a T5 model that writes an item's ID text from its item text.

Shapes: B items, S input tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from fedecider.bounds import (
    Depth,
    NotNegative,
    OneOrMore,
    Positive,
    ShareBelow1,
    Width,
    ZeroOrMore,
    at_least,
    check,
    is_out_of_memory,
)
from idgen.backbone import cut_table
from idgen.backbones.families import check_weights, unwrap
from idgen.diverse import diverse_beam_search
from idgen.item_ids import (
    DEFAULT_KEYWORDS,
    DEFAULT_LIMITS,
    Attempt,
    IdConfig,
    ItemIds,
    KeywordConfig,
    assign_item_ids,
    keyword_candidates,
    keyword_item_ids,
)

Progress = Callable[[int, int, str], None]  # done, total, note
MAX_LENGTH_OVER_MIN = 10  # an ID text may be this many tokens longer than the least asked for


@dataclass(frozen=True)
class IDGeneratorConfig:
    """Size, training and use of the ID generator.

    Args:
        source: The folder or hub name of a T5 that writes tags; if empty, a small T5 is trained from scratch.
        d_model: The width of a generator from scratch.
        d_ff: The width of its feed-forward layers, from scratch only.
        num_layers: The number of encoder layers and of decoder layers, from scratch only.
        num_heads: The number of attention heads, from scratch only.
        dropout: The dropout of a generator from scratch.
        epochs: The number of epochs on keyword targets; 0 uses the source as it is.
        batch_size: The number of items of a step, in training and in generation.
        learning_rate: The peak learning rate of AdamW.
        weight_decay: The weight decay of AdamW; norms have none.
        max_text_tokens: The number of tokens of an item text that are read.
        num_groups: The number of candidates of an item, from diverse beam search.
        bf16: If true, training and generation use bfloat16 autocast.
    """

    source: str = ""
    d_model: Width = 64
    d_ff: Width = 256
    num_layers: Depth = 2
    num_heads: Depth = 4
    dropout: ShareBelow1 = 0.1
    epochs: ZeroOrMore = 3
    batch_size: OneOrMore = 64
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.01
    max_text_tokens: OneOrMore = 256
    num_groups: Annotated[int, at_least(1, most=1000)] = 10
    bf16: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.d_model % self.num_heads:
            raise ValueError(f"got d_model {self.d_model}, expected a multiple of num_heads {self.num_heads}")
        if not self.source and self.epochs == 0:
            raise ValueError("an ID generator from scratch with epochs 0 writes noise; set epochs or source")


class IDGenerator(NamedTuple):
    """A T5 model with its tokenizer, ready to write candidates."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    config: IDGeneratorConfig

    def candidates(self, texts: Sequence[str], attempt: Attempt, progress: Progress | None = None) -> list[list[str]]:
        """Candidate ID texts of each item (or user) text, best first; special tokens are left out."""
        found: list[list[str]] = []
        device = next(self.model.parameters()).device
        for start in range(0, len(texts), self.config.batch_size):
            batch = _encode(self.tokenizer, texts[start : start + self.config.batch_size], self.config, device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.config.bf16):
                beams = diverse_beam_search(
                    self.model,
                    batch["input_ids"],
                    batch["attention_mask"],
                    self.config.num_groups,
                    attempt.diversity_penalty,
                    attempt.min_length,
                    attempt.min_length + MAX_LENGTH_OVER_MIN,
                )
            flat = self.tokenizer.batch_decode(beams.token_BGT.flatten(0, 1), skip_special_tokens=True)
            groups = self.config.num_groups
            found += [flat[row : row + groups] for row in range(0, len(flat), groups)]
            if progress is not None:
                progress(min(start + self.config.batch_size, len(texts)), len(texts), f"attempt {attempt.number + 1}")
        return found


def build_id_generator(
    config: IDGeneratorConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0, model: Any | None = None
) -> IDGenerator:
    """The generator before training on keywords: loaded from ``config.source``, the given model, or from scratch.

    A loaded model must know the tokenizer's vocabulary, which the backbone shares; its embeddings are cut to it.
    """
    if model is None:
        model = _load(config.source, tokenizer) if config.source else _from_scratch(config, tokenizer, seed)
    return IDGenerator(unwrap(model), tokenizer, config)


def train_id_generator(
    generator: IDGenerator,
    item_texts: Sequence[str],
    keywords: KeywordConfig = DEFAULT_KEYWORDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, float]]:
    """Teach the generator (in place) to write each item's keywords; one log entry per epoch (loss: nats a token).

    Targets are the longest first-choice keywords of `keyword_candidates`; items without words are left out.
    The result depends on ``seed`` and the texts only.
    """
    wanted = KeywordConfig(keywords.max_words, keywords.max_words, keywords.word_order, keywords.lead)
    pairs = [
        (text, targets[0])
        for text, targets in zip(item_texts, keyword_candidates(item_texts, wanted), strict=True)
        if targets
    ]
    if not pairs:
        raise ValueError("no item text has a word to learn from; expected item texts. Check the prepared data")
    model, config = generator.model, generator.config
    num_steps = config.epochs * -(-len(pairs) // config.batch_size)
    optimizer = _optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_then_fall(step, num_steps))
    logs, step = [], 0
    with torch.random.fork_rng():  # dropout draws from the global stream
        torch.manual_seed(seed)
        order = torch.Generator().manual_seed(seed)
        model.train()
        for epoch in range(config.epochs):
            total, num_tokens = 0.0, 0
            for batch in _batches(generator, pairs, order):
                loss = _step(model, batch, optimizer, config)
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
    id_source: Literal["keywords", "generator"] = "keywords",
    generator: IDGenerator | None = None,
    keywords: KeywordConfig = DEFAULT_KEYWORDS,
    config: IdConfig = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> ItemIds:
    """Unique IDs for a catalogue, from the items' own words or written by the generator."""
    if id_source == "keywords":
        return keyword_item_ids(item_keys, item_texts, tokenizer, keywords, config)
    if id_source != "generator" or generator is None:
        raise ValueError(
            f"id_source is {id_source!r}{' without a generator' if generator is None else ''}; expected 'keywords', "
            "or 'generator' with a trained ID generator"
        )

    def write(items: Sequence[int], attempt: Attempt) -> list[list[str]]:
        return generator.candidates([item_texts[item] for item in items], attempt, progress)

    return assign_item_ids(item_keys, write, tokenizer, config)


def _from_scratch(config: IDGeneratorConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "d_model": config.d_model,
        "d_kv": config.d_model // config.num_heads,
        "d_ff": config.d_ff,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "dropout_rate": config.dropout,
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


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], config: IDGeneratorConfig, device: torch.device
) -> dict[str, Tensor]:
    batch = tokenizer(
        list(texts), max_length=config.max_text_tokens, truncation=True, padding=True, return_tensors="pt"
    )
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def _batches(
    generator: IDGenerator, pairs: Sequence[tuple[str, str]], order: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """One epoch in random order; padding of the targets is -100."""
    size, tokenizer = generator.config.batch_size, generator.tokenizer
    device = next(generator.model.parameters()).device
    for chosen in torch.randperm(len(pairs), generator=order).split(size):
        texts, targets = zip(*(pairs[index] for index in chosen.tolist()), strict=True)
        batch = _encode(tokenizer, texts, generator.config, device)
        target = tokenizer(list(targets), padding=True, return_tensors="pt").to(device)
        batch["labels"] = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        yield batch


def _step(model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, config: IDGeneratorConfig) -> float:
    device = batch["labels"].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
        logits = model(**batch).logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _optimizer(model: Any, config: IDGeneratorConfig) -> torch.optim.Optimizer:
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": weights, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def _warm_up_then_fall(step: int, num_steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then linear to zero."""
    warm_up = max(1, num_steps // 20)
    return min((step + 1) / warm_up, max(0.0, (num_steps - step) / max(1, num_steps - warm_up)))
