"""Clip and noise of uploads, and what they are worth: hand numbers, statistics of the noise, an independent library."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import log_ndtr

from fedecider.federation import privacy
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.config import DevicePrivacyConfig as PrivacyConfig
from fedecider.federation.method import Download, Upload
from fedecider.federation.privacy import (
    epsilon,
    poisson_divergence,
    privacy_report,
    protect_upload,
)
from fedecider.federation.wire import dense, measure

CLIENTS = torch.tensor([4, 9, 2])


def tensors() -> dict[str, torch.Tensor]:
    return {
        "table": torch.tensor([[[3.0, 0.0], [0.0, -4.0]], [[0.6, 0.0], [0.0, 0.0]], [[-1.0, 2.0], [2.0, 0.0]]]),
        "bias": torch.tensor([[12.0], [-0.8], [4.0]]),
    }


def protect(tensors, clients, config, seed, round, reference=None, *, rows=None, **options):
    upload = Upload(clients, torch.ones(len(clients)), tensors, rows=rows or {})
    return privacy.protect(upload, config, seed, round, reference, **options)


def norms(tree, order=2):
    return torch.linalg.vector_norm(torch.cat([t.flatten(1) for t in tree.values()], 1), ord=order, dim=1)


def test_clip_hand_numbers_over_all_tensors_together():
    # L2 norms: sqrt(9 + 16 + 144) = 13, sqrt(0.36 + 0.64) = 1, sqrt(1 + 4 + 4 + 16) = 5
    clipped = protect(tensors(), CLIENTS, PrivacyConfig(clip=2.5), seed=0, round=1)
    torch.testing.assert_close(norms(clipped), torch.tensor([2.5, 1.0, 2.5]))
    torch.testing.assert_close(clipped["table"][0], torch.tensor([[3.0, 0.0], [0.0, -4.0]]) * 2.5 / 13)
    torch.testing.assert_close(clipped["bias"][2], torch.tensor([2.0]))
    assert torch.equal(clipped["bias"][1], tensors()["bias"][1])  # inside the bound: the same bits
    # L1 norms: 19, 1.4, 9
    clipped = protect(tensors(), CLIENTS, PrivacyConfig(clip=3.0, mechanism="laplace"), seed=0, round=1)
    torch.testing.assert_close(norms(clipped, 1), torch.tensor([3.0, 1.4, 3.0]))


def test_what_is_clipped_is_the_difference_to_the_download():
    shared = torch.tensor([[100.0, 0.0], [0.0, 50.0]])
    per_client = torch.tensor([[7.0], [8.0], [9.0]])
    uploaded = {"table": shared + tensors()["table"], "bias": per_client + tensors()["bias"]}
    reference = {"table": shared, "bias": per_client}
    clipped = protect(uploaded, CLIENTS, PrivacyConfig(clip=2.5), 0, 1, reference)
    difference = {name: clipped[name] - reference[name] for name in clipped}
    torch.testing.assert_close(norms(difference), torch.tensor([2.5, 1.0, 2.5]), atol=1e-4, rtol=0)
    torch.testing.assert_close(clipped["table"][0, 0], torch.tensor([100 + 3 * 2.5 / 13, 0.0]))


@pytest.mark.parametrize("config", [PrivacyConfig(), PrivacyConfig(clip=math.inf), PrivacyConfig(clip=1e6)])
def test_no_noise_and_no_clip_change_no_bit(config):
    given = {"table": torch.randn(3, 50, 7), "half": torch.randn(3, 9).bfloat16()}
    reference = {"table": torch.randn(50, 7), "half": torch.randn(9).bfloat16()}
    kept = protect(given, CLIENTS, config, 0, 1, reference)
    assert all(torch.equal(kept[name], given[name]) for name in given)


def test_rows_stay_rows_under_a_clip_and_mean_the_same_table():
    torch.manual_seed(0)
    download = Download({"table": torch.randn(6, 2)}, {"own": torch.randn(3, 4, 2)})
    rows = {"table": torch.tensor([[5, 0, -1], [2, -1, -1], [1, 3, 4]]), "own": torch.tensor([[3], [0], [-1]])}
    # pads hold nonsense, which must neither count nor come back
    given = {"table": torch.randn(3, 3, 2), "own": torch.randn(3, 1, 2), "bias": torch.randn(3, 1)}
    given["table"][0, 2] = math.nan
    payload = {"table": torch.tensor([10, 20, 30])}
    upload = Upload(CLIENTS, torch.ones(3), given, rows, payload)
    config = PrivacyConfig(clip=0.7)
    sparse = protect_upload(upload, download, config, 0, 1)
    assert sparse.rows is rows
    assert sparse.payload == {}  # what was encoded has changed
    in_full = protect_upload(dense(upload, download), download, config, 0, 1)
    for name, tensor in dense(sparse, download).tensors.items():
        torch.testing.assert_close(tensor, in_full.tensors[name])
    base = {"table": download.shared["table"], "own": download.per_client["own"], "bias": 0.0}
    torch.testing.assert_close(norms({n: t - base[n] for n, t in in_full.tensors.items()}), torch.full((3,), 0.7))


def test_noise_falls_on_every_row_and_the_upload_becomes_dense():
    download = Download({"table": torch.full((400, 3), 5.0)})
    upload = Upload(
        torch.tensor([1, 2]),
        torch.ones(2),
        {"table": torch.full((2, 1, 3), 5.1)},
        {"table": torch.tensor([[7], [-1]])},
        {"table": torch.tensor([12, 12])},
    )
    noised = protect_upload(upload, download, PrivacyConfig(clip=0.5, noise_scale=0.2), 0, 1)
    assert noised.rows == {}
    assert measure(download, noised)[0].up == {"table": 4800}
    change = noised.tensors["table"] - 5.0
    assert (change != 0).all()
    assert change.std().item() == pytest.approx(0.1, rel=0.06)
    assert upload.tensors["table"].shape == (2, 1, 3)  # the given upload is left alone


@pytest.mark.parametrize(("mechanism", "std", "fourth"), [("gaussian", 0.6, 3.0), ("laplace", 0.6 * 2**0.5, 6.0)])
def test_noise_has_the_stated_size_and_shape(mechanism, std, fourth):
    config = PrivacyConfig(clip=0.3, noise_scale=2.0, mechanism=mechanism)
    noise = protect({"table": torch.zeros(2, 200_000)}, torch.tensor([3, 8]), config, 5, 1)["table"].double()
    assert noise.mean().abs() < 4 * std / 400_000**0.5
    assert noise.std().item() == pytest.approx(std, rel=0.01)
    assert (noise / std).pow(4).mean().item() == pytest.approx(fourth, rel=0.05)


def test_noise_is_independent_between_clients_rounds_tensors_and_seeds_and_repeatable():
    config = PrivacyConfig(clip=1.0, noise_scale=1.0)

    def noise(seed=5, round=1, clients=(3, 8), names=("a", "b")):
        zero = {name: torch.zeros(len(clients), 20_000) for name in names}
        return protect(zero, torch.tensor(clients), config, seed, round)

    first, other = noise(), [noise(round=2)["a"][0], noise(seed=6)["a"][0]]
    draws = torch.stack([first["a"][0], first["a"][1], first["b"][0], *other])
    correlation = torch.corrcoef(draws) - torch.eye(5)
    assert correlation.abs().max() < 5 / 20_000**0.5
    again = noise(clients=(8, 12, 3), names=("b", "a"))  # other block, other order
    assert torch.equal(again["a"][2], first["a"][0])
    assert torch.equal(again["b"][0], first["b"][1])


def test_noise_on_the_sum_is_shared_by_the_cohort():
    config = PrivacyConfig(clip=0.5, noise_scale=2.0, noise_on="sum")
    zero = {"table": torch.zeros(25, 20_000)}
    shares = protect(zero, torch.arange(25), config, 0, 1, cohort_size=25)["table"]
    assert shares.std().item() == pytest.approx(1.0 / 5, rel=0.01)
    assert shares.sum(0).std().item() == pytest.approx(1.0, rel=0.03)
    with pytest.raises(ValueError, match="cohort size"):
        protect(zero, torch.arange(25), config, 0, 1)


def test_a_non_finite_client_stays_so_and_leaves_the_others_alone():
    given = tensors()
    given["bias"][0] = math.nan
    given["table"][2, 0, 0] = math.inf
    kept = protect(given, CLIENTS, PrivacyConfig(clip=0.5, noise_scale=1.0), 0, 1)
    expected = protect(tensors(), CLIENTS, PrivacyConfig(clip=0.5, noise_scale=1.0), 0, 1)
    assert torch.equal(kept["table"][1], expected["table"][1])
    mean = weighted_mean([Upload(CLIENTS, torch.ones(3), kept)], {})
    assert torch.equal(mean["bias"], expected["bias"][1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip nan"),
        ({"noise_scale": 1.0}, "without a clip"),
        ({"noise_scale": 1.0, "clip": math.inf}, "without a clip"),
        ({"noise_without_clip": True}, "noise_without_clip with clip None, noise_scale 0.0"),
        ({"noise_without_clip": True, "noise_scale": 1.0, "clip": 2.0}, "noise_without_clip with clip 2.0"),
        ({"noise_without_clip": True, "noise_scale": 1.0, "noise_on": "sum"}, "noise_on sum, expected no clip"),
        ({"clip": 1.0, "noise_scale": -1.0}, "noise_scale -1.0"),
        ({"delta": 0.0}, "delta"),
        ({"mechanism": "uniform"}, "mechanism"),
        ({"noise_on": "mean"}, "noise_on"),
        ({"mechanism": "laplace", "noise_on": "sum"}, "not Laplace"),
    ],
)
def test_bad_settings_are_told(settings, message):
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(**settings)


def test_noise_without_a_bound_is_the_upload_plus_laplace_and_guarantees_nothing():
    config = PrivacyConfig(noise_scale=0.3, mechanism="laplace", noise_without_clip=True)
    large = {"table": torch.full((1, 50_000), 1000.0)}  # any clip would move it
    noise = (protect(large, torch.tensor([3]), config, 0, 1)["table"][0] - 1000.0).double()
    assert stats.kstest(noise.numpy(), stats.laplace(0, 0.3).cdf).pvalue > 1e-4
    assert stats.kstest(noise.numpy(), stats.laplace(0, 0.33).cdf).pvalue < 1e-4
    whole = protect_upload(Upload(CLIENTS, torch.ones(3), tensors()), Download({}), config, 0, 1)
    assert all(bool((whole.tensors[name] != tensor).all()) for name, tensor in tensors().items())
    assert epsilon(config, 1) == math.inf
    assert privacy_report(config, 1).startswith("no guarantee: WARNING, laplace noise of size 0.3 without a bound")


def gaussian(noise_scale: float, **settings) -> PrivacyConfig:
    return PrivacyConfig(clip=0.3, noise_scale=noise_scale, **settings)


def exact_delta(value: float, mu: float) -> float:
    """delta(epsilon) of the Gaussian mechanism, exactly (Balle and Wang, 2018, Theorem 8), sensitivity / std = mu."""
    second = value + log_ndtr(-value / mu - mu / 2)
    return float(math.exp(log_ndtr(-value / mu + mu / 2)) - math.exp(second))


@pytest.mark.parametrize(("noise_scale", "rounds", "delta"), [(1.0, 1, 1e-5), (1.0, 100, 1e-5), (7.5, 40, 1e-6)])
def test_epsilon_lies_between_the_exact_value_and_the_classic_conversion(noise_scale, rounds, delta):
    value = epsilon(gaussian(noise_scale, delta=delta), rounds)
    # Mironov 2017, Prop. 3, minimised by hand: K / (2 z^2) + sqrt(2 K log(1 / delta)) / z
    classic = rounds / (2 * noise_scale**2) + math.sqrt(2 * rounds * math.log(1 / delta)) / noise_scale
    assert value < classic
    assert exact_delta(value, math.sqrt(rounds) / noise_scale) < delta
    assert exact_delta(0.85 * value, math.sqrt(rounds) / noise_scale) > delta


def test_epsilon_hand_numbers():
    # z = 1, K = 1, delta = 1e-5, order 5.4: 5.4 / 2 + log(4.4 / 5.4) - (log 1e-5 + log 5.4) / 4.4 = 4.72851
    assert epsilon(gaussian(1.0), 1) == pytest.approx(4.72851, abs=2e-3)
    assert epsilon(gaussian(1.0), 1) <= 4.72851
    assert epsilon(gaussian(2.0), 4) == pytest.approx(epsilon(gaussian(1.0), 1))  # only K / z^2 counts
    assert epsilon(PrivacyConfig(clip=1.0, noise_scale=4.0, mechanism="laplace"), 10) == 2.5
    assert epsilon(PrivacyConfig(clip=1.0), 10) == math.inf
    assert epsilon(PrivacyConfig(), 10) == math.inf
    with pytest.raises(ValueError, match="participation 0"):
        epsilon(gaussian(1.0), 1, 0.0)
    with pytest.raises(ValueError, match="sampling"):
        epsilon(gaussian(1.0), 1, 0.5, sampling="shuffled")


def test_epsilon_agrees_with_the_library():
    library = pytest.importorskip("dp_accounting", reason="optional extra dp")
    accountant = library.rdp.RdpAccountant()
    accountant.compose(library.GaussianDpEvent(1.3), 20)
    value = epsilon(gaussian(1.3), 20)
    assert value <= accountant.get_epsilon(1e-5)
    assert value == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)


def test_sampling_lowers_epsilon_for_noise_on_the_sum():
    pytest.importorskip("dp_accounting", reason="optional extra dp")
    config = gaussian(1.0, noise_on="sum")
    full = epsilon(config, 100)
    fixed = {q: epsilon(config, 100, q) for q in (0.01, 0.1, 0.5)}
    poisson = {q: epsilon(config, 100, q, "poisson") for q in fixed}
    assert 7.9039 <= poisson[0.1] < 7.9039 * 1.01  # dp-accounting 0.6, z = 1, 100 rounds, delta 1e-5
    for q in fixed:
        assert poisson[q] < fixed[q] < full
    assert epsilon(gaussian(0.5, noise_on="sum"), 100, 0.5, "poisson") < 190  # the package alone: 277
    assert epsilon(config, 100, 0.999) == pytest.approx(full, rel=0.01)
    assert "fixed cohorts of share 0.1" in privacy_report(config, 100, 0.1)


def test_the_report_says_when_nothing_is_guaranteed():
    assert privacy_report(PrivacyConfig(), 10).startswith("no guarantee: clip and noise missing")
    assert privacy_report(PrivacyConfig(clip=1.0), 10).startswith("no guarantee: noise missing")
    text = privacy_report(gaussian(1.0), 1)
    assert text.startswith("epsilon 4.73 at delta 1e-05 over 1 round(s): ")
    assert "against the server too" in text
    assert "only the sum" in privacy_report(gaussian(1.0, noise_on="sum"), 1)
    laplace = PrivacyConfig(clip=1.0, noise_scale=4.0, mechanism="laplace")
    assert privacy_report(laplace, 10).startswith("epsilon 2.5 over 10 round(s)")


def test_noise_from_the_operating_system_has_the_same_size_and_shape_and_never_repeats():
    zero, client = {"table": torch.zeros(1, 200_000)}, torch.tensor([3])
    for mechanism, std in (("gaussian", 0.6), ("laplace", 0.6 * 2**0.5)):
        config = PrivacyConfig(clip=0.3, noise_scale=2.0, mechanism=mechanism)
        draws = []
        for _ in range(2):
            torch.manual_seed(0)  # has no influence
            draws.append(protect(zero, client, config, None, 1)["table"][0].double())
        first, second = draws
        assert first.mean().abs() < 5 * std / 200_000**0.5
        assert first.std().item() == pytest.approx(std, rel=0.015)
        assert torch.corrcoef(torch.stack(draws))[0, 1].abs() < 5 / 200_000**0.5
        law = stats.norm(0, std) if mechanism == "gaussian" else stats.laplace(0, 0.6)
        assert stats.kstest(second.numpy(), law.cdf).pvalue > 1e-4
        assert stats.kstest(second.numpy(), stats.norm(0, 1.1 * std).cdf).pvalue < 1e-4  # the test sees a tenth


def test_only_the_rows_that_a_client_sends_are_bounded_and_noised():
    marks = torch.tensor([[True, True, False, False], [False, True, True, False]])
    shared = torch.full((4, 300), 2.0)
    tensors = {"table": torch.zeros(2, 4, 300), "bias": torch.zeros(2, 2)}
    tensors["table"][0, 0] = 3.0  # of 2: moved by 1 in 300 numbers
    tensors["table"][0, 1] = tensors["table"][1, 1] = tensors["table"][1, 2] = 2.0
    upload = Upload(torch.tensor([4, 9]), torch.ones(2), tensors, sent_rows={"table": marks})
    clipped = protect_upload(upload, Download({"table": shared}), PrivacyConfig(clip=3.0), 0, 1)
    torch.testing.assert_close(clipped.tensors["table"][0, 0], torch.full((300,), 2.0 + 3.0 / 300**0.5))
    assert torch.equal(clipped.tensors["table"][1], tensors["table"][1])  # unmoved: unmarked rows count for nothing
    noised = protect_upload(upload, Download({"table": shared}), PrivacyConfig(clip=3.0, noise_scale=1.0), 0, 1)
    assert not noised.tensors["table"][~marks].any()
    assert (noised.tensors["table"][marks] - clipped.tensors["table"][marks]).std() == pytest.approx(3.0, rel=0.1)
    assert measure(Download({"table": shared}), noised)[0].up == {"bias": 8, "table": 2400}


def poisson_moment(z: float, rate: float, order: int) -> float:
    """E[((1 - q) + q p1(x) / p0(x))^a] under p0 = N(0, z^2), p1 = N(1, z^2), by numerical integration."""
    ratio = lambda x: (1 - rate) + rate * math.exp((2 * x - 1) / (2 * z**2))  # noqa: E731
    return quad(lambda x: stats.norm.pdf(x, 0, z) * ratio(x) ** order, -12 * z, 12 * z + order, limit=500)[0]


@pytest.mark.parametrize(("z", "rate", "order"), [(1.0, 0.1, 2), (2.0, 0.25, 7), (0.8, 0.5, 3), (5.0, 0.01, 30)])
def test_the_divergence_of_sampled_steps_is_the_integral(z, rate, order):
    found = np.interp(order, 1.0 + np.logspace(-4.0, 5.0, 20_000), poisson_divergence(z, rate))
    assert found == pytest.approx(math.log(poisson_moment(z, rate, order)) / (order - 1), rel=2e-3)


def test_epsilon_lies_above_privacy_loss_distributions_and_near_other_accountants():
    library = pytest.importorskip("dp_accounting", reason="optional extra dp")
    pld = pytest.importorskip("dp_accounting.pld")
    for z, rate, steps in ((1.0, 1.0, 1), (1.3, 1.0, 20), (1.0, 0.1, 100), (2.0, 0.25, 16), (5.0, 0.25, 64)):
        inner = library.GaussianDpEvent(z)
        event = inner if rate == 1.0 else library.PoissonSampledDpEvent(rate, inner)
        exact = pld.PLDAccountant(value_discretization_interval=1e-3)
        renyi = library.rdp.RdpAccountant()
        for accountant in (exact, renyi):
            accountant.compose(event, steps)
        value = epsilon(gaussian(z, noise_on="sum"), steps, rate, "poisson")
        assert exact.get_epsilon(1e-5) < value < 1.2 * exact.get_epsilon(1e-5)
        assert value == pytest.approx(renyi.get_epsilon(1e-5), rel=0.02)


def test_epsilon_agrees_with_opacus():
    accountants = pytest.importorskip("opacus.accountants", reason="not among our extras")
    for z, rate, steps in ((1.0, 0.1, 100), (2.0, 0.25, 16), (5.0, 0.25, 64)):
        renyi, numerical = accountants.RDPAccountant(), accountants.PRVAccountant()
        renyi.history = numerical.history = [(z, rate, steps)]
        value = epsilon(gaussian(z, noise_on="sum"), steps, rate, "poisson")
        assert value == pytest.approx(renyi.get_epsilon(1e-5), rel=0.02)
        assert numerical.get_epsilon(1e-5) < value < 1.2 * numerical.get_epsilon(1e-5)
