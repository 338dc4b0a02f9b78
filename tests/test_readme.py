"""README.md and docs: every command is one that works, every link leads somewhere."""

import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from readme_commands import DOCUMENTS, REPOSITORY, commands, script_call, short, toy_world

from fedecider.cli.main import main as fedecider

README, INDEX = REPOSITORY / "README.md", REPOSITORY / "docs" / "README.md"
COMMANDS = [(document.name, words) for document in DOCUMENTS for words in commands(document)]
ACTIVATION = [".", ".venv/bin/activate"]


def dry_run(target: str) -> list[str]:
    """The commands that make would run."""
    done = subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", " ").splitlines()


def test_commands_are_found():
    found = [*commands(README), *commands(INDEX)]
    assert len(found) >= 10
    assert ["make", "demo"] in found
    assert {"federate", "recommend", "prepare_data", "compare", "leaderboard"} <= {
        call[0] for call in map(script_call, found) if call
    }


@pytest.mark.parametrize(
    ("document", "words"), COMMANDS, ids=lambda value: "-" if isinstance(value, str) else value[-1]
)
def test_every_command_is_understood(document, words, monkeypatch, capsys):
    if words[:2] == ["fedecider", "deploy"]:
        words = ["python", "scripts/deploy.py", *words[2:]]
    call = script_call(words)
    if words[0] == "make":
        assert dry_run(words[1])
    elif any(word.startswith("benchmarks/") for word in words):
        assert all((REPOSITORY / word).is_file() for word in words if word.startswith("benchmarks/"))
    elif words[0] == "fedecider":
        told = ["--help"] if words[1] in ("doctor", "completion") else [*words[2:], "--print_config"]
        monkeypatch.setattr(sys, "argv", ["fedecider"])
        with contextlib.suppress(SystemExit):
            assert fedecider([words[1], *told]) == 0, f"{document}: {capsys.readouterr().err}"
    elif call is None:
        assert words == ACTIVATION, f"{document}: {words} is no command that this test knows"
        assert any(".venv/bin/python" in line for line in dry_run("test"))
    elif call[0] == "deploy":
        pytest.importorskip("nvflare", reason="needs nvflare: pip install '.[deploy]'")
        monkeypatch.chdir(REPOSITORY)
        command, *options = call[1]
        place = options.index("--method") if "--method" in options else len(options)
        method = options[place : place + 2]  # the tracks have other options
        for help_of in (("deploy", [command, *method, "--help"]), ("federate", [*method, "--help"])):
            assert main(*help_of) == 0
        told = capsys.readouterr().out
        assert all(word in told for word in options if word.startswith("--")), f"{document}: {options}"
    else:
        monkeypatch.chdir(REPOSITORY)
        assert main(*call, "--print_config") == 0, f"{document}: {capsys.readouterr().err}"


def test_a_wrong_option_would_be_seen(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    assert main("federate", ["--domainz", "crime,comics"], "--print_config") == 2


def main(script: str, words: list[str], *more: str) -> int:
    """A script in this process: starting Python for every command would take a minute."""
    first = sys.path[0]
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"]([*words, *more])
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.path[0] = first


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_commands_of_the_readme_run_one_after_the_other(tmp_path):
    toy_world(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "FEDECIDER_DATA": str(tmp_path / "shared"),
        "OMP_NUM_THREADS": "1",
    }
    demo = next(line for line in dry_run("demo") if "scripts/federate.py" in line)
    shown = [*commands(README), *commands(INDEX)]
    words_of = [shlex.split(demo) if words == ["make", "demo"] else words for words in shown]
    calls = [call for call in map(script_call, words_of) if call]
    assert len(calls) == 10
    for script, words in calls:
        command = [sys.executable, str(REPOSITORY / "scripts" / f"{script}.py"), *short(script, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        if script == "recommend":
            assert "crime-" in done.stdout
    for left in ("runs/first/adapters/crime", "runs/shop/report.html", "runs/compare-amazon/compare.html"):
        assert (tmp_path / left).exists(), left


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        assert path.exists(), f"{document.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{document.name}: {target}"


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_document_is_listed():
    listed = INDEX.read_text(encoding="utf-8")
    for document in DOCUMENTS:
        assert document.name == "README.md" or f"]({document.name})" in listed, document.name
