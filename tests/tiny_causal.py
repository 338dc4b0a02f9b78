"""Tiny random decoder-only models of several families, and a tokenizer as such models have."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def tiny_causal(family="llama", seed=0, **changes):
    """A model with large weights, so that every part of it moves the scores."""
    config_class, model_class = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZES, **changes}))
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def byte_level_tokenizer(texts, vocab_size=400):
    """Byte-level BPE as of Llama 3, Qwen and SmolLM: a word's tokens differ with and without a space before it.

    It has an end token and nothing else that is special: no padding, no start, no chat template.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def save_decoder(folder, tokenizer, family="llama", spare_rows=7, **changes):
    """A folder as of the hub: a tiny model whose table is a little longer than the tokenizer, and the tokenizer."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None}
    ends = {"vocab_size": len(tokenizer) + spare_rows, "eos_token_id": tokenizer.eos_token_id}
    model = tiny_causal(family, **{**sizes, **ends, **changes})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
