"""What the cross-device track knows of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from fedecider.federation.method import FederatedMethod
from fedecider.search_space import Space


def never(config: Any) -> bool:
    return False


def always(config: Any) -> bool:
    return True


def none(config: Any) -> int:
    return 0


class Method(NamedTuple):
    """How a method is configured, built and tuned, and what the rest of the track must know of it."""

    config: type
    """Frozen dataclass of the method's own settings."""
    build: Callable[[Federation, EmbeddingTraining, Any], FederatedMethod]
    defaults: Mapping[str, Any]
    """What the paper sets among the common settings (EmbeddingTraining, participation)."""
    grid: tuple[dict[str, Any], ...]
    """Settings to try on validation, most sensible first; an empty dict is the paper's."""
    space: Space = {}  # noqa: RUF012 (never written to)
    """What a search draws from when it has tried the grid."""
    whole_tables: int = 0
    """Tables of one row per item that a client holds in full and goes over in every local step (FedRAP: its personal
    table and a whole copy of the common one). 0: its steps touch the rows of its own examples only, and no more are
    held. Blocks are sized by it, so it decides speed and memory, never a result."""
    passing_tables: int = 0
    """Further whole tables that a client goes over once or twice a round, not in every step (PFedRec: its own last
    table, which is kept): they take memory, but no room in a CPU's caches, so only a GPU's blocks are sized by them."""
    client_bytes: Callable[[int, int, EmbeddingTraining, Any], int] | None = None
    """num_items, num_rows, training, config -> working set of a client in bytes, where that is not tables and examples;
    num_rows: of a table in its upload, its train items, or all items where uploads are made whole."""
    server_bytes: Callable[[int, Any], int] | None = None
    """num_items, config -> peak memory of the server's step on a CPU, checked before the first round."""
    server_tables: Callable[[Any], int] = none
    """config -> tables of one row per item that the server holds for each client at its peak (GPFedRec: the uploads, in
    whose place it makes the next ones, and those of absent clients)."""
    smaller_server: tuple[dict[str, Any], ...] = ()
    """Settings with which that step takes less, the smallest change first; what a run that does not fit is told."""
    negatives: bool = True
    """Whether clients train on ``num_negatives`` drawn items beside each of their own."""
    guarantee: Callable[[Any], str] | None = None
    """config -> what the bound and the noise in the method's own config guarantee, in one line; the common privacy
    settings are then not offered. None: the common ones hold."""
    upload_rounds: int | None = None
    """Rounds, from the first one on, in which clients upload anything, of which an epsilon is the sum; None: all."""
    needs_server: Callable[[Any], bool] = never
    """config -> whether uploads are sums or gradients, of which only a server makes the next model: with federation
    off nothing would be left of the method."""
    needs_everyone: Callable[[Any], bool] = never
    """config -> whether every client must take part in every round, since all of them exchange keys."""
    equal_weights: Callable[[Any], bool] = never
    """config -> whether all clients weigh alike in the server's mean: only then do their shares of noise add up."""
    chooses_cohort: Callable[[Any], bool] = never
    """config -> whether the server chooses a cohort by what it knows of clients: then a small share hides nobody."""
    published: bool = True
    """Whether a paper sets the defaults; the methods of this project have none."""
    plug_in: bool = False
    """Whether it is another method with a part put in, and so no row of its own among ``all``."""
    attributes: bool = False
    """Whether its server holds attributes of the items (:mod:`embedding_fr.attributes`); its settings then have
    ``attributes`` and ``text_encoder``."""
    uses_order: bool = False
    """Whether the order of a client's train items enters what is trained."""
    item_tables: tuple[str, ...] = ("item_table",)
    """Tensors of an upload and of the server with a row for each item, by whose moves an audit tells train items."""
    code: Mapping[str, Any] | None = None
    """Settings that make the method do what its authors' public code does, where that differs from the paper."""
    code_space: Space = {}  # noqa: RUF012 (never written to)
    """What a search around these draws from, where ranges of the paper's variant do not suit."""


def two(config: Any) -> int:
    return 2


def space_of(entry: Method, code: bool) -> Space:
    """What a search draws from around the settings of the paper, or of the public code."""
    return entry.code_space or entry.space if code else entry.space
