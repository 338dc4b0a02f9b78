"""Settings of an audit."""

from __future__ import annotations

from dataclasses import dataclass

from fedecider.bounds import OneOrMore, Seed, ZeroOrMore, check


@dataclass(frozen=True)
class AuditConfig:
    """Audit: of which run, and how far.

    Args:
        run: The run folder that scripts/federate.py printed.
        data: The folder of the data, when it is not where the run found it: prepared domains (LLM track) or the raw
            files (embedding track).
        num_rounds: Embedding track: the number of rounds, from the first on, that are done again and watched; never
            more than the run had.
        num_clients: Embedding track: the number of clients, drawn once, that are attacked; 0 takes all.
        num_events: LLM track: the number of newest train events of a user that the attack asks the model about.
        num_users: LLM track: the largest number of members, and of others, of a client that are attacked, drawn once; 0
            takes all.
        seed: The seed of what is drawn here: who is attacked, halves of clients, intervals.
    """

    run: str
    data: str = ""
    num_rounds: OneOrMore = 3
    num_clients: ZeroOrMore = 200
    num_events: OneOrMore = 5
    num_users: ZeroOrMore = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check(self)
