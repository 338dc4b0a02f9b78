"""What ``deploy.py status`` prints of FLARE's answers."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="the extra deploy is not installed")
from fedecider.deployment import commands, flare


@pytest.mark.parametrize(
    ("engine", "words"), [("stopped", "server: up, no run"), ("started", "server: up, a run goes on")]
)
def test_status_says_who_is_there_in_seconds_and_words(monkeypatch, capsys, engine, words):
    system = SimpleNamespace(
        server_info=SimpleNamespace(status=engine),
        client_info=[SimpleNamespace(name="site-crime", last_connect_time=time.time() - 5.0)],
    )
    job = {"job_id": "a1", "status": "RUNNING", "submit_time": "2026-11-23T02:45:06"}
    admin = SimpleNamespace(get_system_info=lambda: system, list_jobs=lambda: [job])
    monkeypatch.setattr(flare, "session", lambda kit: nullcontext(admin))
    commands.status(["--kit", "kits/admin"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == words
    assert printed[1] in {f"site site-crime: last heard of {seconds} s ago" for seconds in (5, 6, 7)}
    assert printed[2] == "job a1: RUNNING, submitted 2026-11-23T02:45:06"
