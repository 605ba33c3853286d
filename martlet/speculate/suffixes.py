"""The longest repeated suffix of a growing text: a suffix automaton (read `acceptance.py` next).

A state is a set of substrings that end at the same positions of the text. Its longest substring has
`length` tokens. Its `link` leads to the state of the longest suffix that ends at more positions. So
after each token the link of the newest state is the longest repeated suffix, and adding a token
takes constant time on average (Blumer et al., The smallest automaton recognizing the subwords of a
text, 1985).

    text  a b c x a b     newest state: "abcxab" → link: "ab", which ended at 2 before
                          then followed: c x a b

Over a large vocabulary most states have a single transition, kept in two arrays; only states with
more have a dict. About 100 bytes per token.
"""

from array import array

NONE = -1
MOST_LINKS = 16  # states, of the longest suffixes, whose last end a token updates


class SuffixAutomaton:
    """A text's substrings. `match`: the longest repeated suffix's length and last end before."""

    def __init__(self) -> None:
        self._length, self._link, self._end = array("i", [0]), array("i", [NONE]), array("i", [0])
        self._token, self._target = array("i", [NONE]), array("i", [NONE])  # the first transition
        self._more: dict[int, dict[int, int]] = {}  # further transitions
        self._newest = 0
        self.n_tokens = 0
        self.match = (0, 0)

    @property
    def n_bytes(self) -> int:
        """Its approximate size in bytes."""
        return 20 * len(self._length) + sum(200 + 60 * len(ways) for ways in self._more.values())

    def extend(self, token: int) -> None:
        """Add a token to the end of the text."""
        link, target = self._link, self._target
        self.n_tokens += 1
        newest = self._add(self._length[self._newest] + 1, 0)
        state = self._newest
        while state != NONE and (there := self._go(state, token)) == NONE:
            if target[state] == NONE:
                self._token[state], target[state] = token, newest
            else:
                self._more.setdefault(state, {})[token] = newest
            state = link[state]
        if state != NONE:
            link[newest] = there if self._length[there] == self._length[state] + 1 else self._split(state, token, there)
        self._newest = newest
        self._look_back()

    def _look_back(self) -> None:
        """Note where the longest repeated suffix ended before; it and its suffixes end here too."""
        state, end, n_links = self._link[self._newest], self._end, 0
        self.match = self._length[state], end[state]
        while state > 0 and n_links < MOST_LINKS:
            end[state] = self.n_tokens
            state = self._link[state]
            n_links += 1

    def _go(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        ways = self._more.get(state)
        return NONE if ways is None else ways.get(token, NONE)

    def _add(self, length: int, link: int) -> int:
        for values, value in (
            (self._length, length),
            (self._link, link),
            (self._end, self.n_tokens),
            (self._token, NONE),
            (self._target, NONE),
        ):
            values.append(value)
        return len(self._length) - 1

    def _split(self, state: int, token: int, there: int) -> int:
        """Give the shorter substrings of `there`, which end once more now, their own state."""
        shorter = self._add(self._length[state] + 1, self._link[there])
        self._end[shorter] = self._end[there]
        self._token[shorter], self._target[shorter] = self._token[there], self._target[there]
        if there in self._more:
            self._more[shorter] = dict(self._more[there])
        while state != NONE and self._go(state, token) == there:
            if self._token[state] == token:
                self._target[state] = shorter
            else:
                self._more[state][token] = shorter
            state = self._link[state]
        self._link[there] = shorter
        return shorter
