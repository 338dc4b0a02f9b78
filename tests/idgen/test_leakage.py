"""No leakage on the path of a run: IDs as pre-training assigns them, tasks as the clients train and are ranked on.

The held-out items of all clients are replaced; whatever is written, shown or trained on before they are due must stay
the same to the byte. The ID generator is a stub that repeats what it was shown, so that nothing is hidden by what
a trained one would leave out. Decoder-only models are begun as a run begins them, up to their first step.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from exact_scores import score_catalogue
from slow import fast_where
from tiny_causal import byte_level_tokenizer, save_decoder
from tiny_t5 import tiny_t5
from tiny_tasks import make_domain

from fedecider.cross_silo import base_stages, item_ids
from fedecider.cross_silo.item_ids import Given, assign_ids
from fedecider.cross_silo.prepare import load_data
from fedecider.cross_silo.settings import PretrainConfig, RunConfig
from fedecider.data.domain import Domain, Events, check_public_disjoint
from fedecider.data.sample import sample_domains
from fedecider.data.silos import share_out
from idgen.config import BackboneConfig, SampleConfig
from idgen.decode import constrained_beam_search
from idgen.samples import eval_batches, train_batches

NUM_CLIENTS, NUM_PUBLIC = 14, 5


class Echo:
    """Stands for the ID generator: repeats the text that it was given."""

    @staticmethod
    def candidates(texts):
        return [[text, *(f"{text} {number}" for number in range(9))] for text in texts]


ECHO = Echo()


def few(events: Events, count: int) -> Events:
    """Some users, three of them with 3, 4 and 5 events: there a held-out item would change the length of the prefix."""
    cut = [sequence[-3 - user :] if user < 3 else sequence for user, sequence in enumerate(events.sequences[:count])]
    return Events(events.users[:count], cut, None)


DOMAINS = {
    name: dataclasses.replace(domain, clients=few(domain.clients, NUM_CLIENTS), public=few(domain.public, NUM_PUBLIC))
    for name, domain in sample_domains(["crime", "children"]).items()
}


def fewer_items(domain: Domain, count: int) -> Domain:
    """The first items alone; the others are renumbered to them."""
    clients, public = (
        events._replace(sequences=[[item % count for item in sequence] for sequence in events.sequences])
        for events in (domain.clients, domain.public)
    )
    catalogue = domain.catalogue.part(domain.name, range(count))
    return dataclasses.replace(domain, clients=clients, public=public, catalogue=catalogue)


FEW_ITEMS = {name: fewer_items(domain, 60) for name, domain in DOMAINS.items()}


def replaced(domain: Domain, num_last: int) -> Domain:
    """Every client's last items, each exchanged for another one."""
    size = len(domain.item_keys)
    sequences = [
        sequence[:-num_last] + [(item + 1 + 7 * user) % size for item in sequence[-num_last:]]
        for user, sequence in enumerate(domain.clients.sequences)
    ]
    for old, new in zip(domain.clients.sequences, sequences, strict=True):
        assert all(a != b for a, b in zip(old[-num_last:], new[-num_last:], strict=True))
    return dataclasses.replace(domain, clients=domain.clients._replace(sequences=sequences))


SENTENCES = PretrainConfig(ids="keywords", samples=SampleConfig(item_dropout=0.1, pairs=True))


class Made:
    """What a run makes of the domains, as bytes and batches that can be compared."""

    def __init__(self, domains, config, tokenizer, ids):
        self.vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
        self.ids = json.dumps({name: one.items._asdict() for name, one in ids.items()})
        self.longest_id = max(len(tokens) for one in ids.values() for tokens in one.items.token_ids)
        tasks = item_ids.client_tasks(domains, ids, tokenizer, config)
        self.train = [rows(train_batches(task, 8, torch.Generator().manual_seed(3))) for task in tasks]
        self.mixed = rows(train_batches(tasks, 8, torch.Generator().manual_seed(4)))
        public = item_ids.public_tasks(domains, ids, tokenizer, config)
        self.public = rows(train_batches(public, 8, torch.Generator().manual_seed(5)))
        self.inputs, self.targets = {}, {}
        for split in ("valid", "test"):
            batches = [(task.name, *batch) for task in tasks for batch in eval_batches(task, split, 6)]
            self.inputs[split] = [[part.tolist() for part in batch[1:4]] for batch in batches]
            self.targets[split] = {
                (name, user): item
                for name, user_B, _, _, target_B in batches
                for user, item in zip(user_B.tolist(), target_B.tolist(), strict=True)
            }


def made(domains, generator) -> Made:
    """For a T5."""
    tokenizer = base_stages._tokenizer(SENTENCES, {name: one.catalogue for name, one in domains.items()}, {})
    ids = assign_ids(SENTENCES, domains, tokenizer, generator, Given(), {}, True)
    return Made(domains, SENTENCES, tokenizer, ids)


def same_before_due(before: Made, after: Made, num_last: int) -> None:
    assert before.vocabulary == after.vocabulary
    assert before.ids == after.ids
    assert before.train == after.train
    assert before.mixed == after.mixed
    assert before.public == after.public
    assert before.inputs["valid"] == after.inputs["valid"]
    # The validation item is part of the test input, the test item is part of none.
    assert (before.inputs["test"] == after.inputs["test"]) is (num_last == 1)
    assert (before.targets["valid"] == after.targets["valid"]) is (num_last == 1)
    assert before.targets["test"].keys() == after.targets["test"].keys()
    assert all(item != after.targets["test"][user] for user, item in before.targets["test"].items())


def rows(batches) -> list:
    return [{key: tensor.tolist() for key, tensor in batch.items()} for batch in batches]


@pytest.mark.parametrize("num_last", [1, 2])
@pytest.mark.parametrize("generator", [None, ECHO])
def test_held_out_items_reach_nothing_before_they_are_due(generator, num_last):
    changed = {name: replaced(domain, num_last) for name, domain in DOMAINS.items()}
    same_before_due(made(DOMAINS, generator), made(changed, generator), num_last)


def with_item(domains: dict[str, Domain], place: int) -> dict[str, Domain]:
    """Another item at one place of every client of crime."""
    domain = domains["crime"]
    sequences = [list(sequence) for sequence in domain.clients.sequences]
    for sequence in sequences:
        sequence[place] = (sequence[place] + 5) % len(domain.item_keys)
    return {**domains, "crime": dataclasses.replace(domain, clients=domain.clients._replace(sequences=sequences))}


def test_the_check_above_would_see_an_item_that_is_shown():
    before, after = made(DOMAINS, ECHO), made(with_item(DOMAINS, -3), ECHO)
    assert before.train[0] != after.train[0]
    assert before.train[1] == after.train[1]  # the other client's


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A folder for encoded texts, with a tiny decoder and its byte-level tokenizer in ``decoder``."""
    folder = tmp_path_factory.mktemp("leakage")
    texts = [text for domain in DOMAINS.values() for text in domain.item_texts]
    save_decoder(folder / "decoder", byte_level_tokenizer(texts, 600))
    return folder


DECODERS = {
    "every item, phrases": ("history", "item"),
    "every item, titles": ("history", "keywords"),
    "a list, titles": ("list", "keywords"),
}
"""Templates and IDs; keywords are titles as written, in the tokens of the decoder in the folder."""


def begun(domains, case, folder) -> tuple[Made, dict[str, torch.Tensor]]:
    """And the weights before the first step."""
    templates, kind = DECODERS[case]
    scratch = {"kind": "decoder", "embedding_init": "text"}
    source = scratch if kind == "item" else {"name_or_path": str(folder / "decoder")}
    samples = {"item_dropout": 0.1, "synthetic_share": 0.3, "max_history": 6, "max_source_tokens": 120}
    config = PretrainConfig(
        ids=kind,
        samples=SampleConfig(templates=templates, **samples),
        text_encoder="tfidf",
        backbone=BackboneConfig(d_model=16, num_layers=1, **source),
    )
    run = RunConfig(domains=",".join(domains), cache=str(folder / "cache"), pretrain=config)
    start = base_stages.begin(run, domains, torch.device("cpu"))
    return Made(domains, config, start.tokenizer, start.ids), start.model.state_dict()


@pytest.mark.parametrize("case", fast_where(lambda case: case != "a list, titles", DECODERS))
def test_held_out_items_reach_no_decoder_before_they_are_due(case, playground):
    before, weights = begun(FEW_ITEMS, case, playground)
    for num_last in (1, 2):
        after, same = begun({name: replaced(domain, num_last) for name, domain in FEW_ITEMS.items()}, case, playground)
        same_before_due(before, after, num_last)
        assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    after, _ = begun(with_item(FEW_ITEMS, -3), case, playground)  # the last item of training does reach it
    assert before.train[0] != after.train[0]
    assert before.train[1] == after.train[1]
    assert before.inputs["valid"] != after.inputs["valid"]
    assert before.ids == after.ids
    assert (before.longest_id == 1) is (DECODERS[case][1] == "item")
    assert "row_labels" in before.train[0][0]


@pytest.mark.parametrize("skew", [None, 2.0])
def test_held_out_items_of_silos_reach_nothing_before_they_are_due(skew, playground):
    """Neither who is in which silo, nor what silos of one catalogue share."""
    case = "every item, phrases"
    silos = share_out(FEW_ITEMS, 2, skew, 0)
    before, weights = begun(silos, case, playground)
    for num_last in (1, 2):
        changed = share_out({name: replaced(domain, num_last) for name, domain in FEW_ITEMS.items()}, 2, skew, 0)
        assert {name: one.clients.users for name, one in changed.items()} == {
            name: one.clients.users for name, one in silos.items()
        }
        after, same = begun(changed, case, playground)
        same_before_due(before, after, num_last)
        assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    if skew is None:  # training events reach their own silos, and no stage
        after, same = begun(share_out(with_item(FEW_ITEMS, -3), 2, None, 0), case, playground)
        assert [a != b for a, b in zip(before.train, after.train, strict=True)] == [True, True, False, False]
        assert (before.public, before.ids) == (after.public, after.ids)
        assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())


def test_users_of_a_foreign_pool_are_all_that_its_stages_read(playground):
    """Clients' public users are not even there, clients' events reach no stage, and the pool has no client users."""
    case = "every item, phrases"
    config = RunConfig(domains="crime", public_domains="children")
    domains = load_data(config)
    cut = {name: fewer_items(domain, 60) for name, domain in domains.items()}
    before, weights = begun(cut, case, playground)
    after, same = begun(with_item(cut, -3), case, playground)
    assert before.train != after.train
    assert (before.public, before.ids, before.vocabulary) == (after.public, after.ids, after.vocabulary)
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    assert (len(domains["crime"].public.users), len(domains["children"].clients.users)) == (0, 0)
    assert len(before.train) == 1


def test_a_catalogue_returns_its_own_items_only():
    """Two catalogues of other sizes whose words overlap, under one tokenizer and one model."""
    domains = {
        "small_shop": make_domain(),
        "corner": make_domain("corner", num_items=14, lengths=(5, 3, 8), seed=1),
    }
    check_public_disjoint(domains)
    tokenizer = base_stages._tokenizer(SENTENCES, {name: one.catalogue for name, one in domains.items()}, {})
    ids = assign_ids(SENTENCES, domains, tokenizer, None, Given(), {}, True)
    tasks = item_ids.client_tasks(domains, ids, tokenizer, SENTENCES)
    texts = [set(task.item_ids.texts) for task in tasks]
    assert texts[0] & texts[1]
    assert texts[0] - texts[1]
    model = tiny_t5(vocab_size=len(tokenizer))
    for task in tasks:
        num_items = len(domains[task.name].item_keys)
        _, input_ids, mask, target_B = next(eval_batches(task, "test", 9))
        assert int(target_B.max()) < num_items == len(task.trie)
        item_BK, score_BK = constrained_beam_search(model, input_ids, mask, task.trie, 30)
        assert all(sorted(row) == [-1] * (30 - num_items) + list(range(num_items)) for row in item_BK.tolist())
        # The numbers stand for this domain's items: scores are those of its own ID texts.
        exact_BI = score_catalogue(model, input_ids, mask, task.trie)
        torch.testing.assert_close(score_BK[:, :num_items], exact_BI.gather(1, item_BK[:, :num_items]))


def test_public_users_are_clients_nowhere_in_the_sample():
    everything = sample_domains()
    check_public_disjoint(everything)
    clients = {user for domain in everything.values() for user in domain.clients.users}
    public = [user for domain in everything.values() for user in domain.public.users]
    assert not clients.intersection(public)
    # A user of one domain's pool who becomes a client of another one is found.
    crime, comics = everything["crime"], everything["comics"]
    users = [crime.public.users[3], *comics.clients.users[1:]]
    moved = dataclasses.replace(comics, clients=comics.clients._replace(users=users))
    with pytest.raises(ValueError, match="clients of 'comics' and public in 'crime'"):
        check_public_disjoint({"crime": crime, "comics": moved})
