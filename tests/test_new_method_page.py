"""docs/extend.md: its blocks run in their order, its methods keep their contracts, and its files are there."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from outside import REPOSITORY
from small_runs import decoder_settings

from fedecider.testing import check_method

pytestmark = pytest.mark.whole

PAGE = REPOSITORY / "docs" / "extend.md"
LONGEST = 40
"""Lines of a whole example."""


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The blocks as a module of their own: settings are looked up in its source."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "extend_page.py").write_text("\n\n".join(blocks()), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield import_module("extend_page")


def test_every_example_is_short():
    assert len(blocks()) >= 5
    assert max(block.count("\n") for block in blocks()) < LONGEST


def test_the_methods_of_the_page_keep_the_contract_of_their_track(page):
    check_method(page.BIAS)  # the other one is checked on the page


def test_the_reader_of_the_page_gives_what_it_says(page):
    (domain,) = page.data.values()
    assert len(domain.clients.users) == 20


def test_the_baseline_of_the_page_is_a_row_of_a_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {**decoder_settings(), "domains": "crime,comics", "num_rounds": 1}
    result = page.with_our_rule(None, config=settings, output="runs/rule", progress=False)
    assert 0 < result.table.loc["our rule", "hit@10"] < 1


def test_every_file_that_the_page_names_is_there():
    named = re.findall(r"`((?:fedecider|embedding_fr|idgen|tests|examples)/[\w./-]+)`", PAGE.read_text())
    assert len(named) > 3
    assert [path for path in named if not Path(REPOSITORY / path).exists()] == []
