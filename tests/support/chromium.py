"""A real browser for tests of pages: Debian's Chromium, without a window, driven by selenium."""

from __future__ import annotations

import base64
import contextlib
import io
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
)


def install() -> None:
    """Install the browser and its driver if they are missing; without root, skip the tests that need them."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    done = subprocess.run(
        ["apt-get", "install", "--yes", "--quiet", "chromium", "chromium-driver"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"chromium is not installed, and could not be: {done.stderr[-300:]}")


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser with this new, empty profile, and end it."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()


def show_as(driver: webdriver.Chrome, *, width: int, height: int = 900, scheme: str = "light") -> None:
    """Set the size of the page in CSS pixels, and the preferred colour scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def screenshot(driver: webdriver.Chrome, path: Path) -> None:
    """Write the whole page, not only what is in view, as a small PNG."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def console_errors(driver: webdriver.Chrome) -> list[str]:
    """Return what the page has written to the console as an error since the last call; refused content included."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
