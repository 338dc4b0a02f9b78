"""What a run of the LLM track promises about privacy, and the settings with which it would not hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedecider.federation.method import FederatedMethod
from fedecider.federation.parties import hidden_share
from fedecider.federation.privacy import PrivacyConfig, epsilon, privacy_report
from fedecider.llm.setup import Settings
from fedecider.methods import METHODS
from fedecider.methods.private_training import user_epsilon, user_report
from fedecider.methods.recommender import ClientModels, LocalTraining

SENDS_NOTHING = ("local", "centralised")


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
    if privacy.clips:
        if config.method in SENDS_NOTHING:
            raise ValueError(f"got privacy.clip with {config.method}, expected none: no upload leaves a client there")
        if getattr(settings.method, "skip_below", 0.0):
            raise ValueError(
                f"got privacy.clip with skip_below {settings.method.skip_below}, expected 0: flags of unwanted "
                "directions have no bound and take no noise"
            )
    if privacy.noise_on == "sum" and privacy.noise_scale > 0.0 and (config.faults or config.robust_mean != "mean"):
        raise ValueError(
            f"got privacy.noise_on sum with faults {config.faults!r} and robust_mean {config.robust_mean}, expected "
            "none and mean: the shares of the noise add up in the plain sum over a whole cohort only"
        )
    if users.on:
        if config.alternatives:
            raise ValueError(
                "got user_privacy with alternatives, expected none: which is taken would tell of users without noise"
            )
        if getattr(settings.method, "fits_peers", False):
            raise ValueError(
                "got user_privacy with several entries of first_fusion, expected one: what is sent after the choice "
                "would tell of users without noise"
            )
        if config.placement == "data":
            raise ValueError(
                "got user_privacy with placement data, expected clients: users are drawn and bounded one by one"
            )
        if settings.training.adam_epsilon != LocalTraining.adam_epsilon:
            raise ValueError(
                f"got user_privacy with adam_epsilon {settings.training.adam_epsilon}, expected "
                f"{LocalTraining.adam_epsilon}: else the size of a gradient, so the number of users, is in the steps"
            )
        reason, samples = METHODS[config.method].beside_training, config.pretrain.samples
        if reason:
            raise ValueError(f"got user_privacy with {config.method}, expected another method: {reason}")
        if samples.pair_share > 0.0 or samples.user_wording != "none":
            raise ValueError(
                f"got user_privacy with samples.pair_share {samples.pair_share} and user_wording "
                f"{samples.user_wording}, expected 0 and none: a sample has to be of one user alone"
            )


def check_shared_noise(privacy: PrivacyConfig, method: FederatedMethod, recommender: ClientModels) -> None:
    """``ValueError`` for noise on the sum where the server sees more than one sum, or not all clients are in it."""
    if privacy.noise_on == "upload" or privacy.noise_scale == 0.0:
        return
    if not method.takes_mean:
        raise ValueError(
            f"got privacy.noise_on sum with {method.name}, expected upload: its server reads every single upload"
        )
    if any(bool((own_KV != own_KV[:1]).any()) for own_KV in recommender.own_rows.values()):
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
    if users.on:
        num_epochs = run.num_rounds * settings.training.local_epochs
        found["users"] = _entry(user_epsilon(users, num_epochs), users.delta, user_report(users, num_epochs))
    return found


def privacy_notes(promised: Mapping[str, Any]) -> list[str]:
    """The same as lines below a table."""
    return [f"privacy of {what}: {entry['text']}" for what, entry in promised.items()]


def _entry(value: float, delta: float, text: str) -> dict[str, Any]:
    known = value < math.inf
    return {"epsilon": value if known else None, "delta": delta if known else None, "text": text}
