"""Logits to a token: temperature, softmax, the nucleus (top-p), and a draw from a generator of its own.

The generator is xorshift64 (G. Marsaglia, "Xorshift RNGs", 2003: shifts 13, 7, 17). The nucleus is the shortest run of most probable
tokens whose probabilities reach top_p; on ties the lower id comes first.

Differences from the C: seeds are mixed (SplitMix64), as xorshift's first numbers of small seeds are close to zero; a draw has 24 bits, so it
is never 1.0; a temperature too small to divide by is greedy; logits that are not numbers are an error. Read next: `grammar.py`.
"""

from __future__ import annotations

import numpy as np

from picolm.libm import F32
from picolm.tensor import softmax

MASK = (1 << 64) - 1


def xorshift64(x: int) -> int:
    """The next state."""
    x ^= (x << 13) & MASK
    x ^= x >> 7
    return x ^ (x << 17) & MASK


def splitmix64(seed: int) -> int:
    """A state for a seed, never 0: S. Vigna's SplitMix64, one step."""
    z = (seed + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return (z ^ z >> 31) or 42


def rand_float(state: int) -> np.float32:
    """A state's upper 24 bits as a float32 in [0, 1)."""
    return np.float32((state >> 40) / (1 << 24))


def pick(probabilities: F32, top_p: float, draw: np.float32) -> int:
    """The token at this point of the cumulated probabilities: of all tokens in order of id, or of the nucleus."""
    if top_p >= 1:
        cumulated = np.add.accumulate(probabilities)
        return min(int(np.searchsorted(cumulated, draw, side="right")), len(probabilities) - 1)
    order = np.argsort(-probabilities, kind="stable")
    cumulated = np.add.accumulate(probabilities[order])
    last = min(int(np.searchsorted(cumulated, np.float32(top_p), side="left")), len(order) - 1)
    at = int(np.searchsorted(cumulated[: last + 1], np.float32(draw) * cumulated[last], side="right"))
    return int(order[at if at <= last else 0])


class Sampler:
    """Settings and the generator's state."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        if not (temperature >= 0 and np.isfinite(temperature)):
            raise ValueError(f"a temperature of {temperature}: a number from 0 is needed")
        if not 0 <= top_p <= 1:
            raise ValueError(f"a top-p of {top_p}: a number from 0 to 1 is needed")
        self.temperature, self.top_p, self.rng_state = temperature, top_p, splitmix64(seed)

    def sample(self, logits: F32) -> int:
        """A token. At temperature 0 the likeliest one, the lowest id on ties."""
        if np.isnan(logits).any():
            raise ValueError("the logits are not numbers: the model's file is damaged")
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            inverse = np.float32(1) / np.float32(self.temperature)
            scaled = logits * inverse
        if not np.isfinite(inverse) or not np.isfinite(scaled.max()):
            return int(logits.argmax())
        self.rng_state = xorshift64(self.rng_state)
        return pick(softmax(scaled), self.top_p, rand_float(self.rng_state))
