"""Settings of ranking, without the libraries of models, which take seconds to import."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedecider.bounds import Int, OneOrMore, ZeroOrMore, dataclass


@dataclass(frozen=True)
class RankingConfig:
    """How recommendations are decoded and counted.

    Args:
        num_beams: The number of beams of the constrained search; items beyond them count as not ranked. Items of the
            history take beams too before they are dropped. A run needs at least 20, since it reports hit@20, or as many
            as the largest catalogue has items. Where item IDs are one token each, every item is ranked without beams.
        num_eval_users: The number of users of a client in the validation of every round, drawn once; 0 takes all. The
            test takes all.
        eval_batch_size: The number of users that are decoded together.
    """

    num_beams: Annotated[Int, Field(ge=1, le=10_000)] = 20
    num_eval_users: ZeroOrMore = 0
    eval_batch_size: OneOrMore = 32

    def beams_for(self, k: int, num_seen: int, num_items: int) -> int:
        """Beams that have room for the ``k`` best of ``num_items`` items beside ``num_seen`` that may be dropped."""
        return min(max(self.num_beams, k + num_seen), num_items)
