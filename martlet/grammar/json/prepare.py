"""Work done when a schema is compiled, so that no mask waits for it (see `json_schema.py`).

Every goal that a text can reach is worked out, with its automata; of a very large schema only the
first MOST_GOALS. What cannot be enforced is therefore refused before an answer begins.
"""

from martlet.errors import RequestError
from martlet.grammar.json.algebra import Goal, RecursiveError
from martlet.grammar.json.json_machine import Machine
from martlet.grammar.json.lexemes import free_key, free_string, key_lexeme, number_lexeme, string_lexeme
from martlet.grammar.json.schema_nodes import Problem, SchemaError
from martlet.grammar.json.writers import Writers
from martlet.grammar.string_formats import format_language
from martlet.grammar.vocabulary import Vocabulary

MOST_GOALS = 4000
COMMON_FORMATS = ("date-time", "date", "uri", "email", "uuid")


def prepare(machine: Machine, first: Goal) -> None:
    """Work out every goal that can be reached. SchemaError if that fails, or takes too long."""
    seen, ahead = {first}, [first]
    with machine.algebra.within_time():
        while ahead and len(seen) < MOST_GOALS:
            goal = ahead.pop()
            try:
                children = _children(machine.algebra, goal)
            except SchemaError:
                raise
            except RecursiveError as error:
                raise SchemaError([Problem(error.node.pointer, "asks for itself without end")]) from None
            except RequestError as error:
                pointers = sorted(node.pointer for node, _ in goal.literals) or ["#"]
                raise SchemaError([Problem(pointers[0], str(error))]) from None
            for child in children:
                if child not in seen:
                    seen.add(child)
                    ahead.append(child)


def _children(algebra: Writers, goal: Goal) -> list[Goal]:
    """Work out one goal; returns the goals of its elements and properties."""
    values = algebra.value_set(goal)
    if values.strings.language is not None:
        string_lexeme((values.strings.as_language(),))
    if values.numbers.finite is None:
        number_lexeme((values.numbers.as_language(),))
    children: list[Goal] = []
    for array_form in values.arrays:
        array = algebra.array(array_form)
        children += [
            array.goal(i, *more)
            for i in range(len(array_form.prefix) + 1)
            for more in ((), *(((contains.node, sign),) for contains in array.contains for sign in (True, False)))
        ]
    for object_form in values.objects:
        writer = algebra.object(object_form)
        goals = [known for name in writer.names if (known := writer.goal_of(name)) is not None]
        goals += [other for _, other in writer.classes]
        children += goals
        children += [algebra.goal(value.literals | exists.value) for value in goals for exists in writer.exists]
        if writer.classes and not writer.classes[0][0].names.is_any:
            key_lexeme(tuple(key.names.as_language() for key, _ in writer.classes))
    return [child for child in children if algebra.inhabited(child)]


def warm(vocabulary: Vocabulary) -> None:
    """Compute once what nearly every schema needs: a vocabulary's common formats, strings, keys."""
    for name in COMMON_FORMATS:
        format_language(name)
    quote = vocabulary.find(0, b'"')
    for node in (0, quote):
        if node is not None:
            for lexeme in (free_string(), free_key()):
                vocabulary.region(lexeme.lexeme, lexeme.start, node)
