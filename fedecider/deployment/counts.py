"""Counts that sites with one catalogue, or parts of it, add up after the rounds, for their ensembles: one secure sum
for each catalogue (`fedecider.deployment.sums`), from which each site takes its own counts away where they are in it.

Shape legend: I items, N pairs on and above the diagonal that are not 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import safetensors.torch
import scipy
import torch
from torch import Tensor

from fedecider.cross_silo.ensembles import catalogue_groups, own_counts
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.data.domain import Domain
from fedecider.deployment.messages import Channel, Message
from fedecider.deployment.secure import SiteSums
from fedecider.deployment.sums import Numbers, SiteSum, Summing, is_whole, kinds_of, shared_sum, site_sums
from fedecider.evaluation.protocols import train_parts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.method import Tree
from fedecider.federation.record import write_bytes
from fedecider.methods.config import NOT_HIDDEN, UserPrivacy
from fedecider.models import counts
from fedecider.models.config import EnsembleConfig
from fedecider.models.noised_events import noised_events, others_events

EVENTS, COUNTS = kinds_of("event"), kinds_of("count")
"""Of a catalogue of more than `MOST_SUMMED_ITEMS` events are summed first, and then, over the same sites, the counts of
those items that have most of them."""

logger = logging.getLogger(__name__)


def sites_by_catalogue(domains: Mapping[str, Domain], config: EnsembleConfig) -> dict[str, list[str]]:
    """Catalogue -> the sites that add up their counts; none without an ensemble."""
    return {} if config.kind == "none" else catalogue_groups(domains, config)


def fewest(shared: counts.SharedItems) -> int:
    """Sites that a sum is over: of two, each would hold the other's counts as they are, which only a pair is told.

    Where sites sell parts of a catalogue it is all of them: an item that three sell would be that of two without one.
    """
    return shared.fewest if shared.sells_KN.all() else len(shared.sells_KN)


def what_sites_learn(domains: Mapping[str, Domain], config: EnsembleConfig, hides: bool = False) -> list[str]:
    """A sentence for each catalogue, for whoever makes a project. ``hides``: whether customers are hidden."""
    found = []
    for names in sites_by_catalogue(domains, config).values():
        if hides:
            found.append(
                f"ensembles of {', '.join(names)} add up with noise how often items were bought after the rounds: no "
                "pairs of items, and nothing in which a customer could be seen"
            )
            continue
        shared = _shared_items(domains, names)
        learns = "a sum over the others" if len(names) > 2 else "the other's counts as they are, which no sum hides"
        of_part = f" of the {shared.num_items:,} items that {shared.fewest} or more of them sell"
        if shared.num_items > counts.MOST_SUMMED_ITEMS:
            learns += f"; pairs of items are those of the {counts.MOST_SUMMED_ITEMS:,} that are bought most"
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
    run: str
    group: Sequence[int]
    """The clients that share the catalogue, this one among them."""
    shared: counts.SharedItems
    """What is summed of the items of these clients, in their order."""
    users: UserPrivacy = NOT_HIDDEN
    """Where it is on, events with noise are all that is summed (`fedecider.models.noised_events`)."""
    others: counts.Counts | None = None
    item_P: np.ndarray | None = None
    """The items whose counts are summed, once the sum of events has said which, in a large catalogue."""
    among: Sequence[int] = ()
    """The clients in that sum of events."""

    @cached_property
    def own(self) -> counts.Counts:
        """What this site gives to the sum. Noise is drawn once a run, also if the site starts again: what two draws
        have in common would have less of it."""
        if not self.users.on:
            return self.shared.sent(self._place, own_counts(self.domain))
        file, num_items = self.folder / f"noised_events_{self.run}.safetensors", len(self.domain.item_keys)
        if not file.is_file():
            drawn = noised_events(self._train, num_items, self.users.noise_scale, None)
            write_bytes(file, safetensors.torch.save({"events": torch.from_numpy(drawn.event_I)}))
        event_I = safetensors.torch.load_file(file)["events"].numpy()
        return self.shared.sent(self._place, counts.no_counts(num_items)._replace(event_I=event_I))

    @property
    def _train(self) -> SequenceArray:
        return train_parts(self.domain.clients.sequences)

    @property
    def _place(self) -> int:
        return list(self.group).index(self.sums.client)

    @property
    def _sums_events(self) -> bool:
        return self.users.on or self.own.num_items > counts.MOST_SUMMED_ITEMS

    @cached_property
    def _events(self) -> SiteSum:
        """The sum of events in a large catalogue, and of those with noise."""

        def read(asked: Message, clients: Sequence[int]) -> np.ndarray:
            return _read_events(asked, self.own.num_items, self.users.on)

        sums = SiteSums(self.sums.sums, self.sums.client, _before(self.sums.purpose))
        numbers = Numbers(1, lambda part: torch.from_numpy(self.own.event_I), read, self._use_events)
        return SiteSum(sums, EVENTS, self.folder, self.run, self.group, fewest(self.shared), numbers)

    @cached_property
    def _sum(self) -> SiteSum:
        sent = self.own if self.item_P is None else counts.items_of(self.own, self.item_P)

        def read(asked: Message, clients: Sequence[int]) -> counts.Counts:
            return _read_sum(asked, sent.num_items)

        def use(total: counts.Counts, clients: Sequence[int]) -> None:
            self._use(counts.without(total, sent) if self.sums.client in clients else total)

        numbers = Numbers(counts.num_parts(sent.num_items), lambda part: counts.part_of(sent, part), read, use)
        group, least = (self.among, len(self.among)) if self.among else (self.group, fewest(self.shared))
        return SiteSum(self.sums, COUNTS, self.folder, self.run, group, least, numbers)

    def answer(self, asked: Message) -> Message:
        """The answer to one message of `COUNTS` or `EVENTS`."""
        if asked.kind in EVENTS and self._sums_events:
            return self._events.answer(asked)
        if asked.kind in EVENTS or (self._sums_events and self.item_P is None):
            raise ValueError(
                f"got {asked.kind}, expected sums of events and then of counts in a catalogue of more than "
                f"{counts.MOST_SUMMED_ITEMS:,} items, of events alone where customers are hidden, and else of counts"
            )
        return self._sum.answer(asked)

    def found(self) -> dict[str, counts.Counts]:
        """The counts of the others under this site's name, if a sum has come."""
        if self.others is None:
            logger.warning(
                "the ensemble of %s counts without the others of its catalogue: no sum of theirs has come",
                self.domain.name,
            )
            return {}
        return {self.domain.name: self.shared.received(self._place, self.others)}

    def _use_events(self, total_I: np.ndarray, clients: Sequence[int]) -> None:
        event_I = total_I - self.own.event_I if self.sums.client in clients else total_I
        if self.users.on:
            num_others = len(set(clients) - {self.sums.client})
            self.others = others_events(event_I, num_others, self.users.noise_scale, self._train)
            return
        self.item_P, self.among = counts.summed_items(total_I), list(clients)
        self._use(counts.no_counts(len(event_I))._replace(event_I=event_I))

    def _use(self, rest: counts.Counts) -> None:
        if min(rest.pair_II.data.min(initial=0), rest.event_I.min()) < 0:
            logger.warning("got a sum that is below this site's own counts, expected one with them: it is not used")
        elif self.item_P is None or rest.num_items == self.own.num_items:
            self.others = rest
        elif self.others is not None:
            pair_II = counts.at_items(rest, self.item_P, self.own.num_items).pair_II
            self.others = self.others._replace(pair_II=pair_II)


def site_counts(
    ensemble: EnsembleConfig,
    seed: int,
    artifacts: BaseArtifacts,
    clients: Sequence[str],
    client: int,
    place: tuple[Path, str],
    users: UserPrivacy,
) -> SiteCounts | None:
    """What the site of ``client`` needs for the sum; None where no other site has its catalogue, or it does not ask for
    their counts.

    ``clients`` are the names of all of them, ``place`` the folder of the site and its run.
    """
    for catalogue, names in sites_by_catalogue(artifacts.everyone, ensemble).items():
        if clients[client] in names:
            domain, numbers = artifacts.domains[clients[client]], [clients.index(name) for name in names]
            sums, shared = site_sums(seed, client, _purpose(catalogue)), _shared_items(artifacts.everyone, names)
            return SiteCounts(sums, domain, *place, numbers, shared, users)
    return None


def share_counts(
    channel: Channel,
    ensemble: EnsembleConfig,
    seed: int,
    domains: Mapping[str, Domain],
    round: int,
    folder: Path,
    hides: bool = False,
) -> None:
    """The server's part: one sum for each catalogue, kept in ``folder`` for a run that goes on, and sent to all.

    ``hides``: whether customers are hidden, so that events with noise are all that is summed.
    """
    for catalogue, names in sites_by_catalogue(domains, ensemble).items():
        shared, clients = _shared_items(domains, names), [channel.names.index(name) for name in names]
        num_items, among, least, purpose = shared.num_items, clients, fewest(shared), _purpose(catalogue)
        without = "count without each other's events"
        if hides or num_items > counts.MOST_SUMMED_ITEMS:
            sizes, before = [num_items], _before(purpose)
            one = Summing(EVENTS, before, clients, least, sizes, lambda parts: {"events": next(parts)}, without)
            of_events = shared_sum(channel, seed, one, round, folder / f"events_{catalogue}.safetensors")
            if of_events is None or hides:
                continue
            among, num_items = of_events.facts["clients"], counts.MOST_SUMMED_ITEMS
            least, without = len(among), "count without each other's pairs of items"
        sizes = [counts.part_size(num_items, part) for part in range(1, counts.num_parts(num_items) + 1)]

        def tensors(parts: Iterator[Tensor], num_items: int = num_items) -> Tree:
            return _told(counts.joined(parts, num_items))

        one = Summing(COUNTS, purpose, clients, least, sizes, tensors, without, among)
        shared_sum(channel, seed, one, round, folder / f"counts_{catalogue}.safetensors")


def _told(total: counts.Counts) -> Tree:
    """A sum as it travels: its non-zeros with their places."""
    upper_NN = scipy.sparse.coo_array(scipy.sparse.triu(total.pair_II, format="csr"))
    place_N = upper_NN.row.astype(np.int64) * total.num_items + upper_NN.col
    found = {"places": place_N, "pairs": upper_NN.data, "events": total.event_I}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _shared_items(domains: Mapping[str, Domain], names: Sequence[str]) -> counts.SharedItems:
    return counts.shared_items([domains[name].item_keys for name in names])


def _read_sum(asked: Message, num_items: int) -> counts.Counts:
    """What `_told` has made of a sum."""
    nothing = torch.zeros(0)
    place_N, pair_N, event_I = (asked.tensors.get(name, nothing) for name in ("places", "pairs", "events"))
    good = (
        all(is_whole(one) and one.dim() == 1 for one in (place_N, pair_N, event_I))
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


def _read_events(asked: Message, num_items: int, has_noise: bool) -> np.ndarray:
    event_I = asked.tensors.get("events")
    good = event_I is not None and is_whole(event_I) and event_I.shape == (num_items,)
    if event_I is None or not good or (not has_noise and int(event_I.min()) < 0):
        raise ValueError(f"got no sum of events, expected those of {num_items} items")
    return event_I.numpy()


def _before(purpose: str) -> str:
    return f"events before {purpose}"


def _purpose(catalogue: str) -> str:
    return f"counts of {catalogue} in round"
