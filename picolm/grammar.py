"""JSON mode: only tokens that keep the text a beginning of valid JSON, and that leave time to end it, may be drawn.

A pushdown automaton reads bytes. Its state is the open brackets (a string such as "{[") and a mode: what may come next. A token is
allowed if the automaton survives its bytes and the shortest ending behind it (close the string, add the missing `:0`, close the brackets)
fits the tokens that are left, one byte a token. The root is an object or an array. Grammar: RFC 8259, and RFC 3629 for UTF-8.

Differences from the C: it counts brackets in the tokens' spelling: `{hellodog,,}` passes, `"]"` does not. Read next: `kvcache.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from picolm.tokenizer import Tokenizer

State = tuple[str, str]  # open brackets, mode
START: State = ("", "root")
MAX_DEPTH = 50
NEVER = 32767
_SPACE, _HEX = b" \t\n\r", b"0123456789abcdefABCDEF"
_WORDS = {ord("t"): "rue", ord("f"): "alse", ord("n"): "ull"}
# Bytes that missing bytes of a string may be ended with, by mode: how many, and a byte that is right there.
_PENDING = {"esc": 1, "u4": 4, "u3": 3, "u2": 2, "u1": 1, "c1": 1, "c2": 2, "c3": 3, "e0": 2, "ed": 2, "f0": 3, "f4": 3}
_STARTS = {b: f"c{1 + (b >= 0xE0) + (b >= 0xF0)}" for b in range(0xC2, 0xF4)}  # how a string goes on behind a byte
_STARTS |= {ord("\\"): "esc", 0xE0: "e0", 0xED: "ed", 0xF0: "f0", 0xF4: "f4"}
_SECOND = {"e0": (0xA0, 0xBF, "c1"), "ed": (0x80, 0x9F, "c1"), "f0": (0x90, 0xBF, "c2"), "f4": (0x80, 0x8F, "c2")}
_NUMBERS = {  # mode: what each kind of byte leads to; a mode with "end" may stop there
    "minus": {"0": "zero", "1": "int"},
    "zero": {".": "dot", "e": "exp", "end": ""},
    "int": {"0": "int", "1": "int", ".": "dot", "e": "exp", "end": ""},
    "dot": {"0": "frac", "1": "frac"},
    "frac": {"0": "frac", "1": "frac", "e": "exp", "end": ""},
    "exp": {"0": "digits", "1": "digits", "+": "sign"},
    "sign": {"0": "digits", "1": "digits"},
    "digits": {"0": "digits", "1": "digits", "end": ""},
}


def step(state: State, byte: int) -> State | None:
    """The state after one more byte; None where no JSON goes on so. A string's mode is its place and part, such as `key/u2`."""
    stack, mode = state
    if "/" in mode:
        return _in_string(stack, mode, byte)
    if mode in _NUMBERS:
        kind = "1" if byte in b"123456789" else "e" if byte in b"eE" else "+" if byte in b"+-" else chr(byte)
        if kind != "end" and kind in _NUMBERS[mode]:
            return stack, _NUMBERS[mode][kind]
        return step((stack, "after"), byte) if "end" in _NUMBERS[mode] else None
    if mode.startswith("word"):
        rest = mode[4:]
        return ((stack, "word" + rest[1:]) if rest[1:] else (stack, "after")) if byte == ord(rest[0]) else None
    if byte in _SPACE:
        return state
    if byte == ord("]" if stack[-1:] == "[" else "}") and stack and mode in ("after", "first"):
        return (stack[:-1], "after" if stack[:-1] else "done")
    if mode == "after":
        return (stack, "key" if stack[-1] == "{" else "value") if byte == ord(",") else None
    if mode == "colon":
        return (stack, "value") if byte == ord(":") else None
    if mode == "key" or (mode == "first" and stack[-1] == "{"):
        return (stack, "key/text") if byte == ord('"') else None
    return None if mode == "done" else _value(stack, byte, mode == "root")


def _value(stack: str, byte: int, root: bool) -> State | None:
    if byte in b"{[":
        return (stack + chr(byte), "first") if len(stack) < MAX_DEPTH else None
    if root:
        return None
    if byte == ord('"'):
        return stack, "value/text"
    if byte in _WORDS:
        return stack, "word" + _WORDS[byte]
    return (stack, {"-": "minus", "0": "zero"}.get(chr(byte), "int")) if byte in b"-0123456789" else None


def _in_string(stack: str, mode: str, byte: int) -> State | None:
    """Text, an escape, or the rest of a character of several bytes."""
    place, part = mode.split("/")
    if part == "text":
        if byte == ord('"'):
            return stack, "colon" if place == "key" else "after"
        part = _STARTS.get(byte, "text")
        return None if part == "text" and (byte < 0x20 or byte >= 0x80) else (stack, f"{place}/{part}")
    if part == "esc":
        return (stack, f"{place}/{'u4' if byte == ord('u') else 'text'}") if byte in b'"\\/bfnrtu' else None
    low, high, then = _SECOND.get(part, (0x80, 0xBF, f"c{_PENDING[part] - 1}"))
    if part[0] == "u":
        then = f"u{_PENDING[part] - 1}"
        return (stack, f"{place}/{then if then != 'u0' else 'text'}") if byte in _HEX else None
    return (stack, f"{place}/{then if then != 'c0' else 'text'}") if low <= byte <= high else None


def ending(state: State) -> int:
    """Bytes of the shortest text that makes this beginning complete."""
    stack, mode = state
    if "/" in mode:
        place, part = mode.split("/")
        return _PENDING.get(part, 0) + 1 + (2 if place == "key" else 0) + len(stack)
    missing = len(mode) - 4 if mode.startswith("word") else {"root": 2, "value": 1, "key": 4, "colon": 2}.get(mode, 0)
    return missing + len(stack) + (1 if mode in _NUMBERS and "end" not in _NUMBERS[mode] else 0)


class Grammar:
    """The automaton beside a vocabulary: what each token would cost, remembered by state."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.state = START
        self.text = [b"" if i in tokenizer.end_ids else tokenizer.token_bytes(i) for i in range(len(tokenizer.vocab))]
        single = {t[0] for t in self.text if len(t) == 1}
        if lacking := [chr(b) for b in b'{}[]":0n' if b not in single]:
            raise ValueError(f"JSON mode: this vocabulary has no token for {lacking[0]!r} alone, which an end may need")
        # Tokens that a string may hold as they are, and that leave it as open as it was.
        shown = [text.decode("utf-8", "replace") for text in self.text]
        self._plain = np.array([bool(s) and s.isprintable() and not {'"', "\\", "\ufffd"} & set(s) for s in shown])
        self._by_first: dict[int, list[int]] = {}
        for i, text in enumerate(self.text):
            if text:
                self._by_first.setdefault(text[0], []).append(i)
        self._known: dict[State, NDArray[np.int16]] = {}

    def costs(self) -> NDArray[np.int16]:
        """For each token, the bytes that would still be needed behind it; NEVER where it is not allowed."""
        if self.state not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            found = np.full(len(self.text), NEVER, np.int16)
            if in_text := self.state[1].endswith("/text"):
                found[self._plain] = ending(self.state)
            for first, tokens in self._by_first.items():
                for i in tokens if step(self.state, first) is not None else ():
                    if not (in_text and self._plain[i]) and (after := self._after(self.text[i])) is not None:
                        found[i] = ending(after)
            self._known[self.state] = found
        return self._known[self.state]

    def apply(self, logits: NDArray[np.float32], left: int) -> None:
        """Rule out what may not come, with `left` tokens left to draw."""
        ruled_out = self.costs() >= left
        if ruled_out.all():
            raise ValueError(f"JSON mode: {left} tokens are too few; `{{}}` needs 2")
        logits[ruled_out] = -np.inf

    def advance(self, token: int) -> None:
        """A token has been drawn."""
        after = self._after(self.text[token])
        if after is None:
            raise ValueError(f"JSON mode: token {token} does not go on with the text")
        self.state = after

    @property
    def is_complete(self) -> bool:
        """Whether the text is a whole JSON value."""
        return self.state[1] == "done"

    def _after(self, text: bytes) -> State | None:
        state: State | None = self.state
        for byte in text:
            state = None if state is None else step(state, byte)
        return state
