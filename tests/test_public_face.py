"""Workflows, issue forms and CITATION.cff: they parse, agree with pyproject.toml, and name files that are there."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_of_the_pages_at_the_root_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert targets
    for target in targets:
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).is_file(), target


def test_the_version_is_one_wherever_it_is_written():
    citation, version = read(REPOSITORY / "CITATION.cff"), project("version")
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d[\d.]*) \(([\d-]+)\)$", changes, re.M)
    assert newest.groups() == (citation["version"], str(citation["date-released"]))
    assert citation["version"] == version
    assert f"fedecider-{version}-py3" in (REPOSITORY / "docs" / "operate.md").read_text(encoding="utf-8")


def test_contributing_names_targets_of_make():
    for target in re.findall(r"^make (\w+)", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.M):
        assert subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True).returncode == 0, target
