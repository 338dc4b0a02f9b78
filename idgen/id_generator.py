"""The ID generator: a T5 model that writes an item's ID text from its item text, in words of that text alone.

Shapes: B items, S input tokens, T target tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from fedecider.bounds import is_out_of_memory
from idgen.backbone import cut_table
from idgen.backbones.families import check_weights, family_of, unwrap
from idgen.backbones.family import evaluating
from idgen.config import TITLE_WORDS, Words
from idgen.item_ids import ItemIds, assign_item_ids, keyword_item_ids
from idgen.keywords import keyword_candidates, own_words
from idgen.loss_guard import LossGuard
from idgen.tokenizer import decode_ids, encode

Progress = Callable[[int, int, str], None]  # done, total, note
MAX_TEXT_TOKENS = 256  # of an item text that are read, as in IDGenRec
MAX_WRITTEN_TOKENS = 28  # of a first candidate: a longer one, and a suffix, still fit into the longest ID
MAX_OWN_WORDS = 64  # of a text among which the generator chooses
NUM_OTHERS = 16  # words with which an ID that is taken is made longer, or another one

# Of a generator from scratch, and of its training on keyword targets.
D_MODEL, D_FF, NUM_LAYERS, NUM_HEADS, DROPOUT = 64, 128, 2, 4, 0.1
EPOCHS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 5, 64, 3e-3, 0.01
MAX_STEPS = 200
"""Of whole epochs, one at least: a large catalogue is read once, so that its IDs take minutes on a CPU."""
ADVICE = "Take pretrain.ids keywords, or an id_generator that writes tags already: no setting changes this rate"
POOL = 16  # batches among which texts of like length are put together


class IDGenerator(NamedTuple):
    """A T5 model with its tokenizer, ready to write candidates."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    bf16: bool = False
    """Whether training uses bfloat16 autocast. IDs are written in fp32: they are the same wherever they are written."""
    words: Words = TITLE_WORDS
    """The length of an ID, and what it learns to write (`keyword_candidates`)."""

    def candidates(self, texts: Sequence[str], progress: Progress | None = None) -> list[list[str]]:
        """Candidate ID texts of each item (or user) text, best first, in words of that text, none of them twice.

        The first one is written greedily, token by token along a trie of the text's words, and ends at a word's end:
        not before ``words.least`` words while there are others, at ``words.most`` at the latest. Stop words are written
        where there is nothing else. The others serve items whose first one is taken: with one more word, with another
        last word, with several more, with fewer; words that few of ``texts`` have first, stop words last. None for a
        text without a word that the tokenizer can write.
        """
        spelling = _spell(self.tokenizer, {word for text in texts for kind in own_words(text) for word in kind})
        own = [[word for word in own_words(text)[0] if word in spelling][:MAX_OWN_WORDS] for text in texts]
        num_texts = Counter(word for words in own for word in words)
        length = [len(text) for text in texts]  # texts of like length together need little padding
        order = sorted(range(len(texts)), key=lambda item: (length[item], texts[item]))
        found: list[list[str]] = [[] for _ in texts]
        for start in range(0, len(texts), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            written = self._write([texts[row] for row in rows], [own[row] for row in rows], spelling)
            for row, words in zip(rows, written, strict=True):
                others = sorted(set(own[row]).difference(words), key=lambda word: (num_texts[word], word))[:NUM_OTHERS]
                stops = [word for word in own_words(texts[row])[1] if word in spelling][:NUM_OTHERS]
                found[row] = list(dict.fromkeys(_variants(words, others) + _variants(words, [*others, *stops])))
            if progress is not None:
                progress(min(start + BATCH_SIZE, len(texts)), len(texts), "")
        return found

    def _write(
        self, texts: Sequence[str], own: Sequence[Sequence[str]], spelling: dict[str, _Spelling]
    ) -> list[list[str]]:
        """Greedily the words of one ID a text, each chosen among ``own``, which no word of may stand twice."""
        model, device = unwrap(self.model), next(self.model.parameters()).device
        drafts = [_Draft([], list(words)) for words in own]
        end = _end_token(model)
        batch = _encode(self.tokenizer, texts, device)
        last_B1 = torch.full((len(texts), 1), model.config.decoder_start_token_id, device=device)
        family, number = family_of(model), 0
        with evaluating(model):
            state = family.start(model, batch["input_ids"], batch["attention_mask"])
            while True:
                options = [_next(draft, spelling, self.words, end) for draft in drafts]
                if not any(options):
                    return [draft.words for draft in drafts]
                hidden_B1D, state = family.step(model, state, last_B1, torch.zeros_like(last_B1), number)
                logit_BV = family.token_logits(model, hidden_B1D[:, 0]).float()
                row_P = [row for row, choice in enumerate(options) for _ in choice]
                token_P = [token for choice in options for token in choice]
                score_P = logit_BV[torch.tensor(row_P), torch.tensor(token_P)].tolist()
                best: dict[int, tuple[float, int]] = {}
                for row, token, score in zip(row_P, token_P, score_P, strict=True):
                    if row not in best or score > best[row][0]:
                        best[row] = score, token
                for row, (_, token) in best.items():
                    drafts[row] = options[row][token]
                last_B1 = torch.tensor([[best[row][1] if row in best else end] for row in range(len(texts))]).to(device)
                number += 1


class _Spelling(NamedTuple):
    """The tokens of a word where it begins an ID, and behind another word; they differ in a byte-level tokenizer."""

    first: tuple[int, ...]
    later: tuple[int, ...]


class _Draft(NamedTuple):
    """An ID that is being written."""

    words: list[str]
    left: list[str]  # own words that may still come, in the order of the text
    prefix: tuple[int, ...] = ()  # tokens of the word that is being written
    num_tokens: int = 0  # of ``words``
    ended: bool = False


def _next(draft: _Draft, spelling: dict[str, _Spelling], limits: Words, end: int) -> dict[int, _Draft]:
    """The tokens that may follow, and what each makes of the draft; none where it has ended.

    This is the trie of the words that are left, with a way back to its root at each word's end.
    """
    if draft.ended:
        return {}
    place, depth = (1 if draft.words else 0), len(draft.prefix)
    found: dict[int, _Draft] = {}
    complete = None
    for word in draft.left:
        tokens = spelling[word][place]
        if depth and tokens == draft.prefix:
            complete = word
        elif depth and tokens[:depth] == draft.prefix:
            found.setdefault(tokens[depth], draft._replace(prefix=tokens[: depth + 1]))
    if complete is not None:
        draft = _Draft(
            [*draft.words, complete], [word for word in draft.left if word != complete], (), draft.num_tokens + depth
        )
    elif depth:
        return found
    if len(draft.words) < limits.most:
        place = 1 if draft.words else 0
        for word in draft.left:
            tokens = spelling[word][place]
            if draft.num_tokens + len(tokens) <= MAX_WRITTEN_TOKENS:
                found.setdefault(tokens[0], draft._replace(prefix=tokens[:1]))
    if draft.words and (len(draft.words) >= min(limits.least, limits.most) or not found):
        found.setdefault(end, draft._replace(ended=True))
    return found


def _spell(tokenizer: PreTrainedTokenizerBase, words: set[str]) -> dict[str, _Spelling]:
    """The tokens of the words that the tokenizer can write and read again, each apart from its neighbours."""
    ordered, special = sorted(words), set(tokenizer.all_special_ids)
    before = encode(tokenizer, ["a"])[0]
    found = {}
    first, pairs = encode(tokenizer, ordered), encode(tokenizer, [f"a {word}" for word in ordered])
    back = zip(decode_ids(tokenizer, first), decode_ids(tokenizer, pairs), strict=True)
    for word, alone, pair, (text, two) in zip(ordered, first, pairs, back, strict=True):
        whole = text == word and two == f"a {word}" and pair[: len(before)] == before
        later = pair[len(before) :]
        short = 0 < len(alone) <= MAX_WRITTEN_TOKENS and 0 < len(later) <= MAX_WRITTEN_TOKENS
        if whole and short and not special.intersection(pair):
            found[word] = _Spelling(tuple(alone), tuple(later))
    return found


def _variants(words: list[str], others: list[str]) -> list[str]:
    """``words`` as an ID text, and what may stand in its place where it is taken."""
    if not words:
        return list(others)
    rows = [words, *([*words, other] for other in others), *([*words[:-1], other] for other in others)]
    rows += [[*words, *others[:number]] for number in range(2, len(others) + 1)]
    rows += [[*words[:place], *words[place + 1 :]] for place in reversed(range(len(words)))]
    rows += [words[:number] for number in range(len(words) - 1, 0, -1)]
    return list(dict.fromkeys(" ".join(row) for row in rows if row))


def _end_token(model: Any) -> int:
    end = model.config.eos_token_id
    return end[0] if isinstance(end, list) else end


def build_id_generator(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    bf16: bool = False,
    words: Words = TITLE_WORDS,
    model: Any | None = None,
) -> IDGenerator:
    """The generator before training on keywords: loaded from ``source``, the given model, or from scratch.

    A loaded model must know the tokenizer's vocabulary, which the backbone shares; its embeddings are cut to it.
    """
    if model is None:
        model = _load(source, tokenizer) if source else _from_scratch(tokenizer, seed)
    return IDGenerator(unwrap(model), tokenizer, bf16, words)


def train_id_generator(
    generator: IDGenerator,
    item_texts: Sequence[str],
    seed: int = 0,
    progress: Progress | None = None,
    epochs: int = EPOCHS,
) -> list[dict[str, float]]:
    """Teach the generator (in place) to write each item's keywords; one log entry per epoch (loss: nats a token).

    Targets are the longest first-choice keywords of `keyword_candidates`; items without words are left out.
    The result depends on ``seed`` and the texts only.

    Raises:
        ValueError: no text has a word.
        Diverged: the loss is no number, or in the end far above that of the first step.
    """
    wanted = generator.words._replace(least=generator.words.most)
    pairs = [
        (text, targets[0])
        for text, targets in zip(item_texts, keyword_candidates(item_texts, wanted), strict=True)
        if targets
    ]
    if not pairs:
        raise ValueError("no item text has a word to learn from; expected item texts. Check the prepared data")
    model = generator.model
    num_batches = -(-len(pairs) // BATCH_SIZE)
    epochs = min(epochs, max(1, MAX_STEPS // num_batches))
    num_steps = epochs * num_batches
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_then_fall(step, num_steps))
    guard = LossGuard(advice=ADVICE)
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
                total, num_tokens, step = total + float(loss) * count, num_tokens + count, step + 1
                guard.first = float(loss) if step == 1 else guard.first  # it is that of chance, whatever comes
                guard.step(loss, step, step == num_steps, LEARNING_RATE)
                if progress is not None:
                    progress(step, num_steps, f"loss {float(loss):.3f}")
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
    taken: Iterable[Sequence[int]] = (),
) -> ItemIds:
    """Unique IDs for a catalogue, written by the generator, or without one from the items' own words.

    ``words`` is of the latter. ``taken``: token sequences of IDs that are there already, for items that come later.
    """
    if generator is None:
        return keyword_item_ids(item_keys, item_texts, tokenizer, words, taken)
    candidates = generator.candidates(item_texts, progress)
    return assign_item_ids(item_keys, candidates, tokenizer, taken=taken, item_texts=item_texts)


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
    """One epoch in random order, texts of like length together; padding of the targets is -100."""
    tokenizer = generator.tokenizer
    device = next(generator.model.parameters()).device
    batches = []
    for pool in torch.randperm(len(pairs), generator=order).split(POOL * BATCH_SIZE):
        alike = sorted(pool.tolist(), key=lambda index: len(pairs[index][0]))
        batches += [alike[start : start + BATCH_SIZE] for start in range(0, len(alike), BATCH_SIZE)]
    for number in torch.randperm(len(batches), generator=order).tolist():
        texts, targets = zip(*(pairs[index] for index in batches[number]), strict=True)
        batch = _encode(tokenizer, texts, device)
        target = tokenizer(list(targets), padding=True, return_tensors="pt").to(device)
        batch["labels"] = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        yield batch


def _step(model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, bf16: bool) -> Tensor:
    device = batch["labels"].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        logits_BTV = model(**batch).logits.float()
    # Among the tokens of the own text, which it may write: among all it would learn which words are frequent.
    own_BV = torch.zeros(len(logits_BTV), logits_BTV.shape[2], dtype=torch.bool, device=device)
    own_BV.scatter_(1, batch["input_ids"], True).scatter_(1, batch["labels"].clamp(min=0), True)
    own_BV[:, model.config.eos_token_id] = True
    logits_BTV = logits_BTV.masked_fill(~own_BV[:, None], torch.finfo(torch.float32).min)
    loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _optimizer(model: Any) -> torch.optim.Optimizer:
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def _warm_up_then_fall(step: int, num_steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then linear to zero."""
    warm_up = max(1, num_steps // 20)
    return min((step + 1) / warm_up, max(0.0, (num_steps - step) / max(1, num_steps - warm_up)))
