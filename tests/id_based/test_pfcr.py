"""PFCR: codes by hand, a reference loop of its own, what is sent in which stage, whom sharing reaches, bad input."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedecider.data.catalogue import Catalogue
from fedecider.federation.wire import take_row
from fedecider.id_based.pfcr import PfcrConfig, code_groups, pfcr, text_codes
from fedecider.testing import id_contract
from fedecider.testing.bench import differing
from fedecider.testing.id_contract import HISTORIES, PUBLIC, run, tiny_clients

pytestmark = pytest.mark.whole

CONFIG = PfcrConfig(
    text_encoder="tfidf",
    federated_rounds=2,
    num_codes=3,
    num_centroids=4,
    num_prompts=3,
    embedding_size=8,
    num_layers=1,
    max_length=5,
    batch_size=64,
    local_epochs=1,
    dropout=0.0,
)
"""All sequences of a client make one step, so that their order does not matter."""
ROWS = 3 * 4
LAYERS = 5 * 8 + 4 * 8 + (3 * 8 * 8 + 3 * 8) + (8 * 8 + 8) + 2 * (8 * 8 + 8) + 2 * 8
"""Numbers of positions, two norms, query-key-value, mixed, feed-forward, last norm."""


def test_groups_by_hand():
    # sums of logs above the smallest variance: 4 -> 0; 2 -> 1; 1.5 -> 1 (0.69 < 1.39); 1 -> the one with room
    assert code_groups(torch.tensor([1.0, 4.0, 1.5, 2.0]), 2) == [[1, 0], [3, 2]]
    assert code_groups(torch.tensor([1.0, 5.0, 3.0]), 2) == [[1], [2]]  # one direction is left over


def test_codes_by_hand():
    # the first direction tells 10 from -10, the second 1 from -1: two codes, each of one direction
    corners = torch.tensor([[10.0, 1.0], [10.0, -1.0], [-10.0, 1.0], [-10.0, -1.0], [10.1, 1.0]])
    code_RM = text_codes(corners, num_codes=2, num_centroids=2, seed=0)
    far, near = code_RM[:, 0], code_RM[:, 1]
    assert set(far.tolist()) == {0, 1}
    assert set(near.tolist()) == {2, 3}  # rows of the second code lie behind those of the first
    assert far[0] == far[1] == far[4] != far[2] == far[3]
    assert near[0] == near[2] == near[4] != near[1] == near[3]


def test_no_more_codes_than_directions_and_no_more_values_than_texts():
    code_RM = text_codes(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), num_codes=9, num_centroids=50, seed=0)
    assert code_RM.shape == (3, 2)
    assert torch.equal(code_RM[1], code_RM[2])


def test_an_item_is_the_mean_of_its_codes_and_its_gradient_reaches_them():
    method = pfcr(tiny_clients(), CONFIG)
    rounds, (server, local) = method.init.__self__, method.init()
    model = rounds.model_of(take_row(local, 1), server, 1, prompted=False)
    code_IM = rounds.code_RM[12:]  # songs lie behind films
    expected = torch.stack([model.code_WD[codes].mean(0) for codes in code_IM])
    torch.testing.assert_close(model.item_ID, expected)
    model.item_ID.grad = torch.arange(9 * 8.0).view(9, 8)
    model.pull()
    gradient = torch.zeros(ROWS, 8)
    for item in range(9):
        for code in code_IM[item].tolist():
            gradient[code] += model.item_ID.grad[item] / 3
    torch.testing.assert_close(model.code_WD.grad, gradient)


def reference_states(p, table, sequence, prefix=""):
    """SASRec by its equations: one block, two heads, for one history."""
    length, size = len(sequence), 8
    x = table[sequence] * math.sqrt(size) + p[prefix + "position_LD"][range(length - 1, -1, -1)]
    norm = lambda y, name: functional.layer_norm(y, (size,), p[f"{name}.weight"], p[f"{name}.bias"])  # noqa: E731
    linear = lambda y, name: y @ p[f"{name}.weight"].T + p[f"{name}.bias"]  # noqa: E731
    block = f"{prefix}blocks.0."
    query, key, value = linear(norm(x, block + "attention_norm"), block + "query_key_value").split(size, 1)
    later = torch.ones(length, length).triu(1).bool()
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        logit = (query[:, part] @ key[:, part].T / 2.0).masked_fill(later, -torch.inf)
        heads.append(logit.softmax(1) @ value[:, part])
    x = x + linear(torch.cat(heads, 1), block + "mixed")
    fed = linear(norm(x, block + "feed_norm"), block + "feed.0").relu()
    return norm(x + linear(fed, block + "feed.2"), prefix + "norm")


def reference_prompted(p, content, own):
    """``norm(W [a, s', s])``, a by two heads over the prompts."""
    weight, bias = p["attention.in_proj_weight"], p["attention.in_proj_bias"]
    query = content @ weight[:8].T + bias[:8]
    key, value = (p["prompt_PD"] @ weight[at].T + bias[at] for at in (slice(8, 16), slice(16, 24)))
    heads = [(query[:, h] @ key[:, h].T / 2.0).softmax(1) @ value[:, h] for h in (slice(0, 4), slice(4, 8))]
    attended = torch.cat(heads, 1) @ p["attention.out_proj.weight"].T + p["attention.out_proj.bias"]
    mixed = torch.cat([attended, own, content], 1) @ p["mix.weight"].T + p["mix.bias"]
    return functional.layer_norm(mixed, (8,), p["mix_norm.weight"], p["mix_norm.bias"])


def reference_step(parameters, codes, sequences, trained, prompted, rate=3e-3):
    """One step of Adam from zero moments on the mean cross-entropy of all next items."""
    p = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in parameters.items()}
    table = p["code_WD"][codes].mean(1)
    losses = []
    for sequence in sequences:
        state = reference_states(p, table, sequence[:-1])
        if prompted:
            state = reference_prompted(p, state, reference_states(p, p["own.item_ID"], sequence[:-1], "own."))
        losses.append(-(state @ table.T).log_softmax(1)[range(len(sequence) - 1), sequence[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    after = {name: tensor.detach().clone() for name, tensor in p.items()}
    for name in trained:
        after[name] -= rate * p[name].grad / (p[name].grad.abs() + 1e-8)  # m / (sqrt(v) + eps) of a first step
    return after, loss.item()


def test_a_reference_loop_has_the_same_numbers():
    """Two federated rounds and one of tuning, written from the equations."""
    clients = tiny_clients()
    method = pfcr(clients, CONFIG)
    (server, local), codes = method.init(), method.init.__self__.code_RM
    state, records = run(method, clients, rounds=3)

    names = [name.removeprefix("model.") for name in local if name.startswith("model.")]
    extra = ("own.", "prompt_PD", "attention.", "mix.", "mix_norm.")
    layers = [name for name in names if not name.startswith(extra)]
    tuned = ["code_WD", *(name for name in names if name.startswith(extra))]
    own, histories = [], []
    for number, client in enumerate(clients):
        model = {name: local["model." + name][number] for name in names}
        model["own.item_ID"] = model["own.item_ID"][: client.num_items]
        own.append(model)
        parts = [list(items[:-2]) for items in HISTORIES[client.name].values() if len(items) > 3]
        histories.append([part[-6:] for part in (*parts, *PUBLIC[client.name.partition(".")[0]].values())])
    mean = server["code_WD"]
    for round in (1, 2, 3):
        losses = []
        for number, client in enumerate(clients):
            start = own[number] if round > 3 else {**own[number], "code_WD": mean}
            of_client = codes[client.rows]
            trained = layers if round < 3 else tuned
            own[number], loss = reference_step(start, of_client, histories[number], trained, round == 3)
            losses.append(loss)
        assert [log["loss"] for log in records[round - 1]["clients"]] == pytest.approx(losses, rel=1e-4)
        if round < 3:
            weight = np.array([len(parts) for parts in histories], float)
            mean = sum(w * one["code_WD"] for w, one in zip(weight / weight.sum(), own, strict=True)).float()
    torch.testing.assert_close(state.server["code_WD"], mean, atol=2e-5, rtol=1e-4)
    for number, client in enumerate(clients):
        for name in names:
            found = state.local["model." + name][number]
            found = found[: client.num_items] if name == "own.item_ID" else found
            expected = own[number][name]
            if name.endswith(("query_key_value.bias", "in_proj_bias")):  # softmax lets no gradient to a key's bias
                found, expected = (torch.cat([one[:8], one[16:]]) for one in (found, expected))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert state.local["prompted"].all()


@pytest.mark.parametrize(("share", "numbers"), [("codes", ROWS * 8), ("all", ROWS * 8 + LAYERS), ("nothing", 0)])
def test_bytes_of_both_stages(share, numbers):
    clients = tiny_clients()
    _, records = run(pfcr(clients, replace(CONFIG, share=share)), clients, rounds=4)
    ways = [[(sum(group["down"].values()), sum(group["up"].values())) for group in one["traffic"]] for one in records]
    assert all(pair == (4 * numbers, 4 * numbers) for one in ways[:2] for pair in one)
    assert all(pair == (4 * numbers, 0) for pair in ways[2])  # the last mean comes down
    assert all(pair == (0, 0) for pair in ways[3])


def test_what_others_do_reaches_a_client_only_where_it_is_shared():
    other = {**HISTORIES, "songs.1": {user: items[::-1] for user, items in HISTORIES["songs.1"].items()}}
    for share, reached in (("codes", True), ("all", True), ("nothing", False)):
        found = []
        for histories in (HISTORIES, other):
            clients = tiny_clients(histories=histories)
            state, _ = run(pfcr(clients, replace(CONFIG, share=share)), clients, rounds=2)
            found.append({name: tensor[[0, 2]] for name, tensor in state.local.items()})
        assert bool(differing(*found)) is reached, share


def test_no_texts_and_one_company_end_in_a_sentence(monkeypatch):
    alone = tiny_clients(histories={"films.1": HISTORIES["films.1"]})
    with pytest.raises(ValueError, match=r"^got the company films.1 alone with share codes, expected two or more"):
        pfcr(alone, CONFIG)
    assert pfcr(alone, replace(CONFIG, share="nothing")).variants == ("local",)
    keys = [f"song{number}" for number in range(9)]
    given = id_contract._tiny_catalogue
    without = lambda name: Catalogue(name, keys, keys, keys) if name == "songs" else given(name)  # noqa: E731
    monkeypatch.setattr(id_contract, "_tiny_catalogue", without)
    with pytest.raises(ValueError, match=r"^got songs.1 without item texts, expected a title or text for each item"):
        pfcr(tiny_clients(), CONFIG)
