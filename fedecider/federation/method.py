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
    """The private data of these clients, in whatever form the method understands; None in the LLM track.

    There a method closes over one :class:`fedecider.methods.recommender.ClientModels`, which holds the model with its
    adapters attached and the tasks of all domains: they share one tokenizer, one trie per catalogue and one set of
    streams, and a domain is named by its number, which ``clients`` has already. The runner never looks into ``data``
    either way: what keeps one client's data from another is that a method reads only those of ``clients``, which the
    contract tests hold it to. In the embedding track blocks are cut out of flat arrays, so they carry what was cut."""


class Download(NamedTuple):
    """What the server sends to the clients of one block."""

    shared: Tree
    """Sent alike to each client."""
    per_client: Tree = {}  # noqa: RUF012 (never written to)
    """Every tensor leads with C: row c goes to client c only."""
    payload: dict[str, int] = {}  # noqa: RUF012 (never written to)
    """Bytes of shared tensors that travel encoded; all others have their plain size."""
    sent_rows: Tree = {}  # noqa: RUF012 (never written to)
    """(C, n) bool for tensors of n rows of which only some are sent, (C, m, n) for m tables of n rows: client c gets
    the rows that ``sent_rows[name][c]`` marks, in their order, and must know their places; it may not use the others
    (:func:`fedecider.federation.wire.received` is what it has)."""


class Upload(NamedTuple):
    """What leaves the clients of one block. Nothing else does."""

    clients: Tensor
    """(C,) int64 client numbers."""
    weights: Tensor
    """(C,) float client weights (example counts)."""
    tensors: Tree
    """Every tensor leads with C."""
    rows: Tree = {}  # noqa: RUF012 (never written to)
    """(C, R) int64 for tables held by their changed rows: ``tensors[name]`` (C, R, ...) are the rows ``rows[name]`` of
    the client's table, -1 pads, and every other row is as it was downloaded. What travels is the whole table (which
    hides the items that a client touched), unless ``payload`` says otherwise."""
    payload: Tree = {}  # noqa: RUF012 (never written to)
    """(C,) int64 bytes of tensors that travel encoded; all others have their plain size."""
    num_rows: dict[str, int] = {}  # noqa: RUF012 (never written to)
    """Rows in full of tables in ``rows`` that were not downloaded, such as gradients: every other row is zero."""
    sent_rows: Tree = {}  # noqa: RUF012 (never written to)
    """(C, n) bool for tensors of n rows of which only the marked ones leave a client, in their order; the server must
    know their places. The others are zero here and nobody's: a mean over clients is, row by row, over the senders."""
    finite: Tensor | None = None
    """(C,) bool, set by the runner when the upload has left its clients: whether all its tensors are finite. None while
    nobody has looked; :func:`fedecider.federation.aggregate.finite_clients` is how a server asks."""
    mean_of: Tensor | None = None
    """(N,) int64, the clients in this upload where it is a mean of several, one row that is nobody's (client -1): what
    a server gets that sees their sum alone. :func:`fedecider.federation.aggregate.heard_clients` asks for both."""


class RowUpdate(NamedTuple):
    """New own rows of tables (N, I, ...) of the local state that need not be built to be written."""

    rows: Tensor
    """(C, R) int64 rows of each client's table that change, -1 pads."""
    values: Tensor
    """(C, R, ...) what they become."""
    others: Tensor | None = None
    """(I, ...) what every other row becomes, alike for all clients; None: those stay as they are."""


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
    """round, download, own rows, block -> upload, new own rows, one log record per client. Of a block some of whose
    clients are away, all three are of the others."""
    server_aggregate: Callable[[int, Tree, Iterable[Upload]], Tree]
    """round, server, uploads in client order -> new server tree. Reads the uploads once, as a stream, as far as it
    wants: clients whose uploads it does not read train all the same."""
    positions: Callable[[str, Download, Tree, Block, str], list[Tensor]]
    """variant, download, own rows, block, split ("valid" | "test") -> per client, the 0-based place of each
    held-out item (``NOT_RANKED`` when it was not returned)."""
    variants: tuple[str, ...]
    """Models that are evaluated and logged each round; the first one is the reported one."""
    unread: tuple[str, ...] = ()
    """Local tensors that ``client_update`` replaces without a look: it is not given them, which saves their copy."""
    upload_like: Callable[[int, Tree], Tree] | None = None
    """round, server -> the upload of one client as it must look: names, shapes and kinds of number, whatever the
    values. A server that hears from strangers refuses all others; None: the method cannot be deployed."""
    bounded_from: Callable[[int], Tree] | None = None
    """round -> what a client's tensors are compared with where its upload is bounded, known to both sides; None: what
    was downloaded under the same names."""
    fine_mean: bool = False
    """Whether the server divides that mean by its own size: the resolution of a secure sum would be too coarse."""
    takes_mean: bool = False
    """Whether the server takes a mean over the uploads, tensor by tensor, for which a robust one may stand in."""
    bounds_norms: bool = False
    """Whether the sizes of single updates reach other clients, and are bounded on the way
    (:func:`fedecider.federation.aggregate.bounded`) by what companies may differ. Other means have a looser bound."""
    alone: Callable[[int, Tree, Upload], NewRows] | None = None
    """round, what the clients of a block had received (C, ...), their uploads -> what each one would receive next if
    nobody else took part, for federation off; None: what it uploaded."""
    cohort: Callable[[int, Tree, int], set[int]] | None = None
    """round, server, how many -> the clients that are asked in a round in which not all are, where the server chooses
    them by what it holds; None: they are drawn alike."""
