"""A run with a frozen item table, and items that come after it: from the command line to recommendations."""

import csv
import json
import math
import runpy
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import fedecider
from fedecider.cli.main import main as command
from fedecider.cross_silo import export as hand_over
from fedecider.cross_silo import prepare as setup
from fedecider.data import encoders
from fedecider.data.encoders import Encoder
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.evaluation.protocols import MIN_EVENTS, train_part
from fedecider.models import item_texts, later_rows, new_items
from fedecider.models.features import COUNTED
from fedecider.models.item_table import ItemTable, read_item_ids
from fedecider.models.item_texts import PROJECTION_FILE, encoder_digest, save_projection
from fedecider.models.new_items import TEXT_FOLDER, NewItem, NewTexts, add_items
from fedecider.models.recommender import Recommender
from fedecider.models.source import find_source
from fedecider.running.manifest import write_manifest
from fedecider.running.run_folder import RunFolder
from fedecider.serve.app import create_app
from fedecider.serve.config import Limits, ServeConfig
from fedecider.serve.metrics import Metrics
from fedecider.serve.run import load_recommenders
from fedecider.serve.service import Service
from idgen import id_generator
from idgen.config import TITLE_WORDS
from idgen.text_vectors import text_projection, token_vectors
from idgen.tokenizer import clean_words, train_tokenizer

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = "model.embed_tokens.weight"
CRIME = sample_domains(("crime",))["crime"]


def main(script: str, *words: str) -> int:
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def word_sums(texts, on_step=None):
    """(N, 64): a text's vector is the sum of vectors that its words alone decide."""
    rows = []
    for text in texts:
        seeds = [zlib.crc32(word.encode()) for word in text.split()]
        rows.append(sum(torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in seeds))
    return torch.stack(rows).double()


@pytest.fixture(scope="module", autouse=True)
def encoder():
    """The folder ``encoder`` is a sentence encoder."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (item_texts, new_items, setup):
            patch.setattr(module, "load_encoder", lambda name: Encoder(name, word_sums))
        yield


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A folder with one finished run, ``run``, whose table was frozen; adapters are trained on the tied table too."""
    folder = tmp_path_factory.mktemp("cold")
    (folder / "encoder").mkdir()
    (folder / "encoder" / "weights").write_text("first")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"domains": "crime,comics", "num_rounds": 1, "local_epochs": 1, "num_eval_users": 20, "lora_rank": 2}
    content |= {"lora_targets": "attention,table", "ensemble": {"kind": "logit"}}
    content["pretrain"] |= {"text_encoder": "encoder"}
    content["pretrain"]["backbone"] |= {"d_model": 32}
    content["pretrain"]["train"] |= {"max_steps": 10}
    content["distill"] |= {"epochs": 1}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main("federate", "--config", "toy.yaml", "--output", "run") == 0
    return folder


@pytest.fixture
def there(playground, monkeypatch):
    monkeypatch.chdir(playground)
    return playground


def test_a_frozen_table_is_that_of_the_texts_after_every_stage(there):
    (stage,) = there.glob(".cache/pretrain-*")
    ids = {
        name: json.loads((stage / "ids" / f"{name}.json").read_text())["items"]["token_ids"]
        for name in ("crime", "comics")
    }
    teacher, student = (
        load_file(folder / "model.safetensors") for folder in (stage / "backbone", there / "run" / "backbone")
    )
    start_VD = token_vectors(load_file(stage / "item_vectors.safetensors"), ids, len(teacher[TABLE]))
    assert torch.equal(teacher[TABLE], start_VD)
    assert torch.equal(student[TABLE], start_VD)
    layers = [name for name in teacher if ".layers." in name]
    assert any(not torch.equal(teacher[name], student[name]) for name in layers)  # fine-tuned


def test_a_new_item_stands_where_its_text_stands(there):
    old, titles = Recommender.from_pretrained("run", "crime", ensemble=False), CRIME.titles
    twin = NewItem("later", "A Later Book", CRIME.item_texts[7].upper().replace(" ", " \n", 1))
    other = NewItem("other", "Another", "title: no word of these books: xylophones")
    loaded = Recommender.from_pretrained("run", "crime", ensemble=False, new_items=[twin, other])
    number = len(old.items.keys)
    assert list(loaded.items.keys) == [*old.items.keys, "later", "other"]
    assert [loaded.task.item_ids.token_ids[place] for place in (number, number + 1)] == [
        [len(old.model.get_input_embeddings().weight)],
        [len(old.model.get_input_embeddings().weight) + 1],
    ]
    table_VD = loaded.model.get_input_embeddings().get_base_layer().weight
    twins = table_VD[[loaded.task.item_ids.token_ids[7][0], loaded.task.item_ids.token_ids[number][0]]]
    assert torch.allclose(twins[0], twins[1], atol=1e-6)
    assert loaded.task.item_ids.texts[number] not in old.task.item_ids.texts
    ranked = [item.key for item in loaded.recommend([titles[7]], k=number)]
    assert ranked.index("later") < 3  # its text is that of the history
    assert ranked.index("other") > number // 4
    before = [item.key for item in old.recommend([titles[3], titles[9]], k=20)]
    after = [item.key for item in loaded.recommend([titles[3], titles[9]], k=22)]
    assert [key for key in after if key not in ("later", "other")][:18] == before[:18]
    assert loaded.recommend(["A Later Book"], k=1)[0].key == CRIME.item_keys[7]


def test_a_later_text_goes_without_the_words_that_all_others_went_without(there):
    place = find_source("run").place("crime")
    place = place._replace(inference=place.inference._replace(constant_words={"categories": ["books"]}))
    texts = "title: a lost harbour; categories: books, crime", "title: a lost harbour; categories: crime"
    later = [NewItem(str(number), "A Lost Harbour", text) for number, text in enumerate(texts)]
    first, second = new_items.encoded_items(place, read_item_ids(place.adapter), later).text_NE
    assert torch.equal(first, second)


def test_items_may_be_added_later(there):
    rec, titles = Recommender.from_pretrained("run", "crime"), CRIME.titles
    plain = rec.recommend([titles[7]], k=5)
    added = [NewItem("later", "A Later Book", CRIME.item_texts[7]), NewItem("last", "The Last", CRIME.item_texts[9])]
    rec.add_items([])
    assert rec.recommend([titles[7]], k=5) == plain
    rec.add_items(added[:1])
    with pytest.raises(ValueError, match="one that no other item has"):
        rec.add_items([{"key": "new", "title": "New", "text": "title: new"}, added[0]._asdict()])
    with pytest.raises(ValueError, match="expected the texts key, title, text"):
        rec.add_items([{"key": "new", "title": "New"}])
    rec.add_items([added[1]._asdict()])
    both = Recommender.from_pretrained("run", "crime", new_items=added)
    history = ["A Later Book", titles[3]]
    assert rec.items.keys == both.items.keys
    assert rec.recommend(history, k=5) == both.recommend(history, k=5)
    assert [match.key for match in rec.items.search("a later", 1)] == ["later"]


def test_an_ensemble_stays_beside_the_model_when_items_are_added(there):
    rec, titles = Recommender.from_pretrained("run", "crime"), CRIME.titles
    popular = rec.recommend([], k=3)
    later = NewItem("later", "A Later Book", CRIME.item_texts[7])
    rec.add_items([later])
    assert rec.has_ensemble
    answer = rec.recommend([titles[7]], k=len(rec.items.keys))
    assert sum(math.exp(item.score) for item in answer) == pytest.approx(1.0)
    (found,) = (item for item in answer if item.key == "later")
    counted = [name for name in COUNTED if name in found.features]
    assert [found.features[name] for name in counted] == [0.0] * len(counted)  # it was not there to be counted
    assert any(item.features[name] for item in answer for name in counted)
    assert rec.recommend(["A Later Book"], k=1)[0].features.keys() == found.features.keys()
    assert [item.key for item in rec.recommend([], k=3)] == [item.key for item in popular]


def test_a_service_takes_items_while_it_runs(there):
    """Answers are then those of a recommender that had them from the start, and the item is nearest to its text."""
    service = Service(load_recommenders(ServeConfig(run="run")), Limits(), Metrics())
    later = {"key": "later", "title": "A Later Book", "text": CRIME.item_texts[7]}
    asked = {"domain": "crime", "history": ["A Later Book", CRIME.titles[3]], "k": 5}
    with TestClient(create_app(service, Metrics()), base_url="http://127.0.0.1") as client:
        assert client.post("/recommend", json=asked).status_code == 422
        assert client.post("/items", json={"domain": "crime", "items": [later]}).json()["num_added"] == 1
        found = client.post("/recommend", json=asked).json()
        near = client.get("/similar", params={"domain": "crime", "item": "later", "k": 3}).json()["items"]
    both = Recommender.from_pretrained("run", "crime", new_items=[later])
    assert [one["key"] for one in found["items"]] == [one.key for one in both.recommend(asked["history"], k=5)]
    assert near[0]["key"] == CRIME.item_keys[7]
    assert near[0]["score"] == pytest.approx(1.0, abs=1e-5)


def test_similar_items_are_those_with_the_nearest_texts(there, capsys):
    rec = Recommender.from_pretrained("run", "crime")
    unit_ID = rec._loaded.ensemble.knowledge.unit_ID
    cosine_I = unit_ID @ unit_ID[7]
    expected = [int(item) for item in (-cosine_I).argsort(kind="stable") if item != 7]
    answer = rec.similar(CRIME.titles[7], k=4)
    assert [one.key for one in answer] == [CRIME.item_keys[item] for item in expected[:4]]
    assert [one.score for one in answer] == pytest.approx([float(cosine_I[item]) for item in expected[:4]])
    last = [CRIME.item_keys[item] for item in expected[-2:]]
    assert [one.key for one in rec.similar(CRIME.item_keys[7], candidates=[*last, CRIME.item_keys[7]])] == last
    assert [one.key for one in rec.similar(CRIME.item_keys[7], 1, exclude=[answer[0].key])] == [answer[1].key]
    words = ["--run", "run", "--domain", "crime", "--similar", CRIME.titles[7], "--k", "4", "--json", "true"]
    assert main("recommend", *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["key"] for one in told["items"]] == [one.key for one in answer]
    with pytest.raises(ValueError, match="leave the item alone"):
        rec.similar(CRIME.item_keys[7], candidates=[CRIME.item_keys[7]])
    with pytest.raises(ValueError, match="without an ensemble"):
        Recommender.from_pretrained("run", "crime", ensemble=False).similar(CRIME.item_keys[7])
    for more, word in ((["--history", "x"], "or a history"), (["--ensemble", "false"], "without an ensemble")):
        assert main("recommend", *words, *more) == 2
        assert word in capsys.readouterr().err


def test_the_command_takes_both_kinds_of_files(there, capsys):
    item = NewItem("later", "A Later Book", CRIME.item_texts[7])
    with Path("new.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([NewItem._fields, item])
    Path("new.jsonl").write_text(json.dumps(item._asdict()) + "\n\n")
    for name in ("new.csv", "new.jsonl"):
        Path(f"marked-{name}").write_bytes(b"\xef\xbb\xbf" + Path(name).read_bytes())  # as spreadsheets do
    for name in ("new.csv", "new.jsonl", "marked-new.csv", "marked-new.jsonl"):
        words = ("--run", "run", "--domain", "crime", "--k", "3", "--ensemble", "false", "--new_items", name)
        assert main("recommend", *words, "--history", CRIME.titles[7]) == 0
        assert "A Later Book" in capsys.readouterr().out


BAD_FILES = {
    "a key of the catalogue": (
        "a.jsonl",
        [NewItem(CRIME.item_keys[0], "T", "title: t")._asdict()],
        "one that no other",
    ),
    "a key twice": ("a.jsonl", [NewItem("new", "T", "title: t")._asdict()] * 2, "got the key 'new'"),
    "an empty text": ("a.jsonl", [NewItem("new", "T", " .. ")._asdict()], "got the text ' .. '"),
    "no title": ("a.jsonl", [{"key": "new", "text": "t"}], "entry 1 has not all"),
    "no text": ("a.csv", ["key,title,text", "new,T"], "entry 1 has not all"),
    "a comma that is not quoted": ("a.csv", ["key,title,text", "new,T,title: t, u"], "quote texts that hold commas"),
    "no object": ("a.jsonl", ['"text"'], "entry 1 has not all"),
    "no JSON": ("a.jsonl", ["{"], "expected key, title, text"),
    "nothing": ("a.csv", ["key,title,text"], "it has no entry"),
    "no file": ("a.jsonl", None, "cannot read a.jsonl (No such file or directory), expected a file of new items"),
    "another kind": ("a.txt", [], "expected a .csv or .jsonl file"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_one_line_and_code_2(there, case, capsys):
    name, lines, expected = BAD_FILES[case]
    Path(name).unlink(missing_ok=True)
    if lines is not None:
        Path(name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    words = ("--run", "run", "--domain", "crime", "--history", CRIME.titles[7], "--new_items", name)
    assert main("recommend", *words) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


def test_another_encoder_than_that_of_the_run_is_refused(there, monkeypatch):
    item = [NewItem("later", "A Later Book", "title: a later book")]
    (there / "encoder" / "weights").write_text("second")
    with pytest.raises(ValueError, match="with which the run was made"):
        Recommender.from_pretrained("run", "crime", new_items=item)
    (there / "encoder" / "weights").write_text("first")
    Recommender.from_pretrained("run", "crime", new_items=item)
    shutil.copytree("run", "damaged")
    (there / "damaged" / "backbone" / TEXT_FOLDER / PROJECTION_FILE).write_bytes(b"short")
    with pytest.raises(ValueError, match=r"text_projection\.safetensors was changed"):
        Recommender.from_pretrained("damaged", "crime")


def test_no_word_of_a_prompt_becomes_an_item(there, tmp_path):
    """Else its row would stand in every prompt, and move the scores of all items."""
    tokenizer = train_tokenizer(["old", "one customer bought"], 300, ["old"])
    path, item = tmp_path / TEXT_FOLDER / PROJECTION_FILE, [NewItem("new", "New", "title: one customer")]
    path.parent.mkdir()
    save_projection(path, text_projection({"shop": word_sums(["old", "other", "third"])}, 2), encoder_digest("encoder"))

    def phrase(*prompts):
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 2, "intermediate_size": 4, "tie_word_embeddings": True}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))
        texts = NewTexts(tmp_path, "item", "encoder", TITLE_WORDS, prompts)
        table = ItemTable(["old"], ["Old"], ["old"], [[3]])
        longer = add_items(model, tokenizer, table, "shop", item, texts).tokenizer
        return longer.convert_ids_to_tokens(len(longer) - 1)

    assert phrase() != phrase("What one customer bought:")


def test_hidden_items_of_the_benchmark_are_in_no_history_that_is_trained_on(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    hide = runpy.run_path(str(REPOSITORY / "benchmarks" / "cold_start.py"))["hide"]
    split = hide(CRIME, 0.2, seed=0)
    hidden = {item.key for item in split.hidden}
    assert len(hidden) == round(0.2 * len(CRIME.item_keys))
    assert hidden.isdisjoint(split.trained.item_keys)
    keys = [*split.trained.item_keys, *(item.key for item in split.hidden)]
    of_user = dict(zip(CRIME.clients.users, CRIME.clients.sequences, strict=True))
    for user, sequence in zip(split.trained.clients.users, split.trained.clients.sequences, strict=True):
        whole = [CRIME.item_keys[item] for item in of_user[user]]
        left = [keys[item] for item in sequence]
        assert left == [key for key in whole if key not in hidden]
        assert len(train_part(left)) <= len(train_part(whole))  # nothing that is asked for is trained on
    for group, is_hidden in (("hidden", True), ("old", False)):
        assert split.asked[group]
        for sequence in split.asked[group]:
            assert len(sequence) >= MIN_EVENTS
            assert (keys[sequence[-1]] in hidden) == is_hidden
            assert hidden.isdisjoint(keys[item] for item in sequence[:-1])


def benchmark(monkeypatch, name, *words):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    monkeypatch.setattr(encoders, "load_encoder", lambda name: Encoder(name, word_sums))
    save_domains(sample_domains(("crime", "comics")), "data")
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--data", "data", "--domains", "crime,comics", *words])
    content = runpy.run_path(str(REPOSITORY / "benchmarks" / f"{name}.py"))
    return content["run"](content["main"])


def test_the_benchmark_of_cold_start_pairs_the_users_of_all_seeds(there, monkeypatch, capsys):
    small = ["--pretrain.train.max_steps", "2", "--pretrain.backbone.d_model", "32"]
    words = ["--encoder", "encoder", "--share", "0.2", "--seeds", "0,1", "--output", "cold.md"]
    assert benchmark(monkeypatch, "cold_start", *words, "--set", *small, "--lora_rank", "32") == 0
    text = capsys.readouterr().out
    assert Path("cold.md").read_text() == text
    of_seed, joined = text.split("## Users whose test item is hidden, all seeds")
    for label in ("popularity", "text neighbours", "decoder before training", "decoder, table frozen"):
        assert of_seed.count(f"\n| {label} |") == 2
        for metric in ("hit@10", "ndcg@10"):
            assert joined.count(f"| decoder, table trained | {label} | {metric} |") == 2  # hidden items and old ones
    popularity = next(line for line in joined.splitlines() if line.startswith("| popularity |"))
    assert popularity == "| popularity | 0.0000 [0.0000, 0.0000] | 0.0000 [0.0000, 0.0000] |"  # nobody has bought them


def test_the_benchmark_of_later_items_asks_what_a_run_hands_over(there, monkeypatch):
    words = ["--encoder", "encoder", "--share", "0.2", "--config", "toy.yaml", "--work", "work", "--output", "later.md"]
    assert benchmark(monkeypatch, "later_items", *words, "--set", "--seed", "3") == 0
    text = Path("later.md").read_text()
    for label in ("popularity", "text neighbours", "model"):
        assert text.count(f"| model + ensemble | {label} | hit@10 |") == 2  # hidden items and old ones
    assert text.count("| popularity | 0.0000 [0.0000, 0.0000] |") == 1
    assert json.loads(Path("work/run-0/run.json").read_text())["config"]["run"]["seed"] == 3
    written = Path("work/run-0/metrics.json").stat().st_mtime_ns
    assert benchmark(monkeypatch, "later_items", *words) == 0
    assert Path("work/run-0/metrics.json").stat().st_mtime_ns == written  # a run that is there is asked again


def small_run(name, backbone, ids, *words):
    """A run of two domains in small, with an ensemble and IDs of this kind; returns the folder."""
    content = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text())
    content |= {"domains": "crime,comics", "num_rounds": 1, "local_epochs": 1, "num_eval_users": 10, "lora_rank": 2}
    content |= {"ensemble": {"kind": "logit"}, "teacher_row": False, "distill": {"epochs": 1}}
    content["pretrain"] |= {"ids": ids, "text_encoder": "encoder", "train": {"max_steps": 5}}
    content["pretrain"]["samples"] |= {"max_source_tokens": 32, "dense_head": False}
    content["pretrain"]["backbone"] |= {"d_model": 32, "num_layers": 2, **backbone}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    assert main("federate", "--config", f"{name}.yaml", "--output", f"{name}-{ids}", *words) == 0
    return Path(f"{name}-{ids}")


LATER = [
    NewItem("n1", "First", CRIME.item_texts[0]),
    NewItem("n2", "Second", "title: the silent silent harbour; brand: atlas"),
]
T5, DECODER = ("demo", {"embedding_init": "random"}), ("demo_causal", {})


@pytest.mark.parametrize(
    ("name", "backbone", "ids"), [(*T5, "generator"), (*DECODER, "keywords"), (*DECODER, "semantic")]
)
def test_ids_of_several_tokens_from_the_run_to_later_items(there, name, backbone, ids, capsys, monkeypatch):
    """A T5 and a decoder with an ensemble: a later item gets an ID of the run's kind and is recommended."""
    monkeypatch.setattr(id_generator, "MAX_STEPS", 5)
    run = small_run(name, backbone, ids)
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["num_beams"] == 20
    plain = Recommender.from_pretrained(run, "crime")
    assert plain.has_ensemble
    assert len(plain.recommend(CRIME.titles[3:5], k=5)) == 5
    recommender = Recommender.from_pretrained(run, "crime", new_items=LATER)
    table = recommender._loaded.table
    old, new = table.id_texts[:-2], table.id_texts[-2:]
    assert not set(map(tuple, table.token_ids[-2:])) & set(map(tuple, table.token_ids[:-2]))
    if ids == "semantic":
        assert new[0].rsplit(" ", 1)[0] == old[0].rsplit(" ", 1)[0]  # its text is that of the first item
        assert max(len(tokens) for tokens in table.token_ids) == 4
    else:
        assert set(new[0].split()) <= set(clean_words(CRIME.item_texts[0]))
        assert set(new[1].split()) <= {"the", "silent", "harbour", "atlas"}
        assert len(set(new[1].split())) == len(new[1].split())
    assert len(recommender.recommend(["First", "Second"], k=5)) == 5
    everything = recommender.recommend([CRIME.titles[0]], k=len(table.keys))
    assert {"n1", "n2"} <= {item.key for item in everything}
    exported = fedecider.load(run).export(f"alone-{run}")
    again = Recommender.from_pretrained(exported, "crime", new_items=LATER)
    assert list(again._loaded.table.id_texts[-2:]) == list(new)
    Path("later.jsonl").write_text("".join(json.dumps(item._asdict()) + "\n" for item in LATER))
    words = ("--run", str(run), "--domain", "crime", "--new_items", "later.jsonl", "--k", "3")
    assert main("recommend", *words, "--history", "First") == 0
    assert "Next for a customer in crime" in capsys.readouterr().out
    if ids != "semantic":
        reports = metrics["domains"]
        assert {one["item_ids"]["own_word_share"] for one in reports.values()} == {1.0}
        assert {one["item_ids"]["repeat_share"] for one in reports.values()} == {0.0}
        assert "Examples of item IDs" in (run / "report.html").read_text()
    the_months_new_items_are_counted(run, list(new), capsys)


def the_months_new_items_are_counted(run, ids, capsys):
    """`update` with the items of the month: they stand in histories and counts, with the IDs that they had by text."""
    first, last = CRIME.item_keys[0], 1_700_000_000
    rows = [(user, item, last + at) for user in CRIME.clients.users[:40] for at, item in ((0, "n1"), (1, first))]
    text = "".join(f"{user},{item},{at}\n" for user, item, at in [*rows, ("new", "gone", last), ("new", "n2", last)])
    Path("month.csv").write_text("user,item,timestamp\n" + text)
    words = ["update", "--run", str(run), "--company", "crime", "--events", "month.csv", "--force", "true"]
    capsys.readouterr()
    assert command([*words, "--new_items", "later.jsonl", "--epochs", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 new items have an ID by their text" in said
    assert "left out: 1 events of 1 items" in said
    updated = Recommender.from_pretrained(run, "crime")
    assert list(updated._loaded.table.id_texts[-2:]) == ids
    assert updated._loaded.ensemble.knowledge.counts.event_I[-2:].tolist() == [40, 1]
    found = updated.recommend(["First"], k=len(updated.items))
    assert {item.key for item in found} >= {first, "n2"}
    ask = ("recommend", "--run", run, "--company", "crime", "--customers", "new", "--json=true")
    asked = json.loads(told(capsys, *ask))
    assert [item["key"] for item in asked["history"]] == ["n2"]
    assert "2 new items" not in told(capsys, *words[:-2], "--force=true", "--new_items", "later.jsonl", events=rows[:1])
    command(["update", "--run", str(run), "--version", "1"])
    assert len(Recommender.from_pretrained(run, "crime").items) == len(updated.items) - 2


def test_a_month_of_new_items_where_ids_are_one_token(there, capsys):
    """The sold ones are counted and have rows of their own, the others wait with their texts; no other company sees
    them, and no score of another item depends on how they came."""
    shutil.copytree("run", "months")
    later = [NewItem("n1", "A Later Book", CRIME.item_texts[7]), NewItem("n2", "Another", "title: nothing like them")]
    Path("later.jsonl").write_text("".join(json.dumps(item._asdict()) + "\n" for item in later))
    untouched = {path: path.read_bytes() for path in Path("months").rglob("*") if path.is_file()}
    words = ["update", "--run", "months", "--company", "crime", "--events", "month.csv", "--force", "true"]
    at, last = 1_700_000_000, CRIME.item_keys[3]
    month = [(user, item, at + step) for user in CRIME.clients.users[:40] for step, item in enumerate(("n1", last))]
    said = " ".join(told(capsys, *words, events=month).split())
    assert "left out: 40 events of 1 items that the catalogue does not have, such as n1" in said
    wanted = (
        "to count the events that were left out: fedecider update --run months --version 1, and then fedecider update "
        "--run months --company crime --events month.csv --new_items FILE, a .csv with key,title,text"
    )
    assert wanted in said.replace(f"{Path.cwd()}/", "")
    told(capsys, "update", "--run", "months", "--version", "1")
    said = " ".join(told(capsys, *words, "--new_items", "later.jsonl", events=month).split())
    assert "1 new items have an ID by their text, and their events are counted" in said
    assert "1 items that nobody has bought yet are recommended by their texts" in said
    assert "next: fedecider recommend --all --output lists.csv --run" in said
    changed = [path.name for path, old in untouched.items() if path.read_bytes() != old]
    assert changed == ["manifest.json"]
    updated, plain = Recommender.from_pretrained("months", "crime"), Recommender.from_pretrained("run", "crime")
    assert list(updated.items.keys) == [*plain.items.keys, "n1", "n2"]
    assert updated._loaded.ensemble.knowledge.counts.event_I[-2:].tolist() == [40, 0]
    assert updated._loaded.ensemble.knowledge.num_new == 1  # that nobody has it says nothing yet
    plain.add_items(later)
    model = [one._loaded.scores.log_probs([[7, len(CRIME.item_keys)]], None) for one in (updated, plain)]
    assert torch.allclose(*model, atol=1e-5)
    assert "n1" in [item.key for item in updated.recommend([CRIME.titles[3]], k=10)]
    assert len(Recommender.from_pretrained("months", "comics").items) == len(
        Recommender.from_pretrained("run", "comics").items
    )
    assert len(
        fedecider.load("months")
        .export("months-out")
        .joinpath("adapters", "crime", "later_rows.safetensors")
        .read_bytes()
    )
    assert "n1" in Recommender.from_pretrained("months-out", "crime").items.keys
    month = [
        (user, item, at + 20 + step) for user in CRIME.clients.users[:40] for step, item in enumerate((last, "n2"))
    ]
    said = " ".join(told(capsys, *words, "--epochs", "2", events=month).split())  # the second month: it is sold by now
    assert "1 new items have an ID by their text" in said
    assert "nobody has bought yet" not in said
    updated = Recommender.from_pretrained("months", "crime")
    assert updated._loaded.ensemble.knowledge.counts.event_I[-2:].tolist() == [40, 40]
    assert updated._loaded.ensemble.knowledge.num_new == 0
    assert updated.recommend([CRIME.titles[3]], k=3)[0].key in ("n1", "n2")


def test_products_that_nobody_has_bought_are_candidates_from_the_start(there, capsys, monkeypatch):
    """A run keeps their texts and vectors with the company's counts: no encoder is asked when it is loaded."""
    shutil.copytree("run", "unsold")
    later = (NewItem("n1", "A Later Book", CRIME.item_texts[7]), NewItem("n2", "Another", "title: nothing like them"))
    domains = {"crime": replace(CRIME, unsold=later), "comics": sample_domains(("comics",))["comics"]}
    ended = SimpleNamespace(artifacts=SimpleNamespace(domains=domains))
    hand_over._save_unsold(ended, RunFolder(Path("unsold")))
    write_manifest(Path("unsold"))
    assert "can be recommended as new items: crime 2" in capsys.readouterr().out
    plain = Recommender.from_pretrained("run", "crime", new_items=later)
    with monkeypatch.context() as patch:
        patch.setattr(new_items, "load_encoder", None)
        found = Recommender.from_pretrained("unsold", "crime")
    history = [CRIME.titles[7], CRIME.titles[3]]
    assert found.recommend(history, k=400) == plain.recommend(history, k=400)
    renamed = Recommender.from_pretrained("unsold", "crime", new_items=[later[0]._replace(title="Renamed")])
    assert list(renamed.items.titles[-2:]) == ["Another", "Renamed"]
    assert len(Recommender.from_pretrained("unsold", "comics").items) == len(domains["comics"].item_keys)
    handed_over = fedecider.load("unsold").export("unsold-out")  # whom nobody buys from is private
    assert "n1" not in Recommender.from_pretrained(handed_over, "crime").items.keys
    (Path("unsold") / "private" / "crime" / "new_items.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"new_items\.parquet"):
        Recommender.from_pretrained("unsold", "crime")


def test_what_a_company_learns_of_later_rows_is_in_them(tmp_path):
    save_file({"row": torch.tensor([[1.0, 2.0]])}, tmp_path / "later_rows.safetensors")
    pair = {"lm_head.lora_a": torch.tensor([[3.0, -1.0]]), "lm_head.lora_b": torch.tensor([[5.0], [6.0]])}
    longer = later_rows.with_zeros(pair, tmp_path)
    assert longer["lm_head.lora_b"].tolist() == [[5.0], [6.0], [0.0]]
    longer["lm_head.lora_b"][2] = 2.0
    for is_tied, row in ((True, [7.0, 0.0]), (False, [1.0, 2.0])):
        (tmp_path / str(is_tied)).mkdir()
        cut = later_rows.folded(longer, tmp_path, tmp_path / str(is_tied), is_tied)
        assert cut["lm_head.lora_b"].tolist() == [[5.0], [6.0]]
        assert later_rows.read_rows(tmp_path / str(is_tied)).tolist() == [row]


def told(capsys, *words, events=()):
    if events:
        Path("month.csv").write_text("user,item,timestamp\n" + "".join(f"{a},{b},{c + 9}\n" for a, b, c in events))
    capsys.readouterr()
    assert command([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_a_diverged_id_generator_is_one_line_and_code_1(there, monkeypatch, capsys):
    monkeypatch.setattr(id_generator, "LEARNING_RATE", math.inf)
    words = ("--config", str(REPOSITORY / "configs" / "demo.yaml"), "--domains", "crime", "--cache", "fresh")
    assert main("pretrain", *words) == 1
    assert "diverged at step 20, learning_rate inf: the loss is nan" in " ".join(capsys.readouterr().err.split())
