"""What tests of the chat page share: opening it, asking, waiting for the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.browser.waiting import until
from tests.server.serving import Served

Open = Callable[..., Any]
HOSTILE = (
    "<script>window.hit=1</script><img src=x onerror='window.hit=1'> **bold** "
    "[a](javascript:window.hit=1) [b](https://example.org/) ![c](https://evil.example/c.png)\n\n"
    "<style>body{display:none}</style>\n\n```html\n<script>window.hit=1</script>\n```\n"
)


def opened(open_page: Open, served: Served, path: str = "/", **options: Any) -> Any:
    """The page, once it has met the server; `page.asked` grows with the bodies that it sends."""
    page = open_page(served.base + path, **options)
    page.forgiven.append("400 (Bad Request)")  # it asks which response formats are supported
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.post_data_json) if is_chat(request) else None)
    until(page, "document.title !== 'Martlet'")
    return page


def is_chat(request: Any) -> bool:
    return bool(request.url.endswith("/v1/chat/completions"))


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Any) -> Any:
    """The last answer, once it is whole."""
    page.wait_for_selector("#send:visible")
    return page.locator(".message.assistant").last
