"""A request's constraint as one state: JSON, a pattern, a choice, a grammar, or tags in free text.

Read `json_schema.py` next for schemas, `combinators.py` for the joining of states.
"""

from martlet.errors import RequestError
from martlet.grammar.combinators import END, Again, either, free_text, language_state, one_of, then
from martlet.grammar.gbnf import gbnf_rules
from martlet.grammar.json.prepare import warm
from martlet.grammar.json_schema import SchemaOptions, releasing, schema_start
from martlet.grammar.language import literals
from martlet.grammar.lark import lark_rules
from martlet.grammar.pushdown import grammar_state
from martlet.grammar.regex import regex_language
from martlet.grammar.states import State
from martlet.structured import Structured, Tag

__all__ = ["compile_state", "releasing", "warm"]


def compile_state(asked: Structured, made: list[State] | None = None) -> State:
    """Return the first state of an answer; `made` gets the first state of every schema in it.

    RequestError says what cannot be enforced, or is too much.
    """
    state = _whole(asked, [] if made is None else made)
    if asked.after is None:
        return state
    reasoning = free_text((asked.after,), lambda _: state, may_end=False)
    if asked.after_begin is None:
        return reasoning
    opened = language_state(literals((asked.after_begin,)), reasoning)
    assert opened is not None
    return either(opened, state)


def _whole(asked: Structured, made: list[State]) -> State:
    """The answer without the reasoning before it."""
    state: State | None
    if asked.json is not None or asked.json_object:
        state = _json(asked.json or '{"type":"object"}', asked, made)
        return state if asked.tags is None else either(_tags(asked, made), state)
    if asked.tags is not None:
        return _tags(asked, made)
    if asked.regex is not None:
        state = language_state(regex_language(asked.regex))
        if state is None:
            raise RequestError(f"No text matches the regular expression {asked.regex[:80]!r}.", param="structured")
        return state
    if asked.choice is not None:
        state = language_state(literals(asked.choice))
        assert state is not None
        return state
    assert asked.grammar is not None
    if "::=" in asked.grammar:
        return grammar_state(gbnf_rules(asked.grammar))
    return grammar_state(*lark_rules(asked.grammar))


def _json(schema: str, asked: Structured, made: list[State]) -> State:
    state = schema_start(schema, SchemaOptions(asked.whitespace, asked.ordered))
    made.append(state)
    return state


def _tags(asked: Structured, made: list[State]) -> State:
    """Free text in which every trigger opens a tag; with `at_least_one`, tags and nothing else."""
    assert asked.tags is not None
    tags = asked.tags
    again = Again()
    following = END if asked.stop_after_first else again
    inside = {schema: _json(schema, asked, made) for schema in dict.fromkeys(tag.schema for tag in tags)}
    bodies = [_tag_body(tag, inside[tag.schema], following) for tag in tags]
    begins = [tag.begin for tag in tags]
    if asked.at_least_one:
        more = [*begins, *("\n" + begin for begin in begins)]
        again.target = one_of(more, lambda i: bodies[i % len(tags)], may_end=True)
        return one_of(begins, lambda i: bodies[i])
    triggers = asked.triggers or tuple(dict.fromkeys(begins))
    opened = [_opened(trigger, begins, bodies) for trigger in triggers]
    again.target = free_text(triggers, lambda i: opened[i], may_end=True, at_start=asked.at_start)
    return again.target


def _tag_body(tag: Tag, inside: State, following: State) -> State:
    """The state after a tag's begin."""
    if not tag.end:
        return then(inside, following)
    ending = language_state(literals((tag.end,)), following)
    assert ending is not None
    return then(inside, ending)


def _opened(trigger: str, begins: list[str], bodies: list[State]) -> State:
    """The state after a trigger: the rest of the tags' begins that start with it."""
    rest = [
        (begin[len(trigger) :], body) for begin, body in zip(begins, bodies, strict=True) if begin.startswith(trigger)
    ]
    if len(rest) == 1 and not rest[0][0]:
        return rest[0][1]
    return one_of([text for text, _ in rest], lambda i: rest[i][1])
