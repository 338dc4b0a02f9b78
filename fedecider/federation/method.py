"""The five concepts of the shared runner: Tree, Block, Download / Upload, FederatedMethod.

Shape legend: C clients of a block, N all clients of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Tree = dict[str, Tensor]
"""Flat dotted names to tensors: the only thing that is sent, noised, aggregated or saved."""


class Block(NamedTuple):
    """Clients handled together: one domain is a block of one, a thousand users may be a block of a thousand."""

    clients: Tensor
    """(C,) int64 client numbers."""
    data: Any
    """The private data of these clients, in whatever form the method understands; None in the cross-silo track.

    There a method closes over one :class:`fedecider.methods.client_models.ClientModels`, which holds the model with its
    adapters attached and the tasks of all domains: they share one tokenizer, one trie per catalogue and one set of
    streams, and a domain is named by its number, which ``clients`` has already. The runner never looks into ``data``
    either way: what keeps one client's data from another is that a method reads only those of ``clients``, which the
    contract tests hold it to. In the cross-device track blocks are cut out of flat arrays, and carry what was cut."""


class Download(NamedTuple):
    """What the server sends to the clients of one block."""

    shared: Tree
    """Sent alike to each client."""
    per_client: Tree = {}  # noqa: RUF012 (never written to)
    """Every tensor leads with C: row c goes to client c only."""
    payload: dict[str, int] = {}  # noqa: RUF012 (never written to)
    """Bytes of shared tensors that travel encoded; all others have their plain size."""
    sent_rows: Tree = {}  # noqa: RUF012 (never written to)
    """(C, n) bool for tensors of n rows of which only some are sent, (C, m, n) for m tables of n rows. Client c gets
    the marked rows ``sent_rows[name][c]``, in their order, and knows their places. It must not use the others:
    :func:`fedecider.federation.wire.received` gives what it really has."""


class Upload(NamedTuple):
    """What leaves the clients of one block. Nothing else does."""

    clients: Tensor
    """(C,) int64 client numbers."""
    weights: Tensor
    """(C,) float client weights (example counts)."""
    tensors: Tree
    """Every tensor leads with C."""
    rows: Tree = {}  # noqa: RUF012 (never written to)
    """(C, R) int64, -1 pads, for tables of which only changed rows are held: ``tensors[name]`` (C, R, ...) are the rows
    ``rows[name]``, and every other row is as it was downloaded. This saves memory only. What travels is the whole
    table, which hides the items that a client touched, unless ``payload`` says otherwise."""
    payload: Tree = {}  # noqa: RUF012 (never written to)
    """(C,) int64 bytes of tensors that travel encoded; all others have their plain size."""
    num_rows: dict[str, int] = {}  # noqa: RUF012 (never written to)
    """Rows in full of tables in ``rows`` that were not downloaded, such as gradients: every other row is zero."""
    sent_rows: Tree = {}  # noqa: RUF012 (never written to)
    """(C, n) bool for tensors of n rows of which only the marked ones leave a client, in their order; the server knows
    their places. The others are zero here. They count for nobody: a mean is, row by row, over those who sent the row.
    """
    finite: Tensor | None = None
    """(C,) bool: whether all tensors of a client are finite. The runner sets it; None: not checked yet. Servers ask
    :func:`fedecider.federation.aggregate.finite_clients`."""
    mean_of: Tensor | None = None
    """(N,) int64: the clients whose mean this upload is, under a secure sum. It then has one row, of client -1. Servers
    ask :func:`fedecider.federation.aggregate.heard_clients`, which covers both cases."""


class RowUpdate(NamedTuple):
    """Changes of a local table (N, I, ...) row by row: the whole tables of a block would not fit into memory."""

    rows: Tensor
    """(C, R) int64: rows of each client's table that change, -1 pads."""
    values: Tensor
    """(C, R, ...): their new values."""
    others: Tensor | None = None
    """(I, ...): new values of all other rows, the same for every client; None: they stay."""


NewRows = Mapping[str, Tensor | RowUpdate]
"""New own rows of the local state by name."""


class FederatedMethod(NamedTuple):
    """A federated algorithm as pure functions; hyper-parameters and the seed are closed over.

    ``round`` counts from 1. ``own`` is the client's rows of the local state, which is never uploaded.
    """

    name: str
    init: Callable[[], tuple[Tree, Tree]]
    """() -> server tree, local tree (every local tensor leads with N)."""
    broadcast: Callable[[int, Tree, Tensor], Download]
    """round, server, clients (C,) -> download for the training of this round."""
    client_update: Callable[[int, Download, Tree, Block], tuple[Upload, NewRows, list[dict]]]
    """round, download, own rows, block -> upload, new own rows, one log record per client. Where clients of a block are
    away, all three are of the others."""
    server_aggregate: Callable[[int, Tree, Iterable[Upload]], Tree]
    """round, server, uploads in client order -> new server tree. Uploads are a stream that can be read once, so that a
    mean never holds a cohort. Clients whose uploads are not read train all the same."""
    positions: Callable[[str, Download, Tree, Block, str], list[Tensor]]
    """variant, download, own rows, block, split ("valid" | "test") -> per client, the 0-based place of each
    held-out item (``NOT_RANKED`` when it was not returned)."""
    variants: tuple[str, ...]
    """Models that are evaluated and logged each round; the first one is the reported one."""
    unread: tuple[str, ...] = ()
    """Local tensors that ``client_update`` overwrites without reading. It is not given them, which saves a copy."""
    upload_like: Callable[[int, Tree], Tree] | None = None
    """round, server -> an upload of one client with the right names, shapes and dtypes; its values do not matter. A
    deployed server refuses uploads that look otherwise. None: the method cannot be deployed."""
    bounded_from: Callable[[int], Tree] | None = None
    """round -> the reference from which the norm of an upload is measured and bounded; both sides know it. None: the
    downloaded tensors of the same names."""
    fine_mean: bool = False
    """Whether the server divides the mean by its own norm. Then the resolution of a secure sum would be too coarse."""
    takes_mean: bool = False
    """Whether the server takes a mean over the uploads, tensor by tensor. Then a robust mean can replace it."""
    bounds_norms: bool = False
    """Whether the norms of single updates reach other clients. They are then bounded
    (:func:`fedecider.federation.aggregate.bounded`) by the factor for companies; other means have a looser bound."""
    alone: Callable[[int, Tree, Upload], NewRows] | None = None
    """round, what the clients of a block had received (C, ...), their uploads -> what each would receive next if nobody
    else took part; used with federation off. None: its own upload."""
    cohort: Callable[[int, Tree, int], set[int]] | None = None
    """round, server, number of clients -> the cohort, for methods that choose it by the server's state. None: drawn at
    random, uniformly."""
