"""JSON Schema → grammar: document → nodes → sets and forms → writers → states.

What cannot be enforced is refused with its JSON pointer, and an answer that ends is valid: `format`
is enforced for the formats of the standards, numbers are exact, `$ref` stays within the document.
Read `json/schema_nodes.py` next.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.json.containers import JsonMachine
from martlet.grammar.json.json_machine import Machine, Root, Spacing
from martlet.grammar.json.loader import Loader
from martlet.grammar.json.prepare import prepare, warm
from martlet.grammar.json.scalars import ByteState
from martlet.grammar.json.schema_nodes import Problem, SchemaError
from martlet.grammar.json.writers import Writers
from martlet.grammar.matcher import Grammar
from martlet.grammar.numbers import Digits
from martlet.grammar.states import Limits, State
from martlet.grammar.vocabulary import Vocabulary

ANY_OBJECT = {"type": "object"}  # json_object mode
SPACINGS = {
    "compact": Spacing(),
    "single": Spacing(1),  # as json.dumps writes it
    "any": Spacing(64, 64, b" \n\r\t"),
}


DIGITS = Digits(24, 24)
LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """How JSON is written where a schema leaves it open.

    `spacing`: "compact" has no white space, "single" allows a space after a comma or colon, "any"
    allows up to 64 characters of white space anywhere. `ordered`: known properties come in the
    schema's order, before all others; otherwise in any order. `digits`: bounds of numbers that the
    schema does not bound.
    """

    spacing: str = "compact"
    ordered: bool = True
    digits: Digits = DIGITS


DEFAULTS = SchemaOptions()


def parse(schema: str | bytes | dict[str, Any] | bool, limits: Limits) -> Any:
    """A schema's document; RequestError if it is no JSON, or too long."""
    if not isinstance(schema, str | bytes):
        return schema
    if len(schema) > limits.source_bytes:
        raise SchemaError([Problem("#", f"{len(schema):,} bytes; at most {limits.source_bytes:,} are read")])
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The JSON Schema is no JSON: {error}.", code="invalid_schema") from None


@contextmanager
def refusing_depth() -> Iterator[None]:
    """Turn a RecursionError into the refusal of a schema that is nested too deep."""
    try:
        yield
    except RecursionError:
        raise SchemaError([Problem("#", "is nested too deep to be worked out; make it flatter")]) from None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What becomes of a schema: keywords enforced and how often, problems, and annotations."""

    enforced: dict[str, int]
    problems: list[Problem]
    ignored: list[Problem]


def coverage(schema: str | bytes | dict[str, Any] | bool, limits: Limits = LIMITS) -> Coverage:
    """Compile a schema and say what is enforced. SchemaError only where it cannot even be read."""
    with refusing_depth():
        loader = Loader(parse(schema, limits), limits)
    problems = list(loader.problems)
    if not problems:
        try:
            _start(loader, DEFAULTS, limits)
        except SchemaError as error:
            problems = error.problems
    return Coverage(dict(loader.enforced.most_common()), problems, loader.ignored)


def schema_start(
    schema: str | bytes | dict[str, Any] | bool, options: SchemaOptions = DEFAULTS, limits: Limits = LIMITS
) -> State:
    """The first state of the JSON texts that meet a schema.

    SchemaError names all that cannot be enforced.
    """
    return _start(_loaded(schema, options, limits), options, limits)[0]


def releasing(state: State) -> Callable[[], None] | None:
    """What frees all states of a schema at once, given its first state.

    None for another language.
    """
    return state.machine.release if isinstance(state, ByteState) else None


def _loaded(schema: str | bytes | dict[str, Any] | bool, options: SchemaOptions, limits: Limits) -> Loader:
    if options.spacing not in SPACINGS:
        raise RequestError(
            f"spacing is {options.spacing!r:.40}; expected one of {', '.join(SPACINGS)}.", param="spacing"
        )
    with refusing_depth():
        loader = Loader(parse(schema, limits), limits)
    if loader.problems:
        raise SchemaError(loader.problems)
    return loader


def _start(loader: Loader, options: SchemaOptions, limits: Limits) -> tuple[State, Machine]:
    algebra = Writers(loader, options.digits, limits)
    machine: Machine = JsonMachine(algebra, SPACINGS[options.spacing], options.ordered)
    try:
        goal = algebra.goal([(loader.root, True)])
        with refusing_depth():
            prepare(machine, goal)
            if not algebra.inhabited(goal):
                raise SchemaError([Problem("#", _why_none(loader, options, limits))])
        return machine.value((goal,), Root(machine)), machine
    except BaseException:
        machine.release()
        raise


def _why_none(loader: Loader, options: SchemaOptions, limits: Limits) -> str:
    """Whether no value meets a schema at all, or none with as few digits as answers have."""
    if options.digits != Digits():
        try:
            _start(loader, replace(options, digits=Digits()), limits)[1].release()
        except RequestError:
            pass
        else:
            before, after = options.digits.before, options.digits.after
            return f"it needs numbers of more digits than answers have: {before} before the point and {after} after it"
    return "no value meets it"


def compile_schema(
    schema: str | bytes | dict[str, Any] | bool,
    vocabulary: Vocabulary,
    options: SchemaOptions = DEFAULTS,
    limits: Limits = LIMITS,
) -> Grammar:
    """The grammar of the JSON texts that meet a schema; SchemaError if it cannot be enforced."""
    start, machine = _start(_loaded(schema, options, limits), options, limits)
    warm(vocabulary)
    return Grammar(start, vocabulary, name="json_schema", release=machine.release)
