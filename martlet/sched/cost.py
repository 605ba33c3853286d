"""What a step costs: two linear models of its time, fitted as it runs (read `queue.py` next).

    decoding  seconds ≈ a₀ + a₁ · rows + a₂ · positions read        steps that only decode
    prompts   seconds ≈ b₀ + b₁ · rows + b₂ · positions read        all others, beyond decoding
                        + b₃ · positions before the chunk           (read once for all its rows)

Two models, so that the time of prompts never passes for the time of decoding: a step's limit is a
multiple of the latter. Each is fitted by Kaczmarz projections in a norm that weighs every
coefficient by its size. A measured step scales the coefficients by the relative error, each by its
share of the prediction. So no coefficient becomes negative or needs a unit, features that always
move together share their cost, and an update is a dozen products.

The time that drafts add to a decoding step is not linear: four rows take little longer than one,
whose time is that of reading the weights, and eight twice as long. `RowTimes` is a table.
"""

import math
from dataclasses import dataclass
from operator import mul

SCALE = 1024.0  # positions are counted in thousands, so all features are of similar size
DECODE_PRIOR, PREFILL_PRIOR = (1e-3, 5e-4, 5e-4), (1e-4, 5e-4, 5e-4, 1e-4)  # s, until measured
# share of a step that a row adds in the first tile, beyond; until measured
A_FEW, MORE = 0.12, 0.25
NEWEST, DRIFT = 0.2, 0.005  # weights of a measurement, and of the prior for other row counts
FAST, SLOW = 1.0, 0.3  # share of the error that an update corrects: the first SETTLED, and later
SETTLED = 8
LEAST = 0.1  # share of a coefficient that an update leaves at least
OUTLIER = 1.0  # relative errors are cut to this: something else ran on the machine
PROBE = 32  # consecutive steps with prompts, after which a step without measures decoding again
LOAD_WEIGHT = 0.2  # of the newest load in the mean time of a page

Features = tuple[float, ...]


@dataclass(slots=True)
class Work:
    """A step's work, in the cost models' features."""

    n_decode: int = 0
    n_prefill: float = 0.0  # rows; through a third of the layers, a third of a row
    decode_reads: int = 0  # positions, summed over rows
    prefill_reads: float = 0.0
    prefill_behind: float = 0.0  # positions before a chunk's end, summed over chunks
    n_draft: int = 0  # rows that verify drafts, beyond n_decode

    def add_chunk(self, start: int, count: int, share: float = 1.0) -> None:
        """Add `count` prompt positions from `start` on, through a share of the layers."""
        self.n_prefill += share * count
        self.prefill_reads += share * (count * start + count * (count + 1) // 2)
        self.prefill_behind += share * (start + count)


class LinearFit:
    """Positive coefficients of features."""

    def __init__(self, prior: Features) -> None:
        self.weights = prior
        self._n_updates = 0

    def predict(self, x: Features) -> float:
        """The seconds of features `x`."""
        return math.fsum(map(mul, self.weights, x))

    def update(self, x: Features, seconds: float) -> None:
        """Learn that `x`, whose first feature is 1, took `seconds`."""
        terms = tuple(map(mul, self.weights, x))
        total = sum(terms)
        error = max(0.0, seconds) / total - 1.0
        rate = SLOW
        if self._n_updates < SETTLED:
            self._n_updates += 1
            rate = FAST
        elif error > OUTLIER:
            error = OUTLIER
        step = rate * error * total / sum(map(mul, terms, terms))
        self.weights = tuple([w * max(LEAST, 1.0 + step * term) for w, term in zip(self.weights, terms, strict=True)])


class RowTimes:
    """Seconds of steps without prompts, by number of rows; beyond two tiles, by number of tiles.

    A tile is the rows that the backend's product computes together (`Abilities.row_tile`).
    """

    def __init__(self, row_tile: int) -> None:
        self._tile = row_tile
        self._times: dict[int, float] = {}

    def predict(self, n_rows: int) -> float:
        """The seconds of a step of `n_rows`, from the nearest measured number of rows."""
        rows = self._rounded(n_rows)
        seconds = self._times.get(rows)
        if seconds is not None:
            return seconds
        if not self._times:
            return self._shape(rows)
        nearest = min(self._times, key=lambda other: abs(other - rows))
        return self._times[nearest] * self._shape(rows) / self._shape(nearest)

    def update(self, n_rows: int, seconds: float) -> None:
        """Learn a step's time; times of other numbers of rows drift towards their shape of it."""
        rows = self._rounded(n_rows)
        old = self._times.get(rows)
        if old is None:
            self._times[rows] = min(seconds, 2.0 * self.predict(n_rows)) if self._times else seconds
            return
        self._times[rows] = new = old + NEWEST * (min(seconds, 2.0 * old) - old)
        for other, time in self._times.items():
            if other != rows:
                self._times[other] = time + DRIFT * (new * self._shape(other) / self._shape(rows) - time)

    def _rounded(self, n_rows: int) -> int:
        return max(1, n_rows) if n_rows <= 2 * self._tile else -(-n_rows // self._tile) * self._tile

    def _shape(self, n_rows: int) -> float:
        """The prior: a step's time relative to a step of a single row."""
        return 1.0 + A_FEW * (n_rows - 1) + (MORE - A_FEW) * max(0, n_rows - self._tile)


class CostModel:
    """Seconds of a step, and of a page's load from the second tier."""

    def __init__(self, row_tile: int = 4) -> None:
        self.row_tile = row_tile
        self._decode = LinearFit(DECODE_PRIOR)
        self._prefill = LinearFit(PREFILL_PRIOR)
        self._rows = RowTimes(row_tile)
        self._load_s: float | None = None  # of a page
        self._blind = PROBE  # steps since the last that only decoded

    @property
    def wants_decode(self) -> bool:
        """Whether a step without prompts is due: mixed steps do not show what decoding takes.

        Underestimated decoding would shorten prompts' time, and overestimate their cost.
        """
        return self._blind >= PROBE

    def decode_s(self, work: Work) -> float:
        """Seconds of a step's decoding rows and drafts, fixed costs included."""
        plain = self._decode.predict((1.0, work.n_decode, work.decode_reads / SCALE))
        if not work.n_draft:
            return plain
        return plain * self.rows_s(work.n_decode + work.n_draft) / self.rows_s(work.n_decode)

    def rows_s(self, n_rows: int) -> float:
        """Recent seconds of a step of `n_rows` without prompts."""
        return self._rows.predict(n_rows)

    def prefill_s(self, start: int, count: int) -> float:
        """Seconds that `count` prompt positions from `start` on add to a step."""
        reads = count * (start + (count + 1) / 2)
        return self._prefill.predict((1.0, count, reads / SCALE, (start + count) / SCALE)) if count else 0.0

    def prefill_within(self, seconds: float, start: int, most: int) -> int:
        """The most prompt positions from `start` on, at most `most`, that add at most `seconds`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.prefill_s(start, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def load_s(self, n_pages: int) -> float:
        """Seconds of loading pages from the second tier; 0 before the first load, to try it."""
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
            page_s = seconds / n_pages
            self._load_s = page_s if self._load_s is None else self._load_s + LOAD_WEIGHT * (page_s - self._load_s)
