"""Seven clients of unequal size over 14 items: enough for every method, small enough for the per-user loop."""

import torch

from embedding_fr.blocks import Federation, block_packer, build_population
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from fedecider.evaluation.metrics import metrics_over_clients
from fedecider.evaluation.protocols import STRICT, Protocol
from fedecider.federation.method import RowUpdate
from fedecider.federation.rounds import RoundSettings, run_rounds
from fedecider.federation.rows import write_rows

NUM_ITEMS = 14
SEQUENCES = [
    [3, 1, 4, 0, 5, 9, 2],
    [2, 7, 8],
    [6, 0, 13, 11, 3, 5, 1, 8, 12],
    [10, 2, 4, 12],
    [5, 6, 7, 8, 9],
    [13, 12, 11, 10, 0, 1],
    [4, 9, 1, 2, 6, 3, 7, 11, 0, 8],
]


def toy_population(protocol: Protocol = STRICT, sequences=SEQUENCES, num_items=NUM_ITEMS, seed=0):
    return build_population(sequences, num_items, protocol, seed)


def toy_federation(protocol: Protocol = STRICT, num_clients=7, num_items=NUM_ITEMS, seed=0):
    return Federation(num_clients, num_items, seed, protocol, torch.device("cpu"))


def toy_training(name: str, **changes) -> EmbeddingTraining:
    """The method's own settings, made small: batches of 5, so that clients take unequal numbers of steps."""
    defaults = {key: value for key, value in METHODS[name].defaults.items() if key in EmbeddingTraining.__annotations__}
    small = {"embedding_size": 4, "batch_size": 5, "local_epochs": 2, "num_negatives": 2, "init_std": 0.3}
    return EmbeddingTraining(**{**defaults, **small, **changes})


def toy_method(name: str, federation=None, training=None, **config):
    method = METHODS[name]
    return method.build(federation or toy_federation(), training or toy_training(name), method.config(**config))


def own_after(own, update):
    """A client's own rows after an update, tables in full."""
    after = {name: tensor.clone() for name, tensor in own.items()}
    for name, new in update.items():
        if isinstance(new, RowUpdate):
            write_rows(after[name], torch.arange(len(new.rows)), new)
        else:
            after[name] = new
    return after


def run(method, population=None, rounds=3, *, block_clients=3, participation=1.0, seed=0, **options):
    """The final state after the real loop, and the records; ``block_clients`` clients share a block."""
    population = population or toy_population()
    records: list[dict] = []
    pack = block_packer(population, lambda num_train: 1, block_clients)
    state = run_rounds(
        method,
        pack(range(population.num_clients)),
        RoundSettings(rounds, seed, participation),
        metrics_over_clients,
        pack=pack,
        on_round=records.append,
        **options,
    )
    return state, records
