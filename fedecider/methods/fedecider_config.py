"""Settings of FeDecider, of its ablations and of the options that the paper does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedecider.bounds import NotNegative, above, check, shares_of

AUTO = "auto"
"""``alpha_init`` by which a client's weights start from the norm of its first own update."""
SUM = "sum"
"""``first_fusion`` that leaves the start of the weights as it is."""
PROJECTED = "projected"
"""``first_fusion`` by which the fusion is, along every direction, as large as the own update (`projection_weights`)."""


@dataclass(frozen=True)
class FedeciderConfig:
    """Settings of FeDecider and of its ablations.

    Args:
        alpha_init: Where the fusion weights start, at the first round after a broadcast: a number for every weight
            (paper: 2); auto: the own weight is the norm of the client's first own update, so that the first broadcast
            leaves the own part as large as it was, and the others are alpha_peers times that.
        alpha_peers: With alpha_init auto, the start of the weights of the other clients as a share of the own norm.
        first_fusion: With alpha_init auto, the weights with which a client meets the others' directions when they first
            reach it. sum: those that alpha_init and alpha_peers give, on top of the own update. A number t from 0 to 1:
            1 - t (n - 1) / n of the own update and t / n of its norm for each of the others, so that 0 is the client
            alone and 1 the mean of the n directions that hold anything in a layer. projected: in every layer those that
            make the fusion as large as the own update along each direction, a sum of directions that have nothing in
            common and a mean of equal ones.
            Several, separated by commas, stand in order of preference: one gives way to a later one that ranks the
            client's own validation items better by a standard error.
        merge: If true, what a client has trained and taken in stays in its model with the weights that it had then, and
            every local training starts from a new pair: a direction is what one round brought, and the weights are
            those of that round (the restarts of ReLoRA, Lialin et al., 2024, and FLoRA, Wang et al., 2024).
            first_fusion then holds for every broadcast. Wants alpha_init auto and own_slot raw. A client that is absent
            from a round misses what the others brought in it.
        alpha_learning_rate: The constant learning rate of the fusion weights (paper: 1e-3).
        train_alpha: If false, the fusion weights stay where they started.
        alpha_per: How many fusion weights there are: client (paper) learns one weight per pair of clients for all
            layers; module one per adapted layer.
        own_slot: What a client's own slot holds after a broadcast: normalized (paper) the unit-norm pair; absorb the
            same with its geometric mean norm multiplied into the own weight, or each layer's own norm with alpha_per
            module; raw the client's own pair as trained.
        skip_below: A peer's direction whose weight (the largest over layers) is below this in absolute value after a
            local training is never downloaded by that client again; 0 (paper) downloads all.
        normalize_at: Where directions are normalised, server (paper) or client; both give the same bits, but the server
            then never sees norms.
        send_norms: If true, the server sends with every direction the norms that it took from it, one number a layer,
            and with merge the weight of a peer starts from that norm, not from the receiver's: a mean of directions is
            then the mean of the updates, however unequal clients are in size.
        balanced: If true, canonical factors are broadcast that depend on the product only.
        ablation: What is left out: none; wo_decomp broadcasts raw pairs; wo_per fixes all weights at 1/K; wo_sep
            combines factors first, (sum alpha B)(sum alpha A).
        sep_factors: The factors that wo_sep combines, raw (as printed) or normalized.
    """

    alpha_init: float | Literal["auto"] = 2.0
    alpha_peers: NotNegative = 0.0
    first_fusion: str = "sum"
    merge: bool = False
    alpha_learning_rate: Annotated[float, above(0, hint="train_alpha false keeps the weights fixed")] = 1e-3
    train_alpha: bool = True
    alpha_per: Literal["client", "module"] = "client"
    own_slot: Literal["normalized", "absorb", "raw"] = "normalized"
    skip_below: NotNegative = 0.0
    normalize_at: Literal["server", "client"] = "server"
    send_norms: bool = False
    balanced: bool = False
    ablation: Literal["none", "wo_decomp", "wo_per", "wo_sep"] = "none"
    sep_factors: Literal["raw", "normalized"] = "raw"

    def __post_init__(self) -> None:
        check(self)
        if self.own_slot != "normalized" and not self.normalises:
            raise ValueError(
                f"got own_slot {self.own_slot} with {self.ablation}, where nothing is normalised; drop own_slot"
            )
        if self.own_slot == "absorb" and self.ablation == "wo_per":
            raise ValueError("got own_slot absorb with wo_per, which has no fusion weights; use raw or normalized")
        if self.alpha_per == "module" and self.ablation == "wo_per":
            raise ValueError("got alpha_per module with wo_per, which has no fusion weights; drop one of them")
        if self.starts_from_norms and self.ablation != "none":
            raise ValueError(
                f"got alpha_init auto with {self.ablation}, expected no ablation: only there a weight is the size of a "
                "direction of norm 1. Give alpha_init a number"
            )
        if self.alpha_peers and not self.starts_from_norms:
            raise ValueError(
                f"got alpha_peers {self.alpha_peers} with alpha_init {self.alpha_init}, which is the start of every "
                "weight; set alpha_init auto, or drop alpha_peers"
            )
        if self.first_fusions != [SUM] and not self.alpha_peers:
            raise ValueError(
                f"got first_fusion {self.first_fusion} with alpha_peers 0, expected alpha_init auto and alpha_peers "
                "above 0"
            )
        if self.merge and not (self.starts_from_norms and self.own_slot == "raw" and not self.skip_below):
            raise ValueError(
                f"got merge with alpha_init {self.alpha_init}, own_slot {self.own_slot} and skip_below "
                f"{self.skip_below}, expected auto, raw and 0: weights of a round start from that round's own update"
            )
        if self.send_norms and not (self.merge and self.normalize_at == "server"):
            raise ValueError(
                f"got send_norms with merge {self.merge} and normalize_at {self.normalize_at}, expected true and "
                "server: weights start anew there, and the server knows the norms"
            )
        if self.skip_below and not self.learns_alpha:
            raise ValueError(
                f"got skip_below {self.skip_below} with fusion weights that do not learn, so that nothing tells which "
                "directions to skip; set skip_below 0, or train_alpha true without wo_per"
            )

    @property
    def normalises(self) -> bool:
        """Whether directions are broadcast, not raw pairs."""
        return self.ablation in ("none", "wo_per") or (self.ablation == "wo_sep" and self.sep_factors == "normalized")

    @property
    def starts_from_norms(self) -> bool:
        """Whether every client sets its own start of the weights, after its first local training."""
        return self.alpha_init == AUTO

    @property
    def first_fusions(self) -> list[float | str]:
        """As they are tried: `SUM`, and numbers from 0 to 1."""
        words = [word.strip() for word in self.first_fusion.split(",")]
        named = [word for word in words if word in (SUM, PROJECTED)]
        others = [word for word in words if word not in named]
        numbers = shares_of(",".join(others), "first_fusion") if others else []
        if len(set(named)) < len(named):
            raise ValueError(f"got first_fusion {self.first_fusion!r}, expected different entries")
        return [word if word in named else numbers.pop(0) for word in words]

    @property
    def fits_peers(self) -> bool:
        """Whether a client looks at its validation items before it takes in the others' directions."""
        return len(self.first_fusions) > 1

    @property
    def learns_alpha(self) -> bool:
        return self.train_alpha and self.ablation != "wo_per"
