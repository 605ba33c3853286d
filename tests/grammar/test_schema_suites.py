"""The official JSON-Schema-Test-Suite and a part of MaskBench, as data.

Source: github.com/json-schema-org/JSON-Schema-Test-Suite (MIT, tests/data/json_schema/LICENSE),
drafts 2020-12, 7 and 4; MaskBench, arXiv:2501.10868. A test of the suite that is not met must be
one of the narrowings that are documented: a whole number is not written with a fraction, a format
is enforced, references to other documents are refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from martlet.errors import RequestError
from martlet.grammar.json_schema import coverage, schema_start
from tests.grammar.schema_texts import ANY_ORDER, DATA, accepts, text_of

DIALECTS = {
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
    "7": "http://json-schema.org/draft-07/schema#",
    "4": "http://json-schema.org/draft-04/schema#",
}
REFUSED_FILES = {"dynamicRef", "refRemote", "vocabulary"}
REFUSED_ELSEWHERE = (
    # groups: no value meets the schema, other documents, formats that are not regular, items of
    # uniqueItems
    47
)
NARROWER = 37  # valid tests that are rejected
RIGHT = 2444


def suite(draft: str) -> list[dict[str, Any]]:
    lines = (DATA / f"suite-{draft}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def is_narrowed(group: dict[str, Any], data: Any) -> bool:
    """Whether a valid test may be rejected: a format, a whole number with a fraction, keywords
    turned off.
    """
    return group["file"] in ("format", "vocabulary") or (
        ".0" in text_of(data) and group["file"] in ("const", "enum", "type")
    )


def test_official_suite() -> None:
    right, narrower, refused = 0, 0, 0
    for draft, name in DIALECTS.items():
        for group in suite(draft):
            schema = group["schema"]
            if isinstance(schema, dict) and "$schema" not in schema:
                schema = {"$schema": name, **schema}
            try:
                start = schema_start(schema, ANY_ORDER)
            except RequestError:
                refused += group["file"] not in REFUSED_FILES
                continue
            for valid, data in group["tests"]:
                ok = accepts(start, text_of(data))
                assert not ok or valid, f"{draft} {group['file']}: {group['description']} accepts {data!r}"
                assert ok or not valid or is_narrowed(group, data), (
                    f"{draft} {group['file']}: {group['description']} rejects {data!r}"
                )
                narrower += valid and not ok
                right += ok == valid
    assert narrower <= NARROWER
    assert refused <= REFUSED_ELSEWHERE
    assert right >= RIGHT


def test_maskbench_part() -> None:
    lines = (DATA / "maskbench.jsonl").read_text(encoding="utf-8").splitlines()
    wrong: list[str] = []
    for line in lines:
        row = json.loads(line)
        start = schema_start(row["schema"], ANY_ORDER)
        wrong += [row["id"] for valid, data in row["tests"] if accepts(start, text_of(data)) != valid]
    assert wrong == []
    assert len(lines) == 150


@pytest.mark.parametrize("draft", DIALECTS)
def test_refused_files_are_refused_for_a_reason(draft: str) -> None:
    why = {"only references within the document", "which of several schemas it names depends on the path"}
    for group in suite(draft):
        if group["file"] in ("dynamicRef", "refRemote"):
            problems = coverage(group["schema"]).problems
            assert all(any(reason in problem.why for reason in why) for problem in problems)
