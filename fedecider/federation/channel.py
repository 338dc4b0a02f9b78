"""Everything between clients and server: who is there, what leaves a client, what arrives, how it is aggregated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.wire import Traffic

Protect = Callable[[Upload, Download, int, int], Upload]
"""(upload, download, round, cohort size) -> the upload that leaves the clients, bounded and noised."""

Availability = Callable[[int, set[int]], set[int]]
"""(round, cohort) -> the clients of it that are there. The server goes on without the others."""


class Delivered(NamedTuple):
    """The uploads of a block that reached the server."""

    upload: Upload
    """Of the clients that got through, in their order."""
    refused: Sequence[dict] = ()
    """``client`` and ``reason`` of the others, for the record of the round."""


Delivery = Callable[[Upload, Callable[[], Download], int], Delivered]
"""(upload as it left the clients, function that returns their download, round) -> what arrives. Every process calls it
with the same arguments, so that all of them hold the same state."""


class Sent(NamedTuple):
    """The upload of a block as it is sent, and its bytes."""

    upload: Upload
    """What the server receives."""
    traffic: Sequence[Traffic]
    """Bytes of each client that trained."""
    refused: Sequence[dict] = ()
    """``client`` and ``reason`` of the clients whose uploads the backend could not send."""


class AggregationBackend(NamedTuple):
    """How uploads reach the server: one by one, or as a secure sum."""

    send: Callable[[int, Sequence[int], Callable[[], Download], Sent, Upload], Sent]
    """(round, cohort, function that returns the download, plain uploads of all that trained, upload of those that got
    through) -> what is sent. A client that trained and dropped out has still paid for its bytes; so both are passed.
    Every process calls it with the same arguments."""
    read: Callable[[int, Sequence[int], Tree, Iterator[Upload]], Iterator[Upload]]
    """(round, cohort, server tree, uploads as sent) -> uploads that the server aggregates."""
    sees_each: bool = False
    """Whether the server sees single uploads. Then it bounds their norms before it reads them; of a sum it cannot."""


ONE_BY_ONE = AggregationBackend(
    send=lambda round, cohort, sent_to, left, heard: Sent(heard, left.traffic),
    read=lambda round, cohort, server, uploads: uploads,
    sees_each=True,
)
"""The plain backend: the server sees every upload."""


class Channel(NamedTuple):
    """What lies between clients and server; by default everybody is there, and all arrives as it was sent."""

    protect: Protect = lambda upload, download, round, cohort_size: upload
    """The mechanism of differential privacy (:mod:`fedecider.federation.privacy`)."""
    availability: Availability = lambda round, cohort: cohort
    delivery: Delivery = lambda upload, sent_to, round: Delivered(upload)
    aggregation: AggregationBackend = ONE_BY_ONE
    """:mod:`fedecider.federation.secure_rounds` has the secure sums."""
