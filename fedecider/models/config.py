"""Settings of adapters and of the ensemble. They import no model, so that a command line costs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedecider.bounds import LoraRank, dataclass

ROLES = {
    "attention": ("q", "k", "v", "o", "q_proj", "k_proj", "v_proj", "o_proj"),
    "feed_forward": ("wi", "wi_0", "wi_1", "wo", "gate_proj", "up_proj", "down_proj"),
    "output": ("lm_head",),
    "table": ("lm_head",),
}
"""What linear layers are for -> their names in the backbones that we know; table is the output and, by the same pair of
factors, the embeddings that are tied to it."""


@dataclass(frozen=True)
class LoraSettings:
    """Where and how large the adapters are.

    Args:
        rank: Rank r of every adapter.
        targets: The linear layers that get one: roles of `ROLES`, or the ends of layers' names.
    """

    rank: LoraRank = 8
    targets: tuple[str, ...] = ("attention",)

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("got no LoRA targets, expected at least one, for instance attention")
        outputs = [target for target in self.targets if ROLES.get(target, (target,)) == ROLES["output"]]
        if len(outputs) > 1:
            raise ValueError(f"got LoRA targets {outputs}, expected one of them: they stand for the same layer")


SOURCES = ("own", "public", "others")


@dataclass(frozen=True)
class EnsembleConfig:
    """The ensemble of a client: its model beside counts, texts and habits, with weights learned on validation items.

    Args:
        kind: The kind of ensemble: none is the paper's system; with logit the results have two more rows, for the
            ensemble and for the ensemble without a model, and the output directory keeps the ensemble under private/.
        sources: The events that are counted together, separated by commas: own, public and others. own are the client's
            train parts, public the public users of its domain, others the sum over other clients with the same
            catalogue, by secure aggregation; none with the method local.
    """

    kind: Literal["none", "logit"] = "none"
    sources: str = "own,public,others"

    def __post_init__(self) -> None:
        names = self.source_names
        if not names or len(set(names)) != len(names) or not set(names) <= set(SOURCES):
            raise ValueError(f"got sources {self.sources!r}, expected some of {', '.join(SOURCES)}, each once")

    @property
    def source_names(self) -> list[str]:
        """``sources`` one by one."""
        return [name.strip() for name in self.sources.split(",") if name.strip()]

    @property
    def without_others(self) -> EnsembleConfig:
        """What a client has that neither sends nor gets counts."""
        kept = [name for name in self.source_names if name != "others"]
        return replace(self, sources=",".join(kept or ["own"]))
