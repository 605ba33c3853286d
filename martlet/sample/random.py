"""Random numbers as a function of (seed, sequence, position): no generator, no state.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011), turns a 128-bit counter and a 64-bit key into 128 random bits. The key is the request's seed;
the counter selects the number:

    counter word   0               1               2          3
                   position, low   position, high  sequence   lane

So a sample depends on nothing else in the batch, and can be drawn again after a preemption or a
rejected draft.
The reading of the spine ends here.
"""

import itertools
import os

LANE_TOKEN = 0  # which candidate is sampled
LANE_XTC = 1  # whether XTC removes anything at this position

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# Added to the key after each round: the golden ratio and sqrt(3) - 1.
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit counter words and two key words to four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sequence: int, position: int, lane: int = LANE_TOKEN) -> float:
    """A number in [0, 1), a multiple of 2^-53.

    `seed` is taken modulo 2^64, so negative seeds are distinct.
    """
    counter = (position & _MASK, position >> 32, sequence & _MASK, lane)
    high, low, _, _ = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53


def draw_seed() -> int:
    """A 64-bit seed from the operating system, for a request without a seed."""
    return int.from_bytes(os.urandom(8), "little")


class SeedSource:
    """Seeds for requests without a seed, thread-safe.

    They come from the operating system, or with `seed` from Philox keyed by it.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._numbers = itertools.count()  # its `next` is safe between threads

    def draw(self) -> int:
        """The next request's seed, 64 bits."""
        if self.seed is None:
            return draw_seed()
        high, low, _, _ = philox((next(self._numbers), 0, 0, 0), (self.seed & _MASK, (self.seed >> 32) & _MASK))
        return high << 32 | low
