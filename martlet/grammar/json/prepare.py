"""Work done when a schema is compiled, so that no mask waits for it and no refusal comes later (see `json_schema.py`).

All goals that a text can come to are worked out, with their automata; the first ones only, where a schema has very many.
"""

from __future__ import annotations

import time

from martlet.errors import RequestError
from martlet.grammar.json.algebra import Goal, RecursiveError
from martlet.grammar.json.json_machine import Machine
from martlet.grammar.json.lexemes import free_key, free_string, key_lexeme, number_lexeme, string_lexeme
from martlet.grammar.json.schema_nodes import Problem, SchemaError
from martlet.grammar.states import Limits
from martlet.grammar.string_formats import format_language
from martlet.grammar.vocabulary import Vocabulary

__all__ = ["prepare", "warm"]

MOST_GOALS = 4000
COMMON_FORMATS = ("date-time", "date", "uri", "email", "uuid")


def prepare(machine: Machine, first: Goal, limits: Limits) -> None:
    """Work out every goal that can be reached. SchemaError if one can't be, or if it takes too long."""
    algebra = machine.algebra
    algebra.deadline = time.thread_time() + limits.seconds
    seen, ahead = {first}, [first]
    while ahead and len(seen) < MOST_GOALS:
        goal = ahead.pop()
        try:
            found = _reached(machine, goal)
        except SchemaError:
            raise
        except RecursiveError as error:
            raise SchemaError([Problem(error.node.pointer, "asks for itself without end")]) from None
        except RequestError as error:
            pointers = sorted(node.pointer for node, _ in goal.literals) or ["#"]
            raise SchemaError([Problem(pointers[0], str(error))]) from None
        for reached in found:
            if reached not in seen:
                seen.add(reached)
                ahead.append(reached)
    algebra.deadline = None


def _reached(machine: Machine, goal: Goal) -> list[Goal]:
    """Work out one goal; returns those of its parts."""
    algebra, kind = machine.algebra, machine.algebra.type_of(goal)
    if kind.strings.language is not None:
        string_lexeme((kind.strings.as_language(),))
    if kind.numbers.finite is None:
        number_lexeme((kind.numbers.as_language(),))
    found: list[Goal] = []
    for array in kind.arrays:
        plan = machine.plans.array(array)
        found += [
            plan.goal(i, *more)
            for i in range(len(array.prefix) + 1)
            for more in ((), *(((one.node, sign),) for one in plan.contains for sign in (True, False)))
        ]
    for form in kind.objects:
        shape = machine.plans.object(form)
        goals = [known for name in shape.names if (known := shape.goal_of(name)) is not None]
        goals += [other for _, other in shape.classes]
        found += goals + [algebra.goal(part.literals | one.value) for part in goals for one in shape.exists]
        if shape.classes and not shape.classes[0][0].names.is_any:
            key_lexeme(tuple(key.names.as_language() for key, _ in shape.classes))
    return [reached for reached in found if algebra.inhabited(reached)]


def warm(vocabulary: Vocabulary) -> None:
    """Walk a vocabulary along what nearly every schema has, unless that was done; and make the formats that are common."""
    for name in COMMON_FORMATS:
        format_language(name)
    quote = vocabulary.find(0, b'"')
    for node in (0, quote):
        if node is not None:
            for lexeme in (free_string(), free_key()):
                vocabulary.region(lexeme.lexeme, lexeme.start, node)
