"""FedEASE: the closed-form item-item model EASE (Steck, WWW 2019) from one sum over clients.

EASE needs the data only through the Gram matrix G = sum_u x_u x_u^T, with x_u in {0, 1}^I the train items of client u.
It is a sum, so it can be federated exactly, in one round, with secure aggregation, and with a privacy budget.

Shape legend: C clients of a block, N clients of the run, I items, T train items of a client, L = I (I + 1) / 2 entries
of an upper triangle, R eigenvectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from embedding_fr import gram
from embedding_fr.blocks import Federation, UserData, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.entry import Method, always
from fedecider.baselines.ease import BLOCK, mirror
from fedecider.baselines.ease import GRID as CENTRAL_GRID
from fedecider.baselines.ease import SPACE as CENTRAL_SPACE
from fedecider.bounds import NotNegative, Positive, ZeroOrMore, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.privacy import PrivacyConfig, privacy_report, protect
from fedecider.federation.secure_rounds import Simulated, simulated
from fedecider.federation.secure_sum import Bits, decode, encode
from fedecider.federation.streams import stream
from fedecider.search_space import Space

GRID: tuple[dict, ...] = CENTRAL_GRID
SPACE: Space = CENTRAL_SPACE
DEFAULTS: dict[str, int] = {"num_rounds": 2}
"""Round 1 sums, round 2 delivers."""


@dataclass(frozen=True)
class FedeaseConfig:
    """Settings of FedEASE.

    Args:
        regularisation: The regularisation lambda, the L2 weight of EASE; it scales with the number of users.
        secure: If true, uploads are masked, so that the server sees the sum only, of three fifths of the clients at
            least; they are then whole triangles.
        mask_neighbours: The number of clients that each client shares a mask with under secure, an even number; 0
            stands for all of them.
        max_items: At most this many train items of a client are counted, drawn once; 0 counts all.
        clip: The largest L2 norm of a client's contribution (upper triangle); x_u is scaled down to it. 0 bounds
            nothing.
        noise_scale: The size of the Gaussian noise on the sum, divided by clip; 0 adds none. It needs clip or
            max_items.
        delta: The probability that (epsilon, delta) leaves open.
        top_k: The number of entries of each column of B that clients get, by size; 0 sends all.
        rank: Clients get this many eigenpairs of G instead of B; 0 sends B.
        dtype: The number format of the download, float32 or float64; with float64 the scores are those of centralised
            EASE.
        precision: The number format of the sum and of the solution at the server, float32 or float64; float32 takes
            half the memory and half the time.
        history: What a client scores from: train, its train items, or known, which adds the validation item when
            testing.
    """

    regularisation: Positive = 200.0
    secure: bool = False
    mask_neighbours: ZeroOrMore = 16
    max_items: ZeroOrMore = 0
    clip: NotNegative = 0.0
    noise_scale: NotNegative = 0.0
    delta: float = 1e-5
    top_k: ZeroOrMore = 0
    rank: ZeroOrMore = 0
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["float32", "float64"] = "float64"
    history: Literal["train", "known"] = "train"

    def __post_init__(self) -> None:
        if self.mask_neighbours % 2:
            raise ValueError(f"got mask_neighbours {self.mask_neighbours}, expected an even number, or 0 for all")
        if self.top_k and self.rank:
            raise ValueError(f"got top_k {self.top_k} and rank {self.rank}, expected one of them: two download forms")
        if self.noise_scale and self.bound == math.inf:
            raise ValueError(f"got noise_scale {self.noise_scale} without a bound, expected clip or max_items as well")
        _ = self.privacy  # its own checks

    @property
    def bound(self) -> float:
        """Largest L2 norm of a contribution: m items make m (m + 1) / 2 ones in the triangle."""
        of_items = math.sqrt(gram.triangle_size(self.max_items)) if self.max_items else math.inf
        return min(self.clip or math.inf, of_items)

    @property
    def privacy(self) -> PrivacyConfig:
        """Bound and noise of the sum, for the accountant."""
        clip = None if self.bound == math.inf else self.bound
        return PrivacyConfig(clip, self.noise_scale, self.delta, "sum")


def fedease(federation: Federation, training: EmbeddingTraining, config: FedeaseConfig) -> FederatedMethod:
    """``G = sum_u s_u x_u x_u^T + noise``, ``P = (G + lambda I)^-1``, ``B = I - P diag(1 / diag P)``, score ``x_u B``.

    Round 1 uploads, all later rounds upload nothing: run two rounds, so that the delivery of B is counted too (each
    round counts what is sent before its training). Clients score by themselves. Three ways of summing:

    - plain: a client sends the numbers of its items, 4 bytes each. Its own x_u x_u^T tells the same and is longer: in
      this form the server learns the train items of every client.
    - ``secure``: a client sends the upper triangle of s_u x_u x_u^T under masks, L numbers of 4 or 8 bytes; the server
      learns G.
    - ``noise_scale``: s_u = min(1, bound / ||triangle of x_u x_u^T||_2) and Gaussian noise of noise_scale * bound on
      every entry of the sum, a share from each client under ``secure``, else added by the server, who then must be
      trusted with the plain items. :func:`guarantee` says what it is worth. :func:`embedding_fr.gram.denoise` cleans G.

    Download forms: B; its ``top_k`` entries a column; ``rank`` eigenpairs of G, from which a client makes x_u B itself.
    ``training`` is not used. Variant ``global``. With participation below 1 only the cohort of round 1 counts, and
    ``secure`` is an error, as is a bound under which a client counts nothing, at a resolution of 2^-16. Memory:
    :func:`server_bytes`, checked before the first round; :func:`client_bytes` for a client of a block. Time: I^3 for
    the solution, and the squares of the lengths of histories for the sum.

    Differs from the paper: nothing in G, B and the score; secure and private sums and short downloads are ours.
    The budget is that of continuous noise on exact sums: rounding to 2^-16 is not accounted for (Kairouz, Liu, Steinke
    2021 do it exactly), nor are the seed of the simulation and the choice of lambda on validation.
    """
    if max(config.rank, config.top_k) >= federation.num_items:
        raise ValueError(
            f"got top_k {config.top_k} and rank {config.rank}, expected less than the {federation.num_items} items"
        )
    if config.secure:
        gram.check_masked(federation.num_items, 1, number_format(federation, config)[0])

    def init() -> tuple[Tree, Tree]:
        return {}, {}

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        protocol = parties(federation, config, round).payload_down() if config.secure and round == 1 else {}
        return Download(server, payload=protocol)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        weight_C = torch.ones(len(block.clients))
        if round > 1:
            return Upload(block.clients, weight_C, {}), {}, [{"num_counted": 0}] * len(block.clients)
        counted_CI = counted_items(block.data, block.clients, federation, config)
        gram.check_scales(gram.client_scales(counted_CI, config.bound), block.clients, config.bound)
        count_C = counted_CI.sum(1).cpu()
        logs = [{"num_counted": count} for count in count_C.tolist()]
        if not config.secure:
            return Upload(block.clients, weight_C, {"items": counted_CI}, payload={"items": 4 * count_C}), {}, logs
        masked_CL = masked_triangles(counted_CI, block.clients, federation, config, round)
        protocol = parties(federation, config, round).payload_up(block.clients)
        return Upload(block.clients, weight_C, {"masked_gram": masked_CL}, payload=protocol), {}, logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        if round > 1:
            return server
        gram_of = secure_gram if config.secure else plain_gram
        return model_of(gram_of(round, uploads, federation, config), federation, config)

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        history_CI = train_items(block.data, federation.num_items)
        if config.history == "known" and split == "test":
            history_CI.scatter_(1, block.data.valid_C[:, None], True)
        score_CI = score_items(history_CI, download.shared, config)
        return rank_users(score_CI, block.data, split, federation.protocol)

    def upload_like(round: int, server: Tree) -> Tree:
        return {"items": torch.zeros(federation.num_items, dtype=torch.bool)} if round == 1 else {}

    return FederatedMethod(
        "fedease",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("global",),
        upload_like=None if config.secure else upload_like,
    )


def guarantee(config: FedeaseConfig) -> str:
    """What the noise of a run guarantees, in one line; "no guarantee" where there is none."""
    return privacy_report(config.privacy, num_rounds=1)


def needs_everyone(config: FedeaseConfig) -> bool:
    """Under ``secure``: all clients exchange keys and shares."""
    return config.secure


def client_bytes(num_items: int, num_rows: int, training: EmbeddingTraining, config: FedeaseConfig) -> int:
    """Memory that one client takes in a block: the size of its upload, whose triangle is dense under ``secure``."""
    return 8 * gram.triangle_size(num_items) if config.secure else 8 * num_items


def server_bytes(num_items: int, config: FedeaseConfig) -> int:
    """Peak memory of the server's step on a CPU."""
    needed = [gram.solution_bytes(num_items, config.precision, config.dtype, config.top_k)]
    if config.rank:
        needed = [gram.FORMATS[config.precision].itemsize * num_items * (num_items + 4 * config.rank + 2 * BLOCK)]
    if config.secure:
        needed.append(gram.masking_bytes(num_items, 1, config.noise_scale > 0))
    if config.noise_scale:
        needed.append(gram.denoising_bytes(num_items, config.precision))
    return max(needed)


def train_items(data: UserData, num_items: int) -> Tensor:
    """(C, I) bool x_u: the train items of each client."""
    history_CI = torch.zeros(len(data.train_CT), num_items + 1, dtype=torch.bool, device=data.train_CT.device)
    return history_CI.scatter_(1, data.train_CT, True)[:, :-1]  # the last column takes the padding


def counted_items(data: UserData, clients: Tensor, federation: Federation, config: FedeaseConfig) -> Tensor:
    """(C, I) bool: train items, at most ``max_items`` of them, drawn alike for a client in whatever block."""
    history_CI = train_items(data, federation.num_items)
    if not config.max_items:
        return history_CI
    for row, client in enumerate(clients.tolist()):
        item_T = history_CI[row].nonzero()[:, 0]
        order_T = torch.randperm(len(item_T), generator=stream(federation.seed, "max_items", client))
        history_CI[row, item_T[order_T[config.max_items :].to(item_T.device)]] = False
    return history_CI


def number_format(federation: Federation, config: FedeaseConfig) -> tuple[Bits, int]:
    """Bits and fraction bits of masked numbers: whole counts, else fixed point with room for noise of 10 deviations."""
    fraction_bits = 0 if config.bound == math.inf else gram.SCALE_BITS
    share = config.noise_scale * config.bound / math.sqrt(federation.num_clients) if config.noise_scale else 0.0
    fits = federation.num_clients * (1.0 + 10.0 * share) * 2.0**fraction_bits < 2.0**31
    return (32 if fits else 64), fraction_bits


def parties(federation: Federation, config: FedeaseConfig, round: int) -> Simulated:
    """The secure sum of a round over all clients."""
    bits, _ = number_format(federation, config)
    neighbours = config.mask_neighbours or None
    return simulated(
        tuple(range(federation.num_clients)), federation.seed, "pairs", round, num_neighbours=neighbours, bits=bits
    )


def masked_triangles(
    counted_CI: Tensor, clients: Tensor, federation: Federation, config: FedeaseConfig, round: int
) -> Tensor:
    """(C, L) int32 or int64: triangle of s_u x_u x_u^T, its share of the noise, masks. One client at a time."""
    bits, fraction_bits = number_format(federation, config)
    gram.check_masked(federation.num_items, 1, bits, len(clients))
    scale_C = gram.client_scales(counted_CI, config.bound).tolist()
    masked = []
    for row, scale in enumerate(scale_C):
        client_1 = clients[row : row + 1]
        triangle_1L = gram.client_triangle(counted_CI[row].cpu(), scale)[None]
        if config.noise_scale:
            upload, everyone = Upload(client_1, torch.ones(1), {"gram": triangle_1L}), federation.num_clients
            triangle_1L = protect(upload, config.privacy, federation.seed, round, cohort_size=everyone)["gram"]
        number_L = encode(triangle_1L[0], fraction_bits)
        masked.append(parties(federation, config, round).send(int(client_1), number_L))
    return torch.stack(masked)


def secure_gram(round: int, uploads: Iterable[Upload], federation: Federation, config: FedeaseConfig) -> Tensor:
    """(I, I), G in its lower triangle, from masked triangles; noise is in them."""
    _, fraction_bits = number_format(federation, config)
    triangle_L = parties(federation, config, round).open_uploads(uploads, "masked_gram")
    square_II = torch.zeros(federation.num_items, federation.num_items, dtype=gram.FORMATS[config.precision])
    gram.add_triangle(square_II, decode(triangle_L, fraction_bits))
    return square_II


def plain_gram(round: int, uploads: Iterable[Upload], federation: Federation, config: FedeaseConfig) -> Tensor:
    """(I, I), G in its lower triangle, from the items of the clients; the server bounds and noises."""
    square_II = torch.zeros(federation.num_items, federation.num_items, dtype=gram.FORMATS[config.precision])
    for upload in uploads:
        counted_CI = upload.tensors["items"]
        item_T = counted_CI.nonzero()[:, 1].split(counted_CI.sum(1).tolist())
        gram.add_histories(square_II, item_T, gram.client_scales(counted_CI, config.bound))
    if config.noise_scale:
        generator = stream(federation.seed, "gram_noise", round)
        noise_L = torch.randn(gram.triangle_size(federation.num_items), generator=generator, dtype=torch.float64)
        gram.add_triangle(square_II, noise_L.mul_(config.noise_scale * config.bound))
    return square_II


def model_of(square_II: Tensor, federation: Federation, config: FedeaseConfig) -> Tree:
    """What clients download, from the sum: ``weights``, or ``index`` and ``value``, or ``eigenvalues`` and ``vectors``.

    The low-rank form holds ``regularisation`` (1,) as well, since noise raises it. The sum is overwritten.
    """
    square_II, dtype = square_II.to(federation.device), gram.FORMATS[config.dtype]
    regularisation = config.regularisation
    if config.noise_scale:
        square_II, spread = gram.denoise(mirror(square_II), config.noise_scale * config.bound)
        regularisation += spread
    if config.rank:
        value_R, vector_IR = gram.leading_eigenpairs(mirror(square_II), config.rank)
        lambda_1 = torch.tensor([regularisation], dtype=dtype, device=square_II.device)
        return {"eigenvalues": value_R.to(dtype), "vectors": vector_IR.to(dtype), "regularisation": lambda_1}
    return gram.item_weights(square_II, regularisation, config.top_k, dtype)


def score_items(history_CI: Tensor, model: Tree, config: FedeaseConfig) -> Tensor:
    """(C, I) ``x_u B``, computed by the clients from what they downloaded."""
    if config.rank:
        return gram.low_rank_scores(history_CI, model["eigenvalues"], model["vectors"], model["regularisation"])
    if config.top_k:
        return gram.sparse_scores(history_CI, model["index"], model["value"])
    return history_CI.to(model["weights"].dtype) @ model["weights"]


METHOD = Method(
    FedeaseConfig,
    fedease,
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
)
