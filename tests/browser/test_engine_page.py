"""The view of the engine in a real browser: that what is drawn is what the engine holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from martlet.toy import spell
from tests.browser.waiting import until
from tests.server.serving import Served, serving, wait_until

pytestmark = pytest.mark.browser
PAINTED = """id => { const canvas = document.getElementById(id);
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) colours.add(`${data[at]},${data[at + 1]},${data[at + 2]}`);
  return colours.size; }"""

RUNNING = "[...document.querySelectorAll('#numbers div')].find(n => n.textContent.startsWith('Running')).lastChild.textContent"


def number(page: Any, label: str) -> str:
    return str(page.locator(f"#numbers dt:has-text('{label}') + dd").inner_text())


@pytest.mark.parametrize("phone", [False, True])
def test_what_is_drawn_is_what_happens(open_page: Callable[..., Any], phone: bool) -> None:
    """Six requests of one prompt: four run, two wait, and afterwards their pages are cached."""
    with serving(spell("x" * 60), step_s=0.03, prefix_cache=True) as served:
        options = {"viewport": {"width": 360, "height": 640}} if phone else {}
        page = open_page(served.base + "/engine", **options)
        page.wait_for_selector("#numbers dd")
        assert number(page, "Running") == "0 of 4"
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(served.chat, "the same question " * 3, max_tokens=50) for _ in range(6)]
            until(page, "document.querySelectorAll('#sequences tbody tr').length === 6")
            until(page, f"{RUNNING} === '4 of 4'")
            assert number(page, "Waiting") == "2"
            until(page, "document.querySelectorAll('#tree rect').length >= 1")
            assert page.evaluate(PAINTED, "pages") >= 5  # free, four sequences'
            assert page.evaluate(PAINTED, "steps") >= 5
            assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
            assert all(future.result().status_code == 200 for future in asked)
        until(page, "document.querySelector('#queue-words').textContent === 'None.'")
        assert number(page, "Running") == "0 of 4"
        assert "cached for later" in page.locator("#page-keys").inner_text()
        assert page.locator("#pages").get_attribute("aria-label").startswith("0 one sequence")
        assert page.locator("#ttft .note").inner_text().startswith("6 since the start")
        assert page.locator("#itl .note").inner_text().startswith(f"{6 * 49} since the start")
        title = page.locator("#tree g").first.get_attribute("aria-label")
        assert title.endswith("cached, not in use")


def test_pause_and_a_server_that_comes_back(open_page: Callable[..., Any]) -> None:
    with serving(spell("abc")) as served:
        page = open_page(served.base + "/engine")
        page.forgiven += ["ERR_", "net::", "fetch"]
        page.wait_for_selector("#numbers dd")
        page.get_by_role("button", name="Pause").click()
        served.chat()
        page.wait_for_timeout(600)
        assert page.locator("#ttft").inner_text() == "Nothing yet."
        page.get_by_role("button", name="Continue").click()
        served.chat()
        until(page, "document.querySelector('#ttft').textContent.startsWith('2 since')")
        served.service.view.close()
        until(page, "document.querySelector('#status').textContent.includes('trying again')")


def test_a_page_that_is_closed_is_no_viewer(open_page: Callable[..., Any]) -> None:
    def n_viewers(served: Served) -> int:
        return served.service.view.n_viewers

    with serving(spell("abc")) as served:
        page = open_page(served.base + "/engine")
        wait_until(lambda: n_viewers(served) == 1)
        page.close()
        wait_until(lambda: n_viewers(served) == 0)
