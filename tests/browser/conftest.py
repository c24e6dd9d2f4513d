"""A real browser for tests of the page."""

from __future__ import annotations

import pytest

import chromium


@pytest.fixture
def driver(tmp_path):
    chromium.install()
    with chromium.browser(tmp_path / "profile") as browser:
        yield browser
        assert chromium.console_errors(browser) == []
