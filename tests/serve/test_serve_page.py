"""The page in a real browser: by mouse and by keyboard, on a phone, in the dark, with hostile titles and with a key."""

import pytest
from browser import axe_script, axe_violations, chromium, console_lines, open_at
from serve_toys import LONG, MARKUP, TITLES, listening, world

from fedecider.serve.config import Limits

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="needs selenium: pip install '.[browser]'").Keys

PHONE = 375
KEY = "0123456789abcdef"
CROWDED = ["The Silent Harbour", MARKUP, LONG]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        driver.implicitly_wait(10)
        yield driver


@pytest.fixture(scope="module")
def site():
    with listening(world(Limits(window_ms=0.0))) as address:
        yield address


@pytest.fixture(scope="module")
def locked_site():
    with listening(world(Limits(window_ms=0.0, max_k=5), KEY)) as address:
        yield address


@pytest.fixture
def page(browser, site):
    open_at(browser, site, 1200)
    shown(browser, "#ask")
    return browser


def wait(browser, script, *arguments):
    """What ``script`` returns, once it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(script, *arguments))


def shown(browser, selector):
    script = "const one = document.querySelector(arguments[0]); return one && one.getClientRects().length > 0"
    return wait(browser, script, selector)


def one(browser, selector):
    return browser.find_element("css selector", selector)


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)", selector
    )


def press(browser, *keys):
    """Keys for whatever has the focus, as a keyboard sends them."""
    for key in keys:
        browser.switch_to.active_element.send_keys(key)


def focused(browser):
    return browser.execute_script("const one = document.activeElement; return one.id || one.ariaLabel")


def pick(browser, title):
    field = one(browser, "#title")
    field.send_keys(title)
    script = """const found = [...document.querySelectorAll('#matches [role=option]')];
        return !document.getElementById('matches').hidden && found.find(o => o.textContent.startsWith(arguments[0]))"""
    wait(browser, script, title).click()
    wait(browser, "return document.getElementById('matches').hidden")


def answered(browser):
    shown(browser, "#answer")
    return texts(browser, "#found .name")


def quiet(browser):
    assert console_lines(browser) == []


def test_search_pick_order_and_recommend_by_mouse(page):
    assert texts(page, "#domain option") == ["crime", "comics"]
    assert [one(page, f"#domain-{part}").text for part in ("items", "ensemble")] == ["7", "with"]
    for title in CROWDED:
        pick(page, title)
    assert texts(page, "#picked .name") == CROWDED
    one(page, "#picked li:nth-child(3) button").click()
    assert texts(page, "#picked .name") == [CROWDED[0], LONG, MARKUP]
    one(page, "#picked li:nth-child(1) button:nth-of-type(2)").click()
    assert texts(page, "#picked .name") == [LONG, CROWDED[0], MARKUP]
    one(page, "#picked li:nth-child(3) button:nth-of-type(3)").click()
    assert texts(page, "#picked .name") == [LONG, CROWDED[0]]
    one(page, "#repeats").send_keys("something new")
    one(page, "#recommend").click()
    assert answered(page) == ["The Last Ledger", "The Silent Witness", MARKUP, "Ünïcode Straße", "Harbour Lights"]
    assert one(page, "#found .soft").text == "crime-0001, score -1.000"
    assert one(page, "#found .features").text == "model −1.25, counts +0.63"
    assert texts(page, "#alpha .label") == ["crime75.0 %", "comics25.0 %"]
    widths = "return [...document.querySelectorAll('#alpha .fill')].map(f => f.offsetWidth / f.parentNode.offsetWidth)"
    assert page.execute_script(widths) == pytest.approx([0.75, 0.25], abs=0.02)
    assert texts(page, "#notes li") == ["a note"]
    assert texts(page, "#feature-texts dt") == ["model", "counts"]
    assert page.execute_script("return window.hacked") is None
    quiet(page)


def test_everything_by_keyboard(page):
    press(page, Keys.TAB)
    assert focused(page) == "domain"
    press(page, *[Keys.TAB] * 3)  # past the two words that are explained below the domain
    assert focused(page) == "title"
    press(page, "silent")
    options = "return [...document.querySelectorAll('#matches [role=option]')].map(o => o.textContent)"
    found = wait(page, options)
    assert found[:2] == ["The Silent Harbour crime-0000", "The Silent Witness crime-0002"]
    last = len(found) - 1
    assert last >= 1
    field = one(page, "#title")
    assert field.get_attribute("aria-expanded") == "true"
    assert field.get_attribute("aria-activedescendant") is None
    press(page, Keys.ENTER)  # nothing chosen: nothing picked, nothing asked
    assert texts(page, "#picked .name") == []
    moves = (
        (Keys.ARROW_DOWN, 0),
        (Keys.ARROW_DOWN, 1),
        (Keys.ARROW_UP, 0),
        (Keys.ARROW_UP, last),
        (Keys.ARROW_DOWN, 0),
    )
    for key, place in moves:
        press(page, key)
        assert field.get_attribute("aria-activedescendant") == f"match-{place}"
        selected = "return [...document.querySelectorAll('#matches li')].map(o => o.ariaSelected === 'true')"
        assert page.execute_script(selected) == [at == place for at in range(last + 1)]
    press(page, Keys.ESCAPE)
    assert field.get_attribute("aria-expanded") == "false"
    assert field.get_property("value") == "silent"
    press(page, Keys.ESCAPE)
    assert field.get_property("value") == ""
    for places in (1, 2):
        press(page, Keys.ARROW_DOWN)  # the first items, without a search
        wait(page, options)
        press(page, *[Keys.ARROW_DOWN] * places, Keys.ENTER)
    assert texts(page, "#picked .name") == TITLES[:2]
    assert focused(page) == "title"
    assert one(page, "#status").get_property("textContent") == "The Last Ledger picked, 2 in the history"
    press(page, *[Keys.TAB] * 4)
    assert focused(page) == "Move up: The Last Ledger"
    press(page, Keys.ENTER)
    assert texts(page, "#picked .name") == [TITLES[1], TITLES[0]]
    assert focused(page) == "Move up: The Last Ledger"
    press(page, Keys.TAB, Keys.TAB, Keys.SPACE)
    assert texts(page, "#picked .name") == [TITLES[0]]
    assert focused(page) == "Remove: The Silent Harbour"
    press(page, Keys.TAB)
    assert focused(page) == "k"
    press(page, Keys.BACKSPACE, Keys.BACKSPACE, "2", Keys.TAB, "buy", Keys.TAB, Keys.ENTER)
    assert answered(page) == TITLES[:1]  # what the history holds, and nothing else
    assert focused(page) == "answer-heading"
    quiet(page)


def test_without_a_history_nothing_is_asked(page):
    one(page, "#recommend").click()
    assert one(page, "#alert").text == "Pick at least one title first."
    assert focused(page) == "title"
    pick(page, "The Last Ledger")
    assert not one(page, "#alert").is_displayed()
    quiet(page)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, PHONE, 1200])
def test_it_fits_and_can_be_read(browser, site, width, dark, tmp_path):
    open_at(browser, site, width, dark=dark)
    shown(browser, "#ask")
    for title in CROWDED:
        pick(browser, title)
    one(browser, "#recommend").click()
    answered(browser)
    one(browser, "#title").send_keys("t")
    wait(browser, "return !document.getElementById('matches').hidden")
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width
    small = """return [...document.querySelectorAll('button, select, input:not([type=checkbox])')].filter(e =>
        e.getClientRects().length && (e.offsetHeight < 44 || e.offsetWidth < 44)).map(e => e.outerHTML)"""
    assert browser.execute_script(small) == []
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    quiet(browser)


def test_nothing_is_loaded_from_elsewhere(page, site):
    pick(page, "The Last Ledger")
    one(page, "#recommend").click()
    answered(page)
    loaded = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert len(loaded) >= 8
    assert all(name.startswith(site) for name in loaded)
    quiet(page)


def test_a_page_of_a_service_with_a_key_asks_for_it(browser, locked_site):
    open_at(browser, locked_site, PHONE)
    shown(browser, "#key-form")
    assert not one(browser, "#ask").is_displayed()
    quiet(browser)
    one(browser, "#key").send_keys("wrong", Keys.ENTER)
    shown(browser, "#alert")
    assert one(browser, "#alert").text.startswith("Not answered: got no API key or a wrong one")
    assert focused(browser) == "key"
    assert [line for line in console_lines(browser) if "401" not in line] == []  # the browser's own line
    one(browser, "#key").send_keys(KEY, Keys.ENTER)
    shown(browser, "#ask")
    assert not one(browser, "#key-form").is_displayed()
    assert not one(browser, "#alert").is_displayed()
    assert one(browser, "#k").get_attribute("max") == "5"
    pick(browser, "The Last Ledger")
    one(browser, "#k").clear()
    one(browser, "#k").send_keys("3", Keys.ENTER)
    assert len(answered(browser)) == 3
    assert browser.execute_script("return [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    quiet(browser)


def test_a_service_that_is_gone_is_told(browser):
    with listening(world()) as address:
        open_at(browser, address, PHONE)
        shown(browser, "#ask")
        pick(browser, "The Last Ledger")
    one(browser, "#recommend").click()
    shown(browser, "#alert")
    assert one(browser, "#alert").text == "Not answered: the service cannot be reached."


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(browser, site, locked_site, dark):
    script = axe_script()
    open_at(browser, locked_site, PHONE, dark=dark)
    shown(browser, "#key-form")
    assert axe_violations(browser, script) == []
    open_at(browser, site, PHONE, dark=dark)
    shown(browser, "#ask")
    assert axe_violations(browser, script) == []
    one(browser, "#recommend").click()
    for title in CROWDED:
        pick(browser, title)
    one(browser, "#recommend").click()
    answered(browser)
    one(browser, "#features summary").click()
    assert axe_violations(browser, script) == []
    one(browser, "#title").send_keys("t")
    wait(browser, "return !document.getElementById('matches').hidden")
    one(browser, "#title").send_keys(Keys.ARROW_DOWN)
    assert axe_violations(browser, script) == []
