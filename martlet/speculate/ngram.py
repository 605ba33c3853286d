"""The text drafts itself: n-gram lookup (read `suffixes.py` next).

The tokens that followed the longest repeated suffix of the text are guessed to follow it again, as
in prompt lookup decoding.
"""

from collections.abc import Iterable, Sequence

from martlet.speculate.drafter import Draft, DraftRequest
from martlet.speculate.suffixes import SuffixAutomaton
from martlet.types import SeqId

MOST_READ = 1 << 15  # tokens of a text that are remembered
KEPT = 1 << 12  # tokens that remain when that many are read
SURE = 4  # a match of so many tokens is trusted; a shorter match looks for the interrupted copy
MOST_COUNTED = 64  # longest match, and longest draft
NEAR = 12  # tokens after a wrong guess within which the copy may go on


# Classes by the length of the match: 1, 2 … 3, 4 … 7, 8 … 15, 16 and more; then classes of guesses
# that go on with an interrupted copy.
_BY_LENGTH = tuple(min(length.bit_length(), 5) - 1 for length in range(1, 2 * MOST_COUNTED))
_RESUMED = (5, 6, 6, *[7] * MOST_COUNTED)


class _Text:
    """A sequence's text, and where it copies itself."""

    __slots__ = ("automaton", "base", "n_ids", "n_read", "source")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.base = 0  # position in the sequence at which the automaton's text begins
        self.n_read = 0
        self.source: int | None = None  # position that is being copied
        self.n_ids: int | None = None  # length of the text then; None while the copy is interrupted

    def follow(self, source: int, n_ids: int) -> int:
        """Guess the token at `source` next."""
        self.source, self.n_ids = source, n_ids
        return source

    def resumed_at(self, ids: Sequence[int]) -> int | None:
        """Where an interrupted copy goes on: after the last token's occurrence near its end."""
        if self.source is None:
            return None
        if self.n_ids is not None:
            self.source, self.n_ids = self.source + len(ids) - self.n_ids - 1, None
        start = max(self.source, 0)
        near = ids[start : min(start + NEAR, len(ids) - 1)]
        return start + near.index(ids[-1]) + 1 if ids[-1] in near else None


class NgramDrafter:
    """Guesses that the text goes on as after the last occurrence of its longest repeated suffix.

    Where that suffix is short because the copy was interrupted (a changed name or number), it looks
    for the last token just after the interruption and goes on from there.
    """

    costless: bool = True
    priors: tuple[float, ...] = (0.05, 0.15, 0.35, 0.6, 0.8, 0.25, 0.4, 0.6)

    def __init__(self) -> None:
        self._texts: dict[SeqId, _Text] = {}

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = _Text()
        start = text.n_read
        if start - text.base >= MOST_READ:  # only the newest tokens remain, and are read anew
            text.automaton, text.source = SuffixAutomaton(), None
            text.base = text.n_read = start = max(0, start - KEPT)
        new = ids[start : start + most]
        for token in new:
            text.automaton.extend(token)
        text.n_read += len(new)
        return len(new)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._guess(self._texts.get(request.seq), request) for request in requests]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        for seq in seqs:
            self._texts.pop(seq, None)

    def _guess(self, text: _Text | None, request: DraftRequest) -> Draft | None:
        ids = request.ids
        if text is None or text.n_read < len(ids):
            return None
        length, end = text.automaton.match
        resumed = text.resumed_at(ids) if length < SURE else None
        if resumed is not None:
            source, classes = text.follow(resumed, len(ids)), _RESUMED
        elif length:
            source, classes = text.base + end, _BY_LENGTH[min(length, MOST_COUNTED) - 1 :]
            if length >= SURE:
                text.follow(source, len(ids))
        else:
            return None
        guess = tuple(ids[source : source + min(request.most, MOST_COUNTED)])
        return Draft(guess, classes[: len(guess)]) if guess else None
