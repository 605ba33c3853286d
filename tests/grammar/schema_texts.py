"""What the tests of JSON Schema share: driving a grammar over text, small vocabularies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from martlet.grammar.json_schema import SchemaOptions, schema_start
from martlet.grammar.states import State
from martlet.grammar.vocabulary import Vocabulary

DATA = Path(__file__).resolve().parents[1] / "data" / "json_schema"
ANY_ORDER = SchemaOptions(ordered=False)
EOS = 0


def text_of(value: Any) -> str:
    """JSON as the grammar writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def runs(start: State, text: str | bytes) -> State | None:
    """The state after a text, None if it is no beginning of one."""
    state: State | None = start
    for byte in text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text:
        if state is None:
            return None
        state = state.step(byte)
    return state


def accepts(start: State, text: str | bytes) -> bool:
    """Whether a whole text is in the language."""
    state = runs(start, text)
    return state is not None and state.accepts


def meets(schema: Any, text: str, options: SchemaOptions = ANY_ORDER) -> bool:
    """Whether a grammar made of a schema accepts a text."""
    return accepts(schema_start(schema, options), text)


def vocabulary(texts: Iterable[str | bytes] = (), kernels: Any = None) -> Vocabulary:
    """All single bytes and some texts; id 0 ends an answer."""
    more = [text.encode() if isinstance(text, str) else text for text in texts]
    return Vocabulary([None, *(bytes([byte]) for byte in range(256)), *more], [EOS], kernels=kernels)
