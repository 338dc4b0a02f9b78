"""FedMD between two companies with other backbones: lists, learning, the version, and what is refused."""

import shutil
from functools import partial

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from small_runs import decoder_settings, finished

import fedecider as fd
from distill.soft_targets import consensus
from fedecider.cli.main import main
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.data.sample import sample_domains
from fedecider.data.silos import share_out
from fedecider.data.store import save_domains
from fedecider.evaluation.sequences import SequenceArray
from fedecider.lifecycle import fedmd as learning
from fedecider.lifecycle.fedmd import digest, public_scores
from fedecider.lifecycle.update import counted
from fedecider.lifecycle.warm_start import Scores, train_on
from fedecider.models.lists import read_lists
from fedecider.models.recommender import Recommender
from fedecider.models.versions import read_versions

pytestmark = pytest.mark.whole
T5 = {
    "ids": "keywords",
    "text_encoder": "tfidf",
    "samples": {"templates": "compact", "max_history": 8, "max_source_tokens": 80, "pairs": True},
    "backbone": {"d_model": 32, "num_layers": 2},
    "train": {"batch_size": 64, "max_steps": 10},
}
NORTH, SOUTH = "crime.1", "crime.2"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs over one catalogue, of a decoder and of a T5 that writes IDs; the public histories; lists of both."""
    root = tmp_path_factory.mktemp("fedmd")
    companies = share_out(sample_domains(["crime"], 0), 2, None, 0)
    for name, company in companies.items():
        save_domains({name: company}, root / name / "data")
    common = {"method": "local", "data": "data"}
    finished(root / NORTH, {**decoder_settings(), **common, "domains": NORTH})
    finished(root / SOUTH, {**decoder_settings(), **common, "domains": SOUTH, "pretrain": T5})
    keys = companies[NORTH].item_keys
    rows = [("a", keys[4]), ("a", keys[17]), ("b", keys[9]), ("c", keys[30]), ("c", keys[2])]
    rows += [(f"item {key}", key) for key in keys]
    pd.DataFrame([(*row, time) for time, row in enumerate(rows)], columns=["user", "item", "time"]).to_csv(
        root / "public.csv", index=False
    )
    for name in (NORTH, SOUTH):
        write_lists(root, name)
    return root, companies


def write_lists(root, name, k=20):
    words = ["--run", root / name / "runs" / "whole", "--events", root / "public.csv", "--k", k]
    assert main(["recommend", "--all", *map(str, words), "--output", str(root / f"{name}.parquet")]) == 0


@pytest.fixture
def own(made, tmp_path):
    """Copies of the runs."""
    root, _ = made
    return {name: shutil.copytree(root / name / "runs" / "whole", tmp_path / name) for name in (NORTH, SOUTH)}


def files(root):
    return ",".join(str(root / f"{name}.parquet") for name in (NORTH, SOUTH))


def learn(run, root, capsys, **changed):
    options = {"run": run, "lists": files(root), "events": root / "public.csv", **changed}
    code = main(["fedmd", *(word for name, value in options.items() for word in (f"--{name}", str(value)))])
    said = capsys.readouterr()
    return code, said.out + said.err


def gains(*ndcg):
    values = iter(ndcg)
    return lambda *_: Scores(0.0, next(values))


@pytest.mark.parametrize("name", [NORTH, SOUTH])
def test_companies_with_other_backbones_learn_from_each_other(made, own, name, monkeypatch, capsys):
    root, companies = made
    monkeypatch.setattr(learning, "ranked_by", gains(0.1, 0.2))
    data = root / name / "data"
    code, said = learn(own[name], root, capsys, data=data, epochs=1)
    assert code == 0, said
    assert "version 2" in said
    assert read_versions(own[name]).in_force == 2
    history = [companies[name].item_keys[4]]
    before, after = (
        [(item.key, item.score) for item in Recommender.from_pretrained(place, name, ensemble=False).recommend(history)]
        for place in (root / name / "runs" / "whole", own[name])
    )
    assert before != after
    assert main(["recommend", "--run", str(own[name]), "--history", history[0]]) == 0
    monkeypatch.setattr(learning, "ranked_by", gains(0.2, 0.1))
    code, said = learn(own[name], root, capsys, epochs=1)  # it keeps the histories that it counts
    assert code == 0, said
    assert "no gain" in said
    assert read_versions(own[name]).in_force == 2


def test_the_digest_is_before_the_own_events_and_without_it_training_is_that_of_the_company_alone(made, own, tmp_path):
    root, companies = made
    now = counted(own[NORTH], NORTH, str(root / NORTH / "data"))
    settings = recorded_settings(own[NORTH], str(root / NORTH / "data"))
    sequences, lists = public_scores(now, files(root).split(","), root / "public.csv")
    assert sequences[:3] == [[4, 17], [9], [30, 2]]
    assert len(sequences) == 3 + len(companies[NORTH].item_keys)

    def learned(scores):
        target = partial(consensus, scores, num_items=len(now.keys))
        return lambda models, start: digest(models, start, sequences, target)

    before = {"nothing": None, "as it was": lambda _, start: start, "both": learned(lists), "own": learned(lists[:1])}
    found = {}
    for name, first in before.items():
        rows = SequenceArray.of(now.histories.sequences).without_last(2)
        train_on(now.place, rows, settings, 1, torch.device("cpu"), tmp_path / name, first)
        found[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert same(found["nothing"], found["as it was"])
    assert not same(found["nothing"], found["both"])
    assert not same(found["own"], found["both"])


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def without_events(root, tmp_path):
    pd.DataFrame({"user": [], "item": [], "time": []}).to_csv(tmp_path / "none.csv", index=False)
    return {"events": tmp_path / "none.csv"}


def of_other_histories(root, tmp_path):
    rows = [("z", next(iter(read_lists(root / f"{NORTH}.parquet")["a"][0])), 1)]
    pd.DataFrame(rows, columns=["user", "item", "time"]).to_csv(tmp_path / "other.csv", index=False)
    return {"events": tmp_path / "other.csv"}


def another_catalogue(root, tmp_path):
    pd.DataFrame([("z", "strange", 1)], columns=["user", "item", "time"]).to_csv(tmp_path / "strange.csv", index=False)
    return {"events": tmp_path / "strange.csv"}


def changed_lists(change):
    def made(root, tmp_path):
        rows = [
            {"customer": name, "items": items, "scores": scores, "note": ""}
            for name, (items, scores) in read_lists(root / f"{NORTH}.parquet").items()
        ]
        change(rows[1])
        pd.DataFrame(rows).to_parquet(tmp_path / "changed.parquet")
        return {"lists": f"{root / f'{NORTH}.parquet'},{tmp_path / 'changed.parquet'}"}

    return made


BAD = {
    "one company": (lambda root, _: {"lists": root / f"{NORTH}.parquet"}, "got the lists of 1 company"),
    "no file": (
        lambda root, _: {"lists": f"{root / f'{NORTH}.parquet'},gone.parquet"},
        "damaged or missing gone.parquet",
    ),
    "no public history": (without_events, "got events with the columns user, item, time"),
    "other histories": (of_other_histories, "got no list for 1 of 1 public histories"),
    "items that nobody sells": (another_catalogue, "expected one catalogue for all companies"),
    "lists of another catalogue": (
        changed_lists(lambda row: row["items"].__setitem__(0, "strange")),
        "got 1 items in ",
    ),
    "cosines": (changed_lists(lambda row: row["scores"].__setitem__(0, 0.9)), "expected log-probabilities"),
    "NaN": (changed_lists(lambda row: row["scores"].__setitem__(0, float("nan"))), "a score is missing"),
    "fewer scores": (changed_lists(lambda row: row["scores"].pop()), "damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(made, own, case, tmp_path, capsys):
    root, _ = made
    make, words = BAD[case]
    before = written(own[NORTH])
    code, said = learn(own[NORTH], root, capsys, data=root / NORTH / "data", **make(root, tmp_path))
    assert code == 2, said
    assert words in said
    assert "Traceback" not in said
    assert written(own[NORTH]) == before


def written(root):
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def test_the_python_function_says_the_same(made, own):
    root, _ = made
    with pytest.raises(ValueError, match="got the lists of 1 company"):
        fd.fedmd(own[NORTH], [root / f"{NORTH}.parquet"], root / "public.csv")
