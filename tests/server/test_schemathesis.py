"""The server against its own description: whatever the schema allows is answered or refused, in the
shape of its API.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from martlet.toy import spell
from tests.server.serving import Served, serving

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("Hello"), max_n=4) as server:
        yield server
        server.check_idle()


def test_whatever_the_schema_allows(served: Served) -> None:
    description = schemathesis.openapi.from_url(f"{served.base}/openapi.json")
    operations = [found.ok() for found in description.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            response = case.call(timeout=20)
            text = f"{case.method} {case.path}: {response.status_code}: {response.text[:500]}"
            assert response.status_code < 500 or (response.status_code == 503 and "Retry-After" in response.headers), (
                text
            )
            if response.status_code >= 400 and "json" in response.headers.get("content-type", ""):
                error = response.json()["error"]
                assert {"type", "message"} <= set(error), text

        check()
