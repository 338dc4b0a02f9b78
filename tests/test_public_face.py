"""Workflows, issue forms and CITATION.cff: they parse, agree with pyproject.toml, and name files that are there."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fedecider.cli.main import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[1]
GITHUB = REPOSITORY / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PAGES = [REPOSITORY / name for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")]
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
"""Kinds of parts that an issue form may have."""


def read(path: Path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def project(key: str) -> str:
    """A string of pyproject.toml's [project]; tomllib is not in Python 3.10."""
    return re.search(rf'^{key} = "([^"]+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.M)[1]


def steps(name: str, job: str) -> list[dict]:
    return read(GITHUB / "workflows" / name)["jobs"][job]["steps"]


def test_ci_runs_on_every_python_that_the_project_allows():
    workflow = read(GITHUB / "workflows" / "ci.yml")
    allowed = SpecifierSet(project("requires-python"))
    expected = [f"3.{minor}" for minor in range(8, 30) if Version(f"3.{minor}") in allowed]
    job = workflow["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == expected
    assert job["env"]["PYTHON"] == "python${{ matrix.python }}"
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads "on" as true


def test_workflows_run_what_is_there():
    assert [step["run"] for step in steps("ci.yml", "check") if "run" in step] == ["bash .ci/run"]
    assert (REPOSITORY / ".ci" / "run").is_file()
    assert [step["run"] for step in steps("docs.yml", "site") if "run" in step] == ["make docs"]
    for name, job in (("ci.yml", "check"), ("docs.yml", "site"), ("release.yml", "build")):
        (setup,) = [step["with"] for step in steps(name, job) if "setup-python" in step.get("uses", "")]
        assert all((REPOSITORY / path).is_file() for path in setup["cache-dependency-path"].split())


def test_a_release_is_built_as_its_page_says_and_tried_from_another_folder():
    page = (REPOSITORY / "docs" / "releasing.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"## Build\n\n```\n(.*?)```", page, re.S)
    build, install, use = [step for step in steps("release.yml", "build") if "run" in step]
    assert build["run"] == told
    assert "--wheel" not in told  # python -m build alone makes the archive, and the wheel from the archive
    assert "dist/fedecider-*.whl" in install["run"]
    assert use["working-directory"] == "${{ runner.temp }}"
    assert {words.split()[1] for words in use["run"].splitlines()} <= set(COMMANDS)
    assert steps("release.yml", "build")[-1]["with"]["path"] == "dist"
    on = read(GITHUB / "workflows" / "release.yml")[True]
    assert on["push"]["tags"] == ["v*"]
    assert all(any(REPOSITORY.glob(path)) for path in on["pull_request"]["paths"])


def test_make_takes_the_python_of_the_workflow():
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "python3.99"}
    command = ["make", "-n", "-W", "pyproject.toml", "venv"]
    told = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout
    assert "python3.99 -m venv .venv" in told


def test_make_docs_builds_the_site_strictly():
    told = subprocess.run(["make", "-n", "docs"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "mkdocs build" in told
    settings = read(REPOSITORY / "mkdocs.yml")
    assert settings["strict"] is True
    assert f"{settings['site_dir']}/" in (REPOSITORY / ".gitignore").read_text().split()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_whole(form):
    content = read(form)
    assert {"name", "description", "body"} <= set(content)
    named = [part["id"] for part in content["body"] if part["type"] != "markdown"]
    assert len(named) == len(set(named)) > 2
    for part in content["body"]:
        assert part["type"] in FIELDS
        assert part["attributes"].get("label") or part["type"] == "markdown"
    for mentioned in re.findall(r"\b(?:docs|benchmarks)/[\w/.-]+\.md|\b[A-Z]+\.md", form.read_text()):
        assert (REPOSITORY / mentioned).is_file(), mentioned


def test_forms_lead_to_pages_that_are_there():
    assert {path.stem for path in FORMS} == {"bug", "number", "method"}
    for link in read(GITHUB / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]:
        path = link["url"].partition("/blob/main/")[2] or "SECURITY.md"
        assert (REPOSITORY / path).is_file()
    template = (GITHUB / "pull_request_template.md").read_text()
    for mentioned in re.findall(r"`((?:docs/)?[\w.]+\.(?:md|yml))`", template):
        assert (REPOSITORY / mentioned).is_file(), mentioned


def test_the_citation_is_one_of_this_version():
    cited = read(REPOSITORY / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "type"} <= set(cited)
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert str(cited["version"]) == project("version")
    assert cited["license"] == project("license")
    assert project("Documentation").startswith(cited["repository-code"])
    for work in (cited, *cited["references"]):
        assert work["authors"]
        assert all("name" in one or {"given-names", "family-names"} <= set(one) for one in work["authors"])
    papers = (REPOSITORY / "docs" / "papers.md").read_text(encoding="utf-8")
    assert f"version = {{{cited['version']}}}" in papers  # its BibTeX
    for work in cited["references"]:
        assert work["title"] in papers
        assert all(one["value"].removeprefix("arXiv:") in papers for one in work["identifiers"])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_of_the_pages_at_the_root_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert targets
    for target in targets:
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).is_file(), target


def test_contributing_names_targets_of_make():
    for target in re.findall(r"^make (\w+)", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.M):
        assert subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True).returncode == 0, target
