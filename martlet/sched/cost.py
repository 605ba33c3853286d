"""What a step costs: two linear models of its time, fitted as it runs (read `budget.py` next, which spends by it).

    decoding  seconds ≈ a₀ + a₁ · rows + a₂ · positions that they read      of steps that only decode
    prompts   seconds ≈ b₀ + b₁ · rows + b₂ · positions that they read      of all others, beyond their decoding part
                        + b₃ · positions that lie before them               (read once for all rows of a chunk)

Two, so that what prompts take never passes for what decoding takes: a step's length is a multiple of the first. Each
is fitted by the projections of Kaczmarz in a norm that weighs every coefficient by its size: a measured step scales the
coefficients by what they got wrong, each by the share that it had in the prediction. So none becomes negative, none
needs a unit, features that always move together share their cost, and an update is a dozen products.

What guesses add to a step that decodes is no line: four rows take little longer than one, whose time is that of reading
the weights, and eight twice as long as one. `RowTimes` is a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

__all__ = ["CostModel", "LinearFit", "RowTimes", "Work"]

SCALE = 1024.0  # positions are counted in thousands, so that all features are of a like size
DECODE_PRIOR, PREFILL_PRIOR = (1e-3, 5e-4, 5e-4), (1e-4, 5e-4, 5e-4, 1e-4)  # seconds; until steps are measured
A_FEW, MORE = 0.12, 0.25  # what a row adds to a step of one row, in the first tile and beyond it, until measured
NEWEST, DRIFT = 0.2, 0.005  # weight of a measurement, and of the prior where nothing is measured any more
FAST, SLOW = 1.0, 0.3  # share of the error that an update corrects: of the first ones, and later
SETTLED = 8  # how many are the first ones
LEAST = 0.1  # of a coefficient is left by an update in any case
OUTLIER = 1.0  # relative error from which on a step counts as having just this: something else ran
PROBE = 32  # steps with prompts in a row, after which one without shows again what decoding takes
LOAD_WEIGHT = 0.2  # of the newest measurement in the mean time of a page's load

Features = tuple[float, ...]


@dataclass(slots=True)
class Work:
    """What a step computes."""

    n_decode: int = 0
    n_prefill: float = 0.0  # a chunk that goes through a third of the layers counts a third, here and below
    decode_reads: int = 0  # positions, over all rows
    prefill_reads: float = 0.0
    prefill_behind: float = 0.0  # positions before a chunk's end, over all chunks
    n_draft: int = 0  # rows that verify guesses, beside those of n_decode

    def add_chunk(self, start: int, count: int, share: float = 1.0) -> None:
        """`count` prompt positions from `start` on, through a share of the layers."""
        self.n_prefill += share * count
        self.prefill_reads += share * (count * start + count * (count + 1) // 2)
        self.prefill_behind += share * (start + count)


class LinearFit:
    """Positive coefficients of some features."""

    def __init__(self, prior: Features) -> None:
        self.weights = prior
        self._n_updates = 0

    def predict(self, x: Features) -> float:
        """Seconds."""
        return math.fsum(map(mul, self.weights, x))

    def update(self, x: Features, seconds: float) -> None:
        """Learn that `x`, whose first feature is 1, took `seconds`."""
        parts = tuple(map(mul, self.weights, x))
        total = sum(parts)
        error = max(0.0, seconds) / total - 1.0
        rate = SLOW
        if self._n_updates < SETTLED:
            self._n_updates += 1
            rate = FAST
        elif error > OUTLIER:
            error = OUTLIER
        step = rate * error * total / sum(map(mul, parts, parts))
        self.weights = tuple([w * max(LEAST, 1.0 + step * part) for w, part in zip(self.weights, parts, strict=True)])


class RowTimes:
    """Seconds of steps without prompts, by the number of their rows, and beyond two tiles by that of tiles.

    A tile is the rows that the backend's product computes together (`Abilities.row_tile`).
    """

    def __init__(self, row_tile: int) -> None:
        self._tile = row_tile
        self._times: dict[int, float] = {}

    def predict(self, n_rows: int) -> float:
        """Seconds; of a number that was never measured, by the nearest that was."""
        place = self._place(n_rows)
        found = self._times.get(place)
        if found is not None:
            return found
        if not self._times:
            return self._shape(place)
        nearest = min(self._times, key=lambda other: abs(other - place))
        return self._times[nearest] * self._shape(place) / self._shape(nearest)

    def update(self, n_rows: int, seconds: float) -> None:
        """Learn that a step of so many rows took `seconds`; what others are known for drifts to what that lets expect."""
        place = self._place(n_rows)
        old = self._times.get(place)
        if old is None:
            self._times[place] = min(seconds, 2.0 * self.predict(n_rows)) if self._times else seconds
            return
        self._times[place] = new = old + NEWEST * (min(seconds, 2.0 * old) - old)
        for other, time in self._times.items():
            if other != place:
                self._times[other] = time + DRIFT * (new * self._shape(other) / self._shape(place) - time)

    def _place(self, n_rows: int) -> int:
        return max(1, n_rows) if n_rows <= 2 * self._tile else -(-n_rows // self._tile) * self._tile

    def _shape(self, place: int) -> float:
        return 1.0 + A_FEW * (place - 1) + (MORE - A_FEW) * max(0, place - self._tile)


class CostModel:
    """Seconds of a step, and of a page's way back from the second tier."""

    def __init__(self, row_tile: int = 4) -> None:
        self.row_tile = row_tile
        self._decode = LinearFit(DECODE_PRIOR)
        self._prefill = LinearFit(PREFILL_PRIOR)
        self._rows = RowTimes(row_tile)
        self._load_s: float | None = None  # of one page
        self._blind = PROBE  # steps since one that only decoded

    @property
    def wants_decode(self) -> bool:
        """Whether it is time for a step without prompts: from mixed steps alone nobody can tell what decoding takes.

        Taken for too short, it would leave prompts too little time, and what they then take would be blamed on them.
        """
        return self._blind >= PROBE

    def decode_s(self, work: Work) -> float:
        """What a step takes for its decoding rows and their drafts, and for being a step."""
        plain = self._decode.predict((1.0, work.n_decode, work.decode_reads / SCALE))
        if not work.n_draft:
            return plain
        return plain * self.rows_s(work.n_decode + work.n_draft) / self.rows_s(work.n_decode)

    def rows_s(self, n_rows: int) -> float:
        """What a step of so many rows without prompts takes, of late."""
        return self._rows.predict(n_rows)

    def prefill_s(self, start: int, count: int) -> float:
        """What computing `count` prompt positions from `start` on adds to a step."""
        reads = count * (start + (count + 1) / 2)
        return self._prefill.predict((1.0, count, reads / SCALE, (start + count) / SCALE)) if count else 0.0

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
        self._blind = self._blind + 1 if work.n_prefill else 0
        if work.n_prefill:
            x = 1.0, work.n_prefill, work.prefill_reads / SCALE, work.prefill_behind / SCALE
            self._prefill.update(x, seconds - self.decode_s(work))
            return
        self._rows.update(work.n_decode + work.n_draft, seconds)
        if not work.n_draft:
            self._decode.update((1.0, work.n_decode, work.decode_reads / SCALE), seconds)

    def observe_load(self, n_pages: int, seconds: float) -> None:
        """Learn from loads that took `seconds` in all."""
        if n_pages > 0 and seconds > 0.0:
            found = seconds / n_pages
            self._load_s = found if self._load_s is None else self._load_s + LOAD_WEIGHT * (found - self._load_s)
