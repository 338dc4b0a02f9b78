"""Rows beside the methods in every run: texts and counts, what they may read, and which are printed."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from text_scores import text_and_count_scores, text_neighbour_scores

from fedecider.baselines import Baseline
from fedecider.baselines.counts import (
    CLASSICAL,
    COUNTS,
    REPEATS,
    TEXT,
    TEXT_AND_COUNTS,
    UNTRAINED,
)
from fedecider.baselines.fitted_counts import NoConfig
from fedecider.comparison.compare import Positions, Shared, fill, positions_of
from fedecider.cross_silo import sasrec_entries
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.comparison import BASELINES, WITHOUT_ROUNDS
from fedecider.cross_silo.entries import counting_positions, item_texts_of
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.cross_silo.sasrec_entries import SASREC, SASREC_TEXT
from fedecider.data.frames import from_events
from fedecider.data.protocol import under
from fedecider.data.sample import sample_domains
from fedecider.data.silos import share_out
from fedecider.evaluation.protocols import rank_held_out, train_parts
from fedecider.evaluation.statistics import Interval
from fedecider.models.item_texts import encoded_texts
from fedecider.report.tables import CANARY, ResultRow
from fedecider.running.stages import Stage

NAMES = ("crime", "comics")


@pytest.fixture(scope="module")
def domains():
    return sample_domains(NAMES, 0)


def settings_of(cache, encoder="tfidf"):
    return parse_settings(["--cache", str(cache), "--pretrain.text_encoder", encoder, "--protocol", "strict"])


def shared(domains, cache, protocol="strict") -> Shared:
    return Shared(domains, protocol, 1, cache, "cpu")


def trained(asked: Shared, text_encoder=None) -> Positions:
    """By domain, SASRec with its first setting."""
    (row,) = fill([sasrec_entries.sasrec(asked, text_encoder)], 1)
    return positions_of(row, asked.protocol)[row.entry.label]


def artifacts(domains):
    return BaseArtifacts(domains, {}, Stage(None, True), Stage(None, True), domains)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_text_rows_stand_in_every_run(domains, tmp_path, split):
    settings, asked = settings_of(tmp_path), artifacts(domains)
    found = counting_positions(settings, asked, item_texts_of(settings, asked), (split,)).whole[split]
    assert list(found) == [*COUNTS, TEXT, TEXT_AND_COUNTS, *CLASSICAL, CANARY]
    vectors = encoded_texts(domains, "tfidf", str(tmp_path))
    for name, domain in domains.items():
        sequences, num_items = domain.clients.sequences, len(domain.item_keys)
        text = text_neighbour_scores(vectors[name], sequences, split)
        both = text_and_count_scores(vectors[name], sequences, split, domain.public.sequences)
        for label, score in ((TEXT, text), (TEXT_AND_COUNTS, both)):
            assert torch.equal(found[label][name], rank_held_out(score, sequences, num_items, split))
        assert not torch.equal(found[TEXT][name], found[TEXT_AND_COUNTS][name])
    assert len(list(tmp_path.glob("text-vectors-*"))) == 1  # encoded once


def with_other_ends(domain):
    """The same data but for the validation and test items of every client user but the first."""
    size = len(domain.item_keys)
    first, *others = domain.clients.sequences
    changed = [[*sequence[:-2], *((item + 7) % size for item in sequence[-2:])] for sequence in others]
    return dataclasses.replace(domain, clients=domain.clients._replace(sequences=[first, *changed]))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_items_of_other_users_reach_no_row(domains, tmp_path, split):
    settings = settings_of(tmp_path)
    other = {name: with_other_ends(domain) for name, domain in domains.items()}
    before, after = (
        counting_positions(settings, artifacts(one), item_texts_of(settings, artifacts(one)), (split,)).whole[split]
        for one in (domains, other)
    )
    assert set(before) == {*UNTRAINED, CANARY} - set(REPEATS)
    for label in set(before) - {CANARY}:
        for name in NAMES:
            assert before[label][name][0] == after[label][name][0]
            assert not torch.equal(before[label][name], after[label][name])  # the places of the changed items differ


@pytest.mark.parametrize("name", sasrec_entries.FACTORS)
def test_factors_are_rows_of_clients_alone_and_kept(domains, tmp_path, name):
    asked = shared(domains, tmp_path)
    for _ in range(2):
        (row,) = fill([sasrec_entries.factors(asked, name)], 1)
    of_row = positions_of(row, asked.protocol)[name]
    for client, domain in domains.items():
        (place_U,) = of_row[client]
        assert len(place_U) == len(domain.clients.users)
        assert float((place_U < 10).double().mean()) > 2 * 10 / len(domain.item_keys)
    assert len(list(tmp_path.glob(f"{name}-*/info.json"))) == len(domains)


def test_a_catalogue_counts_once_however_many_companies_have_it(domains, tmp_path):
    silos = share_out(domains, 3, None, 0)
    alone = sasrec_entries._text_starts(shared(domains, tmp_path), "tfidf", 8)
    unequal = {name: silo for name, silo in silos.items() if name.startswith("crime.") or name == "comics.1"}
    assert len(unequal) == 4
    for name, start in sasrec_entries._text_starts(shared(unequal, tmp_path), "tfidf", 8).items():
        assert torch.equal(start.vector_ID, alone[name.partition(".")[0]].vector_ID)


def row(label, score):
    values = {"hit@10": Interval(0.5, 0.4, 0.6), "ndcg@10": Interval(score, 0.0, 1.0)}
    low = {**values, "ndcg@10": Interval(1.0 - score, 0.0, 1.0)}
    return ResultRow(label, {"crime": low, "comics": low, "macro": values})


@pytest.mark.parametrize("protocol", ["strict", "strict/keep_seen"])
def test_sasrec_chooses_its_epoch_under_the_protocol_of_the_comparison(domains, tmp_path, monkeypatch, protocol):
    """Where repeats count and a repeated validation item were a miss, no epoch would look better than the first."""
    crime = domains["crime"]
    repeats = [[*sequence[:-2], sequence[0], sequence[-1]] for sequence in crime.clients.sequences]
    domain = dataclasses.replace(crime, clients=crime.clients._replace(sequences=repeats))
    said = []

    def train(data, config, extra, start_ID):
        first_UI = torch.eye(data.num_items)[[sequence[0] for sequence in data.sequences]]
        said.append(data.valid(lambda user_B: first_UI[user_B]))
        return real(data, dataclasses.replace(config, num_epochs=1), extra, start_ID)

    real = sasrec_entries.train
    monkeypatch.setattr(sasrec_entries, "train", train)
    trained(shared({"crime": domain}, tmp_path, protocol))
    assert said == [1.0 if protocol == "strict/keep_seen" else 0.0]


def test_sasrec_from_texts_is_a_row_of_the_comparison(domains, tmp_path, monkeypatch):
    assert {SASREC, SASREC_TEXT, CANARY} < set(WITHOUT_ROUNDS) < set(BASELINES)
    assert set(UNTRAINED) < set(BASELINES)
    calls = []

    def train(data, config, extra, start_ID):
        calls.append((data.sequences, data.num_items, config.embedding_size, start_ID, extra))
        return real(data, dataclasses.replace(config, num_epochs=1), extra, start_ID)

    real = sasrec_entries.train
    monkeypatch.setattr(sasrec_entries, "train", train)
    plain = trained(shared(domains, tmp_path))
    for _ in range(2):
        text = trained(shared(domains, tmp_path), "tfidf")
    assert len(calls) == 4  # two domains each, kept
    for (name, domain), (sequences, num_items, width, start_ID, extra) in zip(domains.items(), calls[2:], strict=True):
        assert (sequences, extra) == (domain.clients.sequences, domain.public.sequences)
        assert start_ID.shape == (num_items, width) == (len(domain.item_keys), 64)
        torch.testing.assert_close(start_ID.norm(dim=1), torch.ones(num_items))
        assert text[name].shape == (1, len(sequences))
        assert not torch.equal(text[name], plain[name])
    assert [call[3] for call in calls[:2]] == [None, None]
    (kept,) = tmp_path.glob("text-vectors-*/vectors.safetensors")
    assert set(load_file(kept)) == set(NAMES)


@pytest.mark.parametrize("protocol", ["strict", "next_basket", "last_month/2014-04-02"])
def test_matrix_factors_train_on_no_held_out_basket(protocol, tmp_path, monkeypatch):
    day_s, first_day = 86_400, 16_071  # 2014-01-01
    rows = [
        {"user": f"u{user}", "item": item, "time": (first_day + day) * day_s}
        for user in range(25)
        for day, items in ((0, "ab"), (20, "cd"), (70, "ef"), (100, "gh"))
        for item in items
    ]
    data = from_events(rows, [{"item": item, "title": f"Thing {item}"} for item in "abcdefgh"])
    read = under(protocol, dict(data))[0]["shop"]
    users = np.arange(len(read.clients.users))
    domain = dataclasses.replace(read, clients=read.clients.take(users[:23]), public=read.clients.take(users[23:]))
    seen = []

    def fit(fitted, config):
        seen.append(train_parts(fitted.sequences))
        return lambda user_B: torch.zeros(len(user_B), 8)

    monkeypatch.setitem(sasrec_entries.BASELINES, "als", Baseline(NoConfig, fit))
    fill([sasrec_entries.factors(shared({"shop": domain}, tmp_path, protocol), "als")], 1)
    assert seen[0][:23] == list(train_parts(domain.clients.sequences))
    assert set(seen[0].value_E.tolist()) == set(range(6 if protocol == "strict" else 4))
