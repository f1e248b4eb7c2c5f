"""A real headless Chromium before a real HTTP server. What a page writes to the console as an error fails its test."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.fake_admin import FakeAdmin
from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HERE = Path(__file__).parent


def _chromium() -> str:
    """The browser's path. Without one these tests are skipped, unless they were said to be required, as in CI."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        problem = f"no browser: install Chromium (looked for {', '.join(NAMES)}), or set CHROMIUM to its path"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(problem)
        pytest.skip(problem)
    return found


# Not for the whole session: while it lives, its event loop occupies the thread that other tests run theirs in.
@pytest.fixture(scope="module")
def browser():
    path = _chromium()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Console:
    """The errors that a page reported. `expected` are patterns of those that a test provokes."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.expected: list[str] = []

    def watch(self, page: Page) -> None:
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    @property
    def unexpected(self) -> list[str]:
        return [e for e in self.errors if not any(re.search(pattern, e) for pattern in self.expected)]


@pytest.fixture
def console():
    return Console()


@pytest.fixture
def page(browser: Browser, console: Console):
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, locale="en-GB", timezone_id="UTC")
    page = context.new_page()
    page.set_default_timeout(15_000)
    console.watch(page)
    yield page
    context.close()
    assert console.unexpected == []


@pytest.fixture(scope="module")
def _fake_server():
    engine, admin = FakeEngine(), FakeAdmin()
    engine.metrics = admin.metrics
    with running_server(engine, admin=admin) as server:
        server.admin = admin
        yield server


@pytest.fixture
def fake(_fake_server):
    """A server with made-up numbers; its `admin` says what they are."""
    _fake_server.admin.reset()
    return _fake_server
