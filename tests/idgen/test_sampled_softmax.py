"""Sampled softmax and row-wise updates: what stands for a large catalogue in training, and what it stands for."""

import math

import pytest
import torch
from test_small_decoder import build
from tiny_tasks import make_domain, make_tokenizer

from idgen import candidates
from idgen.backbone_training import train_backbone
from idgen.backbones.family import every_nth_row, num_targets
from idgen.candidates import Candidates, candidates_of, with_candidates
from idgen.config import BackboneTraining, SampleConfig
from idgen.item_ids import ItemIds
from idgen.losses import sequence_loss
from idgen.optimizer import RowAdamW, clip_gradients, row_gradients
from idgen.samples import num_samples, train_batches
from idgen.synthetic import nearest_items
from idgen.tasks import build_task
from idgen.training import Execution

TOKENS = torch.arange(3, 9)
SHARE_V = torch.tensor([0, 0, 0, 0.3, 0.05, 0.1, 0.25, 0.1, 0.2])
DOMAIN = make_domain(num_items=40)
TOKENIZER = make_tokenizer([DOMAIN])
ITEM_IDS = ItemIds([str(i) for i in range(40)], [[1 + i] for i in range(40)], {})


def rows(*targets):
    """Rows of these targets behind an item 3."""
    width = max(map(len, targets))
    label_BS = torch.full((len(targets), 1 + width), -100)
    for row, found in enumerate(targets):
        label_BS[row, 1 : 1 + len(found)] = torch.tensor(found)
    return {"row_labels": label_BS, "input_ids": label_BS.clamp(min=3), "attention_mask": (label_BS >= -100).long()}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def row_gradient(touched, value_TD, num_rows):
    """What reading rows gives: a row that was read twice stands in it twice."""
    table = torch.zeros(num_rows, len(value_TD[0]), requires_grad=True)
    read = torch.nn.functional.embedding(torch.tensor(touched), table, sparse=True)
    (read * torch.as_tensor(value_TD)).sum().backward()
    return table.grad


def task_of(**settings):
    config = SampleConfig(templates="history", max_source_tokens=20, max_history=6, **settings)
    near = nearest_items(torch.randn(40, 5, generator=generator())) if settings.get("synthetic_share") else None
    return build_task(DOMAIN, DOMAIN.clients, ITEM_IDS, TOKENIZER, config, True, near)


def test_the_correction_is_the_number_that_one_works_out_by_hand():
    found = with_candidates(rows([4], [7, 8]), Candidates(TOKENS, SHARE_V, 0), generator())
    assert found["catalogue"].tolist() == [4, 7, 8]
    # row 0 sees what two targets of row 1 brought, row 1 what one target of row 0 did
    expected = [[-math.inf, -math.log(1 - 0.9**2), -math.log(1 - 0.8**2)], [-math.log(0.05), -math.inf, -math.inf]]
    torch.testing.assert_close(found["log_weights"], torch.tensor(expected))
    both = with_candidates(rows([4], [4]), Candidates(TOKENS, SHARE_V, 0), generator())
    torch.testing.assert_close(both["log_weights"], torch.full((2, 1), -math.log(0.05)))  # each has it of the other


@pytest.mark.parametrize("num_uniform", [0, 1, 4])
def test_every_item_stands_for_itself_in_the_mean(num_uniform):
    """So the sum over the catalogue and its gradient in every logit are those of the full softmax in the mean."""
    candidates, draws = Candidates(TOKENS, SHARE_V, num_uniform), generator(1)
    total_V, count = torch.zeros(9), 600
    for _ in range(count):
        others = torch.multinomial(SHARE_V, 3, replacement=True, generator=draws).tolist()
        found = with_candidates(rows([4, 6], *([one] for one in others)), candidates, draws)
        total_V[found["catalogue"]] += found["log_weights"][0].exp()
    # rows of its own say nothing of 4 and 6, which other rows bring as often as they should
    spread = 4 * (1 / SHARE_V[TOKENS] / 3 / count).sqrt()
    assert bool(((total_V[TOKENS] / count - 1).abs() < spread).all()), total_V / count


def test_all_items_drawn_are_the_full_softmax():
    model = build(torch.nn.functional.normalize(torch.randn(40, 16, generator=generator()), dim=1)).requires_grad_(True)
    table, token_I = model.get_input_embeddings().weight, torch.arange(1, 41)
    batch = rows([4, 9], [7], [30, 2, 4])
    full = sequence_loss(model, {**batch, "catalogue": token_I})
    full.backward()
    expected, table.grad = table.grad, None
    share_V = torch.full((41,), 1 / 40)
    loss = sequence_loss(model, with_candidates(batch, Candidates(token_I, share_V, 40), generator()))
    with row_gradients(model, True):
        sequence_loss(model, with_candidates(batch, Candidates(token_I, share_V, 40), generator())).backward()
    torch.testing.assert_close(loss, full)
    assert table.grad.is_sparse
    torch.testing.assert_close(table.grad.to_dense(), expected)


def test_a_loss_over_few_is_that_of_its_own_formula():
    model = build(torch.nn.functional.normalize(torch.randn(40, 16, generator=generator()), dim=1))
    batch = rows([4, 9], [7], [30, 2])
    found = with_candidates(batch, Candidates(torch.arange(1, 41), torch.full((41,), 1 / 40), 5), generator())
    logit_BSV, losses = model(input_ids=batch["input_ids"]).logits, []
    for row, place, target in [(0, 1, 4), (0, 2, 9), (1, 1, 7), (2, 1, 30), (2, 2, 2)]:
        logit_C = logit_BSV[row, place - 1][found["catalogue"]] + found["log_weights"][row]
        own = logit_BSV[row, place - 1, target]
        others = logit_C[found["catalogue"] != target].exp().sum()
        losses.append((own.exp() + others).log() - own)
    torch.testing.assert_close(sequence_loss(model, found), torch.stack(losses).mean())
    halves = [every_nth_row(found, first, 2) for first in range(2)]
    parts = [sequence_loss(model, half) * num_targets(half) for half in halves]
    torch.testing.assert_close(sum(parts) / 5, torch.stack(losses).mean())


def test_shares_are_those_of_the_targets_of_epochs(monkeypatch):
    monkeypatch.setattr(candidates, "SAMPLED_ABOVE", 39)
    task = task_of(synthetic_share=0.3)
    assert candidates_of(task, torch.arange(1, 40)) is None  # not above
    found, num_V = candidates_of(task, torch.arange(1, 41)), torch.zeros(41)
    for seed in range(300):
        for batch in train_batches(task, num_samples(task), generator(seed)):
            label_BS = batch["row_labels"]
            num_V += torch.bincount(label_BS[label_BS != -100], minlength=41)
    torch.testing.assert_close(found.share_V, num_V / num_V.sum(), atol=0.004, rtol=0)
    assert float((found.share_V - 1 / 40).abs().max()) > 0.02


def test_rows_move_as_adam_without_a_first_moment_moves_the_table():
    start_VD = torch.randn(6, 3, generator=generator())
    by_rows, dense, bias = (torch.nn.Parameter(start_VD.clone()) for _ in range(3))
    rate = {"lr": 0.1, "weight_decay": 0.0, "eps": 1e-4}
    ours = RowAdamW([{"params": [by_rows], **rate}], betas=(0.9, 0.99))
    theirs = torch.optim.AdamW([{"params": [dense], **rate}], betas=(0.0, 0.99))
    for step, touched in enumerate([[0, 2], [1, 2, 2], [5], [2, 0], [0, 1, 2, 3, 4, 5]]):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        by_rows.grad = row_gradient(touched, torch.randn(len(touched), 3, generator=generator(step)), 6)
        dense.grad = by_rows.grad.to_dense()
        ours.step()
        theirs.step()
        torch.testing.assert_close(by_rows, dense, rtol=1e-5, atol=1e-6)
    assert not torch.equal(by_rows, bias)


def test_other_parameters_move_as_they_always_did():
    pair = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    table = torch.nn.Parameter(torch.ones(5, 2))
    ours, theirs = RowAdamW([pair[0], table], fused=True), torch.optim.AdamW([pair[1]], fused=True)
    for step in range(3):
        table.grad = row_gradient([step], [[1.0, 1.0]], 5)
        pair[0].grad = pair[1].grad = torch.randn(4, 2, generator=generator(step))
        ours.step()
        theirs.step()
    assert torch.equal(*pair)
    assert table[:3].lt(1).all()
    assert table[3:].eq(1).all()  # no decay either


def test_gradients_of_rows_are_clipped_with_all_others():
    table, other = torch.nn.Parameter(torch.zeros(5, 2)), torch.nn.Parameter(torch.zeros(3))
    table.grad = row_gradient([4, 1, 4], [[1.0, 1], [2, 0], [2, 2]], 5)  # row 4 twice, 3 in all
    other.grad = torch.tensor([1.0, 1.0, -1.0])
    clip_gradients([table, other, torch.nn.Parameter(torch.zeros(1))], 2.5)
    torch.testing.assert_close(other.grad, torch.tensor([0.5, 0.5, -0.5]))  # the norm is 5
    torch.testing.assert_close(table.grad.to_dense()[[1, 4]], torch.tensor([[1.0, 0], [1.5, 1.5]]))


def test_pretraining_of_a_large_table_is_sampled_and_draws_by_its_seed(monkeypatch):
    monkeypatch.setattr(candidates, "NUM_UNIFORM", 4)
    found = {}
    for name, above in (("full", 100), ("sampled", 20), ("again", 20)):
        monkeypatch.setattr(candidates, "SAMPLED_ABOVE", above)
        model = build(torch.nn.functional.normalize(torch.randn(40, 16, generator=generator()), dim=1))
        start = model.get_input_embeddings().weight.detach().clone()
        config = BackboneTraining(batch_size=3, max_steps=2, table_lr_multiplier=2.0)
        train_backbone(model, task_of(), config, Execution(5))
        found[name] = model.get_input_embeddings().weight.detach()
    assert torch.equal(found["sampled"], found["again"])
    assert not torch.allclose(found["sampled"], found["full"])
    still = (found["sampled"] == start).all(1)
    assert 0 < int(still.sum()) < 40
    assert not (found["full"] == start)[1:].all(1).any()
