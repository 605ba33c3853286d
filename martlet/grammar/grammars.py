"""From what a request asks for to a grammar over the model's vocabulary, kept for the next request (read `matcher.py` next).

`Grammars` belongs to a model. Compiling takes milliseconds to seconds and is done by whoever makes a request, never by the
engine's thread; threads may share it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.combinators import END, Again, either, free_text, language_state, one_of, then
from martlet.grammar.gbnf import gbnf_rules
from martlet.grammar.json.prepare import warm
from martlet.grammar.json_schema import SchemaOptions, releasing, schema_start
from martlet.grammar.language import literals
from martlet.grammar.lark import lark_rules
from martlet.grammar.matcher import Grammar, Matcher
from martlet.grammar.pushdown import grammar_state
from martlet.grammar.regex import regex_language
from martlet.grammar.states import State
from martlet.grammar.vocabulary import Vocabulary
from martlet.structured import ITEM_LIMIT, STRING_LIMIT, Structured, Tag
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = ["Grammars", "compile_state"]

MOST_GRAMMARS = 128
BOUND = re.compile(r'"max(?:Items|Properties)"\s*:\s*(\d{1,15})(?:\.0*)?\s*[,}]')


class Grammars:
    """Compiled grammars of one tokenizer, the least recently used forgotten first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        n_vocab: int | None = None,
        kernels: Any = None,
        limits: tuple[int, int] = (STRING_LIMIT, ITEM_LIMIT),
    ) -> None:
        """`n_vocab` is the width of the logits; `kernels` the store of compiled kernels, without which masks are slow.

        `limits` are `string_limit` and `item_limit` of requests that do not say.
        """
        self._limits = limits
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab or tokenizer.vocab_size
        self._kernels = kernels
        self._vocabularies: dict[frozenset[str], Vocabulary] = {}
        self._compiled: OrderedDict[Structured, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, asked: Structured) -> Grammar:
        """Return the grammar; RequestError says what cannot be held to, or is too much."""
        with self._lock:
            found = self._compiled.get(asked)
            if found is not None:
                self._compiled.move_to_end(asked)
                return found
        made: list[State] = []
        try:
            state = compile_state(asked, made)
        except RequestError as error:
            error.param = error.param or "structured"
            raise
        releases = [release for start in made if (release := releasing(start)) is not None]
        with self._lock:
            vocabulary = self._vocabulary(_marks_of(asked))
            if asked.kind in ("json", "json_object"):
                warm(vocabulary)
            grammar = Grammar(
                state,
                vocabulary,
                name=asked.kind,
                string_limit=self._limits[0] if asked.string_limit is None else asked.string_limit,
                item_limit=_beyond_bounds(asked, self._limits[1] if asked.item_limit is None else asked.item_limit),
                release=lambda: [release() for release in releases],
            )
            self._compiled[asked] = grammar
            if len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return grammar

    def matcher(self, asked: Structured) -> Matcher:
        """Return a constraint at the beginning of an answer."""
        return self.compile(asked).matcher()

    def _vocabulary(self, marks: frozenset[str]) -> Vocabulary:
        """The tokens as bytes; of control tokens only those whose texts are `marks`."""
        tokenizer = self._tokenizer
        controls = {t for t in tokenizer.special_ids if tokenizer.token_text(t) in marks}
        key = frozenset(tokenizer.token_text(t) for t in controls)
        found = self._vocabularies.get(key)
        if found is None:
            n = min(self._n_vocab, tokenizer.vocab_size)
            unused = tokenizer.unused_ids
            tokens = [
                None if token in unused else tokenizer.token_bytes(token, special=token in controls)
                for token in range(n)
            ]
            ends = [token for token in tokenizer.eog_ids if token < n]
            found = Vocabulary(tokens, ends, n_vocab=self._n_vocab, kernels=self._kernels)
            self._vocabularies[key] = found
        return found


def _beyond_bounds(asked: Structured, limit: int) -> int:
    """A limit of items, raised beyond every number of items that a schema of the request bounds arrays or objects by."""
    schemas = [asked.json or "", *(tag.schema for tag in asked.tags or ())]
    bounds = [int(bound) for schema in schemas for bound in BOUND.findall(schema)]
    return max([limit, *(bound + 1 for bound in bounds)]) if limit else 0


def _marks_of(asked: Structured) -> frozenset[str]:
    """Texts that may be control tokens: what ends the reasoning, what begins and ends tags."""
    marks = {asked.after, asked.after_begin} - {None}
    for tag in asked.tags or ():
        for text in (tag.begin, tag.end):
            marks |= {text, text.strip(), *text.split("\n"), *text.split("{")}
    marks |= set(asked.triggers)
    return frozenset(mark for mark in marks if mark)


def compile_state(asked: Structured, made: list[State] | None = None) -> State:
    """Return the first state of what is asked for. The first state of each schema in it is added to `made`."""
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
    """What is asked for, without reasoning before it."""
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
    """Free text in which each trigger goes on as a tag; or, with `at_least_one`, tags only."""
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
    """What comes after a tag's beginning."""
    if not tag.end:
        return then(inside, following)
    ending = language_state(literals((tag.end,)), following)
    assert ending is not None
    return then(inside, ending)


def _opened(trigger: str, begins: list[str], bodies: list[State]) -> State:
    """What comes after a trigger."""
    rest = [
        (begin[len(trigger) :], body) for begin, body in zip(begins, bodies, strict=True) if begin.startswith(trigger)
    ]
    if len(rest) == 1 and not rest[0][0]:
        return rest[0][1]
    return one_of([text for text, _ in rest], lambda i: rest[i][1])
