"""Local training whose catalogue is sampled: what moves, what travels, and what rows give that tables give too."""

from contextlib import nullcontext

import pytest
import torch
from test_small_decoder import build
from tiny_tasks import make_domain, make_tokenizer

from fedecider.federation.method import Block
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.methods import METHODS, local_training
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining
from fedecider.methods.local_training import train_locally
from fedecider.methods.rows import TABLE
from fedecider.models.adapters import attach_lora
from fedecider.models.client_model import Base
from fedecider.models.config import LoraSettings
from idgen import candidates
from idgen.config import SampleConfig
from idgen.item_ids import ItemIds
from idgen.optimizer import RowAdamW
from idgen.tasks import build_task

DOMAINS = [make_domain(name, num_items=20, seed=seed) for seed, name in enumerate(("hats", "toys"))]
TOKENIZER = make_tokenizer(DOMAINS)
CONFIG = SampleConfig(templates="history", max_source_tokens=10, max_history=6)


@pytest.fixture(autouse=True)
def _sampled(monkeypatch):
    monkeypatch.setattr(candidates, "SAMPLED_ABOVE", 10)
    monkeypatch.setattr(candidates, "NUM_UNIFORM", 4)


def recommender(**training):
    vector_ID = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    model = attach_lora(build(torch.nn.functional.normalize(vector_ID, dim=1)), LoraSettings(16, ("table",)))
    tasks = [
        build_task(
            domain,
            domain.clients,
            ItemIds([""] * 20, [[first + item] for item in range(20)], {}),
            TOKENIZER,
            CONFIG,
            True,
        )
        for domain, first in zip(DOMAINS, (1, 21), strict=True)
    ]
    settings = LocalTraining(batch_size=3, local_epochs=2, learning_rate=1e-2, **training)
    return client_models(Base(model, TOKENIZER), tasks, settings, seed=4)


def trained(client=0, **training):
    made = recommender(**training)
    return train_locally(made, client, 1, made.start).pair


def test_a_sample_moves_own_rows_and_the_same_ones_every_time():
    moved = trained()[TABLE].any(1)
    assert moved.any()
    assert not moved[21:].any()
    assert all(torch.equal(one, trained()[name]) for name, one in trained().items())


def without_first(groups):
    """AdamW's groups, the table without a first moment."""
    return [{**group, **({"betas": (0.0, 0.999)} if group["params"][0].shape[0] == 41 else {})} for group in groups]


def test_rows_give_what_whole_tables_give(monkeypatch):
    by_rows = trained(output_lr_multiplier=5.0)
    plain = RowAdamW.__init__
    monkeypatch.setattr(local_training, "row_gradients", lambda model, wanted: nullcontext())
    monkeypatch.setattr(RowAdamW, "__init__", lambda self, groups, **rest: plain(self, without_first(groups), **rest))
    dense = trained(output_lr_multiplier=5.0)
    for name, one in by_rows.items():
        torch.testing.assert_close(one, dense[name], rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("name", ["local", "fedecider", "fedavg", "fedprox"])
def test_methods_train_on_samples(name):
    made = recommender()
    method = METHODS[name].build(made, METHODS[name].config())
    state = run_rounds(
        method,
        Clients(
            [Block(clients, None) for clients in torch.arange(2).split(1)],
            lambda positions: [{"ndcg@10": float((place_U < 5).float().mean())} for place_U in positions],
        ),
        RoundSettings(num_rounds=2, seed=0),
    )
    tensors = {**state.server, **state.local}
    assert all(bool(torch.isfinite(one).all()) for one in tensors.values() if one.is_floating_point())
    assert any(bool(one.any()) for key, one in tensors.items() if key.endswith("lora_b"))
