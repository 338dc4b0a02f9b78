"""Settings of the private memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedecider.bounds import OneOrMore, Positive, above, at_least, check

SOURCES = ("own", "public", "others")


@dataclass(frozen=True)
class MemoryConfig:
    """The private memory of a client, which ranks beside the model.

    Args:
        kind: The kind of memory: none is the paper's system; with mixture the results have two more rows, for the model
            with the memory and for the memory alone, and the run folder keeps the memory under private/.
        sources: The events that are counted together, separated by commas: own (the client's train parts), public (the
            public users of its domain) and others (the sum over other clients with the same catalogue, by a secure
            sum; nothing where there are none).
        num_context: The newest items of a history that vote, weighted 1, 1/2, 1/3, ...
        count_exponent: The exponent of the counts' scores before they become probabilities: above 1, the likeliest
            items get more.
        text_power: The exponent of the cosine of two texts: a near text counts much more than two half-near ones.
        temperature: The temperature of the model: above 1, its likeliest items get less.
        calibration_share: The share of a client's users on whose train events the weights are fitted, and whose events
            no adapter is trained on: a model is overrated by users whom it has seen.
        max_contexts: The number of train events of a client, drawn once, on which the weights are fitted.
        num_buckets: The number of groups of histories, by how much is known of their newest item, that have weights of
            their own.
        bucket_prior: The number of events with which a bucket starts from the weights of all.
        choose_weights: If true, a client ranks with its model alone, or with its memory alone, where that ranks its
            validation items better than the mixture by more than one standard error.
        num_best: Where item IDs have several tokens: the number of best items of the memory that join the beams of the
            model as candidates, or as many as are asked for where those are more.
    """

    kind: Literal["none", "mixture"] = "none"
    sources: str = "own,public,others"
    num_context: OneOrMore = 10
    count_exponent: Positive = 1.5
    text_power: Positive = 6.0
    temperature: Positive = 1.0
    calibration_share: Annotated[float, above(0, most=0.5)] = 0.1
    max_contexts: OneOrMore = 2000
    num_buckets: Annotated[int, at_least(1, most=100)] = 3
    bucket_prior: Positive = 50.0
    choose_weights: bool = True
    num_best: OneOrMore = 50

    def __post_init__(self) -> None:
        check(self)
        names = self.source_names
        if not names or len(set(names)) != len(names) or not set(names) <= set(SOURCES):
            raise ValueError(f"got sources {self.sources!r}, expected some of {', '.join(SOURCES)}, each once")

    @property
    def source_names(self) -> list[str]:
        return [name.strip() for name in self.sources.split(",") if name.strip()]
