"""The sampler under a grammar, with logits that want something else: ends, white space, tokens that
hide faults, going back.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from martlet.errors import RequestError
from martlet.grammar.grammars import Grammars
from martlet.sample.sampler import Sampler, SequenceSampler
from martlet.sampling_params import SamplingParams
from martlet.structured import Structured

WORDS = ["{}", '"Why', '":"', "0.98", ",}", "tru", '{"', "name", '":', "last_", '"}', "  ", "\n\n", "tx"]
TEXTS = [bytes((b,)) for b in range(256)] + [word.encode() for word in WORDS]
EOS = len(TEXTS)


def encode(text: str, *, add_special: bool) -> list[int]:
    """The longest token first."""
    data, ids = text.encode(), []
    while data:
        token = max((t for t in range(EOS) if data.startswith(TEXTS[t])), key=lambda t: len(TEXTS[t]))
        ids.append(token)
        data = data[len(TEXTS[token]) :]
    return ids


def toy() -> Any:
    return SimpleNamespace(
        vocab_size=EOS + 1,
        eog_ids=frozenset((EOS,)),
        unused_ids=frozenset(),
        special_ids=frozenset((EOS,)),
        strips_space=False,
        encode=encode,
        token_bytes=lambda token, special=True: b"" if token == EOS else TEXTS[token],
        token_text=lambda token: "<end>" if token == EOS else TEXTS[token].decode("latin-1"),
    )


def start(structured: Any, **settings: Any) -> SequenceSampler:
    tokenizer = toy()
    shared = Sampler(tokenizer, constraints=Grammars(tokenizer).matcher)
    return shared.start(
        SamplingParams(**{"max_tokens": 400, "temperature": 0, "structured": structured, **settings}), (0,)
    )


def answer(seq: SequenceSampler, likes: dict[str, float], most: int = 300) -> tuple[str, bool]:
    """The text under logits that like some tokens; whether it came to its end."""
    row = np.zeros(EOS + 1, np.float32)
    for text, value in likes.items():
        row[EOS if text == "<end>" else TEXTS.index(text.encode())] = value
    data = b""
    for _ in range(most):
        token, _ = seq.sample(row)
        if token == EOS:
            return data.decode(), True
        data += TEXTS[token]
    return data.decode(errors="replace"), False


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "last_name": {"type": "integer"}},
    "required": ["name", "last_name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("structured", [{"json_object": True}, {"json": SCHEMA}])
@pytest.mark.parametrize(("whitespace", "most"), [("compact", 0), ("single", 1), ("any", 64)])
def test_white_space_comes_to_an_end(structured: dict[str, Any], whitespace: str, most: int) -> None:
    """Fault STR-25: a model that always prefers a line end where one is legal."""
    likes = {"\n": 9.0, " ": 8.0, "\n\n": 9.5, "}": 5.0, "<end>": 4.0, '"': 3.0, "1": 2.0, ",": 2.5}
    text, ended = answer(start({**structured, "whitespace": whitespace}), likes)
    assert ended
    assert isinstance(json.loads(text), dict)
    outside = re.sub('"[^"]*"', '""', text)
    assert max(map(len, re.findall(r"\s*", outside))) <= most


def test_the_end_is_where_the_text_is_complete() -> None:
    """Fault STR-33: the end is preferred from the start, text after the closing brace."""
    likes = {"<end>": 9.0, '"': 3.0, "7": 2.0, ",": 2.5, "}": 2.2}
    text, ended = answer(start({"json": SCHEMA}), likes)
    assert ended
    assert set(json.loads(text)) == {"name", "last_name"}
    seq = start({"choice": ["ab"]})
    assert answer(seq, {"x": 9.0, "<end>": -9.0}) == ("ab", True)


def test_every_byte_of_a_token_is_checked() -> None:
    """Fault STR-27."""
    seq = start(
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        }
    )
    constraint = seq.constraint
    assert constraint is not None
    for text in ("{}", '"Why', '":"', "0.98", ",}", "tru", "tx", '{"'):
        assert constraint.allows(TEXTS.index(text.encode())) == (text == '{"'), text
    for text in ('{"', "a", '":'):
        assert constraint.advance(TEXTS.index(text.encode()))
    for text in ("{}", '"Why', '":"', "0.98", ",}", "tru"):
        assert not constraint.allows(TEXTS.index(text.encode())), text
    assert constraint.allows(TEXTS.index(b"7"))


def test_min_tokens_does_not_hold_a_complete_text_open() -> None:
    seq = start({"choice": ["ab"]}, min_tokens=10)
    row = np.zeros(EOS + 1, np.float32)
    assert [seq.sample(row)[0] for _ in range(3)][-1] == EOS
    seq = start({"regex": "(ab)+"}, min_tokens=4)  # one that can go on does
    row[EOS] = 9
    assert [seq.sample(row)[0] for _ in range(5)] == [97, 98, 97, 98, EOS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_going_back_is_as_if_it_had_never_been(temperature: float) -> None:
    draw = np.random.default_rng(1)
    rows = draw.normal(size=(40, EOS + 1)).astype(np.float32) * 3
    seq = start({"json": SCHEMA}, temperature=temperature, seed=4)
    ids = []
    for row in rows:
        ids.append(seq.sample(row)[0])
        if ids[-1] == EOS:
            break
    for back in (len(ids) - 1, 9, 3, 0):
        seq.truncate(back)
        assert [seq.sample(row)[0] for row in rows[back : len(ids)]] == ids[back:]


def test_forced_text_is_the_tokenizers_own() -> None:
    seq = start({"json": SCHEMA})
    row = np.zeros(EOS + 1, np.float32)
    # as a token of one character it would be the likeliest; the tokenizer writes {"
    row[ord("{")] = 9
    assert [TEXTS[t] for t in seq.forced_ids()] == [b'{"', b"name"]
    assert [TEXTS[seq.sample(row)[0]] for _ in range(2)] == [b'{"', b"name"]
    assert seq.forced_ids() == ()  # ":" and the quotation mark may be one token with what comes


def test_sequences_have_states_of_their_own() -> None:
    """Fault STR-35, at the sampler."""
    tokenizer = toy()
    shared = Sampler(tokenizer, constraints=Grammars(tokenizer).matcher)
    params = SamplingParams(n=3, temperature=1, seed=1, structured={"json": SCHEMA})
    row = np.zeros(EOS + 1, np.float32)
    row[[ord('"'), ord("}"), ord(","), EOS]] = 5
    texts = []
    seqs = [shared.start(params, (0,), index) for index in range(3)]
    data = [b"", b"", b""]
    for _ in range(60):
        for i, seq in enumerate(seqs):
            if seq.n_generated == 0 or seq.ids[-1] != EOS:
                token = seq.sample(row)[0]
                data[i] += b"" if token == EOS else TEXTS[token]
    texts = [json.loads(piece) for piece in data]
    assert all(set(text) == {"name", "last_name"} for text in texts)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regex": 5}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"json": "{"}, "no JSON"),
        ({"json": [1]}, "json"),
        ({"tags": [{"begin": ""}]}, "begin"),
        ({"tags": [{"start": "x"}]}, "tags"),
        ({"tags": [{"begin": "<a>"}], "triggers": ["<b>"]}, "triggers"),
        ({"json_object": True, "whitespace": "lots"}, "whitespace"),
        ({"regexp": "a"}, "Did you mean 'regex'"),
        ({"regex": "\ud800"}, "regex"),
    ],
)
def test_what_is_no_form_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(structured=given)


def test_ignore_eos_contradicts() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured={"regex": "a"}, ignore_eos=True)


def test_a_row_makes_the_same_again() -> None:
    for given in (
        {"json": SCHEMA, "whitespace": "any"},
        {"choice": ["a", "b"], "after": "</think>", "after_begin": "<think>"},
        {"tags": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"], "stop_after_first": True},
    ):
        made = Structured.from_value(given)
        assert made is not None
        assert Structured.from_value(json.loads(json.dumps(made.row()))) == made


def texts_of(structured: Any, text: str) -> bool:
    grammar = Grammars(toy()).compile(Structured.from_value(structured))  # type: ignore[arg-type]
    return grammar.accepts(text.encode())


def test_tags_in_free_text() -> None:
    tags = [
        {"begin": '<call>{"name": "f", "arguments": ', "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}, "end": "}</call>"},
        {"begin": '<call>{"name": "g", "arguments": ', "schema": {"type": "object", "maxProperties": 0}, "end": "}</call>"},
    ]  # fmt: skip
    call = '<call>{"name": "f", "arguments": {"x":1}}</call>'
    free = {"tags": tags, "triggers": ["<call>"]}
    for text in (
        "",
        "Hello <b>é</b>",
        f"I call. {call} Done",
        call + call,
        "a < b",
        '<call>{"name": "g", "arguments": {}}</call>',
    ):
        assert texts_of(free, text), text
    for text in (
        "<call>",
        "x <call>y",
        '<call>{"name": "h", "arguments": {}}</call>',
        '<call>{"name": "f", "arguments": {}}</call>',
    ):
        assert not texts_of(free, text), text
    must = {"tags": tags, "at_least_one": True}
    assert texts_of(must, call)
    assert texts_of(must, f"{call}\n{call}")
    assert not texts_of(must, "")
    assert not texts_of(must, f"x{call}")
    assert not texts_of({**must, "stop_after_first": True}, call + call)
    either = {**must, "json": SCHEMA}
    assert texts_of(either, call)
    assert texts_of(either, '{"name":"a","last_name":1}')


def test_after_the_reasoning() -> None:
    """Ask 19."""
    held = {"choice": ["yes", "no"], "after": "</think>"}
    assert texts_of(held, "I wonder < think </think>yes")
    assert not texts_of(held, "yes")
    assert not texts_of(held, "hm</think>perhaps")
    perhaps = {**held, "after_begin": "<think>"}
    assert texts_of(perhaps, "no")
    assert texts_of(perhaps, "<think>é</think>no")
    assert not texts_of(perhaps, "<think>no")


FREE = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "string", "minLength": 30}, "c": {"type": "string", "maxLength": 50}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("wanted", ["\n\n", "tx", "\\", "é"])
def test_a_string_without_bound_comes_to_an_end(wanted: str) -> None:
    """A model that never ends a string: at 20 bytes it must, later only where the schema says
    so.
    """
    seq = start({"json": FREE, "string_limit": 20})
    likes = {"tx": 5.0, "\\": 9.0, "n": 9.5} if wanted == "\\" else {"tx": 8.0, wanted: 9.0} if wanted.isascii() else {}
    row = np.zeros(EOS + 1, np.float32)
    for text, value in likes.items():
        row[TEXTS.index(text.encode())] = value
    if not likes:
        row[list("é".encode())] = 9.0
    data, limited = b"", []
    for _ in range(300):
        token, _ = seq.sample(row)
        if token == EOS:
            break
        data += TEXTS[token]
        assert seq.constraint is not None
        limited.append(seq.constraint.is_limited())
    answer = json.loads(data)
    assert 20 <= len(json.dumps(answer["a"], ensure_ascii=False).encode()) - 2 <= 22
    assert 30 <= len(answer["b"]) <= 31
    assert len(answer["c"]) == 50  # its own bound, and no other
    assert limited == sorted(limited)
    assert (limited[0], limited[-1]) == (False, True)
    seq.truncate(3)
    assert seq.constraint is not None
    assert not seq.constraint.is_limited()


def test_a_string_at_the_limit_may_only_end() -> None:
    """The mask is what `advance` takes.

    A copy and the way back know the limit; the pattern says how it may end.
    """
    grammars = Grammars(toy())
    pattern = {"type": "string", "pattern": "^(ab)+$"}
    matcher = grammars.matcher(Structured(json=pattern, string_limit=3))
    words = np.zeros(16, np.uint32)

    def allowed() -> set[bytes]:
        words.fill(0)
        matcher.mask(words)
        return {TEXTS[t] for t in range(EOS) if words[t >> 5] >> (t & 31) & 1}

    assert all(matcher.advance(byte) for byte in b'"ab')
    assert allowed() == {b"a", b'"'}
    assert matcher.advance(ord("a"))
    assert matcher.is_limited()
    assert allowed() == {b"b"}
    assert matcher.advance(ord("b"))
    assert allowed() == {b'"'}
    assert not matcher.allows(ord("a"))
    assert not matcher.advance(ord("a"))
    assert matcher.advance(ord('"'))
    assert matcher.is_done()
    assert matcher.is_limited()
    matcher.rollback(3)
    assert not matcher.is_limited()
    assert allowed() == {b"a", b'"'}
    without = grammars.matcher(Structured(json=pattern, string_limit=0))
    assert all(without.advance(byte) for byte in b'"' + b"ab" * 100)


def test_the_limit_is_a_number() -> None:
    for name in ("string_limit", "item_limit"):
        for wrong in (-1, 1.5, True, "9"):
            with pytest.raises(RequestError, match=name):
                Structured(json={}, **{name: wrong})


def test_masks_have_a_kernel_store_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model runs on, in the cache folder; and nothing is opened before a form is asked
    for.
    """
    monkeypatch.setenv("MARTLET_HOME", str(tmp_path))
    grammars = Grammars(toy())
    assert not list(tmp_path.iterdir())
    grammars.compile(Structured.from_value({"regex": "a+"}))  # type: ignore[arg-type]
    assert {file.name for file in tmp_path.rglob("*.o")} == {"mask_fill.o", "trie_walk.o"}
