"""What a run of the cross-silo track promises about privacy, and the settings with which it would not hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedecider.cross_silo.settings import Settings
from fedecider.federation.cohort import hidden_share
from fedecider.federation.config import PrivacyConfig
from fedecider.federation.method import FederatedMethod
from fedecider.federation.privacy import epsilon, privacy_report
from fedecider.methods import METHODS
from fedecider.methods.config import COUNTS, LOCAL
from fedecider.methods.private_training import user_epsilon, user_report
from fedecider.methods.rows import Rows

UPLOADS_NOTHING = (LOCAL, COUNTS, "centralised")


def check_privacy(settings: Settings) -> None:
    """Told before anything is built.

    Raises:
        ValueError: bound, noise or hidden users where something of a client leaves beside them, or nothing leaves.
    """
    config, privacy, users = settings.run, settings.run.privacy, settings.training.user_privacy
    counts = getattr(settings.method, "weighting", "uniform") == "examples"
    if counts and (privacy.noise_scale > 0.0 or users.noise_scale > 0.0):
        raise ValueError(
            "got weighting examples with noise, expected uniform: a client's number of samples is sent as it is"
        )
    if privacy.clips and config.method in UPLOADS_NOTHING:
        raise ValueError(f"got privacy.clip with {config.method}, expected none: no upload leaves a client there")
    if privacy.noise_on == "sum" and privacy.noise_scale > 0.0 and config.robust_mean != "mean":
        raise ValueError(
            f"got privacy.noise_on sum with robust_mean {config.robust_mean}, expected mean: "
            "the shares of the noise add up in the plain sum over a whole cohort only"
        )
    if users.on:
        if config.hyperparameter_candidates:
            raise ValueError(
                "got user_privacy with hyperparameter_candidates, expected none: which is taken would tell of "
                "users without noise"
            )
        reason = METHODS[config.method].beside_training
        if reason:
            raise ValueError(f"got user_privacy with {config.method}, expected another method: {reason}")
        if config.pretrain.samples.pairs:
            raise ValueError(
                "got user_privacy with samples.pairs, expected false: a sample has to be of one user alone"
            )


def check_shared_noise(privacy: PrivacyConfig, method: FederatedMethod, rows: Rows) -> None:
    """``ValueError`` for noise on the sum where the server sees more than one sum, or not all clients are in it."""
    if privacy.noise_on == "upload" or privacy.noise_scale == 0.0:
        return
    if not method.takes_mean:
        raise ValueError(
            f"got privacy.noise_on sum with {method.name}, expected upload: its server reads every single upload"
        )
    if any(bool((own_KV != own_KV[:1]).any()) for own_KV in rows.own.values()):
        raise ValueError(
            "got privacy.noise_on sum with clients of several catalogues, expected upload: rows of a catalogue are a "
            "sum over its own clients, which has their shares of the noise alone"
        )


def privacy_data(settings: Settings, num_clients: int) -> dict[str, Any]:
    """What stands in ``metrics.json``, for what is on: ``uploads``, ``users``. An epsilon of null is no guarantee.

    Raises:
        ImportError: an epsilon that needs the package dp-accounting.
    """
    run, users, found = settings.run, settings.training.user_privacy, {}
    if run.privacy.clips:
        share = hidden_share(num_clients, run.participation, seen=run.secure_sum)
        value = epsilon(run.privacy, run.num_rounds, share)
        text = privacy_report(run.privacy, run.num_rounds, share)
        found["uploads"] = _entry(value, run.privacy.delta, text)
    if users.on and run.method != LOCAL:
        num_epochs = 0 if run.method == COUNTS else run.num_rounds * settings.training.local_epochs
        num_sums = int(run.ensemble.kind != "none" and "others" in run.ensemble.source_names)
        asked = (users, num_epochs, run.privacy.delta, num_sums)
        found["users"] = _entry(user_epsilon(*asked), run.privacy.delta, user_report(*asked))
    return found


def privacy_notes(promised: Mapping[str, Any]) -> list[str]:
    """The same as lines below a table."""
    return [f"privacy of {what}: {entry['text']}" for what, entry in promised.items()]


def _entry(value: float, delta: float, text: str) -> dict[str, Any]:
    known = value < math.inf
    return {"epsilon": value if known else None, "delta": delta if known else None, "text": text}
