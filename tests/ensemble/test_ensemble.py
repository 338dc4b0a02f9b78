"""An ensemble as a whole: its lists and places, repeats that are learned, beams, leakage, the files."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ensemble_toys import NUM_ITEMS, baskets_of, fitted, scores_of, sequences, toy_model, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fedecider.data.near_texts import unit_vectors
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.protocols import held_out, histories, train_part
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models import client_model as asking
from fedecider.models import ensemble
from fedecider.models.ensemble import MODEL_ALONE, Weights, best_items, positions
from fedecider.models.ensemble_files import SETTINGS_FILE, TENSOR_FILE, load_ensemble, save_ensemble
from fedecider.models.features import BOUGHT, FEATURES, block_of, near_of
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig

USERS = sequences(12)
KEYS = [f"item{n:02d}" for n in range(NUM_ITEMS)]
ENSEMBLE = fitted(USERS, toy_model())
ASKED = histories(USERS, "test")
BASKETS = baskets_of([[user[:2], user[2:-1], [*user[-1:], user[0], (user[0] + 3) % NUM_ITEMS]] for user in USERS])


def slow_scores(model, weights: Weights, history: SequenceArray) -> list[float]:
    """Of one history, item by item and feature by feature."""
    block = block_of(ENSEMBLE.knowledge, near_of(ENSEMBLE.knowledge, history), history)
    log_prob_I = torch.log_softmax(scores_of(list(history))[0], 0).tolist()
    found = []
    for item in range(NUM_ITEMS):
        value = {name: float(value_BI[0, item]) for name, value_BI in block.value.items()}
        if model:
            value["model"] = 0.0 if item in history[0] else log_prob_I[item] + math.log(NUM_ITEMS)
        found.append(sum(theta * value[name] for name, theta in weights.value.items()))
    return found


def place(score_I, target: int, candidates) -> float:
    if target not in candidates:
        return float(NOT_RANKED)
    above = sum(score_I[item] > score_I[target] + 1e-5 for item in candidates)
    return above + 0.5 * sum(abs(score_I[item] - score_I[target]) <= 1e-5 for item in candidates if item != target)


@pytest.mark.parametrize("drop_seen", [True, False])
@pytest.mark.parametrize("users", [SequenceArray.of(USERS), BASKETS], ids=["one item", "baskets"])
@pytest.mark.parametrize("model", [toy_model(), None], ids=["with a model", "alone"])
def test_places_are_those_of_a_loop(drop_seen, users, model):
    weights = ENSEMBLE.beside_model if model else ENSEMBLE.alone
    past, target_NT = histories(users, "test"), held_out(users, "test")
    (found,) = positions(ENSEMBLE.knowledge, past, target_NT, model, [weights], drop_seen)
    several = 0
    for row, targets in enumerate(target_NT.view(len(users), -1).tolist()):
        score_I, seen = slow_scores(model is not None, weights, past[row : row + 1]), set(past[row])
        new, every = set(range(NUM_ITEMS)) - seen, set(range(NUM_ITEMS))
        whole_T, again_T, new_T = (part.view(len(users), -1)[row].tolist() for part in found[:3])
        for target, whole, again, of_new in zip(targets, whole_T, again_T, new_T, strict=True):
            if target < 0:
                assert all(map(math.isnan, (whole, again, of_new)))
                continue
            several += target in seen
            assert whole == place(score_I, target, new if drop_seen else every)
            if drop_seen:
                assert (of_new, math.isnan(again)) == (whole, True)
            elif target in seen:
                assert again == place(score_I, target, seen)
                assert math.isnan(of_new)
            else:
                assert of_new == place(score_I, target, new)
                assert math.isnan(again)
    assert several


def test_all_weight_on_the_model_gives_the_places_of_the_model():
    (found,) = positions(ENSEMBLE.knowledge, ASKED, held_out(USERS, "test"), toy_model(), [MODEL_ALONE], True)
    score_BI = scores_of(list(ASKED))
    expected = [
        place(score_BI[row].tolist(), target, set(range(NUM_ITEMS)) - set(ASKED[row]))
        for row, target in enumerate(held_out(USERS, "test").tolist())
    ]
    assert found.whole.tolist() == expected
    assert len(found.whole.unique()) > 4


@pytest.mark.parametrize("at_once", [1, 5])
def test_blocks_have_the_places_and_lists_of_all(at_once, monkeypatch):
    def asked():
        weights = [ENSEMBLE.beside_model, MODEL_ALONE]
        return (
            positions(ENSEMBLE.knowledge, ASKED, held_out(USERS, "test"), toy_model(), weights, False),
            best_items(ENSEMBLE, ASKED, toy_model(), 5),
        )

    expected_places, expected_lists = asked()
    monkeypatch.setattr(ensemble, "MAX_NUMBERS", at_once * NUM_ITEMS)
    found_places, found_lists = asked()
    for one, other in zip(found_places, expected_places, strict=True):
        assert all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(one, other, strict=True))
    assert found_lists == expected_lists


def test_beams_and_the_best_by_all_else_are_candidates(monkeypatch):
    monkeypatch.setattr(ensemble, "NUM_BEST", 2)
    model, weights = toy_model(num_beams=3), ENSEMBLE.beside_model
    users = SequenceArray.of(USERS)
    target_N = held_out(users, "test")
    (whole,) = positions(ENSEMBLE.knowledge, ASKED, target_N, model, [weights], False)
    outside = again_outside = 0
    for row, target in enumerate(target_N.tolist()):
        past = ASKED[row : row + 1]
        score_I = slow_scores(True, weights, past)
        rest_I = slow_scores(False, Weights({n: v for n, v in weights.value.items() if n != "model"}, {}), past)
        candidates = {*scores_of(list(past))[0].topk(3).indices.tolist(), *np.argsort(rest_I)[-2:].tolist()}
        assert whole.whole[row] == place(score_I, target, candidates)
        part = whole.again if target in past[0] else whole.new
        other = whole.new if target in past[0] else whole.again
        same = candidates & set(past[0]) if target in past[0] else candidates - set(past[0])
        assert part[row] == place(score_I, target, same)
        assert other[row].isnan()
        outside += target not in candidates
        again_outside += target not in candidates and target in past[0]
    assert 0 < outside < len(USERS)
    assert again_outside


def test_lists_are_ordered_with_what_each_feature_adds():
    lists = best_items(ENSEMBLE, ASKED, toy_model(), 4)
    for row, best in enumerate(lists):
        score_I = torch.tensor(slow_scores(True, ENSEMBLE.beside_model, ASKED[row : row + 1]), dtype=torch.float64)
        log_prob_I = torch.log_softmax(score_I, 0)
        assert [one.item for one in best] == score_I.sort(descending=True, stable=True).indices[:4].tolist()
        assert [one.log_prob for one in best] == pytest.approx(
            log_prob_I.sort(descending=True).values[:4].tolist(), rel=1e-5
        )
        for one in best:
            assert sum(one.adds.values()) == pytest.approx(float(score_I[one.item]), rel=1e-4, abs=1e-5)


def test_repeats_may_be_dropped_or_nothing_else_and_items_kept_out():
    allowed_I = torch.arange(NUM_ITEMS) % 2 == 0
    for repeats, wanted in (("drop", lambda seen: set(range(NUM_ITEMS)) - seen), ("only", lambda seen: seen)):
        lists = best_items(ENSEMBLE, ASKED, toy_model(), NUM_ITEMS, repeats)
        even = best_items(ENSEMBLE, ASKED, toy_model(), NUM_ITEMS, repeats, allowed_I)
        for row, (best, of_even) in enumerate(zip(lists, even, strict=True)):
            assert {one.item for one in best} == wanted(set(ASKED[row]))
            assert [one for one in best if one.item % 2 == 0] == of_even
    assert max(map(len, lists)) < NUM_ITEMS


def test_a_model_beside_which_nothing_was_fitted_is_refused():
    with pytest.raises(ValueError, match="fit it again"):
        best_items(ENSEMBLE._replace(beside_model=None), ASKED, toy_model(), 3)


@pytest.mark.parametrize(("history", "message"), [([], r"got history \[\]"), ([1, NUM_ITEMS], "from 0 to 16")])
def test_histories_that_cannot_be(history, message):
    with pytest.raises(ValueError, match=message):
        best_items(ENSEMBLE, SequenceArray.of([[0], history]), None, 3)


def test_a_model_that_diverged_is_refused():
    diverged = ensemble.ModelScores(lambda histories, item_BM: scores_of(histories) * torch.nan, None)
    with pytest.raises(ValueError, match="scores are not numbers"):
        best_items(ENSEMBLE, ASKED, diverged, 3)


# Repeats are learned.

MANY = 40
MANY_UNIT = unit_vectors(vectors(MANY))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(5, 40), st.integers(3, 12))
def test_without_repeats_no_list_has_a_seen_item(seed, num_users, longest):
    rng = np.random.default_rng(seed)
    users = [rng.permutation(MANY)[: rng.integers(3, longest + 1)].tolist() for _ in range(num_users)]
    found = fitted(users, unit_ID=MANY_UNIT)
    assert found.alone.value[BOUGHT] == -20.0
    past = histories(users, "test")
    for history, best in zip(past, best_items(found, past, None, 10, "learned"), strict=True):
        assert len(best) == 10
        assert not {one.item for one in best} & set(history)


def habits(seed: int, num_users: int = 300) -> list[list[int]]:
    """Customers who buy six things of their own again and again, each as often as they like it."""
    rng = np.random.default_rng(seed)
    users = []
    for _ in range(num_users):
        own, share = rng.permutation(MANY)[:6], rng.dirichlet([0.7] * 6)
        users.append([*own.tolist(), *rng.choice(own, p=share, size=25).tolist()])
    return users


@pytest.mark.parametrize("seed", [0, 1])
def test_with_repeats_alone_the_list_is_the_own_frequency_within_noise(seed):
    users = habits(seed)
    found = fitted(users, unit_ID=MANY_UNIT)
    assert found.alone.value[BOUGHT] == 20.0
    past, target_N = histories(users, "test"), held_out(users, "test")
    gains = []
    for history, best, target in zip(past, best_items(found, past, None, 6), target_N.tolist(), strict=True):
        items = [one.item for one in best]
        assert set(items) == set(history)
        frequency = {
            item: sum(0.97**age for age, other in enumerate(reversed(history)) if other == item) for item in history
        }
        by_frequency = sorted(frequency, key=frequency.get, reverse=True)
        gains.append(1 / math.log2(items.index(target) + 2) - 1 / math.log2(by_frequency.index(target) + 2))
    noise = np.std(gains) / math.sqrt(len(gains))
    assert abs(np.mean(gains)) < 2 * noise + 0.005


def test_held_out_events_change_no_count_and_the_test_item_no_weight():
    other = fitted([[*user[:-1], (user[-1] + 1) % NUM_ITEMS] for user in USERS], toy_model())
    assert (other.alone, other.beside_model) == (ENSEMBLE.alone, ENSEMBLE.beside_model)
    changed = fitted([[*train_part(user), 3, 5] for user in USERS], toy_model())
    for one, two in zip(changed.knowledge.counts[:2], ENSEMBLE.knowledge.counts[:2], strict=True):
        assert (one != two).nnz == 0
    assert changed.knowledge.counts.event_I.tolist() == ENSEMBLE.knowledge.counts.event_I.tolist()
    assert changed.alone != ENSEMBLE.alone


# Files.


@pytest.mark.parametrize("whole", [ENSEMBLE, ENSEMBLE._replace(beside_model=None)], ids=["with a model", "alone"])
def test_a_saved_ensemble_is_the_same(whole, tmp_path):
    folder = save_ensemble(whole, KEYS, tmp_path / "one")
    loaded = load_ensemble(folder, KEYS)
    assert loaded[1:] == whole[1:]
    model = toy_model() if whole.beside_model else None
    assert best_items(loaded, ASKED, model, 5) == best_items(whole, ASKED, model, 5)
    save_ensemble(loaded, KEYS, tmp_path / "two")
    for name in (TENSOR_FILE, SETTINGS_FILE):
        assert (tmp_path / "two" / name).read_bytes() == (folder / name).read_bytes()
    assert "Do not push" in json.loads((folder / SETTINGS_FILE).read_text())["private"]
    assert folder.stat().st_mode & 0o777 == 0o700


def spoil_json(change):
    def spoil(folder: Path):
        content = json.loads((folder / SETTINGS_FILE).read_text())
        change(content)
        (folder / SETTINGS_FILE).write_text(json.dumps(content))

    return spoil


def spoil_tensor(name, value):
    def spoil(folder: Path):
        tensors = load_file(folder / TENSOR_FILE)
        save_file({**tensors, name: value(tensors[name])}, folder / TENSOR_FILE)

    return spoil


def not_a_number(vector_ID):
    vector_ID[2, 1] = np.nan
    return vector_ID


def alone(part: str, **changed):
    return spoil_json(lambda content: content["weights"]["alone"][part].update(changed))


DAMAGE = {
    "no settings": (lambda folder: (folder / SETTINGS_FILE).unlink(), SETTINGS_FILE),
    "half a file": (
        lambda folder: (folder / TENSOR_FILE).write_bytes((folder / TENSOR_FILE).read_bytes()[:-9]),
        TENSOR_FILE,
    ),
    "no weights": (spoil_json(lambda content: content["weights"]["alone"].pop("value")), "value"),
    "weights that are no numbers": (alone("value", text=float("nan")), "no finite numbers"),
    "errors that are no numbers": (alone("error", text=float("inf")), "no finite numbers"),
    "a feature that nobody knows": (alone("value", fashion=1.0), f"fashion, not of {', '.join(FEATURES)}"),
    "an error of no weight": (alone("error", model=1.0), "not of"),
    "a model in the ensemble without a model": (alone("value", model=1.0), "weights of a model"),
    "more new items than there are": (spoil_json(lambda content: content.update(num_new=99)), "new items"),
    "vectors that are no numbers": (spoil_tensor("item_vectors", not_a_number), "no finite numbers"),
    "vectors of other items": (spoil_tensor("item_vectors", lambda v: v[1:].copy()), "other shapes"),
    "counts below 0": (spoil_tensor("event_count", lambda v: v - 100), "below 0"),
    "items outside": (spoil_tensor("pair_item", lambda v: v + 1), "outside the catalogue"),
    "rows in disorder": (spoil_tensor("pair_start", lambda v: v[::-1].copy()), "do not follow"),
    "successors of other items": (spoil_tensor("next_start", lambda v: v[1:].copy()), "other shapes"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_ensemble_is_refused_in_one_sentence(case, tmp_path):
    spoil, expected = DAMAGE[case]
    folder = save_ensemble(ENSEMBLE, KEYS, tmp_path)
    spoil(folder)
    with pytest.raises(ValueError, match="expected") as caught:
        load_ensemble(folder, KEYS)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_ensemble_of_another_catalogue_is_refused(tmp_path):
    folder = save_ensemble(ENSEMBLE, KEYS, tmp_path)
    with pytest.raises(ValueError, match="another catalogue"):
        load_ensemble(folder, KEYS[::-1])


TWO_HISTORIES = [[1, 2], [3, 4, 5, 3]]


def test_beams_have_room_for_the_list_and_the_history(monkeypatch):
    """Four beams are enough for one item behind two; nobody's beams depend on those of others."""
    searched = []

    def search(model, input_ids_BS, mask_BS, trie, *, num_beams):
        searched.append((input_ids_BS[:, 0].tolist(), num_beams))
        return torch.arange(num_beams).expand(len(input_ids_BS), -1), torch.zeros(len(input_ids_BS), num_beams)

    class Catalogue:
        has_own_tokens = False

        def to(self, device):
            return self

        def __len__(self):
            return NUM_ITEMS

    def first_items(task, histories):
        return torch.tensor([[items[0]] for items in histories]), torch.ones(1)

    monkeypatch.setattr(asking, "top_items", search)
    monkeypatch.setattr(asking, "encode_histories", first_items)
    task, cpu = SimpleNamespace(trie=Catalogue()), torch.device("cpu")
    beams = asking.model_scores(None, task, RankingContext(RankingConfig(num_beams=4), device=cpu)).beams
    found = beams([*TWO_HISTORIES, [6, 7]], 2)
    assert searched == [([1, 6], 4), ([3], 5)]
    assert found.tolist() == [[0, 1, 2, 3, -1], [0, 1, 2, 3, 4], [0, 1, 2, 3, -1]]
    searched.clear()
    assert beams(TWO_HISTORIES, 0).shape == (2, 4)
    assert beams(TWO_HISTORIES, 100).shape == (2, NUM_ITEMS)
    assert [num_beams for _, num_beams in searched] == [4, NUM_ITEMS]
