"""Waiting for what a page will be. Playwright's own way evaluates text in the page, which the
pages' policy forbids.
"""

from __future__ import annotations

import time
from typing import Any


def until(page: Any, expression: str, timeout_s: float = 15.0) -> None:
    """Wait until a JavaScript expression is true."""
    end = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(20)
