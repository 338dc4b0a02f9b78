"""Counts that sites with one catalogue, or parts of it, add up after the rounds, for their ensembles: one secure sum
for each catalogue.

The exchanges are those of `fedecider.deployment.secure`, under names of their own; masked counts travel in parts, and
the sum goes to each of these sites, which takes its own counts away where they are in it. A site lost before all of its
parts have come is left out. With too few sites (`fewest`, or below the threshold) there is no sum, and they go on
without each other's counts.

Shape legend: I items, L numbers of one part, N pairs on and above the diagonal that are not 0.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.cross_silo.ensembles import catalogue_groups, own_counts
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.data.domain import Domain
from fedecider.deployment.messages import Channel, Message, pack, unpack
from fedecider.deployment.secure import ServerSums, SiteSums, client_numbers
from fedecider.federation.record import write_bytes, write_json
from fedecider.federation.secure_rounds import SecureSums
from fedecider.federation.secure_sum import check_survivors
from fedecider.models import counts
from fedecider.models.config import EnsembleConfig
from fedecider.running.damage import read_object

KEYS, SHARES, PART, UNMASK, SUM = "count_keys", "count_shares", "counts", "count_unmask", "count_sum"
COUNT_KINDS = (KEYS, SHARES, PART, UNMASK, SUM)
COUNTED_FILE = "counted.json"
SCRATCH = "count_parts"
"""Folder of the server, while parts come in."""

logger = logging.getLogger(__name__)


def sites_by_catalogue(domains: Mapping[str, Domain], config: EnsembleConfig) -> dict[str, list[str]]:
    """Catalogue -> the sites that add up their counts; none without an ensemble."""
    return {} if config.kind == "none" else catalogue_groups(domains, config)


def fewest(shared: counts.SharedItems) -> int:
    """Sites that a sum is over: of two, each would hold the other's counts as they are, which only a pair is told.

    Where sites sell parts of a catalogue it is all of them: an item that three sell would be that of two without one.
    """
    return shared.fewest if shared.sells_KN.all() else len(shared.sells_KN)


def what_sites_learn(domains: Mapping[str, Domain], config: EnsembleConfig) -> list[str]:
    """A sentence for each catalogue, for whoever makes a project."""
    found = []
    for names in sites_by_catalogue(domains, config).values():
        shared = _shared_items(domains, names)
        learns = "a sum over the others" if len(names) > 2 else "the other's counts as they are, which no sum hides"
        of_part = f" of the {shared.num_items:,} items that {shared.fewest} or more of them sell"
        found.append(
            f"ensembles of {', '.join(names)} add up their counts{'' if shared.sells_KN.all() else of_part} after the "
            f"rounds: each learns {learns}. With --ensemble.sources own,public nothing is sent"
        )
    return found


@dataclass
class SiteCounts:
    """A site's part in the sum over the sites with its catalogue, and what came of it."""

    sums: SiteSums
    domain: Domain
    folder: Path
    """Where ``counted.json`` says with whom this site is in a sum, and its SHA-256: sums over different sites would
    tell single counts by their difference, and answers to many sums the own ones, so it takes part in one alone."""
    run: str
    """Whose sum this is."""
    group: Sequence[int]
    """The clients that share the catalogue, this one among them."""
    shared: counts.SharedItems
    """What is summed of the items of these clients, in their order."""
    others: counts.Counts | None = None

    @cached_property
    def own(self) -> counts.Counts:
        """What this site gives to the sum."""
        return self.shared.sent(self._place, own_counts(self.domain))

    @property
    def _place(self) -> int:
        return list(self.group).index(self.sums.client)

    def answer(self, asked: Message) -> Message:
        """The answer to one message of `COUNT_KINDS`."""
        answers: dict[str, Callable[[Message], Message]] = {
            KEYS: self.sums.announce,
            SHARES: self.sums.share,
            PART: self._send,
            UNMASK: self._reveal,
            SUM: self._keep,
        }
        return answers[asked.kind](asked)

    def found(self) -> dict[str, counts.Counts]:
        """The counts of the others under this site's name, if a sum has come."""
        if self.others is None:
            logger.warning(
                "the ensemble of %s counts without the others of its catalogue: no sum of theirs has come",
                self.domain.name,
            )
            return {}
        return {self.domain.name: self.shared.received(self._place, self.others)}

    def _send(self, asked: Message) -> Message:
        part, last = asked.facts.get("part"), counts.num_parts(self.own.num_items)
        if type(part) is not int or not 1 <= part <= last:
            raise ValueError(f"got part {part!r} of the counts, expected a number from 1 to {last}")
        return Message(
            asked.kind, asked.round, {"masked": self.sums.masked(asked, counts.part_of(self.own, part), part)}
        )

    def _reveal(self, asked: Message) -> Message:
        survivors, known = self._in_one_sum(asked.facts.get("survivors"))
        told = self.sums.reveal(asked)
        self._note(survivors, known or "")
        return told

    def _keep(self, asked: Message) -> Message:
        """The answer is the same whether the sum can be used or not: it would tell of the own counts."""
        (clients, known), total = self._in_one_sum(asked.facts.get("clients")), _read_sum(asked, self.own.num_items)
        is_in, digest = self.sums.client in clients, _digest(asked, clients)
        if is_in and known is None:
            raise ValueError(
                "got a sum with the counts of this site, expected one that it has helped to open: it was started again "
                "before that, and counts without the others of its catalogue"
            )
        if known not in (None, "", digest):
            raise ValueError("got a second sum of counts, expected the first one again: a site takes one alone")
        self._note(clients, digest)
        rest = counts.without(total, self.own) if is_in else total
        if min(rest.pair_II.data.min(initial=0), rest.event_I.min()) < 0:
            logger.warning("got a sum that is below this site's own counts, expected one with them: it is not used")
        else:
            self.others = rest
        return Message(asked.kind, asked.round)

    def _in_one_sum(self, given: object) -> tuple[list[int], str | None]:
        """The clients of a sum, and its SHA-256: empty before it has come, None if this site is in no sum yet."""
        clients, before = sorted(set(client_numbers(given))), self._noted()
        if not set(clients) <= set(self.group) or len(clients) < fewest(self.shared):
            raise ValueError(
                f"got a sum of counts over the clients {clients}, expected {fewest(self.shared)} at least of "
                f"{list(self.group)}: over fewer each would hold another's as they are"
            )
        if before and before["clients"] != clients:
            raise ValueError(
                f"got a sum of counts over the clients {clients} after one over {before['clients']}, expected the "
                "same: two sums would tell single counts by their difference"
            )
        return clients, before["sum"] if before else None

    def _noted(self) -> dict[str, Any] | None:
        file = self.folder / COUNTED_FILE
        found = read_object(file, {"run": str, "clients": list, "sum": str}) if file.is_file() else None
        if found and found["run"] != self.run:
            raise ValueError(
                f"got a {COUNTED_FILE} of another run, expected one of run {self.run}: start with another output"
            )
        return found

    def _note(self, clients: Sequence[int], digest: str) -> None:
        write_json(self.folder / COUNTED_FILE, {"run": self.run, "clients": clients, "sum": digest})


def site_counts(
    ensemble: EnsembleConfig,
    seed: int,
    artifacts: BaseArtifacts,
    clients: Sequence[str],
    client: int,
    folder: Path,
    fingerprint: str,
) -> SiteCounts | None:
    """What the site of ``client`` needs for the sum; None where no other site has its catalogue, or it does not ask for
    their counts.

    ``clients`` are the names of all of them.
    """
    if ensemble.kind == "none":
        return None
    for catalogue, names in sites_by_catalogue(artifacts.everyone, ensemble).items():
        if clients[client] in names:
            sums = SiteSums(SecureSums(seed), client, _purpose(catalogue))
            domain, numbers = artifacts.domains[clients[client]], [clients.index(name) for name in names]
            return SiteCounts(sums, domain, folder, fingerprint, numbers, _shared_items(artifacts.everyone, names))
    return None


def share_counts(
    channel: Channel, ensemble: EnsembleConfig, seed: int, domains: Mapping[str, Domain], round: int, folder: Path
) -> None:
    """The server's part: one sum for each catalogue, kept in ``folder`` for a run that goes on, and sent to all."""
    for catalogue, names in sites_by_catalogue(domains, ensemble).items():
        clients, file = [channel.names.index(name) for name in names], folder / f"counts_{catalogue}.safetensors"
        begun = file.with_suffix(".json")
        try:
            if not file.is_file():
                server = ServerSums(SecureSums(seed), channel, _purpose(catalogue), (KEYS, SHARES, UNMASK))
                shared = _shared_items(domains, names)
                write_bytes(file, pack(_summed(server, clients, shared, round, folder / SCRATCH, begun)))
            begun.unlink(missing_ok=True)
            told = unpack(file.read_bytes(), channel.config.max_bytes)._replace(round=round)
        except ValueError as error:
            logger.warning("ensembles of %s count without each other's events: %s", ", ".join(names), error)
            for client in clients:
                channel.refuse(client, f"its ensemble counts without the others of its catalogue: {error}")
            continue
        for client, answer in channel.ask(round, dict.fromkeys(clients, told)).items():
            if answer.kind != SUM:
                channel.refuse(client, f"got {answer.kind!r}, expected the sum of counts to be kept")


def _shared_items(domains: Mapping[str, Domain], names: Sequence[str]) -> counts.SharedItems:
    return counts.shared_items([domains[name].item_keys for name in names])


def _summed(
    server: ServerSums, clients: Sequence[int], shared: counts.SharedItems, round: int, scratch: Path, begun: Path
) -> Message:
    """The sum over those whose parts have all come, as the message that tells it.

    Parts wait on disk until it is known whose they are: masks of those who are lost are taken off for good. Before they
    are, ``begun`` says who is in the sum: sites open no other one, so a server that is killed asks the same again.

    Raises:
        ValueError: too few are left, of all ``clients``, or do not answer when masks are opened.
    """
    before, num_items = read_object(begun, {"clients": list})["clients"] if begun.is_file() else None, shared.num_items
    with _emptied(scratch):
        facts = server.begin(round, before or clients)
        parts, there = range(1, counts.num_parts(num_items) + 1), list(facts)
        place = f"{scratch}/{{}}.{{}}.npy".format
        for part in parts:
            for client, masked_L in _received(
                server.channel, facts, there, part, counts.part_size(num_items, part), round
            ).items():
                np.save(place(client, part), masked_L.numpy())
            there = [client for client in there if Path(place(client, part)).is_file()]
        check_survivors(server.rules_of(round, clients), there)
        _check_there(there, clients, before, fewest(shared))
        write_json(begun, {"clients": there})
        opened = server.opened(round, there)

        def total_of(part: int) -> Tensor:
            return opened(reduce(torch.add, (torch.from_numpy(np.load(place(one, part))) for one in there)), part)

        total = counts.joined(map(total_of, parts), num_items)
    upper_NN = scipy.sparse.coo_array(scipy.sparse.triu(total.pair_II, format="csr"))
    place_N = upper_NN.row.astype(np.int64) * num_items + upper_NN.col
    found = {"places": place_N, "pairs": upper_NN.data, "events": total.event_I}
    tensors = {name: torch.from_numpy(value) for name, value in found.items()}
    return Message(SUM, round, tensors, {"run": server.channel.run, "clients": there})


def _check_there(there: Sequence[int], clients: Sequence[int], before: Sequence[int] | None, least: int) -> None:
    """``ValueError`` for a sum that sites would not open."""
    if len(there) < least:
        raise ValueError(
            f"got the counts of {len(there)} of {len(clients)} sites, expected {least} at least: of two, each would "
            "hold the other's as they are"
        )
    if before is not None and list(there) != list(before):
        raise ValueError(
            f"got the counts of the clients {list(there)}, expected all of {list(before)}, whose sum was begun before "
            "the server stopped: sites open no other one"
        )


@contextmanager
def _emptied(scratch: Path) -> Iterator[None]:
    """An empty folder for a while; what a killed server has left there goes too."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _received(
    channel: Channel,
    facts: Mapping[int, Mapping[str, object]],
    clients: Sequence[int],
    part: int,
    size: int,
    round: int,
) -> dict[int, Tensor]:
    """One part of the masked counts of those who send it."""
    requests = {one: Message(PART, round, {}, {"run": channel.run, "part": part, **facts[one]}) for one in clients}

    def masked(client: int, answer: Message) -> Tensor:
        masked_L = answer.tensors.get("masked")
        if answer.kind != PART or masked_L is None or not _is_whole(masked_L) or masked_L.shape != (size,):
            raise ValueError(f"got {answer.kind!r}, expected {size:,} masked counts")
        return masked_L

    return channel.read(channel.ask(round, requests), masked)


def _read_sum(asked: Message, num_items: int) -> counts.Counts:
    """The sum in a message, which has its non-zeros with their places."""
    nothing = torch.zeros(0)
    place_N, pair_N, event_I = (asked.tensors.get(name, nothing) for name in ("places", "pairs", "events"))
    good = (
        all(_is_whole(one) and one.dim() == 1 for one in (place_N, pair_N, event_I))
        and len(place_N) == len(pair_N)
        and len(event_I) == num_items
        and bool((place_N.diff() > 0).all() and (pair_N > 0).all() and (event_I >= 0).all())
        and (not len(place_N) or 0 <= int(place_N[0]) <= int(place_N[-1]) < num_items**2)
        and bool((place_N // num_items <= place_N % num_items).all())
    )
    if not good:
        raise ValueError(f"got no sum of counts of {num_items} items, expected pairs with ascending places, and events")
    places = np.divmod(place_N.numpy(), num_items)
    upper_II = scipy.sparse.coo_array((pair_N.numpy(), places), shape=(num_items, num_items)).tocsr()
    return counts.of_upper(scipy.sparse.csr_array(upper_II), event_I.numpy())


def _digest(asked: Message, clients: Sequence[int]) -> str:
    """SHA-256 of a sum and of who is in it."""
    return hashlib.sha256(pack(Message(SUM, 0, asked.tensors, {"clients": clients}))).hexdigest()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64


def _purpose(catalogue: str) -> str:
    return f"counts of {catalogue} in round"
