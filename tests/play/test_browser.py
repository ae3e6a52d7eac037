"""The page in a real browser, before real servers: `vllm-mtpc play`, as somebody would type it.

MTPC_SCREENSHOT=FILE keeps the picture that the documentation shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_mtpc.engine.server import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("chromedriver") is None, reason="no browser to drive: apt install chromium chromium-driver"
    ),
]
WAIT_S = 120.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("play") / "log"
    command = [sys.executable, "-m", "vllm_mtpc", "play", "--port", str(port)]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            until = time.monotonic() + 300
            while "open http://" not in log.read_text():
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert process.wait(60) is not None


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options, profile = webdriver.ChromeOptions(), tmp_path_factory.mktemp("profile")
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", f"user-data-dir={profile}"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield made
    made.quit()


class Page:
    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get(address)
        self.wait("document.body.dataset.ready === 'true'")

    def run(self, script: str) -> Any:
        return self.browser.execute_script(f"return {script}")

    def wait(self, script: str) -> None:
        until = time.monotonic() + WAIT_S
        while not self.run(script):
            assert time.monotonic() < until, (script, self.run("document.body.innerText"))
            time.sleep(0.1)

    def set(self, name: str, value: Any) -> None:
        self.run(f"(() => {{ const one = document.getElementById({name!r}); one.value = {value!r}; "
                 "one.dispatchEvent(new Event('input')); })()")  # fmt: skip

    def text(self, name: str) -> str:
        return self.browser.find_element("id", name).text

    def click(self, name: str) -> None:
        self.browser.find_element("id", name).click()

    def press(self, *names: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.browser.switch_to.active_element.send_keys(*(getattr(Keys, name) for name in names))

    def race(self) -> None:
        self.press("CONTROL", "ENTER")
        self.wait("running === null && plain.steps > 0")


@pytest.fixture
def page(browser: Any, address: str) -> Page:
    browser.set_window_size(1280, 1180)
    return Page(browser, address)


@pytest.mark.slow
def test_race_shows_both_answers(page: Page) -> None:
    page.set("length", 200)
    page.click("apart")
    page.race()
    assert "The text is the same." in page.text("verdict")
    assert page.run("plain.rate") == 1 and page.run("ours.rate") > 1.5
    assert page.run("plain.tokens") == page.run("ours.tokens") == 200
    marked = page.run("[...document.querySelectorAll('#ours .draft')].map(one => Number(one.dataset.k))")
    accepted = page.run("ours.accepted.reduce((sum, count) => sum + count)")
    assert accepted == page.run("ours.tokens - ours.steps") > 50  # as the server counts
    # as the chunks came, on a busy machine some of them together
    assert len(marked) >= accepted / 2 and min(marked) == 1 and 4 <= max(marked) <= 7
    assert not page.run("document.querySelectorAll('#plain .draft').length")
    shown = page.run(
        "[...document.querySelectorAll('#bars > div > span:first-child')].map(one => parseInt(one.textContent))"
    )
    assert len(shown) == 7 and shown[0] > 30 and shown == sorted(shown, reverse=True)
    if file := os.environ.get("MTPC_SCREENSHOT"):
        Path(file).write_bytes(page.browser.get_screenshot_as_png())


def test_drafts_and_head_can_be_changed(page: Page) -> None:
    page.set("length", 60)
    page.set("drafts", 0)
    page.race()
    assert page.run("ours.rate") == 1 and page.run("plain.whole === ours.whole")
    page.set("drafts", 2)
    page.set("temperature", 1)
    page.run("document.getElementById('head').selectedIndex = 1")
    page.race()
    assert page.run("document.getElementById('ours-name').textContent") == "with hmm"
    accepted = page.run("ours.accepted")
    assert accepted[0] >= accepted[1] > 0 and not any(accepted[2:])
    assert "The text is the same." in page.text("verdict")  # of a seed, at T=1


def test_verdict_is_a_median_of_races_of_20_tokens_or_more(page: Page) -> None:
    """Speeds are set by the test; texts and counts are the servers'."""
    assert int(page.run("document.getElementById('length').max")) == 8192 and not page.run("$('chat').checked")
    factors = iter([3, 1, 2, 5])
    texts = []
    for tokens in (30, 30, 10, 30, 30):
        page.set("length", tokens)
        if tokens >= 20:
            speed = f"{next(factors)} * plain.speed"
            page.run(f"Object.defineProperty(ours, 'speed', {{configurable: true, get: () => {speed}}})")
        page.race()
        texts.append(page.text("verdict"))
    assert [text[:4] for text in texts if "plain vLLM" in text] == ["3.00", "2.00", "2.00", "2.50"]
    assert "too few to compare" in texts[2] and "median of 4 races" in texts[4] and "pass" not in "".join(texts)
    page.click("apart")  # other settings, other races
    page.race()
    assert "median" not in page.text("verdict")


def test_escape_stops_the_race(page: Page) -> None:
    """Pressed by the page itself in the first step: a driver may come too late."""
    escape = "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    page.run(f"(() => {{ const own = ours.step; ours.step = event => {{ own.call(ours, event); {escape}; }}; }})()")
    page.set("length", 900)
    page.click("go")
    page.wait("ours.steps > 0 && running === null")
    assert not page.run("ours.done") and page.run("ours.tokens") < 900
    assert page.run("document.querySelectorAll('.error').length") == 0


def test_page_shows_errors(page: Page) -> None:
    page.set("length", 60)
    page.set("prompt", "x" * 9000)  # longer than the demo target reads
    page.click("go")
    page.wait("document.querySelectorAll('.error').length === 2 && running === null")
    assert "answers 400" in page.run("document.querySelector('#plain .error').textContent")


def test_page_fits_a_phone(page: Page) -> None:
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        page.set("length", 40)
        page.race()
        page.race()  # the second verdict is longer: it names the races
        assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.run("document.querySelector('#ours').getBoundingClientRect().top") > page.run(
            "document.querySelector('#plain').getBoundingClientRect().bottom - 1"
        )  # below each other
        page.run("window.scrollTo(0, 0)")
        verdict = page.run("document.getElementById('verdict').getBoundingClientRect().bottom")
        assert page.text("verdict") and 0 < verdict <= 664  # the browser takes 180 pixels
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_page_works_by_keyboard(page: Page) -> None:
    """Every control is reached by Tab, and has a name."""
    reached = []
    page.run("document.body.focus()")
    for _ in range(14):
        page.press("TAB")
        reached.append(page.run("document.activeElement.id"))
    assert {"prompt", "head", "drafts", "temperature", "length", "go", "apart", "chat", "numbers"} <= set(reached)
    unnamed = page.run(
        "[...document.querySelectorAll('input, select, textarea')].filter(one => !one.labels.length).map(one => one.id)"
    )
    assert unnamed == []


def test_console_has_no_errors(browser: Any) -> None:
    assert [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
