"""From what a request asks for to a grammar over the model's vocabulary, kept for the next request.

`Grammars` belongs to a model. Compiling takes milliseconds to seconds and is done by the thread
that makes a request, never by the engine's; threads may share the object. The compiler is imported
for the first constrained request, so an engine starts a tenth of a second sooner. Read `compile.py`
next.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from martlet.errors import RequestError
from martlet.structured import ITEM_LIMIT, STRING_LIMIT, Structured
from martlet.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from martlet.grammar.matcher import Grammar, Matcher
    from martlet.grammar.states import State
    from martlet.grammar.vocabulary import Vocabulary
    from martlet.ops.cpu.store import KernelStore

MOST_GRAMMARS = 128
BOUND = re.compile(r'"max(?:Items|Properties)"\s*:\s*(\d{1,15})(?:\.0*)?\s*[,}]')


class Grammars:
    """Compiled grammars of one tokenizer; the least recently used are dropped first."""

    def __init__(
        self, tokenizer: Tokenizer, n_vocab: int | None = None, limits: tuple[int, int] = (STRING_LIMIT, ITEM_LIMIT)
    ) -> None:
        """`n_vocab` is the width of the logits.

        `limits` are the `string_limit` and `item_limit` of requests that name none.
        """
        self._limits = limits
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab or tokenizer.vocab_size
        self._kernels: KernelStore | None = None  # opened for the first grammar, whatever the backend
        self._vocabularies: dict[frozenset[str], Vocabulary] = {}
        self._compiled: OrderedDict[Structured, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, asked: Structured) -> Grammar:
        """Return the grammar; RequestError says what cannot be enforced, or is too much."""
        from martlet.grammar.compile import compile_state, releasing, warm
        from martlet.grammar.matcher import Grammar

        with self._lock:
            known = self._compiled.get(asked)
            if known is not None:
                self._compiled.move_to_end(asked)
                return known
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
        """The tokens as bytes; of the control tokens, only those whose texts are `marks`."""
        from martlet.grammar.vocabulary import Vocabulary
        from martlet.ops.cpu.store import KernelStore

        tokenizer = self._tokenizer
        controls = {t for t in tokenizer.special_ids if tokenizer.token_text(t) in marks}
        key = frozenset(tokenizer.token_text(t) for t in controls)
        vocabulary = self._vocabularies.get(key)
        if vocabulary is None:
            self._kernels = self._kernels or KernelStore.open()
            n = min(self._n_vocab, tokenizer.vocab_size)
            unused = tokenizer.unused_ids
            tokens = [
                None if token in unused else tokenizer.token_bytes(token, special=token in controls)
                for token in range(n)
            ]
            ends = [token for token in tokenizer.eog_ids if token < n]
            vocabulary = Vocabulary(tokens, ends, n_vocab=self._n_vocab, kernels=self._kernels)
            self._vocabularies[key] = vocabulary
        return vocabulary


def _beyond_bounds(asked: Structured, limit: int) -> int:
    """An item limit, raised above every `maxItems` and `maxProperties` in the request's schemas."""
    schemas = [asked.json or "", *(tag.schema for tag in asked.tags or ())]
    bounds = [int(bound) for schema in schemas for bound in BOUND.findall(schema)]
    return max([limit, *(bound + 1 for bound in bounds)]) if limit else 0


def _marks_of(asked: Structured) -> frozenset[str]:
    """Texts that may be control tokens: the end of the reasoning, the begin and end of tags."""
    marks = {asked.after, asked.after_begin} - {None}
    for tag in asked.tags or ():
        for text in (tag.begin, tag.end):
            marks |= {text, text.strip(), *text.split("\n"), *text.split("{")}
    marks |= set(asked.triggers)
    return frozenset(mark for mark in marks if mark)
