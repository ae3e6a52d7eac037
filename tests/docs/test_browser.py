"""The site in a browser: nothing is fetched from elsewhere, nothing is wider than a phone, the search finds."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PHONE = {"width": 390, "height": 844, "pixelRatio": 2.0}
WIDE = """return [...document.querySelector('article').querySelectorAll('*')].filter(element =>
    element.getBoundingClientRect().right > window.innerWidth + 1 &&
    !element.closest('.md-typeset__scrollwrap, pre, .md-typeset__table')).map(found => found.outerHTML.slice(0, 80))"""
READY = """return !!document.querySelector('article h1') &&
    [...document.querySelectorAll('article table')].every(
        table => table.closest('.md-typeset__scrollwrap') || table.className)"""
CUT = """return [...document.querySelectorAll('article table code')].filter(code => {
    const all = document.createRange();
    all.selectNodeContents(code);
    return /^\\w+$/.test(code.textContent) && new Set([...all.getClientRects()].map(one => one.top)).size > 1;
}).map(code => code.textContent)"""  # words in the middle of which a line ends
BROKEN = "return [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # a page asks for many files at once


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = Server(("127.0.0.1", 0), partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    options.add_experimental_option("mobileEmulation", {"deviceMetrics": PHONE})
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def opened(browser: webdriver.Chrome, url: str) -> None:
    """The page, once the theme's script has wrapped its tables: those scroll within themselves."""
    browser.get(url)
    WebDriverWait(browser, 20).until(lambda it: it.execute_script(READY))


def fetched(browser: webdriver.Chrome) -> list[str]:
    """Addresses that were asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def test_pages_fit_a_phone_and_fetch_nothing_from_elsewhere(
    site: Path, address: str, browser: webdriver.Chrome
) -> None:
    wrong = {}
    for page in sorted(site.glob("*.html")):
        opened(browser, f"{address}/{page.name}")
        found = browser.execute_script(WIDE) + browser.execute_script(BROKEN) + browser.execute_script(CUT)
        asked = fetched(browser)
        assert any(url.startswith(address) for url in asked), page
        found += [url for url in asked if url.startswith(("http", "ws")) and not url.startswith(address)]
        found += [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        if found:
            wrong[page.name] = found[:5]
    assert not wrong, json.dumps(wrong, indent=1)


def test_what_is_too_wide_or_broken_would_be_found(address: str, browser: webdriver.Chrome) -> None:
    opened(browser, f"{address}/index.html")
    browser.execute_script(
        "document.querySelector('article').insertAdjacentHTML('beforeend', "
        '\'<p style="width: 2000px">wide</p><img id="no" src="no.svg">\')'
    )
    WebDriverWait(browser, 10).until(lambda it: it.execute_script("return document.getElementById('no').complete"))
    assert len(browser.execute_script(WIDE)) == 1 and len(browser.execute_script(BROKEN)) == 1


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_the_search_finds(address: str, site: Path, browser: webdriver.Chrome, is_on_disk: bool) -> None:
    browser.get(f"{site.as_uri() if is_on_disk else address}/index.html?q=chunk_windows")
    results = (By.CSS_SELECTOR, ".md-search-result__link")
    WebDriverWait(browser, 20).until(lambda it: it.find_elements(*results))
    links = [link.get_attribute("href") for link in browser.find_elements(*results)]
    assert any("/training.html" in link for link in links), links
