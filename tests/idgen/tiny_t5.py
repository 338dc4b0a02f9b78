"""A random T5 and ragged inputs for decoding tests; large weights so that scores differ visibly."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

VOCAB = 40


def tiny_t5(seed: int = 0, vocab_size: int = VOCAB, num_layers: int = 2, **settings) -> T5ForConditionalGeneration:
    """As many encoder as decoder layers: with fewer, ``generate`` of transformers 5.23 builds too short a cache."""
    config = T5Config(
        vocab_size=vocab_size,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=num_layers,
        num_heads=3,
        decoder_start_token_id=0,
        dropout_rate=0.3,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(config)
        for parameter in model.parameters():  # default weights make attention nearly uniform
            if parameter.ndim == 2:
                parameter.data.mul_(1.5)
    return model.eval()


def ragged_inputs(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Right-padded random inputs with these numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask_BS = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(3, vocab_size, mask_BS.shape, generator=generator) * mask_BS, mask_BS
