"""The page of a run in a real browser: every section draws, follows the run, and says when it ends.

`watched` is what the page shows; a real run can take its place. Screenshots go to runs/page, or to the folder in
CLUSTERENV_SCREENSHOTS: docs/page has three of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

import chromium
from clusterenv.monitor.page.report import write_report
from clusterenv.monitor.page.serve import start
from fake_source import HOSTILE, FakeSource

pytestmark = pytest.mark.browser

SECTIONS = ["nodes", "slots", "rates", "sync", "events", "returns", "timeline"]
SCREENSHOTS = Path(os.environ.get("CLUSTERENV_SCREENSHOTS", "runs/page"))


@pytest.fixture
def watched():
    return FakeSource(745)


@pytest.fixture
def served(watched):
    page = start(watched)
    yield page
    page.close()


def open_page(driver, url, *, width=1280, scheme="light"):
    chromium.show_as(driver, width=width, scheme=scheme)
    driver.get(url)
    wait(driver, lambda: filled(driver))


def wait(driver, condition, seconds=15):
    WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda _: condition())


def filled(driver):
    return [section.get_attribute("id") for section in driver.find_elements(By.CSS_SELECTOR, "section.filled")]


def text(driver, selector):
    return driver.find_element(By.CSS_SELECTOR, selector).text


def inked(driver, canvas):
    """Return how many pixels of a canvas are drawn."""
    script = """
        const canvas = document.getElementById(arguments[0]);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 3; i < pixels.length; i += 4) count += pixels[i] > 0;
        return count;"""
    return driver.execute_script(script, canvas)


def test_every_section_shows_the_run(driver, watched, served):
    open_page(driver, served.url)
    assert driver.current_url == f"http://127.0.0.1:{served.port}/"
    assert filled(driver) == SECTIONS
    assert text(driver, "h1") == "lander-aps"
    rows = driver.find_elements(By.CSS_SELECTOR, "#nodes tbody tr")
    assert len(rows) == 4
    assert "PENDING (Priority)" in rows[3].text
    assert "cn-104" in rows[0].text
    for chart in ("rates-steps", "rates-shares", "sync-drift", "sync-versions", "returns-return", "returns-length"):
        paths = driver.find_elements(By.CSS_SELECTOR, f"#{chart} > svg path")
        assert any(len(path.get_attribute("d")) > 200 for path in paths), chart
    assert len(driver.find_elements(By.CSS_SELECTOR, "#sync-drift .mark")) > 10
    assert "2.7 %" in text(driver, "#sync-bytes")
    assert inked(driver, "slots-map") > 10_000
    assert inked(driver, "timeline-map") > 10_000


def test_the_page_follows_the_run_and_says_when_it_is_over(driver, watched, served):
    open_page(driver, served.url)
    seen = text(driver, "#numbers")
    for _ in range(2):
        watched.advance()
    wait(driver, lambda: text(driver, "#numbers") != seen)
    wait(driver, lambda: text(driver, "#run-state") in ("collecting", "learner works"))
    watched.finish()
    wait(driver, lambda: text(driver, "#run-state") == "over")
    assert "The run is over" in text(driver, "#notice")
    served.close()
    assert filled(driver) == SECTIONS


def test_a_lost_connection_is_said_and_the_data_stays_and_it_connects_again(driver, watched, served):
    open_page(driver, served.url)
    served.close()
    wait(driver, lambda: text(driver, "#run-state") == "connection lost")
    assert "Connection lost at" in text(driver, "#notice")
    assert filled(driver) == SECTIONS
    chromium.console_errors(driver)  # the browser reports connections that are refused
    again = start(watched, port=served.port, token=served.token)
    try:
        wait(driver, lambda: text(driver, "#run-state") == "collecting", seconds=30)
        assert not driver.find_element(By.ID, "notice").is_displayed()
        chromium.console_errors(driver)
    finally:
        again.close()
        chromium.console_errors(driver)


def test_texts_of_environments_do_not_run(driver, watched, served, tmp_path):
    open_page(driver, served.url)
    path = write_report(watched, tmp_path / "run.html")
    for url in (served.url, path.as_uri()):
        open_page(driver, url)
        details = driver.find_elements(By.CSS_SELECTOR, "#events-list details")
        for one in details:
            one.find_element(By.TAG_NAME, "summary").click()
        assert any(HOSTILE in one.find_element(By.TAG_NAME, "pre").text for one in details)
        assert not driver.find_elements(By.TAG_NAME, "img")
        assert driver.execute_script("return window.hacked") is None


def test_slots_can_be_read_with_pointer_and_keys_and_coloured_otherwise(driver, served):
    open_page(driver, served.url)
    heat = driver.find_element(By.ID, "slots-map")
    ActionChains(driver).move_to_element_with_offset(
        heat, -heat.size["width"] // 2 + 5, -heat.size["height"] // 2 + 22
    ).perform()
    assert text(driver, "#slots-detail").startswith("slot 0 ")
    heat.send_keys(Keys.ARROW_RIGHT * 37)
    detail = text(driver, "#slots-detail")
    assert detail.startswith("slot 37 ")
    assert "much slower than the others" in detail
    heat.send_keys(Keys.ARROW_RIGHT * 61)
    assert "incarnation 2" in text(driver, "#slots-detail")
    assert "last loss: ValueError" in text(driver, "#slots-detail")
    before = text(driver, "#slots-scale")
    Select(driver.find_element(By.ID, "slots-by")).select_by_value("incarnation")
    assert text(driver, "#slots-scale") != before


def test_events_are_filtered_and_new_ones_leave_open_tracebacks_open(driver, watched, served):
    open_page(driver, served.url)
    Select(driver.find_element(By.ID, "events-kind")).select_by_value("env_error")
    kinds = {one.text for one in driver.find_elements(By.CSS_SELECTOR, "#events-list .kind")}
    assert kinds == {"env_error"}
    driver.find_element(By.CSS_SELECTOR, "#events-list summary").click()
    watched.add_event("slow", "not shown")
    watched.add_event("env_error", "a new one", slots=(5,))
    watched.advance()
    wait(driver, lambda: "a new one" in text(driver, "#events-list"))
    assert "not shown" not in text(driver, "#events-list")
    assert "Traceback (most recent call last)" in text(driver, "#events-list details[open] pre")


def test_a_run_that_has_done_nothing_says_what_will_fill_each_section(driver):
    source = FakeSource(0)
    page = start(source)
    try:
        chromium.show_as(driver, width=1280)
        driver.get(page.url)
        wait(driver, lambda: text(driver, "#run-state") == "starting")
        empty = driver.find_elements(By.CSS_SELECTOR, "section .empty")
        assert len([one for one in empty if one.is_displayed() and len(one.text) > 30]) == len(SECTIONS)
        source.advance()
        wait(driver, lambda: "nodes" in filled(driver))
        assert not driver.find_element(By.CSS_SELECTOR, "#nodes .empty").is_displayed()
    finally:
        page.close()


def test_the_report_opens_from_a_file_without_a_network(driver, watched, tmp_path):
    watched.finish()
    path = write_report(watched, tmp_path / "run.html")
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    open_page(driver, path.as_uri())
    assert filled(driver) == SECTIONS
    assert text(driver, "#run-state") == "over"
    assert "This is a report" in text(driver, "#notice")
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


LOW_CONTRAST = """
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => {
      const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
      for (let one = element; one; one = one.parentElement) {
        const rgb = parse(getComputedStyle(one).backgroundColor);
        if (rgb.length === 3 || rgb[3] > 0.99) return rgb.slice(0, 3);
      }
      return [255, 255, 255];
    };
    const poor = [];
    const texts = "h1,h2,h3,p,dt,dd,td,th,li,span,label,output,summary,b,caption,time";
    for (const element of document.querySelectorAll(texts)) {
      const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
      if (!own || !element.offsetParent) continue;
      const [a, b] = [light(parse(getComputedStyle(element).color).slice(0, 3)), light(ground(element))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) poor.push(`${element.tagName} ${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return poor;"""


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]
)
def test_it_fits_the_screen_with_enough_contrast(driver, name, width, scheme):
    watched = FakeSource(745, hostile=False)
    page = start(watched)
    try:
        open_page(driver, page.url, width=width, scheme=scheme)
        wait(driver, lambda: inked(driver, "timeline-map") > 10_000)
        assert driver.execute_script("return document.documentElement.scrollWidth") == width
        assert driver.execute_script(LOW_CONTRAST) == []
        chromium.screenshot(driver, SCREENSHOTS / f"{name}.png")
        assert (SCREENSHOTS / f"{name}.png").stat().st_size < 200_000
    finally:
        page.close()
        wait(driver, lambda: text(driver, "#run-state") == "connection lost")
        chromium.console_errors(driver)


def test_controls_and_tables_have_names(driver, served):
    open_page(driver, served.url)
    for select in driver.find_elements(By.TAG_NAME, "select"):
        assert select.accessible_name, select.get_attribute("id")
    for graphic in driver.find_elements(By.CSS_SELECTOR, "canvas, .chart > svg"):
        assert len(graphic.accessible_name) > 10
    for table in driver.find_elements(By.CSS_SELECTOR, "table:not([hidden])"):
        assert table.find_elements(By.CSS_SELECTOR, "thead th[scope=col]")
        assert table.find_elements(By.CSS_SELECTOR, "tbody th[scope=row]")
