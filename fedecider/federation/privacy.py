"""What is done to an upload before it leaves its client (bound, then noise), and what that is worth (epsilon).

Written once for every method. Adjacency, here and in every number of this module: one client's contribution is there,
or it is zero and everything else is the same (one client added or removed, when the sum is what is seen).

Not covered: floating-point attacks on the noise (Mironov, 2012), client weights (``Upload.weights`` is not noised), who
takes part, choosing settings or rounds on validation results. Noise is drawn from the run's seed, so that runs can be
repeated: whoever knows the seed can subtract it. A deployment draws it from a secret source.

Shape legend: C clients of a block, I rows of a table, R rows that an upload holds, A orders of a Renyi divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedecider.bounds import NotNegative, PositiveOrInfinite, above, check
from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.federation.wire import dense

Sampling = Literal["fixed", "poisson"]

_ORDER_A = 1.0 + np.logspace(-4.0, 5.0, 20_000)


@dataclass(frozen=True)
class PrivacyConfig:
    """How uploads are bounded and noised.

    Args:
        clip: The largest norm of what one client changes in a round (L2 for gaussian, L1 for laplace); if it is not
            given, or inf, nothing is bounded.
        mechanism: The kind of noise: gaussian with standard deviation noise_scale * clip, or laplace with that scale.
        noise_scale: The size of the noise divided by clip; 0 adds none.
        delta: The probability in (epsilon, delta) that gaussian noise leaves open; it is usually below 1 / clients.
        noise_on: Where the noise goes. "upload" gives every single upload the whole noise, so that epsilon holds
            against the server as well; "sum" gives each a share such that the sum over the cohort has it, which
            protects the sum only: add secure aggregation, or trust the server. A mean must then weigh all clients
            alike.
    """

    clip: PositiveOrInfinite | None = None
    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    noise_scale: NotNegative = 0.0
    delta: Annotated[float, above(0, below=1)] = 1e-5
    noise_on: Literal["upload", "sum"] = "upload"

    def __post_init__(self) -> None:
        check(self)
        if self.noise_scale > 0.0 and not self.clips:
            raise ValueError(
                f"got noise_scale {self.noise_scale} without a clip, expected both: noise hides nothing unless one "
                "client's contribution is bounded; set clip"
            )
        if self.mechanism == "laplace" and self.noise_on == "sum":
            raise ValueError("got laplace noise on the sum, expected gaussian: a sum of Laplace shares is not Laplace")

    @property
    def clips(self) -> bool:
        return self.clip is not None and self.clip < math.inf


def protect_upload(
    upload: Upload, download: Download, config: PrivacyConfig, seed: int, round: int, cohort_size: int | None = None
) -> Upload:
    """:func:`protect` for a whole upload; what a tensor of the same name in ``download`` holds is its reference.

    Tables held by rows stay so under a clip alone. Noise falls on every row, touched or not, so the tables become dense
    (:func:`fedecider.federation.wire.dense`) and nothing travels encoded any more.
    """
    if not config.clips:
        return upload
    if config.noise_scale > 0.0:
        upload = dense(upload, download)._replace(payload={})
    reference = {**download.shared, **download.per_client}
    tensors = protect(
        upload.tensors, upload.clients, config, seed, round, reference, rows=upload.rows, cohort_size=cohort_size
    )
    return upload._replace(tensors=tensors, payload={})  # a clipped table is no longer what was encoded


def protect(
    tensors: Tree,
    clients: Tensor,
    config: PrivacyConfig,
    seed: int,
    round: int,
    reference: Tree | None = None,
    *,
    rows: Tree | None = None,
    cohort_size: int | None = None,
) -> Tree:
    """Clip each client's update over all its tensors together, then add noise.

    ``r + min(1, clip / ||x - r||) (x - r) + n`` with ``x`` a client's upload, ``r`` the ``reference`` of the same name,
    shared (...) or per client (C, ...), else zero: the norm of a whole table says nothing about the client. A table
    named in ``rows`` (C, R, -1 pads) holds those rows of its reference only. Draws are those of
    ``stream(seed, "privacy", round, client, tensor name)``, so they do not depend on the block.
    With no clip (and so no noise), and for clients inside the bound, every bit is kept.
    Source: Abadi et al. 2016 (clip, noise), McMahan et al. 2018 (per client). A non-finite upload stays non-finite.

    Raises:
        ValueError: an integer tensor (quantise after the noise), rows with noise, a share of noise without cohort size.
    """
    rows, reference = rows or {}, reference or {}
    if not config.clips:
        return tensors
    if config.noise_scale > 0.0 and rows:
        raise ValueError(f"got tables by rows {sorted(rows)} and noise, expected whole tables: see protect_upload")
    if config.noise_on == "sum" and cohort_size is None:
        raise ValueError("got noise on the sum and no cohort size, expected the number of clients that share the noise")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"got {tensor.dtype} in {name}, expected floating point: encode integers after the noise")
    base = {name: _base(tensor, reference.get(name), rows.get(name)) for name, tensor in tensors.items()}
    update = {name: tensor - base[name] for name, tensor in tensors.items()}
    factor_C = _clip_factors(update, rows, config)
    share = 1.0 if config.noise_on == "upload" else 1.0 / math.sqrt(cohort_size or 1)
    protected = {}
    for name, tensor in tensors.items():
        factor = factor_C.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
        clipped = base[name] + (factor * update[name]).to(tensor.dtype)
        protected[name] = torch.where(factor == 1.0, tensor, clipped)
        if config.noise_scale > 0.0:
            for row, client in enumerate(clients.tolist()):
                noise = _noise(tensor[row], config, stream(seed, "privacy", round, client, name))
                protected[name][row] = (protected[name][row] + (share * noise).to(tensor.device)).to(tensor.dtype)
    return protected


def epsilon(config: PrivacyConfig, num_rounds: int, participation: float = 1.0, sampling: Sampling = "fixed") -> float:
    """The epsilon of ``num_rounds`` rounds at ``config.delta`` (laplace: at delta 0); inf where nothing is guaranteed.

    gaussian: Renyi divergence of order a per round a / (2 z^2) with z = noise_scale (Mironov 2017, Prop. 7), added over
    rounds, turned into epsilon = rho(a) + log((a - 1) / a) - (log delta + log a) / (a - 1) (Canonne, Kamath, Steinke
    2020, Prop. 12; Balle et al. 2020), least over a. laplace: 1 / z per round, added (basic composition, Dwork et al.
    2006).

    ``participation`` q lowers epsilon only for noise on the sum, whose observer does not see the cohort; the server
    sees who sends what, so with noise on each upload all rounds count. ``sampling="fixed"`` is what
    :func:`fedecider.federation.parties.sample_cohort` does, ceil(q N) clients without replacement: Wang, Balle,
    Kasiviswanathan 2019 with noise z / 2, since there one client replaces another. ``"poisson"`` is the bound that most
    published numbers use (Mironov, Talwar, Zhang 2019); it does not hold for cohorts of fixed size. Both are cut at
    rho'(a) = log(1 - q + q exp((a - 1) rho(a))) / (a - 1), which holds for either (the exponentiated divergence is
    jointly convex).

    Raises:
        ImportError: participation below 1 without the package dp-accounting.
    """
    if num_rounds < 1 or not 0.0 < participation <= 1.0:
        raise ValueError(f"got {num_rounds} rounds and participation {participation}, expected 1 or more and in (0, 1]")
    if sampling not in ("fixed", "poisson"):
        raise ValueError(f"got sampling {sampling}, expected fixed or poisson")
    if not config.clips or config.noise_scale == 0.0:
        return math.inf
    if config.mechanism == "laplace":
        return num_rounds / config.noise_scale
    rho_A = _ORDER_A / (2.0 * config.noise_scale**2)
    if config.noise_on == "upload" or participation == 1.0:
        return _to_epsilon(num_rounds * rho_A, config.delta)
    present_A = math.log(participation) + (_ORDER_A - 1.0) * rho_A
    sampled_A = np.logaddexp(math.log1p(-participation), present_A) / (_ORDER_A - 1.0)
    simple = _to_epsilon(num_rounds * sampled_A, config.delta)
    return min(simple, _sampled_epsilon(config, num_rounds, participation, sampling))


def privacy_report(
    config: PrivacyConfig, num_rounds: int, participation: float = 1.0, sampling: Sampling = "fixed"
) -> str:
    """One line that says what is guaranteed, against whom, and when nothing is."""
    missing = [name for name, on in (("clip", config.clips), ("noise", config.noise_scale > 0.0)) if not on]
    if missing:
        return f"no guarantee: {' and '.join(missing)} missing (a guarantee needs both)"
    value = epsilon(config, num_rounds, participation, sampling)
    budget = f"epsilon {value:.3g}" + (f" at delta {config.delta:g}" if config.mechanism == "gaussian" else "")
    whom = {
        "upload": "each upload is protected, against the server too",
        "sum": "only the sum is protected: needs secure aggregation or a trusted server, and equal client weights",
    }[config.noise_on]
    amplified = participation < 1.0 and config.noise_on == "sum"
    cohorts = f", {sampling} cohorts of share {participation:g}" if amplified else ""
    return (
        f"{budget} over {num_rounds} round(s){cohorts}: one client's contribution there or zero; {whom} "
        f"({config.mechanism}, clip {config.clip:g}, noise_scale {config.noise_scale:g})"
    )


def _base(tensor: Tensor, reference: Tensor | None, row_CR: Tensor | None) -> Tensor:
    """What a client started from, in the shape of its upload; zero where nothing was downloaded."""
    if reference is None:
        return torch.zeros_like(tensor)
    base = reference.expand(len(tensor), *reference.shape) if reference.dim() < tensor.dim() else reference
    if row_CR is not None:
        base = base[torch.arange(len(row_CR), device=row_CR.device)[:, None], row_CR.clamp(min=0)]
    return base.to(tensor)


def _clip_factors(update: Tree, rows: Tree, config: PrivacyConfig) -> Tensor:
    """(C,) float64: 1 inside the bound, else bound over norm."""
    order = 2 if config.mechanism == "gaussian" else 1
    total_C: Tensor | float = 0.0
    for name, tensor in update.items():
        size = tensor.double().abs().pow(order)
        if name in rows:
            size = size.masked_fill((rows[name] < 0).view(*rows[name].shape, *[1] * (size.dim() - 2)), 0.0)
        total_C = total_C + size.flatten(1).sum(1).cpu()
    norm_C = torch.as_tensor(total_C, dtype=torch.float64) ** (1.0 / order)
    assert config.clip is not None
    return (config.clip / norm_C).clamp(max=1.0)


def _noise(like: Tensor, config: PrivacyConfig, generator: torch.Generator) -> Tensor:
    """Noise of the shape of ``like`` for one upload, float32 or float64, on the CPU."""
    assert config.clip is not None
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    scale = config.noise_scale * config.clip
    if config.mechanism == "gaussian":
        return scale * torch.randn(like.shape, generator=generator, dtype=dtype)
    first, second = (torch.empty(like.shape, dtype=dtype).exponential_(generator=generator) for _ in range(2))
    return scale * (first - second)  # a difference of two exponentials is Laplace


def _to_epsilon(rho_A: np.ndarray, delta: float) -> float:
    with np.errstate(over="ignore"):
        log_term_A = np.log1p(-1.0 / _ORDER_A) - (math.log(delta) + np.log(_ORDER_A)) / (_ORDER_A - 1.0)
    return max(0.0, float(np.min(rho_A + log_term_A)))


def _sampled_epsilon(config: PrivacyConfig, num_rounds: int, participation: float, sampling: Sampling) -> float:
    """The subsampled Gaussian of the package dp-accounting (RDP)."""
    library = _dp_accounting()
    if sampling == "poisson":
        accountant = library.rdp.RdpAccountant()
        event = library.PoissonSampledDpEvent(participation, library.GaussianDpEvent(config.noise_scale))
    else:
        accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
        size = 1_000_000  # the package asks for counts; only their ratio enters, rounded up here
        inner = library.GaussianDpEvent(config.noise_scale / 2.0)
        event = library.SampledWithoutReplacementDpEvent(size, math.ceil(participation * size), inner)
    accountant.compose(event, num_rounds)
    return float(accountant.get_epsilon(config.delta))


def _dp_accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise ImportError(
            "epsilon with participation below 1 needs the package dp-accounting: pip install fedecider[dp]"
        ) from error
    return dp_accounting
