"""Streaming text: whole characters, stop strings, and the tokens that belong to each piece of
text.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import RequestError
from martlet.tokenizer.detok import Delta, Detokenizer, StopChecker, TextStream


class Bytes:
    """A tokenizer whose ids index a list of byte strings; ids of `added` are control tokens."""

    def __init__(self, *pieces: bytes, added: tuple[int, ...] = (), strips_space: bool = False) -> None:
        self.pieces, self.added, self.strips_space = pieces, added, strips_space

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        return b"" if token in self.added and not special else self.pieces[token]

    def is_added(self, token: int) -> bool:
        return token in self.added


def stream(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(Bytes(*pieces))
    return [*map(detokenizer.feed, range(len(pieces))), detokenizer.finish()]


def test_characters_split_over_tokens_come_whole() -> None:
    """Fault DET-01: four emoji and three joiners, one byte a token."""
    text = "👩‍👩‍👧‍👦"
    deltas = stream([bytes([value]) for value in text.encode()])
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_cut_in_the_middle_of_a_character(kept: int) -> None:
    """Fault DET-03: the tail becomes one U+FFFD, as in the decoding of the whole."""
    deltas = stream([b"ab", "🎉".encode()[:kept]])
    assert deltas == ["ab", "", "\ufffd"]


def test_prompt_text_never_shows() -> None:
    """Fault DET-05: the prompt ends within a character.

    The answer's text is that of its own tokens.
    """
    tokenizer = Bytes(b"Hello world ", b"\xf0\x9f", b"ok")
    detokenizer = Detokenizer(tokenizer, after=1)
    assert detokenizer.feed(2) == "ok"


def test_leading_space() -> None:
    """SentencePiece: the first token's space is dropped at a start and after a control token, kept
    in a continuation.
    """
    tokenizer = Bytes(b" Hi", b"<s>", added=(1,), strips_space=True)
    assert Detokenizer(tokenizer).feed(0) == "Hi"
    assert Detokenizer(tokenizer, after=1).feed(0) == "Hi"
    assert Detokenizer(tokenizer, after=0).feed(0) == " Hi"
    again = Detokenizer(tokenizer, after=0, skip_special=False)
    assert [again.feed(0), again.feed(1), again.feed(0)] == [" Hi", "<s>", "Hi"]


@given(st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=3).map(str.encode)), max_size=12))
def test_joined_text_is_the_whole_text(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include=include)
    shown = []
    for piece in pieces:
        text, stop = checker.feed(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, checker.finish()], None


def test_stop_string_over_tokens_never_leaks() -> None:
    """Fault DET-07."""
    assert run(["DEFGHIJ"], ["ABC ", "DEF", "G", "HI", "J", "K"]) == (["ABC ", "", "", "", ""], "DEFGHIJ")


def test_stop_in_the_middle_of_a_token() -> None:
    """Fault DET-09: also, the match that is complete first wins."""
    assert run(["\n\n"], ["foo\n\nbar"]) == (["foo"], "\n\n")
    assert run(["abc", "b"], ["xabc"]) == (["xa"], "b")
    assert run(["abc", "b"], ["x", "a", "b", "c"]) == (["x", "", "a"], "b")


def test_longest_of_those_complete_together() -> None:
    assert run(["c", "abc", "bc"], ["xabcd"]) == (["x"], "abc")


def test_empty_stop_string() -> None:
    """Fault DET-11."""
    for stops in ([""], ["", "END"]):
        with pytest.raises(RequestError, match="empty"):
            StopChecker(stops)


def test_false_start_is_released() -> None:
    assert run(["aab"], ["a", "a", "a", "c"]) == (["", "", "a", "aac", ""], None)
    assert run(["END"], ["x E", "N"]) == (["x ", "", "EN"], None)


def test_include() -> None:
    assert run(["END"], ["x E", "NDy"], include=True) == (["x ", "END"], "END")


def test_nothing_after_a_match() -> None:
    checker = StopChecker(["b"])
    assert checker.feed("abc") == ("a", "b")
    assert checker.feed("d") == ("", "b")
    assert checker.finish() == ""


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.text("ab", max_size=5)))
def test_stop_against_search_by_definition(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    shown, stop = run(stops, pieces)
    if not ends:
        assert ("".join(shown), stop) == (whole, None)
    else:
        longest = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
        assert ("".join(shown), stop) == (whole[: ends[0] - len(longest)], longest)


def test_tokens_go_with_their_text() -> None:
    """Fault DET-17: each token counts once, with the text that it completes."""
    tokenizer = Bytes(b"Hello", b" there", b"!")
    stream = TextStream(Detokenizer(tokenizer), StopChecker(["Helloxxx"]))
    assert [stream.feed(token) for token in range(3)] == [Delta("", 0), Delta("Hello there", 2), Delta("!", 1)]
    assert stream.finish() == Delta("", 0)


def test_tokens_of_a_character_count_with_it() -> None:
    first, last = "é".encode()[:1], "é".encode()[1:]
    stream = TextStream(Detokenizer(Bytes(b"a", first, last)))
    assert [stream.feed(token) for token in range(3)] == [Delta("a", 1), Delta("", 0), Delta("é", 2)]
    cut = TextStream(Detokenizer(Bytes(b"a", first)))
    assert [cut.feed(0), cut.feed(1), cut.finish()] == [Delta("a", 1), Delta("", 0), Delta("\ufffd", 1)]


def test_tokens_at_a_stop() -> None:
    stream = TextStream(Detokenizer(Bytes(b"a", b"EN", b"Db")), StopChecker(["END"]))
    assert [stream.feed(token) for token in range(3)] == [Delta("a", 1), Delta("", 0), Delta("", 2, "END", hidden=2)]
    assert stream.finish() == Delta("", 0, "END")


def test_linear_time() -> None:
    """A long run of false starts costs the same a character as a short one."""
    started = time.process_time()
    shown, stop = run(["a" * 500 + "b"], ["a" * 1000] * 200)
    assert stop is None
    assert "".join(shown) == "a" * 200_000
    assert time.process_time() - started < 5
