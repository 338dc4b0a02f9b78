"""The Dockerfile, as far as it can be tried without building it: what it copies, starts and asks."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from serve_toys import listening, world

from fedecider.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "Dockerfile").read_text()
IGNORED = (REPOSITORY / ".dockerignore").read_text().splitlines()


def words_of(instruction):
    """The JSON list of the instruction of that name."""
    return json.loads(re.findall(rf"^{instruction} (\[.*\])$", TEXT, re.M)[-1])


def test_all_that_is_copied_is_there_and_nothing_else_is_sent():
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.M) for word in shlex.split(line)[:-1]}
    assert copied == {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert "*" in IGNORED
    assert all((REPOSITORY / name).exists() for name in copied)
    assert {"fedecider", "idgen", "distill", "embedding_fr"} <= copied


def test_its_command_is_understood(capsys):
    command = [*words_of("ENTRYPOINT"), *words_of("CMD")]
    assert command[:2] == ["/venv/bin/fedecider", "serve"]
    with pytest.raises(SystemExit) as stop:
        main([*command[1:], "--print_config"])
    assert stop.value.code == 0
    assert "host: 0.0.0.0" in capsys.readouterr().out


def test_its_health_check_asks_the_service():
    (check,) = re.findall(r"^HEALTHCHECK.*\s+CMD (\[.*\])$", TEXT.replace("\\\n", " "), re.M)
    python, *words = json.loads(check)
    assert python == "/venv/bin/python"
    with listening(world()) as address:
        own = [word.replace("http://127.0.0.1:8000/", address) for word in words]
        assert own != words
        assert subprocess.run([sys.executable, *own], capture_output=True, timeout=60).returncode == 0
    assert subprocess.run([sys.executable, *own], capture_output=True, timeout=60).returncode == 1
