"""The words of a text, without the libraries of models, which take seconds to import."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# The words of a text, without the libraries of models, which take seconds to import.


def clean_words(text: str) -> list[str]:
    """The words of a text as IDs may use them: lower case, compatibility forms folded, letters and digits only."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


# Tokenizers: one trained offline on the texts at hand, or one loaded from a folder or the hub.

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
SPACE = "▁"  # stands for the space before a word
DIGITS = "0123456789"
# Always known: prompts may use any printable ASCII character, suffixes of IDs numbers.
ALPHABET = [SPACE, *(chr(code) for code in range(33, 127)), *(SPACE + digit for digit in DIGITS)]
FRAGMENT_COST = 100.0  # log-probability taken off each fragment so that a known word is never cut up
PHRASE_SCORE = -1.0  # above any pair of words: a known phrase always stays whole
FRAGMENT_SHARE = 0.25  # of a word vocabulary, for the fragments that spell unknown words


def train_tokenizer(texts: Iterable[str], vocab_size: int, phrases: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Train a T5-compatible tokenizer on texts, offline; ``<pad>`` is 0, ``</s>`` 1 (appended), ``<unk>`` 2.

    The most frequent words are one token each, other words are spelled with pieces of a Unigram model (Kudo, ACL
    2018). ``phrases``, e.g. item ID texts, become one token each, whatever number of words they have, so that an ID is
    a single decision. ``vocab_size`` is an upper
    bound; small texts give fewer pieces. 0 holds the phrases and fragments of words, and no word more. Text is
    lower-cased; words joined by single spaces come back from ``decode(encode(text))`` unchanged as long as their
    characters occur in ``texts`` or ASCII. The same texts give the same tokenizer.
    """
    if vocab_size == 0 and not phrases:
        raise ValueError("vocab_size is 0 without phrases; expected 0 only for item IDs of one token, else e.g. 4000")
    if 0 < vocab_size < 2 * len(ALPHABET):
        raise ValueError(f"vocab_size is {vocab_size}; expected at least {2 * len(ALPHABET)}, e.g. 4000")
    texts = list(texts)
    if not any(clean_words(text) for text in texts):
        raise ValueError(f"got {len(texts)} texts without a single word; expected item texts. Check the prepared data")
    num_words = vocab_size - len(phrases)
    num_fragments = max(2 * len(ALPHABET), int(FRAGMENT_SHARE * num_words))
    pieces = _with_words(texts, _unigram_pieces(texts, num_fragments), phrases, vocab_size)
    ordered = sorted(pieces.items(), key=lambda piece: (-piece[1], piece[0]))
    model = models.Unigram([(PAD, 0.0), (EOS, 0.0), (UNK, 0.0), *ordered], unk_id=2, byte_fallback=False)
    tokenizer = _frame(model, split_words=not phrases)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 1)]
    )
    return _for_transformers(tokenizer)


def known_phrases(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts that are one token already."""
    return {piece.replace(SPACE, " ").strip() for piece in tokenizer.get_vocab()}


def with_phrases(tokenizer: PreTrainedTokenizerBase, phrases: Sequence[str]) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer of `train_tokenizer` in which each of ``phrases`` is one token; its own tokens stay.

    Raises:
        ValueError: it is a tokenizer of another kind, or a phrase is one token already.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    if content["model"]["type"] != "Unigram" or len(content["model"]["vocab"]) != len(tokenizer):
        raise ValueError(
            f"got a tokenizer of the kind {content['model']['type']}, expected one that was trained with phrases "
            "(ids item)"
        )
    both = sorted(known_phrases(tokenizer).intersection(phrases))
    if both or len(set(phrases)) != len(phrases):
        raise ValueError(
            f"got phrases {both or list(phrases)} that are one token already, expected new ones, each once"
        )
    content["model"]["vocab"] += [[SPACE + SPACE.join(clean_words(phrase)), PHRASE_SCORE] for phrase in phrases]
    return _for_transformers(Tokenizer.from_str(json.dumps(content)))


def _for_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="right",
        truncation_side="right",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def load_tokenizer(name_or_folder: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or by its hub name. One without a padding token pads with its end token.

    No code of the folder is run, and nobody is asked whether it may.

    Raises ValueError when it cannot be loaded or has no end token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_folder), trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json comes as a plain Exception of the tokenizers library
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no tokenizer could be loaded from {str(name_or_folder)!r} ({reason}); expected a folder written by "
            "save_pretrained or a hub name such as google-t5/t5-small. Check the path, or the network for a hub name"
        ) from error
    if tokenizer.eos_token is None:
        raise ValueError(
            f"the tokenizer in {str(name_or_folder)!r} has no end token (eos_token), which closes item IDs"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text without the end token."""
    return [list(tokens) for tokens in tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []


def encode_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token sequences of ID texts, without the end token."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if len(texts) else []


def decode_ids(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Texts of token sequences; special tokens stay visible so that a wrong sequence cannot pass for a right one."""
    return [
        str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for tokens in token_ids
    ]


def _frame(model: models.Unigram, split_words: bool = True) -> Tokenizer:
    """A tokenizer that folds case and white space, marks word starts and splits punctuation off words.

    Without ``split_words`` pieces may span words.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=split_words),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    # Not decoders.Metaspace: it drops every mark of the first piece, those inside a phrase too.
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def _unigram_pieces(texts: Sequence[str], vocab_size: int) -> dict[str, float]:
    """Pieces and log-probabilities of a Unigram model.

    The trainer's sums differ near 1e-11 from call to call and it numbers characters that it prunes but must keep in
    an order of its own: scores are rounded, and rare characters all get one score below those of longer pieces.
    """
    texts = [unicodedata.normalize("NFKC", text).lower() for text in texts]
    count = Counter(character for text in texts for character in text)
    kept = sorted(count, key=lambda character: (-count[character], character))[: (vocab_size - len(ALPHABET)) // 2]
    rare = dict.fromkeys(map(ord, set(count).difference(kept)), " ")  # e.g. of a foreign script: unknown tokens
    tokenizer = _frame(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(ALPHABET), special_tokens=[PAD, EOS, UNK], unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator([text.translate(rare) for text in texts] if rare else texts, trainer)
    learned = {piece: round(score, 2) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"][3:]}
    floor = min((score for piece, score in learned.items() if len(piece) > 1), default=0.0) - 1.0
    return dict.fromkeys(ALPHABET, floor) | {piece: max(score, floor) for piece, score in learned.items()}


def _with_words(
    texts: Sequence[str], fragments: dict[str, float], phrases: Sequence[str], vocab_size: int
) -> dict[str, float]:
    """The phrases and the most frequent words as single pieces, and the fragments, made dear, for the others."""
    count = Counter(word for text in texts for word in clean_words(text))
    total = sum(count.values())
    pieces = {piece: score - FRAGMENT_COST for piece, score in fragments.items()}
    pieces |= {SPACE + SPACE.join(clean_words(phrase)): PHRASE_SCORE for phrase in phrases if clean_words(phrase)}
    if vocab_size == 0:
        return pieces
    if len(pieces) + 3 > vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}; expected at least {len(pieces) + 3} for {len(phrases)} phrases and the "
            "fragments. Raise vocab_size"
        )
    for word, number in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        if len(pieces) + 3 >= vocab_size:
            break
        if pieces.get(SPACE + word) != PHRASE_SCORE:
            pieces[SPACE + word] = round(math.log(number / total), 2)
    return pieces
