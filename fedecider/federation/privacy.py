"""What is done to an upload before it leaves its client (bound, then noise), and what that is worth (epsilon).

Written once for every method. Adjacency, here and in every number of this module: one client's contribution is there,
or it is zero and everything else is the same (one client added or removed, when the sum is what is seen).

Not covered: floating-point attacks on the noise (Mironov, 2012), client weights (``Upload.weights`` is not noised), who
takes part, choosing settings or rounds on validation results. Noise is drawn from the run's seed, so that runs can be
repeated: whoever knows the seed can subtract it. A deployment draws it from the operating system (seed None).

Shape legend: C clients of a block, I rows of a table, R rows that an upload holds, A orders of a Renyi divergence,
N whole orders.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedecider.federation.config import PrivacyConfig
from fedecider.federation.method import Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.federation.wire import dense, only_rows, reference_of

Protect = Callable[[Upload, Download, int, int], Upload]
"""upload, download, round, clients in the cohort -> what leaves the clients."""
Sampling = Literal["fixed", "poisson"]

_ORDER_A = 1.0 + np.logspace(-4.0, 5.0, 20_000)
"""Renyi orders at which a guarantee is computed; the best of them counts, and every one of them holds."""
_MOST_WHOLE = 512
"""Largest whole order at which the Poisson-sampled Gaussian is computed."""


def protect_upload(
    upload: Upload,
    download: Download,
    config: PrivacyConfig,
    seed: int | None,
    round: int,
    cohort_size: int | None = None,
) -> Upload:
    """:func:`protect` for a whole upload; what a tensor of the same name in ``download`` holds is its reference.

    Of tables with ``sent_rows`` the marked rows alone are bounded and noised; the others stay zero. Tables held by rows
    stay so under a clip alone. Noise falls on every row, touched or not, so the tables become dense
    (:func:`fedecider.federation.wire.dense`) and nothing travels encoded any more.
    """
    if not (config.clips or config.noise_without_clip):
        return upload
    if config.noise_scale > 0.0:
        upload = dense(upload, download)._replace(payload={})
    reference = {**download.shared, **download.per_client}
    tensors = protect(upload, config, seed, round, reference, cohort_size)
    return upload._replace(tensors=tensors, payload={})  # a clipped table is no longer what was encoded


def protector(method: FederatedMethod, config: PrivacyConfig, seed: int | None) -> Protect:
    """What a client does with its upload before it leaves. ``seed`` None: noise from the operating system."""

    def protected(upload: Upload, download: Download, round: int, cohort_size: int) -> Upload:
        known = download if method.bounded_from is None else Download(method.bounded_from(round))
        return protect_upload(upload, known, config, seed, round, cohort_size)

    return protected


def protect(
    upload: Upload,
    config: PrivacyConfig,
    seed: int | None,
    round: int,
    reference: Tree | None = None,
    cohort_size: int | None = None,
) -> Tree:
    """Clip each client's update over all its tensors together, then add noise.

    ``r + min(1, clip / ||x - r||) (x - r) + n`` with ``x`` a client's upload, ``r`` the ``reference`` of the same name,
    shared (...) or per client (C, ...), else zero: the norm of a whole table says nothing about the client. A table
    in ``upload.rows`` (C, R, -1 pads) holds those rows of its reference only; of one in ``upload.sent_rows`` (C, I)
    only marked rows exist, the others are zero before and after. Draws are those of ``stream(seed, "privacy",
    round, client, tensor name)``, so they do not depend on the block; with ``seed`` None they come from the
    operating system. With no clip (and so no noise), and for clients inside the bound, every bit is kept. With
    ``noise_without_clip`` there is the noise alone, as papers add it: ``x + n``, n of size ``noise_scale``, which
    guarantees nothing.
    Source: Abadi et al. 2016 (clip, noise), McMahan et al. 2018 (per client). A non-finite upload stays non-finite.

    Raises:
        ValueError: an integer tensor (quantise after the noise), rows with noise, a share of noise without cohort size.
    """
    tensors, rows, marks, reference = upload.tensors, upload.rows, upload.sent_rows, reference or {}
    if not (config.clips or config.noise_without_clip):
        return tensors
    if config.noise_scale > 0.0 and rows:
        raise ValueError(f"got tables by rows {sorted(rows)} and noise, expected whole tables: see protect_upload")
    if config.noise_on == "sum" and cohort_size is None:
        raise ValueError("got noise on the sum and no cohort size, expected the number of clients that share the noise")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"got {tensor.dtype} in {name}, expected floating point: encode integers after the noise")
    base = {
        name: only_rows(reference_of(tensor, reference.get(name), rows.get(name)), marks.get(name))
        for name, tensor in tensors.items()
    }
    update = {name: tensor - base[name] for name, tensor in tensors.items()}
    factor_C = _clip_factors(update, rows, config)
    share = 1.0 if config.noise_on == "upload" else 1.0 / math.sqrt(cohort_size or 1)
    protected = {}
    for name, tensor in tensors.items():
        factor = factor_C.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
        clipped = base[name] + (factor * update[name]).to(tensor.dtype)
        protected[name] = torch.where(factor == 1.0, tensor, clipped)
        if config.noise_scale > 0.0:
            for row, client in enumerate(upload.clients.tolist()):
                generator = None if seed is None else stream(seed, "privacy", round, client, name)
                noise = only_rows(_noise(tensor[row], config, generator), marks[name][row] if name in marks else None)
                protected[name][row] = (protected[name][row] + (share * noise).to(tensor.device)).to(tensor.dtype)
    return protected


def epsilon(
    config: PrivacyConfig,
    num_rounds: int,
    participation: float = 1.0,
    sampling: Sampling = "fixed",
    num_whole: int = 0,
) -> float:
    """The epsilon of ``num_rounds`` rounds at ``config.delta`` (laplace: at delta 0); inf where nothing is guaranteed.

    gaussian: Renyi divergence of order a per round a / (2 z^2) with z = noise_scale (Mironov 2017, Prop. 7), added over
    rounds, turned into epsilon = rho(a) + log((a - 1) / a) - (log delta + log a) / (a - 1) (Canonne, Kamath, Steinke
    2020, Prop. 12; Balle et al. 2020), least over a. laplace: 1 / z per round, added (basic composition, Dwork et al.
    2006).

    ``participation`` q lowers epsilon only for noise on the sum, whose observer does not see the cohort; the server
    sees who sends what, so with noise on each upload all rounds count. ``sampling="fixed"`` is what
    :func:`fedecider.federation.cohort.sample_cohort` does, ceil(q N) clients without replacement: Wang, Balle,
    Kasiviswanathan 2019 with noise z / 2, since there one client replaces another. ``"poisson"`` is the bound that most
    published numbers use (Mironov, Talwar, Zhang 2019); it does not hold for cohorts of fixed size. Both are cut at
    rho'(a) = log(1 - q + q exp((a - 1) rho(a))) / (a - 1), which holds for either (the exponentiated divergence is
    jointly convex). ``num_whole``: further releases with the same noise in which all take part.

    Raises:
        ImportError: cohorts of fixed size and participation below 1 without the package dp-accounting.
    """
    if num_rounds + num_whole < 1 or not 0.0 < participation <= 1.0:
        raise ValueError(f"got {num_rounds} rounds and participation {participation}, expected 1 or more and in (0, 1]")
    if sampling not in ("fixed", "poisson"):
        raise ValueError(f"got sampling {sampling}, expected fixed or poisson")
    if not config.clips or config.noise_scale == 0.0:
        return math.inf
    if config.mechanism == "laplace":
        return (num_rounds + num_whole) / config.noise_scale
    rho_A = _ORDER_A / (2.0 * config.noise_scale**2)
    if config.noise_on == "upload" or participation == 1.0 or num_rounds == 0:
        return _to_epsilon((num_rounds + num_whole) * rho_A, config.delta)
    present_A = math.log(participation) + (_ORDER_A - 1.0) * rho_A
    sampled_A = np.logaddexp(math.log1p(-participation), present_A) / (_ORDER_A - 1.0)
    simple = _to_epsilon(num_rounds * sampled_A + num_whole * rho_A, config.delta)
    if sampling == "poisson":
        poisson_A = poisson_divergence(config.noise_scale, participation)
        return min(simple, _to_epsilon(num_rounds * poisson_A + num_whole * rho_A, config.delta))
    return simple if num_whole else min(simple, _sampled_epsilon(config, num_rounds, participation))


def poisson_divergence(noise_scale: float, rate: float) -> np.ndarray:
    """(A,) Renyi divergences of one Gaussian step whose members each take part with probability ``rate``.

    For whole orders n ``log E_n / (n - 1)`` with ``E_n = sum_k C(n, k) (1 - q)^(n - k) q^k exp((k^2 - k) / (2 z^2))``
    (Mironov, Talwar, Zhang 2019, section 3.3), the larger of both directions (their Theorem 5); in between the chord of
    ``log E``, which is convex in the order and 0 at 1 (Wang, Balle, Kasiviswanathan 2019, corollary 10). Infinite above
    `_MOST_WHOLE`.
    """
    order_N = np.arange(1, _MOST_WHOLE + 1)
    part_K = np.arange(_MOST_WHOLE + 1)
    log_factorial_K = np.concatenate([[0.0], np.cumsum(np.log(order_N))])
    absent_NK = order_N[:, None] - part_K
    inside_NK = absent_NK >= 0
    absent_NK = np.where(inside_NK, absent_NK, 0)
    log_choose_NK = log_factorial_K[order_N][:, None] - log_factorial_K - log_factorial_K[absent_NK]
    log_term_NK = log_choose_NK + part_K * math.log(rate) + (part_K**2 - part_K) / (2.0 * noise_scale**2)
    log_term_NK = np.where(inside_NK, log_term_NK + absent_NK * math.log1p(-rate), -np.inf)
    log_moment_N = np.logaddexp.reduce(log_term_NK, axis=1)
    log_moment_A = np.interp(_ORDER_A, order_N, np.maximum(log_moment_N, 0.0), right=np.inf)
    return log_moment_A / (_ORDER_A - 1.0)


def privacy_report(
    config: PrivacyConfig, num_rounds: int, participation: float = 1.0, sampling: Sampling = "fixed"
) -> str:
    """One line that says what is guaranteed, against whom, and when nothing is."""
    if config.noise_without_clip:
        return (
            f"no guarantee: WARNING, {config.mechanism} noise of size {config.noise_size:g} without a bound "
            "guarantees nothing, whatever its size: what one client sends may be larger than any noise"
        )
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


def _clip_factors(update: Tree, rows: Tree, config: PrivacyConfig) -> Tensor:
    """(C,) float64: 1 inside the bound, else bound over norm."""
    order = 2 if config.mechanism == "gaussian" else 1
    total_C: Tensor | float = 0.0
    for name, tensor in update.items():
        size = tensor.double().abs().pow(order)
        if name in rows:
            size = size.masked_fill((rows[name] < 0).view(*rows[name].shape, *[1] * (size.dim() - 2)), 0.0)
        total_C = total_C + size.reshape(len(size), -1).sum(1).cpu()
    norm_C = torch.as_tensor(total_C, dtype=torch.float64) ** (1.0 / order)
    if config.clip is None:
        return torch.ones_like(norm_C)
    return (config.clip / norm_C).clamp(max=1.0)


def normal_draws(shape: Sequence[int], generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers on the CPU, from a named stream, or with None from the operating system.

    The latter are ``Phi^-1(u)`` of 53 random bits each (inverse transform): a generator of torch could be guessed,
    since its CPU engine keeps 32 bits of a seed.
    """
    if generator is not None:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.special.ndtri(secret_uniform(shape)).to(dtype)


def secret_uniform(shape: Sequence[int]) -> Tensor:
    """Float64 numbers inside (0, 1) from the operating system's secret source, which nobody can repeat."""
    bits = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64) >> np.uint64(11)
    return torch.from_numpy((bits + 0.5) / 2.0**53).reshape(tuple(shape)).clamp(max=1.0 - 2.0**-53)


def _noise(like: Tensor, config: PrivacyConfig, generator: torch.Generator | None) -> Tensor:
    """Noise of the shape of ``like`` for one upload, float32 or float64, on the CPU."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    scale = config.noise_size
    if config.mechanism == "gaussian":
        return scale * normal_draws(like.shape, generator, dtype)
    first, second = (_exponential_draws(like.shape, generator, dtype) for _ in range(2))
    return scale * (first - second)  # a difference of two exponentials is Laplace


def _exponential_draws(shape: Sequence[int], generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    if generator is None:
        return -secret_uniform(shape).log().to(dtype)
    return torch.empty(shape, dtype=dtype).exponential_(generator=generator)


def _to_epsilon(rho_A: np.ndarray, delta: float) -> float:
    with np.errstate(over="ignore"):
        log_term_A = np.log1p(-1.0 / _ORDER_A) - (math.log(delta) + np.log(_ORDER_A)) / (_ORDER_A - 1.0)
    return max(0.0, float(np.min(rho_A + log_term_A)))


def _sampled_epsilon(config: PrivacyConfig, num_rounds: int, participation: float) -> float:
    """Cohorts of fixed size: the subsampled Gaussian of the package dp-accounting (RDP)."""
    library = _dp_accounting()
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
