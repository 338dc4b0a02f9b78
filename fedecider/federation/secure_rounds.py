"""The round loop over secure sums: the server gets the mean of those who delivered, and never a single upload.

All clients are in one process, and the sum is repeatable from its seed.
The steps and the messages are those of a deployment (:mod:`fedecider.federation.secure_sum`); secrets come from the
run's seed instead of the operating system, so nothing is hidden from who knows it.

After bound and noise an upload is multiplied by its client weight, put into fixed point (multiples of 2^-32, so that a
mean over weights of 1 or more is off by at most 2^-33), masked and sent, with the weight itself; the quotient of the
two sums is the mean. Who is late, not finite or out of range has dropped out after its shares were sent.

Of a tensor whose rows travel by ``sent_rows`` two clients mask the rows that both of them send, and each row has a sum
of weights of its own: the number of clients that have it, where all weigh alike. Where all of them send a row, with
zeros if it is not theirs, that is all the server learns.

Shape legend: L numbers of an upload, K clients of the run, L numbers of an upload in order of their names, n rows of a
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.federation import secure_sum
from fedecider.federation.channel import AggregationBackend, Sent
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.secure_sum import masked
from fedecider.federation.wire import Traffic, dense, download_of, measure, take_row, upload_of

KEYS, SHARES, UNMASKING = "secure:keys", "secure:shares", "secure:unmasking"
"""Names of the protocol's own messages in the counts of bytes."""


class Simulated(NamedTuple):
    """A sum whose clients have exchanged keys and shares."""

    rules: secure_sum.Rules
    keys: Mapping[int, secure_sum.PublicKeys]
    members: Mapping[int, secure_sum.Member]

    def send(self, client: int, value_L: Tensor, part: int = 0, sends: secure_sum.Sends | None = None) -> Tensor:
        """What ``client`` sends for ``value_L``."""
        return masked(self.rules, self.members[client], self.keys, value_L, part, sends)

    def secrets(self, survivors: Sequence[int]) -> secure_sum.Secrets:
        """What the server puts together of the answers of all ``survivors``."""
        answers = [secure_sum.reveal(self.rules, self.members[client], survivors)[0] for client in survivors]
        return secure_sum.recovered(self.rules, self.keys, survivors, answers)

    def open(self, total_L: Tensor, survivors: Sequence[int], sends: secure_sum.Sends | None = None) -> Tensor:
        """The exact sum of the values of ``survivors``, from that of what they sent, in one part."""
        return secure_sum.unmask(self.rules, self.keys, self.secrets(survivors), total_L, sends=sends)

    def open_uploads(self, uploads: Iterable[Upload], name: str) -> Tensor:
        """The exact sum over the clients whose masked tensor ``name`` (C, ...) arrives, int64 (...)."""
        survivors: list[int] = []
        total: Tensor | None = None
        for upload in uploads:
            survivors += upload.clients.tolist()
            part = upload.tensors[name].sum(0, dtype=upload.tensors[name].dtype)  # wraps: that is the modulus
            total = part if total is None else total + part
        secure_sum.check_survivors(self.rules, survivors)
        assert total is not None
        return self.open(total.reshape(-1).cpu(), survivors).view(total.shape)

    def payload_down(self) -> dict[str, int]:
        """What `Download.payload` says of the protocol's messages, alike for all."""
        return protocol_bytes(self.rules, self.rules.cohort[0])[0]

    def payload_up(self, clients: Tensor) -> Tree:
        """What `Upload.payload` says of them."""
        sizes = [protocol_bytes(self.rules, client)[1] for client in clients.tolist()]
        return {name: torch.tensor([one[name] for one in sizes]) for name in (KEYS, SHARES, UNMASKING)}


def protocol_bytes(
    rules: secure_sum.Rules, client: int, delivers: bool = True
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes down and up of a client's keys, shares and unmasking; who does not deliver is not asked to unmask."""
    others = len(rules.neighbours[client])
    down = {KEYS: secure_sum.PUBLIC_BYTES * others, SHARES: secure_sum.SEALED_BYTES * others}
    up = {KEYS: secure_sum.PUBLIC_BYTES, SHARES: secure_sum.SEALED_BYTES * others}
    if delivers:
        down[UNMASKING] = -(-len(rules.cohort) // 8)  # a bit for every client: whether it delivered
        up[UNMASKING] = secure_sum.SHARE_BYTES * (1 + others)
    return down, up


@lru_cache(maxsize=2)  # one for the sum that blocks are working at
def simulated(
    cohort: tuple[int, ...],
    seed: int,
    purpose: str,
    round: int,
    threshold: float = secure_sum.THRESHOLD,
    num_neighbours: int | None = None,
    bits: secure_sum.Bits = 64,
) -> Simulated:
    """A sum after steps 1 and 2, in which everybody in ``cohort`` took part."""
    rules = secure_sum.rules_for(
        cohort, seed, purpose, round, threshold=threshold, num_neighbours=num_neighbours, bits=bits
    )
    sources = {client: secure_sum.seeded(seed, "secure", purpose, round, client) for client in rules.cohort}
    members = {client: secure_sum.join(client, source) for client, source in sources.items()}
    keys = {client: secure_sum.announce(member) for client, member in members.items()}
    arrived: dict[int, dict[int, bytes]] = {client: {} for client in members}
    for client, member in members.items():
        near = {other: keys[other] for other in rules.neighbours[client]}
        sealed, members[client] = secure_sum.share(rules, member, near, sources[client])
        for receiver, message in sealed.items():
            arrived[receiver][client] = message
    members = {client: secure_sum.receive(rules, member, keys, arrived[client]) for client, member in members.items()}
    return Simulated(rules, keys, members)


FRACTION_BITS = 32
"""Uploads are multiples of 2^-32 in 64-bit numbers: finer than float32 near 1, and sums up to 2^31 fit."""
WEIGHT = "secure:weight"
ROW_WEIGHTS = "secure:weights:"
"""What the names of the sums of weights of single rows start with."""
PURPOSE = "round"


class SecureSums(NamedTuple):
    """How the uploads of a run are summed."""

    seed: int
    threshold: float = secure_sum.THRESHOLD
    num_neighbours: int | None = None
    own_rows: Tree = {}  # noqa: RUF012 (never written to)
    """Tensor name -> (K, n) bool, the rows that each client sends; all parties know them. Of its upload's rows
    (``sent_rows``) there may be fewer: the others are sent as zeros of weight 0, and nobody sees which these are."""

    def check_all(self, round: int, clients: Collection[int]) -> None:
        """``ValueError`` for a sum that some are not in, where all are needed (`threshold` 1)."""
        num_clients = max((len(mark_KI) for mark_KI in self.own_rows.values()), default=0)
        if self.threshold == 1.0 and len(clients) < num_clients:
            raise ValueError(
                f"got {len(clients)} of {num_clients} clients in the secure aggregation of round {round}, expected "
                "all: they sell parts of a catalogue, and the difference to other rounds would show what the missing "
                "company sells. Go on when all are back: --resume true"
            )

    def parties(self, round: int, cohort: Sequence[int]) -> Simulated:
        return simulated(tuple(cohort), self.seed, PURPOSE, round, self.threshold, self.num_neighbours)


def securely_summed_rounds(method: FederatedMethod, sums: SecureSums) -> AggregationBackend:
    """The backend of a channel for a method whose server takes a mean.

    In the simulation what the clients of a block send is added up where it is made, as the server would do first.

    Raises:
        ValueError: the server of ``method`` needs single uploads. When it runs: fewer than two clients in a cohort, or
            too many dropouts.
    """
    check_takes_mean(method)

    def send(round: int, cohort: Sequence[int], sent_to: Callable[[], Download], left: Sent, heard: Upload) -> Sent:
        upload, download = left.upload, sent_to()
        assert upload.sent_rows.keys() <= sums.own_rows.keys(), "rows that travel are known to all before the round"
        parties = sums.parties(round, cohort)
        in_block = upload.clients.tolist()
        total: Tree = {}
        delivered, kept_back, refused = [], set(), []
        for row, client in enumerate(heard.clients.tolist()):
            if heard.finite is not None and not heard.finite[row]:
                kept_back.add(client)
                continue
            try:
                alone = dense(upload_of(heard, row), download_of(download, in_block.index(client)))
                numbers = fixed_point(alone, len(cohort))
            except ValueError as error:
                kept_back.add(client)
                refused.append({"client": client, "reason": f"kept its upload back: {error}"})
                continue
            sent_L = parties.send(client, flat(numbers), sends=sends(sums.own_rows, numbers))
            _add(total, unflat(sent_L, numbers))
            delivered.append(client)
        traffic = [
            with_protocol(parties.rules, one, client, client in delivered, client in kept_back)
            for client, one in zip(in_block, _masked_traffic(download, upload, sums.own_rows), strict=True)
        ]
        summed = {name: tensor[None] for name, tensor in total.items()}
        mean_of = torch.tensor(delivered, dtype=torch.long)
        return Sent(Upload(torch.tensor([-1]), torch.ones(1), summed, mean_of=mean_of), traffic, refused)

    def read(round: int, cohort: Sequence[int], server: Tree, uploads: Iterator[Upload]) -> Iterator[Upload]:
        total, survivors = _added(uploads)
        sums.check_all(round, survivors)
        parties = sums.parties(round, cohort)
        secure_sum.check_survivors(parties.rules, survivors)
        sum_L = parties.open(flat(total), survivors, sends(sums.own_rows, total))
        yield mean_upload(unflat(sum_L, total), server, survivors)

    return AggregationBackend(send, read)


def check_takes_mean(method: FederatedMethod) -> None:
    """``ValueError`` for a method whose server needs more than a mean, or a finer one than multiples of 2^-32."""
    if method.fine_mean:
        raise ValueError(
            f"got secure_sum with {method.name}, whose server divides gradients by their size: those below the "
            "resolution would move it as much as any. Expected another variant or method, or secure_sum false"
        )
    if not method.takes_mean:
        raise ValueError(
            f"got secure_sum with {method.name}, whose server takes no mean over clients but needs single uploads (or "
            "has a secure aggregation of its own), expected a method that averages, or secure_sum false"
        )


def fixed_point(one: Upload, num_clients: int) -> Tree:
    """The numbers that one client sends, int64: weighted tensors and the weights, without masks.

    Raises:
        ValueError: a number so large that a sum over ``num_clients`` could leave 64 bits.
    """
    weight = float(one.weights[0])
    found: Tree = {WEIGHT: torch.tensor([weight], dtype=torch.float64)}
    for name, tensor in one.tensors.items():
        found[name] = weight * tensor[0].double().cpu()
        if name in one.sent_rows:
            found[ROW_WEIGHTS + name] = weight * one.sent_rows[name][0].double().cpu()
    largest = 2.0 ** (63 - FRACTION_BITS) / num_clients
    for name, value in found.items():
        if value.numel() and not float(value.abs().max()) < largest:  # what is not a number is not below either
            raise ValueError(
                f"got {float(value.abs().max()):.3g} in {name} times the client weight, expected below {largest:.3g}: "
                "clip uploads, or leave the client out"
            )
    return {name: secure_sum.encode(value, FRACTION_BITS) for name, value in found.items()}


def flat(numbers: Tree) -> Tensor:
    """(L,) all numbers, by name."""
    return torch.cat([numbers[name].reshape(-1) for name in sorted(numbers)])


def unflat(flat_L: Tensor, like: Tree) -> Tree:
    """What :func:`flat` was given, for numbers that lie like ``like``."""
    names = sorted(like)
    parts = flat_L.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def sends(own_rows: Tree, like: Tree) -> secure_sum.Sends | None:
    """client -> (L,) bool, which numbers it sends; None where everybody sends all of them."""
    if not any(name in own_rows for name in like):
        return None

    def of(client: int) -> Tensor:
        marks = {}
        for name, tensor in like.items():
            own_KI = own_rows.get(name.removeprefix(ROW_WEIGHTS))
            mark = torch.ones((), dtype=torch.bool) if own_KI is None else own_KI[client].cpu()
            marks[name] = mark.view(*mark.shape, *[1] * (tensor.dim() - mark.dim())).expand(tensor.shape)
        return flat(marks)

    return of


def mean_upload(sums: Tree, server: Tree, survivors: Sequence[int]) -> Upload:
    """The mean as one upload that is nobody's; of rows that only some send, over those who sent them."""
    weight = sums[WEIGHT].double()
    home = next((tensor.device for tensor in server.values()), torch.device("cpu"))
    tensors, marks = {}, {}
    for name, total in sums.items():
        if name == WEIGHT or name.startswith(ROW_WEIGHTS):
            continue
        dtype = server[name].dtype if name in server else torch.float32
        weight_n = sums.get(ROW_WEIGHTS + name)
        over = weight if weight_n is None else weight_n.double().view(-1, *[1] * (total.dim() - 1))
        mean = torch.where(over > 0.0, total.double() / over.clamp(min=2.0**-FRACTION_BITS), 0.0)
        tensors[name] = mean.to(home, dtype)[None]
        if weight_n is not None:
            marks[name] = (weight_n > 0)[None]
    weights = (weight > 0.0).float()
    return Upload(torch.tensor([-1]), weights, tensors, sent_rows=marks, mean_of=torch.tensor(list(survivors)))


def masked_like(like: Tree, own_rows: Tree) -> Tree:
    """What a client sends in the place of ``like``: names, shapes and kinds of number."""
    shapes = {WEIGHT: (1,), **{name: tuple(tensor.shape) for name, tensor in like.items()}}
    shapes |= {ROW_WEIGHTS + name: (len(like[name]),) for name in own_rows if name in like}
    return {name: torch.zeros((), dtype=torch.int64).expand(shape) for name, shape in shapes.items()}


def with_protocol(
    rules: secure_sum.Rules, one: Traffic, client: int, delivers: bool, kept_back: bool = False
) -> Traffic:
    """Bytes of a client with the protocol's own messages; who keeps its upload back sends nothing else."""
    down, up = protocol_bytes(rules, client, delivers)
    if kept_back:
        return Traffic(one.down | down, up, one.header_down, 0)
    return Traffic(one.down | down, one.up | up, one.header_down, one.header_up)


def _added(uploads: Iterable[Upload]) -> tuple[Tree, list[int]]:
    """The sum of what arrived, and from whom, in ascending order."""
    total: Tree = {}
    survivors: list[int] = []
    for upload in uploads:
        assert upload.mean_of is not None
        survivors += upload.mean_of.tolist()
        _add(total, {name: tensor[0].cpu() for name, tensor in upload.tensors.items()})
    return total, sorted(survivors)


def _add(total: Tree, one: Tree) -> None:
    """Into ``total``, in place and modulo 2^64."""
    for name, tensor in one.items():
        total[name] = total[name] + tensor if name in total else tensor


def _masked_traffic(download: Download, upload: Upload, own_rows: Tree) -> list[Traffic]:
    """Bytes as :func:`fedecider.federation.wire.measure` has them, of masked numbers in the place of the tensors."""
    told = {name: own_rows[name][upload.clients] for name in upload.sent_rows}
    like = masked_like(take_row(dense(upload_of(upload, 0), download_of(download, 0)).tensors, 0), upload.sent_rows)
    masked = {name: tensor.expand(len(upload.clients), *tensor.shape) for name, tensor in like.items()}
    marks = told | {ROW_WEIGHTS + name: mark_Cn for name, mark_Cn in told.items()}
    return measure(download, Upload(upload.clients, upload.weights, masked, sent_rows=marks))
