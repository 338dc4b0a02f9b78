"""The notebooks of examples/: they run with few steps; what is kept of a run is small and of nobody's machine."""

import ast
import re
from functools import cache

import nbformat
import pytest

from examples.notebooks.execute import FOLDER, PARAMETERS, executed, stripped

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORT = {
    "tour": {"rounds": 1, "seeds": 1},
    "embedding_leaderboard": {"methods": ["fedmf"], "rounds": 30, "seeds": 1},
}


def texts(content: nbformat.NotebookNode) -> str:
    """All that the cells printed or showed, as text."""
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output["data"]["text/plain"] for output in outputs)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What a notebook shows after a short run."""

    @cache
    def run(name):
        work = tmp_path_factory.mktemp(name)
        return texts(stripped(executed(FOLDER / f"{name}.ipynb", work, **SHORT[name])))

    return run


def test_every_notebook_has_short_settings():
    assert {path.stem for path in NOTEBOOKS} == set(SHORT)


@pytest.mark.whole
def test_the_tour_goes_from_two_tables_to_an_adapter_of_plain_peft(shown):
    text = shown("tour")
    assert text.index("Gain: ") < text.index("Cost: ")
    assert re.search(r"^fedavg \+ ensemble +0\.\d+ +0\.\d+$", text, re.M)
    answer, plain = (
        re.findall(pattern, text, re.M) for pattern in (r"^\d +(planted-\d{4}) .* -\d", r"^\d +[A-Z]\D+ -\d")
    )
    assert len(answer) == len(plain) == 3
    assert "['README.md', 'adapters', 'backbone', 'manifest.json']" in text


@pytest.mark.slow
def test_the_leaderboard_has_its_rows_and_its_canary(shown):
    text = shown("embedding_leaderboard")
    assert {"fedmf", "popularity", "memoriser"} <= set(text.split())
    assert "fedrap" not in text
    paper, strict = map(float, re.findall(r"^memoriser +(\d\.\d+) +(\d\.\d+)$", text, re.M)[-1])
    assert strict < 0.2 < 0.35 < paper


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_whole_small_and_of_nobodys_machine(path):
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    assert path.stat().st_size < 60_000
    assert content == stripped(nbformat.read(path, as_version=4)), "run: make notebooks"
    assert sum(PARAMETERS in cell.metadata.get("tags", []) for cell in content.cells) == 1
    for cell in content.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)
            assert cell.execution_count, f"not run: {cell.source[:80]}"
            assert not [one for one in cell.outputs if one.output_type == "error"]
    assert not re.search(r"/(home|root|tmp|Users|work|opt)/|[A-Z]:\\\\", texts(content))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    content = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in content.cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    for target in targets:
        assert (path.parent / target).is_file(), target


def test_a_parameter_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="parameters"):
        executed(NOTEBOOKS[0], tmp_path, num_roundz=1)
