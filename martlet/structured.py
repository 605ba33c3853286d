"""The form of an answer: a schema, a pattern, a grammar, a list of choices, or tags in free text.

A `Structured` is checked for its form here and compiled in `grammar/grammars.py`, which is read
next. It is plain data, so that requests, capsules and other processes carry it: schemas are kept as
JSON text, in the order in which they were written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from martlet.errors import RequestError, nearest, shown

STRING_LIMIT = 1 << 16  # bytes
ITEM_LIMIT = 1 << 12

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "tags")
_MOST_CHARACTERS = 1 << 20
_MOST_CHOICES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A part of a text with a form: its begin, the JSON Schema of its content, and its end."""

    begin: str
    end: str = ""
    schema: str = "{}"  # JSON text; a mapping or true/false is taken too

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            if not isinstance(getattr(self, name), str):
                raise _refuse(f"tags.{name}", getattr(self, name), "text")
        if not self.begin:
            raise _refuse("tags.begin", self.begin, "text that is not empty")
        object.__setattr__(self, "schema", _json_text("tags.schema", self.schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """Exactly one of `json`, `json_object`, `regex`, `choice`, `grammar` and `tags`.

    JSON and tags together, with `at_least_one`, mean either. Raises RequestError for anything else.
    """

    json: str | None = None  # a JSON Schema, as JSON text; a mapping or true/false is taken too
    json_object: bool = False  # any JSON object
    regex: str | None = None  # the whole answer matches it
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # GBNF, or Lark's EBNF
    tags: tuple[Tag, ...] | None = None
    # of tags: text that, once written, must go on as one of them; by default each tag's whole
    # beginning
    triggers: tuple[str, ...] = ()
    # of tags: the answer begins with one, and there is no free text but between tags
    at_least_one: bool = False
    stop_after_first: bool = False
    # of tags: only the beginning of the answer is one; an answer that begins otherwise is free
    at_start: bool = False
    # of JSON: no white space; a space after comma and colon, as Python writes it; or any, bounded
    whitespace: Literal["compact", "single", "any"] = "compact"
    ordered: bool = True  # of JSON: properties come in the schema's order
    # of JSON, where the schema does not bound them; 0: none, None: what the engine's settings say
    string_limit: int | None = None  # bytes of a string
    item_limit: int | None = None  # items of an array, properties of an object
    # Where reasoning comes first: the answer is free until this text, and then held.
    after: str | None = None
    after_begin: str | None = None  # the text that begins the reasoning, if it need not be there

    def __post_init__(self) -> None:
        if self.json is not None:
            self._set("json", _json_text("json", self.json))
        for name in ("json_object", "at_least_one", "stop_after_first", "at_start", "ordered"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        for name in ("regex", "grammar", "after", "after_begin"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and _is_unicode(value)):
                raise _refuse(name, value, "text")
        if self.choice is not None:
            self._set("choice", _texts("choice", self.choice, _MOST_CHOICES))
        most = 1024 if self.at_start else 64
        self._set("triggers", _texts("triggers", self.triggers, most) if self.triggers else ())
        if self.tags is not None:
            self._set("tags", _tags(self.tags))
        if self.whitespace not in ("compact", "single", "any"):
            raise _refuse("whitespace", self.whitespace, "'compact', 'single' or 'any'")
        for name, what in (("string_limit", "bytes"), ("item_limit", "items")):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise _refuse(name, value, f"a number of {what}, 0 for none")
        if self.after == "" or self.after_begin == "" or (self.after_begin and not self.after):
            raise _refuse("after", self.after, "the text that ends the reasoning, or none")
        self._check_kind()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_kind(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1 and not (
            len(given) == 2 and "tags" in given and self.at_least_one and given[0].startswith("json")
        ):
            raise RequestError(
                f"structured: found {' and '.join(given) or 'nothing'}, expected exactly one of {', '.join(_KINDS)}.",
                param="structured",
            )
        size = len(self.json or "") + len(self.regex or "") + len(self.grammar or "")
        if size > _MOST_CHARACTERS:
            raise RequestError(
                f"structured: found {size:,} characters, expected at most {_MOST_CHARACTERS:,}.", param="structured"
            )
        for trigger in self.triggers:
            if self.tags is None or not any(tag.begin.startswith(trigger) for tag in self.tags):
                raise _refuse("triggers", trigger, "the beginning of a tag's begin")

    @property
    def kind(self) -> str:
        """Which of the six it is."""
        return next(name for name in reversed(_KINDS) if getattr(self, name) not in (None, False))

    def row(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as JSON values; `from_value` reads them."""
        row = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value != spec.default:
                row[spec.name] = [asdict(tag) for tag in value] if spec.name == "tags" else value
        return row

    @classmethod
    def from_value(cls, value: object) -> Structured | None:
        """A Structured, a mapping of its fields, or None; RequestError for anything else."""
        if value is None or isinstance(value, Structured):
            return value
        if not isinstance(value, Mapping):
            raise _refuse("structured", value, "Structured(…) or a mapping of its fields")
        known = [spec.name for spec in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestError(f"structured has no field {name!r}.{nearest(str(name), known)}", param="structured")
        return cls(**value)


def _tags(value: object) -> tuple[Tag, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _refuse("tags", value, "a list of tags")
    try:
        tags = tuple(tag if isinstance(tag, Tag) else Tag(**tag) for tag in value)
    except TypeError:
        raise _refuse("tags", value, "a list of objects with begin, schema and end") from None
    if not tags:
        raise _refuse("tags", [], "at least one tag")
    return tags


def _texts(name: str, value: object, most: int) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _refuse(name, value, "a list of texts")
    texts = tuple(value)
    if not texts or not all(isinstance(text, str) and text and _is_unicode(text) for text in texts):
        raise _refuse(name, value, "a list of texts, none empty")
    if len(texts) > most or sum(map(len, texts)) > _MOST_CHARACTERS:
        raise RequestError(f"{name}: found {len(texts):,} texts, expected at most {most:,}.", param="structured")
    return texts


def _json_text(name: str, value: object) -> str:
    """A schema as JSON text, written anew if it came as a value."""
    if isinstance(value, Mapping | bool):
        try:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError):
            raise _refuse(name, value, "a JSON Schema") from None
    if not isinstance(value, str) or not _is_unicode(value):
        raise _refuse(name, value, "a JSON Schema: an object, or its JSON text")
    if len(value) > _MOST_CHARACTERS:
        raise RequestError(
            f"{name}: found {len(value):,} characters, expected at most {_MOST_CHARACTERS:,}.", param="structured"
        )
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is no JSON: {error}.", param="structured", code="invalid_schema") from None
    if not isinstance(schema, dict | bool):
        raise _refuse(name, schema, "a JSON Schema: an object, true or false")
    return value


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _refuse(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"structured: {name} is {shown(value, 80)}; expected {expected}.", param="structured")
