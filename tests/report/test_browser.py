"""The report page in a real browser: it draws, fits a phone, prints, and its sliders move."""

import shutil

import plotly.graph_objects as go
import pytest

from fedecider.report.figures import PlotFigure, validation_curves
from fedecider.report.page import PageTable, Section, write_page
from fedecider.report.page_style import PRINT_WIDTH

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PAPER = 680  # pixels between the margins of A4


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium or no chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def slider_figure() -> PlotFigure:
    """Two bars with a slider over two rounds, as the figure of the fusion weights has one."""
    figure = go.Figure(go.Bar(x=["crime", "comics"], y=[1.0, -2.0]))
    steps = [
        {
            "label": str(round),
            "method": "update",
            "args": [{"y": [[1.0 * round, -2.0]]}, {"title.text": f"round {round}"}],
        }
        for round in (1, 2)
    ]
    figure.update_layout(sliders=[{"active": 0, "steps": steps, "pad": {"t": 60}}], title={"text": "round 1"})
    return PlotFigure(figure, {})


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with everything that is hard on a phone: a wide table, a long word, three panels, a slider."""
    curves = {"after": {name: [0.1, 0.2, 0.15] for name in ("crime", "comics", "children")}}
    wide = PageTable([f"column {n}" for n in range(12)], [["word" * 5] * 12] * 3, "wide")
    sections = [
        Section("Curves", ["A" * 200], [wide], [validation_curves(curves, [1, 2, 3], selected_round=2)]),
        Section("Slider", ["x"], [], [slider_figure()]),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_page(path, "Run toy <b>", "fedecider on three domains", sections, ["a warning"])


def open_at(browser, page, width: int, height: int = 800):
    """``page`` on a screen of ``width`` pixels; windows themselves do not get narrower than about 500."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("browser")  # what earlier pages left
    browser.get(page.as_uri())


def test_everything_is_drawn_and_nothing_is_loaded(browser, page):
    open_at(browser, page, 1200)
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(f => f.querySelectorAll('svg.main-svg').length)"
    )
    assert len(drawn) == 2
    assert min(drawn) > 0
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.title == "Run toy <b>"


def test_the_page_fits_a_phone(browser, page):
    open_at(browser, page, 375)
    assert browser.execute_script("return window.innerWidth") == 375
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 375
    wide = "const box = document.querySelector('.table'); return [box.scrollWidth, box.clientWidth]"
    inside, box = browser.execute_script(wide)
    assert inside > box  # the table is wider than its box, which scrolls
    assert (
        browser.execute_script("box = document.querySelector('.table'); box.scrollLeft = 50; return box.scrollLeft")
        == 50
    )


def test_a_slider_moves(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains

    open_at(browser, page, 1200)
    state = """const plot = document.getElementById('figure-2-1');
        return [plot.layout.title.text, plot.data[0].y, plot.layout.sliders[0].active]"""
    assert browser.execute_script(state) == ["round 1", [1, -2], 0]
    browser.execute_script("document.getElementById('figure-2-1').scrollIntoView({block: 'center'})")
    rail = browser.find_element("css selector", "#figure-2-1 .slider-rail-touch-rect")
    ActionChains(browser).move_to_element_with_offset(rail, rail.size["width"] // 2 - 3, 0).click().perform()
    assert browser.execute_script(state) == ["round 2", [2, -2], 1]


def test_print_hides_nothing_and_fits_the_paper(browser, page):
    open_at(browser, page, PAPER)
    hidden = """return [...document.querySelectorAll('h1, h2, p, th, td, figcaption, .main-svg, .warnings li, nav a')]
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


def test_drawings_take_the_width_of_the_paper_and_go_back(browser, page):
    open_at(browser, page, 1200)
    width = "return document.querySelector('#figure-1-1 .main-svg').getBoundingClientRect().width"
    before = browser.execute_script(width)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(width) == PRINT_WIDTH
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(width) == before > PRINT_WIDTH
