"""`fedecider.Recommender` on a small run with ensembles: sources, answers, other adapters, folders of its own, hubs."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copy_of
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hub_toys import FolderHub
from safetensors.torch import load_file

import fedecider
from fedecider.models.ensemble_files import TENSOR_FILE, load_ensemble
from fedecider.models.features import FEATURES
from fedecider.models.recommender import Recommender
from fedecider.running.manifest import MANIFEST_FILE, write_manifest

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def run(two_clients_run):
    """A finished run of two clients."""
    return two_clients_run / "runs" / "whole"


@pytest.fixture(scope="module")
def rec(run):
    """With the ensemble."""
    return fedecider.Recommender.from_pretrained(run, "crime")


@pytest.fixture(scope="module")
def alone(run):
    """The model alone."""
    return Recommender.from_pretrained(run, "crime", ensemble=False)


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that may be changed."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def histories(rec, count=9):
    """Of one item to nine, with one that stands twice."""
    titles = rec.items.titles
    return [[titles[(7 * row + 11 * place) % 40] for place in range(row + 1)] for row in range(count)] + [
        [titles[3], titles[5], titles[3]]
    ]


def same(first, second):
    """The same items in the same order; scores but for the rounding of sums."""
    assert [[item.key for item in one] for one in first] == [[item.key for item in one] for one in second]
    for one, other in zip(first, second, strict=True):
        assert (one.history, one.alpha, one.notes) == (other.history, other.alpha, other.notes)
        assert [item.score for item in one] == pytest.approx([item.score for item in other], abs=1e-5)
    return True


def test_an_answer_says_what_was_understood_and_what_each_item_is_made_of(rec, run):
    first, second = rec.items.titles[4], rec.items.titles[9]
    answer = rec.recommend([rec.items.keys[4], second.upper()], k=4)
    assert [(entry.key, entry.title) for entry in answer.history] == [
        (rec.items.keys[4], first),
        (rec.items.keys[9], second),
    ]
    assert len(answer) == len(answer.items) == 4
    assert answer[0] == next(iter(answer))
    weights = load_ensemble(run / "private" / "crime", rec.items.keys).beside_model.value
    for item in answer:
        assert set(item.features) == set(weights) <= set(FEATURES)
    everything = rec.recommend([rec.items.keys[4], second], k=len(rec.items))
    assert sum(np.exp(item.score) for item in everything) == pytest.approx(1.0)
    added = [item.score - sum(item.features.values()) for item in everything]
    assert max(added) - min(added) < 1e-4, "the same constant for all of them"
    assert set(answer.alpha) == {"crime", "comics"}
    assert sum(answer.alpha.values()) == pytest.approx(1.0)
    assert answer.notes == ()
    assert json.loads(json.dumps(answer.to_dict()))["items"][0]["features"] == answer[0].features
    assert (rec.domain, rec.domains, rec.num_beams) == ("crime", ["comics", "crime"], 20)


def test_many_histories_get_what_each_gets_alone(rec, alone):
    for one in (rec, alone):
        asked = histories(one)
        assert same(one.recommend(asked, k=15), [one.recommend(history, k=15) for history in asked])
    assert not alone.recommend(histories(alone)[0])[0].features


def test_several_threads_get_what_one_gets(rec):
    asked = histories(rec)
    with ThreadPoolExecutor(3) as pool:
        assert same(list(pool.map(rec.recommend, asked)), [rec.recommend(history) for history in asked])


def test_what_next_something_new_or_buy_again(rec, alone):
    titles, everything = list(alone.items.titles[:3]), len(alone.items)
    for one in (rec, alone):
        keys = set(one.items.keys[:3])
        again = one.recommend(titles, 10, "only")
        assert {item.key for item in again} == keys
        assert again.notes == ("3 items that may come were bought before, and repeats only gives no others",)
        assert one.recommend(titles, 2, "only").notes == ()
        assert not keys & {item.key for item in one.recommend(titles, everything, "drop")}
        assert len(one.recommend(titles, everything, "drop")) == everything - 3
        assert not one.recommend([], 3, "only").items
    assert same([alone.recommend(titles)], [alone.recommend(titles, 10, "drop")]), "as the protocol of the run"
    learned = rec.recommend(titles, everything)
    assert len(learned) == everything
    assert {item.key for item in learned.items[-3:]} == set(rec.items.keys[:3]), "nobody of this run bought twice"
    kept = copy_of(alone)
    place = alone._loaded.place
    kept._loaded = alone._loaded._replace(place=place._replace(inference=place.inference._replace(drop_seen=False)))
    assert len(kept.recommend(titles, everything)) == everything


def test_a_basket_is_one_step_back(rec):
    a, b, c = rec.items.keys[3], rec.items.keys[7], rec.items.keys[12]
    one, other = (rec.recommend(history, k=20) for history in ([a, b, c], [a, [b, c]]))
    assert [entry.key for entry in other.history] == [a, b, c]
    assert [item.features["successors"] for item in one] != [item.features["successors"] for item in other]
    many = rec.recommend([[a, b, c], [a, [b, c]]], k=20)
    assert same(many, [one, other])
    assert same([found.answer for found in rec.recommend_many({"x": [a, b, c], "y": [a, [b, c]]}, k=20)], many)
    assert same(rec.recommend([[a, b, c], [a, [c, b]]], k=20)[1:], [rec.recommend([a, [c, b]], k=20)])


def test_without_a_history_the_counts_of_the_ensemble_say_what_is_popular(rec, alone, run):
    events = load_file(run / "private" / "crime" / TENSOR_FILE)["event_count"]
    empty, other = rec.recommend([[], [rec.items.titles[3]]], k=5)
    assert [rec.items.keys.index(item.key) for item in empty] == events.sort(descending=True, stable=True).indices[
        :5
    ].tolist()
    assert np.exp(empty[0].score) == pytest.approx(float(events.max() + 0.1) / float(events.sum() + 0.1 * len(events)))
    assert empty[0].features == {"popularity": empty[0].score}
    assert empty.notes == ("no history was given: the items with most events in the counts of the ensemble",)
    assert same([other], [rec.recommend([rec.items.titles[3]], k=5)])
    assert other.notes == ()
    with pytest.raises(ValueError, match=r"got an empty history.*templates history"):
        alone.recommend([])


BAD = {
    "no item": ({"history": [], "k": 0}, "got k 0"),
    "half an item": ({"history": [], "k": 1.5}, "got k 1.5"),
    "other repeats": ({"history": [], "repeats": "never"}, "got repeats 'never', expected learned, drop, only"),
    "as before": ({"history": [], "repeats": True}, "got repeats True"),
    "a text": ({"history": "a title"}, "expected a list of titles"),
    "a number": ({"history": 3}, "expected a list of titles"),
    "numbers": ({"history": [1, 2]}, "texts and other things"),
    "bytes": ({"history": [b"k"]}, "texts and other things"),
    "lists in lists": ({"history": ["a", ["b", ["c"]]]}, "texts and other things"),
    "an unknown title among others": ({"history": [[], ["no such title at all"]]}, "history 2: got title"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions_are_one_sentence(case, rec):
    arguments, expected = BAD[case]
    with pytest.raises(ValueError, match=expected):
        rec.recommend(**arguments)


@pytest.mark.parametrize("histories", [None, "17", 3])
def test_histories_of_nobody_are_one_sentence(histories, rec):
    with pytest.raises(ValueError, match="expected customer -> history, or such pairs"):
        rec.recommend_many(histories)


def test_what_a_source_may_be(run, alone, tmp_path):
    history = list(alone.items.titles[:2])
    expected = alone.recommend(history)
    shutil.copytree(run / "backbone", tmp_path / "copy" / "backbone")
    shutil.copytree(run / "adapters", tmp_path / "copy" / "adapters")
    of_run = Recommender.from_pretrained(run / "adapters" / "crime")
    assert of_run.has_ensemble
    assert of_run.domains == ["crime"]
    for source, domain in ((tmp_path / "copy" / "adapters" / "crime", None), (tmp_path / "copy", "crime")):
        found = Recommender.from_pretrained(source, domain)
        assert not found.has_ensemble
        assert found.recommend(history) == expected
    write_manifest(tmp_path / "copy")
    (tmp_path / "copy" / "backbone" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json was changed, .*Copy or download the whole folder again"):
        Recommender.from_pretrained(tmp_path / "copy", "crime")


SOURCES = {
    "no domain": (lambda run: (run, None), ValueError, "got no domain for .* expected one of"),
    "another domain": (lambda run: (run, "horror"), FileNotFoundError, "no adapter for domain 'horror'"),
    "another folder": (lambda run: (run.parent, None), FileNotFoundError, "no run in"),
    "a path that is none": (lambda run: (run / "../../x", None), FileNotFoundError, "no run in"),
    "a name that is not in the cache": (lambda run: ("us/nothing", None), FileNotFoundError, "no model of that name"),
    "an adapter of others": (lambda run: (run / "strange", None), ValueError, r"without inference_config\.json"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_sources_that_are_none_are_one_sentence(case, copy):
    (copy / "strange").mkdir()
    (copy / "strange" / "adapter_config.json").write_text("{}")
    source, kind, expected = SOURCES[case]
    with pytest.raises(kind, match=expected):
        Recommender.from_pretrained(*source(copy))


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


@pytest.fixture
def exported(run, tmp_path):
    return fedecider.load(run).export(tmp_path / "exported")


def test_an_exported_folder_stands_for_itself_without_what_is_private(exported, rec, alone):
    history = list(rec.items.titles[:3])
    names = {path.relative_to(exported).as_posix() for path in exported.rglob("*")}
    assert {"adapters/crime/adapter_model.safetensors", "adapters/crime/item_ids.json", "backbone/config.json"} <= names
    assert not any("ensemble" in name or "private" in name for name in names)
    found = Recommender.from_pretrained(exported, "crime")
    assert (found.domain, found.has_ensemble, found.alpha) == ("crime", False, rec.alpha)
    assert found.recommend(history) == alone.recommend(history)
    header = front_matter(exported)
    assert header["library_name"] == "peft"
    assert {"recommendation", "federated-learning", "lora"} <= set(header["tags"])
    assert not {"license", "base_model"} & set(header)


def test_an_exported_folder_is_refused_where_it_was_changed(exported):
    for name in ("backbone/tokenizer.json", "adapters/crime/inference_config.json"):
        before = (exported / name).read_bytes()
        (exported / name).write_bytes(before + b" ")
        with pytest.raises(ValueError, match=Path(name).name):
            Recommender.from_pretrained(exported, "crime")
        (exported / name).write_bytes(before)
    (exported / "README.md").write_text("mine")
    (exported / "LICENSE").write_text("mine")
    Recommender.from_pretrained(exported, "crime")
    path = exported / "adapters" / "crime" / "inference_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "samples": {"templates": "none"}}))
    (exported / MANIFEST_FILE).unlink()  # then nothing is compared
    with pytest.raises(ValueError, match=r"samples in .*inference_config\.json"):
        Recommender.from_pretrained(exported, "crime")


def test_a_hub_keeps_what_a_folder_keeps(run, alone, tmp_path, monkeypatch):
    """Opened by the line of its card in a new process, by peft and transformers alone, it computes what it did."""
    hub, result = FolderHub(tmp_path / "cache", monkeypatch), fedecider.load(run)
    assert result.push_to_hub("us/many", api=hub).oid
    assert hub.repositories["us/many"].private
    asked = [alone.items.titles[item] for item in (8, 2, 30)]
    assert Recommender.from_pretrained("us/many", "crime").recommend(asked).items == alone.recommend(asked).items
    (folder,) = (tmp_path / "cache" / "models--us--many" / "snapshots").iterdir()
    inside = folder / "adapters" / "crime"
    assert json.loads((inside / "adapter_config.json").read_text())["base_model_name_or_path"] == "us/many"
    assert front_matter(folder)["base_model"] == "us/many"
    (line,) = re.findall(r"```py\n(.*?\))\n", (folder / "README.md").read_text(), re.S)
    inputs = {"input_ids": torch.tensor([[5, 6, 1]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    words = "torch.tensor([[5, 6, 1]]), decoder_input_ids=torch.tensor([[0, 7]])"
    (tmp_path / "next.py").write_text(f"import torch\n{line}\nprint(model.eval()({words}).logits[0].tolist())")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "next.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), alone.model(**inputs).logits[0].detach())
    (folder / "LICENSE").write_text("ours")
    (folder / "backbone" / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier upload")
    result.push_to_hub("us/many", api=hub)
    assert (folder / "LICENSE").exists()
    assert not (folder / "backbone" / "model-00001-of-00002.safetensors").exists()


def test_what_cannot_be_pushed_or_read_from_a_hub(run, tmp_path, monkeypatch):
    hub, result = FolderHub(tmp_path / "cache", monkeypatch), fedecider.load(run)
    hub.create_repo("us/old", repo_type="model", private=False, exist_ok=False)
    with pytest.raises(ValueError, match="us/old"):
        result.push_to_hub("us/old", api=hub)
    assert not (tmp_path / "cache").exists()
    assert result.push_to_hub("us/old", private=False, api=hub).oid
    with pytest.raises(ValueError, match=r"\.\./books"):
        result.push_to_hub("../books", api=hub)
    with pytest.raises(FileNotFoundError, match="us/old"):
        Recommender.from_pretrained("us/old", "crime", revision="0" * 40)


def test_a_published_backbone_is_fetched_by_its_name(run, alone, tmp_path, monkeypatch):
    hub = FolderHub(tmp_path / "cache", monkeypatch)
    exported = fedecider.load(run).export(tmp_path / "exported", published_name="us/backbone")
    shutil.rmtree(exported / "backbone")
    (exported / MANIFEST_FILE).unlink()
    with pytest.raises(FileNotFoundError, match="us/backbone"):
        Recommender.from_pretrained(exported, "crime")
    hub.create_repo("us/backbone", repo_type="model", private=True, exist_ok=True)
    hub.upload_folder(repo_id="us/backbone", folder_path=run / "backbone", repo_type="model", commit_message="x")
    history = list(alone.items.titles[:3])
    assert Recommender.from_pretrained(exported, "crime").recommend(history) == alone.recommend(history)
