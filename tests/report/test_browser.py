"""The report page in a real browser: it draws, fits a phone, prints, and hands out its numbers."""

import csv
import time

import plotly.graph_objects as go
import pytest
from analysis_toys import toy_domains, toy_run
from browser import axe_script, axe_violations, chromium, console_lines, open_at
from run_toys import write_run

from fedecider.cross_silo.page import _in_order, run_page
from fedecider.engine.result import RunResult
from fedecider.report.answer import Answer
from fedecider.report.figures import client_bars, colours_of, validation_curves
from fedecider.report.groups import activity_section, popularity_section
from fedecider.report.page import Conclusion, Download, PageTable, Section, write_page

PAPER = 680  # pixels between the margins of A4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the browser saves what it downloads."""
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def browser(saved):
    with chromium(saved) as driver:
        yield driver


def slider_figure() -> go.Figure:
    """Two bars with a slider over two rounds, as the figure of the fusion weights has one."""
    figure = go.Figure(go.Bar(x=["crime", "comics"], y=[1.0, -2.0]))
    steps = [
        {
            "label": str(round),
            "method": "restyle",
            "args": [{"y": [[1.0 * round, -2.0]]}],
        }
        for round in (1, 2)
    ]
    figure.update_layout(sliders=[{"active": 0, "steps": steps, "pad": {"t": 60}}], title={"text": "round 1"})
    return figure


NUMBERS = Download("numbers.csv", f'row,mean\n"a, b",{0.1 + 0.2!r}\n#%&,1e-17\n')
SCORES = PageTable(["row", "hit@10"], [["zero-shot student", "0.1"], ["", "0.2"]], "a caption " * 30)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with everything that is hard on a phone: a wide table, a long word, three panels, a slider."""
    curves = {"after": {name: [0.1, 0.2, 0.15] for name in ("crime", "comics", "children")}}
    wide = PageTable([f"column {n}" for n in range(12)], [["word" * 5] * 12] * 3, "wide")
    sections = [
        Section("Curves", ["A" * 200], [wide], [validation_curves(curves, [1, 2, 3], selected_round=2)], [NUMBERS]),
        Section("Slider", ["The end of the line has a canary", "seed"], [SCORES], [slider_figure()]),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    answer = Answer("ours", "do not join", ["Do not join: the canary sings.", "hit@10 " * 40], ["One seed."])
    conclusion = Conclusion(answer, ["ndcg@10"])
    return write_page(path, "Run toy <b>", "fedecider on three domains", sections, ["a leak"], conclusion)


def unfold(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    time.sleep(0.4)  # drawings take their width a moment later


def test_everything_is_drawn_and_nothing_is_loaded(browser, page):
    open_at(browser, page.as_uri(), 1200)
    assert console_lines(browser) == []
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(f => f.querySelectorAll('svg.main-svg').length)"
    )
    assert len(drawn) == 2
    assert min(drawn) > 0
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.title == "Run toy <b>"


def test_the_page_fits_a_phone(browser, page):
    open_at(browser, page.as_uri(), 375)
    assert browser.execute_script("return document.scrollingElement.scrollHeight") < 2000  # folded
    unfold(browser)
    assert browser.execute_script("return window.innerWidth") == 375
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 375
    wide = "const box = document.querySelector('.table'); return [box.scrollWidth, box.clientWidth]"
    inside, box = browser.execute_script(wide)
    assert inside > box  # the table is wider than its box, which scrolls
    assert (
        browser.execute_script("box = document.querySelector('.table'); box.scrollLeft = 50; return box.scrollLeft")
        == 50
    )


def test_bars_of_many_companies_with_long_names_are_whole_on_a_phone(browser, tmp_path):
    """Every name stands in the picture, none over another one, in letters that can be read."""
    names = ["mean", *(f"nordwestdeutsche_kaufhaus_{number:04d}" for number in range(8))]
    of_each = {name: {"mean": 10.0, "low": 8.0, "high": 13.0} for name in names}
    rows = ("fedavg + ensemble", "local + ensemble", "text neighbours + counts")
    figure = client_bars(dict.fromkeys(rows, of_each), "Of 100 customers", colours_of(rows))
    conclusion = Conclusion(Answer("fedavg + ensemble", "join", ["Join."]), figure=figure)
    page = write_page(tmp_path / "report.html", "Run", "", [Section("a"), Section("b")], [], conclusion)
    open_at(browser, page.as_uri(), 375)
    time.sleep(0.4)
    assert (
        browser.execute_script("const box = document.querySelector('.plot'); return box.scrollWidth - box.clientWidth")
        == 0
    )
    shown = """return [...document.querySelectorAll('.plot text')].filter(t => t.textContent).map(t => {
        const box = t.getBoundingClientRect();
        return [t.textContent, box.left, box.right, box.top, box.bottom, parseFloat(getComputedStyle(t).fontSize)]})"""
    texts = browser.execute_script(shown)
    assert {*names, *rows} <= {text for text, *_ in texts}
    box = browser.execute_script(
        "const b = document.querySelector('.plot').getBoundingClientRect(); return [b.left, b.right]"
    )
    for text, left, right, top, bottom, size in texts:
        assert box[0] <= left < right <= box[1], text
        assert size >= 10
        apart = [one for one in texts if one[0] != text]
        assert all(one[2] <= left or right <= one[1] or one[4] <= top or bottom <= one[3] for one in apart), text


def test_a_slider_moves(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains

    open_at(browser, page.as_uri(), 1200)
    unfold(browser)
    state = """const plot = document.getElementById('figure-3-1');
        return [plot.data[0].y, plot.layout.sliders[0].active]"""
    assert browser.execute_script(state) == [[1, -2], 0]
    browser.execute_script("document.getElementById('figure-3-1').scrollIntoView({block: 'center'})")
    rail = browser.find_element("css selector", "#figure-3-1 .slider-rail-touch-rect")
    ActionChains(browser).move_to_element_with_offset(rail, rail.size["width"] // 2 - 3, 0).click().perform()
    assert browser.execute_script(state) == [[2, -2], 1]


def test_print_hides_nothing_and_fits_the_paper(browser, page):
    open_at(browser, page.as_uri(), PAPER)
    hidden = """return [...document.querySelectorAll(
        'h1, h2, p:not(.downloads), th, td, figcaption, .main-svg, .warnings li')]
        .filter(e => getComputedStyle(e).display === 'none' || getComputedStyle(e).visibility === 'hidden'
                     || e.getBoundingClientRect().width === 0).map(e => e.outerHTML.slice(0, 80))"""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        assert browser.execute_script(hidden) == []
        assert browser.execute_script("return document.scrollingElement.scrollWidth") <= PAPER
        overflow = "return getComputedStyle(document.querySelector('.table')).overflowX"
        assert browser.execute_script(overflow) == "visible"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_table_is_saved_from_a_file_without_a_server(browser, page, saved):
    open_at(browser, page.as_uri(), 1200)
    unfold(browser)
    browser.execute_script("document.querySelector('a[download]').scrollIntoView({block: 'center'})")
    browser.find_element("css selector", "a[download]").click()
    path, deadline = saved / "numbers.csv", time.monotonic() + 20
    while not path.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert path.read_text(encoding="utf-8") == NUMBERS.text
    assert [float(row[1]) for row in list(csv.reader(path.open()))[1:]] == [0.1 + 0.2, 1e-17]
    assert browser.current_url == page.as_uri()
    assert console_lines(browser) == []


SCREENS = [(1200, False), (1200, True), (375, False), (375, True)]


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_axe_finds_nothing(browser, page, width, dark):
    script = axe_script()
    open_at(browser, page.as_uri(), width, dark=dark)
    assert axe_violations(browser, script) == []
    unfold(browser)
    assert axe_violations(browser, script) == []


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory):
    """The page of a run with all that it can have: examples, ensemble aside, and the groups."""
    root = tmp_path_factory.mktemp("run")
    toy = RunResult.read(toy_run(root / "analysed").root)
    asked = (toy_domains(), {toy.reported: _in_order(toy, toy.reported, toy_domains())})
    folder = write_run(root / "run").root
    return run_page(folder, RunResult.read(folder), [activity_section(*asked), popularity_section(*asked)])


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_page_of_a_run_is_whole_quiet_and_accessible(browser, whole_page, width, dark):
    open_at(browser, whole_page.as_uri(), width, dark=dark)
    assert console_lines(browser) == []
    assert browser.execute_script("return document.scrollingElement.scrollHeight") < 6000
    unfold(browser)
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width
    undrawn = "return [...document.querySelectorAll('figure')].filter(f => !f.querySelector('svg.main-svg')).length"
    assert browser.execute_script(undrawn) == 0
    assert axe_violations(browser, axe_script()) == []
