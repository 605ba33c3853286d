"""What a step may spend on prompts, in tokens and seconds, and on writing to disk.

Read `cost.py` next.

Decoding sequences come first. Prompts get the rest of max_step_tokens, and of the longest time that
a step may take while anybody decodes. So a long prompt never stops a running answer
(arXiv:2308.16369). A few rows are always left, so prompts never stop either.
"""

from dataclasses import dataclass

from martlet.sched.cost import CostModel

# Factors on the time of a step that only decodes, measured with bench/stall.py (docs/LOG.md).
MORE = 2.25  # a step with prompts may take so many times as long
CROWDED = 3.0  # or so many times per waiting prompt and decoding sequence, if that is more
MOST = 12.0  # at most; also where a prompt's time to first token is in danger
ROWS = 2  # least rows of a chunk: fewer leave a tile of the attention kernels half empty
ITL_SHARE = 0.9  # of an inter-token target, for a step: the rest is for the cost model's errors
WRITE_SHARE = 0.03  # of the steps' time, for write-behind
MOST_SAVED_S, MOST_PAGES = 0.1, 64  # write-behind: time that is saved up, pages of a plan
PAGE_WEIGHT = 0.2  # of the newest save in the mean time of a page


@dataclass(slots=True)
class StepBudget:
    """Counts down while a step is planned. `seconds` is None where no sequence decodes."""

    cost: CostModel
    page_size: int
    tokens: int
    scores: int  # rows of logits that prompts may ask for, beyond a row per sequence
    seconds: float | None = None
    closed: bool = False  # no prompts in this step, which measures decoding
    layered: bool = False  # a chunk already goes through some layers: at most one per step

    @property
    def is_spent(self) -> bool:
        """Whether no time is left for a prompt."""
        return self.closed or (self.seconds is not None and self.seconds <= 0.0)

    def chunk(self, start: int, remaining: int) -> int:
        """How many of a prompt's remaining positions to compute; 0: no budget is left."""
        if self.closed:
            return 0
        # tokens < 0: a chunk between layers took rows of drafts
        count = max(0, min(remaining, self.tokens))
        if self.seconds is not None:
            within = self.cost.prefill_within(max(0.0, self.seconds), start, count)
            if within < count:  # whole pages, or at least whole tiles of rows
                end = (start + within) // self.page_size * self.page_size
                count = end - start if end >= start + ROWS else within // ROWS * ROWS
        return count

    def least(self, remaining: int) -> int:
        """The positions that the first prompt of a step gets in any case."""
        return 0 if self.closed else max(0, min(remaining, self.tokens, ROWS))

    def layers(self, start: int, count: int, n_layers: int, first: int) -> int:
        """How many layers, from `first` on, a chunk goes through in this step: at least one.

        The remaining layers are spread evenly over the fewest steps that can take them.
        """
        left = n_layers - first
        if self.seconds is None:
            return left
        most = int(max(0.0, self.seconds) * n_layers / self.cost.prefill_s(start, count))
        return -(-left // -(-left // min(max(most, 1), left)))

    def spend(self, start: int, count: int, n_logits: int, share: float = 1.0) -> None:
        """Subtract a span that goes through a share of the layers."""
        self.tokens -= count
        self.scores -= max(0, n_logits - 1)
        if self.seconds is not None:
            self.seconds -= share * self.cost.prefill_s(start, count)


def stall_limit(
    decode_s: float, crowd: float, stall_s: float | None, itl_target_s: float | None, urgent: tuple[float, float] | None
) -> float:
    """Seconds that prompts may add to a step whose decoding part takes `decode_s`.

    `stall_s` and `itl_target_s`, the smallest of the decoding sequences, bound the step. Without
    `stall_s` the step is MORE times the decoding part, or CROWDED times `crowd` (waiting prompts ÷
    decoding sequences) times: each waiting or decoding sequence counts alike. `urgent` is the time
    that a prompt still takes and the time to its deadline. Their ratio is the share of all time
    that the prompt needs; the step grows to give it that share, up to MOST times.
    """
    if stall_s is not None:
        limit = stall_s
    else:
        factor = min(MOST, max(MORE, CROWDED * crowd))
        if urgent is not None:
            left_s, to_deadline_s = urgent
            share = min(1.0, left_s / to_deadline_s) if to_deadline_s > 0.0 else 1.0
            factor = min(MOST, max(factor, 1.0 / max(1.0 - share, 1.0 / MOST)))
        limit = factor * decode_s
    if itl_target_s is not None:
        limit = min(limit, ITL_SHARE * itl_target_s)
    return limit - decode_s


class WriteBehind:
    """Seconds that steps have earned for writing full pages to the second tier.

    A second of steps earns WRITE_SHARE seconds. Unused time is kept, up to MOST_SAVED_SAVED_S. So a
    fast disk takes pages as they are computed, and a slow disk costs no more than the share. Other
    pages are written when nothing runs (`flush_plan`), or at their eviction.
    """

    def __init__(self) -> None:
        self._earned_s = 0.0
        self._page_s: float | None = None  # mean time of a save

    @property
    def most(self) -> int:
        """Pages that the next plan may save; 1 before any save was measured."""
        if self._page_s is None:
            return 1
        return max(0, min(MOST_PAGES, int(self._earned_s / max(self._page_s, 1e-6))))

    def step(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._earned_s = min(MOST_SAVED_S, self._earned_s + WRITE_SHARE * max(0.0, seconds))

    def saved(self, n_pages: int, seconds: float) -> None:
        """A plan's saves took `seconds` in all."""
        if n_pages == 0:
            return
        mean = seconds / n_pages
        self._page_s = mean if self._page_s is None else self._page_s + PAGE_WEIGHT * (mean - self._page_s)
        self._earned_s = max(-MOST_SAVED_S, self._earned_s - seconds)
