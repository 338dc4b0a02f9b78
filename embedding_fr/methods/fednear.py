"""FedNear: item-item weights from pairs of items counted by their nearness in a history, in one sum over clients.

FedEASE counts a pair of items alike whether a client had them in a row or far apart. Here a pair d events apart counts
1 / (1 + d / reach), what came later may count more than what came before, and newer items weigh more in the score. What
a client sends is still its term of one sum: secure aggregation and a privacy budget apply. With infinite reaches and no
direction it is FedEASE (:mod:`embedding_fr.methods.fedease`).

Shape legend: C clients of a block, N clients of the run, I items, T train items of a client, E pairs of one client,
L = I (I + 1) / 2 entries of an upper triangle, P planes: pair counts and, where order is used, their signed counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from embedding_fr import gram
from embedding_fr.blocks import Federation, UserData, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.entry import Method, always
from fedecider.baselines.ease import mirror
from fedecider.bounds import Float, NotNegative, Positive, PositiveOrInfinite, ZeroOrMore, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.privacy import PrivacyConfig, privacy_report, protect
from fedecider.federation.secure_rounds import Simulated, simulated
from fedecider.federation.secure_sum import Bits, decode, encode
from fedecider.federation.streams import stream
from fedecider.search_space import Real, Space

GRID: tuple[dict, ...] = (
    {},
    {"regularisation": 50.0},
    {"direction": 0.4},
    {"regularisation": 50.0, "direction": 0.4},
    {"history_reach": 5.0},
    {"regularisation": 50.0, "history_reach": 5.0, "direction": 0.4},
    {"regularisation": 50.0, "pair_reach": 3.0},
    {"regularisation": 500.0, "pair_reach": math.inf, "history_reach": 10.0, "direction": 0.0},
)
SPACE: Space = {
    "regularisation": Real(10.0, 5000.0, log=True),
    "pair_reach": Real(1.0, 50.0, log=True),
    "history_reach": Real(1.0, 50.0, log=True),
    "direction": Real(0.0, 1.0),
}
DEFAULTS: dict[str, int] = {"num_rounds": 2}
"""Round 1 sums, round 2 delivers."""
NUM_NEIGHBOURS = 16
"""Clients that each client shares a mask with under ``secure``."""
MASKED = "masked_gram"
"""Name of the masked planes in an upload."""


@dataclass(frozen=True)
class PairSumsConfig:
    """Settings that FedEASE and FedNear share.

    Args:
        regularisation: The regularisation lambda, the L2 weight of the weights; it scales with the number of users.
        secure: If true, uploads are masked, so that the server sees the sum only, of three fifths of the clients at
            least; they are then whole triangles.
        clip: The largest L2 norm of a client's contribution (upper triangle), which is scaled down to it; 0 bounds
            nothing.
        noise_scale: The size of the Gaussian noise on the sum, divided by clip; 0 adds none. It needs clip and a method
            without order.
        delta: The probability that (epsilon, delta) leaves open.
        top_k: The number of entries of each column of the weights that clients get, by size; 0 sends all.
        precision: The number format of the sum and of the solution at the server, float32 or float64; float32 takes
            half the memory and half the time.
    """

    regularisation: Positive = 200.0
    secure: bool = False
    clip: NotNegative = 0.0
    noise_scale: NotNegative = 0.0
    delta: float = 1e-5
    top_k: ZeroOrMore = 0
    precision: Literal["float32", "float64"] = "float64"

    pair_reach: ClassVar[float] = math.inf
    history_reach: ClassVar[float] = math.inf
    direction: ClassVar[float] = 0.0
    """No settings of FedEASE: all pairs and all items of a history count alike."""

    def __post_init__(self) -> None:
        if self.noise_scale and not self.clip:
            raise ValueError(f"got noise_scale {self.noise_scale} without a bound, expected clip as well")
        if self.noise_scale and self.direction:
            raise ValueError(
                f"got noise_scale {self.noise_scale} with direction {self.direction}, expected direction 0: noise on a "
                "second plane costs more than order gives"
            )
        _ = self.privacy  # its own checks

    @property
    def num_planes(self) -> int:
        """1 where order is ignored."""
        return 2 if self.direction else 1

    @property
    def bound(self) -> float:
        """Largest L2 norm of a contribution."""
        return self.clip or math.inf

    @property
    def counts_alike(self) -> bool:
        """Whether nearness and order count for nothing: what is sent then tells no order."""
        return self.pair_reach == math.inf and not self.direction

    @property
    def privacy(self) -> PrivacyConfig:
        """Bound and noise of the sum, for the accountant."""
        return PrivacyConfig(self.clip or None, self.noise_scale, self.delta, "sum")


@dataclass(frozen=True)
class FednearConfig(PairSumsConfig):
    """Settings of FedNear.

    Args:
        pair_reach: Two items that many events apart count 1/2, and at distance d in general 1 / (1 + d / pair_reach);
            with inf all pairs count alike, as in EASE.
        history_reach: An item that old, in events, counts half as much as the newest one in the score; with inf all
            count alike.
        direction: How much order counts: 0 ignores it, and 1 predicts only what comes later from what came before.
    """

    pair_reach: PositiveOrInfinite = 10.0  # type: ignore[misc]
    history_reach: PositiveOrInfinite = 2.0  # type: ignore[misc]
    direction: Annotated[Float, Field(ge=0, le=1)] = 0.2  # type: ignore[misc]


def fednear(federation: Federation, training: EmbeddingTraining, config: FednearConfig) -> FederatedMethod:
    """``G = sum_u s_u sum_{s,t} k(|s - t|) e_{i_s} e_{i_t}^T``, ``k(d) = 1 / (1 + d / pair_reach)``, score ``h_u W``.

    i_1 ... i_n are the train items of client u, oldest first. With D the part of G where i_s came before i_t,
    ``P = (G + lambda I)^-1``, the weights are ``W = Z(I) + direction * Z(P (D - D^T))``, where
    ``Z(M) = M - P diag(diag M / diag P)`` sets the diagonal to 0: Z(I) is EASE on G, and W minimises, up to scale,
    ``tr W^T (G + lambda I) W - 2 tr W^T C`` under a zero diagonal with C = D + r D^T, r = (1 - direction) /
    (1 + direction). k is positive definite (convex and falling: Polya), so G is positive semi-definite. ``h_u`` holds
    1 / (1 + age / history_reach) for an item of the client, age 0 its newest. Both reaches inf and direction 0 are
    FedEASE.

    Round 1 uploads, all later rounds upload nothing: run two rounds, so that the delivery of W is counted too (each
    round counts what is sent before its training). Clients score by themselves. Three ways of summing:

    - plain: a client sends the numbers of its items in order, 4 bytes each. Its own term tells the same and is longer:
      in this form the server learns the train items of every client.
    - ``secure``: a client sends P planes of L masked numbers of 4 or 8 bytes; the server learns the sum.
    - ``noise_scale``: s_u = min(1, clip / ||contribution||_2) and Gaussian noise of noise_scale * clip on every entry
      of the sum, a share from each client under ``secure``, else added by the server, who then must be trusted with
      the plain items. :func:`guarantee` says what it is worth. :func:`embedding_fr.gram.denoise` cleans G.

    Nothing is drawn without noise or masks; ``training`` is not used. Variant ``global``. No state stays with the
    clients but their history. With participation below 1 only the cohort of round 1 counts, and ``secure`` is an error,
    as is a bound under which a client counts nothing, at a resolution of 2^-16. Memory: :func:`server_bytes`, one
    square for both planes, checked before the first round; :func:`client_bytes` for a client of a block. Time: I^3 for
    the solution, 3 I^3 with direction, and the squares of the lengths of histories for the sum.
    The budget is that of continuous noise on exact sums: rounding to 2^-16 is not accounted for (Kairouz, Liu, Steinke
    2021 do it exactly), nor are the seed of the simulation and the choice of lambda on validation.

    Source: EASE (Steck, WWW 2019) and, for items weighted by recency in a linear model, SLIST (Choi et al., WWW 2021);
    pairs counted by a positive definite kernel of their distance, and the split into order and no order, are ours.
    """
    return pair_sums("fednear", federation, config)


def pair_sums(name: str, federation: Federation, config: PairSumsConfig) -> FederatedMethod:
    """See :func:`fednear`."""
    if config.top_k >= federation.num_items:
        raise ValueError(f"got top_k {config.top_k}, expected less than the {federation.num_items} items")
    if config.secure:
        gram.check_masked(federation.num_items, config.num_planes, number_format(federation, config)[0])

    def init() -> tuple[Tree, Tree]:
        return {}, {}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        protocol = parties(federation, config, round).payload_down() if config.secure and round == 1 else {}
        return Download(server, payload=protocol)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        weight_C = torch.ones(len(block.clients))
        if round > 1:
            return Upload(block.clients, weight_C, {}), {}, [{"num_counted": 0}] * len(block.clients)
        histories = histories_of(block.data)
        gram.check_scales(client_scales(histories, config), block.clients, config.bound)
        logs = [{"num_counted": len(item_T)} for item_T in histories]
        if config.secure:
            masked_CL = masked_planes(histories, block.clients, federation, config, round)
            protocol = parties(federation, config, round).payload_up(block.clients)
            return Upload(block.clients, weight_C, {MASKED: masked_CL}, payload=protocol), {}, logs
        if config.counts_alike:
            items = train_items(block.data, federation.num_items)
        else:
            items = torch.nn.utils.rnn.pad_sequence(histories, batch_first=True, padding_value=federation.num_items)
        size_C = torch.tensor([4 * len(item_T) for item_T in histories])
        return Upload(block.clients, weight_C, {"items": items}, payload={"items": size_C}), {}, logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        if round > 1:
            return server
        sum_of = secure_sum_of if config.secure else plain_sum_of
        return model_of(sum_of(round, uploads, federation, config), federation, config)

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        history_CI = weighted_history(block.data, federation.num_items, config.history_reach)
        model = download.shared
        if config.top_k:
            score_CI = gram.sparse_scores(history_CI, model["index"], model["value"])
        else:
            score_CI = history_CI @ model["weights"]
        return rank_users(score_CI, block.data, split, federation.protocol)

    def upload_like(round: int, server: Tree) -> Tree:
        return {"items": torch.zeros(federation.num_items, dtype=torch.bool)} if round == 1 else {}

    return FederatedMethod(
        name,
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("global",),
        upload_like=upload_like if config.counts_alike and not config.secure else None,
    )


def guarantee(config: PairSumsConfig) -> str:
    """What the noise of a run guarantees, in one line; "no guarantee" where there is none."""
    return privacy_report(config.privacy, num_rounds=1)


def needs_everyone(config: PairSumsConfig) -> bool:
    """Under ``secure``: all clients exchange keys and shares."""
    return config.secure


def client_bytes(num_items: int, num_rows: int, training: EmbeddingTraining, config: PairSumsConfig) -> int:
    """Memory that one client takes in a block: the size of its upload, which is dense under ``secure``."""
    return 8 * config.num_planes * gram.triangle_size(num_items) if config.secure else 8 * num_items


def server_bytes(num_items: int, config: PairSumsConfig) -> int:
    """Peak memory of the server's step on a CPU."""
    ordered = config.direction > 0
    needed = [gram.solution_bytes(num_items, config.precision, "float32", config.top_k, ordered=ordered)]
    if config.secure:
        needed.append(gram.masking_bytes(num_items, config.num_planes, config.noise_scale > 0))
    if config.noise_scale:
        needed.append(gram.denoising_bytes(num_items, config.precision))
    return max(needed)


def nearness(distance: Tensor, reach: float) -> Tensor:
    """``1 / (1 + distance / reach)``, float64."""
    return 1.0 / (1.0 + distance.double() / reach)


def train_items(data: UserData, num_items: int) -> Tensor:
    """(C, I) bool: the train items of each client."""
    history_CI = torch.zeros(len(data.train_CT), num_items + 1, dtype=torch.bool, device=data.train_CT.device)
    return history_CI.scatter_(1, data.train_CT, True)[:, :-1]  # the last column takes the padding


def histories_of(data: UserData) -> list[Tensor]:
    """Train items of each client, oldest first."""
    return [item_T[:num] for item_T, num in zip(data.train_CT, data.num_train_C.tolist(), strict=True)]


def weighted_history(data: UserData, num_items: int, reach: float) -> Tensor:
    """(C, I) float32 ``h_u``."""
    place_T = torch.arange(data.train_CT.shape[1], device=data.train_CT.device)
    age_CT = data.num_train_C[:, None] - 1 - place_T
    weight_CT = nearness(age_CT.clamp(min=0), reach).float()
    history_CI = weight_CT.new_zeros(len(weight_CT), num_items + 1)
    history_CI.scatter_(1, data.train_CT, weight_CT)  # the last column takes the padding
    return history_CI[:, :-1]


def contribution_norm(num_counted: int, config: PairSumsConfig) -> float:
    """L2 norm of the planes of a client with that many items, before scaling: it depends on nothing else."""
    distance_T = torch.arange(1, num_counted)
    pairs = ((num_counted - distance_T) * nearness(distance_T, config.pair_reach).square()).sum().item()
    return math.sqrt(num_counted + config.num_planes * pairs)


def client_scale(num_counted: int, config: PairSumsConfig) -> float:
    """What brings the contribution of a client with that many items inside its bound, at most 1."""
    return 1.0 if config.bound == math.inf else min(1.0, config.bound / contribution_norm(num_counted, config))


def client_scales(histories: Sequence[Tensor], config: PairSumsConfig) -> Tensor:
    """(C,) float64 :func:`client_scale` of each client."""
    return torch.tensor([client_scale(len(item_T), config) for item_T in histories], dtype=torch.float64)


def client_entries(item_T: Tensor, num_items: int, config: PairSumsConfig) -> tuple[Tensor, Tensor]:
    """Places (E,) in the triangle, all different, and values (P, E) of one client, inside its bound.

    Values are rounded towards 0 to multiples of 2^-16, so that sums are exact whatever their order. In the second plane
    the sign is + where the item with the lower number came first, and an item with itself counts 0.
    """
    first_E, second_E = torch.triu_indices(len(item_T), len(item_T), device=item_T.device)
    scale = client_scale(len(item_T), config)
    value_E = (
        scale * nearness(second_E - first_E, config.pair_reach) * 2.0**gram.SCALE_BITS
    ).floor() / 2.0**gram.SCALE_BITS
    earlier_E, later_E = item_T[first_E], item_T[second_E]
    low_E, high_E = torch.minimum(earlier_E, later_E), torch.maximum(earlier_E, later_E)
    place_E = low_E * num_items - low_E * (low_E - 1) // 2 + high_E - low_E
    planes = [value_E, value_E * (later_E - earlier_E).sign()]
    return place_E, torch.stack(planes[: config.num_planes])


def number_format(federation: Federation, config: PairSumsConfig) -> tuple[Bits, int]:
    """Bits and fraction bits of masked numbers: whole counts, else fixed point with room for noise of 10 deviations."""
    fraction_bits = 0 if config.counts_alike and config.bound == math.inf else gram.SCALE_BITS
    share = config.noise_scale * config.bound / math.sqrt(federation.num_clients) if config.noise_scale else 0.0
    fits = federation.num_clients * (1.0 + 10.0 * share) * 2.0**fraction_bits < 2.0**31
    return (32 if fits else 64), fraction_bits


def parties(federation: Federation, config: PairSumsConfig, round: int) -> Simulated:
    """The secure sum of a round over all clients."""
    bits, _ = number_format(federation, config)
    clients = tuple(range(federation.num_clients))
    return simulated(clients, federation.seed, "pairs", round, num_neighbours=NUM_NEIGHBOURS, bits=bits)


def masked_planes(
    histories: list[Tensor], clients: Tensor, federation: Federation, config: PairSumsConfig, round: int
) -> Tensor:
    """(C, P L) int32 or int64: planes of each client, its share of the noise, masks. One client at a time."""
    bits, fraction_bits = number_format(federation, config)
    gram.check_masked(federation.num_items, config.num_planes, bits, len(clients))
    masked = []
    for row, item_T in enumerate(histories):
        client_1 = clients[row : row + 1]
        place_E, value_PE = client_entries(item_T.cpu(), federation.num_items, config)
        planes_1PL = torch.zeros(1, config.num_planes, gram.triangle_size(federation.num_items), dtype=torch.float64)
        planes_1PL[0, :, place_E] = value_PE
        if config.noise_scale:
            upload, everyone = Upload(client_1, torch.ones(1), {"gram": planes_1PL}), federation.num_clients
            planes_1PL = protect(upload, config.privacy, federation.seed, round, cohort_size=everyone)["gram"]
        number_L = encode(planes_1PL, fraction_bits).view(-1)
        masked.append(parties(federation, config, round).send(int(client_1), number_L))
    return torch.stack(masked)


def secure_sum_of(round: int, uploads: Iterable[Upload], federation: Federation, config: PairSumsConfig) -> Tensor:
    """(I, I), pairs in its lower triangle and order in its upper one, from masked planes; noise is in them."""
    _, fraction_bits = number_format(federation, config)
    square_II = torch.zeros(federation.num_items, federation.num_items, dtype=gram.FORMATS[config.precision])
    summed_PL = parties(federation, config, round).open_uploads(uploads, MASKED).view(config.num_planes, -1)
    for add, plane_L in zip((gram.add_triangle, gram.add_order), summed_PL, strict=False):  # order may be left out
        add(square_II, decode(plane_L, fraction_bits))
    return square_II


def plain_sum_of(round: int, uploads: Iterable[Upload], federation: Federation, config: PairSumsConfig) -> Tensor:
    """(I, I), pairs in its lower triangle and order in its upper one, from the items of the clients; the server bounds
    and noises."""
    num_items = federation.num_items
    square_II = torch.zeros(num_items, num_items, dtype=gram.FORMATS[config.precision])
    for upload in uploads:
        items = upload.tensors["items"]
        if items.dtype == torch.bool:
            histories = list(items.nonzero()[:, 1].split(items.sum(1).tolist()))
        else:
            histories = [item_T[item_T < num_items] for item_T in items]
        gram.add_histories(
            square_II, histories, client_scales(histories, config), config.pair_reach, ordered=config.direction > 0
        )
    if config.noise_scale:
        generator = stream(federation.seed, "gram_noise", round)
        noise_L = torch.randn(gram.triangle_size(num_items), generator=generator, dtype=torch.float64)
        gram.add_triangle(square_II, noise_L.mul_(config.noise_scale * config.bound))
    return square_II


def model_of(square_II: Tensor, federation: Federation, config: PairSumsConfig) -> Tree:
    """What clients download, from the sum, which is overwritten: ``weights``, or ``index`` and ``value``, float32."""
    square_II, regularisation = square_II.to(federation.device), config.regularisation
    if config.noise_scale:
        square_II, spread = gram.denoise(mirror(square_II), config.noise_scale * config.bound)
        regularisation += spread
    return gram.item_weights(square_II, regularisation, config.top_k, torch.float32, config.direction)


METHOD = Method(
    FednearConfig,
    fednear,
    DEFAULTS,
    GRID,
    SPACE,
    item_tables=(),
    client_bytes=client_bytes,
    server_bytes=server_bytes,
    smaller_server=gram.SMALLER_SERVER,
    negatives=False,
    guarantee=guarantee,
    upload_rounds=1,
    needs_server=always,
    needs_everyone=needs_everyone,
    published=False,
    uses_order=True,
)
