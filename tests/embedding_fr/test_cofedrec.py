"""CoFedRec: the elbow, the group and the contrastive term by hand; its degenerate forms; what travels."""

import math

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block, rank_users
from embedding_fr.methods import cofedrec
from embedding_fr.methods.cofedrec import CofedrecConfig, contrastive_loss, elbow, grouped
from embedding_fr.methods.pfedrec import linear_logits
from fedecider.federation.streams import stream


@pytest.mark.parametrize(
    ("falling", "place"),
    [
        ([10.0, 9.0, 8.0, 1.0, 0.0], 2),  # distances 1.5, 3, 1.5 over the same root
        ([10.0, 2.0, 1.0, 0.5, 0.0], 1),
        ([5.0], 0),
        ([5.0, 1.0], 0),
        ([3.0, 3.0, 3.0], 0),
        ([3.0, 3.0, 3.0, 0.0], 2),
        ([3.0, 2.0, 1.0, 0.0], 0),
        ([0.3, 0.2, 0.1], 0),  # a straight line, to rounding
    ],
)
def test_the_elbow_by_hand(falling, place):
    assert elbow(torch.tensor(falling, dtype=torch.float64)) == place


ROWS = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]], dtype=torch.float64)
LABELS = torch.tensor([[0, 0, 1]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 1.0}, 4.0 * (math.log(math.e + 1.0) - 1.0) / 3.0),
        ({"temperature": 0.5}, 2.0 * (math.log(math.exp(2.0) + 1.0) - 2.0) / 3.0),
    ],
)
def test_the_contrastive_term_by_hand(config, expected):
    config = CofedrecConfig(**config)
    assert contrastive_loss(ROWS, LABELS, config).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("at_once", [1, 128])
def test_the_group_is_like_the_core_user_in_one_category(monkeypatch, at_once):
    """All agree on item 1, which is another category; on item 0 users 0, 1, 2 point one way, 3 and 4 another one."""
    monkeypatch.setattr(cofedrec, "ROWS", at_once)
    tables = torch.zeros(5, 2, 2)
    tables[:, 1, 0] = 1.0
    tables[:3, 0, 0], tables[3:, 0, 1] = 2.0, 5.0
    labels, found = torch.tensor([0, 1]), {}
    for round in range(1, 60):
        category = int(torch.randint(2, (1,), generator=stream(0, "category", round)))
        group = grouped(tables, torch.arange(5), labels, 0, CofedrecConfig(), round).tolist()
        found.setdefault((category, group[0]), set()).add(frozenset(group))
    for core in range(5):
        alike = {0, 1, 2} if core < 3 else {0, 3, 4}  # of 1, 1, 0, 0, 0 the corner is the first 0, and is in
        assert found[0, core] == {frozenset(alike)}
        assert found[1, core] == {frozenset({core})}  # no elbow in a straight line: nobody but the core user


def test_whom_the_other_groups_take():
    tables = torch.randn(7, 4, 3, generator=stream(0, "tables"))
    labels, present, differs = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 4, 5, 6]), 0
    for round in range(1, 30):
        similar, random, everyone, core = (
            grouped(tables, present, labels, 0, CofedrecConfig(group=group), round).tolist()
            for group in ("similar", "random", "all", "core")
        )
        assert core == similar[:1] == random[:1] == everyone[:1]
        assert len(set(random)) == len(random) == len(similar)
        assert sorted(everyone) == present.tolist()
        differs += set(random) != set(similar)
    assert differs > 5


def test_the_group_gets_its_mean_and_the_others_keep_their_own():
    method = toy_method("cofedrec", num_categories=3)
    state, _ = run(method, rounds=1)
    uploaded, after = state.local["personal_table"], state.server["item_table"]
    same = torch.tensor([torch.equal(one, other) for one, other in zip(after, uploaded, strict=True)])
    group = (~same).nonzero()[:, 0]
    assert len(group) >= 2
    assert same.any()
    torch.testing.assert_close(after[group], uploaded[group].mean(0).expand(len(group), -1, -1), rtol=1e-4, atol=1e-4)
    assert state.server["category"].unique().tolist() == [0, 1, 2]


def test_with_all_in_the_group_and_no_contrast_it_is_pfedrec():
    """Of the public code: SGD, and its rate of tables."""
    training = toy_training("cofedrec")
    found, _ = run(toy_method("cofedrec", training=training, group="all", contrast_weight=0.0))
    expected, _ = run(toy_method("pfedrec", training=training, variant="code"))
    for table in found.server["item_table"]:
        torch.testing.assert_close(table, expected.server["item_table"], rtol=1e-3, atol=1e-3)
    for name, tensor in expected.local.items():
        torch.testing.assert_close(found.local[name], tensor, rtol=1e-3, atol=1e-3)


def test_with_the_core_alone_nobody_learns_from_anybody():
    from embedding_fr.local_only import local_only

    alone, _ = run(toy_method("cofedrec", group="core", contrast_weight=0.0))
    federation = toy_federation()
    off, _ = run(local_only(toy_method("cofedrec", federation), federation))
    torch.testing.assert_close(alone.server["item_table"], off.local["kept.item_table"], rtol=1e-4, atol=1e-4)


def test_contrast_begins_in_the_second_round():
    states = {}
    for rounds in (1, 2):
        states[rounds] = [
            run(toy_method("cofedrec", num_categories=3, contrast_weight=weight), rounds=rounds)[0].server["item_table"]
            for weight in (0.0, 0.05)
        ]
    assert torch.equal(*states[1])
    assert not torch.equal(*states[2])


def test_variants_use_the_table_from_before_and_after_the_aggregation():
    federation, population = toy_federation(), toy_population()
    method = toy_method("cofedrec")
    assert method.variants == ("personal", "group")
    state, _ = run(method, population, rounds=1)
    block = make_block(population, [6, 2, 0, 5, 4, 3, 1])
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    server = {**state.server, "item_table": state.server["item_table"].flip(0)}
    download = method.broadcast(2, server, block.clients)
    found = {}
    for variant, table in (("personal", own["personal_table"]), ("group", server["item_table"][block.clients])):
        found[variant] = torch.cat(method.positions(variant, download, own, block, "valid"))
        score_CI = linear_logits({**own, "item_table": table}, None)
        assert torch.equal(found[variant], torch.cat(rank_users(score_CI, block.data, "valid", federation.protocol)))
    assert not torch.equal(found["personal"], found["group"])
