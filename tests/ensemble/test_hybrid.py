"""An ensemble as a whole: fitting, choice of its weights, ranking, positions, leakage, the files."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ensemble_toys import NUM_ITEMS, scores_of, sequences, toy_model, vectors
from safetensors.numpy import load_file, save_file
from scipy.optimize import minimize

from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.protocols import rank_held_out, train_part
from fedecider.federation.streams import stream
from fedecider.models import client_model as asking
from fedecider.models.counts import count_events, held_out_contexts, training_contexts
from fedecider.models.ensemble import (
    NUM_BUCKETS,
    SETTINGS_FILE,
    TENSOR_FILE,
    EnsembleConfig,
    block_positions,
    blocks_of,
    candidate_probs,
    catalogue_probs,
    choose_weights,
    fit_ensemble,
    fit_mixture,
    fit_weights,
    load_ensemble,
    log_likelihood,
    positions,
    rank,
    save_ensemble,
    sides_of,
)
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig

USERS = sequences(12)


UNIT = unit_vectors(vectors())


KEYS = [f"item{n:02d}" for n in range(NUM_ITEMS)]


def fitted(users=USERS, model=None):
    counts = count_events([train_part(sequence) for sequence in users], NUM_ITEMS)
    contexts = training_contexts(users, stream(0, "toy"))
    return fit_ensemble(counts, UNIT, contexts, toy_model() if model is None else model, EnsembleConfig("mixture"))


ENSEMBLE = fitted()


ASKED = held_out_contexts(USERS, "test")


HISTORIES = ASKED.histories


def all_of(ranked):
    return torch.cat([one.prob_BM for one in ranked])


def test_the_mixture_sums_to_one_over_unseen_items():
    for model in (None, toy_model()):
        prob_BI = all_of(rank(ENSEMBLE, ASKED, model))
        assert prob_BI.shape == (len(USERS), NUM_ITEMS)
        assert torch.allclose(prob_BI.sum(1), torch.ones(len(USERS), dtype=torch.float64))
        assert all((prob_BI[row, items] == 0).all() for row, items in enumerate(HISTORIES))


def test_all_weight_on_the_model_gives_the_ranking_of_the_model():
    mixture = ENSEMBLE.beside_model
    only = np.eye(len(mixture.experts))[mixture.experts.index("model")]
    ensemble = ENSEMBLE._replace(beside_model=mixture._replace(weight_QE=np.tile(only, (NUM_BUCKETS, 1))))
    found = positions(ensemble, held_out_contexts(USERS, "test"), toy_model())
    score = rank_held_out(
        lambda user_B: scores_of([HISTORIES[user] for user in user_B.tolist()]), USERS, NUM_ITEMS, "test"
    )
    assert torch.equal(found, score)
    assert len(found.unique()) > 4


def test_the_consensus_is_the_root_of_what_both_find_likely():
    mixture = ENSEMBLE.beside_model
    assert mixture.experts == ("counts", "text", "agreement", "model", "consensus", "uniform")
    assert mixture.mean_E[4] > 0
    only = np.eye(6)[4]
    ensemble = ENSEMBLE._replace(beside_model=mixture._replace(weight_QE=np.tile(only, (NUM_BUCKETS, 1))))
    alone_BI, found_BI = all_of(rank(ENSEMBLE, ASKED, None)), all_of(rank(ensemble, ASKED, toy_model()))
    unseen_BI = torch.ones(len(USERS), NUM_ITEMS, dtype=torch.bool)
    for row, items in enumerate(HISTORIES):
        unseen_BI[row, items] = False
    model_BI = scores_of(HISTORIES).masked_fill(~unseen_BI, -torch.inf).softmax(1)
    product_BI = (alone_BI * model_BI).sqrt()
    torch.testing.assert_close(found_BI, product_BI / product_BI.sum(1, keepdim=True))


def test_candidates_have_the_probabilities_of_the_whole_catalogue(monkeypatch):
    """As for item IDs of several tokens: beams and the best of the ensemble, in place of every item."""
    monkeypatch.setattr("fedecider.models.ensemble.NUM_BEST", 2)
    ensemble = fitted(model=toy_model(num_beams=3))
    assert ensemble.beside_model.experts == (
        "counts",
        "text",
        "agreement",
        "model",
        "uniform",
    )  # a sum over all is missing
    whole = all_of(rank(ensemble, ASKED, toy_model()))
    (some,) = rank(ensemble, ASKED, toy_model(num_beams=3))
    beams = scores_of(HISTORIES).topk(3).indices
    for row in range(len(USERS)):
        items = [item for item in some.item_BM[row].tolist() if item >= 0]
        assert set(beams[row].tolist()) <= set(items)
        assert len(items) == len(set(items)) <= 5
        assert torch.allclose(some.prob_BM[row, : len(items)], whole[row, items])
        assert (some.prob_BM[row, len(items) :] == 0).all()


def test_positions_by_hand_and_beyond_the_candidates(monkeypatch):
    monkeypatch.setattr("fedecider.models.ensemble.NUM_BEST", 1)
    ensemble = fitted(model=toy_model(num_beams=2))
    contexts = held_out_contexts(USERS, "test")
    found = positions(ensemble, contexts, toy_model(num_beams=2))
    (some,) = rank(ensemble, ASKED, toy_model(num_beams=2))
    for row, target in enumerate(contexts.targets):
        items, probs = some.item_BM[row].tolist(), some.prob_BM[row].tolist()
        if target in HISTORIES[row] or target not in items:
            assert found[row] == NOT_RANKED
        else:
            assert found[row] == sum(prob > probs[items.index(target)] for prob in probs)
    assert (found == NOT_RANKED).any()
    assert (found < NOT_RANKED).any()
    equal = positions(
        ENSEMBLE._replace(alone=ENSEMBLE.alone._replace(weight_QE=np.array([[0, 0, 0, 1.0]] * NUM_BUCKETS))),
        contexts,
        None,
    )
    unseen = [NUM_ITEMS - len(set(items)) for items in HISTORIES]
    ranked = [row for row, target in enumerate(contexts.targets) if target not in HISTORIES[row]]
    assert [float(equal[row]) for row in ranked] == [(unseen[row] - 1) / 2 for row in ranked]


def test_probabilities_of_the_model_leave_out_seen_items():
    unseen_BI = torch.ones(len(HISTORIES), NUM_ITEMS, dtype=torch.bool)
    for row, items in enumerate(HISTORIES):
        unseen_BI[row, items] = False
    expected = torch.softmax(scores_of(HISTORIES).masked_fill(~unseen_BI, -torch.inf), 1)
    (block,) = blocks_of(ENSEMBLE, ASKED, nearest_texts(UNIT))
    score_BI = scores_of(HISTORIES)
    assert torch.allclose(catalogue_probs(score_BI, block), expected)
    assert torch.equal(score_BI, scores_of(HISTORIES))  # others read them too
    item_BM = torch.arange(NUM_ITEMS).expand(len(HISTORIES), -1)
    assert torch.allclose(candidate_probs(toy_model(num_beams=2), HISTORIES, item_BM, unseen_BI), expected)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_blocks_of_scored_users_have_the_places_of_the_whole_list(at_once, monkeypatch):
    expected = [positions(ENSEMBLE, ASKED, toy_model()), positions(ENSEMBLE, ASKED, None)]
    monkeypatch.setattr("fedecider.models.ensemble.MAX_NUMBERS", at_once * NUM_ITEMS)
    mixtures = [ENSEMBLE.beside_model, ENSEMBLE.alone]
    found = block_positions(ENSEMBLE, nearest_texts(UNIT), ASKED, mixtures, scores_of(HISTORIES))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(expected[0].unique()) > 4


def test_held_out_events_change_no_count_and_no_weight():
    changed = [[*train_part(sequence), 3, 5] for sequence in USERS]
    assert changed != USERS
    other = fitted(changed)
    assert (other.counts.pair_II != ENSEMBLE.counts.pair_II).nnz == 0
    assert np.array_equal(other.counts.event_I, ENSEMBLE.counts.event_I)
    for name in ("alone", "beside_model"):
        one, two = getattr(other, name), getattr(ENSEMBLE, name)
        assert np.array_equal(one.weight_QE, two.weight_QE)
        assert np.array_equal(one.cut_Q, two.cut_Q)


def test_train_events_do_change_them():
    changed = [[5, *sequence[1:]] for sequence in USERS]
    assert not np.array_equal(fitted(changed).alone.weight_QE, ENSEMBLE.alone.weight_QE)


@pytest.mark.parametrize("ensemble", [ENSEMBLE, ENSEMBLE._replace(beside_model=None)], ids=["with a model", "alone"])
def test_a_saved_ensemble_ranks_alike(ensemble, tmp_path):
    folder = save_ensemble(ensemble, KEYS, tmp_path / "one")
    loaded = load_ensemble(folder, KEYS)
    model = None if ensemble.beside_model is None else toy_model()
    assert torch.equal(all_of(rank(loaded, ASKED, model)), all_of(rank(ensemble, ASKED, model)))
    assert loaded.config == ensemble.config
    save_ensemble(loaded, KEYS, tmp_path / "two")
    for name in (TENSOR_FILE, SETTINGS_FILE):
        assert (tmp_path / "two" / name).read_bytes() == (folder / name).read_bytes()
    assert "Do not push" in json.loads((folder / SETTINGS_FILE).read_text())["private"]


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
        digest = hashlib.sha256((folder / TENSOR_FILE).read_bytes()).hexdigest()
        spoil_json(lambda content: content.update(sha256=digest))(folder)

    return spoil


def not_a_number(vector_ID):
    vector_ID[2, 1] = np.nan
    return vector_ID


DAMAGE = {
    "no settings": (lambda folder: (folder / SETTINGS_FILE).unlink(), SETTINGS_FILE),
    "half a file": (
        lambda folder: (folder / TENSOR_FILE).write_bytes((folder / TENSOR_FILE).read_bytes()[:-9]),
        TENSOR_FILE,
    ),
    "changed tensors": (spoil_json(lambda content: content.update(sha256="0" * 64)), "was changed"),
    "no weights": (spoil_json(lambda content: content["mixtures"]["alone"].pop("weight_QE")), "weight_QE"),
    "weights above 1": (
        spoil_json(lambda content: content["mixtures"]["alone"].update(mean_E=[1.0, 1.0, 1.0, 1.0])),
        "no shares of 1",
    ),
    "weights of other experts": (
        spoil_json(lambda content: content["mixtures"]["alone"].update(mean_E=[0.5, 0.5])),
        "do not fit",
    ),
    "experts that nobody knows": (
        spoil_json(lambda content: content["mixtures"]["alone"].update(experts=["a", "b", "c", "d"])),
        "experts a, b, c, d, not of counts, text, agreement, uniform",
    ),
    "an expert twice": (
        spoil_json(lambda content: content["mixtures"]["beside_model"]["experts"].__setitem__(0, "text")),
        "experts text, text, agreement, model, consensus, uniform, not of",
    ),
    "a floor that is not the last": (
        spoil_json(lambda content: content["mixtures"]["alone"]["experts"].reverse()),
        "experts uniform, agreement, text, counts",
    ),
    "a model in the ensemble without a model": (
        spoil_json(lambda content: content["mixtures"].update(alone=content["mixtures"]["beside_model"])),
        "not of counts, text, agreement, uniform",
    ),
    "cuts that fall": (
        spoil_json(
            lambda content: [
                content["mixtures"].update(beside_model=None),
                content["mixtures"]["alone"].update(cut_Q=[2.0, 1.0], weight_QE=[[0.25] * 4] * 3),
            ]
        ),
        "cuts that do not rise",
    ),
    "a cut that is no number": (
        spoil_json(lambda content: content["mixtures"]["alone"].update(cut_Q=[1.0, float("nan")])),
        "no shares of 1",
    ),
    "weights of another one": (
        spoil_json(lambda content: content["mixtures"]["alone"]["weight_QE"].reverse()),
        "was changed since it was written",
    ),
    "unknown settings": (spoil_json(lambda content: content["config"].update(depth=3)), "depth"),
    "vectors that are no numbers": (spoil_tensor("item_vectors", not_a_number), "no finite numbers"),
    "vectors of other items": (spoil_tensor("item_vectors", lambda v: v[1:].copy()), "other shapes"),
    "counts below 0": (spoil_tensor("event_count", lambda v: v - 100), "below 0"),
    "items outside": (spoil_tensor("pair_item", lambda v: v + 1), "outside the catalogue"),
    "rows in disorder": (spoil_tensor("pair_start", lambda v: v[::-1].copy()), "do not follow"),
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


PROBS = np.random.default_rng(2).gamma(0.4, size=(60, 4))


def optimum(prob_NE, prior_E):
    """The same objective by a general optimiser, over a softmax."""

    def value(logit_E):
        weight_E = np.exp(logit_E - logit_E.max())
        weight_E /= weight_E.sum()
        return -np.log(prob_NE @ weight_E).sum() - (prior_E * np.log(weight_E + 1e-300)).sum()

    found = minimize(value, np.zeros(prob_NE.shape[1]), method="BFGS", options={"gtol": 1e-9}).x
    weight_E = np.exp(found - found.max())
    return weight_E / weight_E.sum()


@pytest.mark.parametrize("prior", [0.0, 5.0])
def test_em_finds_the_optimum(prior):
    prior_E = prior * np.array([0.5, 0.1, 0.1, 0.3])
    weight_E, value = fit_weights(PROBS, prior_E, num_steps=5000)
    assert weight_E == pytest.approx(optimum(PROBS, prior_E), abs=1e-3)
    assert value == pytest.approx(np.log(PROBS @ weight_E).mean())
    assert weight_E.sum() == pytest.approx(1.0)


def test_one_step_by_hand():
    weight_E, _ = fit_weights(np.array([[0.2, 0.6], [0.3, 0.1]]), num_steps=1)
    assert weight_E.tolist() == pytest.approx([(1 / 4 + 3 / 4) / 2, (3 / 4 + 1 / 4) / 2])


def test_an_expert_that_is_always_better_gets_everything():
    weight_E, _ = fit_weights(np.array([[0.2, 0.1], [0.3, 0.1]]))
    assert weight_E == pytest.approx([1.0, 0.0], abs=1e-6)


def test_without_events_the_weights_are_the_prior():
    assert fit_weights(np.zeros((0, 2)), np.array([3.0, 1.0]))[0].tolist() == [0.75, 0.25]
    assert fit_weights(np.zeros((0, 2)))[0].tolist() == [0.5, 0.5]
    assert log_likelihood(np.zeros((0, 2)), np.array([0.5, 0.5])) == 0.0


def test_buckets_have_weights_of_their_own_near_those_of_all():
    known_N = np.arange(60.0)
    prob_NE = np.where(known_N[:, None] < 30, [[0.3, 0.1]], [[0.1, 0.3]])
    mixture = fit_mixture(prob_NE, known_N, ("counts", "uniform"), 2, 10.0)
    assert mixture.mean_E == pytest.approx([0.5, 0.5])
    assert mixture.cut_Q.tolist() == [29.5]
    expected = fit_weights(prob_NE[:30], np.array([5.0, 5.0]))[0]
    assert mixture.weight_QE[0] == pytest.approx(expected)
    assert 0.7 < expected[0] < 0.95
    assert mixture.weight_QE[1] == pytest.approx(expected[::-1])
    assert mixture.weights(np.array([0.0, 29.0, 30.0])).tolist() == mixture.weight_QE[[0, 0, 1]].tolist()


FIRST, FAR = 0.0, 9.0


def ranked(hits: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Places of ten users' items by the weights: ``hits`` are the users whose item stands first."""
    return {name: torch.tensor([FIRST if user in found else FAR for user in range(10)]) for name, found in hits.items()}


def one_sided(ensemble, name):
    return ensemble._replace(beside_model=sides_of(ensemble)[name])


def test_sides_rank_as_they_do_alone():
    model = toy_model()
    ensemble_alone = all_of(rank(one_sided(ENSEMBLE, "counts and texts"), ASKED, model))
    assert torch.allclose(ensemble_alone, all_of(rank(ENSEMBLE, ASKED, None)))
    model_alone = one_sided(ENSEMBLE, "model")
    assert model_alone.beside_model.weight_QE[:, ENSEMBLE.beside_model.experts.index("model")].tolist() == [1.0] * 3
    assert not torch.allclose(all_of(rank(model_alone, ASKED, model)), ensemble_alone)
    assert sides_of(ENSEMBLE)["mixture"] is ENSEMBLE.beside_model


@pytest.mark.parametrize(
    ("hits", "taken"),
    [
        ({"mixture": [0, 1], "model": [0, 1, 2, 3, 4, 5], "counts and texts": [0, 1]}, "model"),
        ({"mixture": [0, 1], "model": [0, 1], "counts and texts": [0, 1, 2, 3, 4, 5]}, "counts and texts"),
        (
            {"mixture": [0, 1], "model": [0, 1, 2, 3, 4], "counts and texts": [0, 1, 2, 3, 4, 5]},
            "counts and texts",
        ),  # the better of two
        (
            {"mixture": [0, 1, 2, 3], "model": [2, 3, 4, 5, 6], "counts and texts": []},
            "mixture",
        ),  # better, but within noise
        ({"mixture": [0, 1, 2], "model": [0, 1, 2], "counts and texts": [0, 1, 2]}, "mixture"),
        ({"mixture": [0, 1, 2, 3], "model": [], "counts and texts": []}, "mixture"),
    ],
)
def test_a_side_is_taken_where_it_is_clearly_better(hits, taken):
    ensemble, choice = choose_weights(ENSEMBLE, ranked(hits))
    assert choice.weights == taken
    assert np.array_equal(ensemble.beside_model.weight_QE, one_sided(ENSEMBLE, taken).beside_model.weight_QE)
    assert ensemble.alone is ENSEMBLE.alone
    assert choice.valid["mixture"] == pytest.approx(
        sum(1.0 if user in hits["mixture"] else 1 / np.log2(FAR + 2) for user in range(10)) / 10
    )


def test_the_chosen_weights_are_kept(tmp_path):
    """Also those of a side: a saved ensemble ranks as the one that was chosen."""
    keys = [f"item{number:02d}" for number in range(len(UNIT))]
    for side in ("model", "counts and texts"):
        ensemble = one_sided(ENSEMBLE, side)
        again = load_ensemble(save_ensemble(ensemble, keys, tmp_path / side), keys)
        assert torch.equal(all_of(rank(again, ASKED, toy_model())), all_of(rank(ensemble, ASKED, toy_model())))


def test_ids_of_several_tokens_have_sides_too(monkeypatch):
    monkeypatch.setattr("fedecider.models.ensemble.NUM_BEST", 2)
    ensemble = fitted(model=toy_model(num_beams=3))
    valid = held_out_contexts(USERS, "valid")
    model = toy_model(num_beams=3)
    places = {
        name: positions(ensemble._replace(beside_model=one), valid, model) for name, one in sides_of(ensemble).items()
    }
    found, choice = choose_weights(ensemble, places)
    assert set(choice.valid) == {"mixture", "model", "counts and texts"}
    assert choice.weights in choice.valid
    assert found.beside_model.experts == ensemble.beside_model.experts


def test_the_model_alone_ranks_its_beams_and_nothing_else():
    """No item of the ensemble is better than another there; some of them would take places of beams."""
    model = toy_model(num_beams=3)
    ensemble = one_sided(fitted(model=model), "model")
    found = list(rank(ensemble, ASKED, model))
    beam_BK = model.beams(ASKED.histories, 0)
    item_BM = torch.cat([batch.item_BM for batch in found])
    assert [sorted(row) for row in item_BM.tolist()] == [sorted(row) for row in beam_BK.tolist()]


TWO_HISTORIES = [[1, 2], [3, 4, 5, 3]]


def test_beams_have_room_for_the_list_and_the_history(monkeypatch):
    """Four beams are enough for one item behind two; nobody's beams depend on those of others."""
    searched = []

    def search(model, input_ids_BS, mask_BS, trie, *, num_beams):
        searched.append((input_ids_BS[:, 0].tolist(), num_beams))
        return torch.arange(num_beams).expand(len(input_ids_BS), -1), None

    class Catalogue:
        max_length = 2

        def to(self, device):
            return self

        def __len__(self):
            return NUM_ITEMS

    def first_items(task, histories):
        return torch.tensor([[items[0]] for items in histories]), torch.ones(1)

    monkeypatch.setattr(asking, "constrained_beam_search", search)
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
