"""Tokens: the recordings, llama.cpp's ids, the big engine's tokenizer; JSON mode: the automaton
against a JSON reader.
"""

from __future__ import annotations

import base64
import json
import lzma
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from recordings import DATA, arrays, notes

from martlet.config import EngineConfig
from martlet.engine.build import load_tokenizer
from martlet.formats.checkpoint import open_checkpoint
from picolm.gguf import GGUF
from picolm.grammar import NEVER, START, Grammar, State, ending, step
from picolm.tokenizer import SPACE, Tokenizer

BIG = DATA.parent / "tokenizer"


def tokenizer(path: Path) -> Tokenizer:
    meta = GGUF(path).meta
    return Tokenizer(meta, len(meta["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize("name", ["q4_k", "quirk_vocab"])
def test_recorded_prompts(tiny: Path, name: str) -> None:
    """Faults A5, A7, A8: llama.cpp's ids, with and without special tokens; where it has none
    (prompts that are not UTF-8), the C's on a machine whose char is unsigned.
    """
    t = tokenizer(tiny / f"{name}.gguf")
    right = {p["prompt_b64"]: p for p in notes("spec_tokenizer")[name]}
    for p in notes("tokenizer")[name]["prompts"]:
        text = base64.b64decode(p["prompt_b64"])
        spec = right.get(p["prompt_b64"])
        assert t.encode(text, special=False) == (spec["ids"] if spec else p["ids_bos_unsigned_char"]), text
        assert t.encode(text, special=False, add_bos=False) == t.encode(text, special=False)[1:]
        if spec:
            assert t.encode(text) == spec["ids_special_tokens_parsed"], text


def test_where_the_c_goes_astray(tiny: Path) -> None:
    """Fault A5: its search misses `▁` and `a` in this vocabulary, so `a` becomes `▁`, `<0x61>`."""
    t, recorded = tokenizer(tiny / "quirk_vocab.gguf"), notes("tokenizer")["quirk_vocab"]
    a = next(p for p in recorded["prompts"] if p["prompt_text"] == "a")
    assert a["ids_bos"] == [1, 259, 100]
    assert t.encode(b"a") == [1, t.ids[SPACE + "a"]]
    assert recorded["lookup_wrong_on_x86"] == [[260, -1], [261, -1]]
    assert [t.ids[t.vocab[i]] for i in (260, 261)] == [260, 261]


@pytest.mark.parametrize("name", ["q4_k", "quirk_vocab"])
def test_decoding(tiny: Path, name: str) -> None:
    """Fault A10: control tokens print nothing, inner space marks a space, NUL a NUL. `<0xZZ>` and
    `<0x0A>tail` are no byte tokens (the C prints a byte for the first and reads past the end of
    `<0x`: fault B).
    """
    t, recorded = tokenizer(tiny / f"{name}.gguf"), notes("tokenizer")[name]
    for i, (after, first) in enumerate(recorded["decode_hex"]):
        text = t.vocab[i]
        if t.types[i] in (2, 3):
            assert t.decode(5, i) == t.decode(t.bos_id, i) == b""
        elif text == "<0x00>":
            assert t.decode(5, i) == b"\0"
        elif text in ("<0xZZ>", "<0x0A>tail"):
            assert t.decode(5, i) == text.encode() != bytes.fromhex(after)
        else:
            assert t.decode(5, i) == bytes.fromhex(after).replace(SPACE.encode(), b" ")
            assert t.decode(t.bos_id, i) == bytes.fromhex(first).replace(SPACE.encode(), b" ")


def unpacked(name: str, kind: str) -> bytes:
    return lzma.decompress((BIG / f"ggml-vocab-{name}.{kind}.xz").read_bytes())


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "qwen2"])
def test_published_vocabularies(tmp_path: Path, name: str) -> None:
    """Fault A6: byte-level BPE. The ids are those of each model's own tokenizer; our bytes give the
    text back.
    """
    path = tmp_path / "vocab.gguf"
    path.write_bytes(unpacked(name, "gguf"))
    t = tokenizer(path)
    texts = unpacked(name, "inp").decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in unpacked(name, "out").decode().split("\n")]
    for text, right in zip(texts, ids, strict=False):
        assert t.encode(text.encode(), add_bos=False) == right, text
        back = b"".join(map(t.token_bytes, right)).decode()
        assert back.removeprefix(" " if t.add_space else "") == text


@pytest.mark.model
def test_the_default_models_vocabulary(smollm2_path: Path) -> None:
    """Faults A6 and A7: prompts that the C spells without spaces, with a BOS that is not wanted,
    and with special tokens as text.
    """
    t = tokenizer(smollm2_path)
    theirs = load_tokenizer(open_checkpoint(smollm2_path), EngineConfig(model=str(smollm2_path)))
    for run in notes("smollm2")["runs"]:
        assert t.encode(run["prompt"].encode()) == run["right_prompt_ids"]
    for text in [
        "",
        "a  b\n\n c",
        "x = 1234.5; // é 日本",
        "I'll we'VE don't",
        "\t\ttab\r\n",
        "ſ’s ²½Ⅷ٣",
        "<|im_end|>",
    ]:
        assert t.encode(text.encode()) == list(theirs.encode(text, parse_special=True)), text


def test_long_prompts(tiny: Path) -> None:
    """Fault A19: in the C time grows with the square of the length (8,000 characters 12 times as
    long as 2,000).
    """
    t, words = tokenizer(tiny / "q4_k.gguf"), b"the quick brown fox jumps over the lazy dog "
    took = []
    for n in (100, 800):
        tries = []
        for _ in range(3):
            start = time.process_time()
            t.encode(words * n)
            tries.append(time.process_time() - start)
        took.append(min(tries))
    assert took[1] < 32 * took[0]  # 8 times the text; the square would be 64


def read(text: bytes) -> State | None:
    state: State | None = START
    for byte in text:
        state = None if state is None else step(state, byte)
    return state


VALUES = [
    b"{}", b"[]", b'{"a":1}', b' [1, -0.5e+10 ,"x\\u00e9\\n",true,false,null,{"k":[]}]', b"[0,10,1E5,0.0]", b'["\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80"]',
    b'{"a":{"b":{"c":[]}}}', b'[""]', b'{"]":"}"}',
]  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_valid_json_is_read(text: bytes) -> None:
    json.loads(text)
    assert read(text) == ("", "done")
    for i in range(len(text)):
        assert (state := read(text[:i])) is not None
        assert state[1] != "done"


def test_a_beginning_is_read_exactly_when_it_can_be_ended() -> None:
    """Random strings over JSON's characters: what the automaton takes, its shortest ending
    completes; what it refuses, no ending of up to 4 bytes completes (checked by trying all that a
    JSON reader would take).
    """
    rng, taken = random.Random(7), 0
    endings = [b"".join(bytes([c]) for c in e) for n in range(4) for e in np.ndindex(*[8] * n)]
    characters = b'}]":0e1,'
    for _ in range(400):
        text = bytes(rng.choice(b'{}[]",:01-.eE+tn\\u \xc3\xa9a') for _ in range(rng.randrange(1, 9)))
        state = read(b"[" + text)
        completes = any(is_json(b"[" + text + bytes(characters[i] for i in e)) for e in endings)
        if state is None:
            assert not completes, text
        else:
            taken += 1
            assert ending(state) > 4 or completes or b"\xc3" in text or b"\\" in text or b"t" in text or b"n" in text, (
                text
            )
    assert taken > 30


def is_json(text: bytes) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@pytest.mark.parametrize(
    "text",
    [b"{hellodog,,}", b"{[}]", b'["\n"]', b'["\\x"]', b"[1,]", b'{"a"}', b"{}x", b"[01]", b'["\xff"]', b"[+1]", b"1"],
)
def test_texts_that_the_c_takes_for_json(text: bytes) -> None:
    """Fault A11."""
    assert read(text) is None


READ = {  # how many tokens of each recorded sequence go on with JSON; worked out by hand
    "object": 10, "space_first": 2, "nested": 8, "empty_object": 1, "empty_array": 1, "close_open": 0, "string_with_braces": 9, "escapes": 13,
    "mismatched": 1, "not_json": 1, "byte_tokens": 2, "eos_early": 1, "never_started": 0, "deep": 25, "deep_in_string": 30,
    "array_in_array_close": 2, "backslash_outside": 1, "quote_pair": 7,
}  # fmt: skip


def test_recorded_sequences(tiny: Path) -> None:
    """Fault A11. Up to the first token that makes the text something else than JSON, depths,
    strings and completeness are the C's (but for byte tokens, whose spelling it counts); of the
    tokens that it masks, those that JSON has here are allowed: brackets in a string, and `▁{` as a
    first token.
    """
    t, masks = tokenizer(tiny / "q4_k.gguf"), arrays("grammar")
    highest = masks["logits"].max()
    assert READ.keys() == notes("grammar").keys()
    for name, recorded in notes("grammar").items():
        g = Grammar(t)
        eos = g.costs()[t.eos_id]
        for i, token in enumerate(recorded["ids"][: READ[name] + 1]):
            c, (stack, mode) = recorded["steps"][i], g.state
            if name != "byte_tokens":
                assert (stack.count("{"), stack.count("[")) == (c["brace"], c["bracket"])
                assert (mode.endswith("/text") or mode.endswith("/esc")) == bool(c["in_string"]), (name, i)
                assert g.is_complete == bool(c["complete"])
            masked = np.unpackbits(masks[f"mask/{name}"][i])[: len(t.vocab)].astype(bool)
            ours_only = [t.token_bytes(j).decode("latin-1") for j in np.flatnonzero((g.costs() < NEVER) & masked)]
            assert all(c["in_string"] or mode == "root" or '"' in text for text in ours_only), (name, i, ours_only)
            forced = np.frombuffer(bytes.fromhex(c["eos_logit_hex"]), "<f4")[0] >= highest + 5
            # the C makes the end token likely where depths are 0; here the text ends by itself
            assert eos == NEVER
            assert not g.is_complete or forced or name == "byte_tokens", (name, i)
            if i < READ[name]:
                assert g.costs()[token] < NEVER
                g.advance(token)
        assert g.is_complete == (
            name == "byte_tokens" or (READ[name] == len(recorded["ids"]) and name != "deep_in_string")
        )
        if READ[name] < len(recorded["ids"]):
            assert g.costs()[recorded["ids"][READ[name]]] == NEVER


def test_brackets_of_tokens(tiny: Path) -> None:
    """Fault A11: the C counts brackets and quotes in the spelling of tokens; in their bytes they
    are the same but for byte tokens.
    """
    t = tokenizer(tiny / "q4_k.gguf")
    for i, (braces, brackets, _, odd_quotes) in enumerate(notes("tokenizer")["q4_k"]["grammar_token_info"]):
        text = re.sub(rb"\\.?", b"", t.token_bytes(i))  # a backslash hides what follows
        counted = (text.count(b"{") - text.count(b"}"), text.count(b"[") - text.count(b"]"), text.count(b'"') % 2)
        spelled = t.types[i] == 6 and chr(text[0] if text else 0) in '{}[]"'
        assert (counted == (braces, brackets, odd_quotes)) != spelled, t.vocab[i]


def test_valid_json_that_the_c_masks(tiny: Path) -> None:
    t = tokenizer(tiny / "q4_k.gguf")
    g = Grammar(t)
    assert g.costs()[t.ids[SPACE + "{"]] < NEVER  # as a first token
    g.advance(t.ids['{"'])
    assert g.costs()[t.ids["]"]] < NEVER  # in a string
    assert g.costs()[t.ids["}}"]] < NEVER
    assert g.costs()[t.eos_id] == NEVER
