"""The README of `martlet/grammar` names every file of the folder, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import martlet.grammar
from martlet.grammar.json_schema import compile_schema
from martlet.grammar.vocabulary import Vocabulary

FOLDER = Path(martlet.grammar.__file__).parent


def test_the_readme_names_every_file() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100
    order = text.split("## Reading order")[1].split("## Glossary")[0]
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", text))
    missing = {name for name in named if not (FOLDER / name).is_file() and not (FOLDER / "json" / name).is_file()}
    assert missing == set()
    files = {path.name for path in FOLDER.rglob("*.py")} - {"__init__.py"}
    assert files == {Path(name).name for name in re.findall(r"`([a-z0-9_]+\.py)`", order)}


def test_the_schema_that_the_readme_walks() -> None:
    texts = [b"{", b'"n"', b":", b"7", b"999", b"0", b"7}", b"7]", b"}", b"</s>"]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    grammar = compile_schema(schema, Vocabulary(texts, [len(texts) - 1]))
    matcher = grammar.matcher()
    assert all(matcher.advance(texts.index(text)) for text in (b"{", b'"n"', b":"))
    mask = np.zeros(1, np.uint32)
    matcher.mask(mask)
    assert [text for i, text in enumerate(texts) if mask[0] >> i & 1] == [b"7", b"999", b"7}"]
    assert matcher.advance(texts.index(b"7}"))
    matcher.mask(mask)
    assert mask[0] == 1 << len(texts) - 1
