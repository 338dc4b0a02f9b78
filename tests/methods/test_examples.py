"""Examples of the report page: the drawn users, and the same places as the evaluation gives."""

import pytest
import torch

from fedecider.cross_silo.examples import example_users, examples_of
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining
from fedecider.models.adapters import attach_lora
from fedecider.models.client_model import Base
from fedecider.models.config import LoraSettings
from fedecider.models.ensemble import Places
from idgen.backbone import build_backbone
from idgen.config import BackboneConfig, SampleConfig
from idgen.item_ids import keyword_item_ids
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig
from idgen.tasks import build_task
from idgen.tokenizer import train_tokenizer

COLOURS = ("red", "blue", "green", "amber", "grey")
THINGS = ("lantern", "harbour", "castle")


@pytest.fixture(scope="module")
def domain():
    titles = [f"{COLOURS[item % 5]} {THINGS[item % 3]} {item}" for item in range(15)]
    lengths = [5, 9, 4, 7, 12]
    sequences = [[(user + 2 * place) % 15 for place in range(length)] for user, length in enumerate(lengths)]
    users = [f"secret{user}" for user in range(5)]
    keys = [f"k{item:02d}" for item in range(15)]
    texts = [f"title: {title}" for title in titles]
    return Domain(
        "crime", Catalogue("crime", keys, titles, texts), Events(users, sequences, None), Events([], [], None), {}
    )


def recommender_of(domain, drop_seen, num_beams):
    tokenizer = train_tokenizer(domain.item_texts, 300)
    ids = keyword_item_ids(domain.item_keys, domain.item_texts, tokenizer)
    config = SampleConfig(templates="compact")
    backbone = BackboneConfig(d_model=16, num_layers=1)
    model = attach_lora(build_backbone(backbone, tokenizer, seed=1), LoraSettings(rank=2))
    tasks = [build_task(domain, domain.clients, ids, tokenizer, config, hold_out=True)]
    context = RankingContext(RankingConfig(num_beams=num_beams, eval_batch_size=2), drop_seen)
    return client_models(Base(model, tokenizer, context), tasks, LocalTraining(), seed=4)


@pytest.mark.parametrize(("protocol", "num_beams"), [("strict", 15), ("strict/keep_seen", 15), ("strict", 3)])
def test_places_are_those_of_the_evaluation(domain, protocol, num_beams):
    model = recommender_of(domain, protocol == "strict", num_beams).student("crime")
    examples = examples_of(model, domain)
    users = example_users(5, 4, "crime").tolist()
    place_U = model.positions("test")[users].tolist()
    assert [example["position"] for example in examples] == [None if p == NOT_RANKED else p for p in place_U]
    for user, example in zip(users, examples, strict=True):
        titles = [domain.titles[item] for item in domain.clients.sequences[user]]
        assert example["history"] == titles[:-1][-10:]
        assert example["num_history"] == len(titles) - 1
        assert example["held_out"] == titles[-1]
        marks = [item["held_out"] for item in example["recommended"]]
        assert marks == [place == example["position"] for place in range(len(marks))]
        assert "secret" not in str(example)
        if protocol == "strict":
            assert not {item["title"] for item in example["recommended"]} & set(titles[:-1])


def test_where_an_ensemble_recommends_the_examples_are_its_lists(domain):
    model = recommender_of(domain, True, 15).student("crime")
    last_U = torch.tensor([sequence[-1] for sequence in domain.clients.sequences])
    ten_UK = torch.stack([torch.arange(10), *(torch.arange(10).roll(user) for user in range(1, 5))])
    place_U = torch.tensor([0.0, 3.5, 1.0, float(NOT_RANKED), 2.0], dtype=torch.float64)
    examples = examples_of(model, domain, Places(place_U, place_U, place_U, ten_UK))
    for user, example in zip(example_users(5, 4, "crime").tolist(), examples, strict=True):
        history = domain.clients.sequences[user][:-1]
        shown = [item for item in ten_UK[user].tolist() if item not in history][:10]
        assert [item["title"] for item in example["recommended"]] == [domain.titles[item] for item in shown]
        assert [item["held_out"] for item in example["recommended"]] == [item == last_U[user] for item in shown]
        assert example["position"] == [0, 3, 1, None, 2][user]
