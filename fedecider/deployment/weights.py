"""The weights of all sites' ensembles, whose mean each fits its own towards: one secure sum over all of them, after
that of counts (`fedecider.deployment.sums`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from fedecider.deployment.messages import Channel, Message
from fedecider.deployment.secure import SiteSums
from fedecider.deployment.sums import Numbers, SiteSum, Summing, is_whole, kinds_of, shared_sum, site_sums
from fedecider.models.config import EnsembleConfig
from fedecider.models.counts import FEWEST_SELLERS
from fedecider.models.ensemble import Weights
from fedecider.models.features import FEATURES
from fedecider.models.weight_sums import NUM_NUMBERS, mean_weights, weight_numbers

WEIGHTS = kinds_of("weight")
PURPOSE = "weights of all in round"

logger = logging.getLogger(__name__)


def shares_weights(config: EnsembleConfig, num_sites: int) -> bool:
    """Whether sites tell each other the mean of their weights."""
    return config.kind != "none" and "others" in config.source_names and num_sites > 1


def fewest(num_sites: int) -> int:
    """Sites that a mean is over: of two each has the other's weights, which only a pair is told."""
    return min(num_sites, FEWEST_SELLERS)


def what_all_learn(config: EnsembleConfig, names: Sequence[str]) -> list[str]:
    """A sentence for whoever makes a project."""
    if not shares_weights(config, len(names)):
        return []
    learns = "their mean over all customers" + (", and from it the other's" if len(names) == 2 else "")
    return [
        f"ensembles of {', '.join(names)} add up their {len(FEATURES)} weights after the rounds: each learns {learns}"
    ]


@dataclass
class SiteWeights:
    """A site's part in that sum, and what came of it."""

    sums: SiteSums
    folder: Path
    run: str
    group: Sequence[int]
    own_L: Tensor | None = None
    prior: Mapping[str, float] | None = None
    """The mean, if one has come."""

    @cached_property
    def _sum(self) -> SiteSum:
        def own(part: int) -> Tensor:
            assert self.own_L is not None
            return self.own_L

        numbers = Numbers(1, own, _read_sum, self._use)
        return SiteSum(self.sums, WEIGHTS, self.folder, self.run, self.group, fewest(len(self.group)), numbers)

    def answer(self, asked: Message, fit: Callable[[], Weights]) -> Message:
        """The answer to one message of `WEIGHTS`; ``fit`` is called once, when the weights are asked for."""
        if asked.kind == WEIGHTS.part and self.own_L is None:
            self.own_L = weight_numbers(fit())
        return self._sum.answer(asked)

    def _use(self, prior: Mapping[str, float], clients: Sequence[int]) -> None:
        self.prior = prior


def _read_sum(asked: Message, clients: Sequence[int]) -> dict[str, float]:
    total_L = asked.tensors.get("weights")
    if total_L is None or not is_whole(total_L) or total_L.shape != (NUM_NUMBERS,):
        raise ValueError(f"got no sum of weights, expected {NUM_NUMBERS} numbers")
    return mean_weights(total_L, len(clients))


def site_weights(
    config: EnsembleConfig, seed: int, clients: Sequence[str], client: int, folder: Path, run: str
) -> SiteWeights | None:
    """What the site of ``client`` needs for the sum; None where there is none. ``clients``: the names of all."""
    if not shares_weights(config, len(clients)):
        return None
    return SiteWeights(site_sums(seed, client, PURPOSE), folder, run, range(len(clients)))


def share_weights(
    channel: Channel, config: EnsembleConfig, seed: int, requests: Mapping[int, Message], folder: Path
) -> None:
    """The server's part; ``requests``: messages with what each site needs for its model of the rounds."""
    if shares_weights(config, len(channel.names)):
        one = Summing(
            WEIGHTS,
            PURPOSE,
            list(requests),
            fewest(len(requests)),
            [NUM_NUMBERS],
            lambda parts: {"weights": next(parts)},
            "are fitted without each other's weights",
            requests=requests,
        )
        shared_sum(channel, seed, one, next(iter(requests.values())).round, folder / "weights.safetensors")
