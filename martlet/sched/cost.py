"""What a step costs: a linear model of its time, fitted as it runs (read `budget.py` next, which spends by it).

    seconds ≈ c₀ + c₁ · rows that decode + c₂ · rows of prompts + c₃ · positions that decoding rows read
              + c₄ · positions that prompt rows read

Recursive least squares with forgetting: each measured step corrects the coefficients by what they got wrong, weighted
by how little is known of each. Five features, so an update is 25 products; a step that only decodes says the same as
the last one, and most of those are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CostModel", "Work"]

PRIOR = (1e-3, 5e-4, 5e-4, 1e-3, 1e-3)  # seconds; only until the first steps are measured
SCALE = 1024.0  # positions are counted in thousands, so that all features are of a like size
FORGET = 0.98  # weight of the past at each update
LARGEST = 1.0  # of a variance: what is never seen must not become infinitely uncertain
SHORTEST_S = 1e-5  # errors count relative to a step's time, which is at least this
OUTLIER = 4.0  # a step that took so many times what was predicted counts as one that took this
SETTLED = 16  # updates after which steps that only decode are sampled
SAMPLED = 8  # one in so many of them is used
LOAD_WEIGHT = 0.2  # of the newest measurement in the mean time of a page's load


@dataclass(slots=True)
class Work:
    """What a step computes, as the model's features."""

    n_decode: int = 0
    n_prefill: int = 0
    decode_reads: int = 0
    prefill_reads: int = 0

    def features(self) -> tuple[float, float, float, float, float]:
        """One number a coefficient."""
        return 1.0, self.n_decode, self.n_prefill, self.decode_reads / SCALE, self.prefill_reads / SCALE


class CostModel:
    """Seconds of a step, and of a page's way back from the second tier."""

    def __init__(self) -> None:
        self._weights = list(PRIOR)
        size = len(PRIOR)
        self._variance = [[LARGEST if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._updates = 0
        self._skipped = 0
        self._load_s: float | None = None  # of one page

    def predict(self, work: Work) -> float:
        """Seconds that the step takes."""
        return max(0.0, sum(w * x for w, x in zip(self._weights, work.features(), strict=True)))

    def prefill_s(self, start: int, count: int) -> float:
        """What computing `count` prompt positions from `start` on adds to a step."""
        _, _, row, _, read = self._weights
        return max(row, 0.0) * count + max(read, 0.0) * count * (start + (count + 1) / 2) / SCALE

    def prefill_within(self, seconds: float, start: int, most: int) -> int:
        """The largest number of prompt positions from `start` on, at most `most`, that add at most `seconds`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.prefill_s(start, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def load_s(self, n_pages: int) -> float:
        """What loading pages from the second tier takes; nothing is known before the first load, which is tried."""
        return 0.0 if self._load_s is None else self._load_s * n_pages

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        if seconds <= 0.0:
            return
        if work.n_prefill == 0 and self._updates >= SETTLED:
            self._skipped += 1
            if self._skipped % SAMPLED:
                return
        expected = self.predict(work)
        if self._updates >= SETTLED:
            seconds = min(seconds, OUTLIER * max(expected, PRIOR[0]))
        self._updates += 1
        scale = 1.0 / max(seconds, SHORTEST_S)  # a long step must not outweigh a hundred short ones
        self._update(tuple(x * scale for x in work.features()), seconds * scale)

    def observe_load(self, n_pages: int, seconds: float) -> None:
        """Learn from loads that took `seconds` in all."""
        if n_pages > 0 and seconds > 0.0:
            found = seconds / n_pages
            self._load_s = found if self._load_s is None else self._load_s + LOAD_WEIGHT * (found - self._load_s)

    def _update(self, x: tuple[float, ...], target: float) -> None:
        variance, size = self._variance, len(x)
        gain = [sum(row[j] * x[j] for j in range(size)) for row in variance]
        denominator = FORGET + sum(x[i] * gain[i] for i in range(size))
        error = target - sum(w * v for w, v in zip(self._weights, x, strict=True))
        for i in range(size):
            share = gain[i] / denominator
            self._weights[i] += share * error
            row = variance[i]
            for j in range(size):
                row[j] = (row[j] - share * gain[j]) / FORGET
        for i in range(size):  # nothing seen of a feature for long: stop its variance from growing
            if variance[i][i] > LARGEST:
                factor = (LARGEST / variance[i][i]) ** 0.5
                for j in range(size):
                    variance[i][j] *= factor
                    variance[j][i] *= factor
