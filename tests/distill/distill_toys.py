"""A teacher of uneven depth and batches with padding, for the tests of distillation."""

from __future__ import annotations

import random

import torch
from transformers import T5Config, T5ForConditionalGeneration

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from idgen.config import SampleConfig
from idgen.item_ids import keyword_item_ids
from idgen.prompts import prompt_texts
from idgen.tasks import build_task
from idgen.tokenizer import train_tokenizer

VOCABULARY = 50


def make_teacher(num_layers=4, num_decoder_layers=4, seed=0, vocab_size=VOCABULARY, **changes):
    torch.manual_seed(seed)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "decoder_start_token_id": 0, **changes}
    config = T5Config(vocab_size=vocab_size, num_layers=num_layers, num_decoder_layers=num_decoder_layers, **sizes)
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():  # norms other than 1, so that a wrong norm shows
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_batch(seed=0, samples=5, width=9, labels=4):
    """Rows of unequal length, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (samples, width), generator=generator)
    length_B = torch.randint(2, width, (samples,), generator=generator)
    mask = (torch.arange(width) < length_B[:, None]).long()
    target = torch.randint(3, VOCABULARY, (samples, labels), generator=generator)
    kept_B = torch.randint(1, labels + 1, (samples,), generator=generator)
    return {
        "input_ids": input_ids * mask,
        "attention_mask": mask,
        "labels": target.masked_fill(torch.arange(labels) >= kept_B[:, None], -100),
    }


def make_task(num_items=15, lengths=(3, 5, 18, 11), seed=0):
    """A task, the tokenizer of its texts, and a teacher's vocabulary size."""
    draw = random.Random(seed)
    names = [f"{a} {b}" for a in ("red", "blue", "green", "amber", "grey") for b in ("harbour", "castle", "engine")]
    domain = Domain(
        name="shop",
        catalogue=Catalogue(
            "shop",
            keys=[f"i{number:02d}" for number in range(num_items)],
            titles=names[:num_items],
            texts=[f"title: {name}" for name in names[:num_items]],
        ),
        clients=Events(
            [f"u{number}" for number in range(len(lengths))],
            [[draw.randrange(num_items) for _ in range(length)] for length in lengths],
            None,
        ),
        public=Events([], [], None),
        card={},
    )
    tokenizer = train_tokenizer([*domain.item_texts, *prompt_texts("compact", ["shop"])], 250)
    ids = keyword_item_ids(domain.item_keys, domain.item_texts, tokenizer)
    config = SampleConfig(templates="compact", max_history=6)
    return build_task(domain, domain.clients, ids, tokenizer, config, True), tokenizer


def silence(block):
    """Make a block the identity: whatever it adds to the residual stream is zero."""
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith(("SelfAttention.o.weight", "EncDecAttention.o.weight", "DenseReluDense.wo.weight")):
                parameter.zero_()
