"""The weights of a mixture of experts: the most likely ones by expectation maximisation.

Shape legend: N contexts, E experts, Q buckets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NUM_STEPS = 300
SMALLEST = 1e-300


class Mixture(NamedTuple):
    """How far a client trusts each expert."""

    experts: tuple[str, ...]
    """The last one is the floor, "uniform"."""
    cut_Q: np.ndarray
    """Rising: a history whose newest item has more behind it than q of the cuts belongs to bucket q."""
    weight_QE: np.ndarray
    """lambda: one row a bucket, each sums to 1."""
    mean_E: np.ndarray
    """lambda without buckets."""
    log_likelihood: float
    """Mean log-probability of the train events that it was fitted on."""
    num_contexts: int

    def weights(self, known_B: np.ndarray) -> np.ndarray:
        """(B, E) weights of histories by what is known of their newest items."""
        return self.weight_QE[np.searchsorted(self.cut_Q, known_B)]


def fit_weights(
    prob_NE: np.ndarray, prior_E: np.ndarray | None = None, num_steps: int = NUM_STEPS
) -> tuple[np.ndarray, float]:
    """lambda = argmax sum_n log sum_e lambda_e p_ne + sum_e a_e log lambda_e, and the mean log-likelihood.

    EM (Dempster et al., 1977): lambda_e <- (a_e + sum_n lambda_e p_ne / sum_e' lambda_e' p_ne') over its sum. The
    objective is concave for a >= 0, so its fixed point from inside is the maximum, and no step may lower it.
    ``prior_E``: a, none without it. Float64, deterministic.
    """
    prior_E = np.zeros(prob_NE.shape[1]) if prior_E is None else prior_E
    if not len(prob_NE) and not prior_E.any():
        prior_E = np.ones(prob_NE.shape[1])  # nothing is known: equal weights
    weight_E = np.full(prob_NE.shape[1], 1.0 / prob_NE.shape[1])
    before = -np.inf
    for _ in range(num_steps):
        joint_NE = prob_NE * weight_E
        total_N = np.maximum(joint_NE.sum(1), SMALLEST)
        logs_E = np.log(np.maximum(weight_E, SMALLEST))
        value = float(np.log(total_N).sum() + (prior_E * logs_E).sum())
        assert value >= before - 1e-9 * max(1.0, abs(value)), f"EM went down from {before} to {value}"
        before = value
        taken_E = (joint_NE / total_N[:, None]).sum(0) + prior_E
        weight_E = taken_E / taken_E.sum()
    return weight_E, log_likelihood(prob_NE, weight_E)


def log_likelihood(prob_NE: np.ndarray, weight_E: np.ndarray) -> float:
    """Mean log-probability of the targets; 0 without any."""
    return float(np.log(np.maximum(prob_NE @ weight_E, SMALLEST)).mean()) if len(prob_NE) else 0.0


def fit_mixture(
    prob_NE: np.ndarray,
    known_N: np.ndarray,
    experts: tuple[str, ...],
    num_buckets: int,
    bucket_prior: float,
) -> Mixture:
    """Weights of all contexts, and of equal groups of them by ``known_N`` with those of all as their prior.

    lambda_q = argmax sum_{n in q} log sum_e lambda_e p_ne + ``bucket_prior`` sum_e lambda^all_e log lambda_e.
    """
    mean_E, value = fit_weights(prob_NE)
    shares = [number / num_buckets for number in range(1, num_buckets)]
    cut_Q = np.quantile(known_N, shares) if len(known_N) else np.zeros(len(shares))
    bucket_N = np.searchsorted(cut_Q, known_N)
    weight_QE = np.stack(
        [fit_weights(prob_NE[bucket_N == bucket], bucket_prior * mean_E)[0] for bucket in range(num_buckets)]
    )
    return Mixture(experts, cut_Q, weight_QE, mean_E, value, len(prob_NE))
