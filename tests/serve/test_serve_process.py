"""The command: what it refuses, what it prints and logs, how it stops, and what it does with slow clients."""

import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest
from serve_process import TOYS, started
from serve_toys import TITLES, question
from slow import slow

from fedecider.cli.main import main

pytestmark = pytest.mark.whole

KEY = "0123456789abcdef"


def refused(capsys, *words):
    """The sentence with which the command ends."""
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_served_is_told_in_one_sentence(capsys, tmp_path):
    run = ("--run", str(tmp_path / "none"))
    assert "run" in refused(capsys)
    assert "none" in refused(capsys, *run, "--port", "0")
    assert "max_historyy" in refused(capsys, *run, "--max_historyy", "3")
    assert "got max_batch 0" in refused(capsys, *run, "--max_batch", "0")
    assert "without an API key" in refused(capsys, *run, "--host", "0.0.0.0")
    assert "nowhere" in refused(capsys, *run, "--api_key_file", str(tmp_path / "nowhere"))
    assert "expected an address of this machine" in refused(
        capsys, *run, "--host", "no such host", "--without_key", "true"
    )
    told = refused(capsys, *run, "--host", "192.0.2.1", "--without_key", "true", "--port", "0")
    assert "got 192.0.2.1 port 0, expected an address of this machine" in told
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = refused(capsys, *run, "--port", str(taken.getsockname()[1]))
        assert "expected an address of this machine and a free port" in told


@pytest.mark.parametrize("library", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_its_libraries_the_extra_is_named(capsys, monkeypatch, library):
    for name in [
        name for name in sys.modules if name.startswith("fedecider.serve.") and name != "fedecider.serve.config"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    told = refused(capsys, "--run", "x")
    assert f"serving needs {library}, which is not installed: pip install '.[serve]'" in told


@pytest.mark.parametrize("kind", [signal.SIGTERM, slow(signal.SIGINT)])
def test_it_stops_after_answering_and_logs_nothing_that_was_asked(kind, tmp_path):
    asked = tmp_path / "asked"
    with started(*TOYS, "1.5", environment={"TOY_ASKED": str(asked)}) as service:
        address = service.address()
        assert "for this machine alone, without a key" in service.output
        found = []

        def ask(*history):
            found.append(httpx.post(f"{address}recommend", json=question(*history), timeout=30))

        ask("crime-0003")  # whose answer fails
        ask("no such title")
        httpx.get(f"{address}items", params={"domain": "crime", "query": "Silent"})
        httpx.get(f"{address}Silent")
        last = threading.Thread(target=ask, args=("The Silent Harbour",))
        last.start()
        deadline = time.monotonic() + 60
        while asked.read_text() != "crime-0000" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert service.stop(kind) == 0
        last.join(30)
    assert [response.status_code for response in found] == [500, 422, 200]
    assert found[2].json()["items"][0]["title"] == TITLES[0]
    lines = service.output.splitlines()
    assert len(lines) == 3, lines
    assert lines[0].startswith("toy: crime; http://127.0.0.1:")
    assert lines[1].startswith("/recommend: KeyError < toy_server.py:")
    assert lines[2] == "stopped"
    assert not [word for word in ("Silent", "crime-0", "such title", "History") if word in service.output]


def test_beyond_this_machine_with_a_key():
    with started(*TOYS, "0", "--host", "0.0.0.0", environment={"FEDECIDER_API_KEY": KEY}) as service:
        port = service.address().rsplit(":", 1)[1]
        address = f"http://127.0.0.1:{port}"
        assert "for whoever reaches it, with the API key" in service.output
        assert KEY not in service.output
        assert httpx.post(f"{address}recommend", json=question("crime-0001")).status_code == 401
        headers = {"X-API-Key": KEY, "Host": "recommendations.example"}
        assert httpx.post(f"{address}recommend", json=question("crime-0001"), headers=headers).status_code == 200


def test_a_new_version_is_read_at_a_signal_and_no_request_is_lost(tmp_path):
    titles, keys = tmp_path / "titles", tmp_path / "keys"
    titles.write_text("5")
    keys.write_text(f"north {KEY}north\nsouth {KEY}south\n")
    words = ("--api_key_file", str(keys), "--log_requests", "true", "--max_per_minute", "100")
    with started(*TOYS, "0.01", *words, environment={"TOY_TITLES": str(titles)}) as service:
        address, found = service.address(), []
        client = httpx.Client(base_url=address, headers={"X-API-Key": f"{KEY}north"}, timeout=30)

        def wait_for(words):
            deadline = time.monotonic() + 60
            while words not in service.output and time.monotonic() < deadline:
                found.append(client.post("recommend", json=question("crime-0001")).status_code)
                time.sleep(0.2)

        assert client.get("domains").json()["domains"][0]["num_items"] == 5
        titles.write_text("3")
        service.process.send_signal(signal.SIGHUP)
        wait_for("toy: read again")
        assert client.get("domains").json()["domains"][0]["num_items"] == 3
        titles.write_text("many")
        service.process.send_signal(signal.SIGHUP)
        wait_for("not read again, what was loaded before goes on: invalid literal")
        assert client.get("domains").json()["domains"][0]["num_items"] == 3
        assert found
        assert set(found) == {200}
        keys.write_text(f"south {KEY}south\n")
        assert client.get("domains").status_code == 401
        south = {"X-API-Key": f"{KEY}south"}
        answers = [client.get("domains", headers=south) for _ in range(150)]
        assert [one.status_code for one in answers[:100]] == [200] * 100
        refused_ones = [one for one in answers if one.status_code == 429]
        assert refused_ones, "150 requests took half a minute"
        assert {one.headers["retry-after"] for one in refused_ones} == {"1"}
        assert client.get("health").status_code == 200
        assert service.stop() == 0
    lines = service.output
    assert re.search(r"^\S+T\S+ north /recommend 200 \d+ ms$", lines, re.M)
    assert re.search(r"^\S+T\S+ - /domains 401 \d+ ms$", lines, re.M)
    assert re.search(r"^\S+T\S+ south /domains 429 \d+ ms$", lines, re.M)
    assert KEY not in lines
    assert "crime-0001" not in lines


@pytest.mark.slow
def test_slow_and_many_clients_are_sent_away():
    with started(*TOYS, "0", "--timeout_s", "1", "--max_connections", "4") as service:
        address = service.address()
        place = ("127.0.0.1", int(address.rsplit(":", 1)[1].strip("/")))
        head = b"POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{"
        with socket.create_connection(place, timeout=20) as slow:
            slow.sendall(head)
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        idle = [socket.create_connection(place, timeout=20) for _ in range(4)]
        time.sleep(0.3)
        assert httpx.get(f"{address}health").status_code == 503
        for one in idle:
            one.close()
        time.sleep(0.3)
        assert httpx.get(f"{address}health").status_code == 200
        idle = [socket.create_connection(place, timeout=20) for _ in range(6)]
        begun = time.monotonic()
        idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        idle[1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")  # answered, then half a head
        time.sleep(0.3)
        assert httpx.get(f"{address}health").status_code == 503
        idle[0].sendall(b"al")  # a letter from time to time keeps nothing open
        for one in idle:
            with suppress(ConnectionResetError):
                while one.recv(4096):
                    pass
        assert time.monotonic() - begun < 5
        assert httpx.get(f"{address}health").status_code == 200
        with httpx.Client() as client:  # one that keeps its connection and asks again is served
            for _ in range(3):
                assert client.get(f"{address}health").status_code == 200
                time.sleep(0.6)
        large = httpx.post(f"{address}recommend", content=b"x" * 2_000_000, timeout=20)
        assert large.status_code == 413
        assert service.stop() == 0
