"""Settings of a run of an ID-based method that are not the method's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedecider.bounds import OneOrMore, Participation, Seed, Threads, ZeroOrMore, check
from fedecider.evaluation.protocols import get_protocol
from fedecider.id_based import METHODS


@dataclass(frozen=True)
class IdRunConfig:
    """Further settings of a federated run without a language model.

    Args:
        method: The federated method.
        domains: The prepared domains or silos that are clients, separated by commas; movies_tv.* stands for all silos
            of movies_tv. If empty, all in data.
        data: The folder of prepared domains.
        output: The run folder; if empty, one is made below runs/.
        seed: The seed from which every random draw of the run is derived.
        num_rounds: The number of rounds of local training and exchange.
        patience: The run stops after this many rounds without a better validation ndcg@10; 0 runs all rounds.
        participation: The share of the clients that take part in a round.
        protocol: The evaluation protocol: strict, or strict/keep_seen.
        num_threads: The number of CPU threads; 0 leaves the choice to torch.
        resume: If true, the stopped run in output goes on.
    """

    method: str = "fedsasrec"
    domains: str = ""
    data: str = ""
    output: str = ""
    seed: Seed = 0
    num_rounds: OneOrMore = 30
    patience: ZeroOrMore = 0
    participation: Participation = 1.0
    protocol: str = "strict"
    num_threads: Threads = 0
    resume: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.method not in METHODS:
            raise ValueError(f"got method {self.method!r}, expected one of {', '.join(METHODS)}")
        if get_protocol(self.protocol).num_sampled is not None:
            raise ValueError(f"got protocol {self.protocol!r}, expected one of whole catalogues, such as strict")
        if self.resume and not self.output:
            raise ValueError("got resume without output, expected the folder of the run: --output runs/<name>")

    @property
    def domain_names(self) -> list[str] | None:
        """None for all that are there."""
        return [name.strip() for name in self.domains.split(",") if name.strip()] or None


class IdSettings(NamedTuple):
    """All settings of one run."""

    run: IdRunConfig
    method: Any
    """The method's own frozen dataclass."""
