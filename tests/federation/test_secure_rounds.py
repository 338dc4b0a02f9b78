"""Rounds over secure sums: what they give without, from sums alone, also when clients drop out."""

import sys
from pathlib import Path

import pytest
import torch
from slow import fast_where

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))
from toy_recommender import catalogue_recommender, run, toy_recommender

from fedecider.federation.method import Download, Upload
from fedecider.federation.rounds import Sent
from fedecider.federation.secure_rounds import (
    KEYS,
    ROW_WEIGHTS,
    SHARES,
    UNMASKING,
    SecureSums,
    fixed_point,
    securely_summed_rounds,
)
from fedecider.federation.wire import measure
from fedecider.methods import METHODS
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole

AVERAGING = ["fedavg", "pfedavg", "fedprox", "ditto", "ffa_lora", "rolora", "fdlora"]
SETTINGS: dict[str, dict] = {"fdlora": {"sync_every": 2, "num_evaluations": 5}}
RESOLUTION = 2.0**-32


def build(name, recommender=None, **config):
    settings = {**SETTINGS.get(name, {}), **config}
    return METHODS[name].build(recommender or toy_recommender(), METHODS[name].config(**settings))


def secured(name, rounds=2, *faults, recommender=None, clients=3, own_rows=None, **options):
    method = build(name, recommender, **options.pop("config", {}))
    sums = SecureSums(5, options.pop("threshold", 0.6), own_rows=own_rows or {})
    plan = faulty_channel(faults)
    aggregation = securely_summed_rounds(method, sums)
    return run(method, clients, rounds, channel=plan._replace(aggregation=aggregation), **options)


def close(left, right, tolerance):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", fast_where(("fedavg", "fdlora"), AVERAGING))
def test_one_round_is_the_plain_one_to_the_resolution(name):
    weighted = {"weighting": "examples"}
    plain, _ = run(build(name, **weighted), 3, 1)
    secure, records = secured(name, 1, config=weighted)
    close(secure.server, plain.server, RESOLUTION + 1e-7)  # and the last bit of a float32
    trained = [tensor for key, tensor in secure.server.items() if key.endswith("lora_b") and "momentum" not in key]
    assert all(tensor.any() for tensor in trained)  # zero at the start
    assert all(record["refused_uploads"] == [] for record in records)
    again, _ = secured(name, 1, config=weighted, block_size=3)
    close(again.server, secure.server, 0.0)  # a sum of whole numbers does not depend on its order


@pytest.mark.parametrize("name", fast_where(("fedavg",), ("fedavg", "rolora")))
def test_a_dropout_gives_the_round_of_the_others(name):
    """Late: after keys and shares, so that its masks must be taken off. The plain mean leaves it out as well."""
    late = Fault(1, "late", 1, 1)
    plan = faulty_channel([late])
    plain, plain_records = run(build(name), 3, 2, channel=plan)
    secure, records = secured(name, 2, late)
    close(secure.server, plain.server, 1e-5)
    assert [record["refused_uploads"] for record in records] == [record["refused_uploads"] for record in plain_records]
    downs = [
        {
            c: sum(size for key, size in g["down"].items() if "secure:" not in key)
            for g in r["traffic"]
            for c in g["clients"]
        }
        for r in records
    ]
    assert downs == [{c: sum(g["down"].values()) for g in r["traffic"] for c in g["clients"]} for r in plain_records]


def test_the_server_sees_one_upload_that_is_nobodys():
    seen = []
    method = build("fedavg")
    spied = method._replace(
        server_aggregate=lambda round, server, uploads: method.server_aggregate(
            round, server, (seen.append(upload) or upload for upload in uploads)
        )
    )
    aggregation = securely_summed_rounds(spied, SecureSums(5))
    plan = faulty_channel([Fault(0, "late", 2)])
    run(spied, 3, 2, channel=plan._replace(aggregation=aggregation))
    assert [upload.clients.tolist() for upload in seen] == [[-1], [-1]]
    assert [upload.mean_of.tolist() for upload in seen] == [[0, 1, 2], [1, 2]]
    assert all(len(tensor) == 1 for upload in seen for tensor in upload.tensors.values())


def test_who_stays_away_is_no_part_of_the_sum():
    away = Fault(2, "away", 1, 1)
    plan = faulty_channel([away])
    plain, _ = run(build("fedavg"), 3, 2, channel=plan)
    secure, _ = secured("fedavg", 2, away)
    close(secure.server, plain.server, 1e-5)


def test_too_few_uploads_end_the_run_with_a_sentence():
    gone = [Fault(client, "late", 2) for client in (0, 2)]
    with pytest.raises(ValueError, match=r"1 of 3 uploads for the secure aggregation of round 2, expected 2 at least"):
        secured("fedavg", 3, *gone)
    with pytest.raises(ValueError, match=r"2 of 3 uploads .* expected 3 at least"):
        secured("fedavg", 3, gone[0], threshold=0.9)
    with pytest.raises(ValueError, match="one is no sum"):
        secured("fedavg", 1, Fault(0, "away"), Fault(1, "away"))


def test_what_is_not_finite_or_out_of_range_is_kept_back():
    broken, records = secured("fedavg", 1, Fault(1, "nan"))
    left_out, _ = secured("fedavg", 1, Fault(1, "late"))
    close(broken.server, left_out.server, 0.0)
    assert [one["client"] for one in records[0]["non_finite_uploads"]] == [1]
    scaled, records = secured("fedavg", 1, Fault(1, "scale", factor=1e12))
    close(scaled.server, left_out.server, 0.0)
    (refused,) = records[0]["refused_uploads"]
    assert refused["client"] == 1
    assert refused["reason"].startswith("kept its upload back: got ")
    sent = {client: group["up"] for group in records[0]["traffic"] for client in group["clients"]}
    assert set(sent[1]) == {KEYS, SHARES}


def test_bytes_are_eight_a_number_and_the_messages_of_the_protocol():
    _, plain = run(build("fedavg"), 3, 1)
    _, secure = secured("fedavg", 1, Fault(2, "late"))
    (plain_group,) = plain[0]["traffic"]
    by_client = {client: group for group in secure[0]["traffic"] for client in group["clients"]}
    up = by_client[0]["up"]
    assert up.pop("secure:weight") == 8
    assert (up.pop(KEYS), up.pop(SHARES), up.pop(UNMASKING)) == (96, 2 * 82, 3 * 33)
    assert up == {name: 2 * size for name, size in plain_group["up"].items()}
    assert UNMASKING not in by_client[2]["up"]
    down = by_client[0]["down"]
    assert (down.pop(KEYS), down.pop(SHARES), down.pop(UNMASKING)) == (2 * 96, 2 * 82, 1)
    assert down == plain_group["down"]


@pytest.mark.slow
def test_silos_sum_every_row_over_those_who_send_it():
    recommender = catalogue_recommender()
    plain, _ = run(build("fedavg", catalogue_recommender()), 4, 1)
    secure, records = secured("fedavg", 1, recommender=recommender, clients=4, own_rows=recommender.rows.own)
    close(secure.server, plain.server, RESOLUTION + 1e-7)
    late = Fault(3, "late")
    plan = faulty_channel([late])
    plain, _ = run(build("fedavg", catalogue_recommender()), 4, 1, channel=plan)
    secure, _ = secured(
        "fedavg", 1, late, recommender=catalogue_recommender(), clients=4, own_rows=recommender.rows.own
    )
    close(secure.server, plain.server, RESOLUTION + 1e-7)
    table = "lm_head.lora_b"
    rows = {client: int(mark.sum()) for client, mark in enumerate(recommender.rows.own[table])}
    for group in records[0]["traffic"]:
        for client in group["clients"]:
            assert group["up"][table] == 8 * 2 * rows[client]  # rank 2; rows of the others do not travel
            assert group["up"][ROW_WEIGHTS + table] == 8 * rows[client]


def test_the_masked_sum_is_the_plain_sum_of_fixed_point_numbers_bit_for_bit():
    """K clients, K - threshold of them late: Upload by Upload, without a method."""
    count, least = 6, 4
    generator = torch.Generator().manual_seed(2)
    tensors = {"x": torch.randn(count, 3, 5, generator=generator), "y": torch.randn(count, 4, generator=generator)}
    uploads = [
        Upload(torch.tensor([c]), torch.tensor([c + 1.0]), {n: t[c : c + 1] for n, t in tensors.items()})
        for c in range(count)
    ]
    method = build("fedavg")
    for survivors in ([0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [1, 2, 4, 5]):
        aggregation = securely_summed_rounds(method, SecureSums(5, 0.6))
        cohort = list(range(count))
        sent = [
            aggregation.send(
                1, cohort, lambda: Download({}), Sent(uploads[c], measure(Download({}), uploads[c])), uploads[c]
            ).upload
            for c in survivors
        ]
        assert all(not torch.equal(one.tensors["x"], sent[0].tensors["x"]) for one in sent[1:])
        (mean,) = aggregation.read(1, cohort, {}, iter(sent))
        exact = [fixed_point(uploads[c], count) for c in survivors]
        for name in tensors:
            total = sum(one[name] for one in exact).double() / sum(int(one["secure:weight"]) for one in exact)
            assert torch.equal(mean.tensors[name][0], total.float())
    assert SecureSums(5, 0.6).parties(1, range(count)).rules.least == least
    with pytest.raises(ValueError, match="3 of 6 uploads"):
        next(iter(aggregation.read(1, cohort, {}, iter(sent[:3]))))
