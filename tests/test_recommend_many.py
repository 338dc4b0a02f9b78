"""Lists for many customers, and what may be recommended: equal to asking one by one, and no history fails another."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models import loaded
from fedecider.models.allowed_items import allowed_items
from fedecider.models.item_search import Items
from fedecider.models.lists import Histories, _kept_histories, keys_in, save_histories
from fedecider.models.recommender import Recommender
from fedecider.models.source import NO_HISTORY_ENSEMBLE

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def run(two_clients_run):
    """A finished run of two clients."""
    return two_clients_run / "runs" / "whole"


@pytest.fixture(scope="module", params=[True, False], ids=["ensemble", "model alone"])
def rec(run, request):
    return Recommender.from_pretrained(run, "crime", ensemble=request.param)


def customers(count):
    domain = sample_domains(["crime"], 0)["crime"]
    pairs = zip(domain.clients.users, domain.clients.sequences, strict=True)
    return {user: [domain.item_keys[item] for item in items] for user, items in list(pairs)[:count]}


def keys(answer):
    return [item.key for item in answer]


def test_many_get_what_each_gets_alone(rec):
    asked = customers(300)  # more than one batch
    found = list(rec.recommend_many(asked, k=7))
    assert [one.customer for one in found] == list(asked)
    for one in found[::25]:
        alone = rec.recommend(asked[one.customer], k=7)
        assert keys(one.answer) == keys(alone)
        assert [item.score for item in one.answer] == pytest.approx([item.score for item in alone], abs=1e-5)
        assert (one.answer.history, one.error) == (alone.history, "")


def test_no_history_fails_another(rec):
    good = list(customers(2).items())
    bad = [("text", "crime-0001"), ("none", None), ("unknown", [good[0][1][0], "x9"]), ("number", [7])]
    found = {one.customer: one for one in rec.recommend_many([good[0], *bad, good[1]], k=3)}
    assert list(found) == [good[0][0], *(name for name, _ in bad), good[1][0]]
    for customer, history in good:
        assert keys(found[customer].answer) == keys(rec.recommend(history, k=3))
    assert [found[name].answer for name, _ in bad] == [None] * 4
    assert found["unknown"].error == "got 'x9' in a history, expected an item key or a whole title"
    skipped = {one.customer: one for one in rec.recommend_many([good[0], *bad], k=3, unknown="skip")}
    assert keys(skipped["unknown"].answer) == keys(rec.recommend([good[0][1][0]], k=3))
    assert skipped["unknown"].answer.notes == ("1 entries of the history are no items and were left out",)
    assert skipped["text"].error
    with pytest.raises(ValueError, match="got unknown 'drop'"):
        rec.recommend_many({}, unknown="drop")


def test_customers_without_a_history_get_something_and_are_told(run):
    rec = Recommender.from_pretrained(run, "crime")
    (found,) = rec.recommend_many({"new": []}, k=4, exclude=keys(rec.recommend([], k=1)))
    assert keys(found.answer) == keys(rec.recommend([], k=5))[1:]
    assert "no history was given" in found.answer.notes[0]


FILTERS = {
    "exclude": lambda keys: ({"exclude": keys[::3]}, set(keys) - set(keys[::3])),
    "candidates": lambda keys: ({"candidates": keys[5:40]}, set(keys[5:40])),
    "stock": lambda keys: (
        {"stock": {key: place % 2 for place, key in enumerate(keys[:90])}},
        {key for place, key in enumerate(keys[:90]) if place % 2},
    ),
    "all": lambda keys: (
        {"exclude": keys[:10], "candidates": keys[5:60], "stock": dict.fromkeys(keys[:20], 3)},
        set(keys[10:20]),
    ),
}


@pytest.mark.parametrize("case", FILTERS)
def test_filters_leave_the_order_of_what_may_come(rec, case):
    filters, allowed = FILTERS[case](rec.items.keys)
    asked = list(customers(4).values())
    whole = rec.recommend(asked, k=len(rec.items))
    for one, everything in zip(rec.recommend(asked, k=12, **filters), whole, strict=True):
        kept = [item for item in everything if item.key in allowed]
        assert keys(one) == [item.key for item in kept][:12]
        assert [item.score for item in one] == pytest.approx([item.score for item in kept][:12], abs=1e-4)


ITEMS = Items(["a", "b", "c", "d"], ["Alpha", "Beta", "beta", "Delta"])


def test_filters_by_hand():
    assert allowed_items(ITEMS, None, None, None) is None
    assert allowed_items(ITEMS, ["b"], None, None).number_A == (0, 2, 3)
    assert allowed_items(ITEMS, [], ["d", "a"], {"d": 0, "a": 0.5}).number_A == (0,)
    found = allowed_items(ITEMS, ["x", "b", "y"], None, None)
    assert found.notes == ("2 of 3 keys of exclude are no items, such as 'x'",)
    found = allowed_items(Items(["0012", "0345"], ["A", "B"]), None, ["12", "0345"], None)
    assert found.notes[0].endswith("such as '12'; the tables write keys differently (12 and 0012: leading zeros)")
    for bad, expected in (
        ({"exclude": "abc"}, "got exclude 'abc', expected a list"),
        ({"candidates": ["x"]}, "got filters that leave none of the 4 items"),
        ({"stock": {"a": "many"}}, "got the stock 'many' of 'a'"),
        ({"stock": {"a": float("nan")}}, "got the stock nan of 'a'"),
    ):
        with pytest.raises(ValueError, match="expected") as error:
            allowed_items(ITEMS, **{"exclude": None, "candidates": None, "stock": None, **bad})
        assert expected in str(error.value)


def test_beams_that_end_at_items_which_may_not_come_are_completed():
    """Among many allowed items beams are searched first, and what they lack is asked for exactly."""
    asked = []

    def exact(histories):
        asked.append([list(one) for one in histories])
        return [["exact"]]

    found = [[1, 2], [1], []]
    histories = SequenceArray.of([[0], [1, 2, 3], [4]])
    done = loaded._completed(found, histories, 2, {1, 2, 3, 4}, "drop", exact)
    assert done == [[1, 2], [1], ["exact"]]  # of the second one item alone is left
    assert asked == [[[4]]]


def test_kept_histories_keep_their_baskets(tmp_path):
    rows = SequenceArray.of([[0, 1, 2], [3], [1, 2]]).with_baskets(np.array([5, 5, 6, 5, 1, 1]))
    kept = Histories(["x", "y", "z"], ["a", "b", "c", "d"], rows, {"y": 7}, True)
    save_histories(kept, tmp_path / "h.parquet")
    found = _kept_histories(tmp_path / "h.parquet", kept.item_keys)
    assert found.sequences == rows
    expected = [("x", [["a", "b"], ["c"]]), ("y", [["d"]]), ("z", [["b", "c"]])]
    assert list(found.of(None, "shop")) == expected
    assert list(found.of(["z", "new"], "shop")) == [expected[2], ("new", [])]


def test_customers_are_called_as_their_company_calls_them():
    rows = SequenceArray.of([[0], [1]])
    of_north = Histories(["north:17", "north:north:17"], ["a", "b"], rows, {}, True)
    assert list(of_north.of(None, "books.north")) == [("17", ["a"]), ("north:17", ["b"])]
    assert list(of_north.of(["17", "north:8"], "north")) == [("17", ["a"]), ("8", [])]
    mixed = Histories(["north:17", "18"], ["a", "b"], rows, {}, True)
    assert [customer for customer, _ in mixed.of(None, "north")] == ["north:17", "18"]


def recommend(*words):
    return main(["recommend", *map(str, words)])


def test_all_customers_into_a_file(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    out = tmp_path / "lists.parquet"
    assert recommend("--run", run, "--company", "crime", "--all", "--k", 20, "--output", out) == 0
    table = pyarrow.parquet.read_table(out).to_pylist()
    asked, rec = customers(1000), Recommender.from_pretrained(run, "crime")
    assert [row["customer"] for row in table] == list(asked)
    for row in table[::60]:
        answer = rec.recommend(asked[row["customer"]], k=20)
        assert row["items"] == keys(answer)
        assert row["scores"] == pytest.approx([item.score for item in answer], abs=1e-5)
    told = capsys.readouterr().out
    assert f"{len(asked)} lists in" in told
    num_public = len(sample_domains(["crime"], 0)["crime"].public.users)
    assert f"{num_public} public customers are not among them" in " ".join(told.split())
    assert [path.name for path in tmp_path.iterdir()] == ["lists.parquet"]


def test_lists_in_a_table_of_rows_and_no_other_file_replaced(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rec, words = Recommender.from_pretrained(run, "crime"), ("--run", run, "--company", "crime", "--k", 2)
    user, history = next(iter(customers(1).items()))
    last = rec.items.keys[-1]
    Path("events.csv").write_text(f"user,item,time\n{user},{history[0]},1\n{user},{history[1]},2\nodd,gone,1\n")
    words = (*words, "--events", "events.csv")
    Path("not.csv").write_text(f"key,title,text\n{last},T,title: t\nnew-1,New,title: new\n")
    for kind in ("csv", "jsonl", "parquet"):
        lists, orders = f"lists.{kind}", f"orders.{kind}"
        for _ in range(2):  # an earlier list is replaced
            assert recommend(*words, "--all", "--output", lists, "--exclude", "not.csv") == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "1 of 2 keys of exclude are no items, such as 'new-1'" in said.partition("lists in")[0]
        Path(orders).write_text("order,customer\n7,a\n")
        assert recommend(*words, "--all", "--output", orders) == 2
        assert "which is there already and was not written by this command" in capsys.readouterr().err
        assert Path(orders).read_text() == "order,customer\n7,a\n"
    answer = rec.recommend(history[:2], k=2, exclude=[last])
    rows = pd.read_csv("lists.csv").to_dict("records")
    assert [(row["customer"], row["rank"], row["item"], row["title"]) for row in rows[:2]] == [
        (user, rank, item.key, item.title) for rank, item in enumerate(answer, 1)
    ]
    assert [row["score"] for row in rows[:2]] == pytest.approx([item.score for item in answer], abs=1e-5)
    assert (rows[2]["customer"], pd.isna(rows[2]["item"])) == ("odd", True)
    assert "got 'gone' in a history" in rows[2]["note"]


def test_a_table_of_keys_has_every_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("crime-1\ncrime-2\n")
    Path("b.csv").write_text("sku\ncrime-1\n")
    Path("c.csv").write_text("key,title,text\ncrime-1,T,title: t\n")
    assert [keys_in(name, "exclude") for name in ("a.csv", "b.csv", "c.csv", "x | y")] == [
        ["crime-1", "crime-2"],  # it has no line of names
        ["crime-1"],
        ["crime-1"],
        ["x", "y"],
    ]


def test_some_customers_of_a_table_with_what_is_in_stock(run, tmp_path, capsys):
    asked = customers(3)
    rows = [
        {"customer": user, "sku": item, "at": place}
        for user, items in asked.items()
        for place, item in enumerate(items)
    ]
    rows += [{"customer": "odd", "sku": "gone", "at": 1}]
    pd.DataFrame(rows).rename(columns={"at": "time"}).to_csv(tmp_path / "events.csv", index=False)
    stock = dict.fromkeys(Recommender.from_pretrained(run, "crime").items.keys[:50], 5)
    pd.DataFrame({"sku": list(stock), "stock": list(stock.values())}).to_csv(tmp_path / "stock.csv", index=False)
    words = ("--run", run, "--company", "crime", "--events", tmp_path / "events.csv", "--stock", tmp_path / "stock.csv")
    assert (
        recommend(*words, "--all", "true", "--output", tmp_path / "l.jsonl", "--exclude", "crime-0001 | crime-0002")
        == 0
    )
    found = {row["customer"]: row for row in map(json.loads, (tmp_path / "l.jsonl").read_text().splitlines())}
    rec = Recommender.from_pretrained(run, "crime")
    for user, items in asked.items():
        answer = rec.recommend(items, stock=stock, exclude=["crime-0001", "crime-0002"])
        assert found[user]["items"] == keys(answer)
    assert found["odd"]["items"] == []
    assert "got 'gone' in a history" in found["odd"]["note"]
    assert "1 customers have no list, such as odd: got 'gone'" in capsys.readouterr().out
    assert recommend(*words, "--customers", next(iter(asked)), "--json", "true", "--k", 2) == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == 2


def test_new_customers_get_what_is_popular_and_are_told(run, tmp_path, capsys):
    """As without any history; whoever is known gets what is theirs."""
    known, popular = next(iter(customers(1))), Recommender.from_pretrained(run, "crime").recommend([], k=3)
    words = ["recommend", "--run", str(run), "--company", "crime", "--k", "3", "--json", "true"]
    assert main([*words, "--customers", f"new-1,{known}"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["customer"] for row in rows] == ["new-1", known]
    assert [item["key"] for item in rows[0]["items"]] == keys(popular)
    assert rows[0]["notes"] == [NO_HISTORY_ENSEMBLE]
    assert NO_HISTORY_ENSEMBLE not in rows[1]["notes"]
    assert main([*words, "--customers", "new-1", "--ensemble", "false"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "there is no ensemble that knows what is popular" in row["error"]
    assert main([*words[:-2], "--customers", f"new-1,{known}", "--output", str(tmp_path / "x.jsonl")]) == 0
    assert "1 of 2 customers have no history here, such as new-1: they count as new" in capsys.readouterr().out


def test_histories_of_several_companies_are_no_histories_of_one(run, tmp_path, capsys):
    """Customer 17 of another company is another person."""
    rows = [{"user": "17", "item": key, "company": name} for key, name in (("crime-0001", "crime"), ("x", "south"))]
    pd.DataFrame(rows).to_csv(tmp_path / "orders.csv", index=False)
    words = ["recommend", "--run", str(run), "--company", "crime", "--customers", "17"]
    assert main([*words, "--events", str(tmp_path / "orders.csv")]) == 2
    assert "got events of the company south in" in capsys.readouterr().err


BAD = {
    "no file": (["--all"], "got --all without --output"),
    "another kind of file": (["--all", "--output", "x.txt"], "expected a file that ends with .parquet, .jsonl, .csv"),
    "both": (["--customers", "a", "--all", "--output", "x.jsonl"], "got several of --all, --customers and --history"),
    "no customers": (["--output", "x.jsonl"], "got --output without customers, expected --all"),
    "another company": (["--company", "x", "--domain", "crime"], "got the company x and the domain crime"),
    "no such stock": (["--stock", "nowhere.csv"], "there is no file nowhere.csv with the stock"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_asked_is_told(run, case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    words, expected = BAD[case]
    known = [] if "--company" in words else ["--company", "crime"]
    assert recommend("--run", run, *known, *words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.splitlines()) == 1


def test_a_list_that_cannot_be_written_leaves_nothing(tmp_path):
    from fedecider.models.lists import write_lists

    def broken():
        yield SimpleNamespace(customer="a", answer=None, error="why")
        raise OSError(28, "No space left on device")

    (tmp_path / "l.parquet").write_text("before")
    with pytest.raises(OSError, match="No space"):
        write_lists(broken(), tmp_path / "l.parquet")
    assert (tmp_path / "l.parquet").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["l.parquet"]


def test_filters_over_http_are_those_of_the_recommender(run):
    client = pytest.importorskip("fastapi.testclient")
    from fedecider.serve.app import create_app
    from fedecider.serve.config import Limits
    from fedecider.serve.metrics import Metrics
    from fedecider.serve.service import Service

    rec, metrics = Recommender.from_pretrained(run, "crime"), Metrics()
    (history,), service = customers(1).values(), Service({"crime": rec}, Limits(), metrics)
    filters = {"exclude": list(rec.items.keys[:30]), "stock": dict.fromkeys(rec.items.keys[:60], 2)}
    with client.TestClient(create_app(service, metrics)) as web:
        found = web.post("/recommend", json={"domain": "crime", "history": history, "k": 5, **filters}).json()
        assert [item["key"] for item in found["items"]] == keys(rec.recommend(history, k=5, **filters))
        nothing = web.post("/recommend", json={"domain": "crime", "history": history, "candidates": ["x"]})
        assert nothing.status_code == 422
        assert "got filters that leave none" in nothing.json()["detail"]
