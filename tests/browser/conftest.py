"""Chromium, driven by Playwright, where both are installed (Debian: `apt-get install chromium`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from martlet.toy import spell
from tests.browser.chatting import HOSTILE
from tests.server.serving import Served, serving

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for a file's tests; while it is there, so is an event loop of this thread, and no
    other can be run.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser is here: none of {', '.join(NAMES)}")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; whatever one of them complains of, or asks another server for, fails the test.

    `page.forgiven` is for words of complaints that a test provokes.
    """
    contexts = []
    complaints: list[str] = []

    def open_(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        page.forgiven = ["ERR_CONNECTION_REFUSED"]  # a test's server may end before its page
        base = "/".join(url.split("/")[:3])

        def complain(text: str) -> None:
            if not any(word in text for word in page.forgiven):
                complaints.append(text)

        page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((base, "blob:")) else complain(asked.url))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell(HOSTILE), context=2048) as server:
        yield server


@pytest.fixture
def slow() -> Iterator[Served]:
    with serving(spell("word " * 60), step_s=0.05, context=1024) as server:
        yield server
