"""The recommender over real tasks: batches, positions through constrained search, all of it under a fusion."""

from dataclasses import replace

import pytest
import torch
from exact_scores import score_catalogue
from toy_recommender import on, run, toy_recommender

from fedecider.bounds import Diverged
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.federation.record import left_out, upload_notes
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining, UserPrivacy, WeightingConfig
from fedecider.methods.fedavg import fedavg
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import attach_lora, fusion, initial_adapters, stack_trees
from fedecider.models.client_model import Base
from fedecider.models.config import LoraSettings
from idgen.backbone import build_backbone
from idgen.backbones.families import unwrap
from idgen.config import BackboneConfig, SampleConfig
from idgen.item_ids import keyword_item_ids
from idgen.ranking import RankingContext, rank_task
from idgen.ranking_config import RankingConfig
from idgen.samples import eval_batches
from idgen.tasks import build_task
from idgen.tokenizer import train_tokenizer
from idgen.trie import Trie

WORDS = ["red", "blue", "green", "amber", "grey"]
THINGS = ["lantern", "harbour", "castle"]


def make_domain(name: str, num_items: int, lengths: list[int], step: int) -> Domain:
    """Users walk through the catalogue with a constant step, from different starts."""
    titles = [f"{WORDS[item % 5]} {THINGS[item % 3]}" for item in range(num_items)]
    sequences = [[(user + step * place) % num_items for place in range(length)] for user, length in enumerate(lengths)]
    users = [f"{name}{user}" for user in range(len(lengths))]
    texts = [f"title: {title}" for title in titles]
    keys = [f"{name}{item:02d}" for item in range(num_items)]
    return Domain(name, Catalogue(name, keys, titles, texts), Events(users, sequences, None), Events([], [], None), {})


@pytest.fixture(scope="module")
def parts():
    domains = [make_domain("crime", 15, [5, 9, 4, 7], 2), make_domain("comics", 11, [6, 4, 8], 3)]
    tokenizer = train_tokenizer([text for domain in domains for text in domain.item_texts], 300)
    tasks = []
    for domain in domains:
        ids = keyword_item_ids(domain.item_keys, domain.item_texts, tokenizer)
        config = SampleConfig(templates="compact")
        tasks.append(build_task(domain, domain.clients, ids, tokenizer, config, hold_out=True))
    return tokenizer, tasks


def recommender_of(parts, drop_seen=True, targets=("attention",), **ranking):
    tokenizer, tasks = parts
    config = BackboneConfig(d_model=16, num_layers=1)
    model = attach_lora(build_backbone(config, tokenizer, seed=1), LoraSettings(rank=2, targets=targets))
    training = LocalTraining(local_epochs=1, batch_size=8, learning_rate=1e-2)
    context = RankingContext(RankingConfig(**ranking), drop_seen)
    return client_models(Base(model, tokenizer, context), tasks, training, seed=0)


def strong_stack(models, clients: int):
    generator = torch.Generator().manual_seed(4)
    start = stack_trees([initial_adapters(models.shapes, client) for client in range(clients)])
    return {key: 0.5 * torch.randn(tensor.shape, generator=generator) for key, tensor in start.items()}


def exhaustive(model, split: str, drop_seen: bool):
    """Positions by scoring the whole catalogue and ranking it as the baselines are ranked."""
    task, held = model.client.task, model.base.holding(model.adapters)
    score_UI = torch.zeros(len(task.sequences), len(task.trie), dtype=torch.float64)
    for user_B, input_ids, attention_mask, _ in eval_batches(task, split, 3):
        score_UI[user_B] = score_catalogue(held, input_ids, attention_mask, task.trie).double()
    protocol = get_protocol("strict" if drop_seen else "strict/keep_seen")
    return rank_held_out(lambda user_B: score_UI[user_B], task.sequences, len(task.trie), split, protocol).long()


@pytest.mark.parametrize("drop_seen", [True, False])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_positions_are_those_of_exhaustive_scoring_in_user_order(parts, split, drop_seen):
    recommender = recommender_of(parts, num_beams=15, eval_batch_size=2, drop_seen=drop_seen)
    fused = fusion(strong_stack(recommender, 2), 0, torch.tensor([1.0, -0.7]))
    models = [recommender.model(client, fused) for client in range(2)]
    found = [model.positions(split) for model in models]
    for model, place_U in zip(models, found, strict=True):
        assert torch.equal(place_U, exhaustive(model, split, drop_seen))
    assert len({*found[0].tolist(), *found[1].tolist()}) > 2


def test_validation_takes_a_fixed_sample_and_test_all_users(parts):
    both = recommender_of(parts, num_beams=15), recommender_of(parts, num_beams=15, num_eval_users=2)
    whole, sampled = (models.model(0, take_row(strong_stack(models, 1), 0)) for models in both)
    everybody, some = whole.positions("valid"), sampled.positions("valid")
    assert len(some) == 2
    assert torch.equal(some, sampled.positions("valid"))
    assert set(some.tolist()) <= set(everybody.tolist())
    assert torch.equal(sampled.positions("test"), whole.positions("test"))


def test_layers_that_are_computed_again_train_the_same_adapters(parts):
    found, calls = [], []
    for wanted in (False, True):
        torch.manual_seed(0)  # of the adapters
        recommender = recommender_of(parts)
        recommender = on(recommender, checkpointing=wanted)
        block = unwrap(recommender.base.model).decoder.block[0].layer[-1]
        handle = block.register_forward_pre_hook(lambda *_: calls.append(1))
        found.append(train_locally(recommender, 0, 1, recommender.start))
        handle.remove()
        calls.append(0)
    steps = found[0].log["steps"]
    assert calls == [1] * steps + [0] + [1] * 2 * steps + [0]
    assert found[0].log["loss"] == pytest.approx(found[1].log["loss"], abs=1e-6)
    assert all(torch.allclose(found[0].pair[name], value, atol=1e-4) for name, value in found[1].pair.items())


def test_rows_of_the_output_have_a_rate_of_their_own(parts):
    """B holds a row for every token; A, which all of them share, has the rate of the layers."""
    moved = {}
    for rate in (1.0, 8.0):
        recommender = recommender_of(parts, targets=("attention", "output"))
        training = replace(recommender.training, learning_rate=1e-3, output_lr_multiplier=rate)
        start = recommender.start
        pair = train_locally(recommender._replace(training=training), 0, 1, start).pair
        moved[rate] = {name: float((value - start[name]).abs().max()) for name, value in pair.items()}
    steps = 3
    for name, by_rate in moved[8.0].items():
        most = (8e-3 if name == "lm_head.lora_b" else 1e-3) * steps
        assert by_rate < 1.1 * most, name  # AdamW moves each by its rate
        assert by_rate > 0.3 * most or "lora_a" in name, name  # A has no gradient before B has moved
    assert moved[1.0]["lm_head.lora_b"] < 1.1e-3 * steps


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_rates_fall_over_all_epochs_of_a_round(parts, schedule, monkeypatch):
    """Of every group: layers, rows of the output and fusion weights."""
    seen = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        seen.append([group["lr"] for group in self.param_groups])
        assert [group["eps"] for group in self.param_groups] == [1e-4, 1e-4, 1e-8]  # the weights keep AdamW's own
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    recommender = recommender_of(parts, targets=("attention", "output"))
    training = replace(recommender.training, schedule=schedule, local_epochs=2, output_lr_multiplier=3.0)
    fused = fusion(strong_stack(recommender, 2), 0, torch.ones(2))
    trained = train_locally(recommender._replace(training=training), 0, 1, fused, alpha_learning_rate=0.5)
    progress = torch.arange(len(seen)) / len(seen)
    shapes = {
        "constant": torch.ones(len(seen)),
        "cosine": (1 + (torch.pi * progress).cos()) / 2,
    }
    assert len(seen) == trained.log["steps"] == 4
    rates = {tuple(round(rate / full, 9) for rate, full in zip(row, seen[0], strict=True)) for row in seen}
    assert len(rates) == (1 if schedule == "constant" else len(seen))
    assert sorted(set(seen[0])) == pytest.approx([1e-2, 3e-2, 0.5])
    factor = torch.tensor([row[0] / seen[0][0] for row in seen])
    torch.testing.assert_close(factor, shapes[schedule], rtol=1e-5, atol=1e-6)


def test_rates_fall_from_round_to_round(parts, monkeypatch):
    """Of every group, by the same factor, and not before the second round."""
    seen = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        seen.append([group["lr"] for group in self.param_groups])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    recommender = recommender_of(parts, targets=("attention", "output"))
    training = replace(recommender.training, lr_decay_per_round=0.5, local_epochs=1, output_lr_multiplier=3.0)
    fused = fusion(strong_stack(recommender, 2), 0, torch.ones(2))
    for round in (1, 3):
        train_locally(recommender._replace(training=training), 0, round, fused, alpha_learning_rate=0.5)
    first, third = (seen[at] for at in (0, -1))
    assert sorted(first) == pytest.approx([1e-2, 3e-2, 0.5])
    assert third == pytest.approx([rate / 4 for rate in first])


def test_processes_that_share_a_client_rank_its_users_between_them(parts):
    model = recommender_of(parts, num_beams=15, eval_batch_size=1).student("crime")
    whole, context = model.positions("test"), model.base.context
    shares = [rank_task(model.base.model, model.client.task, "test", None, context, (index, 3)) for index in range(3)]
    assert sorted(int((share != NOT_RANKED).sum()) for share in shares) == [1, 1, 2]  # four users
    assert torch.equal(torch.stack(shares).amin(0), whole)


@pytest.mark.parametrize("drop_seen", [True, False])
def test_ids_of_one_token_are_ranked_exactly_whatever_the_beams(parts, drop_seen):
    model = recommender_of(parts, drop_seen, num_beams=3, eval_batch_size=3).student("crime")
    held, one_token = model.base.holding(model.adapters), Trie.build([[7 + 2 * item] for item in range(15)], None)
    task = model.client.task._replace(trie=one_token)
    place_U = rank_task(held, task, "test", None, model.base.context)
    for users, input_ids, mask, targets in eval_batches(task, "test", 2):
        scores = score_catalogue(held, input_ids, mask, one_token)
        for user, score_I, target in zip(users.tolist(), scores, targets.tolist(), strict=True):
            had = set(task.sequences[user][:-1]) if drop_seen else set()
            better = [item for item in range(15) if score_I[item] > score_I[target] and item not in had]
            assert place_U[user] == (NOT_RANKED if target in had else len(better))
    assert float(place_U.min()) < NOT_RANKED
    assert float(place_U[place_U < NOT_RANKED].max()) >= 3  # no beam had come that far


def test_a_training_whose_loss_stays_far_above_its_start_is_no_result(parts, monkeypatch):
    monkeypatch.setattr("idgen.loss_guard.FAR_ABOVE", 0.1)  # far above a tenth
    recommender = recommender_of(parts)
    recommender = recommender._replace(training=replace(recommender.training, local_epochs=30))
    trained = train_locally(recommender, 0, 1, recommender.start)
    assert trained.log["finite"] is False
    assert trained.log["diverged"].startswith("diverged at step ")
    assert "learning_rate 0.01: the loss is" in trained.log["diverged"]
    assert all(tensor.isnan().all() for tensor in trained.pair.values())
    private = replace(recommender.training, user_privacy=UserPrivacy(clip=1.0))  # losses must not steer it
    assert train_locally(recommender._replace(training=private), 0, 1, recommender.start).finite


def test_the_company_whose_training_diverges_is_left_out_and_named(monkeypatch):
    recommender = toy_recommender()
    steps = [record["steps"] for record in run(fedavg(recommender, WeightingConfig()), 3, 1)[1][0]["clients"]]
    longest = steps.index(max(steps))
    assert steps.count(max(steps)) == 1

    class Guard:
        def step(self, loss, step, is_last, learning_rate):
            if step == max(steps):
                raise Diverged(f"diverged at step {step}, learning_rate {learning_rate:g}: the loss is 9")

    monkeypatch.setattr("fedecider.methods.local_training.LossGuard", Guard)
    state, records = run(fedavg(recommender, WeightingConfig()), 3, 2)
    assert all(bool(tensor.isfinite().all()) for tensor in [*state.server.values(), *state.local.values()])
    (note,) = upload_notes(records[:1], recommender.names)
    assert f"{recommender.names[longest]} in round 1 (diverged at step {max(steps)}, learning_rate" in note
    assert [one["client"] for one in left_out(records)] == [longest, longest]
