"""FedMD: the consensus of companies by hand, and batches whose targets it is, for all kinds of item IDs."""

import pytest
import torch
from test_dense_head import MODELS, task_of
from test_sampled_softmax import DOMAIN, ITEM_IDS, TOKENIZER
from test_small_decoder import build

from distill.soft_targets import TopScores, consensus, soft_batches
from idgen.config import SampleConfig
from idgen.losses import WRITING_WEIGHT, sequence_loss
from idgen.samples import encode_histories
from idgen.tasks import build_task

ROWS = SampleConfig(templates="history", max_history=20, max_source_tokens=60)
HISTORIES = [[4, 17], [30, 2, 9], [11], [7, 8, 5, 39]]
# Of five items the first company sends two (0: .5, 3: .3), the second one (3: .6), behind each of two histories.
NORTH = TopScores(torch.tensor([[0, 3], [2, -1]]), torch.tensor([[0.5, 0.3], [0.2, 99.0]], dtype=torch.float64).log())
SOUTH = TopScores(torch.tensor([[3], [4]]), torch.tensor([[0.6], [1.0]], dtype=torch.float64).log())
BOTH = torch.arange(2)


def loss_of(model, batch):
    with torch.no_grad():
        return float(sequence_loss(model, batch))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_consensus_is_the_mean_with_the_rest_spread_evenly():
    found_BI = consensus([NORTH, SOUTH], BOTH, 5)
    third = 0.2 / 3
    first = tensor((0.5 + 0.1) / 2, (third + 0.1) / 2, (third + 0.1) / 2, (0.3 + 0.6) / 2, (third + 0.1) / 2)
    assert torch.allclose(found_BI[0], first, atol=1e-12)
    assert torch.allclose(found_BI[1], tensor(0.1, 0.1, 0.1, 0.1, 0.6), atol=1e-12)
    assert torch.equal(consensus([NORTH, SOUTH], BOTH[[1]], 5), found_BI[[1]])


def test_the_same_company_twice_changes_nothing():
    assert torch.allclose(consensus([NORTH, NORTH], BOTH, 5), NORTH.spread(BOTH, 5), atol=1e-15)
    assert not torch.allclose(consensus([NORTH, SOUTH], BOTH, 5), NORTH.spread(BOTH, 5), atol=0.05)


def test_whole_lists_leave_nothing_to_spread():
    whole_HI = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    log_prob_HK, item_HK = whole_HI.log().sort(1, descending=True)
    assert torch.allclose(TopScores(item_HK, log_prob_HK).spread(torch.arange(3), 6), whole_HI, atol=1e-12)


def dense_task():
    return build_task(DOMAIN, DOMAIN.clients, ITEM_IDS, TOKENIZER, ROWS, True)


def own_probs(model, task):
    """(H, I) what the model says behind the histories."""
    with torch.no_grad():
        logit_HSV = model(*encode_histories(task, HISTORIES)).logits
    last_H = torch.tensor([len(row) for row in HISTORIES]) - 1
    return logit_HSV[torch.arange(4), last_H][:, task.trie.last_token_I].double().log_softmax(1).exp()


def test_the_loss_is_the_cross_entropy_and_still_where_the_model_is_the_target():
    task, model = dense_task(), build(torch.randn(40, 16, generator=torch.Generator().manual_seed(3))).eval()
    own_HI = own_probs(model, task)
    other_HI = torch.rand(4, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)
    for target_HI, is_still in ((own_HI, True), (other_HI, False)):
        (batch,) = soft_batches(task, HISTORIES, target_HI.__getitem__, 4, torch.Generator().manual_seed(2))
        loss = sequence_loss(model, batch)
        assert float(loss.detach()) == pytest.approx(float(-(target_HI * own_HI.log()).sum(1).mean()), rel=1e-5)
        model.zero_grad()
        loss.backward()
        size = sum(float(one.grad.abs().sum()) for one in model.parameters() if one.grad is not None)
        assert (size < 1e-3) == is_still


@pytest.mark.parametrize("templates", ["history", "compact"])
def test_what_an_id_ends_with_has_the_target_and_its_words_the_drawn_item(templates):
    task, model = task_of(templates), MODELS[templates]()
    sequences, item_H = [[3, 1], [5], [2, 8, 4]], [7, 0, 11]
    target_HI = torch.eye(12, dtype=torch.float64)[item_H]  # the drawn item is known
    (soft,) = soft_batches(task, sequences, target_HI.__getitem__, 3, torch.Generator().manual_seed(2))
    hard = {name: value for name, value in soft.items() if name != "target_probs"}
    assert loss_of(model, soft) == pytest.approx(loss_of(model, hard), rel=1e-5)
    even = {**soft, "target_probs": torch.full((3, 12), 1 / 12)}
    writing = loss_of(model, {name: value for name, value in hard.items() if name != "catalogue"})
    assert loss_of(model, even) > WRITING_WEIGHT * writing
    assert loss_of(model, even) != pytest.approx(loss_of(model, hard), rel=1e-3)


def test_drawn_items_follow_the_target():
    task = task_of("compact")
    target_HI = torch.zeros(1, 12, dtype=torch.float64)
    target_HI[0, [2, 9]] = tensor(0.25, 0.75)
    drawn = []
    for seed in range(200):
        (batch,) = soft_batches(task, [[5, 1]], target_HI.__getitem__, 8, torch.Generator().manual_seed(seed))
        (label_T,) = batch["labels"]
        drawn.append(task.item_ids.token_ids.index(label_T[label_T >= 0].tolist()))
    assert set(drawn) == {2, 9}
    assert 0.15 < drawn.count(2) / 200 < 0.35
    assert torch.equal(batch["input_ids"], encode_histories(task, [[5, 1]])[0])
