"""Companies that sell parts of one catalogue: one ID and one vector for an item that several sell, own candidates."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from slow import slow
from test_silos_run import CPU, DECODER, REPOSITORY, SENTENCES, WHOLE, main, rows

from fedecider.cross_silo import base_stages, item_ids
from fedecider.cross_silo.item_ids import load_ids
from fedecider.cross_silo.settings import RunConfig
from fedecider.data.domain import NO_EVENTS
from fedecider.data.silos import share_out
from fedecider.data.store import load_domains, save_domains
from fedecider.methods.rows import TABLE, rows_of_clients
from fedecider.models.adapters import LoraSettings, adapter_shapes, attach_lora
from fedecider.models.item_table import read_item_ids
from fedecider.models.item_texts import encoded_texts
from fedecider.models.recommender import Recommender
from idgen.samples import eval_batches, train_batches

pytestmark = pytest.mark.whole

SHOP = {"crime": WHOLE["crime"]}
CUT = share_out(SHOP, 2, None, 0, 0.5)
FIRST, SECOND = CUT.values()
COMMON = sorted(set(FIRST.item_keys) & set(SECOND.item_keys))
EQUAL = [DECODER, slow(SENTENCES), slow(dataclasses.replace(DECODER, ids="semantic"))]


@pytest.mark.parametrize("settings", EQUAL, ids=["decoder", "sentences", "semantic"])
def test_parts_that_are_the_whole_start_as_silos_do(settings, tmp_path):
    """The public users are known to one of the two alone, so that the union is another object than either."""
    config, silos = RunConfig(cache=str(tmp_path), pretrain=settings, protocol="strict"), share_out(SHOP, 2, None, 0)
    parts = {name: dataclasses.replace(one, card={}) for name, one in silos.items()}
    parts["crime.2"] = dataclasses.replace(parts["crime.2"], public=NO_EVENTS)
    one, other = (base_stages.begin(config, found, CPU) for found in (silos, parts))
    assert other.ids.keys() == {*silos, "crime"}
    assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    assert all(torch.equal(vector_ID, other.vectors[name]) for name, vector_ID in one.vectors.items())
    weights = other.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in one.model.state_dict().items())
    first, second = (rows(train_batches(made.tasks, 16, torch.Generator().manual_seed(1))) for made in (one, other))
    assert first == second
    for found, made in ((silos, one), (parts, other)):
        tasks = item_ids.client_tasks(found, made.ids, made.tokenizer, settings)
        asked = [rows([{"ids": batch[1]} for batch in eval_batches(task, "test", 32)]) for task in tasks]
        if found is silos:
            expected = asked
    assert asked == expected


@pytest.mark.parametrize("settings", EQUAL, ids=["decoder", "sentences", "semantic"])
def test_a_common_item_has_one_id_and_companies_have_their_own_candidates(settings, tmp_path):
    config = RunConfig(cache=str(tmp_path), pretrain=settings, protocol="strict")
    stage = base_stages.pretrain_stage(config, CUT, CPU, quiet=True)
    ids = load_ids(stage.folder, CUT, settings)
    by_key = {name: dict(zip(one.item_keys, ids[name].items.texts, strict=True)) for name, one in CUT.items()}
    assert 10 < len(COMMON) < len(FIRST.item_keys)
    assert all(by_key["crime.1"][key] == by_key["crime.2"][key] for key in COMMON)
    together = by_key["crime.1"] | by_key["crime.2"]
    assert len(set(together.values())) == len(together) == len(SHOP["crime"].item_keys)
    made = base_stages.begin(config, CUT, CPU)
    tasks = item_ids.client_tasks(CUT, ids, made.tokenizer, settings)
    for task, (name, one) in zip(tasks, CUT.items(), strict=True):
        assert len(task.trie) == len(one.item_keys)
        assert task.item_ids.token_ids == ids[name].items.token_ids
        if settings is DECODER:
            assert len(task.neighbours.item_IK) == len(one.item_keys)
    if settings is DECODER:
        student = base_stages.distill_stage(config, stage, CUT, CPU, quiet=True)
        assert (student.folder / "backbone").is_dir()
        of_union = load_file(stage.folder / item_ids.ITEM_VECTORS)["crime"]
        assert len(of_union) == len(SECOND.catalogue.keys)
        table_VD = made.model.get_input_embeddings().weight.detach()
        for number, token_ids in zip(SECOND.catalogue_number_I, ids["crime.2"].items.token_ids, strict=True):
            row_D, vector_D = table_VD[token_ids[0]], of_union[number]
            assert float(torch.nn.functional.cosine_similarity(row_D, vector_D, 0)) > 0.999
        encoded = encoded_texts(CUT, "tfidf", str(tmp_path))
        for name, one in CUT.items():
            assert len(encoded[name]) == len(one.item_keys)
        model = attach_lora(made.model, LoraSettings(2, ("table",)))
        own_KV = rows_of_clients(adapter_shapes(model), tasks)[TABLE]
        padding = len(tasks[0].template_tokens())
        assert int(own_KV.all(0).sum()) == len(COMMON) + padding
        assert [int(row_V.sum()) - padding for row_V in own_KV] == [len(one.item_keys) for one in CUT.values()]
    assert Path(stage.folder / "ids" / "crime.json").is_file()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs over three companies that sell parts of one catalogue: plain, and with secure sums."""
    folder = tmp_path_factory.mktemp("parts")
    save_domains(share_out(SHOP, 3, None, 0, 0.5), folder / "data")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"num_rounds": 2, "local_epochs": 1, "num_eval_users": 20, "lora_rank": 32, "data": "data"}
    content["pretrain"]["backbone"] |= {"d_model": 32}
    content["pretrain"]["train"] |= {"max_steps": 5}
    content["distill"] |= {"epochs": 1}
    content |= {"lora_targets": "table", "ensemble": {"kind": "logit"}, "update_scales": "1", "domains": "*"}
    (folder / "toy.yaml").write_text(yaml.safe_dump({**content, "method": "fedavg"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in {"plain": (), "secure": ("--secure_sum", "true")}.items():
            assert main("federate", "--config", "toy.yaml", "--output", f"runs/{name}", *words) == 0
    return folder


def test_a_run_hands_over_rows_that_never_left(folder):
    """With secure sums results are the plain ones; adapters hold rows of items that one company alone sells."""
    domains = load_domains(folder / "data")
    sold = Counter(key for one in domains.values() for key in one.item_keys)
    metrics = [json.loads((folder / "runs" / name / "metrics.json").read_text()) for name in ("plain", "secure")]
    for name, one in domains.items():
        plain, secure = (found["domains"][name]["test"]["fedavg (global)"]["ndcg@10"]["mean"] for found in metrics)
        assert plain == pytest.approx(secure, abs=1e-6)
        table = read_item_ids(folder / "runs" / "secure" / "adapters" / name)
        assert list(table.keys) == one.item_keys
        assert table.catalogue == "crime"
        weights = [
            load_file(folder / "runs" / run / "adapters" / name / "adapter_model.safetensors")
            for run in ("plain", "secure")
        ]
        key = next(key for key in weights[0] if key.endswith("lm_head.lora_B.weight"))
        row_of = {item: tokens[0] for item, tokens in zip(table.keys, table.token_ids, strict=True)}
        only_here = [row_of[item] for item in one.item_keys if sold[item] == 1]
        elsewhere = {tokens[0] for other in domains for tokens in tokens_of(folder, other)} - set(row_of.values())
        assert only_here
        assert elsewhere
        for found in weights:
            assert found[key][only_here].any(1).float().mean() > 0.9
            assert not found[key][sorted(elsewhere)].any()
        torch.testing.assert_close(weights[0][key], weights[1][key], rtol=0, atol=1e-5)
    told = json.loads((folder / "runs" / "secure" / "communication.json").read_text())
    bytes_up = {size["up"] for size in told["rounds"][0]["clients"].values()}
    assert len(bytes_up) == 1, "no message says whose items it is about"
    recommender = Recommender.from_pretrained(folder / "runs" / "secure", "crime.2")
    asked = domains["crime.2"].item_keys[:3]
    assert {one.key for one in recommender.recommend(asked, k=20)} <= set(domains["crime.2"].item_keys)


def tokens_of(folder, name):
    return read_item_ids(folder / "runs" / "plain" / "adapters" / name).token_ids
