"""A headless Chromium for the tests of pages, and axe-core on what it shows.

axe-core is not part of this project. ``npm pack axe-core`` and ``tar xf`` give ``package/axe.min.js``; the environment
variable ``FEDECIDER_AXE`` names that file.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
AXE = "FEDECIDER_AXE"
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A driver with its profile and its downloads in ``folder``; skips where selenium or the browser is absent."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium or no chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def open_at(browser: Any, address: str, width: int, height: int = 800, dark: bool = False) -> None:
    """``address`` on a screen of ``width`` pixels; windows themselves do not get narrower than about 500."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    browser.get_log("browser")  # what earlier pages left
    browser.get(address)


def console_lines(browser: Any) -> list[str]:
    """What the page has written to the console since it was opened."""
    return [line["message"] for line in browser.get_log("browser")]


def axe_script() -> str:
    """The text of axe-core; skips with the reason where ``FEDECIDER_AXE`` does not name it."""
    path = os.environ.get(AXE, "")
    if not path:
        pytest.skip(f"{AXE} is not set: it should name axe.min.js of the npm package axe-core")
    if not Path(path).is_file():
        pytest.fail(f"got {AXE}={path}, expected the file axe.min.js of the npm package axe-core")
    return Path(path).read_text(encoding="utf-8")


def axe_violations(browser: Any, script: str) -> list[str]:
    """What axe-core finds wrong with the page that is open: the rule, its text, and the first places."""
    browser.execute_script(script)
    found = browser.execute_async_script(
        """const done = arguments[arguments.length - 1];
        axe.run(document, {runOnly: arguments[0], resultTypes: ["violations"]})
           .then(result => done({violations: result.violations}), error => done({error: String(error)}));""",
        list(RULES),
    )
    assert "error" not in found, found["error"]
    return [
        f"{one['id']}: {one['help']}: " + "; ".join(str(node["target"]) for node in one["nodes"][:5])
        for one in found["violations"]
    ]
