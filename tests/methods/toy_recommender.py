"""The tiny setting of `fedecider.testing.llm_contract`, over backbones of several families."""

from functools import partial

from tiny_causal import tiny_causal
from transformers import PreTrainedModel

from fedecider.methods.client_models import ClientModels
from fedecider.testing.llm_contract import (  # noqa: F401 (tests take them from here)
    NAMES,
    SHIFTS,
    SILO_SIZES,
    SILOS,
    SIZES,
    WORDING,
    blocks,
    positions_of,
    run,
    summarise,
    tiny_models,
    tiny_silos,
)
from fedecider.testing.llm_contract import tiny_data as toy_data  # noqa: F401
from fedecider.testing.llm_contract import tiny_t5 as toy_t5


def with_clients(models: ClientModels, **functions) -> ClientModels:
    """Other functions for all clients: name -> client's number -> function."""
    clients = [
        client._replace(**{name: of(number) for name, of in functions.items()})
        for number, client in enumerate(models.clients)
    ]
    return models._replace(clients=clients)


def on(models: ClientModels, **changes) -> ClientModels:
    """The same over a base with other fields."""
    return models._replace(base=models.base._replace(**changes))


def toy_causal(dropout: float = 0.0, family: str = "llama", tied: bool = False) -> PreTrainedModel:
    sizes = {"vocab_size": 24, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
    return tiny_causal(family, num_hidden_layers=1, attention_dropout=dropout, tie_word_embeddings=tied, **sizes)


def tied_backbone() -> PreTrainedModel:
    return toy_t5() if BACKBONE == "t5" else toy_causal(family=BACKBONE, tied=True)


BACKBONES = {"t5": toy_t5, "llama": toy_causal, "qwen2": partial(toy_causal, family="qwen2")}
BACKBONE = "t5"
"""The one in use; tests that are for all of them change it."""


def toy_recommender(names=NAMES, *, dropout: float = 0.0, **options) -> ClientModels:
    return tiny_models(names, base=BACKBONES[BACKBONE](dropout), **options)


def catalogue_recommender(names=SILOS, **options) -> ClientModels:
    return tiny_silos(names, base=tied_backbone(), **options)
