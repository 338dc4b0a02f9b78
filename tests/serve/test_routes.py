"""The routes in this process, with recommenders that compute nothing."""

import json
import logging
import threading
from functools import partial

import pytest
from fastapi import FastAPI
from serve_toys import MARKUP, TITLES, question, world

from fedecider.serve.config import Limits
from fedecider.serve.guard import HEADERS

KEY = "0123456789abcdef"
SMALL = Limits(
    max_history=3,
    max_k=5,
    max_title=200,
    max_query=20,
    max_matches=4,
    max_body=1000,
    max_beams=7,
    window_ms=0.0,
    timeout_s=20.0,
)


@pytest.fixture
def small():
    made = world(SMALL)
    with made.client:
        yield made


def refused(response, status, *words):
    """The answer is one short sentence with these words."""
    assert response.status_code == status, response.text
    content = response.json()
    assert list(content) == ["detail"]
    assert 10 < len(content["detail"]) < 600
    assert "\n" not in content["detail"]
    assert "Traceback" not in content["detail"]
    for word in words:
        assert word in content["detail"], content["detail"]


def test_health_and_domains(small):
    assert small.client.get("/health").json() == {"status": "ok", "needs_key": False}
    assert small.client.get("/domains").json() == {
        "domains": [
            {"name": "crime", "num_items": len(TITLES), "ensemble": True},
            {"name": "comics", "num_items": 3, "ensemble": False},
        ],
        "max_history": 3,
        "max_k": 5,
    }


def test_items_are_searched(small):
    found = small.client.get("/items", params={"domain": "crime", "query": "silent"}).json()["items"]
    assert found[:2] == [
        {"key": "crime-0000", "title": "The Silent Harbour"},
        {"key": "crime-0002", "title": "The Silent Witness"},
    ]
    assert len(found) <= SMALL.max_matches
    one = small.client.get("/items", params={"domain": "crime", "query": "silent", "limit": 1}).json()["items"]
    assert one == found[:1]
    first = small.client.get("/items", params={"domain": "comics", "query": " "}).json()["items"]
    assert [item["title"] for item in first] == TITLES[:3]


def test_recommendations(small):
    asked = question("the silent harbour", "crime-0001", k=2, repeats="drop")
    answer = small.client.post("/recommend", json=asked).json()
    features = {"counts": 0.625, "model": -1.25, "text": 0.004}
    assert answer == {
        "domain": "crime",
        "history": [
            {"key": "crime-0000", "title": "The Silent Harbour"},
            {"key": "crime-0001", "title": "The Last Ledger"},
        ],
        "items": [
            {"key": "crime-0002", "title": "The Silent Witness", "score": -1.0, "features": features},
            {"key": "crime-0003", "title": MARKUP, "score": -2.0, "features": features},
        ],
        "alpha_shares": {"crime": 0.75, "comics": 0.25},
        "notes": ["a note"],
    }
    seen = small.client.post("/recommend", json=question("crime-0001", k=1)).json()
    assert [item["key"] for item in seen["items"]] == ["crime-0001"]
    baskets = small.client.post("/recommend", json=question(["the silent harbour", "crime-0001"], k=2)).json()
    assert baskets["history"] == answer["history"]
    asked = question("comics-0001", domain="comics", repeats="drop")
    other = small.client.post("/recommend", json=asked).json()
    assert [item["key"] for item in other["items"]] == ["comics-0002", "comics-0000"]
    assert other["items"][0]["features"] == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (question("A Silent Garden"), ("A Silent Garden", "closest", "The Silent Harbour")),
        (question("a", "b", "c", "d"), ("history", "at most 3")),
        (question("x" * 201), ("history.0", "200", "...")),
        (question(""), ("history.0", "at least 1")),
        (question("a", k=0), ("got k 0", "greater than or equal to 1")),
        (question("a", k=6), ("got k 6", "less than or equal to 5")),
        (question("a", k="2"), ("got k '2'", "integer")),
        (question("a", k=True), ("got k True",)),
        (question("a", k=1e400), ("k",)),
        (question("a", "b", "c", k=5), ("got k 5 and a history of 3", "at most 7")),
        (question("a", repeats="no"), ("repeats", "'learned', 'drop' or 'only'")),
        (question("a", exclude_seen=True), ("unknown field 'exclude_seen'",)),
        (question(["a", 7]), ("history.0.1 7", "string")),
        (question([]), ("history.0 []", "at least 1")),
        (question(["a", "b", "c", "d"]), ("history.0", "at most 3")),
        (question("a", beams=7), ("unknown field 'beams'",)),
        ({"domain": "crime"}, ("got no history",)),
        ({"history": ["a"]}, ("got no domain",)),
        ({"domain": "crime", "history": "The Last Ledger"}, ("history", "valid list")),
        ({"domain": "crime", "history": [7]}, ("history.0 7", "string")),
        ({"domain": "crime", "history": ["\ud800"]}, ("history.0",)),
        ([], ("got the body []",)),
        (None, ("body",)),
    ],
)
def test_a_bad_question_gets_one_sentence(small, body, words):
    refused(small.client.post("/recommend", content=json.dumps(body), headers=JSON), 422, *words)
    assert small.crime.calls == []


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b'{"domain": "crime", "history": ["a"]', b"[" * 900])
def test_what_is_no_json_gets_one_sentence(small, content):
    response = small.client.post("/recommend", content=content, headers=JSON)
    assert response.status_code in (400, 422)
    refused(response, response.status_code, "body")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, ("got no domain",)),
        ({"domain": "crime", "limit": 5}, ("got limit '5'", "equal to 4")),
        ({"domain": "crime", "limit": 0}, ("got limit '0'",)),
        ({"domain": "crime", "limit": "many"}, ("got limit 'many'",)),
        ({"domain": "crime", "query": "x" * 21}, ("query", "20")),
    ],
)
def test_a_bad_search_gets_one_sentence(small, params, words):
    refused(small.client.get("/items", params=params), 422, *words)


def test_what_is_not_there(small):
    refused(small.client.post("/recommend", json=question("a", domain="horror")), 404, "'horror'", "crime, comics")
    refused(small.client.get("/items", params={"domain": "horror"}), 404, "'horror'", "crime, comics")
    refused(small.client.get("/private"), 404, "'/private'", "/recommend")
    refused(small.client.get("/recommend"), 405, "'GET'")
    for path in ("/docs", "/redoc", "/%2e%2e/run.json", "/static/index.html"):
        refused(small.client.get(path), 404)


def test_a_body_may_not_be_large(small):
    large = question("x" * 1000)
    refused(small.client.post("/recommend", json=large), 413, "1000 bytes")
    parts = (json.dumps(large)[at : at + 100].encode() for at in range(0, 1100, 100))
    refused(small.client.post("/recommend", content=parts, headers=JSON), 413, "1000 bytes")  # without its length


def test_requests_at_once_are_fewer_calls_with_the_answers_of_single_ones():
    histories = [[f"crime-{place:04d}" for place in range(first, first + 3)] for first in (0, 2, 4)] * 4
    single = world(Limits(window_ms=0.0))
    with single.client:
        expected = [single.client.post("/recommend", json=question(*history)).json() for history in histories]
    assert single.crime.calls == [1] * 12
    batched = world(Limits(window_ms=1000.0, max_batch=12))
    with batched.client:
        found = at_once(batched.client, [question(*history) for history in histories])
        assert [response.json() for response in found] == expected
        assert sum(batched.crime.calls) == 12
        assert len(batched.crime.calls) < 6
        text = batched.client.get("/metrics").text
        assert "fedecider_batch_size_sum 12.0" in text
        assert f"fedecider_batch_size_count {float(len(batched.crime.calls))}" in text


def at_once(client, questions):
    """The responses to questions that are sent at the same time, in their order."""
    found = [None] * len(questions)

    def ask(place):
        found[place] = client.post("/recommend", json=questions[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_an_answer_that_takes_too_long_is_given_up():
    slow = world(Limits(timeout_s=0.2, window_ms=0.0))
    with slow.client:
        slow.crime.may_answer.clear()
        refused(slow.client.post("/recommend", json=question("crime-0001")), 503, "within 0.2 seconds")
        slow.crime.may_answer.set()


def test_after_its_end_the_service_says_so(small):
    small.service.close()
    refused(small.client.post("/recommend", json=question("crime-0001")), 503, "stopping")
    refused(small.client.get("/health"), 503, "stopping")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("got a thing\n  expected another one"), 422, ("got a thing expected another one",)),
        (MemoryError(), 503, ("did not fit",)),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), 503, ("did not fit",)),
        (RuntimeError("The Silent Harbour"), 500, ("log",)),
        (KeyError("The Silent Harbour"), 500, ("log",)),
    ],
)
def test_errors_of_the_model_are_sentences_and_the_log_holds_no_history(small, caplog, error, status, words):
    caplog.set_level(logging.DEBUG)
    small.crime.error = error
    refused(small.client.post("/recommend", json=question("The Silent Harbour")), status, *words)
    assert "Silent" not in caplog.text
    if status == 500:
        (line,) = [line for line in caplog.messages if line.startswith("/recommend")]
        assert type(error).__name__ in line
        assert "serve_toys.py:" in line
    small.crime.error = None
    assert small.client.post("/recommend", json=question("The Silent Harbour")).status_code == 200


def test_metrics_count_routes_and_never_what_was_asked(small):
    small.client.post("/recommend", json=question("The Silent Harbour"))
    small.client.post("/recommend", json=question("no such title"))
    small.client.get("/items", params={"domain": "crime", "query": "secret"})
    small.client.get("/secret-path")
    text = small.client.get("/metrics").text
    assert 'fedecider_requests_total{route="/recommend",status="200"} 1.0' in text
    assert 'fedecider_requests_total{route="/recommend",status="422"} 1.0' in text
    assert 'fedecider_requests_total{route="other",status="404"} 1.0' in text
    assert 'fedecider_request_seconds_bucket{le="+Inf",route="/recommend"} 2.0' in text
    assert "fedecider_model_call_seconds_count 1.0" in text
    assert "fedecider_waiting_requests 0.0" in text
    assert "process_resident_memory_bytes" in text
    assert not [word for word in ("secret", "Silent", "such title") if word in text]


def test_with_a_key_only_the_page_and_health_are_open():
    keyed = world(SMALL, KEY)
    with keyed.client:
        for path in ("/domains", "/items?domain=crime", "/metrics", "/openapi.json", "/nowhere"):
            for headers in ({}, {"X-API-Key": "wrong"}, {"X-API-Key": f"{KEY}x"}, {"Authorization": f"Basic {KEY}"}):
                response = keyed.client.get(path, headers=headers)
                refused(response, 401, "X-API-Key")
                assert response.headers["www-authenticate"] == "Bearer"
            for headers in (
                {"X-API-Key": KEY},
                {"Authorization": f"Bearer {KEY}"},
                {"authorization": f"bearer  {KEY}"},
            ):
                assert keyed.client.get(path, headers=headers).status_code == (404 if path == "/nowhere" else 200)
        refused(keyed.client.post("/recommend", json=question("crime-0001")), 401)
        assert keyed.crime.calls == []
        assert keyed.client.get("/health").json() == {"status": "ok", "needs_key": True}
        for path in ("/", "/page.js", "/page.css", "/icon.svg"):
            assert keyed.client.get(path).status_code == 200


def test_a_name_that_is_not_this_machines_is_refused(small):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1]"):
        refused(small.client.get("/domains", headers={"host": host}), 400, "host name")
    assert small.client.get("/domains", headers={"host": "127.0.0.1:8000"}).status_code == 200
    with world(hosts=["::1"]).client as client:
        assert client.get("/domains", headers={"host": "[::1]:8000"}).status_code == 200
    with world(hosts=["*"]).client as client:
        assert client.get("/domains", headers={"host": "evil.example"}).status_code == 200


def test_every_answer_has_the_strict_headers(small):
    asked = [
        small.client.get("/"),
        small.client.get("/page.js"),
        small.client.get("/domains"),
        small.client.get("/nowhere"),
        small.client.post("/recommend", json=question("nothing")),
        small.client.get("/", headers={"host": "evil.example"}),
    ]
    assert [response.status_code for response in asked] == [200, 200, 200, 404, 422, 400]
    for response in asked:
        for name, value in HEADERS.items():
            assert name == "cache-control" or response.headers[name] == value
        assert "access-control-allow-origin" not in response.headers
    assert asked[2].headers["cache-control"] == "no-store"
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert HEADERS["content-security-policy"].startswith("default-src 'none'")


def test_openapi_shows_bounds_and_examples_that_work(small):
    schema = small.client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/health", "/metrics", "/domains", "/items", "/recommend", "/similar"}
    body = schema["components"]["schemas"]["RecommendRequest"]["properties"]
    assert body["history"]["maxItems"] == 3
    title, basket = body["history"]["items"]["oneOf"]
    assert (title["maxLength"], basket["items"]["maxLength"], basket["maxItems"]) == (200, 200, 3)
    assert (body["k"]["minimum"], body["k"]["maximum"]) == (1, 5)
    assert {"404", "422", "503"} <= set(schema["paths"]["/recommend"]["post"]["responses"])
    example = {name: field["examples"][0] for name, field in body.items() if "examples" in field}
    assert example["domain"] == "crime"
    refused(small.client.post("/recommend", json=example), 422, "Frozen Alibi")  # a title of the demo, not of the toys


def test_items_come_without_a_restart(small):
    new = {"key": "crime-new", "title": "The Newest Case", "text": "title: the newest case"}
    assert small.client.post("/items", json={"domain": "crime", "items": [new]}).json() == {
        "num_added": 1,
        "num_items": len(TITLES) + 1,
    }
    found = small.client.get("/items", params={"domain": "crime", "query": "newest"}).json()["items"]
    assert found[0] == {"key": "crime-new", "title": "The Newest Case"}
    answer = small.client.post("/recommend", json=question("The Newest Case")).json()
    assert answer["history"] == [{"key": "crime-new", "title": "The Newest Case"}]
    assert small.client.get("/domains").json()["domains"][0]["num_items"] == len(TITLES) + 1
    for body, status, word in (
        ({"domain": "crime", "items": [new]}, 422, "there already"),
        ({"domain": "poetry", "items": [new]}, 404, "poetry"),
        ({"domain": "crime", "items": []}, 422, "items"),
        ({"domain": "crime", "items": [{**new, "text": ""}]}, 422, "text"),
        ({"domain": "crime", "items": [{**new, "price": 3}]}, 422, "price"),
        ({"domain": "crime", "items": [{**new, "key": 7}]}, 422, "key"),
    ):
        refused(small.client.post("/items", json=body), status, word)
    assert len(small.crime.items) == len(TITLES) + 1


@pytest.mark.parametrize("kind", [None, "text/plain", "text/plain; x=application/json"])
def test_a_page_of_another_site_adds_nothing_to_a_service_without_a_key(kind, monkeypatch):
    """A browser sends such a body anywhere without asking first; older versions of the library take it for JSON."""
    monkeypatch.setattr("fedecider.serve.app.FastAPI", partial(FastAPI, strict_content_type=False))
    made, body = world(SMALL), {"domain": "crime", "items": [{"key": "a", "title": "A", "text": "a"}]}
    with made.client:
        asked = made.client.build_request("POST", "/items", content=json.dumps(body).encode())
        asked.headers.update({"content-type": kind} if kind else {})
        refused(made.client.send(asked), 422, "expected the header Content-Type: application/json")
    assert len(made.crime.items) == len(TITLES)


def test_whoever_may_ask_without_a_key_from_elsewhere_adds_nothing():
    made = world(SMALL, takes_items=False)
    body = {"domain": "crime", "items": [{"key": "a", "title": "A", "text": "a"}]}
    with made.client:
        refused(made.client.post("/items", json=body), 403, "no items")
    assert len(made.crime.items) == len(TITLES)
    made = world(SMALL, KEY)
    with made.client:
        refused(made.client.post("/items", json=body), 401, "key")
        assert made.client.post("/items", json=body, headers={"X-API-Key": KEY}).status_code == 200


def test_similar_items(small):
    asked = {"domain": "crime", "item": "The Last Ledger", "k": 2}
    answer = small.client.get("/similar", params=asked).json()
    assert answer["item"] == {"key": "crime-0001", "title": "The Last Ledger"}
    assert [one["key"] for one in answer["items"]] == ["crime-0002", "crime-0003"]
    refused(small.client.get("/similar", params={**asked, "domain": "comics"}), 422, "ensemble")
    refused(small.client.get("/similar", params={**asked, "item": "Nothing Like It"}), 422, "Nothing Like It")
    refused(small.client.get("/similar", params={**asked, "k": 0}), 422, "k")


def test_pictures_are_told_and_let_in():
    pictures = {"crime-0001": "https://img.example/a.jpg", "crime-0002": "http://127.0.0.1:9/b.png"}
    made = world(SMALL, pictures=pictures)
    with made.client:
        answer = made.client.post("/recommend", json=question("The Silent Harbour", k=3, repeats="drop"))
    assert [one.get("picture") for one in answer.json()["items"]] == [*pictures.values(), None]
    assert "picture" not in answer.json()["items"][2]
    assert "img-src 'self' http://127.0.0.1:9 https://img.example;" in answer.headers["content-security-policy"]
