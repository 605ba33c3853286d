"""Text to token ids and back: SentencePiece's merging by score, and byte-level BPE's merging by rank.

SentencePiece: spaces become U+2581, each character is a symbol, and again and again the pair of neighbours whose joined text is the token
with the highest score is joined, leftmost first. What is in no token at the end is spelled in byte tokens `<0xHH>`.

Byte-level BPE: each byte is a printable letter: Latin-1's stand for themselves, U+0100 and on for the other 68 (space is `Ġ`). Merges
never cross the words that a regular expression cuts. Sources: GPT-2's `encoder.py`, tokenizer.json of SmolLM2 and Qwen2.

Differences from the C: byte-level BPE; a dictionary finds tokens (there: a search that goes astray above 127), a heap pairs; bytes are
spelled after merging; special tokens, add_bos_token, add_space_prefix count; control tokens print nothing. Read next: `sampler.py`.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from typing import Any

import numpy as np

from picolm.gguf import check

SPACE = "\u2581"
UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
END_NAMES = {"<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>"}

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [b for b in range(256) if b not in _PRINTABLE]
LETTER_OF_BYTE = {b: chr(b) for b in _PRINTABLE} | {b: chr(0x100 + i) for i, b in enumerate(_REST)}
BYTE_OF_LETTER = {letter: bytes([b]) for b, letter in LETTER_OF_BYTE.items()}
WORDS = {  # SmolLM2 cuts off each digit before GPT-2's rule: a digit ends a run of spaces as the text's end does
    "gpt-2": r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    "smollm": r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+",
    "qwen2": r"'(?i:s|t|re|ve|m|ll|d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
WORDS["default"] = WORDS["gpt-2"]


def _ascii(character: str) -> str:
    """An ASCII character of the same class: `re` has no classes for letters and numbers of all scripts."""
    if character.isascii():
        return character
    return "\v" if character.isspace() else {"L": "a", "N": "0"}.get(unicodedata.category(character)[0], "#")


class Tokenizer:
    """A model's vocabulary."""

    def __init__(self, meta: dict[str, Any], vocab_size: int) -> None:
        def get(key: str, kind: type, default: Any = None) -> Any:
            v = meta.get(f"tokenizer.ggml.{key}", default)
            check(v is default or isinstance(v, kind), f"tokenizer.ggml.{key} is {v!r:.40}, no {kind.__name__}")
            return v

        self.vocab: list[str] = get("tokens", list, [])
        fine = len(self.vocab) == vocab_size
        check(fine, f"tokenizer.ggml.tokens: {vocab_size} strings are needed, as token_embd.weight has rows")
        model, pre, merges = get("model", str, "llama"), get("pre", str, "gpt-2"), get("merges", list)
        check(model in ("llama", "gpt2"), f"tokenizer.ggml.model is {model!r}: llama and gpt2 are read")
        self.bytelevel = model == "gpt2"
        self.types = self._numbers(get("token_type", np.ndarray), "token_type", "i", vocab_size)
        self.ids: dict[str, int] = {}
        for i, text in enumerate(self.vocab):
            self.ids.setdefault(text, i)
        if self.bytelevel:
            check(pre in WORDS, f"tokenizer.ggml.pre is {pre!r}: {', '.join(WORDS)} are read")
            check(merges is not None, "tokenizer.ggml.merges is missing")
            self._words = re.compile(WORDS[pre])
            self._ranks = {pair: -rank for rank, pair in enumerate(merges)}
        else:
            scores = self._numbers(get("scores", np.ndarray), "scores", "f", vocab_size).tolist()
            self._scores = {text: scores[i] for text, i in self.ids.items()}
        defaults = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": -1, "eom_token_id": -1}
        self.bos_id, self.eos_id, *others = (self._id(k, get(k, int, i), i) for k, i in defaults.items())
        self.add_bos = get("add_bos_token", bool, not self.bytelevel) and self.bos_id >= 0
        self.add_space = get("add_space_prefix", bool, not self.bytelevel)
        ends = {self.eos_id, *others}
        named = {self.ids[name] for name in END_NAMES & self.ids.keys() if self.types[self.ids[name]] == CONTROL}
        self.end_ids = frozenset(ends | named) - {-1}
        special = np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL, USER))).tolist()
        names = sorted((self.vocab[i] for i in special if self.vocab[i]), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else "(?!)")

    def _id(self, key: str, value: int, default: int) -> int:
        """A special token's id; 2^32 - 1 means that there is none."""
        if value in (-1, 0xFFFFFFFF) or value == default >= len(self.vocab):
            return -1
        check(0 <= value < (n := len(self.vocab)), f"tokenizer.ggml.{key} is {value}: the vocabulary has {n} tokens")
        return value

    def _numbers(self, values: Any, key: str, kind: str, n: int) -> Any:
        if values is None:
            return np.zeros(n, np.float32 if kind == "f" else np.int32) + (kind == "i")
        fine = (values.dtype.kind, values.itemsize, len(values)) == (kind, 4, n)
        check(fine, f"tokenizer.ggml.{key}: {n} numbers of 4 bytes are needed")
        return values

    def encode(self, text: bytes, add_bos: bool | None = None, special: bool = True) -> list[int]:
        """Token ids. Without `special`, names of control tokens in the text are plain text; user-defined tokens never are."""
        out = [self.bos_id] if (self.add_bos if add_bos is None else add_bos) else []
        for piece in self._special.split(text.decode("utf-8", "surrogateescape")):
            id_ = self.ids.get(piece, -1)
            if id_ >= 0 and (self.types[id_] == USER or (special and self.types[id_] in (CONTROL, UNKNOWN))):
                out.append(id_)
            elif piece:
                out += self._encode_bytelevel(piece) if self.bytelevel else self._encode_pieces(piece)
        return out

    def _encode_pieces(self, text: str) -> list[int]:
        marked = (SPACE if self.add_space else "") + text.replace(" ", SPACE)
        out: list[int] = []
        for symbol in self._merge(list(marked), lambda a, b: self._scores.get(a + b)):
            spelled = [f"<0x{byte:02X}>" for byte in symbol.encode("utf-8", "surrogateescape")]
            names = [symbol] if symbol in self.ids else spelled  # no byte token either: dropped, as in the C
            out += [self.ids[name] for name in names if name in self.ids]
        return out

    def _encode_bytelevel(self, text: str) -> list[int]:
        out: list[int] = []
        for match in self._words.finditer("".join(map(_ascii, text))):
            word = text[match.start() : match.end()].encode("utf-8", "surrogateescape")
            for symbol in self._merge([LETTER_OF_BYTE[b] for b in word], lambda a, b: self._ranks.get(f"{a} {b}")):
                check(symbol in self.ids, f"the vocabulary lacks the token {symbol!r}")
                out.append(self.ids[symbol])
        return out

    @staticmethod
    def _merge(symbols: list[str], score: Any) -> list[str]:
        """Join the pair of neighbours with the highest score, leftmost first, until none has one."""
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols)))  # of each, and of the end
        heap: list[tuple[float, int, str, str]] = []

        def offer(left: int) -> None:
            if left >= 0 and after[left] < len(symbols):
                a, b = symbols[left], symbols[after[left]]
                if (value := score(a, b)) is not None:
                    heapq.heappush(heap, (-value, left, a, b))

        for i in range(len(symbols)):
            offer(i)
        while heap:
            _, left, a, b = heapq.heappop(heap)
            right = after[left]
            if symbols[left] != a or right >= len(symbols) or symbols[right] != b:
                continue  # one of the two has been joined to another since
            symbols[left], symbols[right], after[left] = a + b, "", after[right]
            before[after[right]] = left
            offer(before[left])
            offer(left)
        return [s for s in symbols if s]

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; nothing for control tokens."""
        text, kind = self.vocab[token], int(self.types[token])
        if kind in (CONTROL, UNKNOWN):
            return b""
        if self.bytelevel:
            bytes_of: dict[str, bytes] = {} if kind == USER else BYTE_OF_LETTER
            return b"".join(bytes_of.get(c) or c.encode("utf-8", "surrogateescape") for c in text)
        if kind == BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def decode(self, previous: int, token: int) -> bytes:
        """What a token prints behind another one; the space that encoding put in front is taken away after BOS."""
        strip = previous == self.bos_id and self.add_space and self.vocab[token].startswith(SPACE)
        return self.token_bytes(token)[strip:]
